"""The accuracy reward: a table of answers as models write them, GSM8K's own solutions, hostile texts, threads."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library import math_equality
from grpo_ext.rewards.library.math_judgement import judge
from support.answers import cases

accuracy = rewards["accuracy"]

# reference: (answers that are right, answers that are wrong)
# fmt: off
NUMBERS = {
    "72": (
        ["72", "$72", "72$", r"\$72", "72.0", "72.00", "72.", "+72", "$72$", r"\(72\)", r"\[72\]", "**72**", "`72`",
         "(72)", "€72"],
        ["720", "7.2", "27", "-72", "72.5", "0.72", "172", "", "no idea", "seventy-three"],
    ),
    "72.0": (["72"], []),
    "1234": (["1,234", "1{,}234"], []),
    "1,234": (["1234"], []),
    "1234.5": (["$1,234.50", "1,234.50"], []),
    "$1234.50": (["$1,234.50"], []),
    "1234567": (["1,234,567", r"1\,234\,567"], []),
    "1.234": ([], ["1,234"]),
    "234": ([], ["1,234"]),
    "1": ([], ["1,234"]),
    "34": ([], ["12,34", r"3\,4"]),
    "1500": (["1.5e3"], []),
    "1.5": ([], ["1.5e3"]),
    "5000000": (["5 million"], []),
    "5": ([], ["5 million", "$5k"]),
    "0.5": ([".5"], []),
    "-3": (["-3", "\u22123", "-$3", "$-3$"], ["3"]),
    "3": ([], ["-3"]),
    "10080": ([r"10,\!080"], []),
    r"10,\!080": (["10080"], []),
    "12000": ([r"12\,000", "12\u202f000"], []),
    r"12\,000": (["12000"], []),
    "15": (["=> 15", "→ 15", "A: 15", "A:15", "*15*", "_15_", "“15”", "'15'"], [": -15"]),
    "-15": (["→ -15", ": -15"], []),
}
UNITS = {
    "72": (
        ["72 apples", "72apples", "$72 dollars", "72 cm^2", "72 m^{2}", r"72\text{ cm}", r"72\,\mathrm{kg}", "72kg",
         "72 m"],
        ["72x", "x + 72"],
    ),
    "60": (["60 miles per hour", "60 km/h"], []),
    "90": (["90°", r"90^\circ"], []),
    "3": (["3 m2 of cloth"], []),
    "72 apples": (["72 apples"], []),
    "2": ([], ["72 m^2", "2 hours and 30 minutes"]),
    "30": ([], ["7:30"]),
    "7": ([], ["7:30"]),
}
FRACTIONS_AND_PERCENTAGES = {
    "0.75": (["3/4", r"$\frac{3}{4}$"], []),
    "3/4": (["0.75", "6/8", r"\frac{3}{4}", r"\dfrac34", r"\frac{3}{4} cups"], ["4/3", r"-\frac{3}{4}"]),
    "-3/4": ([r"-\frac{3}{4}"], []),
    "1.5": (["1 1/2", r"1\frac{1}{2}"], []),
    "3/2": (["1 1/2 cups"], []),
    "-1.5": (["-1 1/2"], []),
    "1/3": (["0.333333"], ["0.33"]),
    "3": ([], ["3/4"]),
    "4": ([], ["3/4", r"\frac{3}{4}"]),
    "1": ([], ["1 1/2"]),
    "1/2": ([], ["1 1/2"]),
    "50": (["50%", r"50\%", "50 percent"], ["5%"]),
    "50%": (["50", "50%", "0.5"], []),
    "0.5": (["50%"], ["0.5%"]),
    "50.5": ([], ["50%"]),
    "12.5": ([r"12.5\%"], []),
}
FORMULAS = {
    r"2\sqrt{3}": ([r"2\sqrt{3}", r"$\sqrt{12}$"], []),
    "3": ([r"\log_2 8"], [r"2\sqrt{3}", "2**3"]),
    "2": ([], [r"2\sqrt{3}", "10^2", "x_1 2"]),
    r"\pi/2": ([r"\frac{\pi}{2}"], []),
    "1 + 2x": (["2x + 1"], []),
    "1": ([], ["2x + 1"]),
    "(1,2)": (["(1, 2)"], ["(2, 1)"]),
    "5": (["x = 5"], []),
    "x=5": (["5"], []),
    "100": (["10^2"], ["log 100"]),
    "10": ([], ["10^2"]),
    "72": (["9 * 8", r"9 \times 8"], []),
    r"\log_2 8": (["3"], ["8"]),
    "8": ([], [r"\log_2 8", "log_2 8", r"so we pay \log_2 8 dollars"]),
    "16": ([], ["sqrt(16)", "√16", "f(16)"]),
    "4": (["sqrt(16)"], []),
    "15": ([], [r"x \to 15"]),
}
# Where the answer stands in a longer text; the first group is read as running text only, not as a marked answer.
PLACES = {
    "72": (
        ["She has 48 + 24 = 72 clips.", "The answer is 72.", "The answer is $72 for 3 people.",
         "The final answer is: 9 * 8 = 72", "48 and 24\nTotal:72", r"So $x = 5$ \quad 72", "#### 71 #### 72",
         "So the answer is 72. I checked it 2 times.", "To answer this we add 48 and 24. That makes 72.",
         "The answer to the question is 72", r"it is \boxed{72}", r"it is \boxed{72} and not 73",
         r"first \boxed{71}, no: \boxed{72}", r"\boxed{\text{72 apples}}", "work\n#### 72",
         "#### 2. Heading\nso we get 72", "<answer>72</answer>", "<answer>\n72\n</answer>",
         "<answer>$72 dollars</answer> 73", r"<answer>\boxed{72}</answer>", "<answer>70</answer><answer>72</answer>",
         "<answer>70<answer>72</answer></answer>", "* 72", "**Answer: 72**", "<think>maybe 71</think>72",
         "<think>so far 71 <answer>72</answer>"],
        ["48 of 72 is a part, so 24", "72 or 73", "The answer is 72 or 73", r"first \boxed{72}, no: \boxed{71}",
         r"\boxed{72, 73}", r"\boxed{72 or 73}", "<answer>73</answer> 72", "72 <answer></answer>",
         "<answer>72 or 73</answer>", "<answer>71 72 73</answer>", "<answer>71, 72, 73</answer>",
         "<answer>72</answer><answer>70</answer>", "<think>72</think>", "<think>72</think><answer>71</answer>",
         "<think><answer>72</answer></think>71", "<think>so far 72"],
    ),
    "24": (["48 of 72 is a part, so 24"], []),
    "3": ([], ["The answer is $72 for 3 people.", "so the rest is 10-3"]),
    "15": (
        ["The answer is: 15", "The final answer is: $15.", "The answer is:15", "The answer is : 15",
         "The answer is: **15**", "The answer is: **15** because 3 * 5 = 15", "**The answer is:** 15",
         "**The answer is:** **15** apples", "The answer is: $15$", "The answer is:\n\n15\n\nCheck: 3 * 6 = 18",
         "The answer is “15”", "The answer is, 15", "The answer is,15", "The answer is → 15", "The answer is *15*",
         "The answer is _15_", "Answer -> 15", "The answer to part 2: 15", "The answer is 15, not 16.",
         "<answer>The answer is: 15</answer>", "<answer>It is red, not blue, and costs 15</answer>"],
        ["The answer is: -15"],
    ),
    "-15": (["The answer is: -15", "Answer -> -15"], []),
    "1/2": (["The answer is: 1/2", r"The answer is: \frac{1}{2}", r"The answer is: $\frac{1}{2}$"], []),
    "15%": (["The answer is: 15%"], []),
    "1234": (["The answer is: 1,234", "work\n#### $1,234"], []),
    "2": ([], ["The answer to part 2: 15", "So the answer is 72. I checked it 2 times.", "the total is (3+4)*2"]),
    "16": ([], ["The answer is 15, not 16.", "It is 15, not 16."]),
    "8": ([], [r"The answer is \log_2 8.", r"We pay \log_2 8 dollars."]),
    "5": ([], [r"\boxed{5!}"]),
    "48": ([], ["To answer this we add 48 and 24. That makes 72."]),
    "73": (
        [],
        ["72 or 73", "The answer is 72 or maybe 73", "The answer is 72 and 73", "It is 72, or possibly 73.",
         r"it is \boxed{72} and not 73", "<answer>72 or 73</answer>"],
    ),
    "7": (["so the rest is 10-3"], []),
    "14": (["the total is (3+4)*2"], []),
    "3/4": (
        [r"Therefore $\frac{3}{4}$ of the cake is left.", r"Therefore \frac{3}{4} of the cake is left.",
         r"\boxed{\frac{3}{4}}"],
        [],
    ),
    "1234.5": ([r"\boxed{\$1,234.50}"], []),
    "71": ([], [r"\boxed{72"]),
    "18": (
        ["<answer>Janet makes 18 dollars</answer>", "<answer>9 * 2 = 18 dollars</answer>",
         "<answer>The answer is 18</answer>", "<answer>18 (dollars)</answer>", "<answer>18, I think</answer>"],
        ["<answer>18 k</answer>", "<answer>not 18</answer>", "<answer>less than 18</answer>",
         "<answer>18 or more</answer>", "<answer>18 to 20</answer>", "<answer>18 eggs * 2</answer>",
         "<answer>20% of 90 is 18</answer>", r"<answer>18 \pm 1</answer>", "<answer>1/0</answer>"],
    ),
    "30": ([], ["<answer>2 hours 30 minutes</answer>"]),
    "-18": (["<answer>- 18</answer>"], []),
    r"\sqrt{2}": (["The answer is $\\sqrt{2}$."], []),
}
# fmt: on
MARKED_TOO = cases(NUMBERS, UNITS, FRACTIONS_AND_PERCENTAGES, FORMULAS)
TABLE = MARKED_TOO + cases(PLACES)


@pytest.mark.parametrize(("text", "gold", "expected"), TABLE)
def test_answers_as_written(text, gold, expected):
    assert accuracy(completions=[text], solution=[gold]) == [expected]


@pytest.mark.parametrize(("text", "gold", "expected"), MARKED_TOO)
def test_the_same_answers_marked(text, gold, expected):
    marks = ("<answer>{}</answer>", r"\boxed{{{}}}", "<think>1 or 2</think>\n<answer>\n{}\n</answer>")
    assert accuracy(completions=[mark.format(text) for mark in marks], solution=[gold] * 3) == [expected] * 3


@pytest.mark.parametrize(
    "gold", [None, "", "72 apples, 3 pears", "7:30 pm", "7!", "max(7)", "an answer of " + "many " * 12 + "words"]
)
def test_an_unreadable_gold_is_none_and_never_zero(gold):
    assert accuracy(completions=["72", str(gold)], solution=[gold, gold]) == [None, None]


def test_conversational_completions_and_ignored_columns():
    completion = [{"role": "assistant", "content": [{"type": "text", "text": "<answer>72</answer>"}]}]
    assert accuracy(prompts=["?"], completions=[completion], solution=["72"], level=["easy"]) == [1.0]


def test_off_the_main_thread_where_signals_cannot_be_set():
    answers, golds = [r"\frac{\pi}{2}", "72", r"2\sqrt{3}"], [r"\pi/2", "72", r"\sqrt{11}"]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(accuracy, answers, golds).result() == [1.0, 1.0, 0.0]


QUESTION, QUOTIENT = "What is 876 + 530?", "What is 12 divided by 4?"
COPIES = {
    (QUESTION, "1406"): [
        *("<answer>876+530</answer>", "<answer> 530 + 876 </answer>", "<answer>(876)+(530)*1</answer>"),
        *(r"\boxed{876\,+\,530}", "#### 876+530", "876+530", "The answer is 876+530.", "<think>hm</think>\n876 + 530"),
    ],
    ("1,000 plus 406?", "1,406"): ["#### 1,000+406"],
    (QUOTIENT, "3"): [r"\boxed{12/4}", r"\boxed{12 ÷ 4}", r"\boxed{\frac{12}{4}}", r"\boxed{12 \div 4}"],
}


@pytest.mark.parametrize(("asked", "answer"), [(asked, answer) for asked, given in COPIES.items() for answer in given])
def test_the_questions_own_calculation_is_no_answer(asked, answer):
    question, gold = asked
    assert accuracy([answer], [gold], prompts=[question]) == [0.0]
    assert accuracy([answer], [gold], prompts=[[{"role": "user", "content": question}]]) == [0.0]
    assert accuracy([answer], [gold]) == [1.0]  # without the question it cannot be known


@pytest.mark.parametrize(
    ("question", "answer", "solution"),
    [
        *((QUESTION, answer, "1406") for answer in ("<answer>876+530=1406</answer>", r"\boxed{\frac{2812}{2}}")),
        ("Which is larger, 1/2 or 1/3?", "<answer>1/2</answer>", "1/2"),
        ("What is 3 - 8, and not 5?", "<answer>-5</answer>", "-5"),
        ("Factor x^2 + 3x + 2.", "<answer>(x+1)(x+2)</answer>", "(x+1)(x+2)"),
        ("Between 2 and 7?", r"\boxed{[2, 7]}", "[2, 7]"),
    ],
)
def test_what_was_worked_out_is_an_answer(question, answer, solution):
    assert accuracy([answer], [solution], prompts=[question]) == [1.0]


HOSTILE = [
    "9^{9^{9^9}}", "1e999999999", "9" * 50_000, "(" * 20_000, r"\boxed{" * 20_000, "<answer>" * 20_000,
    "1 " * 20_000, "a" * 50_000 + " 7", "*" * 20_000, "100000!", "10^{9999999}", "1,234" * 10_000,
    "answer is " * 10_000, "$\\" * 10_000, "-1+" * 10_000, "1/0", "<<" * 20_000, "**" * 20_000, "####1" * 10_000,
    "\\frac{" * 10_000, "x = " * 400, "x = 1\n" * 300, "a b " * 500 + "= 1", "because " * 200, "1 or " * 400,
    "(x+1)^{99}" * 9 + "= 0", "x^{999} = y^{999}", "word, " * 300 + "= 1", r"\sum_{i=1}^{999999999} i^i = x",
    "x' " * 500, "10^10^10", "10^{10^{10}}", "(10^{999})^{999}", "999!!", r"\binom{99999999}{5}", "2^" * 60 + "2",
    "-" * 150 + "7", r"\frac{" * 30 + "1" + "}{2}" * 30, "(" * 90 + "7" + ")" * 90, "{" * 90 + "7" + "}" * 90,
    "(" * 11 + "7" + ")" * 11, r"\sqrt{" * 40 + "7" + "}" * 40, r"\begin{pmatrix}" * 20,
    r"\begin{pmatrix}" + r"1 & " * 60 + r"1\end{pmatrix}", r"\begin{pmatrix}9^{9^{9^9}}\end{pmatrix}",
    r"\begin{pmatrix}10^{99999}\end{pmatrix}", "7 and " * 300 + "7", "1:" * 900 + "1", r"\boxed{7} and " * 900,
    "a = 1, b = 2, " * 100, "1 000" + " 000" * 400, "x_1=" * 200, "word " * 400, r"\pm 1, " * 25,
    "71<|im_end|>" * 3000, "\u0667" * 3000, "(x+y)^{999} = 1", "(x+y)^{99}" * 9 + "= 0",
    r"\int_0^y x^{x^2} dx = y", "1/0 = x", "x/0 = y", "0/0 = 0/0", "x = ", "= x", "==", "=, =", "= and =",
    "f(x) + f(y) = 1", r"x = \infty", "x^y = y^x",
]  # fmt: skip
GOLDS = ("72", "x + y - z + 1 = 0", r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}", "odd", "2:3", "a=4, b=5", "[-2,7]")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_hostile_texts_are_wrong_quickly(text):
    for wrapped in (text, f"<answer>{text}</answer>", f"{text} "):
        assert accuracy([wrapped], ["72"]) == [0.0]
    assert accuracy([rf"\boxed{{{text}}}"] * len(GOLDS), GOLDS) == [0.0] * len(GOLDS)
    assert set(accuracy(["72", GOLDS[1]], [text] * 2)) <= {0.0, None}


@pytest.mark.parametrize("formula", [r"\int_0^1 x^{x^{x^x}} dx", r"\binom{10^9}{5\cdot 10^8}"])
def test_a_formula_that_takes_forever_is_given_up(formula, monkeypatch):
    monkeypatch.setattr(math_equality, "TIME_LIMIT", 1)
    logged, counted = {}, {}
    logs = {"log_extra": logged.__setitem__, "log_metric": counted.__setitem__}
    assert accuracy([rf"\boxed{{{formula}}}", r"\boxed{72}"], ["72", "72"], **logs) == [0.0, 1.0]
    assert logged["answer_parsed"] == ["[time limit]", "72"]
    assert counted == {"accuracy/out_of_time": 1}


def test_perturbed_solutions_of_gsm8k_score_zero(gsm8k):
    lines = (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()
    full = [json.loads(line)["answer"] for line in random.Random(0).sample(lines, 500)]
    bodies, golds = zip(
        *((body, gold) for body, _, gold in (text.rpartition("\n#### ") for text in full)), strict=True
    )
    numbers = [int(gold.replace(",", "")) for gold in golds]
    assert accuracy(full, full) == [1.0] * 500
    for wrong in (lambda n: n + 1, lambda n: n * 10 + (n == 0), lambda n: -n - 1, lambda n: n + 0.5):
        hashes = [f"{body}\n#### {wrong(n)}" for body, n in zip(bodies, numbers, strict=True)]
        tagged = [f"{text}\n<answer>{wrong(n)}</answer>" for text, n in zip(full, numbers, strict=True)]
        assert accuracy([*hashes, *tagged], [*golds] * 2) == [0.0] * 1000


def test_every_solution_of_gsm8ks_test_set_is_read_right_in_four_forms(gsm8k):
    lines = (gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    bodies, golds = zip(*((body, gold) for body, _, gold in (a.rpartition("\n#### ") for a in answers)), strict=True)
    forms = (
        "{}\n#### {}",
        "<think>\n{}\n</think>\n<answer>\n{}\n</answer>",
        "{}\n\\boxed{{{}}}",
        "{}\nThe answer is {}.",
    )
    texts = [form.format(body, gold) for form in forms for body, gold in zip(bodies, golds, strict=True)]
    found = accuracy(texts, [*golds] * 4)
    assert (found.count(1.0), len(found)) == (5276, 5276)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("yes", r"\boxed{Yes}", r"\boxed{No}"),
        ("no", "The answer is No.", "The answer is Yes."),
        ("odd", r"\boxed{\text{Odd}}", r"\boxed{\text{Even}}"),
        ("A", "The answer is A.", "The answer is B."),
        ("10", r"It is $\$10$ in all. The answer is $\$10$.", r"The answer is $\$100$."),
        ("18", r"The answer is $\$18.00$ per day.", r"The answer is $\$81.00$ per day."),
        ("0.00003", "3 x 10^-5", "3 x 10^-4"),
        ("0.00003", r"\boxed{3 \times 10^-5}", r"\boxed{3 \times 10^5}"),
        ("1.6 x 10^-19", r"$1.6 \times 10^{-19}$", r"$1.6 \times 10^{-18}$"),
    ],
)
def test_words_letters_dollars_and_small_numbers(gold, right, wrong):
    assert (judge(right, gold).score, judge(wrong, gold).score) == (1, 0)


def test_a_reference_that_took_too_long_once_is_read_again(monkeypatch):
    limited = math_equality._limited
    monkeypatch.setattr(math_equality, "_limited", lambda function: [])
    assert judge(r"\boxed{3x+17}", "3x+17").score is None
    monkeypatch.setattr(math_equality, "_limited", limited)
    assert judge(r"\boxed{3x+17}", "3x+17").score == 1
