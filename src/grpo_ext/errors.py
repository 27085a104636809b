"""Errors for users. A message has the value, the reason and the cure, without secrets."""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final

NOT_FINISHED = 75
"""Exit code of a run that was interrupted or lost a process: the same command resumes it (EX_TEMPFAIL)."""


class UnknownNameError(ValueError):
    """A name without a registry entry or an importable object; the message is "reason. cure"."""

    def __init__(self, reason: str, cure: str = "") -> None:
        self.reason, self.cure = reason, cure
        super().__init__(f"{reason}. {cure}" if cure else reason)


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"

    def __reduce__(self) -> str:
        return "ABSENT"  # one object, also in a copy and in another process


ABSENT: Final = _Absent()
"""The value of a problem whose field has no value to show."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration. Rendered as "field=value: reason. cure", without secrets.

    Args:
        field: the setting, such as "beta" or "reward_funcs[2].weight".
        value: what it is set to, or `ABSENT`.
        reason: what is wrong with it, without a full stop.
        cure: what to do, one or more sentences; empty where the reason includes it.
        beside: other settings that make it a mistake, with their values.
    """

    field: str
    value: object
    reason: str
    cure: str
    beside: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.field, self.reason, self.cure))

    def __str__(self) -> str:
        """Return the message."""
        settings = {self.field: self.value, **self.beside}
        names = [n if value is ABSENT else f"{n}={_clipped(repr(value))}" for n, value in settings.items()]
        # Apart, so that the first word of the reason is not taken for the value of a secret.
        parts = " with ".join(map(_clipped, names)), f"{_clipped(self.reason)}. {self.cure}".rstrip()
        return ": ".join(map(redacted_text, parts))


_LONGEST, _ALL, _MOST = 2000, 10_000, 30
"""Characters of a part of a message and of all problems in it, and the number of these."""


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


class ConfigError(ValueError):
    """All mistakes in a configuration; `problems` holds one `Problem` for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"  - {p}" for p in self.problems[:_MOST]]
        fitting = [line for line, ends in zip(lines, accumulate(map(len, lines)), strict=True) if ends <= _ALL]
        shown = fitting or lines[:1]
        rest = [f"  and {len(self.problems) - len(shown):,} more."][: len(self.problems) - len(shown)]
        super().__init__("\n".join([f"{count} in the configuration:", *shown, *rest]))

    def __reduce__(self) -> tuple[type, tuple[list[Problem]]]:
        """Keep the problems in a copy, and on the way to another process."""
        return type(self), (self.problems,)


class DataError(ValueError):
    """A dataset, or a setting of one, that cannot be used; `problems` holds one `Problem` for each mistake."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        """List the problems, one a line."""
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    __reduce__ = ConfigError.__reduce__


class RewardError(RuntimeError):
    """A reward with `on_error: raise` failed; the message has its name and the cause."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted_text(message))


class EpisodesFailed(RuntimeError):
    """Each episode in an environment has failed, generation after generation; raised on all processes."""


class NonFiniteError(RuntimeError):
    """NaN or inf in the input of the optimizer; raised on all processes, with the first bad tensor."""


class RolloutDrift(RuntimeError):
    """Sampler and policy disagree, and `rollout_drift_action` is "stop"."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop; of an error without one, its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class OutOfMemory(RuntimeError):
    """A process of a run has too little memory; the message has what needs less."""

    def __init__(self, where: str, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error!s:.300}".splitlines()[0]
        super().__init__(f"{where}: too little memory ({reason}). {LESS_MEMORY}")


LESS_MEMORY = (
    "Halve per_device_train_batch_size (in an evaluation per_device_eval_batch_size) and double "
    "gradient_accumulation_steps, set gradient_checkpointing: true or use_peft: true, or lower max_completion_length."
)
"""Cure of too little memory."""


class ServerLost(RuntimeError):
    """The vLLM server is gone for good; raised on all processes."""


class SamplerLost(RuntimeError):
    """A generation cannot be made: its process failed twice, or a signal ends the run; raised on all processes."""


class SaveError(RuntimeError):
    """A checkpoint or the model could not be written; raised on all processes. Earlier checkpoints are intact."""


class RankLost(RuntimeError):
    """Another process of the launch has ended, or did not respond within `ddp_timeout`."""


class RunInterrupted(SystemExit):
    """A run was interrupted and has saved its state; uncaught, the process exits with `NOT_FINISHED`."""

    def __init__(self, line: str) -> None:
        """Keep `line`, which names the checkpoint that was saved."""
        super().__init__(NOT_FINISHED)
        self.line = line

    def __str__(self) -> str:
        """Return the line about the saved checkpoint."""
        return self.line


FAILURES = (ConfigError, DataError, EpisodesFailed, NonFiniteError, OutOfMemory, RewardError, RolloutDrift, SaveError)
"""Errors that end a command with exit code 2; their message is all that a user needs."""
LOST = (RankLost, SamplerLost, ServerLost)
"""Errors that end a command with `NOT_FINISHED`: run again, it resumes."""


# Secrets.

_ENDS = (
    *("token", "apikey", "api_key", "access_key", "private_key", "secret_key", "secret"),
    *("password", "passwd", "authorization", "credential", "credentials"),
)
_OF_A_VOCABULARY = (
    *("eos", "bos", "pad", "unk", "mask", "sep", "cls", "image", "video", "audio", "start", "end", "new", "newline"),
    *("stop", "special", "think", "thinking", "reasoning", "answer", "tool", "boi", "eoi", "split", "per"),
)
_ENTRY = re.compile(
    r"""(?<![A-Za-z])(?P<name>[A-Za-z][\w-]{0,60})(?P<between>['"]?\s*[:=]\s*)"""
    r"""(?:(?P<quote>['"])(?P<text>.*?)(?P=quote)|(?P<inside>\[[^]]*\]|\{[^}]*\})|"""
    r"""(?!\w[\w-]*=['"[{])(?P<word>[^\s,;.'"()[\]{}]+))"""
)
"""A name with its value: in quotes, in brackets, or one word that is not a name with its value in turn."""
_URL = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s'"<>]+""")
_AUTHORIZATION = re.compile(r"""(authorization\W{1,4}(?:basic|bearer)\s+)[^\s'",;]+""", re.IGNORECASE)
_LEVELS = 20
_WELL_KNOWN = re.compile(r"\b(?:(?:hf_|ghp_)[A-Za-z0-9]{16,}|(?:sk-|github_pat_|glpat-|xox[bp]-)[\w-]{16,})")


def is_secret(name: str) -> bool:
    """Return whether a setting, option or header of this name holds a secret, as `hub_token` and `X-API-Key` do."""
    name = name.lower().replace("-", "_")
    return name.endswith(_ENDS) and not name.removesuffix("_token").endswith(_OF_A_VOCABULARY)


_SECRET_WORDS = frozenset(
    (
        *("key", "token", "apikey", "secret", "password", "passwd", "passphrase", "pass", "pwd", "pat"),
        *("credential", "credentials", "auth", "authorization"),
    )
)
"""Words between the underscores of a variable's name."""
_SHORTEST = 8
"""Fewest characters of a secret's value that is looked for in texts: a shorter one may be there by chance."""


def secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are secrets by their names, as HF_TOKEN and AZURE_KEY_2 are."""

    def secret(name: str) -> bool:
        return name.lower() not in ("pwd", "key") and (
            is_secret(name) or not _SECRET_WORDS.isdisjoint(name.lower().split("_"))
        )

    return {name: value for name, value in environment.items() if secret(name)}


def without_secrets(value: Any) -> Any:
    """Return texts, in lists and mappings too, with *** for values of secret variables of this process.

    Keys of well-known forms go too. Any other text stays: a completion may well set a password.
    """
    lines = [line.strip() for value in secret_variables(os.environ).values() for line in value.splitlines()]
    values = {line for line in lines if len(line) >= _SHORTEST}  # a key of several lines may be shown in one
    exact = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
    return _hidden(value, re.compile(f"{exact}|{_WELL_KNOWN.pattern}" if exact else _WELL_KNOWN.pattern))


def _hidden(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub("***", value)
    if isinstance(value, Mapping):
        return {_hidden(key, pattern): _hidden(part, pattern) for key, part in value.items()}
    return [_hidden(part, pattern) for part in value] if type(value) in (list, tuple) else value


def redacted(value: object, name: str = "") -> Any:
    """Return settings in which secrets are None, and texts have none in their urls."""
    if isinstance(value, Mapping):
        return {key: redacted(part, str(key)) for key, part in value.items()}
    if value is not None and is_secret(name):
        return None
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(redacted(part) for part in value)
    return _in_urls(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Return a message with *** in place of the values of secrets, also in urls."""
    return _WELL_KNOWN.sub(
        "***", _AUTHORIZATION.sub(r"\1***", _ENTRY.sub(partial(_entry, levels=_LEVELS), _in_urls(text)))
    )


def _entry(match: re.Match[str], levels: int) -> str:
    """Return a name with its value, or with *** for a secret; a word behind `token: ` may be prose.

    Values are read as names with values in turn, `levels` deep; what is deeper is not shown.
    """
    name, quote = match["name"], match["quote"] or ""
    before = f"{name}{match['between']}{quote}"
    prose = match["word"] is not None and not match["word"].isdecimal() and not re.search("[_-]", name)
    if not levels or (is_secret(name) and not prose):
        return f"{before}***{quote}"
    value = match["text"] or match["inside"] or match["word"] or ""
    return f"{before}{_ENTRY.sub(partial(_entry, levels=levels - 1), value)}{quote}"


def _in_urls(text: str) -> str:
    return _URL.sub(_url, text) if "://" in text else text


def _url(match: re.Match[str]) -> str:
    without_user = re.sub(r"://[^/?#]*@", "://***@", match[0])
    return re.sub(r"([?&;#][^=&;?#]+=)[^&;#)]+", r"\1***", without_user)
