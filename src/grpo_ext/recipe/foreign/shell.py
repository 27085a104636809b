"""Arguments of the training command in a shell script: `--key value`, and hydra's `a.b=c`, which shows verl.

Quotes, the script's own variables, arrays, defaults and sums are resolved; the script is not run. What only a shell
knows (`$(command)`, a variable of the environment) stays as it is written.
"""

import re
from collections.abc import Iterator
from typing import Any

from grpo_ext.recipe.files import parse_value
from grpo_ext.recipe.launching import FLAGS

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BLANK = re.compile(r"[ \t\r]+|\\\n|#[^\n]*")
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w .-]*>")
_ENDS = re.compile(r"[ \t\r]*(#|\n|;|&|\||$)")
_NAME = re.compile(r"(?P<name>[A-Za-z_]\w*|\d)|[@*#?]")
_PARAMETER = re.compile(
    r"(?P<name>[A-Za-z_]\w*|\d)(?P<whole>\[[@*]\])?(?::?-(?P<default>.*)|(?P<lower>,,))?", re.DOTALL
)
_HYDRA = re.compile(r"\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r".*\.py|(.*/)?(python[\d.]*|accelerate|torchrun|deepspeed|swift|megatron|trl|ray)")
_LAUNCHERS_FLAGS = (*FLAGS, "standalone")
"""Options of launchers that have no value: what follows one is the program."""
_SKIPPED = ("export", "local", "readonly", "declare", "then", "else", "do")
_DEPTH = {**dict.fromkeys(("if", "case", "for", "while"), 1), **dict.fromkeys(("fi", "esac", "done"), -1)}
OF_WANDB = ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_MODE")
_OF_THE_RUN = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", *OF_WANDB)
"""Environment variables of the command that configure the run."""


def read_script(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return key to value of the command with the most arguments, and the variables that depend on a condition.

    A key that occurs twice has its last value; one without a value is true, one with several is a list. Under a
    condition the first value of a variable counts.
    """
    shell = _Shell(text, {})
    found = max(map(_arguments, _with_quoted(shell)), key=len, default={})
    exported = {name: _value(shell.variables[name][0]) for name in _OF_THE_RUN if shell.variables.get(name)}
    return {**exported, **found}, sorted(shell.branched & shell.used)


def _with_quoted(shell: "_Shell") -> Iterator[list[str]]:
    """Return all commands, also those inside a quoted one (`srun bash -c "..."`)."""
    for words in shell.commands():
        yield words
        for word in words:
            if word.count(" --") > 2:
                yield from _Shell(word, shell.variables).commands()


def _arguments(words: list[str]) -> dict[str, Any]:
    """Return the arguments of a command."""
    found: dict[str, Any] = {}
    words, i = _after_launcher(words), 0
    while i < len(words):
        word = words[i]
        i += 1
        if hydra := _HYDRA.fullmatch(word):
            found[hydra[1]] = _value(hydra[2])
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            read = [_value(value)]
            if not equals:
                end = next((n for n in range(i, len(words)) if _is_key(words[n])), len(words))
                values = [] if name in _LAUNCHERS_FLAGS else _before_program(words[i:end])
                read, i = [_value(value) for value in values], end
            found[name.replace("-", "_")] = True if not read else read[0] if len(read) == 1 else read
        elif (assigned := _ASSIGNMENT.match(word)) and assigned[1] in _OF_THE_RUN:
            found[assigned[1]] = _value(word[assigned.end() :])
    return found


def _after_launcher(words: list[str]) -> list[str]:
    """Drop the options of `uv run`, of `hf jobs`, and of a launcher whose options end in `--`."""
    end = max((n + 1 for n, word in enumerate(words) if word == "--"), default=0)
    if words[:1] in (["uv"], ["hf"]):
        end = max(end, next((n for n, word in enumerate(words) if _PROGRAM.fullmatch(word)), 0))
    return [word for word in words[:end] if _ASSIGNMENT.match(word)] + words[end:]


def _before_program(values: list[str]) -> list[str]:
    """Drop the program behind the last option of its launcher."""
    return values[: next((n for n, word in enumerate(values) if n and word.endswith(".py")), len(values))]


def _is_key(word: str) -> bool:
    return bool(re.match(r"--[A-Za-z]", word) or _HYDRA.fullmatch(word))


def _value(text: str) -> Any:
    """Read a value as YAML does, except for text of several lines, which YAML would join."""
    text = re.sub(r"\$(HOME|\{HOME\})(?=/|$)", "~", text)
    return text if "\n" in text or text in ("no", "yes", "on", "off") else parse_value(text)


class _Shell:
    """Splits a script into commands, and fills in the variables that it assigns."""

    def __init__(self, text: str, variables: dict[str, list[str]]) -> None:
        self.text, self.at, self.variables = text, 0, variables
        self.branched: set[str] = set()
        """Variables for which the script has another value under a condition."""
        self.used: set[str] = set()
        """Variables whose value was filled in."""

    def commands(self) -> Iterator[list[str]]:
        """Return the words of each command; assignments take effect on the way."""
        depth, guarded = 0, False
        words: list[str] = []
        while self.at < len(self.text):
            if self._skip(_BLANK):
                continue
            # a <name> is a placeholder that the reader replaces
            if self.text[self.at] in "\n;|&(){}<>" and not _PLACEHOLDER.match(self.text, self.at):
                if words:
                    yield words
                guarded = self.text.startswith(("&&", "||"), self.at)
                self.at += 2 if guarded else 1
                words = []
            elif not words and (assigned := _ASSIGNMENT.match(self.text, self.at)):
                self.at = assigned.end()
                value = self._assigned()
                if self.text[self.at : self.at + 1] in (" ", "\t") and not _ENDS.match(self.text, self.at):
                    words = [f"{assigned[1]}={' '.join(value)}"]  # VARIABLE=value command
                else:
                    self._assign(assigned[1], bool(assigned[2]), value, unsure=depth > 0 or guarded)
            else:
                read = self._words()
                first = read[0] if len(read) == 1 and not words else ""
                depth += _DEPTH.get(first, 0)
                words += [] if first in _DEPTH or first in _SKIPPED else read
        if words:
            yield words

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found is not None

    def _assigned(self) -> list[str]:
        if not self.text.startswith("(", self.at):
            return [" ".join(self._words())]
        self.at += 1
        values: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "\n":
                self.at += 1
            elif not self._skip(_BLANK):
                values += [self._char()] if self.text[self.at] in ";|&(){}<>" else self._words()
        self.at += 1
        return values

    def _assign(self, name: str, more: bool, value: list[str], unsure: bool) -> None:
        """Assign; under a condition the first value stays, and the variable is noted."""
        if more:
            self.variables[name] = [*self.variables.get(name, []), *value]
        elif not unsure or name not in self.variables:
            self.variables[name] = value
        elif self.variables[name] != value:
            self.branched.add(name)

    def _char(self) -> str:
        self.at += 1
        return self.text[self.at - 1 : self.at]

    def _until(self, end: str) -> str:
        """Return the text up to `end`, or all that is left, and move behind it."""
        start, found = self.at, self.text.find(end, self.at)
        stop = len(self.text) if found < 0 else found
        self.at = stop + len(end)
        return self.text[start:stop]

    def _words(self) -> list[str]:
        """Read to the next white space or operator: usually one word, for an array its entries."""
        parts, quoted = [""], False
        while self.at < len(self.text) and (
            self.text[self.at] not in " \t\r\n;|&()<>" or _PLACEHOLDER.match(self.text, self.at)
        ):
            char = self._char()
            if char == "<":
                parts[-1] += f"<{self._until('>')}>"
            elif char == "\\":
                parts[-1] += self._char().replace("\n", "")
            elif char == "'":
                parts[-1] += self._until("'")
                quoted = True
            elif char == '"':
                read = self._quoted()
                _append(parts, read)
                quoted = quoted or bool(read)
            elif char in "$`":
                values = self._dollar(char)
                _append(parts, [part for v in values for part in ([v] if "$(" in v else v.split() or [""])])
            else:
                parts[-1] += char
        if parts == ["2"] and self.text[self.at : self.at + 1] == ">":
            return []
        return [part for part in parts if part or (quoted and len(parts) == 1)]

    def _quoted(self) -> list[str]:
        """Read to the closing quote."""
        parts, start = [""], self.at
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self._char()
            if char == "\\" and self.text[self.at : self.at + 1] in ("\\", '"', "$", "`", "\n"):
                parts[-1] += self._char().replace("\n", "")
            elif char in "$`":
                _append(parts, self._dollar(char))
            else:
                parts[-1] += char
        self.at += 1
        return [] if parts == [""] and self.at > start + 1 else parts  # "$@", an empty array

    def _dollar(self, char: str) -> list[str]:
        """Return the value of `$...`: one, or all of an array; an unknown one stays as it is."""
        start, found = self.at - 1, None
        if char == "`":
            self._until("`")
        elif self.text.startswith("((", self.at):
            self._close("(", ")")
            return [self._sum(self.text[start + 3 : self.at - 2]) or self.text[start : self.at]]
        elif self.text.startswith("(", self.at):
            self._close("(", ")")
        elif self.text.startswith("{", self.at):
            self._close("{", "}")
            found = _PARAMETER.fullmatch(self.text, start + 2, self.at - 1)
        elif found := _NAME.match(self.text, self.at):
            self.at = found.end()
        written = self.text[start : self.at]
        if found and found[0] in ("@", "*"):
            return []  # the script's own arguments
        return self._parameter(written, **found.groupdict()) if found and found["name"] else [written]

    def _parameter(
        self, written: str, name: str, whole: str | None = None, default: str | None = None, lower: str | None = None
    ) -> list[str]:
        self.used.add(name)
        value = self.variables.get(name)
        if value is None or (default is not None and value == [""]):
            unknown = [] if whole else [written]
            return unknown if default is None else _Shell(default.replace('"', "") + '"', self.variables)._quoted()
        if not whole:
            value = value[:1] or [""]
        return [text.lower() for text in value] if lower else value

    def _close(self, opening: str, closing: str) -> None:
        """Move behind the bracket that closes the one at this place; quotes hide brackets."""
        depth, quote = 0, ""
        while self.at < len(self.text):
            char = self._char()
            if char == "\\":
                self.at += 1
            elif char in "'\"" and quote in ("", char):
                quote = "" if quote else char
            elif not quote and char in (opening, closing):
                depth += 1 if char == opening else -1
                if not depth:
                    return

    def _sum(self, text: str) -> str | None:
        """Return the value of `$((...))`, in which names need no dollar."""
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self.variables.get(name[1], ["?"])[0], text)
        if not re.fullmatch(r"[\d\s+\-*/%()]+", filled) or "**" in filled:
            return None
        try:
            return str(int(eval(filled.replace("//", "/").replace("/", "//"))))  # digits and operators only
        except (SyntaxError, TypeError, ZeroDivisionError):
            return None


def _append(parts: list[str], values: list[str]) -> None:
    """Append the first value to the last part, the others as parts of their own."""
    if values:
        parts[-1] = parts[-1] + values[0] if parts[-1] else values[0]
        parts += values[1:]
