"""Rewrite answers in other scripts and languages in ASCII and in the few English words that the other rules read."""

# ruff: noqa: RUF001  letters of other scripts

import re
import unicodedata
from functools import lru_cache

# English: what stands for it; a star stands for every ending.
_WORDS = """
answer: 答案 正解 答え 答 解答 回答 정답 답 ответ* відповід* отговор* respuesta* réponse* reponse antwort* resposta*
answer: risposta* الإجابة إجابة الجواب جواب پاسخ उत्तर উত্তর cevap* yanıt* odpowied* odpověď svar svaret vastaus
answer: antwoord jawaban* răspuns* đáp คำตอบ ตอบ απάντηση תשובה התשובה
is: 是 为 為 等于 等於 共 一共 总共 合计 合計 は です 는 은 입니다 равен равно равна это всего итого هي هو است है
is: es est ist è é jest là คือ sono sind beträgt lautet adalah är είναι este היא הוא
option: 选项 選択肢 선택지 вариант* opción opção alternativa letra choix şık* şıkkı विकल्प الخيار ข้อ
choose: 选择 选 選 선택 выбираю elijo choisis wähle escolho scelgo chọn เลือก
about: 约 約 大约 около примерно etwa ungefähr environ
not: 不 非 没 ない ません なく 아니 아닙 아닌 не ни нет nicht kein* weder pas não nunca değil* nie ni ليس ليست غير
not: नहीं niet inte không ไม่ bukan לא אינה אינו δεν
except: 除 以外 кроме außer sauf excepto exceto tranne hariç oprócz عدا
less than: 小于 少于 未満 미만 меньше менее weniger kleiner az أقل कम
more than: 大于 多于 超过 超 초과 больше более mehr größer más più أكثر
at least: 至少 以上 이상 mindestens
at most: 至多 以下 이하 höchstens
but: mais sondern sino 而是
wrong: 错误 错 錯 間違 違 틀 오답 неверн* неверен неправильн* falsch* falsa faux fauss* incorrecta incorrecte incorreta
wrong: errad* errata sbagliat* yanlış* błędn* خطأ خاطئ* गलत sai ผิด salah
or: 或者 或 или oder ou または 또는 أو veya lub या hoặc หรือ atau eller או
and: 和 与 и und と 및 와 et و और ve
because: 因为 因為 なぜなら 왜냐하면 потому porque weil denn parce perché لأن क्योंकि çünkü ponieważ
half: 半 половин* hälfte moitié mitad metà metade yarısı आधा نصف buçuk demi
double: doppel* doble dobro удвоенн*
squared: 的平方 二乗 квадрате quadrat cuadrado carré quadrato karesi
minus: 负 負 マイナス 마이너스 минус menos moins meno eksi سالب ऋण
multiples: 倍数 배수 кратн*
dozen: 打 ダース дюжин* dutzend docena* douzaine* dúzia* dozzin* düzine दर्जन tuzin* tucet*
score: десятк*
pairs: 对 對 пар пары
hundred: 百 сто сотен сотни hundert
thousand: 千 천 тыс* tys* tisíc* tausend हज़ार हजार ألف mille mil mila bin nghìn พัน ribu duizend tusen χιλιάδες אלף
tenthousand: 万 萬 만
lakh: लाख
crore: करोड़
million: млн миллион* mln milion* millionen mio millones millón milhões millions milyon مليون triệu juta ล้าน
hundredmillion: 亿 億 억
billion: млрд миллиард* milliard* mld miliard* milyar mrd مليار tỷ
percent: процент* prozent pourcent 퍼센트 パーセント
yuan: 元 块
meter: 米 м метр* メートル 미터
millimeter: 毫米 мм
centimeter: 厘米 см сантиметр* センチ
kilometer: 公里 千米 км километр* キロメートル
kilogram: 公斤 千克 кг
hour: 小时 小時 час* ч 時間 시간
minute: 分钟 分鐘 минут* 分
"""
_ENGLISH = {
    word: english
    for english, _, words in (line.partition(": ") for line in _WORDS.split("\n"))
    for word in words.split()
}
_STEMS = {word[:-1]: english for word, english in _ENGLISH.items() if word[-1] == "*"}
WORD = "Word"
"""In place of a word in another script: a noun for all that is known."""
# Thai, Japanese, Chinese and Korean words, which no space divides; longer ones first.
_UNSPACED = re.compile("|".join(sorted((w for w in _ENGLISH if w[0] >= "\u0e00"), key=len, reverse=True)))
_MARKS = "\u0300-\u036f\u0610-\u061a\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0e31-\u0e3a"
"""Vowels and accents, which are no letters for `\\w`."""
_LETTERS = re.compile(rf"[^\W\d_](?:[^\W\d_]|[{_MARKS}])*")
# Greek letters, blackboard bold ones and raised digits are symbols, not words; letters with an accent form words.
_SYMBOLS = re.compile(
    "[A-Za-z\u00b2\u00b3\u00b9\u0370-\u0385\u0391-\u03a9\u03b1-\u03c9\u03d0-\u03ff\u2070-\u218b\u2460-\u24ff]*"
)
_SIGNS = {0xFF01 + i: chr(0x21 + i) for i in range(94)} | str.maketrans(
    "\u3002\uff61\u0964\u3001\u060c\u066b\u066c\u3000\u2795\ufe62\u2716\u2217\u22c5\u00b7\u2797\u2796\u066a\u2044",
    "...,,., ++****/-%/",
)
_SIGNS |= dict.fromkeys(map(ord, "「」『』《》【】"), '"') | dict.fromkeys(map(ord, "₹₩₽₺₫₴₦฿"), " ")
_EMOJI = "[\u2600-\u274b\u274d-\u27bf\U0001f000-\U0001faff\ufe0e\ufe0f\u200b-\u200f\u20e3]"


def ascii_signs(text: str) -> str:
    """Return the text with ASCII digits, signs and letters for full-width and mathematical ones, without emoji."""
    if text.isascii():
        return text
    text = re.sub(_EMOJI, " ", re.sub(rf" ?{_EMOJI}+(?!\w)", "", text.translate(_SIGNS)))
    text = re.sub("[\U0001d400-\U0001d7ff]", lambda m: unicodedata.normalize("NFKC", m[0]), text)
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", _fraction, text)
    return re.sub(r"(?![0-9])\d", lambda m: str(int(m[0])), text)


def _fraction(match: re.Match[str]) -> str:
    return r" \frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("\u2044"))


def in_english(text: str, unknown: str = WORD, keep: frozenset[str] = frozenset()) -> str:
    """Return the text with English words for known ones, and `unknown`, if any, for others that are not ASCII.

    `keep` has capital letters that stay, since they are no words.
    """
    if not text.isascii():
        text = text.replace("百分之", " %")
        text = _UNSPACED.sub(lambda m: m[0] if m[0] in keep else f" {_ENGLISH[m[0]]} ", text)
    text = _LETTERS.sub(lambda m: m[0] if m[0].upper() in keep else _translated(m[0], unknown), text)
    return re.sub(r"\b(not|no)\s+is\b", r"is \1", text)


@lru_cache(maxsize=4096)
def _translated(word: str, unknown: str) -> str:
    lower = word.lower()
    known = _ENGLISH.get(lower) or next((_STEMS[stem] for stem in _STEMS if lower.startswith(stem)), "")
    known = known or ("" if _SYMBOLS.fullmatch(word) else unknown)
    return word if not known else known if word.isascii() else f" {known} "
