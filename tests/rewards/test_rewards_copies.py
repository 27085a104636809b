"""A calculation or formula of the question is not an answer, in any dress and for any spelling of the solution."""

import itertools

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.math_judgement import judge

accuracy = rewards["accuracy"]

QUESTION = "What is 876 + 530?"
SOLUTIONS = [
    "1406", "1,406", "1406.0", r"\boxed{1406}", "$1406$", "#### 1406", "The answer is 1406.", "<answer>1406</answer>",
    "**1406**", r"\(1406\)", r"1.406 \times 10^3", "1406 apples", r"\frac{2812}{2}", "x = 1406", r"\text{1406}",
]  # fmt: skip
SUMS = [
    "876+530", "530 + 876", "(876)+(530)", "876+530+0", "(876+530)*1", "876.0+530.0", "876-(-530)", "0876+0530",
    r"\frac{876+530}{1}", r"\frac{876}{1}+\frac{530}{1}", r"\sqrt{(876+530)^2}", "|876+530|", r"\frac{2(876+530)}{2}",
    "876^1+530^{1}", "-(-876-530)", "876+530+1-1", r"\max(876+530, 0)", r"\lfloor 876+530 \rfloor", "876\uff0b530",
    r"10^{\log_{10}(876+530)}", r"\frac{876^2-530^2}{876-530}", r"{876}+{530}", r"876\,+\,530", r"876 \cdot 1 + 530",
    r"\sum_{i=1}^{1} (876+530)", "8.76e2+530", r"8.76 \times 10^2 + 530", r"100\% \cdot 876+530", "876 plus 530",
    r"\int_0^1 (876+530) dx", r"\gcd(876+530, 0)", r"\mathrm{876}+\mathrm{530}", "876 + 530 - 0 \u00d7 7",
]  # fmt: skip
DRESSES = [
    "{}", "x={}", "{} apples", "[{}]", "({})", r"\{{{}\}}", r"\left({}\right)", r"\text{{{}}}", "${}$", "Total: {}",
    "{} = ?", "= {}", r"{}\text{{ apples}}", r"{{{}}}", "{0} = {0}", "the sum {}", "**{}**", "{} (in all)",
]  # fmt: skip
MARKS = [r"\boxed{{{}}}", "<answer>{}</answer>", "#### {}", "The answer is {}.", "So it is {}"]


DISGUISES = [dress.format(total) for total, dress in itertools.product(SUMS, DRESSES)]


@pytest.mark.cases(4)
@pytest.mark.parametrize("share", [pytest.param(4, marks=pytest.mark.slow), len(SOLUTIONS)])
@pytest.mark.parametrize("number", range(len(SOLUTIONS)))
def test_a_disguised_sum_of_the_question_is_never_paid(number, share):
    """A fourth of 594 disguises, or less: a part that differs by the solution's spelling, in turn over five marks."""
    solution = SOLUTIONS[number]
    texts = [MARKS[i % len(MARKS)].format(DISGUISES[i]) for i in range(number % share, len(DISGUISES), share)]
    found = accuracy(texts, [solution] * len(texts), prompts=[QUESTION] * len(texts))
    assert [text for text, score in zip(texts, found, strict=True) if score != 0] == []
    assert accuracy([r"\boxed{1406}"], [solution], prompts=[QUESTION]) == [1.0]


# (question, solution): answers that leave the calculation undone
COPIES = {
    ("1,000 plus 406?", "1,406"): ["#### 1,000+406", "1000+406", r"\boxed{1{,}000 + 406}"],
    ("What is 12 divided by 4?", r"\boxed{3}"): ["12/4", "12 ÷ 4", r"\frac{12}{4}", r"\frac{12}4", r"12 \div 4"],
    ("Add 3/4 and 1/6.", r"\frac{11}{12}"): ["3/4+1/6", r"\frac{3}{4}+\frac{1}{6}", r"\frac34 + \frac16"],
    ("Write 6/8 in lowest terms.", r"\frac{3}{4}"): ["6/8", r"\frac{6}{8}", r"\dfrac{6}{8}"],
    ("Simplify the ratio 4:6.", "2:3"): ["4:6", r"\frac{4}{6}"],
    ("What is 20% of 50?", "10"): ["20% * 50", r"20\% \cdot 50", r"0.2 \cdot 50", r"\frac{20}{100} \times 50"],
    ("Twice 4 and 9 minus 2?", "(8, 7)"): ["(2*4, 9-2)", "(4+4, 9-2)"],
    ("Evaluate $\\binom{10}{3}$.", "120"): [r"\binom{10}{3}", r"\dbinom{10}{3}"],
    ("Compute $7!$, please.", "5040"): ["7!"],
    ("What is $\\sqrt{16}$?", "4"): [r"\sqrt{16}", r"\sqrt{ 16 }"],
    ("What is 3 1/2 times 4?", "14"): ["3.5 * 4", "(3 + 1/2) * 4"],
    ("Three boxes with twelve pens?", "36"): ["3 * 12", r"12 \cdot 3", "12 + 12 + 12"],
    ("\u0663\u0664 + \uff15\uff16?", "90"): ["34+56"],
    ("12 boxes with 9 pens each?", "108 pens"): ["12 * 9 pens", r"12 \times 9", "12(9)"],
}
# (question, solution): answers in which something was worked out, or nothing had to be
WORKED_OUT = {
    (QUESTION, "1406"): ["876+530=1406", "1406 = 876+530", r"\frac{2812}{2}", "1,406", r"1.406 \times 10^3"],
    ("Which is larger, 1/2 or 1/3?", "1/2"): ["1/2", r"\frac{1}{2}", r"\dfrac12", "0.5"],
    ("What is 3 - 8, and not 5?", "-5"): ["-5"],
    ("Factor x^2 + 3x + 2.", "(x+1)(x+2)"): ["(x+1)(x+2)"],
    ("Between 2 and 7?", "[2, 7]"): ["[2, 7]", "[2.0, 7]"],
    ("Sort 7 and 2.", "2, 7"): ["2, 7"],
    ("Add 1 and 1/2.", "3/2"): ["1 1/2", r"1\frac{1}{2}", "1.5"],
    ("Write 2*2*3 with powers.", r"2^2 \cdot 3"): [r"2^2 \cdot 3"],
    ("One of two coins is false. How likely is it this one?", "0.5"): ["1/2", r"\frac{1}{2}"],
    ("What is 50% as a decimal fraction, to 2 places?", "0.5"): ["0.50"],
}


@pytest.mark.parametrize(
    ("question", "solution", "answer", "score"),
    [
        (*key, answer, score)
        for table, score in ((COPIES, 0), (WORKED_OUT, 1))
        for key in table
        for answer in table[key]
    ],
)
def test_what_the_question_has_and_what_was_worked_out(question, solution, answer, score):
    for text in (rf"\boxed{{{answer}}}", f"<answer>{answer}</answer>"):
        assert judge(text, solution, "auto", question).score == score
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "<answer>"}]
        assert accuracy([text], [solution], prompts=[chat]) == [score]
        if score == 0 and answer not in (
            "7!",
            "20% * 50",
            r"20\% \cdot 50",
            "12(9)",
        ):  # without the question it cannot be known
            assert accuracy([text], [solution]) == [1.0]  # without the question it cannot be known


# (question, solution): copies of a formula in the question
FORMULAS = {
    ("Expand $(x+1)^3$.", "x^3+3x^2+3x+1"): ["(x+1)^3", r"\left(x + 1\right)^{3}", "y = (x+1)^3", "((x+1)^3)"],
    ("Factor x^2 - 1.", "(x-1)(x+1)"): ["x^2-1", "x^{2} - 1"],
    (r"Simplify $\sqrt{50}$.", r"5\sqrt{2}"): [r"\sqrt{50}"],
    (r"Simplify $\dfrac{x^2-1}{x-1}$.", "x+1"): [r"\frac{x^2-1}{x-1}", r"\frac{x^2 - 1}{x - 1}"],
}


@pytest.mark.parametrize(("key", "answer"), [(key, answer) for key, given in FORMULAS.items() for answer in given])
def test_a_copied_formula_is_paid_only_where_the_recipe_says_so(key, answer):
    question, solution = key
    for mark in MARKS[:2]:
        given = [mark.format(answer)], [solution]
        assert accuracy(*given, prompts=[question]) == [0.0]
        assert accuracy(*given, prompts=[question], copied_formulas=True) == [1.0]
    assert accuracy([rf"\boxed{{{solution}}}"], [solution], prompts=[f"{question} Is it {solution}?"]) == [1.0]
