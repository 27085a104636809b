"""Run by `pytest`: what the reward gives, worked out by hand."""

import pytest

from rewards import digits


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>1063</answer>", 1.0),
        ("<answer>\n1053\n</answer>", 0.75),
        ("<answer>63</answer>", 0.5),
        ("<answer>91063</answer>", 0.8),
        ("1063", 0.0),
    ],
)
def test_digits(text, value):
    assert digits([text], ["1063"]) == [value]
    assert digits([[{"role": "assistant", "content": text}]], ["1063"]) == [value]


def test_no_solution_is_no_reward_of_zero():
    assert digits(["<answer>1</answer>"], [""]) == [None]
