"""Rewards under Open-R1's names: its formulas, worked out by hand."""

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.composition import parse
from grpo_ext.rewards.library.elsewhere import NOT_HERE

WHOLE = "<think>\nwhy\n</think>\n<answer>\n{}\n</answer>"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (WHOLE.format("4"), 1.0),
        ("<think>why</think><answer>4</answer>", 0.0),  # no line breaks: 1.0 by `tags`
        ("<think>\nwhy\n</think>\n", 0.5),
        ("<think>\na <think>\nb\n</think>\n<answer>\n4\n</answer>", 0.75),  # <think> twice; tags share a break
        ("<think>\nwhy\n</think>\n\n<answer>\n4\n</answer>", 1.0),
        (WHOLE.format("4") + WHOLE.format("5"), 0.0),
        ("", 0.0),
    ],
)
def test_tag_count(text, value):
    message = [[{"role": "assistant", "content": text}]]
    assert rewards["tag_count"](completions=message) == rewards["tag_count"](completions=[text]) == [value]


@pytest.mark.parametrize(
    ("text", "options", "value"),
    [
        ("a b c a b c", {}, -0.25),  # abc bca cab abc: 3 of 4 differ
        ("a B A b", {"ngram_size": 1, "max_penalty": -2.0}, -1.0),
        ("a b", {}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_repetition_penalty(text, options, value):
    assert rewards["repetition_penalty"](completions=[text], **options) == [value]


def test_soft_overlong_punishment():
    lengths = [80, 85, 90, 100, 101, 500]
    given = {"completion_ids": [[0] * n for n in lengths], "max_completion_len": 100, "soft_punish_cache": 20}
    assert rewards["soft_overlong_punishment"](**given) == [0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    given = {"completion_ids": [[0] * 12288, [0] * 14336]}  # 16384 - 4096, and half way
    assert rewards["soft_overlong_punishment"](**given) == [0.0, -0.5]


@pytest.mark.parametrize(
    ("text", "language", "value"),
    [
        (WHOLE.format("```python\nprint(1)\n```"), None, 1.0),
        (WHOLE.format("text\n```python\nprint(1)\n``` more"), ["python"], 1.0),
        (WHOLE.format("```cpp\nint x;\n```"), None, 0.0),
        (WHOLE.format("```cpp\nint x;\n```"), ["cpp"], 1.0),
        (WHOLE.format("```python\nprint(1)"), None, 0.0),  # never closed
        (WHOLE.format("```python\nprint(1)\n```") + "\nmore", None, 1.0),  # as Open-R1's $ lets it
        (WHOLE.format("```python\nprint(1)\n```") + " more", None, 0.0),
        ("x" + WHOLE.format("```python\nprint(1)\n```"), None, 0.0),
        ("```python\nprint(1)\n```", None, 0.0),
    ],
)
def test_code_format(text, language, value):
    assert rewards["code_format"](completions=[text], language=language) == [value]


def test_the_language_of_code_may_be_set():
    text = WHOLE.format("```cpp\nint x;\n```")
    assert rewards["code_format"](completions=[text], default_language="cpp") == [1.0]
    assert rewards["code_format"](completions=[text, text], language=[None, "java"], default_language="cpp") == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize("name", NOT_HERE)
def test_a_name_of_open_r1s_that_is_none_here_says_what_to_write(name):
    _, (problem,) = parse([name], None)
    assert NOT_HERE[name] in problem.cure
