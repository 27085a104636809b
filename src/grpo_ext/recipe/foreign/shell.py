"""Arguments of the training command in a shell script: `--key value` and hydra's `a.b=c`.

Quotes, the script's own variables, arrays, defaults and sums are resolved; nothing is run. What only a shell knows
(`$(command)`, a variable of the environment) stays as it is written.
"""

import re
from collections.abc import Iterator
from typing import Any

from grpo_ext.recipe.files import parse_value

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"(?P<name>[A-Za-z_]\w*|\d)|[@*#?]")
_PARAMETER = re.compile(
    r"(?P<name>[A-Za-z_]\w*|\d)(?P<whole>\[[@*]\])?(?::?-(?P<default>.*)|(?P<lower>,,))?", re.DOTALL
)
_HYDRA = re.compile(r"\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r".*\.py|(.*/)?(python[\d.]*|accelerate|torchrun|deepspeed|swift|megatron|trl|ray)")
_PREFIXES = ("export", "local", "readonly", "declare")
_OF_THE_RUN = (
    *("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES", "MASTER_PORT", "MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM"),
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Environment variables of the command that say something about the run."""


class Word(str):
    """A word of a command, and the variables in it that the script sets in one of several branches."""

    unsure: frozenset[str] = frozenset()


def read_script(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return key to value of the command with the most arguments, and a sentence for each that depends on a condition.

    A key that occurs twice has its last value; one without a value is true, one with several is a list.
    """
    shell = _Shell(text)
    commands = [_of_command(words) for words in _with_inner(shell)]
    found, unsure = max(commands, key=lambda command: len(command[0]), default=({}, {}))
    exported = {name: _value(shell.variables[name][0]) for name in _OF_THE_RUN if shell.variables.get(name)}
    asked = {
        key: f"{key}: the script sets {', '.join(sorted(names))} under a condition; {found[key]!r} comes first."
        for key, names in unsure.items()
    }
    return {**exported, **found}, asked


def _with_inner(shell: "_Shell") -> Iterator[list[Word]]:
    """Return all commands, also those inside of a quoted one (`srun bash -c "..."`)."""
    for words in shell.commands():
        yield words
        for word in words:
            if word.count(" --") > 2:
                yield from _Shell(word, shell.variables).commands()


def _of_command(words: list[Word]) -> tuple[dict[str, Any], dict[str, frozenset[str]]]:
    found: dict[str, Any] = {}
    unsure: dict[str, frozenset[str]] = {}
    words = _after_launcher(words)
    i = 0
    while i < len(words):
        word, values = words[i], [words[i]]
        i += 1
        if hydra := _HYDRA.fullmatch(word):
            key, found[key] = hydra[1], _value(hydra[2])
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            end = i if equals else next((n for n in range(i, len(words)) if _is_key(words[n])), len(words))
            values, i = (values, i) if equals else (_before_program(words[i:end]), end)
            read = [_value(value)] if equals else [_value(v) for v in values]
            key = name.replace("-", "_")
            found[key] = True if not read else read[0] if len(read) == 1 else read
        elif (assigned := _ASSIGNMENT.match(word)) and assigned[1] in _OF_THE_RUN:
            key, found[key] = assigned[1], _value(word[assigned.end() :])
        else:
            continue
        unsure.pop(key, None)
        if names := frozenset().union(*(v.unsure for v in values)):
            unsure[key] = names
    return found, unsure


def _after_launcher(words: list[Word]) -> list[Word]:
    """Drop the options of `uv run`, of `hf jobs`, and of a launcher whose options end in `--`."""
    end = max((n + 1 for n, word in enumerate(words) if word == "--"), default=0)
    if words[:1] in (["uv"], ["hf"]):
        end = max(end, next((n for n, word in enumerate(words) if _PROGRAM.fullmatch(word)), 0))
    return [word for word in words[:end] if _ASSIGNMENT.match(word)] + words[end:]


def _before_program(values: list[Word]) -> list[Word]:
    """Drop the program behind the last option of its launcher."""
    end = next((n for n, word in enumerate(values) if n and word.endswith(".py")), len(values))
    return values[:end]


def _is_key(word: str) -> bool:
    return bool(re.match(r"--[A-Za-z]", word) or _HYDRA.fullmatch(word))


def _value(text: str) -> Any:
    """Read a value as YAML does, except for text of several lines, which YAML would join."""
    text = re.sub(r"\$(HOME|\{HOME\})(?=/|$)", "~", text)
    return text if "\n" in text or text in ("no", "yes", "on", "off") else parse_value(text)


class _Shell:
    """Splits a script into commands, and fills in what it assigns itself."""

    def __init__(self, text: str, variables: dict[str, list[str]] | None = None) -> None:
        self.text, self.at = text, 0
        self.variables = {} if variables is None else variables
        self.branched: set[str] = set()
        """Variables for which the script has another value under a condition."""
        self.used: set[str] = set()

    def commands(self) -> Iterator[list[Word]]:
        """Return the words of each command; assignments take effect on the way."""
        depth, guarded = 0, False
        words: list[Word] = []
        while self.at < len(self.text):
            if self._blank():
                continue
            char = self.text[self.at]
            if char in "\n;|&(){}<>" and not self._placeholder():
                if words:
                    yield words
                guarded = self.text.startswith(("&&", "||"), self.at)
                self.at += 2 if guarded else 1
                words = []
            elif not words and (assigned := _ASSIGNMENT.match(self.text, self.at)):
                self.at = assigned.end()
                value = self._assigned()
                if self.at < len(self.text) and self.text[self.at] in " \t" and not self._ends():
                    words = [self._word(f"{assigned[1]}={' '.join(value)}")]  # VARIABLE=value command
                else:
                    self._assign(assigned[1], bool(assigned[2]), value, unsure=depth > 0 or guarded)
            else:
                read = self._words()
                if not words and len(read) == 1 and read[0] in ("if", "case", "for", "while", "fi", "esac", "done"):
                    depth += 1 if read[0] in ("if", "case", "for", "while") else -1
                elif words or not (len(read) == 1 and read[0] in (*_PREFIXES, "then", "else", "do")):
                    words += read
        if words:
            yield words

    def _blank(self) -> bool:
        """Skip white space, a continued line or a comment."""
        for pattern in (r"[ \t\r]+|\\\n", r"#[^\n]*"):
            if found := re.compile(pattern).match(self.text, self.at):
                self.at = found.end()
                return True
        return False

    def _placeholder(self) -> bool:
        """Return whether a `<name>` follows, which a reader is to replace."""
        return bool(re.compile(r"<[A-Za-z][\w .-]*>").match(self.text, self.at))

    def _ends(self) -> bool:
        """Whether the command ends after this white space."""
        return bool(re.compile(r"[ \t\r]*(#|\n|;|&|\||$)").match(self.text, self.at))

    def _assigned(self) -> list[str]:
        if not self.text.startswith("(", self.at):
            words = self._words()
            self.used |= frozenset().union(*(word.unsure for word in words))
            return [self._word(" ".join(words))]
        self.at += 1
        values: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "\n":
                self.at += 1
            elif not self._blank():
                values += self._words() if self.text[self.at] not in ";|&(){}<>" else [self._char()]
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
        return self.text[self.at - 1]

    def _word(self, text: str) -> Word:
        word = Word(text)
        word.unsure = frozenset(self.used & self.branched) | getattr(text, "unsure", frozenset())
        self.used = set()
        return word

    def _words(self) -> list[Word]:
        """Read to the next white space or operator: mostly one word, for an array its entries."""
        parts, quoted = [""], False
        while self.at < len(self.text) and (self.text[self.at] not in " \t\r\n;|&()<>" or self._placeholder()):
            char = self._char()
            if char == "<":
                end = self.text.index(">", self.at) + 1
                parts[-1], self.at = parts[-1] + self.text[self.at - 1 : end], end
                continue
            if char == "\\":
                parts[-1] += self._char().replace("\n", "") if self.at < len(self.text) else ""
            elif char == "'":
                end = self.text.find("'", self.at) % (len(self.text) + 1)
                parts[-1] += self.text[self.at : end]
                self.at, quoted = end + 1, True
            elif char == '"':
                read = self._quoted()
                self._append(parts, read)
                quoted = quoted or bool(read)
            elif char in "$`":
                values = self._dollar(char)
                self._append(parts, [piece for value in values for piece in self._split(value)])
            else:
                parts[-1] += char
        if parts == ["2"] and self.text[self.at : self.at + 1] == ">":
            return []
        return [self._word(part) for part in parts if part or (quoted and len(parts) == 1)]

    @staticmethod
    def _split(value: str) -> list[str]:
        return [value] if "$(" in value else value.split() or [""]

    @staticmethod
    def _append(parts: list[str], values: list[str]) -> None:
        if values:
            parts[-1] = parts[-1] + values[0] if parts[-1] else values[0]
            parts += values[1:]

    def _quoted(self) -> list[str]:
        """Read to the closing quote."""
        parts, start = [""], self.at
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self._char()
            if char == "\\" and self.text[self.at : self.at + 1] in ("\\", '"', "$", "`", "\n"):
                parts[-1] += self._char().replace("\n", "")
            elif char in "$`":
                self._append(parts, self._dollar(char))
            else:
                parts[-1] += char
        self.at += 1
        return [] if parts == [""] and self.at > start + 1 else parts  # "$@", an empty array

    def _dollar(self, char: str) -> list[str]:
        """Return what `$...` stands for: one value, or all of an array; what is unknown stays as it is."""
        start = self.at - 1
        if char == "`":
            self.at = self.text.find("`", self.at) % (len(self.text) + 1) + 1
            return [self.text[start : self.at]]
        if self.text.startswith("((", self.at):
            self._close("(", ")")
            return [self._sum(self.text[start + 3 : self.at - 2]) or self.text[start : self.at]]
        if self.text.startswith("(", self.at):
            self._close("(", ")")
            return [self.text[start : self.at]]
        if self.text.startswith("{", self.at):
            self._close("{", "}")
            found = _PARAMETER.fullmatch(self.text, start + 2, self.at - 1)
        else:
            found = _NAME.match(self.text, self.at)
            self.at = found.end() if found else self.at
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
            self.used |= getattr(value[0], "unsure", frozenset())
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
