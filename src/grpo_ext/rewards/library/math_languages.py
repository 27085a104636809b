"""Rewrite answers in other scripts and languages in ASCII and in the few English words that the other rules read."""

import re
import unicodedata

# English: what stands for it.
_WORDS = """
answer: 答案 正解 答え 答 정답 답 ответ respuesta réponse reponse antwort resposta risposta
answer: الإجابة الجواب उत्तर cevap odpowiedź đáp คำตอบ
is: 是 为 為 等于 等於 共 一共 总共 合计 合計 は 는 은 равен равно равна это всего итого هي هو है
is: es est ist è é jest là คือ sono sind beträgt
about: 约 約 大约 около примерно etwa ungefähr environ
not: 不 非 没 除 ない 小于 大于 少于 多于 至少 至多 超过 以上 以下 以外 未満 超 아니 미만 초과 이상 이하
not: не кроме меньше больше менее более nicht kein außer weniger mehr höchstens mindestens pas sauf moins
not: menos más mais não exceto excepto nunca değil hariç nie oprócz meno più tranne ليس أقل أكثر नहीं
or: 或 или oder ou または 또는 أو veya lub
and: 和 与 и und と 및 و और ve
because: 因为 因為 なぜなら 왜냐하면 потому porque weil denn parce perché لأن क्योंकि çünkü ponieważ
half: 半 половина
squared: 的平方
minus: 负 負 минус
dozen: 打 ダース дюжин дюжина дюжины dutzend docena docenas douzaine douzaines dúzia dúzias dozzina dozzine
hundred: 百 сто hundert
thousand: 千 천 тысяч тысяча тысячи tausend हज़ार हजार ألف mille tysięcy mil
tenthousand: 万 萬 만
million: миллион миллиона миллионов millionen millones millón milhões milioni مليون
hundredmillion: 亿 億 억
percent: процент процента процентов prozent pourcent 퍼센트 パーセント
yuan: 元 块
meter: 米 метр метра метров メートル 미터
centimeter: 厘米 см сантиметров センチ
kilometer: 公里 千米 км キロメートル
kilogram: 公斤 千克 кг
hour: 小时 小時 час часа часов 時間 시간
minute: 分钟 分鐘 минут минуты 分
"""
_ENGLISH = {
    word: english
    for english, _, words in (line.partition(": ") for line in _WORDS.split("\n"))
    for word in words.split()
}
WORD = "Word"
"""In place of a word in another script: a noun for all that is known."""
# Thai, Japanese, Chinese and Korean words, which no space divides; longer ones first.
_UNSPACED = re.compile("|".join(sorted((w for w in _ENGLISH if w[0] >= "\u0e00"), key=len, reverse=True)))
_MARKS = "\u0300-\u036f\u0610-\u061a\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0e31-\u0e3a"
"""Vowels and accents, which are no letters for `\\w`."""
_LETTERS = re.compile(rf"[^\W\d_](?:[^\W\d_]|[{_MARKS}])*")
# Greek letters, blackboard bold ones and raised digits are symbols, not words.
_SYMBOLS = re.compile("[A-Za-z\u00b2\u00b3\u00b9\u00bc-\u00be\u0370-\u03ff\u2070-\u218b\u2460-\u24ff]*")
_SIGNS = {0xFF01 + i: chr(0x21 + i) for i in range(94)} | str.maketrans(
    "\u3002\uff61\u0964\u3001\u060c\u066b\u066c\u3000\u2795\ufe62\u2716\u2217\u22c5\u2797\u2796\u066a",
    "...,,., ++***/-%",
)
_SIGNS |= dict.fromkeys(map(ord, "「」『』《》【】"), '"') | dict.fromkeys(map(ord, "₹₩₽₺₫₴₦฿"), " ")
_EMOJI = "[\u2600-\u274b\u274d-\u27bf\U0001f000-\U0001faff\ufe0e\ufe0f\u200b-\u200f\u20e3]"


def ascii_signs(text: str) -> str:
    """Return the text with ASCII digits, signs and letters for full-width and mathematical ones, without emoji."""
    if text.isascii():
        return text
    text = re.sub(_EMOJI, " ", re.sub(rf" ?{_EMOJI}+(?!\w)", "", text.translate(_SIGNS)))
    text = re.sub("[\U0001d400-\U0001d7ff]", lambda m: unicodedata.normalize("NFKC", m[0]), text)
    return re.sub(r"(?![0-9])\d", lambda m: str(int(m[0])), text)


def in_english(text: str, unknown: str = WORD) -> str:
    """Return the text with English words for known ones, and `unknown`, if any, for others that are not ASCII."""
    if not text.isascii():
        text = _UNSPACED.sub(lambda m: f" {_ENGLISH[m[0]]} ", text)
    return _LETTERS.sub(lambda m: _translated(m[0], unknown), text)


def _translated(word: str, unknown: str) -> str:
    known = _ENGLISH.get(word.lower(), "" if _SYMBOLS.fullmatch(word) else unknown)
    return word if not known else known if word.isascii() else f" {known} "
