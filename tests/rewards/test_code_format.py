"""The reward `code_format`, worked out by hand."""

import pytest

from grpo_ext.rewards.catalogue import rewards

WHOLE = "<think>\nwhy\n</think>\n<answer>\n{}\n</answer>"


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
