"""The law of the zero: no answer turns its 0 into None or an exception; a wrong reference, schema or judge does."""

import json
from functools import partial

import pytest

from grpo_ext.environments.library.guess import Guess
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library import answers
from grpo_ext.rewards.library.functions import FORMAT_STYLES

RECURSIVE = {"type": ["array", "null"], "items": {"$ref": "#"}}
SCHEMAS = {
    "object": {"type": "object", "additionalProperties": False},
    "recursive": RECURSIVE,
    "minimum": {"type": ["number", "null"], "minimum": 5},
    "multiple": {"multipleOf": 0.5, "uniqueItems": True},
    "pattern": {"pattern": r"^(a+)+$", "patternProperties": {r"^(a|a)*$": {}}},
}
TEXTS = {
    "empty": "", "long": "a " * 50_000, "deep": "[" * 800 + "]" * 800, "deeper": "[" * 50_000,
    "braces": '{"a":' * 900 + "1" + "}" * 900,
    "boxes": "\\boxed{" * 5_000, "nan": "NaN", "infinity": "-Infinity", "1e999": "1e999", "-1e999": "[-1e999]",
    "huge": "1" + "0" * 4_000, "beyond": "9" * 5_000, "digits": "٣" * 5_000,
    "surrogate": "\ud800\udfff", "escaped": '"\\ud800"', "nul": "\0B\0",
    "marks": "\u202e\u200fB\u2066", "combining": "a" + "\u0300\u0316" * 40_000, "backtracking": '"' + "a" * 40 + '!"',
    "keys": '{"' + "a" * 40 + '!": 1}', "pairs": "[" + '1, "a", ' * 9_000 + "{}]",
    "tags": "<think></think><answer></answer>",
    "fences": "<think>\n" + "\n</think>\n<answer>\n```python```" * 3_000,
}  # fmt: skip
FORMS = {
    "text": lambda text: text,
    "message": lambda text: [{"role": "assistant", "content": text}],
    "parts": lambda text: [{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": text}]}],
    "call": lambda text: [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": text[:9]}}]}],
    "nothing": lambda text: [],
}
COLUMNS = {"prompts": ["q"], "solution": ["72"], "completion_ids": [[7]]}
REWARDS = {
    **{f"format {style}": partial(rewards["format"], style=style) for style in FORMAT_STYLES},
    **{f"json_schema {name}": partial(rewards["json_schema"], default_schema=s) for name, s in SCHEMAS.items()},
    **{
        name: rewards[name]
        for name in ("accuracy", "exact_match", "tags", "code_format", "reasoning_steps", "repetition", "minimind")
    },
    **{
        name: rewards[name]
        for name in ("minimind_current", "language_consistency", "think_format_reward", "last_number")
    },
    **{name: rewards[name] for name in ("accuracy_reward", "reasoning_accuracy_reward")},
    "multiple_choice": partial(rewards["multiple_choice"], solution=["B"]),
    "cosine_length": partial(rewards["cosine_length"], max_length=9),
    "soft_overlong": partial(rewards["soft_overlong"], max_length=9, buffer=3),
    "length_penalty": partial(rewards["length_penalty"], target=9),
    "get_soft_overlong_punishment": rewards["get_soft_overlong_punishment"],
}
JUDGED_ELSEWHERE = {"reasoning_gym", "reward_model", "remote", "code", "random"}
"""By a verifier, a model, a server, a sandbox, a hash."""


def test_every_reward_is_under_the_law():
    assert {name.partition(" ")[0] for name in REWARDS} == set(rewards) - JUDGED_ELSEWHERE


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", REWARDS)
def test_a_hostile_completion_has_a_score(name, monkeypatch):
    monkeypatch.setattr(answers, "CHECK_SECONDS", 0.1)
    columns = {k: v for k, v in COLUMNS.items() if k != "solution" or name != "multiple_choice"}
    unscored = []
    for what, text in TEXTS.items():
        for form, made in FORMS.items():
            [score] = REWARDS[name](completions=[made(text)], **columns)
            unscored += [(what, form)] if score is None else []
    assert unscored == []


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("[" * 800 + "]" * 800, RECURSIVE),
        ("1e999", {"minimum": 5}),
        ("1e999", {"multipleOf": 2}),
        ("[1, 1e999]", {"type": "array"}),
        ("1" + "0" * 4_000, {"multipleOf": 0.5}),
        ('"' + "a" * 40 + '!"', {"pattern": "^(a+)+$"}),
        ("[1, 1.0]", {"uniqueItems": True}),
        ('[{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]', {"uniqueItems": True}),
    ],
)
def test_an_answer_that_cannot_be_checked_scores_zero(text, schema):
    assert rewards["json_schema"](completions=[text], schema=[json.dumps(schema)]) == [0.0]


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("[1, true, 2.5]", {"uniqueItems": True}),
        ("1e3", {"type": "integer", "multipleOf": 10}),
        ("2.5", {"minimum": 2}),
    ],
)
def test_numbers_and_unique_items_that_fit(text, schema):
    assert rewards["json_schema"](completions=[text], schema=[schema]) == [1.0]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"items": {"$ref": "#/no"}},
    ],
)
@pytest.mark.parametrize("text", ["1", "[1]", "{}", "[[[]]]"])
def test_a_faulty_schema_scores_nothing_whatever_the_answer(schema, text):
    assert rewards["json_schema"](completions=[text], schema=[schema]) == [None]


def test_a_number_beyond_pythons_reading_is_a_guess():
    assert Guess().step({"role": "assistant", "content": "9" * 5_000}).observation == "lower"


# End tokens in saved text

ENDS = [
    "<|im_end|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|return|>",
]
LAYOUT = "<think>\nr\n</think>\n<answer>\n{}\n</answer>"
SCORED_ONE = [
    ("format", LAYOUT.format("B"), {}),
    ("format", "<think>r</think>B", {"style": "think"}),
    ("format", "r<answer>B</answer>", {"style": "answer"}),
    ("format", "<think>r</think><answer>B</answer>", {"style": "think_answer_inline"}),
    ("code_format", LAYOUT.format("```python\n1\n```"), {}),
    ("multiple_choice", "B", {"solution": ["B"]}),
    ("exact_match", "Paris", {"solution": ["Paris"]}),
    ("json_schema", '{"x": 1}', {"default_schema": {"type": "object"}}),
]


@pytest.mark.parametrize("end", [*ENDS, "<|im_end|>\n<|endoftext|>\n"])
@pytest.mark.parametrize(("name", "text", "options"), SCORED_ONE)
def test_end_tokens_behind_a_text_change_no_score(name, text, options, end):
    assert rewards[name](completions=[text], **options) == [1.0]
    assert rewards[name](completions=[text + end], **options) == [1.0]
    assert rewards["format"](completions=[LAYOUT.format("B") + end + "x"]) == [0.0]


@pytest.mark.parametrize("content", ["", " ", "\n", "\n\n", "\n \n"])
@pytest.mark.parametrize("style", FORMAT_STYLES)
def test_an_empty_layout_scores_zero(style, content):
    text = f"<think>{content}</think>\n<answer>{content}</answer>"
    assert rewards["format"](completions=[text], style=style) == [0.0]
    for filled in (
        f"<think>{content}</think>\n<answer>\nB\n</answer>",
        f"<think>\nr\n</think>\n<answer>{content}</answer>",
    ):
        if style in ("think_answer", "think_answer_inline"):
            assert rewards["format"](completions=[filled], style=style) == [0.0]


@pytest.mark.parametrize("text", [LAYOUT.format("```python```"), LAYOUT.format("```python\n1\n```").replace("r", " ")])
def test_an_empty_code_layout_scores_zero(text):
    assert rewards["code_format"](completions=[text]) == [0.0]
