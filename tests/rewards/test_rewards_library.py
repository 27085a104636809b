"""Lengths, languages, exact answers, letters and JSON: values worked out by hand, and laws."""

import json
import math

import pytest
import trl.rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.library.answers import choice

cosine_length, length_penalty = rewards["cosine_length"], rewards["length_penalty"]
language_consistency = rewards["language_consistency"]
exact_match, multiple_choice, json_schema = rewards["exact_match"], rewards["multiple_choice"], rewards["json_schema"]


def tokens(*lengths: int) -> list[list[int]]:
    return [[7] * n for n in lengths]


# cosine_length


def test_cosine_length_by_hand():
    lengths = [0, 25, 50, 75, 100, 300]  # of 100: cos 0, pi/4, pi/2, 3pi/4, pi, pi
    half = math.sqrt(0.5)
    values = {"min_value_correct": 0.2, "max_value_correct": 1.0, "min_value_wrong": -1.0, "max_value_wrong": -0.4}
    columns = {"solution": ["72"] * 6, "completion_ids": tokens(*lengths), "max_length": 100, **values}
    assert cosine_length(completions=["It is 72."] * 6, **columns) == pytest.approx(
        [1.0, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half, 0.2, 0.2]
    )
    assert cosine_length(completions=["It is 73."] * 6, **columns) == pytest.approx(
        [-1.0, -0.7 - 0.3 * half, -0.7, -0.7 + 0.3 * half, -0.4, -0.4]
    )
    assert cosine_length(completions=["72"], solution=[None], completion_ids=tokens(1), max_length=9) == [None]
    copied = {"completions": [r"\boxed{876+530}"], "solution": ["1406"], "prompts": ["What is 876+530?"]}
    assert cosine_length(**copied, completion_ids=tokens(0), max_length=9) == [-1.0]  # as `accuracy` judges it


@given(st.lists(st.integers(0, 300), min_size=1), st.integers(1, 200))
def test_cosine_length_agrees_with_trl_and_is_monotone(lengths, max_length):
    lengths = sorted(lengths)
    for text, order in ((r"\boxed{72}", -1), (r"\boxed{73}", 1)):
        chats = [[{"role": "assistant", "content": text}]] * len(lengths)
        columns = {"completions": chats, "solution": ["$72$"] * len(lengths), "completion_ids": tokens(*lengths)}
        ours = cosine_length(**columns, max_length=max_length)
        assert ours == pytest.approx(trl.rewards.get_cosine_scaled_reward(max_length)(**columns))
        assert ours == sorted(ours, reverse=order < 0)
        assert all(0.5 <= v <= 1 if order < 0 else -1 <= v <= -0.5 for v in ours)


# length_penalty


def test_length_penalty_by_hand():
    ids = tokens(0, 10, 11, 30, 60, 61, 999)
    assert length_penalty(completion_ids=ids, target=10, per_token=0.01, max_penalty=-0.5) == pytest.approx(
        [0.0, 0.0, -0.01, -0.2, -0.5, -0.5, -0.5]
    )
    assert length_penalty(completion_ids=tokens(2000), target=1000) == [-1.0]
    assert length_penalty(completion_ids=tokens(1500), target=1000) == [-0.5]


# language_consistency


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("plain words", {}, 1.0),
        ("naïve café", {}, 1.0),
        ("ab中文", {}, 0.5),
        ("ab中文", {"language": "zh"}, 0.5),
        ("中文。。 123 !", {"language": "zh"}, 1.0),
        ("ひらがなカタカナ漢字", {"language": "ja"}, 1.0),
        ("ひら漢字", {"language": "zh"}, 0.5),
        ("ﾊﾛｰ人々", {"language": "ja"}, 1.0),
        ("привет abc", {"language": "ru"}, 6 / 9),
        ("\u03b1\u03b2", {"language": "el"}, 1.0),
        ("한국어", {"language": "ko"}, 1.0),
        ("\uff41\uff42", {}, 1.0),  # full width
        ("\u03b1\u03b2ab中", {"scripts": ["greek", "LATIN"]}, 0.8),
        ("\u03b1\u03b2ab", {"scripts": ["CYRILLIC"]}, 0.0),
        ("中 `code words` 文", {"language": "zh"}, 1.0),
        ("中\n```python\nprint(1)\n```\n文", {"language": "zh"}, 1.0),
        ("中\n```python\nprint(1)", {"language": "zh"}, 1.0),
        (r"中 $\alpha x$ 文 \(y\) \[z^2\] $$q$$ \boxed{3}", {"language": "zh"}, 1.0),
        ("<think>中</think><answer>文</answer>", {"language": "zh"}, 1.0),
        ("中 https://example.com/page 文", {"language": "zh"}, 1.0),
        ("it costs $5\nand $6\n中", {}, 10 / 11),
        ("123 + 4", {}, 0.0),
        ("", {}, 0.0),
        ("$x$", {}, 0.0),
    ],
)
def test_language_consistency_by_hand(text, options, expected):
    assert language_consistency(completions=[text], **options) == [expected and pytest.approx(expected)]


@settings(deadline=10_000)  # in milliseconds; a second reading of the text for each of its marks would take minutes
@given(st.text("$\\([])`x ", max_size=400))
def test_language_consistency_is_quick_on_broken_markup(text):
    [share] = language_consistency(completions=[text * 50])
    assert share is None or 0 <= share <= 1


# exact_match


@pytest.mark.parametrize(
    ("text", "gold", "options", "expected"),
    [
        ("Paris", "Paris", {}, 1.0),
        ("  Paris \n", "Paris", {}, 1.0),
        ("  Paris", "Paris", {"strip": False}, 1.0),  # an answer never carries outer white space
        ("New  York", "New York", {}, 1.0),
        ("New  York", "New York", {"strip": False}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("Paris.", "Paris", {}, 0.0),
        ("Paris.", "Paris", {"ignore_punctuation": True}, 1.0),
        ("“Paris”", "Paris!", {"ignore_punctuation": True}, 1.0),
        ("cafe\u0301", "caf\u00e9", {}, 1.0),
        ("I think <answer> Paris </answer> is it", "Paris", {}, 1.0),
        ("<think>London</think>Paris", "Paris", {}, 1.0),
        ("<think><answer>Paris</answer></think>London", "Paris", {}, 0.0),
        ("The answer is Paris", "Paris", {}, 0.0),
        ("42", 42, {}, 1.0),
        ("", "Paris", {}, 0.0),
        ("Paris", None, {}, None),
        ("", "", {}, None),
        ("!", "?!", {"ignore_punctuation": True}, None),
    ],
)
def test_exact_match_by_hand(text, gold, options, expected):
    assert exact_match(completions=[text], solution=[gold], **options) == [expected]


# multiple_choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("(b)", "B"), ("[B]", "B"), ("B.", "B"), ("B:", "B"), ("**B**", "B"),
        ("$B$", "B"), ("B) the cat", "B"), ("(B) the cat", "B"), ("B. the cat", "B"), ("**B.** the cat", "B"),
        (r"\boxed{B}", "B"), (r"\boxed{(B)}", "B"), (r"\boxed{\text{B}}", "B"), (r"\boxed{B) the cat}", "B"),
        (r"So $\boxed{\textbf{(B)}}$.", "B"), (r"A or C? \boxed{B}", "B"), (r"\boxed{A} no, \boxed{B}", None),
        ("Answer: B", "B"), ("answer: (b)", "B"), ("**Answer:** B", "B"), ("**Answer: B**", "B"), ("Answer = B", "B"),
        ("The answer is B.", "B"), ("The correct answer is (B) the cat.", "B"), ("I choose option B", "B"),
        ("The answer is A. No, the answer is B.", None), ("Final choice: **(B)**", "B"),
        (r"The answer is \text{B}", "B"),
        ("First we think.\nA is wrong.\nB", "B"), ("It is warm.\n(B)", "B"), ("text\nB) the cat", "B"),
        ("<think>A</think>\nB", "B"), ("<think>Answer: A</think><answer>B</answer>", "B"),
        ("<answer>\n(B)\n</answer>", "B"),
        ("<answer>A dog</answer>", None), ("A dog", None), ("A", "A"), ("", None), ("F", None),
        ("cat", None), ("Because", None),
        ("A and B", None), ("A, B", None), ("(A) or (B)", None), ("A/B", None), ("Answer: A and B", None),
        ("Answer: A, C", None), (r"\boxed{A, B}", None), (r"\boxed{7}", None), ("The answer is a cat", None),
        ("The answer is Bob", None), ("B's", None), ("AB", None), ("Answer: B, because it is red", None),
        ("Answer: B, a cat", None), ("Answer: a, (b)", None), ("the answer is a", "A"), ("Answer: a) cat", "A"),
    ],
)  # fmt: skip
def test_letters_by_hand(text, letter):
    assert choice(text) == letter
    assert multiple_choice(completions=[text] * 2, solution=["B", "(b)"]) == [float(letter == "B")] * 2


@pytest.mark.parametrize(
    ("gold", "choices", "expected"),
    [("B", "AB", 1.0), ("A", "AB", 0.0), ("F", "ABCDEF", 0.0),
        ("F", "ABCDE", None), (None, "AB", None), ("", "AB", None),
     ("A or B", "AB", None), ("B) cat", "AB", 1.0), (r"\boxed{B}", "ab", 1.0)],
)  # fmt: skip
def test_the_solution_needs_a_letter(gold, choices, expected):
    assert multiple_choice(completions=["The answer is B"], solution=[gold], choices=choices) == [expected]


# json_schema

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"x": 1}', 1.0),
        ('<think>hm</think>\n{"x": 1}\n', 1.0),
        ('Here:\n```json\n{"x": 1}\n```\nDone.', 1.0),
        ('```\n{"x": 1}\n```', 1.0),
        ('```json\n{"y": 1}\n```\n```json\n{"x": 1}\n```', 1.0),
        ('<answer>{"x": 1}</answer>', 1.0),
        ('{"x": "1"}', 0.25),
        ('{"x": 1, "y": 2}', 0.25),
        ("[]", 0.25),
        ("3", 0.25),
        ('Sure: {"x": 1}', 0.0),
        ('{"x": 1', 0.0),
        ("{'x': 1}", 0.0),
        ('{"x": NaN}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema_by_hand(text, expected):
    assert json_schema(completions=[text], schema=[POINT], valid_json=0.25) == [expected]
    assert json_schema(completions=[text], schema=[json.dumps(POINT)], valid_json=0.25) == [expected]
    assert json_schema(completions=[text], default_schema=POINT) == [float(expected == 1)]


def test_without_a_column_and_a_default_no_row_can_be_scored():
    def problems(columns, **kwargs):
        return [
            str(problem) for problem in absences([RewardSpec("json_schema", "json_schema", kwargs=kwargs)], columns)
        ]

    assert problems(["prompt", "schema"]) == problems(["prompt"], default_schema=POINT) == []
    assert "no column 'schema'. Set its option default_schema" in problems(["prompt"])[0]


def test_the_rows_schema_comes_before_the_default():
    texts = ['{"x": 1}', '{"x": 1}', "7"]
    schemas = [{"type": "array"}, None, {"type": "integer"}]
    assert json_schema(completions=texts, schema=schemas, default_schema=POINT) == [0.0, 1.0, 1.0]
    assert json_schema(completions=texts, schema=schemas) == [0.0, None, 1.0]


@pytest.mark.parametrize(
    "schema",
    [{"type": "no such type"}, "{", "3", {"$ref": "http://localhost/x.json"}, {"pattern": "("}, {"$ref": "#/nowhere"}],
)
def test_json_schema_gives_none_for_a_schema_it_cannot_use(schema):
    assert json_schema(completions=['"text"'], schema=[schema]) == [None]


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_json_meets_the_schema_that_asks_for_it(document):
    text = json.dumps(document)
    assert json_schema(completions=[text] * 2, schema=[{"const": document}, {"not": {}}], valid_json=0.5) == [1.0, 0.5]


def test_json_schema_without_its_library(monkeypatch):
    from grpo_ext.rewards.library import answers

    monkeypatch.setitem(__import__("sys").modules, "jsonschema", None)
    answers._validator.cache_clear()
    with pytest.raises(ImportError, match=r"needs jsonschema: pip install"):
        json_schema(completions=["{}"], schema=[{}])


@pytest.mark.parametrize(
    "blank", ["", " ", "\u200b", "\u2060", "\u00ad", "\u3164", "\0", "\ufeff", r"\,", r"\text{}", "{}", r"\quad"]
)
def test_what_shows_nothing_is_no_content(blank):
    texts = [f"<think>{blank}</think>a", f"<think>a</think>{blank}", "<think>a</think>a"]
    assert rewards["format"](texts, style="think") == [0.0, 0.0, 1.0]
    assert rewards["format"]([f"<think>\na\n</think>\n<answer>\n{blank}\n</answer>"]) == [0.0]
    assert rewards["format"]([rf"\boxed{{{blank}}}", rf"\boxed{{{blank}1}}"], style="boxed") == [0.0, 1.0]


# Rewards to compare with.


def test_the_last_number_counts_in_any_layout():
    said = [
        "<answer>46",
        "46",
        "40 + 6 = **46.0** apples",
        "46, no, 45",
        "no number",
        "1,046",
        "40-46",
        "is \u22126",
        "4,6",
    ]
    golds = ["46", "#### 46", "46", "46", "46", "1046", "46", "-6", "6"]
    assert rewards["last_number"](completions=said, solution=golds) == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert rewards["last_number"](completions=["46", "46"], solution=["x", None]) == [None, None]


def test_a_random_reward_pays_its_rate_and_the_same_text_alike():
    random, said = rewards["random"], [str(i) for i in range(4000)]
    paid = random(completions=said, prompts=["p"] * 4000, rate=0.3)
    assert sum(paid) / 4000 == pytest.approx(0.3, abs=0.03)
    assert paid == random(completions=said, prompts=["p"] * 4000, rate=0.3)
    for other in ({"prompts": ["q"] * 4000}, {"prompts": ["p"] * 4000, "salt": 1}):
        both = zip(paid, random(completions=said, rate=0.3, **other), strict=True)
        assert sum(a * b for a, b in both) / 4000 == pytest.approx(0.09, abs=0.02)
    with pytest.raises(ValueError, match="rate"):
        random(completions=[], prompts=[], rate=1.5)
