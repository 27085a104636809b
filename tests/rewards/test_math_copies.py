"""A policy that gives the question back is not paid, and one that works it out is."""

import pytest

from grpo_ext.rewards.library.functions import accuracy

QUESTION = "What is 876 + 530?"


@pytest.mark.parametrize(
    "answer",
    [
        "<answer>876+530</answer>",
        "<answer> 530 + 876 </answer>",
        "<answer>876+530+0</answer>",
        "<answer>(876)+(530)*1</answer>",
        r"\boxed{876\,+\,530}",
        r"So $\boxed{876 + 530}$.",
        "#### 876+530",
        "876+530",
        "The answer is 876+530.",
        "<think>hm</think>\n876 + 530",
    ],
)
def test_the_questions_own_sum_is_no_answer(answer):
    assert accuracy([answer], ["1406"], prompts=[QUESTION]) == [0.0]
    assert accuracy([answer], ["1406"], prompts=[[{"role": "user", "content": QUESTION}]]) == [0.0]
    assert accuracy([answer], ["1406"]) == [1.0]  # without the question nobody can tell


@pytest.mark.parametrize(
    ("question", "answer", "solution"),
    [
        (QUESTION, "<answer>1406</answer>", "1406"),
        (QUESTION, "<answer>876+530=1406</answer>", "1406"),
        (QUESTION, "876 + 530 is 1406", "1406"),
        (QUESTION, r"\boxed{\frac{2812}{2}}", "1406"),
        (QUESTION, "The answer is 1,406.", "1406"),
        ("Which is larger, 1/2 or 1/3?", "<answer>1/2</answer>", "1/2"),
        ("What is 3 - 8, and not 5?", "<answer>-5</answer>", "-5"),
        ("Factor x^2 + 3x + 2.", "<answer>(x+1)(x+2)</answer>", "(x+1)(x+2)"),
        ("Between 2 and 7?", r"\boxed{[2, 7]}", "[2, 7]"),
    ],
)
def test_what_was_worked_out_is(question, answer, solution):
    assert accuracy([answer], [solution], prompts=[question]) == [1.0]


@pytest.mark.parametrize("answer", ["12/4", "12 ÷ 4", r"\frac{12}{4}", r"12 \div 4"])
def test_divisions_too(answer):
    assert accuracy([f"\\boxed{{{answer}}}"], ["3"], prompts=["What is 12 divided by 4?"]) == [0.0]


def test_gold_with_a_thousands_comma():
    assert accuracy(["#### 1,000+406"], ["1,406"], prompts=["1,000 plus 406?"]) == [0.0]
