"""Compare two final answers by math-verify, with stricter rules where it is too lenient."""

import logging
import re
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from typing import Any

from grpo_ext.rewards.library.math_notation import items_of
from grpo_ext.rewards.library.math_units import units_agree
from grpo_ext.rewards.library.time_limit import time_limit

TIME_LIMIT = 5.0
"""Limit of the processor's time of a comparison, or of reading a formula."""
MAX_FORMULA, MAX_MATRIX = 200, 600  # characters: longer text is prose or an attempt to stall the parser
EQUALS = re.compile(r"(?<![<>!:])=(?![^{}]*\})")  # not in braces, such as the bounds of a sum
_FACTORS = re.compile(r"(?<=\))\s*(?=\()|(?<=\d)(?<![\w.\\^_{]\d)\s*(?=\()")
"""Between factors side by side: math-verify reads (5)(3) as 8."""
_OPTIONS = frozenset("ABCDEFGHIJ")


@dataclass(frozen=True)
class MathValue:
    """A final answer: a formula that math-verify reads, and whether a percent sign followed it.

    `symbol` is the x of x = 5, the (a,b) of a = 3, b = 5, or the : of a ratio, `unit` the cm of 5 cm, `option` the B
    of (B) 12, "" where there is none; a `word` replaces the formula.
    """

    formula: str
    percent: bool = False
    symbol: str = ""
    word: str = ""
    unit: str = field(default="", compare=False)
    option: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return it for people."""
        formula = self.word or self.formula.strip("$")
        named = f"{self.symbol} = {formula}" if self.symbol else formula
        return f"{named}{'%' * self.percent}{self.unit and f' {self.unit}'}"


def readable(value: MathValue) -> bool:
    """Return whether it is a word, or math-verify can parse the formula."""
    with time_limit(TIME_LIMIT):
        return bool(value.word) or bool(_readings(value))


def equal(gold: MathValue, answer: MathValue) -> bool:
    """Return whether two values are equal by math-verify, to 6 decimals (and 1 %) where one is a decimal fraction.

    If only one has a percent sign, x% may mean x / 100, and x where |x| >= 1: "50%" matches 50 and 0.5, but "0.5%"
    does not match 0.5. Symbols and units must agree where both have one, and an answer may not add a ratio. An
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
    if answer.symbol == ":" != gold.symbol or not units_agree(gold.unit, answer.unit):
        return False
    if (gold.symbol and answer.symbol and gold.symbol != answer.symbol) or _is_equation(gold) or _is_equation(answer):
        gold, answer = _as_equation(gold), _as_equation(answer)
    if _is_equation(gold) != _is_equation(answer):
        return False
    if gold.symbol.startswith("(") and not answer.symbol and not answer.formula.startswith("$("):
        answer = MathValue(f"$({answer.formula.strip('$')})$")
    if gold.percent == answer.percent:
        gold, answer = MathValue(gold.formula), MathValue(answer.formula)
    with time_limit(TIME_LIMIT):
        return any(_same(g, a) for g in _readings(gold) for a in _readings(answer))


def _is_equation(value: MathValue) -> bool:
    return EQUALS.search(value.formula) is not None


def _as_equation(value: MathValue) -> MathValue:
    """Return x = 5, or the equations a = 3, b = 5 of a system."""
    values, names = value.formula.strip("$"), value.symbol.strip("()").split(",")
    if not value.symbol:
        return value
    sides = zip(cycle(names), items_of(values[1:-1] if len(names) > 1 else values), strict=False)
    return MathValue(f"${', '.join(map(' = '.join, sides))}$", value.percent)


def _readings(value: MathValue) -> list[Any]:
    """Return the sympy objects that the value may mean, an empty list if it cannot be parsed."""
    parsed = _parse(value.formula)
    if parsed is None or not (value.percent and getattr(parsed, "is_comparable", False)):
        return [] if parsed is None else [parsed]
    return [parsed / 100, parsed] if abs(parsed) >= 1 else [parsed / 100]


@cache
def _keep_math_verify_quiet() -> None:
    """Drop its warnings that its own time limit is off."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _parse(formula: str) -> Any:
    import sympy
    from math_verify import LatexExtractionConfig, parse

    _keep_math_verify_quiet()
    number = re.fullmatch(r"\+?(-?(?:\d{1,300}(?:\.\d{1,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)", formula.strip("$"))
    if number:  # the common case, without LaTeX's parser
        return (sympy.Float if re.search(r"[.eE]", formula) else sympy.Integer)(number[1])
    if len(formula) > (MAX_MATRIX if r"\begin" in formula else MAX_FORMULA):
        return None
    latex = _FACTORS.sub(r"\\cdot ", f"${formula.strip('$')}$")
    # Units are removed already; math-verify may mistake a factor for one: the t of -16t^2 + 80t.
    config = LatexExtractionConfig()
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    values = parse(latex, [config], fallback_mode="no_fallback", parsing_timeout=None)
    value = values[0] if values else None
    if isinstance(value, sympy.Expr) and not value.has(sympy.Abs):  # \\sqrt{1/m} is 1/\\sqrt{m}
        return value.subs({symbol: sympy.Symbol(symbol.name, positive=True) for symbol in value.free_symbols})
    return value


def _same(gold: Any, answer: Any) -> bool:
    """Return math-verify's verdict, by stricter rules for numbers and for equations, both sides of which it solves."""
    import sympy
    from math_verify import verify

    _keep_math_verify_quiet()
    gold, answer = _as_tuple(gold, answer), _as_tuple(answer, gold)
    if (near := _near(gold, answer)) is not None:
        return near
    if not verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    if not all(getattr(value, "is_Equality", False) for value in (gold, answer)):
        return True
    first, second = (sympy.together(side.lhs - side.rhs).as_numer_denom()[0] for side in (gold, answer))
    return second != 0 and bool(sympy.cancel(first / second).is_number)  # not any two without a solution


def _near(gold: Any, answer: Any) -> bool | None:
    """Return whether decimal fractions agree, False for numbers that differ by more than 1 %, None for math-verify."""
    import sympy

    try:
        first, second = (complex(sympy.N(value)) for value in (gold, answer) if value.is_number)
    except (AttributeError, TypeError, ValueError):
        return None
    if abs(first - second) > abs(first) / 100:  # also 1e-9 and 2e-9
        return False
    decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    return abs(first - second) <= max(5e-7, 1e-9 * abs(first)) if decimal else None


def _as_tuple(value: Any, other: Any) -> Any:
    """Return a row or column vector as a tuple, if the other is not a matrix."""
    import sympy

    is_vector = isinstance(value, sympy.MatrixBase) and 1 in value.shape
    return sympy.Tuple(*value) if is_vector and not isinstance(other, (sympy.MatrixBase, sympy.MatrixExpr)) else value
