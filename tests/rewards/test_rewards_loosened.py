"""Each rule by which `accuracy` reads more than a number: what it is for, and what it must not let through.

A policy finds a hole in minutes, so most rows are wrong.
"""

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.math_judgement import judge
from support.answers import cases

accuracy = rewards["accuracy"]
COLUMN = r"\begin{pmatrix}1\\2\\3\end{pmatrix}"
SQUARE = r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}"
ENDED = "<|im_end|>"

# rule: {reference: (answers that are right, answers that are wrong)}
# fmt: off
RULES = {
    "words": {
        r"\text{Evelyn}": ([r"\text{Evelyn}", "evelyn"], []),
        "odd": (
            ["The answer is odd"],
            ["odd or even", "odd, even", "not odd", "probably odd", "odd (or even)", "oddeven", "dod", "o", "",
             "5 odd"],
        ),
        "even": ([], ["odd"]),
        "The midpoints form a regular hexagon": ([], ["a", "regular hexagon"]),
        "a": ([], ["The midpoints form a regular hexagon"]),
        "yes": ([], ["yes no"]),
    },
    "matrices": {
        SQUARE: (
            [SQUARE, r"A = \left[\begin{array}{cc}1 & 2\\3 & 4\end{array}\right]",
             r"\begin{bmatrix}1.0 & 4/2\\3 & 4\end{bmatrix}"],
            [r"\begin{pmatrix}1 & 2\\3 & 5\end{pmatrix}", r"\begin{pmatrix}1 & 3\\2 & 4\end{pmatrix}",
             r"\begin{pmatrix}1 & 2\end{pmatrix}", r"\begin{pmatrix}1 & 2 & 3 & 4\end{pmatrix}",
             r"\begin{pmatrix}\end{pmatrix}", rf"{SQUARE} or {COLUMN}", rf"{SQUARE}, {COLUMN}",
             rf"\text{{not }} {SQUARE}", "4", r"\begin{vmatrix}1 & 2\\3 & 4\end{vmatrix}"],
        ),
        r"\begin{pmatrix}0.000000002\\1\end{pmatrix}": ([], [r"\begin{pmatrix}0.000000001\\1\end{pmatrix}"]),
    },
    "vectors": {
        COLUMN: (["(1, 2, 3)"], ["(3, 2, 1)", "(1, 2)", "(1, 2, 3, 4)", "6"]),
        "(1, 2, 3)": ([COLUMN], []),
        "(1,2,3)": ([r"\langle 1, 2, 3 \rangle"], []),
        "(3,2,1)": ([], [r"\{1, 2, 3\}"]),
    },
    "ratios and times": {
        "2:3": (["2:3", "4:6", r"\frac{2}{3}"], ["3:2", "2:3:4", "2", "0:0", "2:3 or 3:2"]),
        "V_{1}:V_{2}=11:21": (["11:21"], []),
        r"\frac{2}{3}": ([], ["2:3"]),
        "12:00": (["12:00"], ["1:00", "12"]),
        "12:30": ([], ["24:60", "0.4"]),
    },
    "several boxes": {
        "1, 2": ([r"\boxed{1} and \boxed{2}"], [r"\boxed{1} no no no no no \boxed{2}"]),
        "(2,1),(1,2)": ([r"\boxed{(1, 2)}, \boxed{(2, 1)}"], []),
        "72": (
            [r"\boxed{72}, \boxed{72}"],
            [r"\boxed{71}, \boxed{72}", r"\boxed{71} or \boxed{72}", r"\boxed{71} \boxed{72}", r"\boxed{}",
             r"\boxed{} \boxed{}", r"72 \boxed{}"],
        ),
        "71": (
            [],
            [r"\boxed{71}, \boxed{72}", r"\boxed{71}\quad\text{or maybe}\quad\boxed{72}",
             r"\boxed{71}, no: \boxed{72}"],
        ),
    },
    "lists with and, or": {
        "6, 8": ([r"6 \text{ and } 8"], ["6 and 9"]),
        r"6 \text{ and } 8": (["8 and 6"], []),
        "21,16 or 11": (["21, 16, 11"], []),
        "6 and 8": ([], ["6", "6 and 8 and 10"]),
        "72": ([], ["72 or 73", "either 72 or 73"]),
        "73": ([], ["72 or 73 or 74", "72 or else"]),
        "72, 73": ([], ["72, maybe 73"]),
    },
    "systems without names": {
        "AB=4,CD=5": (["4, 5"], []),
        "a=4, b=5": (["(4, 5)", "(a, b) = (4, 5)"], ["5, 4", "(b, a) = (4, 5)", "a = 4, 5", "4", "4, 5, 6", "9"]),
        "p=5,q=2;p=7,q=2": (["(5,2),(7,2)"], ["(2,5),(2,7)", "(5,2)"]),
        "x+y=0, x-y=0": ([], ["0, 0"]),
    },
    "intervals and relations": {
        "[-2,7]": (
            [r"-2 \le x \le 7"],
            [r"-2 < x \le 7", r"-2 \le x \le 8", r"x \le 7", "[-2, 7)", r"(-\infty, \infty)"],
        ),
        "x < 1": (["-x > -1"], ["-x > 1", "-x < -1"]),
        r"x \le 3": (["x ≤ 3"], []),
        "(12, 102)": (["(12,102)"], []),
        "x > 3": ([], ["2x > 6"]),
        "x != 3": ([], ["3", "x = 3"]),
        "x ≠ 3": ([], ["3"]),
        "(12,102)": ([], ["12102"]),
        r"(1, \infty)": ([], [r"\infty"]),
    },
    "units": {
        "5": (["5 cm"], []),
        "5 cm": (["5", "5 centimetres"], ["5 m", "5 kg", "It is 5 meters", "5 cm or 5 m"]),
        r"25\text{ square centimeters}": ([r"25\text{ cm}^2"], []),
        "$125$ miles": ([r"125\textnormal{ miles}"], []),
        "60 mph": (["60 miles per hour"], []),
        "5 meters per second": (["5 m/s"], []),
        "5 dollars": (["5 dollars per hour"], ["5 cents"]),
        "5 km/h": ([], ["5 m/s"]),
        "5 km per hour": ([], ["5 km per day"]),
        "5 euros": ([], ["5 dollars"]),
        "25 cm^2": ([], ["25 cm"]),
        r"2\sqrt{3}\text{ m}": ([], [r"2\sqrt{3}\text{ km}"]),
    },
    "how numbers are written": {
        "1000": (["1 000"], []),
        "1000.99": (["1000,99"], []),
        "1,22": (["1.22"], []),
        "11111100": ([r"11,\! 111,\! 100"], []),
        "1/3": ([r"\frac{1}{3} \approx 0.33"], []),
        "49": (["7²"], []),
        "72": (["\uff17\uff12"], ["71 72 73", "⁷²"]),
        "100": ([], ["1 00"]),
        "200": ([], ["100 200"]),
        "22": ([], ["1,22"]),
        "1": ([], ["1,22", "①"]),
        "1.22": ([], ["22, 1"]),
        "1.234": ([], ["1,234"]),
        "73": ([], ["72 ≈ 73"]),
        "7": ([], ["7²", "7³"]),
        r"\pi \cdot 10^{-20}": ([], [r"2\pi \cdot 10^{-20}"]),
    },
    "hedges and negations": {
        "x=5": (["so x = 5"], ["not x = 5", "twice x = 5", "at most x = 5", "none or x = 5"]),
        "5": ([], ["six or 5", "5 or none", "none, 5", "-(5 cm)", "(5 cm)^2"]),
        "5 cm": ([], ["5 cm (5 m)"]),
        "(1,2)": ([], ["either (1,2) or (2,1)", "(1,2) or more"]),
    },
    "text after an end token": {
        "72": ([f"{ENDED}72"], [f"{ENDED}", f"71{ENDED}72", f"71 or 72{ENDED}72"]),
    },
}
# fmt: on
ROWS = [(rule, *case) for rule, table in RULES.items() for case in cases(table)]


@pytest.mark.parametrize(("rule", "answer", "gold", "expected"), ROWS)
def test_marked(rule, answer, gold, expected):
    for mark in (r"\boxed{{{}}}", "<answer>{}</answer>"):
        text = mark.format(answer)
        if rule in ("several boxes", "text after an end token"):
            text = answer if "answer" not in mark or "<|" in answer else text
        assert accuracy([text], [gold]) == [expected], judge(text, gold)


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("The answer is (1,2) or more.", "(1,2)", 0.0),  # a bound
        ("It is (1,2)", "(1,2)", 1.0),
        (rf"\boxed{{72}}{ENDED}\boxed{{71}}", "72", 1.0),
        (r"\boxed{71}</s>\boxed{72}", "72", 0.0),
    ],
)
def test_in_running_text(text, gold, expected):
    assert accuracy([text], [gold]) == [expected]


@pytest.mark.parametrize(
    ("where", "paid"),
    [("auto", "tag"), ("tag", "tag"), ("boxed", "boxed"), ("hash", "hash"), ("last", "hash")],  # the last number: 3
)
def test_the_answer_is_read_where_it_was_asked_for(where, paid):
    text = "The answer is 4.\n\\boxed{2}\n<answer>1</answer>\n#### 3"
    golds = {"tag": "1", "boxed": "2", "hash": "3", "sentence": "4"}
    found = accuracy([text] * 4, list(golds.values()), read=where)
    assert {name for name, value in zip(golds, found, strict=True) if value} == {paid}
    assert accuracy(["so 72"], ["72"], read=where) == [1.0 if where in ("auto", "last") else 0.0]


def test_what_was_cut_off_before_a_mark_is_not_scored():
    texts = ["it is 72", r"\boxed{72}", r"\boxed{71}", "it is 72", "<think>72"]
    ids = [[0] * length for length in (8, 8, 8, 7, 8)]
    assert accuracy(texts, ["72"] * 5, ids, max_length=8) == [None, 1.0, 0.0, 1.0, None]
    assert accuracy(texts, ["72"] * 5, ids) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert accuracy(texts, ["72"] * 5, max_length=8) == [1.0, 1.0, 0.0, 1.0, 0.0]  # a file says nothing of ids


def test_what_was_read_is_logged_beside_the_completions():
    logged = {}
    texts = [r"\boxed{x = 50\%}", "no idea", "5 cm", "7"]
    accuracy(texts, ["50%", "2", "5", "7!"], log_extra=logged.__setitem__)
    assert logged == {
        "solution": ["50%", "2", "5", "7!"],
        "gold_parsed": ["50%", "2", "5", "[unreadable]"],
        "answer_parsed": ["x = 50%", "[no answer]", "5 cm", "[not read]"],
    }
