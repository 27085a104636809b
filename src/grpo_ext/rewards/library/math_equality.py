"""Compare two final answers by math-verify, with stricter rules where it is too lenient."""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeVar

from grpo_ext.rewards.library.math_units import units_agree

T = TypeVar("T")
TIME_LIMIT = 5
"""Time limit on a call of math-verify."""
MAX_FORMULA, MAX_MATRIX = 200, 600  # characters: longer text is prose or an attempt to stall the parser
EQUALS = re.compile(r"(?<![<>!:])=(?![^{}]*\})")  # not in braces, such as the bounds of a sum
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

    `symbol` is the x of x = 5, or the (a,b) of a = 3, b = 5; `base` the 2 of 101_2, `unit` the cm of 5 cm, `option`
    the B of (B) 12, "" where there is none; a `word` replaces the formula.
    """

    formula: str
    percent: bool = False
    symbol: str = ""
    base: str = ""
    word: str = ""
    unit: str = field(default="", compare=False)
    option: str = field(default="", compare=False)

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
    letter, own = (value.formula.strip("$() ").upper() for value in (answer, gold))
    if gold.option and (answer.option not in ("", gold.option) or letter in _OPTIONS):
        return letter == gold.option
    if answer.option and not gold.option and own in _OPTIONS:
        return own == answer.option
    if answer.base not in ("", gold.base) or not units_agree(gold.unit, answer.unit):
        return False
    if RATIO.fullmatch(gold.formula) or RATIO.fullmatch(answer.formula):
        return _same_ratio(gold.formula, answer)
    if (gold.symbol and answer.symbol and gold.symbol != answer.symbol) or _is_equation(gold) or _is_equation(answer):
        gold, answer = _as_equation(gold), _as_equation(answer)
    if _is_equation(gold) != _is_equation(answer):
        return False
    if gold.symbol.startswith("(") and not answer.symbol and not answer.formula.startswith("$("):
        answer = MathValue(f"$({answer.formula.strip('$')})$")
    if gold.percent == answer.percent:
        gold, answer = MathValue(gold.formula), MathValue(answer.formula)
    return any(_same(g, a) for g in _readings(gold) for a in _readings(answer))


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


def _is_equation(value: MathValue) -> bool:
    return EQUALS.search(value.formula) is not None


def _as_equation(value: MathValue) -> MathValue:
    """Return x = 5, or the equations a = 3, b = 5 of a system."""
    names, values = value.symbol.strip("()").split(","), value.formula.strip("$")
    if not value.symbol:
        return value
    sides = [values] if len(names) == 1 else values[1:-1].split(",")
    equations = [" = ".join(side) for side in zip(names, sides, strict=False)]
    return MathValue(f"${', '.join(equations)}$", value.percent)


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
    latex = _FACTORS.sub(r"\\cdot ", f"${formula.strip('$')}$")
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


def _same(gold: Any, answer: Any) -> bool:
    from math_verify.utils import timeout

    gold, answer = _as_tuple(gold, answer), _as_tuple(answer, gold)
    if _verified(gold, answer):
        if getattr(gold, "is_Equality", False) and getattr(answer, "is_Equality", False):
            return _limited(lambda seconds: timeout(seconds)(_proportional)(gold, answer))
        return _near(gold, answer)
    if _has_decimal(gold, answer) and _near(gold, answer, 1e-9):  # 6.02e23, where 6 decimals are too many
        return True
    positive = [_of_positive_symbols(value) for value in (gold, answer)]
    return positive != [gold, answer] and _verified(*positive)


def _verified(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    return _limited(lambda seconds: verify(gold, answer, timeout_seconds=seconds, allow_set_relation_comp=True))


def _of_positive_symbols(value: Any) -> Any:
    r"""Return a formula with a root or logarithm as if its symbols were positive, so that \sqrt{1/m} is 1/\sqrt{m}."""
    import sympy

    if not isinstance(value, sympy.Expr) or value.has(sympy.Abs):
        return value
    return value.subs({symbol: sympy.Symbol(symbol.name, positive=True) for symbol in value.free_symbols})


def _as_tuple(value: Any, other: Any) -> Any:
    """Return a row or column vector as a tuple, if the other is not a matrix."""
    import sympy

    is_vector = isinstance(value, sympy.MatrixBase) and 1 in value.shape
    return sympy.Tuple(*value) if is_vector and not isinstance(other, (sympy.MatrixBase, sympy.MatrixExpr)) else value


def _proportional(gold: Any, answer: Any) -> bool:
    """Return whether equations differ by a nonzero factor; math-verify takes any two without a solution for equal."""
    import sympy

    first, second = (sympy.together(equation.lhs - equation.rhs).as_numer_denom()[0] for equation in (gold, answer))
    return bool(sympy.cancel(first / second).is_number) if second != 0 else False


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
