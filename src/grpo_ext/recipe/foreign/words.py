"""The arguments of a shell script: `--key value` and hydra's `a.b=c`, with the script's own variables filled in.

Nothing is run. What only a shell knows ($HOME, a command in $(...)) stays as it is written.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_ext.recipe.files import parse_value

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)\+?=\(\s*\n(.*?)^\s*\)", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[@\])?(?::?-([^{}]*))?(,,)?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^$()]*(?:\([^()]*\)[^$()]*)*)\)\)")
_HYDRA = re.compile(r"\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_OF_THE_RUN = (
    *("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES", "MASTER_PORT", "MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM"),
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables before the command that say something of the run."""
_END = "\n"
"""Stands between the words of two commands."""


def arguments(text: str) -> dict[str, Any]:
    """Key to value of the training command in a script; of one that stands more than once, the last.

    A key without a value is true, one with several a list. Environment variables before the command are keys too.
    """
    found: dict[str, Any] = {}
    words = list(_words(text))
    before = len(words) - words[::-1].index("--") if "--" in words else 0  # a launcher's own, such as ray's
    words = [word for word in words[:before] if _ASSIGNMENT.fullmatch(word)] + words[before:]
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if hydra := _HYDRA.fullmatch(word):
            found[hydra[1]] = _value(hydra[2])
        elif word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            while not equals and i < len(words) and not _is_key(words[i]):
                values.append(words[i])
                i += 1
            read = [_value(v) for v in values]
            found[key.replace("-", "_")] = True if not read else read[0] if len(read) == 1 else read
        elif (assigned := _ASSIGNMENT.fullmatch(word)) and assigned[1] in _OF_THE_RUN:
            found[assigned[1]] = _value(assigned[2])
    return found


def _is_key(word: str) -> bool:
    return bool(word == _END or re.match(r"--[A-Za-z]", word) or _HYDRA.fullmatch(word))


def _words(text: str) -> Iterator[str]:
    """The words of the commands, after the script's own assignments have been filled in."""
    text = re.sub(r"^\s*#.*\n|(?<=\s)#\s.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text)  # which a shell makes as many words as the array has
    variables: dict[str, str] = {}
    for name, content in _ARRAY.findall(text):
        variables[name] = " ".join(content.split("\n"))
    text = _ARRAY.sub("", text)
    for line in _logical_lines(text):
        line = _filled(line, variables)
        assigned = _ASSIGNMENT.fullmatch(line.strip())
        if assigned and (words := _split(assigned[2])) is not None and len(words) <= 1:
            value = words[0] if words else ""
            variables[assigned[1]] = value
            if line.lstrip().startswith("export"):
                yield f"{assigned[1]}={value}"
            continue
        yield from (*(_split(line) or ()), _END)


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, those joined over which a quote goes on."""
    waiting = ""
    for line in text.splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        if _split(waiting) is not None:
            yield waiting
            waiting = ""
    if waiting:
        yield from waiting.splitlines()


def _split(line: str) -> list[str] | None:
    """Words of a line; None inside of a quote."""
    try:
        return shlex.split(line)
    except ValueError:
        return None


def _filled(line: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[4], match[2]
        text = variables.get(name, f"${name}" if default is None else default)
        return text.lower() if match[3] else text

    def sum_of(match: re.Match[str]) -> str:
        try:
            return str(_calculated(ast.parse(match[1].strip(), mode="eval").body, variables))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    for _ in range(8):  # variables may name one another
        filled = _SUM.sub(sum_of, _VARIABLE.sub(value, line))
        if filled == line:
            break
        line = filled
    return line


def _calculated(node: ast.expr, variables: dict[str, str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and node.id in variables:
        return int(variables[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](*(_calculated(side, variables) for side in (node.left, node.right))))
    raise ValueError(node)


def _value(text: str) -> Any:
    """As YAML reads it: a number, a bool, a list, else the text, whose lines YAML would join."""
    return text if "\n" in text else parse_value(text.replace("$HOME/", "~/"))


def read_words(path: Path) -> dict[str, Any]:
    """Arguments of a script."""
    return arguments(path.read_text(encoding="utf-8"))
