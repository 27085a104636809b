"""Arithmetic, as a tool."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from grpo_ext.environments.protocol import environments

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST, _LARGEST = 200, 10**15


@environments.register("calculator")
class Calculator:
    """One tool, `calculate`."""

    in_process = True

    def reset(self, **row: object) -> None:
        """Keep no state."""

    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression of numbers, + - * / // % ** and parentheses.

        Args:
            expression: The expression, such as (3 + 4) * 2.

        Returns:
            The result.
        """
        if len(expression) > _LONGEST:
            raise ValueError(f"an expression of {len(expression)} characters; {_LONGEST} are the most")
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
        return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.AST) -> int | float:
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 100:
            raise ValueError("an exponent beyond 100")
        value = _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses")
    if isinstance(value, complex) or abs(value) > _LARGEST:
        raise ValueError("a result beyond what it works out")
    return value
