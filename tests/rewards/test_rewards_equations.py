"""What `accuracy` must not let through: equations, lists, and every rule that reads an answer loosely.

Each row is judged by TRL's `accuracy_reward` too, with the answer in a box; where it says otherwise stands why.
"""

import pytest
from trl.rewards import accuracy_reward

from grpo_ext.rewards.catalogue import rewards
from support.answers import cases

accuracy = rewards["accuracy"]

PLANE = "x + y - z + 1 = 0"

# reference: (answers that are right, answers that are wrong)
# fmt: off
EQUATIONS = {
    PLANE: (
        ["x + y - z + 1 = 0", "2x + 2y - 2z + 2 = 0", "-x - y + z - 1 = 0", "z = x + y + 1"],
        ["5x+7y=0", "0", "x + y - z - 1 = 0", "x + y - z + 1", "0 = 0", "x = x"],
    ),
    "2x+3y-5=0": (["2x+3y=5"], []),
    "2x+3y=5": (["4x+6y=10", "5 = 2x+3y", r"y = \frac{5-2x}{3}"], ["2x+3y=6", "3x+2y=5", "5"]),
    "y=2x+3": (["y = 2x+3", "2x+3", "2x - y + 3 = 0"], ["y=2x-3", "x=2y+3", "3"]),
    "2x+3": (["y=2x+3"], []),
    "x^2+y^2=4": (["2x^2+2y^2=8"], ["x^2+y^2=9", "4"]),
    "9x^2+4y^2=36": ([r"\frac{x^2}{4}+\frac{y^2}{9}=1"], [r"\frac{x^2}{9}+\frac{y^2}{4}=1"]),
    "y=1/x": (["xy=1"], []),
    "2x+1": (["f(x)=2x+1"], []),
    "f(x)=2x+1": (["2x+1"], []),
    "x > 3": (["x > 3", "3 < x"], ["x < 3", "3"]),
    "3": ([], ["x > 3", r"x \ne 3", r"\ge 3"]),
}
# one symbol on the left: its right side
SOLVED = {
    "5": (["x=5", "x_1=5", r"x = 5\text{ cm}"], []),
    "x=5": (["5", "x = 2+3 = 5"], ["x=6", "y=5"]),
    "30": ([r"\theta=30"], []),
    "1/2": ([r"P(A)=\frac{1}{2}"], []),
    "(3,5]": ([r"x \in (3,5]"], [r"x \in (3,6]"]),
}
# a list is never cut
LISTS = {
    "a=3, b=5": (
        ["a=3, b=5", "b=5, a=3", r"a=3 \text{ and } b=5", r"a=3,\ b=5"],
        ["a=4, b=5", "a=5, b=3", "a=3, a=5", "a=3, b=5, c=7", "b=5", "5"],
    ),
    "5": ([], ["a=3, b=5", "x+y=7, x=5"]),
    "b=5": ([], [r"a=3 \quad b=5"]),
    r"x=1 \text{ or } x=2": ([r"x=2 \text{ or } x=1", "1, 2"], ["x=2", r"x=1 \text{ or } x=3"]),
    "x=1, x=2": (["x=1, 2"], []),
    "2": ([], [r"x=1 \text{ or } x=2", "x=1, 2"]),
    r"x=\pm 3": ([r"\pm 3"], []),
    r"\pm 3": (["x=3, x=-3"], ["3"]),
    "3": ([], [r"\pm 3", "1,2,3"]),
    "1,2,3": (["3,2,1"], ["3"]),
    r"\{1,2\}": ([r"\{2,1\}"], [r"\{1,2,3\}"]),
    "(1,2)": ([], ["(2,1)", "[1,2]", "2"]),
    "[1,2)": ([], ["(1,2]"]),
    r"(-\infty,3)\cup[5,7]": ([], [r"[5,7]"]),
}
# a number and what stands around it
NUMBERS = {
    "1/x": ([], ["1"]),
    "5 - x": ([], ["5"]),
    "1-p": ([], ["1"]),
    "2xy": ([], ["2"]),
    "2 x": ([], ["2"]),
    "2ab": ([], ["2"]),
    "5/x^2": ([], ["5"]),
    "2(ab)": ([], ["2"]),
    r"2\sqrt{3}": ([r"2\sqrt{3} m"], []),
    r"2\sqrt{3} x": ([], [r"2\sqrt{3}"]),
    r"x^{2} m": ([], [r"x^{2}"]),
    "5": ([], ["5x", "5 x", "5i", "5 a", "5/8", r"5^{2}", "5 lakh"]),
    r"\frac{2}{3} x": ([r"\frac{2x}{3}"], [r"\frac{2}{3x}"]),
    "234": ([], ["0,234"]),
    "1234": ([], ["1, 234"]),
    "123456": ([], ["1,234,56"]),
    r"2 \times 10^{-7}": ([], [r"10^{-7}"]),
    "2e-9": ([], ["1e-9"]),
    "101_2": (["101_2", "101"], ["5"]),
    "x": ([], ["cot x"]),
    "x^2y^3": (["x^{2}y^{3}"], []),
}
# words beside a number: (answer, gold, expected)
WORDS = {
    "5": (
        ["5 or so", "$5 a day", "about 5", "Total = 5 dollars", r"2x = 10 \implies x = 5", "2x = 10\nx = 5"],
        ["minus 5", "twice 5", "a third of 5", "5 squared", "5 factorial", "5 and a half", "5 tenths",
         "5 more than x", "5 times y", "under 5", "up to 5", "5 at most", "5 or six", r"\text{not } 5",
         "anything but 5", "a=3 b=5", "a=3. b=5", "Tom = 3, Jane = 5", "Tom: 3, Jane = 5", "x + y = 5 (by symmetry)",
         "x = 1\nx = 5", "a = 3\nb = 5"],
    ),
    "-5": (["negative 5"], []),
    "10": (["3 * 2 = 6, and 6 + 4 = 10 dollars", "She has 5 a day * 2 days = 10 eggs of today's"], ["half of 10"]),
    "25": ([], ["the square root of 25"]),
    "x": ([], ["minus x"]),
    "a=3, b=5": ([r"a=3 \quad b=5"], [r"a = 3 \implies b = 5"]),
    "60": (["12/20 x 100% = 60%", r"\angle ABC = 60^\circ"], []),
    "18": (["6 m * 3 m = 18 m^2"], ["2m = 18"]),
    "50": ([], ["12% of 50"]),
    "x = 5": (["x + 2 = 7, so x = 5"], []),
    "15": ([r"\sum_{i=1}^{5} i = 15"], []),
}
# running text, in no box
RUNNING = {
    PLANE: ([], ["I have no idea, 0"]),
    "0": ([], ["So 5x + 7y = 0", "We add.\nSo 5x + 7y = 0.", "The answer is 5x + 7y = 0."]),
    "5": (["We add.\nSo 2x = 10, x = 5."], ["The answer is a=3, b=5."]),
    "2x+3y-5=0": (["The answer is 2x + 3y = 5."], []),
    "a=3, b=5": (["The answer is a=3 and b=5."], []),
    "72": (
        ["The answer is 72 because 2x = 144."],
        ["The answer is 72, or 73.", "The answer is 72, maybe 73.", "The answer is 72, 73 apples."],
    ),
    "144": ([], ["The answer is 72 because 2x = 144."]),
    "1/2": ([], [r"The answer is $\frac{1}{2}$ or 3.", r"The answer is 3 or $\frac{1}{2}$."]),
    "x^2": ([], [r"The answer is $x^2$, 3."]),
    r"\sqrt{3}": ([], [r"It is \(\sqrt{2}\) or \(\sqrt{3}\)"]),
    "1234": ([], ["$1$,$234$"]),
    "-3": ([], ["He pays 5\u20138 dollars"]),
}
# fmt: on
# Where TRL pays what it should not: a right side for an equation with more on the left, equations without a solution,
# an order that does not fit the names, a difference below six decimals, another base, a factor taken for a unit.
STRICTER = [
    ("5x+7y=0", "0"),
    ("x+y=5", "5"),
    ("xy=5", "5"),
    ("2x=5", "5"),
    ("x^2=5", "5"),
    ("x^2+5=0", "x^2+1=0"),
    ("5, 3", "a=3, b=5"),
    ("0.0000001", "0.0000002"),
    ("101_3", "101_2"),
    ("3", "3t"),
    ("2", "2ab"),
    ("-16t^2+80", "-16t^2+80t"),
    ("101_2", "101"),
]


def trl(answer, gold):
    return accuracy_reward([[{"role": "assistant", "content": rf"\boxed{{{answer}}}"}]], [f"${gold}$"])


@pytest.mark.parametrize(("answer", "gold", "expected"), cases(EQUATIONS, SOLVED, LISTS, NUMBERS, WORDS))
def test_marked_answers(answer, gold, expected):
    marks = (r"\boxed{{{}}}", "<answer>{}</answer>", "<think>1 or 2</think>\n<answer>\n{}\n</answer>")
    texts = [mark.format(answer) for mark in marks]
    assert accuracy(completions=texts, solution=[gold] * 3) == [expected] * 3
    assert accuracy(completions=texts, solution=[rf"It is \boxed{{{gold}}}."] * 3) == [expected] * 3


@pytest.mark.parametrize(("text", "gold", "expected"), cases(RUNNING))
def test_running_text(text, gold, expected):
    assert accuracy(completions=[text], solution=[gold]) == [expected]


@pytest.mark.parametrize(("answer", "gold", "expected"), cases(EQUATIONS, SOLVED, LISTS))
def test_trl_judges_equations_and_lists_alike(answer, gold, expected):
    assert trl(answer, gold) == [expected]


@pytest.mark.parametrize(("answer", "gold"), STRICTER)
def test_what_trl_pays_and_accuracy_does_not(answer, gold):
    assert trl(answer, gold) == [1.0]
    assert accuracy(completions=[rf"\boxed{{{answer}}}"], solution=[gold]) == [0.0]


@pytest.mark.parametrize(("answer", "gold"), [("2x=10", "x=5"), ("2x+3=13", "x=5"), ("2x+1>7", "x>3")])
def test_a_problem_is_not_its_solution(answer, gold):
    assert accuracy(completions=[rf"\boxed{{{answer}}}"], solution=[gold]) == [0.0]
