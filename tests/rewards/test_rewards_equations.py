"""What `accuracy` must not let through: equations, lists, and every rule that reads an answer loosely.

Each row is judged by TRL's `accuracy_reward` too, with the answer in a box; where it says otherwise stands why.
"""

import pytest
from trl.rewards import accuracy_reward

from grpo_ext.rewards.catalogue import rewards

accuracy = rewards["accuracy"]

PLANE = "x + y - z + 1 = 0"

# (answer, gold, expected): an equation answers an equation that it is a multiple of
EQUATIONS = [
    ("x + y - z + 1 = 0", PLANE, 1.0),
    ("2x + 2y - 2z + 2 = 0", PLANE, 1.0),
    ("-x - y + z - 1 = 0", PLANE, 1.0),
    ("z = x + y + 1", PLANE, 1.0),
    ("5x+7y=0", PLANE, 0.0),
    ("0", PLANE, 0.0),
    ("x + y - z - 1 = 0", PLANE, 0.0),
    ("x + y - z + 1", PLANE, 0.0),
    ("0 = 0", PLANE, 0.0),
    ("x = x", PLANE, 0.0),
    ("2x+3y=5", "2x+3y-5=0", 1.0),
    ("4x+6y=10", "2x+3y=5", 1.0),
    ("5 = 2x+3y", "2x+3y=5", 1.0),
    (r"y = \frac{5-2x}{3}", "2x+3y=5", 1.0),
    ("2x+3y=6", "2x+3y=5", 0.0),
    ("3x+2y=5", "2x+3y=5", 0.0),
    ("5", "2x+3y=5", 0.0),
    ("y = 2x+3", "y=2x+3", 1.0),
    ("2x+3", "y=2x+3", 1.0),
    ("y=2x+3", "2x+3", 1.0),
    ("2x - y + 3 = 0", "y=2x+3", 1.0),
    ("y=2x-3", "y=2x+3", 0.0),
    ("x=2y+3", "y=2x+3", 0.0),
    ("3", "y=2x+3", 0.0),
    ("2x^2+2y^2=8", "x^2+y^2=4", 1.0),
    ("x^2+y^2=9", "x^2+y^2=4", 0.0),
    ("4", "x^2+y^2=4", 0.0),
    (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36", 1.0),
    (r"\frac{x^2}{9}+\frac{y^2}{4}=1", "9x^2+4y^2=36", 0.0),
    ("xy=1", "y=1/x", 1.0),
    ("f(x)=2x+1", "2x+1", 1.0),
    ("2x+1", "f(x)=2x+1", 1.0),
    ("x > 3", "x > 3", 1.0),
    ("3 < x", "x > 3", 1.0),
    ("x < 3", "x > 3", 0.0),
    ("3", "x > 3", 0.0),
    ("x > 3", "3", 0.0),
    (r"x \ne 3", "3", 0.0),
    (r"\ge 3", "3", 0.0),
]
# one symbol on the left: its right side
SOLVED = [
    ("x=5", "5", 1.0),
    ("5", "x=5", 1.0),
    ("x = 2+3 = 5", "x=5", 1.0),
    ("x_1=5", "5", 1.0),
    (r"\theta=30", "30", 1.0),
    (r"P(A)=\frac{1}{2}", "1/2", 1.0),
    (r"x = 5\text{ cm}", "5", 1.0),
    ("x=6", "x=5", 0.0),
    ("y=5", "x=5", 0.0),
    (r"x \in (3,5]", "(3,5]", 1.0),
    (r"x \in (3,6]", "(3,5]", 0.0),
]
# a list is never cut
LISTS = [
    ("a=3, b=5", "a=3, b=5", 1.0),
    ("b=5, a=3", "a=3, b=5", 1.0),
    (r"a=3 \text{ and } b=5", "a=3, b=5", 1.0),
    (r"a=3,\ b=5", "a=3, b=5", 1.0),
    ("a=4, b=5", "a=3, b=5", 0.0),
    ("a=5, b=3", "a=3, b=5", 0.0),
    ("a=3, a=5", "a=3, b=5", 0.0),
    ("a=3, b=5, c=7", "a=3, b=5", 0.0),
    ("b=5", "a=3, b=5", 0.0),
    ("5", "a=3, b=5", 0.0),
    ("a=3, b=5", "5", 0.0),
    (r"a=3 \quad b=5", "b=5", 0.0),
    ("x+y=7, x=5", "5", 0.0),
    (r"x=2 \text{ or } x=1", r"x=1 \text{ or } x=2", 1.0),
    ("1, 2", r"x=1 \text{ or } x=2", 1.0),
    ("x=1, 2", "x=1, x=2", 1.0),
    ("x=2", r"x=1 \text{ or } x=2", 0.0),
    (r"x=1 \text{ or } x=3", r"x=1 \text{ or } x=2", 0.0),
    (r"x=1 \text{ or } x=2", "2", 0.0),
    ("x=1, 2", "2", 0.0),
    (r"\pm 3", r"x=\pm 3", 1.0),
    ("x=3, x=-3", r"\pm 3", 1.0),
    ("3", r"\pm 3", 0.0),
    (r"\pm 3", "3", 0.0),
    ("3,2,1", "1,2,3", 1.0),
    ("3", "1,2,3", 0.0),
    ("1,2,3", "3", 0.0),
    (r"\{2,1\}", r"\{1,2\}", 1.0),
    (r"\{1,2,3\}", r"\{1,2\}", 0.0),
    ("(2,1)", "(1,2)", 0.0),
    ("[1,2]", "(1,2)", 0.0),
    ("(1,2]", "[1,2)", 0.0),
    ("2", "(1,2)", 0.0),
    (r"[5,7]", r"(-\infty,3)\cup[5,7]", 0.0),
]
# a number and what stands around it
NUMBERS = [
    ("1", "1/x", 0.0),
    ("5", "5 - x", 0.0),
    ("1", "1-p", 0.0),
    ("2", "2xy", 0.0),
    ("2", "2 x", 0.0),
    ("2", "2ab", 0.0),
    ("5", "5/x^2", 0.0),
    ("2", "2(ab)", 0.0),
    (r"2\sqrt{3} m", r"2\sqrt{3}", 1.0),
    (r"2\sqrt{3}", r"2\sqrt{3} x", 0.0),
    (r"x^{2}", r"x^{2} m", 0.0),
    ("5x", "5", 0.0),
    ("5 x", "5", 0.0),
    ("5i", "5", 0.0),
    ("5 a", "5", 0.0),
    (r"\frac{2}{3x}", r"\frac{2}{3} x", 0.0),
    (r"\frac{2x}{3}", r"\frac{2}{3} x", 1.0),
    ("5/8", "5", 0.0),
    (r"5^{2}", "5", 0.0),
    ("0,234", "234", 0.0),
    ("1, 234", "1234", 0.0),
    ("1,234,56", "123456", 0.0),
    ("5 lakh", "5", 0.0),
    (r"10^{-7}", r"2 \times 10^{-7}", 0.0),
    ("1e-9", "2e-9", 0.0),
    ("101_2", "101_2", 1.0),
    ("101", "101_2", 1.0),
    ("5", "101_2", 0.0),
    ("cot x", "x", 0.0),
    ("x^{2}y^{3}", "x^2y^3", 1.0),
]
# words beside a number: (answer, gold, expected)
WORDS = [
    ("minus 5", "5", 0.0),
    ("negative 5", "-5", 1.0),
    ("twice 5", "5", 0.0),
    ("half of 10", "10", 0.0),
    ("a third of 5", "5", 0.0),
    ("the square root of 25", "25", 0.0),
    ("5 squared", "5", 0.0),
    ("5 factorial", "5", 0.0),
    ("5 and a half", "5", 0.0),
    ("5 tenths", "5", 0.0),
    ("5 more than x", "5", 0.0),
    ("5 times y", "5", 0.0),
    ("under 5", "5", 0.0),
    ("up to 5", "5", 0.0),
    ("5 at most", "5", 0.0),
    ("5 or six", "5", 0.0),
    (r"\text{not } 5", "5", 0.0),
    ("anything but 5", "5", 0.0),
    ("minus x", "x", 0.0),
    ("5 or so", "5", 1.0),
    ("a=3 b=5", "5", 0.0),
    ("a=3. b=5", "5", 0.0),
    (r"a=3 \quad b=5", "a=3, b=5", 1.0),
    ("$5 a day", "5", 1.0),
    ("about 5", "5", 1.0),
    ("12/20 x 100% = 60%", "60", 1.0),
    ("Total = 5 dollars", "5", 1.0),
    ("Tom = 3, Jane = 5", "5", 0.0),
    ("Tom: 3, Jane = 5", "5", 0.0),
    ("3 * 2 = 6, and 6 + 4 = 10 dollars", "10", 1.0),
    ("She has 5 a day * 2 days = 10 eggs of today's", "10", 1.0),
    ("6 m * 3 m = 18 m^2", "18", 1.0),
    ("2m = 18", "18", 0.0),
    ("x + y = 5 (by symmetry)", "5", 0.0),
    ("12% of 50", "50", 0.0),
    (r"2x = 10 \implies x = 5", "5", 1.0),
    (r"a = 3 \implies b = 5", "a=3, b=5", 0.0),
    ("x + 2 = 7, so x = 5", "x = 5", 1.0),
    ("2x = 10\nx = 5", "5", 1.0),
    ("x = 1\nx = 5", "5", 0.0),
    ("a = 3\nb = 5", "5", 0.0),
    (r"\sum_{i=1}^{5} i = 15", "15", 1.0),
    (r"\angle ABC = 60^\circ", "60", 1.0),
]
# running text, in no box
RUNNING = [
    ("I have no idea, 0", PLANE, 0.0),
    ("So 5x + 7y = 0", "0", 0.0),
    ("We add.\nSo 5x + 7y = 0.", "0", 0.0),
    ("We add.\nSo 2x = 10, x = 5.", "5", 1.0),
    ("The answer is 5x + 7y = 0.", "0", 0.0),
    ("The answer is 2x + 3y = 5.", "2x+3y-5=0", 1.0),
    ("The answer is a=3, b=5.", "5", 0.0),
    ("The answer is a=3 and b=5.", "a=3, b=5", 1.0),
    ("The answer is 72, or 73.", "72", 0.0),
    ("The answer is 72, maybe 73.", "72", 0.0),
    ("The answer is 72, 73 apples.", "72", 0.0),
    ("The answer is 72 because 2x = 144.", "72", 1.0),
    ("The answer is 72 because 2x = 144.", "144", 0.0),
    (r"The answer is $\frac{1}{2}$ or 3.", "1/2", 0.0),
    (r"The answer is 3 or $\frac{1}{2}$.", "1/2", 0.0),
    (r"The answer is $x^2$, 3.", "x^2", 0.0),
    (r"It is \(\sqrt{2}\) or \(\sqrt{3}\)", r"\sqrt{3}", 0.0),
    ("$1$,$234$", "1234", 0.0),
    ("He pays 5\u20138 dollars", "-3", 0.0),
]
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


@pytest.mark.parametrize(
    "mark", [r"\boxed{{{}}}", "<answer>{}</answer>", "<think>1 or 2</think>\n<answer>\n{}\n</answer>"]
)
@pytest.mark.parametrize(("answer", "gold", "expected"), EQUATIONS + SOLVED + LISTS + NUMBERS + WORDS)
def test_marked_answers(mark, answer, gold, expected):
    assert accuracy(completions=[mark.format(answer)], solution=[gold]) == [expected]
    assert accuracy(completions=[mark.format(answer)], solution=[rf"It is \boxed{{{gold}}}."]) == [expected]


@pytest.mark.parametrize(("text", "gold", "expected"), RUNNING)
def test_running_text(text, gold, expected):
    assert accuracy(completions=[text], solution=[gold]) == [expected]


@pytest.mark.parametrize(("answer", "gold", "expected"), EQUATIONS + SOLVED + LISTS)
def test_trl_judges_equations_and_lists_alike(answer, gold, expected):
    assert trl(answer, gold) == [expected]


@pytest.mark.parametrize(("answer", "gold"), STRICTER)
def test_what_trl_pays_and_accuracy_does_not(answer, gold):
    assert trl(answer, gold) == [1.0]
    assert accuracy(completions=[rf"\boxed{{{answer}}}"], solution=[gold]) == [0.0]


@pytest.mark.parametrize(("answer", "gold"), [("2x=10", "x=5"), ("2x+3=13", "x=5"), ("2x+1>7", "x>3")])
def test_a_problem_is_not_its_solution(answer, gold):
    assert accuracy(completions=[rf"\boxed{{{answer}}}"], solution=[gold]) == [0.0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "(x+y)^{999} = 1", "(x+y)^{99}" * 9 + "= 0", r"\sum_{i=1}^{999999999} i^i = x", r"\int_0^y x^{x^2} dx = y",
        "1/0 = x", "x/0 = y", "0/0 = 0/0", "x = ", "= x", "==", "=, =", "= and =", "f(x) + f(y) = 1", r"x = \infty",
        "x^y = y^x",
    ],
)  # fmt: skip
def test_hostile_equations_are_wrong_quickly(text):
    assert accuracy(completions=[rf"\boxed{{{text}}}", text], solution=[PLANE] * 2) == [0.0] * 2
    assert accuracy(completions=[PLANE, "0"], solution=[text] * 2) in ([0.0] * 2, [None] * 2)
