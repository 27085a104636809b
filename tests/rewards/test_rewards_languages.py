"""Answers in many scripts and ways of writing: the letter of any script is a letter, a mark holds only the value."""

# ruff: noqa: RUF001

import itertools

import pytest

from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.library.math_judgement import judge

accuracy = rewards["accuracy"]

# language: a sentence, a counted noun, what makes another value of a number
# fmt: off
LANGUAGES = {
    "English": ("The answer is {}.", " apples", ["any number except {}", "less than {}", "{} dozen", "not {}"]),
    "Chinese": ("答案是{}。", "个苹果", ["除{}以外", "小于{}", "{}打", "不是{}", "{}万", "{}的倍数", "{}对"]),
    "Japanese": ("答えは{}です。", "個", ["{}以外の数", "{}未満", "{}ダース", "{}ではない"]),
    "Korean": ("답은 {}입니다.", "개", ["{} 이상", "{} 미만", "{}만"]),
    "Russian": ("Ответ: {}.", " яблок",
                ["любое число кроме {}", "{} тыс.", "{} млн", "{} в квадрате", "{} с половиной"]),
    "Spanish": ("La respuesta es {}.", " manzanas",
                ["todo excepto {}", "menos de {}", "{} docenas", "no es {}", "{} al cuadrado"]),
    "French": ("La réponse est {}.", " pommes",
               ["tout nombre sauf {}", "moins de {}", "{} douzaines", "pas {}", "{} et demi"]),
    "German": ("Die Antwort ist {}.", " Äpfel",
               ["jede Zahl außer {}", "weniger als {}", "{} Dutzend", "{} Mio.", "kleiner als {}"]),
    "Portuguese": ("A resposta é {}.", " maçãs", ["tudo exceto {}", "menos de {}", "{} dúzias", "não {}"]),
    "Italian": ("La risposta è {}.", " mele", ["tutti tranne {}", "meno di {}", "{} dozzine"]),
    "Arabic": ("الإجابة هي {}.", " تفاحات", ["أقل من {}", "ليس {}", "أكثر من {}"]),
    "Hindi": ("उत्तर {} है।", " सेब", ["{} हज़ार", "{} नहीं", "{} लाख", "{} का आधा"]),
    "Turkish": ("Cevap: {}.", " elma", ["{} değil", "{} hariç", "{} bin", "{}'nin yarısı"]),
    "Polish": ("Odpowiedź: {}.", " jabłek", ["nie {}", "oprócz {}", "{} tys."]),
    "Vietnamese": ("Đáp án là {}.", " quả táo", ["không {}", "{} nghìn"]),
    "Thai": ("คำตอบคือ {}", " ผล", ["ไม่ใช่ {}", "{} พัน"]),
    "Dutch": ("Het antwoord is {}.", " appels", ["niet {}", "{} duizend"]),
    "Greek": ("Η απάντηση είναι {}.", " μήλα", ["{} χιλιάδες"]),
    "Hebrew": ("התשובה היא {}.", " תפוחים", ["לא {}", "{} אלף"]),
    "Indonesian": ("Jawabannya adalah {}.", " apel", ["bukan {}", "{} juta"]),
}
# fmt: on
MARKS = {
    "box": r"So \boxed{{{}}}",
    "answer": "<think>3 or 4</think><answer>{}</answer>",
    "tag": "It is 3 and 4.\n<SOLUTION>{}</SOLUTION>",
    "hash": "3 + 4\n#### {}",
    "json": '{{"answer": "{}"}}',
    "text in a box": r"\boxed{{\text{{{}}}}}",
}
VALUES = [
    ("12", ["12", "12.0", "\uff11\uff12", "12 ✅"], ["13", "-12", "1.2"]),
    ("12.5", ["12.5", "25/2", "12,5"], ["12", "5"]),
]


def forms(language, value):
    """A value by itself and with a noun in six marks, and in two sentences."""
    sentence, noun, _ = LANGUAGES[language]
    for mark, given in itertools.product(MARKS.values(), (value, value + noun)):
        yield mark.format(given)
    yield from (sentence.format(value), sentence.format(value + noun), f"3 + 4. {sentence.format(f'**{value}**')}")


@pytest.mark.parametrize("language", LANGUAGES)
def test_numbers_in_every_language_and_mark(language):
    """In 20 languages 15 forms each of 7 right and 5 wrong values: 3,600 judgements."""
    for gold, right, wrong in VALUES:
        for given, score in [*((value, 1.0) for value in right), *((value, 0.0) for value in wrong)]:
            for text in forms(language, given.replace(",", ".") if language == "Hindi" else given):
                assert accuracy([text], [gold]) == [score], judge(text, gold)
    noun = LANGUAGES[language][1]
    assert accuracy([r"\boxed{12}", r"\boxed{13}"], [f"12{noun}"] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("language", "change"), [(name, change) for name, (*_, changes) in LANGUAGES.items() for change in changes]
)
def test_what_changes_a_number_in_a_mark_is_not_dropped(language, change):
    for mark in MARKS.values():
        text = mark.format(change.format(9))
        assert accuracy([text], ["9"]) == [0.0], judge(text, "9")


@pytest.mark.parametrize("text", ["答案不是9", "Cevap: 9 değil", "Ответ: не 9", "Not 9", "It is never 9."])
def test_a_denied_number_is_no_answer(text):
    assert accuracy([text], ["9"]) == [0.0], judge(text, "9")


@pytest.mark.parametrize("word", ["minus", "menos", "moins", "минус", "负", "マイナス", "eksi"])
def test_a_sign_in_words(word):
    assert accuracy([rf"\boxed{{{word} 9}}"] * 2, ["-9", "9"]) == [1.0, 0.0]
