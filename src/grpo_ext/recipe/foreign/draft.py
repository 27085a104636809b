"""A recipe under construction: what became of each key of a foreign configuration, and what a person must decide."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from trl import GRPOConfig

from grpo_ext.recipe.parts import PARTS


@dataclass(frozen=True)
class Rule:
    """What becomes of one foreign key (or of all that a pattern such as `critic.*` matches).

    Written as "name", "name | what differs", "- | why it is left out", "* where | how" where a function computes it
    from several keys, or "? | what a person must decide" unless the value is false.
    """

    to: str
    note: str = ""
    computed: bool = False
    asks: bool = False

    @classmethod
    def read(cls, text: str) -> "Rule":
        """Parse the short form."""
        to, _, note = (part.strip() for part in text.partition("|"))
        return cls(to.lstrip("*-? "), note, to.startswith("*"), to.startswith("?"))


def rules(**texts: str) -> dict[str, Rule]:
    """Return a project's table from its short forms."""
    return {key: Rule.read(text) for key, text in texts.items()}


Defaults = Mapping[str, Mapping[str, Any]]
"""Key of a recipe -> {first version with this default: the default}."""


def defaults_at(table: Defaults, version: str) -> dict[str, Any]:
    """Return the defaults of one version.

    >>> defaults_at({"beta": {"0.16": 0.04, "0.19": 0.0}, "top_k": {"0.17": 50}}, "0.16.1")
    {'beta': 0.04}
    """
    found = {}
    for key, values in table.items():
        reached = [since for since in values if number(since) <= number(version)]
        if reached:
            found[key] = values[max(reached, key=number)]
    return found


def number(version: str) -> tuple[int, ...]:
    """Return a version as a tuple that sorts."""
    return tuple(int(part) for part in version.split("."))


@cache
def own_default(key: str) -> Any:
    """Return the default of a recipe's key, of an axis of the loss stock TRL's; NotImplemented where it has none."""
    fields = (f for part in (*PARTS, GRPOConfig) for f in dataclasses.fields(part) if f.name == key)
    found = [f.default for f in fields if f.default is not dataclasses.MISSING]
    return next((default for default in found if default is not None), found[0] if found else NotImplemented)


@dataclass
class Draft:
    """Keys and values of a recipe; for each value, the foreign keys that it was made of."""

    given: dict[str, Any]
    table: Mapping[str, Rule]
    title: str = ""
    version: str = ""
    says_default: str = ""
    """The comment of a value that the file does not give."""
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    """Key of the recipe -> the foreign keys that its value was made of."""
    left: dict[str, str] = field(default_factory=dict)
    """Foreign keys that are not converted, each with the reason."""
    decisions: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """Foreign keys that a decision is about."""

    @property
    def converted(self) -> set[str]:
        """Foreign keys of which a value of the recipe was made."""
        return {source for key in self.values for source in self.sources.get(key, ())}

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a foreign key."""
        exact = self.table.get(key)
        return exact or next(
            (r for pattern, r in self.table.items() if "*" in pattern and fnmatchcase(key, pattern)), None
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a foreign key's value, or the default. Reading a key does not count as converting it."""
        return self.given.get(key, default)

    def set(self, key: str, value: Any, note: str = "", of: str | Iterable[str] = ()) -> None:
        """Write a key of the recipe, made of the foreign keys `of`; where none of them is given it is a default."""
        named = (of,) if isinstance(of, str) else tuple(of)
        made_of = {name for name in named if name in self.given}
        if named and not made_of and not note:
            note = self.says_default
        self.values[key], self.sources[key] = value, made_of
        self.notes.pop(key, None)
        if note:
            self.notes[key] = note

    def copy(self, key: str, *of: str, default: Any = None, note: str = "") -> Any:
        """Write the first of the foreign keys that is given, else the default unless that is None; return it."""
        name = next((name for name in of if name in self.given), None)
        value = default if name is None else self.given[name]
        if value is not None:
            self.set(key, value, note if name else "", of=name or of)
        return value

    def unset(self, key: str) -> None:
        """Remove a key of the recipe."""
        for part in (self.values, self.notes, self.sources):
            part.pop(key, None)

    def leave(self, key: str, reason: str) -> None:
        """Note the reason why a foreign key is not converted."""
        if key in self.given:
            self.left[key] = reason

    def decide(self, sentence: str, of: str | Iterable[str] = ()) -> None:
        """Add something that a person must decide about the foreign keys `of`."""
        self.decisions.append(sentence)
        self.asked |= {name for name in ((of,) if isinstance(of, str) else of) if name in self.given}

    def apply_table(self, same: frozenset[str] = frozenset()) -> None:
        """Apply the table to keys that no function has dealt with; those in `same` mean the same here."""
        done = self.converted | self.left.keys() | self.asked
        for key, value in self.given.items():
            rule = self.rule(key)
            if key in done or (rule and rule.computed) or key in self.asked:
                continue
            if rule and rule.asks and value:
                same_rule = [name for name in self.given if self.rule(name) is rule]
                self.decide(f"{key}={value}: {rule.note}.", of=same_rule)
                continue
            if rule is None and key not in same:
                self.leave(key, "not known here")
                self.decide(f"{key}: {value!r} is not known here. Look whether the run needs it.")
            elif rule is None or rule.to:
                to = rule.to if rule else key
                if to not in self.values:
                    self.set(to, value, rule.note if rule else "", of=key)
            else:
                self.leave(key, rule.note)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Write the project's defaults that differ from ours, where the file is silent."""
        for key, value in defaults.items():
            if key not in self.values and value != own_default(key):
                self.set(key, value, self.says_default)

    def settle(self) -> None:
        """Account for each key: converted, asked about, or left out with a reason."""
        for key in self.given.keys() - self.converted - self.asked:
            rule = self.rule(key)
            if key not in self.left:
                self.left[key] = f"no effect here: {rule.note}" if rule and rule.note else "no effect here"
        for key in self.converted:
            self.left.pop(key, None)

    def environment(self, name: str, key: str) -> None:
        """Copy a foreign key to an environment variable of the recipe."""
        if (value := self.get(key)) is not None:
            variables = {**self.values.get("env", {}), name: str(value)}
            self.set("env", variables, of=self.sources.get("env", set()) | {key})


@dataclass(frozen=True)
class Translation:
    """How `migrate` converts the configurations of one project."""

    title: str
    table: Mapping[str, Rule]
    steps: tuple[Callable[[Draft], None], ...]
    """Functions that compute what more than one key says, before the table is applied to the rest."""
    own_defaults: Defaults
    versions: tuple[str, ...]
    """Versions at which a default changed; the last one is assumed where neither file nor user says which."""
    nested: bool = False
    """Whether its YAML is a tree, whose keys are written with dots."""
    same: frozenset[str] = frozenset()
    """Keys that mean the same here."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other versions' names of keys, or of sections (with a dot at the end) -> those of the table."""
    version_of: Callable[[Mapping[str, Any]], str] = lambda given: ""
    """The version that keys of a file show, or nothing."""
    finish: Callable[[Draft], None] | None = None
    table_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of its own keys that its files refer to."""
    says: str = "the default of {title} {version}"
    """The comment of such a default."""

    def draft(self, given: dict[str, Any], version: str) -> Draft:
        """Return an empty recipe for a file."""
        return Draft(given, self.table, self.title, version, self.says.format(title=self.title, version=version))

    def defaults(self, draft: Draft) -> dict[str, Any]:
        """Return what the file leaves to its project, without vLLM's settings where nothing samples by vLLM."""
        found = defaults_at(self.own_defaults, draft.version)
        corrects = found.get("vllm_importance_sampling_correction", True)
        corrects = draft.values.get("vllm_importance_sampling_correction", corrects)

        def has_effect(key: str) -> bool:
            if key.startswith("vllm_importance_sampling_") and key != "vllm_importance_sampling_correction":
                return bool(draft.values.get("use_vllm") and corrects)
            if key == "use_bias_correction_kl":
                return bool(draft.values.get("beta", found.get("beta"))) and "kl_estimator" not in draft.values
            return bool(draft.values.get("use_vllm")) or not key.startswith("vllm_")

        return {key: value for key, value in found.items() if has_effect(key)}
