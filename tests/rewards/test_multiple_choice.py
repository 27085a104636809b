"""`multiple_choice` reads options in the forms in which models write them, and neither denials nor hedges."""

# ruff: noqa: RUF001

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.choices import choice

B = r"""
B
b
(B)
(b)
[B]
B.
B:
**B**
$B$
`B`
"B"
“B”
«B»
'B'
（Ｂ）
Ｂ
B。
B) the cat
(B) the cat
B. the cat
**B.** the cat
- B
> B
### B
B ✅
✅ B
<b>B</b>
\boxed{B}
\boxed{(B)}
\boxed{\text{B}}
\boxed{\mathrm{B}}
\boxed{B) the cat}
\boxed{Option B}
$\boxed{\textbf{(B)}}$
Answer: B
Answer: "B"
Answer: “B”
Answer: `B`
Answer: 'B'
Answer: **B**
**Answer:** B
**Answer: B**
Answer - B
Answer (B)
ANSWER: b
Ans: B
Ans. B
Answer = B
Answer⏎⏎B
The answer is B.
The answer is "B".
The answer is: (B) the cat.
The correct answer would be option B
No, the answer is B.
I choose B
I'd go with B.
I would pick option B
It's B.
It must be B
So B is correct.
B is correct.
B is the correct answer.
Option B
Final choice: **(B)**
A is wrong.⏎B
A) no⏎The answer is B
{"answer": "B"}
{"answer": "b"}
答案是B
答案是B。
答案：B
正确答案是（B）。
选B
我选择 B
答えはBです
正解：B
回答: B
정답은 B입니다
정답: B
Ответ: B
Правильный ответ — B
La respuesta correcta es la B.
Respuesta: B
La réponse est B.
Réponse : B
C'est la réponse B
Die richtige Antwort ist B.
Antwort: B
Lösung: B
الإجابة الصحيحة هي B
الجواب: (B)
Resposta: B
A resposta é B
La risposta è B
उत्तर: B
Đáp án: B
Cevap: B
คำตอบคือ B
Option B: Not enough information
B) Not enough information
(B) False
Answer: B. The cat
It is warm.⏎(B)
text⏎B) the cat
My final choice is B!
the answer is b
answer: b) cat
<SOLUTION>B</SOLUTION>
A is false. C is false. Therefore B.
Answer: B. A, C and D are wrong.
正确选项是B
선택지 B
A alternativa correta é B.
Cevap B'dir.
الخيار الصحيح هو B.
Chọn B.
Jawabannya adalah B.
"""
NONE = r"""
A dog
Answer: A dog
The answer is a cat
The answer is Bob
AB
B's
B2
Bé
B-side
Because
cat
F
7
\boxed{7}
\boxed{A, B}
\boxed{B or C}
\boxed{not B}
A and B
A, B
A/B
A|B
(A) or (B)
B or C
B and C
**B** or **C**
Either B or C
answer is B (or C)
The answer is B (maybe C)
The answer is B, possibly C
The answer is B or C.
Answer: B? Or C?
Answer: B. Or maybe C.
Answer: B? C?
B? C?
Answer: A and B
Answer: A, C
Answer: a, (b)
Answer: B/C
B或C
答案是B或C
答案是B、C
答案是B和C
Ответ: B или C
La respuesta es B o C
B) is not the answer
B is not the answer
B is wrong.
B is incorrect
B isn't right
(B) can't be right
The answer is not B
The answer isn't B.
The answer cannot be B
It's not B.
I would not choose B
Anything but B
The answer is anything but B
The answer is neither A nor B
Not B.
The wrong answer is B
The incorrect answer is B
This is not the answer: B
答案不是B
B不是答案
不选B
Ответ не B
La respuesta no es B
Die Antwort ist nicht B
La réponse n'est pas B
정답은 B가 아닙니다
正解はBではない
A) cat⏎B) dog
A) cat⏎B) dog⏎C) cow
I like it
C'est la vie
Vitamin B is good for a dog
Answer: E coli
A good B movie
B is ruled out.
Answer: none of B
B选项错误
答えはBではありません
B — неверный ответ.
Вариант B неверен
B es incorrecta.
A resposta não é B.
Cevap B değil.
Odpowiedź to nie B.
उत्तर B नहीं है।
คำตอบไม่ใช่ B
התשובה אינה B
\boxed{\neg C}
\boxed{\lnot B}
\boxed{\neq B}
\boxed{\cancel{B}}
\boxed{D} or \boxed{C}
\boxed{A} \boxed{B}
\boxed{A}⏎\boxed{B}
\boxed{B?}
\boxed{B+C}
\boxed{BC}
\boxed{B \text{ and } C}
\boxed{\text{B or C}}
\boxed{B, C}
\boxed{B;C}
\boxed{B) or C)}
\boxed{(B)(C)}
\boxed{B. C}
\boxed{all except B}
\boxed{B^c}
\boxed{2B}
\boxed{B = 3}
\boxed{B is wrong}
not \boxed{B}
\boxed{B} is wrong
\boxed{B} is not it
I reject C
I reject B.
C. D. A.
A. B. C. D.
B. C.
B) C)
A B C D
B. Or C.
I doubt B.
Maybe B.
It could be B.
B, probably
B??
B is out.
I discard B.
Everything points away from B
The opposite of B.
Answer: not B
Answer: A, B
Answer: B / C
Answer: B & C
Answer: B nor C
Answer: B or D
Answer: B C
Answer: (B) or (C)
Answer: B) or C)
Answer: all but B
Answer: A⏎Answer: B
The answer is A. The answer is B.
The answer is B? The answer is C.
The answer is between B and C.
If the answer is B, then C is wrong.
I doubt that the answer is B.
Nobody says that the answer is B.
It is false that the answer is B.
<answer>A</answer><answer>B</answer>
<answer>B C</answer>
<answer>B or C</answer>
<answer>not B</answer>
<answer>B, C</answer>
<answer>B⏎C</answer>
<answer>A) x⏎B) y</answer>
#### A⏎#### B
{"answer": "A or B"}
{"answer": ["A", "B"]}
Cevap: B değil
Ответ: B или C
答案是B或C
答案:不是B
정답: B 아님
答えはB以外です
"""
NOT_WHOLE = r"""
B - the cat
B — the cat
The correct answer is B, not A.
The answer is not A but B.
The answer is B, because A is wrong.
The answer is B since A and C are wrong.
The answer is A. No, the answer is B.
There is no doubt that the answer is B
Option B is right, option A is wrong
选项B是正确的
B because it is red
Answer: B and not A
The answer is B rather than A.
答案是B，不是A。
B选项正确
Я выбираю B.
\boxed{A} no, \boxed{B}
Answer: B, because it is red
Answer: B, a cat
"""  # an option with more around it than its text: not read; a line each; ⏎ is a line break


def forms(table: str) -> list[str]:
    return [line.replace("⏎", "\n") for line in table.strip().split("\n")]


@pytest.mark.parametrize("text", forms(B))
def test_an_answer_that_chooses_b(text):
    assert choice(text) == "B"
    assert rewards["multiple_choice"](completions=[text] * 2, solution=["B", "A"]) == [1.0, 0.0]


@pytest.mark.parametrize("text", forms(NONE) + forms(NOT_WHOLE))
def test_an_answer_that_chooses_nothing(text):
    assert choice(text) is None
    assert rewards["multiple_choice"](completions=[text] * 3, solution=["A", "B", "C"]) == [0.0] * 3


@pytest.mark.parametrize(
    ("text", "choices", "letter"),
    [
        ("Ответ: Б", "АБВГ", "Б"),
        ("Б) кот", "АБВГ", "Б"),
        ("А кот", "АБВГ", None),
        ("الجواب: ب", "أبجد", "ب"),
        ("باب", "أبجد", None),
        ("Ответ: В.", "АБВГ", "В"),
        ("खाना", "कखगघ", None),
        ("答案是乙", "甲乙丙丁", "乙"),
        ("정답은 나입니다", "가나다라", "나"),
        ("答えはイです", "アイウエ", "イ"),
        ("คำตอบคือ ข", "กขคง", "ข"),
        ("I would say H", "ABCDEFGHIJ", "H"),
    ],
)
def test_letters_of_other_scripts(text, choices, letter):
    assert choice(text, choices) == letter
