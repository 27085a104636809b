"""The accuracy reward: labelled answers (answers.txt), GSM8K's own solutions, hostile texts, threads."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.rewards import accuracy_reward

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library import math_equality
from grpo_ext.rewards.library.math_judgement import NO_ANSWER, judge

accuracy = rewards["accuracy"]
LABELLED = Path(__file__).with_name("answers.txt")
SCORES = {"+": 1.0, "-": 0.0, "~": 0.0, "0": None}


def labelled() -> dict[str, list[tuple[str, str, str, str]]]:
    """Return (reference, question, text, sign) by kind."""
    kinds: dict[str, list[tuple[str, str, str, str]]] = {}
    for line in LABELLED.read_text(encoding="utf-8").splitlines():
        sign, _, text = line.replace("⏎", "\n").partition(" ")
        if sign == "#":
            rows = kinds.setdefault(text, [])
        elif sign == "=":
            solution, question = text, ""
        elif sign == "?":
            question = text
        elif sign:
            rows.append((solution, question, text, sign))
    return {kind: rows for kind, rows in kinds.items() if rows}


TABLE = labelled()


@pytest.mark.parametrize("kind", TABLE)
def test_labelled_answers(kind):
    for solution, question, text, sign in TABLE[kind]:
        found = judge(text, solution, prompt=question)
        assert found.score == SCORES[sign], (solution, question, text, found)
        assert sign != "~" or found.answer_parsed == NO_ANSWER, (solution, text, found)


def test_an_answer_of_one_kind_is_worth_the_same_in_another_mark():
    marks = (
        "<answer>{}</answer>",
        "<think>1 or 2</think>\n<answer>\n{}\n</answer>",
        "<SOLUTION>{}</SOLUTION>",
        "x\n#### {}",
    )
    boxed = [
        (solution, text[7:-1], sign)
        for solution, question, text, sign in TABLE["the whole of a mark"] + TABLE["decimal commas"]
        if text.startswith(r"\boxed{") and text.endswith("}") and not question
    ]
    for solution, answer, sign in boxed[::3]:
        for mark in marks if len(answer) > 2 and answer[0].isdigit() else marks[:3]:
            found = judge(mark.format(answer), solution)
            assert found.score == SCORES[sign], (solution, mark, answer, found)


def test_there_are_many_labelled_answers_of_both_kinds():
    signs = [sign for rows in TABLE.values() for *_, sign in rows]
    assert signs.count("+") > 800
    assert signs.count("-") > 1000
    assert signs.count("~") < 40


@pytest.mark.parametrize("gold", [None, ""])
def test_a_gold_that_is_missing_is_none_and_never_zero(gold):
    assert accuracy(completions=["72", str(gold)], solution=[gold, gold]) == [None, None]


@pytest.mark.parametrize("gold", ["72 apples, 3 pears", "7:30 pm", "max(7)", "an answer of " + "many " * 12 + "words"])
def test_only_the_text_of_a_gold_without_a_value_is_right_and_nothing_else_is_judged(gold):
    assert accuracy(["72", gold, rf"\boxed{{{gold}}}", f"<answer>{gold}</answer>"], [gold] * 4) == [
        None,
        1.0,
        1.0,
        1.0,
    ]


numbers = st.tuples(st.integers(0, 999), st.text("0123456789", min_size=1, max_size=2), st.sampled_from(["", "-"]))


@settings(max_examples=60, deadline=None)
@given(numbers, numbers, st.sampled_from(["", " €", " kg"]), st.sampled_from(["\\boxed{{{}}}", "<answer>{}</answer>"]))
def test_a_decimal_comma_and_a_decimal_point_are_one_number(first, second, unit, mark):
    def written(number: tuple[int, str, str], sign: str) -> str:
        return f"{number[2]}{number[0]}{sign}{number[1]}"

    same = float(written(first, ".")) == float(written(second, "."))
    for gold_sign, answer_sign in ((",", ","), (",", "."), (".", ","), (".", ".")):
        gold = written(first, gold_sign) + unit
        right, other = (mark.format(written(number, answer_sign) + unit) for number in (first, second))
        assert accuracy([right, right.replace("}", "0}") if not unit else right, other], [gold] * 3)[0] == 1.0, (
            gold,
            right,
        )
        assert accuracy([other], [gold]) == [float(same)], (gold, other)


def test_a_column_in_german_thousands():
    golds = ["7.629", "1.234,56", "2.000.000", "3,5", "0,25"]
    right = ["7629", "1234.56", "2000000", "3,5", "1/4"]
    assert accuracy([rf"\boxed{{{text}}}" for text in right], golds, decimal_comma=True) == [1.0] * 5
    assert accuracy([rf"\boxed{{{text}}}" for text in golds], golds, decimal_comma=True) == [1.0] * 5
    assert accuracy([r"\boxed{7629}", r"\boxed{7.629}"], ["7.629"] * 2) == [0.0, 1.0]
    assert accuracy(
        [r"\boxed{7,629}", r"\boxed{3.5}", r"\boxed{7.630}"], ["7.629", "3,5", "7.629"], decimal_comma=True
    ) == [
        0.0,
        1.0,
        0.0,
    ]


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


@pytest.mark.cases(14)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_hostile_texts_are_wrong_quickly(text):
    for wrapped in (text, f"<answer>{text}</answer>", f"{text} "):
        assert accuracy([wrapped], ["72"]) == [0.0]
    assert accuracy([rf"\boxed{{{text}}}"] * len(GOLDS), GOLDS) == [0.0] * len(GOLDS)
    assert set(accuracy(["72", GOLDS[1]], [text] * 2)) <= {0.0, None}


@pytest.mark.parametrize("formula", [r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7}"])
def test_a_formula_that_takes_forever_is_given_up(formula, monkeypatch):
    monkeypatch.setattr(math_equality, "TIME_LIMIT", 0.05)
    logged, counted = {}, {}
    logs = {"log_extra": logged.__setitem__, "log_metric": counted.__setitem__}
    assert accuracy([rf"\boxed{{{formula}}}", r"\boxed{72}"], ["72", "72"], **logs) == [0.0, 1.0]
    assert logged["answer_parsed"] == ["[time limit]", "72"]
    assert counted == {"accuracy/out_of_time": 1, "accuracy/unread": 0.0}


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
    def late(formula: str) -> None:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(math_equality, "_parse", late)
        assert judge(r"\boxed{17+3x}", "3x+17").score is None
    assert judge(r"\boxed{17+3x}", "3x+17").score == 1


# An option with its value; references that are objects; where an answer may be read.


@pytest.mark.parametrize("gold", ["B. 12", "B: 12", "(B): 12", "(b) 12", "Option B: 12", r"\text{(B) 12}", "(B) $12$"])
def test_an_option_with_its_value_in_every_dress(gold):
    right = ["B", "12", "(B)", "B. 12", "B) 12", r"\text{(B) 12}", r"\text{Option B}", "(b) 12"]
    assert accuracy([*(rf"\boxed{{{text}}}" for text in right), "Answer: B) 12"], [gold] * 9) == [1.0] * 9
    wrong = ["C", "13", "(C) 12", "(B) 13", "B or C", "not B", "Option C"]
    assert accuracy([rf"\boxed{{{text}}}" for text in wrong], [gold] * 7) == [0.0] * 7


@pytest.mark.parametrize(
    ("gold", "score"),
    [({"ground_truth": "12", "style": "rule"}, 1), ({"answer": 12}, 1), ({"a": 1, "b": 12}, None), (["12"], 1),
     (["12", "13"], None), ([], None), (12, 1), (12.0, 1), ("", None), ({}, None), ('{"answer": ', None)],
)  # fmt: skip
def test_references_that_are_no_strings(gold, score):
    assert accuracy([r"\boxed{12}"], [gold]) == [score]
    assert accuracy([r"\boxed{13}"], [gold]) == [None if score is None else 0]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('The sum:\n```json\n{"reasoning": "3 + 4", "answer": "12"}\n```', "12"),
        ('{"answer": "\\\\frac{1}{2}"}', r"\frac{1}{2}"),
        ('{"reply": {"answer": ["12"]}}', "12"),
        ('{"a": 12, "b": 13}', None),
        ("<b>3</b> and\n<final_answer>12</final_answer>.", "12"),
        ("<reasoning>12</reasoning>", None),
        (r"\boxed{13} <SOLUTION>\boxed{12}</SOLUTION>", "12"),
        ("<out>It takes 3 hours.\nSo they need 12 hours.</out>", None),
    ],
)
def test_where_an_answer_is_found(text, read):
    """None: the answer is not the content of a mark."""
    found = judge(text, "12").answer_parsed.removesuffix(" hour")
    assert found == read if read else judge(text, "12", "tag").answer_parsed == NO_ANSWER


@pytest.mark.parametrize(
    ("where", "paid"),
    [("auto", "tag"), ("tag", "tag"), ("boxed", "boxed"), ("hash", "hash"), ("last", "sentence")],
)
def test_the_answer_is_read_where_it_was_asked_for(where, paid):
    text = "\\boxed{2}\n<answer>1</answer>\n#### 3\nThe total is 4."
    golds = {"tag": "1", "boxed": "2", "hash": "3", "sentence": "4"}
    found = accuracy([text] * 4, list(golds.values()), read=where)
    assert {name for name, value in zip(golds, found, strict=True) if value} == {paid}
    assert accuracy(["so x = 72"], ["72"], read=where) == [1.0 if where in ("auto", "last") else 0.0]


def test_what_was_cut_off_before_a_mark_is_not_scored():
    texts = ["it is 72", r"\boxed{72}", r"\boxed{71}", "it is 72", "<think>72"]
    ids = [[0] * length for length in (8, 8, 8, 7, 8)]
    assert accuracy(texts, ["72"] * 5, ids, max_length=8) == [None, 1.0, 0.0, 1.0, None]
    assert accuracy(texts, ["72"] * 5, ids) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert accuracy(texts, ["72"] * 5, max_length=8) == [1.0, 1.0, 0.0, 1.0, 0.0]  # a file says nothing of ids


def test_what_was_read_is_logged_beside_the_completions_and_what_was_not_is_counted():
    logged, counted = {}, {}
    texts = [r"\boxed{x = 50\%}", "I count 2", "5 cm", r"\boxed{7 bn}"]
    accuracy(texts, ["50%", "2", "5", "7!!"], log_extra=logged.__setitem__, log_metric=counted.__setitem__)
    assert logged == {
        "solution": ["50%", "2", "5", "7!!"],
        "gold_parsed": ["50%", "2", "5", "7!!"],
        "answer_parsed": ["x = 50%", NO_ANSWER, "5 cm", "7*1000000000"],
    }
    assert counted == {"accuracy/unread": 0.25}


# What TRL judges alike, and where it pays what it should not: a right side for an equation with more on the left,
# equations without a solution, a difference below six decimals, another base, a factor taken for a unit.


def test_trl_pays_what_accuracy_does_not():
    for solution, _, text, _ in TABLE["what TRL pays"]:
        assert accuracy_reward([[{"role": "assistant", "content": text}]], [f"${solution}$"]) == [1.0], (
            solution,
            text,
        )


@pytest.mark.parametrize(("answer", "gold"), [("2x=10", "x=5"), ("2x+3=13", "x=5"), ("2x+1>7", "x>3")])
def test_a_problem_is_not_its_solution(answer, gold):
    assert accuracy(completions=[rf"\boxed{{{answer}}}"], solution=[gold]) == [0.0]
