"""Compare two final answers by math-verify, with stricter rules where it is too lenient."""

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeVar

from grpo_ext.rewards.library.math_equations import EQUALS, items_of, solutions
from grpo_ext.rewards.library.math_units import units_agree

T = TypeVar("T")
TIME_LIMIT = 5
"""Time limit on a call of math-verify."""
MAX_FORMULA, MAX_MATRIX = 200, 600  # characters: longer text is prose or an attempt to stall the parser
RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+")
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_FACTORS = re.compile(r"(?<=\))\s*(?=\()|(?<=\d)(?<![\w.\\^_{]\d)\s*(?=\()")
"""Between factors side by side: math-verify reads (5)(3) as 8."""
_OPTIONS = frozenset("ABCDEFGHIJ")


class OutOfTime(Exception):
    """A comparison took longer than `TIME_LIMIT`."""


@dataclass(frozen=True)
class MathValue:
    """A final answer: a formula that math-verify reads, and whether a percent sign followed it.

    `symbol` is the x of x = 5, `base` the 2 of 101_2, `unit` the cm of 5 cm, `option` the B of (B) 12, "" where there
    is none; a `word` replaces the formula; `pair` is the 2,1 of a number with a decimal comma.
    """

    formula: str
    percent: bool = False
    symbol: str = ""
    base: str = ""
    word: str = ""
    unit: str = field(default="", compare=False)
    option: str = field(default="", compare=False)
    pair: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return it for people."""
        formula = self.word or self.formula.strip("$")
        named = f"{self.symbol} = {formula}" if self.symbol else formula
        return f"{named}{'%' * self.percent}{self.base and f'_{self.base}'}{self.unit and f' {self.unit}'}"


def readable(value: MathValue) -> bool:
    """Return whether it is a word or a ratio, or math-verify can parse the formula."""
    return bool(value.word) or RATIO.fullmatch(value.formula) is not None or bool(_readings(value))


def equal(gold: MathValue, answer: MathValue) -> bool:
    """Return whether two values are equal by math-verify, to 6 decimals (and 1 %) where one is a decimal fraction.

    If only one has a percent sign, x% may mean x / 100, and x where |x| >= 1: "50%" matches 50 and 0.5, but "0.5%"
    does not match 0.5. Symbols, bases and units must agree where both have one, and an answer may not add a base. An
    equation matches an equation that it is a multiple of; an unsolved one does not match a solved one: 2x = 10 for
    x = 5. The values of a = 4, b = 5 may be given without the names, in their order.
    """
    if gold.word or answer.word:
        return gold.word == answer.word
    letter = answer.formula.strip("$() ").upper()
    if gold.option and (answer.option not in ("", gold.option) or letter in _OPTIONS):
        return letter == gold.option
    if answer.option and not gold.option and (own := gold.formula.strip("$() ")) in _OPTIONS:
        return own == answer.option
    if answer.base not in ("", gold.base) or not units_agree(gold.unit, answer.unit):
        return False
    if answer.pair and len(items_of(gold.formula.strip("$"))) == 2:  # 2,1 where the reference is the list 1, 2
        answer = MathValue(f"${answer.pair}$")
    if RATIO.fullmatch(gold.formula) or RATIO.fullmatch(answer.formula):
        return _same_ratio(gold.formula, answer)
    if _is_equation(gold) and not _is_equation(answer):
        symbols, rows = solutions(gold.formula.strip("$"))
        if rows and answer.symbol in ("", symbols):
            return _same_rows(rows, answer.formula.strip("$"))
    if (gold.symbol and answer.symbol and gold.symbol != answer.symbol) or _is_equation(gold) or _is_equation(answer):
        gold, answer = _as_equation(gold), _as_equation(answer)
    if gold.percent == answer.percent:
        gold, answer = MathValue(gold.formula), MathValue(answer.formula)
    return any(_same(g, a) for g in _readings(gold) for a in _readings(answer))


def same_formula(gold: str, answer: str) -> bool:
    """Return math-verify's verdict on two expressions as they are written; relations, sets and lists are none."""
    import sympy

    parsed = [_parse(f"${text}$") for text in (gold, answer)]
    return all(isinstance(value, sympy.Expr) for value in parsed) and _same(*parsed)


def _same_ratio(gold: str, answer: MathValue) -> bool:
    """Return whether ratios are proportional, or the answer is the quotient; a possible time must be written alike."""
    if not RATIO.fullmatch(gold):
        return False
    parts = [Fraction(part) for part in gold.split(":")]
    given = [Fraction(part) for part in answer.formula.split(":")] if RATIO.fullmatch(answer.formula) else None
    if given == parts or _TIME.fullmatch(gold) or not all([*parts, *(given or [])]):
        return given == parts
    if given is None:
        return len(parts) == 2 and equal(MathValue(f"{parts[0] / parts[1]}"), replace(answer, unit=""))
    return len(given) == len(parts) and all(g * parts[0] == p * given[0] for g, p in zip(given, parts, strict=True))


def _same_rows(rows: list[list[str]], answer: str) -> bool:
    """Return whether a list without names has the values of a solved system: 4, 5 or (4, 5), or one tuple each."""
    tuples = [f"({', '.join(row)})" for row in rows]
    if len(rows) == 1 and len(items_of(answer)) > 1:
        answer = f"({answer})"
    return equal(MathValue(f"${', '.join(tuples)}$"), MathValue(f"${answer}$"))


def _is_equation(value: MathValue) -> bool:
    return EQUALS.search(value.formula) is not None


def _as_equation(value: MathValue) -> MathValue:
    return MathValue(f"${value.symbol} = {value.formula.strip('$')}$", value.percent) if value.symbol else value


def _readings(value: MathValue) -> list[Any]:
    """Return the sympy objects that the value may mean, an empty list if it cannot be parsed."""
    parsed = _parse(value.formula)
    if parsed is None or not (value.percent and getattr(parsed, "is_comparable", False)):
        return [] if parsed is None else [parsed]
    return [parsed / 100, parsed] if abs(parsed) >= 1 else [parsed / 100]


def _parse(formula: str) -> Any:
    import sympy
    from math_verify import LatexExtractionConfig, parse

    number = re.fullmatch(r"\+?(-?(?:\d{1,300}(?:\.\d{1,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)", formula.strip("$"))
    if number:  # the common case, without LaTeX's parser
        return (sympy.Float if re.search(r"[.eE]", formula) else sympy.Integer)(number[1])
    if len(formula) > (MAX_MATRIX if r"\begin" in formula else MAX_FORMULA):
        return None
    formula = _FACTORS.sub(r"\\cdot ", formula)
    latex = _both_signs(formula) if formula.startswith("$") else f"${formula}$"
    # Units are removed already; math-verify may mistake a factor for one: the t of -16t^2 + 80t.
    config = LatexExtractionConfig()
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    found: list[Any] = _limited(
        lambda seconds: parse(latex, [config], fallback_mode="no_fallback", parsing_timeout=seconds)
    )
    return found[0] if found else None


def _limited(function: Callable[[int | None], T]) -> T:
    """Return the result of `function`, which gets the time limit to pass to math-verify.

    The limit is an alarm signal, so it works in the main thread only, where workers score. Elsewhere it is None.
    """
    from math_verify.errors import TimeoutException

    started = time.monotonic()
    seconds = TIME_LIMIT if threading.current_thread() is threading.main_thread() else None
    if seconds is None:  # math-verify warns of it
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
    try:
        result = function(seconds)
    except TimeoutException as error:
        raise OutOfTime from error
    if seconds and time.monotonic() - started >= seconds:  # math-verify takes its own timeout for "not equal"
        raise OutOfTime
    return result


def _both_signs(formula: str) -> str:
    r"""Replace an item with \pm in a list by two items; math-verify reads \pm only outside of lists."""
    items = items_of(formula.strip("$"))
    if r"\pm" not in formula or len(items) < 2:
        return formula
    signed = [[item.replace(r"\pm", sign) for sign in "+-"] if r"\pm" in item else [item] for item in items]
    return f"${', '.join(part for parts in signed for part in parts)}$"


def _same(gold: Any, answer: Any) -> bool:
    from math_verify.utils import timeout

    golds, answers = _relations(gold), _relations(answer)
    if _solved(golds) and not _solved(answers):
        return False
    if any(relation.is_Equality for relation in golds):
        try:
            return _limited(lambda seconds: timeout(seconds)(_same_equations)(golds, answers))
        except (ArithmeticError, AttributeError, TypeError, ValueError):
            return False
    gold, answer = _as_tuple(gold, answer), _as_tuple(answer, gold)
    if _verified(gold, answer):
        return _near(gold, answer)
    if _has_decimal(gold, answer) and _near(gold, answer, 1e-9):  # 6.02e23, where 6 decimals are too many
        return True
    return all(map(_has_root, (gold, answer))) and _verified(*map(_of_positive_symbols, (gold, answer)))


def _verified(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    return _limited(lambda seconds: verify(gold, answer, timeout_seconds=seconds, allow_set_relation_comp=True))


def _has_root(value: Any) -> bool:
    r"""Return whether it has symbols, and a root or logarithm, so that \sqrt{1/m} is 1/\sqrt{m} only where m > 0."""
    import sympy

    return bool(getattr(value, "free_symbols", None)) and any(
        isinstance(part, sympy.log) or (part.is_Pow and part.exp.is_Rational and not part.exp.is_Integer)
        for part in sympy.preorder_traversal(value)
    )


def _of_positive_symbols(value: Any) -> Any:
    import sympy

    return value.subs({symbol: sympy.Symbol(symbol.name, positive=True) for symbol in value.free_symbols})


def _as_tuple(value: Any, other: Any) -> Any:
    """Return a row or column vector as a tuple, if the other is not a matrix."""
    import sympy

    is_vector = isinstance(value, sympy.MatrixBase) and 1 in value.shape
    return sympy.Tuple(*value) if is_vector and not isinstance(other, (sympy.MatrixBase, sympy.MatrixExpr)) else value


def _relations(parsed: Any) -> list[Any]:
    """Return the equations and inequalities of a relation, a chain or a list."""
    import sympy

    parts = parsed.args if isinstance(parsed, (sympy.And, sympy.FiniteSet)) else [parsed]
    return list(parts) if any(getattr(part, "is_Relational", False) for part in parts) else []


def _solved(relations: list[Any]) -> bool:
    """Return whether each relation is solved for one symbol, such as x = 5, x > 3 or -x < -3, unlike -x = 5."""
    return all(
        len(r.free_symbols) == 1
        and any(side.is_Symbol or (side.is_Mul and (-side).is_Symbol and not r.is_Equality) for side in r.args)
        for r in relations
    )


def _same_equations(golds: list[Any], answers: list[Any]) -> bool:
    """Return whether two lists contain the same equations in any order."""
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if _proportional(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _proportional(gold: Any, answer: Any) -> bool:
    """Return whether two equations differ by a nonzero factor: their numerators have one quotient at five points."""
    import sympy

    if not (gold.is_Equality and answer.is_Equality):
        return bool(gold == answer)
    first, second = (sympy.together(equation.lhs - equation.rhs).as_numer_denom()[0] for equation in (gold, answer))
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    draw = random.Random(0)
    quotients = []
    for _ in range(5):
        point = {symbol: sympy.Rational(draw.randint(10_000, 30_000), 10_000) for symbol in symbols}
        quotients.append(complex((first.subs(point) / second.subs(point)).evalf(20)))
    return bool(quotients[0]) and all(abs(q / quotients[0] - 1) < 1e-9 for q in quotients)


def _has_decimal(*values: Any) -> bool:
    """Return whether all are numbers, and one of them is a decimal fraction."""
    import sympy

    return all(getattr(v, "is_number", False) for v in values) and any(v.has(sympy.Float) for v in values)


def _near(gold: Any, answer: Any, share: float = 0.01) -> bool:
    """Return whether numbers agree to 1 %, which 6 decimals do not ensure: 1e-9 and 2e-9."""
    import sympy

    if isinstance(gold, (sympy.Tuple, sympy.MatrixBase)) and isinstance(answer, (sympy.Tuple, sympy.MatrixBase)):
        return all(map(_near, gold, answer))
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        return _near(gold.start, answer.start) and _near(gold.end, answer.end)
    if gold == answer or not all(getattr(value, "is_number", False) for value in (gold, answer)):
        return True
    try:
        first, second = (complex(sympy.N(value)) for value in (gold, answer))
    except TypeError:  # gcd(12, 18), which math-verify has compared
        return share == 0.01
    return abs(first - second) <= abs(first) * share
