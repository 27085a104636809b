"""Each rule by which `accuracy` reads more than a number: what it is for, and what it must not let through.

A policy finds a hole in minutes, so every group below has more rows that are wrong than rows that are right.
"""

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.math_judgement import judge

accuracy = rewards["accuracy"]
COLUMN = r"\begin{pmatrix}1\\2\\3\end{pmatrix}"
SQUARE = r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}"
ENDED = "<|im_end|>"

# rule: [(answer, gold, expected)]
RULES = {
    "words": [
        (r"\text{Evelyn}", r"\text{Evelyn}", 1.0),
        ("evelyn", r"\text{Evelyn}", 1.0),
        ("The answer is odd", "odd", 1.0),
        ("odd or even", "odd", 0.0),
        ("odd, even", "odd", 0.0),
        ("not odd", "odd", 0.0),
        ("probably odd", "odd", 0.0),
        ("odd (or even)", "odd", 0.0),
        ("oddeven", "odd", 0.0),
        ("dod", "odd", 0.0),
        ("o", "odd", 0.0),
        ("", "odd", 0.0),
        ("5 odd", "odd", 0.0),
        ("odd", "even", 0.0),
        ("a", "The midpoints form a regular hexagon", 0.0),
        ("regular hexagon", "The midpoints form a regular hexagon", 0.0),
        ("The midpoints form a regular hexagon", "a", 0.0),
        ("yes no", "yes", 0.0),
    ],
    "matrices": [
        (SQUARE, SQUARE, 1.0),
        (r"A = \left[\begin{array}{cc}1 & 2\\3 & 4\end{array}\right]", SQUARE, 1.0),
        (r"\begin{bmatrix}1.0 & 4/2\\3 & 4\end{bmatrix}", SQUARE, 1.0),
        (r"\begin{pmatrix}1 & 2\\3 & 5\end{pmatrix}", SQUARE, 0.0),
        (r"\begin{pmatrix}1 & 3\\2 & 4\end{pmatrix}", SQUARE, 0.0),
        (r"\begin{pmatrix}1 & 2\end{pmatrix}", SQUARE, 0.0),
        (r"\begin{pmatrix}1 & 2 & 3 & 4\end{pmatrix}", SQUARE, 0.0),
        (r"\begin{pmatrix}\end{pmatrix}", SQUARE, 0.0),
        (rf"{SQUARE} or {COLUMN}", SQUARE, 0.0),
        (rf"{SQUARE}, {COLUMN}", SQUARE, 0.0),
        (rf"\text{{not }} {SQUARE}", SQUARE, 0.0),
        ("4", SQUARE, 0.0),
        (r"\begin{vmatrix}1 & 2\\3 & 4\end{vmatrix}", SQUARE, 0.0),
        (r"\begin{pmatrix}0.000000001\\1\end{pmatrix}", r"\begin{pmatrix}0.000000002\\1\end{pmatrix}", 0.0),
    ],
    "vectors": [
        ("(1, 2, 3)", COLUMN, 1.0),
        (COLUMN, "(1, 2, 3)", 1.0),
        (r"\langle 1, 2, 3 \rangle", "(1,2,3)", 1.0),
        ("(3, 2, 1)", COLUMN, 0.0),
        ("(1, 2)", COLUMN, 0.0),
        ("(1, 2, 3, 4)", COLUMN, 0.0),
        (r"\{1, 2, 3\}", "(3,2,1)", 0.0),
        ("6", COLUMN, 0.0),
    ],
    "ratios and times": [
        ("2:3", "2:3", 1.0),
        ("4:6", "2:3", 1.0),
        (r"\frac{2}{3}", "2:3", 1.0),
        ("11:21", "V_{1}:V_{2}=11:21", 1.0),
        ("3:2", "2:3", 0.0),
        ("2:3:4", "2:3", 0.0),
        ("2", "2:3", 0.0),
        ("0:0", "2:3", 0.0),
        ("2:3 or 3:2", "2:3", 0.0),
        ("2:3", r"\frac{2}{3}", 0.0),  # odds are no probability
        ("12:00", "12:00", 1.0),
        ("1:00", "12:00", 0.0),
        ("24:60", "12:30", 0.0),
        ("12", "12:00", 0.0),
        ("0.4", "12:30", 0.0),
    ],
    "several boxes": [
        (r"\boxed{1} and \boxed{2}", "1, 2", 1.0),
        (r"\boxed{(1, 2)}, \boxed{(2, 1)}", "(2,1),(1,2)", 1.0),
        (r"\boxed{72}, \boxed{72}", "72", 1.0),
        (r"\boxed{71}, \boxed{72}", "72", 0.0),
        (r"\boxed{71}, \boxed{72}", "71", 0.0),
        (r"\boxed{71} or \boxed{72}", "72", 0.0),
        (r"\boxed{71} \boxed{72}", "72", 0.0),
        (r"\boxed{71}\quad\text{or maybe}\quad\boxed{72}", "71", 0.0),
        (r"\boxed{1} no no no no no \boxed{2}", "1, 2", 0.0),
        (r"\boxed{71}, no: \boxed{72}", "71", 0.0),
        (r"\boxed{}", "72", 0.0),
        (r"\boxed{} \boxed{}", "72", 0.0),
        (r"72 \boxed{}", "72", 0.0),
    ],
    "lists with and, or": [
        (r"6 \text{ and } 8", "6, 8", 1.0),
        ("8 and 6", r"6 \text{ and } 8", 1.0),
        ("21, 16, 11", "21,16 or 11", 1.0),
        ("6 and 9", "6, 8", 0.0),
        ("6", "6 and 8", 0.0),
        ("6 and 8 and 10", "6 and 8", 0.0),
        ("72 or 73", "72", 0.0),
        ("72 or 73 or 74", "73", 0.0),
        ("72 or else", "73", 0.0),
        ("72, maybe 73", "72, 73", 0.0),
        ("either 72 or 73", "72", 0.0),
    ],
    "systems without names": [
        ("4, 5", "AB=4,CD=5", 1.0),
        ("(4, 5)", "a=4, b=5", 1.0),
        ("(a, b) = (4, 5)", "a=4, b=5", 1.0),
        ("(5,2),(7,2)", "p=5,q=2;p=7,q=2", 1.0),
        ("5, 4", "a=4, b=5", 0.0),
        ("(b, a) = (4, 5)", "a=4, b=5", 0.0),
        ("a = 4, 5", "a=4, b=5", 0.0),
        ("4", "a=4, b=5", 0.0),
        ("4, 5, 6", "a=4, b=5", 0.0),
        ("9", "a=4, b=5", 0.0),
        ("(2,5),(2,7)", "p=5,q=2;p=7,q=2", 0.0),
        ("(5,2)", "p=5,q=2;p=7,q=2", 0.0),
        ("0, 0", "x+y=0, x-y=0", 0.0),
    ],
    "intervals and relations": [
        (r"-2 \le x \le 7", "[-2,7]", 1.0),
        ("-x > -1", "x < 1", 1.0),
        ("x ≤ 3", r"x \le 3", 1.0),
        ("(12,102)", "(12, 102)", 1.0),
        (r"-2 < x \le 7", "[-2,7]", 0.0),
        (r"-2 \le x \le 8", "[-2,7]", 0.0),
        (r"x \le 7", "[-2,7]", 0.0),
        ("[-2, 7)", "[-2,7]", 0.0),
        ("-x > 1", "x < 1", 0.0),
        ("-x < -1", "x < 1", 0.0),
        ("2x > 6", "x > 3", 0.0),
        ("3", "x != 3", 0.0),
        ("x = 3", "x != 3", 0.0),
        ("3", "x ≠ 3", 0.0),
        ("12102", "(12,102)", 0.0),
        (r"(-\infty, \infty)", "[-2,7]", 0.0),
        (r"\infty", r"(1, \infty)", 0.0),
    ],
    "units": [
        ("5 cm", "5", 1.0),
        ("5", "5 cm", 1.0),
        ("5 centimetres", "5 cm", 1.0),
        (r"25\text{ cm}^2", r"25\text{ square centimeters}", 1.0),
        (r"125\textnormal{ miles}", "$125$ miles", 1.0),
        ("60 miles per hour", "60 mph", 1.0),
        ("5 m/s", "5 meters per second", 1.0),
        ("5 dollars per hour", "5 dollars", 1.0),
        ("5 m/s", "5 km/h", 0.0),
        ("5 km per day", "5 km per hour", 0.0),
        ("5 dollars", "5 euros", 0.0),
        ("5 m", "5 cm", 0.0),
        ("5 kg", "5 cm", 0.0),
        ("5 cents", "5 dollars", 0.0),
        ("25 cm", "25 cm^2", 0.0),
        ("It is 5 meters", "5 cm", 0.0),
        (r"2\sqrt{3}\text{ km}", r"2\sqrt{3}\text{ m}", 0.0),
        ("5 cm or 5 m", "5 cm", 0.0),
    ],
    "how numbers are written": [
        ("1 000", "1000", 1.0),
        ("1000,99", "1000.99", 1.0),
        ("1.22", "1,22", 1.0),
        (r"11,\! 111,\! 100", "11111100", 1.0),
        (r"\frac{1}{3} \approx 0.33", "1/3", 1.0),
        ("7²", "49", 1.0),
        ("\uff17\uff12", "72", 1.0),
        ("1 00", "100", 0.0),
        ("71 72 73", "72", 0.0),
        ("100 200", "200", 0.0),
        ("1,22", "22", 0.0),
        ("1,22", "1", 0.0),
        ("22, 1", "1.22", 0.0),
        ("1,234", "1.234", 0.0),
        ("72 ≈ 73", "73", 0.0),
        ("7²", "7", 0.0),
        ("7³", "7", 0.0),
        ("⁷²", "72", 0.0),
        ("①", "1", 0.0),
        (r"2\pi \cdot 10^{-20}", r"\pi \cdot 10^{-20}", 0.0),
    ],
    "hedges and negations": [
        ("so x = 5", "x=5", 1.0),
        ("not x = 5", "x=5", 0.0),
        ("twice x = 5", "x=5", 0.0),
        ("at most x = 5", "x=5", 0.0),
        ("none or x = 5", "x=5", 0.0),
        ("six or 5", "5", 0.0),
        ("5 or none", "5", 0.0),
        ("none, 5", "5", 0.0),
        ("-(5 cm)", "5", 0.0),
        ("(5 cm)^2", "5", 0.0),
        ("5 cm (5 m)", "5 cm", 0.0),
        ("either (1,2) or (2,1)", "(1,2)", 0.0),
        ("(1,2) or more", "(1,2)", 0.0),
    ],
    "text after an end token": [
        (f"{ENDED}", "72", 0.0),
        (f"{ENDED}72", "72", 1.0),  # what a template opens with
        (f"71{ENDED}72", "72", 0.0),
        (f"71 or 72{ENDED}72", "72", 0.0),
    ],
}
ROWS = [(rule, *row) for rule, rows in RULES.items() for row in rows]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_more_that_is_wrong(rule):
    expected = [row[2] for row in RULES[rule]]
    assert expected.count(0.0) > expected.count(1.0)


@pytest.mark.parametrize("mark", [r"\boxed{{{}}}", "<answer>{}</answer>"])
@pytest.mark.parametrize(("rule", "answer", "gold", "expected"), ROWS)
def test_marked(mark, rule, answer, gold, expected):
    text = mark.format(answer)
    if rule in ("several boxes", "text after an end token"):
        text = answer if "answer" not in mark or "<|" in answer else text
    assert accuracy([text], [gold]) == [expected], judge(text, gold)


def test_a_bound_in_running_text_is_no_answer():
    assert accuracy(["The answer is (1,2) or more.", "It is (1,2)"], ["(1,2)"] * 2) == [0.0, 1.0]


def test_a_box_before_an_end_token_counts_and_one_behind_it_does_not():
    assert accuracy([rf"\boxed{{72}}{ENDED}\boxed{{71}}", r"\boxed{71}</s>\boxed{72}"], ["72", "72"]) == [
        1.0,
        0.0,
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "text",
    [
        "10^10^10", "10^{10^{10}}", "(10^{999})^{999}", "999!!", r"\binom{99999999}{5}", "2^" * 60 + "2",
        "-" * 150 + "7", r"\frac{" * 30 + "1" + "}{2}" * 30, "(" * 90 + "7" + ")" * 90, "{" * 90 + "7" + "}" * 90,
        "(" * 11 + "7" + ")" * 11, r"\sqrt{" * 40 + "7" + "}" * 40, r"\begin{pmatrix}" * 20,
        r"\begin{pmatrix}" + r"1 & " * 60 + r"1\end{pmatrix}", r"\begin{pmatrix}9^{9^{9^9}}\end{pmatrix}",
        r"\begin{pmatrix}10^{99999}\end{pmatrix}", "7 and " * 300 + "7", "1:" * 900 + "1", r"\boxed{7} and " * 900,
        "a = 1, b = 2, " * 100, "1 000" + " 000" * 400, "x_1=" * 200, "word " * 400, r"\pm 1, " * 25,
        "72<|im_end|>" * 3000, "\u0667" * 3000,
    ],
    ids=lambda text: text[:16],
)  # fmt: skip
def test_hostile_forms_are_wrong_quickly(text):
    for gold in ("72", SQUARE, "odd", "2:3", "a=4, b=5", "[-2,7]"):
        wrong = 1.0 if (gold, text[:3]) == ("72", "72<") else 0.0
        assert accuracy([rf"\boxed{{{text}}}", text], [gold] * 2) in ([wrong] * 2, [0.0, wrong])
    assert accuracy(["72"], [text]) in ([0.0], [None], [1.0 if text.startswith("72<") else None])


@pytest.mark.parametrize(
    ("where", "paid"),
    [
        ("auto", {"tag"}),
        ("tag", {"tag"}),
        ("boxed", {"boxed"}),
        ("hash", {"hash"}),
        ("last", {"hash"}),  # the last number, which the hashes stand before
    ],
)
def test_the_answer_is_read_where_it_was_asked_for(where, paid):
    text = "The answer is 4.\n\\boxed{2}\n<answer>1</answer>\n#### 3"
    golds = {"tag": "1", "boxed": "2", "hash": "3", "sentence": "4"}
    found = accuracy([text] * 4, list(golds.values()), read=where)
    assert {name for name, value in zip(golds, found, strict=True) if value} == paid
    assert accuracy(["so 72"], ["72"], read=where) == [1.0 if where in ("auto", "last") else 0.0]


def test_what_was_cut_off_before_a_mark_is_not_scored():
    texts = ["it is 72", r"\boxed{72}", r"\boxed{71}", "it is 72", "<think>72"]
    ids = [[0] * length for length in (8, 8, 8, 7, 8)]
    assert accuracy(texts, ["72"] * 5, ids, max_length=8) == [None, 1.0, 0.0, 1.0, None]
    assert accuracy(texts, ["72"] * 5, ids) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert accuracy(texts, ["72"] * 5, max_length=8) == [1.0, 1.0, 0.0, 1.0, 0.0]  # a file says nothing of ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read": "box"}, "read='box' is no place of an answer. Did you mean 'boxed'?"),
        ({"max_length": 0}, "max_length=0"),
    ],
)
def test_an_option_out_of_range_is_told(options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        accuracy([], [], **options)


def test_what_was_read_is_logged_beside_the_completions():
    logged = {}
    texts = [r"\boxed{x = 50\%}", "no idea", "5 cm", "7"]
    accuracy(texts, ["50%", "2", "5", "7!"], log_extra=logged.__setitem__)
    assert logged == {
        "solution": ["50%", "2", "5", "7!"],
        "gold_parsed": ["50%", "2", "5", "[unreadable]"],
        "answer_parsed": ["x = 50%", "[no answer]", "5 cm", "[not read]"],
    }
