"""Whether two final answers are equal: math-verify, and what it lets through closed."""

import logging
import random
import re
import threading
from dataclasses import dataclass, replace
from typing import Any

from grpo_ext.rewards.library.math_equations import EQUALS

MAX_FORMULA = 200  # characters: a longer formula is prose or an attempt to stall the parser


@dataclass(frozen=True)
class Value:
    """A final answer: a formula that math-verify reads, and whether a percent sign followed it.

    `symbol` is the x of x = 5, `base` the 2 of 101_2, "" where there was none.
    """

    formula: str
    percent: bool = False
    symbol: str = ""
    base: str = ""


def readable(value: Value) -> bool:
    """Whether math-verify can parse the formula."""
    return bool(_readings(value))


def equal(gold: Value, answer: Value) -> bool:
    """Whether two values are equal by math-verify, to 6 decimals (and 1 %) where one is a decimal fraction.

    If only one has a percent sign, x% may stand for x / 100, and for x where |x| >= 1: "50%" answers 50 and 0.5, but
    "0.5%" does not answer 0.5. Symbols and bases must agree where both have one, and an answer may not add a base. An
    equation answers an equation that it is a multiple of; what is not solved does not answer what is: 2x = 10, x = 5.
    """
    if answer.base not in ("", gold.base):
        return False
    if (gold.symbol and answer.symbol and gold.symbol != answer.symbol) or _is_equation(gold) or _is_equation(answer):
        gold, answer = _as_equation(gold), _as_equation(answer)
    if gold.percent == answer.percent:
        gold, answer = Value(gold.formula), Value(answer.formula)
    return any(_same(g, a) for g in _readings(gold) for a in _readings(answer))


def _is_equation(value: Value) -> bool:
    return EQUALS.search(value.formula) is not None


def _as_equation(value: Value) -> Value:
    return Value(f"${value.symbol} = {value.formula.strip('$')}$", value.percent) if value.symbol else value


def _readings(value: Value) -> list[Any]:
    """Sympy objects that the value may stand for; none if it cannot be parsed."""
    parsed = _parse(value.formula)
    if parsed is None or not (value.percent and getattr(parsed, "is_comparable", False)):
        return [] if parsed is None else [parsed]
    return [parsed / 100, parsed] if abs(parsed) >= 1 else [parsed / 100]


def _parse(formula: str) -> Any:
    import sympy
    from math_verify import LatexExtractionConfig, parse

    number = re.fullmatch(r"\+?(-?(?:\d{1,300}(?:\.\d{1,300})?|\.\d{1,300})(?:[eE][-+]?\d{1,3})?)", formula)
    if number:  # the common case, without LaTeX's parser
        return (sympy.Float if re.search(r"[.eE]", formula) else sympy.Integer)(number[1])
    if len(formula) > MAX_FORMULA:
        return None
    latex = formula if formula.startswith("$") else f"${formula}$"
    # Units are off already, and what math-verify takes for one may be a factor: the t of -16t^2 + 80t.
    config = LatexExtractionConfig()
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    found = parse(latex, [config], fallback_mode="no_fallback", parsing_timeout=_timeout(5))
    return found[0] if found else None


def _same(gold: Any, answer: Any) -> bool:
    from math_verify import verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    golds, answers = _relations(gold), _relations(answer)
    if _solved(golds) and not _solved(answers):
        return False
    seconds = _timeout(5)
    if any(relation.is_Equality for relation in golds):
        try:
            return timeout(seconds)(_same_equations)(golds, answers)
        except (TimeoutException, ArithmeticError, AttributeError, TypeError, ValueError):
            return False
    return verify(gold, answer, timeout_seconds=seconds) and _near(gold, answer)


def _relations(parsed: Any) -> list[Any]:
    """The equations and inequalities of a relation, a chain or a list."""
    import sympy

    parts = parsed.args if isinstance(parsed, (sympy.And, sympy.FiniteSet)) else [parsed]
    return list(parts) if any(getattr(part, "is_Relational", False) for part in parts) else []


def _solved(relations: list[Any]) -> bool:
    """Whether each relation says what one symbol is, such as x = 5 or x > 3."""
    return all(any(side.is_Symbol for side in r.args) and len(r.free_symbols) == 1 for r in relations)


def _same_equations(golds: list[Any], answers: list[Any]) -> bool:
    """Whether two lists hold the same equations in any order."""
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if _proportional(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _proportional(gold: Any, answer: Any) -> bool:
    """Whether two equations differ by a nonzero factor: their numerators have one quotient at five points."""
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


def _near(gold: Any, answer: Any) -> bool:
    """Whether numbers agree to 1 %, which 6 decimals alone do not ensure: 1e-9 and 2e-9."""
    numbers = all(getattr(value, "is_number", False) for value in (gold, answer))
    if not numbers or not (gold.is_Float or answer.is_Float):
        return True
    return bool(abs(gold - answer) <= abs(gold) / 100)


def _timeout(seconds: int) -> int | None:
    """math-verify's time limit, or None off the main thread, where its alarm signal cannot be set."""
    if threading.current_thread() is threading.main_thread():
        return seconds
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns of the missing limit
    return None
