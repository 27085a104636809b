"""How answers and references are marked and written: formulas in plain text, JSON, tags, options, objects, lists."""

# ruff: noqa: RUF001

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.math_judgement import judge

accuracy = rewards["accuracy"]

# reference: (answers that are right, answers that are wrong, answers that cannot be judged by it)
# fmt: off
TABLE = {
    "3": ([], [r"\boxed{pi/3}"], []),
    "12": (
        ["答案是12。", r"\boxed{12个}", "Answer: 12 ✅", "<SOLUTION>12</SOLUTION>", '{"answer": 12}',
         r"\boxed{12 яблок}", r"\boxed{١٢}", "\\boxed{\uff11\uff12}", "La respuesta es 12 manzanas, porque 3*5=15.",
         r"\boxed{\textcolor{red}{12}}", r"\boxed{{\bf 12}}", "Ответ — 12", r"\boxed{USD 12}",
         r"\boxed{12\text{ times}}", "<answer>twelve</answer>", "The answer is twelve.", r"\boxed{十二}",
         "<|answer|>12", "12<|user|>13"],
        [r"\boxed{12 dozen}", '{"answer": 13}', r"\boxed{12万}", r"\boxed{12 Dutzend}", r"\boxed{12 docenas}",
         r"\boxed{12打}", r"\boxed{\text{sum of 12 and } x}", r"\boxed{12\text{ times }3}", r"\boxed{twelve hundred}",
         "The answer is 12 percent of 50, that is, 6."],
        [],
    ),
    "9": (
        [],
        [r"\boxed{any number except 9}", r"\boxed{除9}", r"\boxed{любое число кроме 9}",
         r"\boxed{jede Zahl außer 9}", r"\boxed{cualquier número excepto 9}", r"\boxed{tout nombre sauf 9}"],
        [],
    ),
    "8": (
        [r"\boxed{8 of them}", r"\boxed{8 apples per day}", r"\boxed{8 apples/day}", r"\boxed{\text{Total: } 8}",
         r"\boxed{8 (eight)}", r"\boxed{8\text{ red balls}}"],
        [r"\boxed{8/rate}", r"\boxed{rate/8}", r"\boxed{8 pairs}", r"\boxed{8*rate}", r"\boxed{x over 8}",
         r"\boxed{8 choose 2}", r"\boxed{e/8}", r"\boxed{tau/8}", r"\boxed{multiple of 8}", r"\boxed{all but 8}",
         r"\boxed{8+}", r"\boxed{8ish}", r"\boxed{>8}", r"\boxed{n=8 fails}", r"\boxed{8 out of 10}",
         r"\boxed{8!}", r"\boxed{minus 8}", r"\boxed{sin(8)}", r"\boxed{8 sin(30)}", r"\boxed{log 8}",
         r"\boxed{8 mod 3}"],
        [],
    ),
    "pi/6": ([r"\boxed{\frac{\pi}{6}}"], [r"\boxed{6}"], []),
    r"\frac{\pi}{3}": ([r"\boxed{pi/3}"], [], []),
    r"36\pi": ([r"\boxed{36*pi}", r"\boxed{36pi}", "36 * pi"], [], []),
    "x^2+3x": ([r"\boxed{x**2 + 3*x}", "<answer>x^2 + 3*x</answer>"], [], []),
    r"\frac{\sqrt{2}}{2}": ([r"\boxed{sqrt(2)/2}", "sqrt(2)/2"], [], []),
    r"2\pi": ([r"\boxed{2pi}", "2*pi"], [], []),
    "x^{10}": ([r"\boxed{x**10}", r"\boxed{x^10}"], [], []),
    "x^{n+1}": ([r"\boxed{x**(n+1)}"], [], []),
    "e^{2x}": ([r"\boxed{e^(2x)}", r"\boxed{exp(2*x)}"], [], []),
    r"\sqrt{\frac{1}{2m}}": ([r"\boxed{sqrt(1/(2*m))}"], [], []),
    r"\ln 2": ([r"\boxed{ln(2)}"], [], []),
    r"\frac{\log 3}{\log 2}": ([r"\boxed{log(3)/log(2)}"], [], []),
    r"x \le 3": ([r"\boxed{x <= 3}"], [], []),
    r"x \ge 3": ([r"\boxed{x >= 3}"], [], []),
    "12元": ([r"\boxed{12}"], [r"\boxed{13}"], []),
    '{"ground_truth": "x^2+1", "style": "rule"}': ([r"\boxed{x^2+1}"], [], []),
    "{'ground_truth': 'x^2+1', 'style': 'rule'}": ([], [], [r"\boxed{x^2+1}"]),
    '["3", "5"]': ([], [], [r"\boxed{3, 5}"]),
    '["3"]': ([r"\boxed{3}"], [], []),
    "[-2,7]": ([r"\boxed{[-2,7]}"], [], []),
    "The proof is by contradiction; see Lemma 4.": ([], [], [r"\boxed{4}"]),
    r"\textbf{(B)}\ 12": (
        [r"\boxed{12}", r"\boxed{B}", r"\boxed{\textbf{(B)}\ 12}", r"\boxed{(B)}"],
        [r"\boxed{C}", r"\boxed{\textbf{(C)}\ 12}", r"\boxed{13}"],
        [],
    ),
    r"\textbf{(B) } 12": ([r"\boxed{B}"], [], []),
    r"\textbf{(B)}\ \frac{1}{2}": ([r"\boxed{0.5}"], [], []),
    "(B) 12": (["The answer is B."], [], []),
    r"\sqrt{\frac{1}{m}}": ([r"\boxed{\frac{1}{\sqrt{m}}}"], [r"\boxed{\frac{1}{m}}"], []),
    r"\log(xy)": ([r"\boxed{\log x + \log y}"], [], []),
    r"\sqrt{x^2}": ([r"\boxed{|x|}"], [], []),
    "|x|": ([], [r"\boxed{x}"], []),
    "42": (["6乘以7等于42。"], [], []),
    "17": (["Ответ: 17"], ["Ответ: 18"], []),
    "30": (["<SOLUTION>30</SOLUTION>"], [], []),
    "23": (['{"answer": 23}'], [], []),
    "12.5": ([r"\boxed{12,5}", "La respuesta es 12,5."], [], []),
    "120000": ([r"\boxed{12万}"], [], []),
    "1234.56": ([r"\boxed{1.234,56}"], [], []),
    "1234567": (
        ["1.234.567", "1\u2019234\u2019567", r"\boxed{1_234_567}", r"\boxed{1 234 567,00}"],
        ["1.234567", r"\boxed{1, 234, 567}"],
        [],
    ),
    "2½": ([r"\boxed{2½}", r"\boxed{2 1/2}", "2.5", "two and a half"], ["1", r"\boxed{2\cdot\frac12}"], []),
    "twelve": (["twelve", r"\boxed{12}"], [r"\boxed{eleven}"], []),
    "25%": ([r"\boxed{百分之25}", r"\boxed{%25}"], [r"\boxed{百分之75}"], []),
    "1200000000": (["1.2 × 10⁹", r"\boxed{1,2 миллиарда}"], ["1.2 × 10⁸", r"\boxed{1,2 млн}"], []),
    r"6.02 \times 10^{23}": (["602 × 10²¹"], ["602 × 10²²"], []),
    "(2,5)": ([r"\boxed{]2,5[}", "Ответ: (2; 5)"], [r"\boxed{[2,5]}", r"\boxed{]2,5]}"], []),
    r"[-1, \infty)": (
        [r"\boxed{[-1;+\infty[}", r"\boxed{\{x \mid x \ge -1\}}", r"\boxed{[-1, inf)}"],
        [r"\boxed{\{x \mid x > -1\}}", r"\boxed{]-1;+\infty[}"],
        [],
    ),
    r"\{1,2,3\}": ([r"\boxed{\lbrace 1,2,3\rbrace}", "The answer is 1, 2, and 3."], ["The answer is 1, 2."], []),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": ([r"\boxed{[[1,2],[3,4]]}"], [r"\boxed{[[1,3],[2,4]]}"], []),
    r"3\sqrt{2}": (["3√2", r"\boxed{3√(2)}", "3*2**0.5"], ["2√3", "3+√2"], []),
    "3+4i": ([r"\boxed{3+4\mathrm{i}}", "3+4*i"], ["3-4*i"], []),
    r"\frac{1}{2}": ([r"\boxed{\sin 30^\circ}", r"\boxed{1 \over 2}", "one half"], [r"\boxed{\cos 30^\circ}"], []),
    "4:3": (["The ratio is 4:3."], ["The ratio is 3:4."], []),
    "1,5": ([r"\boxed{\frac32}"], [r"\boxed{\frac15}"], []),
    "больше": ([r"\boxed{больше}"], [r"\boxed{меньше}", r"\boxed{не больше}"], []),
    "大于": ([r"\boxed{大于}"], [r"\boxed{小于}"], []),
    "x=3, y=4": ([r"\boxed{\begin{cases}x=3\\y=4\end{cases}}"], [r"\boxed{\begin{cases}x=4\\y=3\end{cases}}"], []),
    "$18": ([r"\boxed{18}", "18 dollars"], ["18 cents", r"\boxed{€18}", r"\boxed{18 €}"], []),
    "12 cm": (["12 см"], ["12 м"], []),
    "5": ([r"\boxed{|A|=5}"], [r"\boxed{-x=5}"], []),
    "偶数": ([r"\boxed{偶数}", "答案是偶数。"], [r"\boxed{奇数}"], []),
    "是": ([r"\boxed{是}"], [], []),
    "Да": (["Ответ: да"], [], []),
}
# fmt: on


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (text, gold, score)
        for gold, lists in TABLE.items()
        for score, texts in zip((1.0, 0.0, None), lists, strict=True)
        for text in texts
    ],
)
def test_marks_and_references(text, gold, score):
    assert accuracy([text], [gold]) == [score], judge(text, gold)


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
        ('{"answer": "\\\\frac{1}{2}"}', "1/2"),
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
    assert found == read if read else judge(text, "12", "tag").answer_parsed == "[no answer]"
