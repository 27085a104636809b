"""Convert a configuration of another project by its table, and account for every key of it."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from trl import GRPOConfig

from grpo_ext.errors import ConfigError, Problem
from grpo_ext.recipe.files import parse_value
from grpo_ext.recipe.parts import PARTS


@dataclass(frozen=True)
class KeyRule:
    """One row of a table: how a foreign key is converted.

    Written as "name", "name = their default", "name | what differs", "- | why it is left out", or "* names | how"
    where a function computes them from several keys. `env.NAME` is an environment variable.
    """

    to: str
    note: str = ""
    computed: bool = False
    default: Any = None

    @classmethod
    def read(cls, text: str) -> "KeyRule":
        """Parse the short form."""
        to, _, note = (part.strip() for part in text.partition("|"))
        to, _, default = to.partition(" = ")
        return cls(to.lstrip("*- "), note, to.startswith("*"), parse_value(default) if default else None)


_LEFT_OUT = KeyRule("")


def rules(table: Mapping[str, str]) -> dict[str, KeyRule]:
    """Read a table. A row may have several names, and the row "=" lists `theirs=ours`.

    >>> [(key, rule.to, rule.default) for key, rule in rules({"=": "lr=rate", "b c": "d = 2"}).items()]
    [('lr', 'rate', None), ('b', 'd', 2), ('c', 'd', 2)]
    """
    found: dict[str, KeyRule] = {}
    for names, row in table.items():
        if names == "=":
            found |= {theirs: KeyRule(ours) for theirs, ours in (name.split("=") for name in row.split())}
        else:
            found |= dict.fromkeys(names.split(), KeyRule.read(row))
    return found


def version_key(version: str) -> tuple[int, ...]:
    """Return a version as a tuple that sorts."""
    return tuple(int(part) for part in version.split("."))


def defaults_at(table: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the defaults of one version; an entry is a default, or {first version: default}.

    >>> defaults_at({"beta": {"0.16": 0.04, "0.19": 0.0}, "top_k": {"0.17": 50}, "seed": 1}, "0.16.1")
    {'beta': 0.04, 'seed': 1}
    """
    found = {}
    for key, default in table.items():
        values = default if isinstance(default, dict) else {"0": default}
        reached = [since for since in values if version_key(since) <= version_key(version)]
        if reached:
            found[key] = values[max(reached, key=version_key)]
    return found


@cache
def own_default(key: str) -> Any:
    """Return the default of a recipe's key, of an axis of the loss stock TRL's; NotImplemented without one."""
    fields = (f for part in (*PARTS, GRPOConfig) for f in dataclasses.fields(part) if f.name == key)
    found = [f.default for f in fields if f.default is not dataclasses.MISSING]
    return next((default for default in found if default is not None), found[0] if found else NotImplemented)


@dataclass(frozen=True)
class Translation:
    """How the configurations of one project are converted.

    Args:
        title: the project's name.
        table: foreign key -> rule.
        steps: functions that compute the rows marked "*"; the rest of the table is applied after them.
        versions: versions at which a default changed; the last one is assumed unless the file or the user names one.
        defaults: key of the recipe -> default of the project, or {first version: default}.
        same: keys that have the same meaning in both.
        finish: called after the table and the defaults were applied.
        describes_default: comment of a value that the file leaves unset.
    """

    title: str
    table: Mapping[str, KeyRule]
    steps: tuple[Callable[["Draft"], None], ...]
    versions: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    same: frozenset[str] = frozenset()
    finish: Callable[["Draft"], None] = lambda draft: None
    describes_default: str = "the default of {title} {version}"

    def convert(self, given: Mapping[str, Any], version: str = "", unsure: Sequence[str] = ()) -> "Draft":
        """Convert a configuration; `unsure` are variables of its script whose value depends on a condition.

        Raises:
            ConfigError: the version is unknown.
        """
        draft = Draft(self, {key: v for key, v in given.items() if v is not None}, self._version(version))
        unresolved = draft.set_unresolved_aside()
        for step in self.steps:
            step(draft)
        draft.apply_table()
        draft.fill()
        self.finish(draft)
        about_rewards = [sentence for sentence in draft.decisions if re.search("^reward|reward_funcs", sentence)]
        if "reward_funcs" not in draft.values and not about_rewards:
            draft.decide("reward_funcs: the file names no reward. Name some (docs/rewards.md), or your functions.")
        if unsure:
            draft.decide(f"The script sets {', '.join(unsure)} under a condition; the first value is written.")
        draft.settle(unresolved)
        return draft

    def _version(self, version: str) -> str:
        oldest = self.versions[0]
        if version and (not re.fullmatch(r"\d+(\.\d+)*", version) or version_key(version) < version_key(oldest)):
            reason = f"the defaults of {self.title} are known since {oldest}"
            raise ConfigError([Problem("--version", version, reason, f"Name one of {', '.join(self.versions)}.")])
        return version or self.versions[-1]


@dataclass
class Draft:
    """A recipe under construction.

    Args:
        project: the project whose configuration is converted.
        given: foreign key -> value.
        version: the project's version, for its defaults.
        values: key of the recipe -> value.
        notes: key of the recipe -> comment.
        sources: key of the recipe -> foreign keys that its value was made of.
        left: foreign keys that are not converted, each with the reason.
        decisions: sentences about what a person must decide.
        asked: foreign keys that a decision is about.
    """

    project: Translation
    given: dict[str, Any]
    version: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    @property
    def title(self) -> str:
        """The project's name."""
        return self.project.title

    @property
    def default_note(self) -> str:
        """The comment of a value that the file leaves unset."""
        return self.project.describes_default.format(title=self.title, version=self.version)

    @property
    def converted(self) -> set[str]:
        """Foreign keys that a value of the recipe was made of."""
        return {source for key in self.values for source in self.sources.get(key, ())}

    def rule(self, key: str) -> KeyRule | None:
        """Return the rule of a foreign key."""
        return self.project.table.get(key)

    def get(self, key: str, default: object = None) -> Any:
        """Return a foreign key's value, else the project's default. Reading a key does not count as converting it."""
        rule = self.project.table.get(key, _LEFT_OUT)
        return self.given.get(key, default if rule.default is None else rule.default)

    def set(self, key: str, value: object, note: str = "", of: str | Iterable[str] | None = None) -> None:
        """Write a key of the recipe, made of the foreign keys `of`; by default, of all "*" rows that name it.

        If the file has no such key, the value is a default, and the comment names its origin.
        """
        named = self.computing(key) if of is None else (of,) if isinstance(of, str) else tuple(of)
        made_of = {name for name in named if name in self.given}
        if not made_of and not note and (named or of is None):
            note = self.default_note
        self.values[key], self.sources[key] = value, made_of
        self.notes.pop(key, None)
        if note:
            self.notes[key] = note

    def computing(self, key: str) -> list[str]:
        """Return the given foreign keys whose "*" row names a key of the recipe."""
        rules = ((name, self.rule(name)) for name in self.given)
        return [name for name, rule in rules if rule and rule.computed and key in rule.to.split(", ")]

    def leave(self, key: str, reason: str) -> None:
        """Note the reason why a foreign key is not converted."""
        if key in self.given:
            self.left[key] = reason

    def decide(self, sentence: str, *of: str) -> None:
        """Add something that a person must decide about the foreign keys `of`."""
        self.decisions.append(sentence)
        self.asked |= self.given.keys() & set(of)

    def set_unresolved_aside(self) -> dict[str, tuple[Any, str]]:
        """Remove and return the keys whose value only a run of the script would show, each with the reason."""
        found = {}
        for key, value in self.given.items():
            rule, text = self.rule(key), value if isinstance(value, str) else ""
            if re.fullmatch(r"\$(\w+|\{.*\}|\(.*\))", text, re.DOTALL) and (rule is None or rule.to or rule.computed):
                found[key] = value, "only running the script would show it"
                self.decide(f"{key}: only running the script would show {value}. {self.title}'s default is written.")
        self.given = {key: value for key, value in self.given.items() if key not in found}
        return found

    def apply_table(self) -> None:
        """Apply the table to the keys that no step has handled."""
        converted = self.converted
        for key, value in self.given.items():
            rule = self.rule(key)
            done = rule.computed if rule else key in converted
            if done or key in self.left or key in self.asked:
                continue
            if rule and not rule.to:
                self.leave(key, rule.note)
            elif rule and rule.to.startswith("env."):
                self.set_variable(rule.to.removeprefix("env."), key)
            elif rule or key in self.project.same:
                to, note = (rule.to, rule.note) if rule else (key, "")
                if to not in self.values:
                    self.set(to, value, note, of=key)
            else:
                self.leave(key, "unknown key")
                self.decide(f"{key}: {value!r} is an unknown key of {self.title}. Check whether the run needs it.")

    def set_variable(self, name: str, key: str) -> None:
        """Copy a foreign key to an environment variable."""
        if key in self.given:
            variables = {**self.values.get("env", {}), name: str(self.given[key])}
            self.set("env", variables, of=self.sources.get("env", set()) | {key})

    def fill(self) -> None:
        """Write the project's defaults that differ from ours, where the file leaves them unset and they matter."""
        defaults = defaults_at(self.project.defaults, self.version)
        for key, value in defaults.items():
            if key not in self.values and value != own_default(key) and self._has_effect(key, defaults):
                self.set(key, value, self.default_note, of=())

    def _has_effect(self, key: str, defaults: Mapping[str, Any]) -> bool:
        sampler, correction = self.values.get("use_vllm"), "vllm_importance_sampling_correction"
        if key.startswith("vllm_importance_sampling_") and key != correction:
            return bool(sampler and self.values.get(correction, defaults.get(correction, True)))
        if key == "use_bias_correction_kl":
            return bool(self.values.get("beta", defaults.get("beta"))) and "kl_estimator" not in self.values
        return bool(sampler) or not key.startswith("vllm_")

    def settle(self, unresolved: Mapping[str, tuple[Any, str]]) -> None:
        """Account for each key, and ask for variables of a shell that remain in a value."""
        for key in self.given.keys() - self.converted - self.asked - self.left.keys():
            rule = self.rule(key)
            self.left[key] = f"no effect here: {rule.note}" if rule and rule.note else "no effect here"
        for key in self.converted:
            self.left.pop(key, None)
        self.given |= {key: value for key, (value, _) in unresolved.items()}
        self.left |= {key: reason for key, (_, reason) in unresolved.items()}
        for key, value in self.values.items():
            names = re.findall(r"\$\{.*?\}|\$\(.*?\)|\$[A-Za-z_]\w*", str(value))
            if names and key not in ("system_prompt", "chat_template"):
                self.decide(
                    f"{key}: the file has no value for {', '.join(dict.fromkeys(names))}. Write it out; a recipe "
                    "takes $NAME from the environment."
                )
