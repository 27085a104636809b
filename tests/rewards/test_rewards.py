"""Rule-based rewards: values worked out by hand, laws, and the properties every registered reward shares."""

import inspect
import json

import pytest
import trl.rewards
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.text import TAGS, answer_block, boxed, completion_text

GOOD = "<think>\nreason\n</think>\n<answer>\n42\n</answer>"
INLINE = "<think>reason</think> <answer>42</answer>"
TAG_SOUP = st.lists(st.sampled_from([*TAGS, "\n", "a", " "]), max_size=25).map("".join)


def test_every_reward_follows_trls_protocol():
    assert {"format", "tags", "accuracy", "reasoning_steps", "soft_overlong", "repetition"} < set(rewards)
    for name, function in rewards.items():
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD in kinds, name
        assert function.__doc__, name
        if name != "get_soft_overlong_punishment":  # logged under TRL's name for it
            assert function.__name__ == name


# Text of a completion and the marks in it


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "a"}], "a"),
        ([{"content": "a"}], "a"),
        ([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}], "a"),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "b"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant"}], ""),
        ([{"role": "tool", "content": "t"}], ""),
        ([], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}], "ab"),
    ],
)
def test_text_of_a_completion(completion, text):
    assert completion_text(completion) == text


def test_marks():
    assert answer_block("<answer> a </answer><answer>b</answer>") == "b"
    assert answer_block("<answer>a<answer>b</answer>") == "b"
    assert answer_block("<answer>a") is None
    assert boxed(r"\boxed{1} \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1} \boxed{2") == "1"
    assert boxed(r"\boxed{\{1\}} }") == r"\{1\}"
    assert boxed(r"\fbox {3}") == "3"
    assert boxed("{1}") is None


# format


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("think_answer", GOOD, 1.0),
        ("think_answer", GOOD.replace("</think>\n", "</think>\n\n"), 1.0),
        ("think_answer", GOOD.replace("</think>\n", "</think>\n\n\n"), 0.0),
        ("think_answer", GOOD.replace("</think>\n", "</think>"), 0.0),
        ("think_answer", GOOD + "\n", 0.0),
        ("think_answer", GOOD + " text", 0.0),
        ("think_answer", GOOD + "\n" + GOOD, 0.0),
        ("think_answer", " " + GOOD, 0.0),
        ("think_answer", "a\n" + GOOD, 0.0),
        ("think_answer", GOOD.replace("reason", "<think>\nreason"), 0.0),
        ("think_answer", GOOD.replace("42", "42\n</answer>"), 0.0),
        ("think_answer", INLINE, 0.0),
        ("think_answer", GOOD.replace("reason", "two\nlines"), 1.0),
        ("think_answer_inline", INLINE, 1.0),
        ("think_answer_inline", GOOD + "\n", 1.0),
        ("think_answer_inline", INLINE + " text", 0.0),
        ("think_answer_inline", INLINE.replace("> <", "> or <"), 0.0),
        ("think_answer_inline", INLINE.replace("42", "42</answer>"), 0.0),
        ("think_answer_inline", "<answer>42</answer><think>reason</think>", 0.0),
        ("think", "<think>reason</think>42", 1.0),
        ("think", "<think>\nreason\n</think>\n\nSo 42.", 1.0),
        ("think", "<think>reason</think>\n ", 0.0),
        ("think", "reason</think>42", 0.0),
        ("think", "a <think>reason</think>42", 0.0),
        ("think", "<think><think>reason</think>42", 0.0),
        ("think", "<think>reason</think>42</think>", 0.0),
        ("answer", "reason <answer>42</answer>\n", 1.0),
        ("answer", "<answer>42</answer>", 1.0),
        ("answer", "<answer> </answer>", 0.0),
        ("answer", "<answer>42</answer> text", 0.0),
        ("answer", "</answer>42<answer>", 0.0),
        ("answer", "<answer>41</answer><answer>42</answer>", 0.0),
        ("boxed", r"so \boxed{42}.", 1.0),
        ("boxed", r"so \boxed{\frac{1}{2}}", 1.0),
        ("boxed", r"so \boxed{}", 0.0),
        ("boxed", r"so \boxed{42", 0.0),
        ("boxed", "so 42", 0.0),
        ("boxed", r"so \boxed{40} and then \boxed{42}", 1.0),
        ("boxed", r"so \boxed{\boxed{42}}", 0.0),
        ("boxed", r"\boxed{40 \boxed{42}", 0.0),  # what a policy came to write that was paid for it
        ("boxed", r"\boxed{42}. \boxed{\boxed{", 0.0),
    ],
)
def test_format_by_hand(style, text, expected):
    assert rewards["format"](completions=[text], style=style) == [expected]
    assert rewards["format"](completions=[[{"role": "assistant", "content": text}]], style=style) == [expected]


@given(TAG_SOUP)
def test_a_full_format_has_every_tag_once(text):
    strict, inline = (rewards["format"](completions=[text], style=s) for s in ("think_answer", "think_answer_inline"))
    assert strict <= inline <= rewards["tags"](completions=[text])
    assert inline == [0.0] or [text.find(tag) for tag in TAGS] == sorted(text.find(tag) for tag in TAGS)


PYTHON = GOOD.replace("42", "```python\nprint(1)\n```")
CPP = PYTHON.replace("python", "cpp")


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        (PYTHON, {}, 1.0),
        (
            PYTHON.replace("```python", "text\n```python").replace("```\n<", "``` more\n<"),
            {"language": ["python"]},
            1.0,
        ),
        (CPP, {}, 0.0),
        (CPP, {"language": ["cpp"]}, 1.0),
        (CPP, {"language": [None], "default_language": "cpp"}, 1.0),
        (CPP, {"language": ["java"], "default_language": "cpp"}, 0.0),
        (PYTHON.replace("\n```\n", "\n"), {}, 0.0),  # never closed
        (PYTHON + "\nmore", {}, 1.0),  # as Open-R1's $ lets it
        (PYTHON + " more", {}, 0.0),
        ("x" + PYTHON, {}, 0.0),
        ("```python\nprint(1)\n```", {}, 0.0),
    ],
)
def test_code_format_by_hand(text, options, value):
    assert rewards["code_format"](completions=[text], **options) == [value]


# tags, steps, lengths, repetition


@pytest.mark.parametrize(
    ("text", "plain", "with_newlines"),
    [
        (GOOD, 1.0, 1.0),
        (INLINE, 1.0, 0.0),
        ("", 0.0, 0.0),
        (GOOD + GOOD, 0.0, 0.0),
        ("<think>\n", 0.25, 0.25),
        ("<think>\nr\n</think>\n", 0.5, 0.5),
        ("<think><think></think>", 0.25, 0.0),
        (GOOD.replace("\n<answer>\n", "\n\n<answer> "), 1.0, 0.75),
    ],
)
def test_tags_by_hand(text, plain, with_newlines):
    assert rewards["tags"](completions=[text]) == [plain]
    assert rewards["tags"](completions=[text], newlines=True) == [with_newlines]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("", 0),
        ("it is 3.14 and - no", 0),
        ("Step 1: a", 1),
        ("Step 1: a\nStep 2: b", 2),
        ("1. a\n2. b\n3. c", 3),
        ("- a\n* b\n  • c", 3),
        ("First, a. Next, b. Finally, c.", 3),
        ("At first we look.", 0),
        ("**bold** text", 0),
        ("1. a\n2. b\n3. c\n4. d\n5. e", 5),
    ],
)
def test_reasoning_steps_by_hand(text, steps):
    assert rewards["reasoning_steps"](completions=[text]) == [pytest.approx(min(1.0, steps / 3))]


def test_soft_overlong_by_hand():
    lengths = [0, 60, 80, 81, 90, 100, 101, 200]
    ids = [[1] * n for n in lengths]
    assert rewards["soft_overlong"](completion_ids=ids, max_length=100, buffer=20) == [
        0.0, 0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0,
    ]  # fmt: skip


@given(st.integers(1, 50), st.integers(0, 50), st.lists(st.integers(0, 120), min_size=1))
def test_soft_overlong_falls_with_the_length_and_agrees_with_trl(buffer, rest, lengths):
    ids = [[0] * n for n in sorted(lengths)]
    values = rewards["soft_overlong"](completion_ids=ids, max_length=buffer + rest, buffer=buffer)
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(trl.rewards.get_soft_overlong_punishment(buffer + rest, buffer)(completion_ids=ids))


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a b c d e", {}, 0.0),
        ("a b", {}, 0.0),
        ("", {}, 0.0),
        ("a a a a a a", {}, -0.75),
        ("a b a b a b", {}, -0.5),
        ("A b a B a b", {"max_penalty": -2.0}, -1.0),
        ("a a a", {"n": 1, "max_penalty": -0.3}, -0.2),
        ("a a a a a", {"n": 2, "max_penalty": -1.0}, -0.75),
    ],
)
def test_repetition_by_hand(text, options, expected):
    assert rewards["repetition"](completions=[text], **options) == [pytest.approx(expected)]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_agrees_with_trl_on_words_as_tokens(ids, n):
    ours = rewards["repetition"](completions=[" ".join(map(str, ids))], n=n, max_penalty=-0.7)
    assert ours == pytest.approx(trl.rewards.get_repetition_penalty_reward(n, -0.7)(completion_ids=[ids]))


# TRL's own names


def test_trl_names_are_trls_functions():
    conversations = [
        [{"role": "assistant", "content": f"<think>r</think> so {a}"}] for a in (r"\boxed{72}", r"\boxed{7}")
    ]
    columns = {"prompts": ["q", "q"], "completions": conversations, "completion_ids": [[1] * 1152, [1]]}
    for name in ("accuracy_reward", "reasoning_accuracy_reward"):
        logged = {}
        assert rewards[name](**columns, solution=["$72$"] * 2, log_extra=logged.__setitem__) == [1.0, 0.0]
        assert "gold_parsed" in logged
    assert rewards["think_format_reward"](**columns) == [1.0, 1.0]
    delimited = rewards["reasoning_accuracy_reward"](**columns, solution=["$72$"] * 2, reasoning_delimiters=["[/T]"])
    assert delimited == [0.0, 0.0]
    punishment = rewards["get_soft_overlong_punishment"]
    assert punishment(**columns) == [-0.5, 0.0]  # 1280 - 256 = 1024 tokens are free
    assert punishment(**columns, max_completion_len=1152, soft_punish_cache=128) == [-1.0, 0.0]
    assert punishment.__name__ == trl.rewards.get_soft_overlong_punishment(1, 1).__name__


# reasoning-gym


def gym_entry(task, seed=3):
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=seed)[0]


@pytest.mark.extra("tasks")
@pytest.mark.parametrize(
    ("extract", "expected"), [("answer", [1.0, 0.0]), ("text", [0.0, 0.0]), ("last_line", [0.0, 1.0])]
)
def test_reasoning_gym_extracts_as_told(extract, expected):
    entry = gym_entry("leg_counting")
    completions = [f"so\n<answer>{entry['answer']}</answer>\nis it", f"so it is\n{entry['answer']}\n"]
    column = [json.dumps(entry)] * 2
    scores = rewards["reasoning_gym"](completions=completions, reasoning_gym_entry=column, extract=extract)
    assert [float(score == 1.0) for score in scores] == expected


@pytest.mark.extra("tasks")
@pytest.mark.parametrize("entry", [None, "", "{}", '{"metadata": {"source_dataset": "no_such_task"}}', "[]"])
def test_reasoning_gym_gives_none_for_an_entry_it_cannot_use(entry):
    assert rewards["reasoning_gym"](completions=["1"], reasoning_gym_entry=[entry]) == [None]
