"""How answers and references are marked and written: formulas in plain text, JSON, tags, options, objects, lists."""

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
         r"\boxed{12 яблок}", r"\boxed{١٢}", "\\boxed{\uff11\uff12}", "La respuesta es 12 manzanas, porque 3*5=15."],
        [r"\boxed{12 dozen}", '{"answer": 13}', r"\boxed{12万}", r"\boxed{12 Dutzend}", r"\boxed{12 docenas}",
         r"\boxed{12打}"],
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
