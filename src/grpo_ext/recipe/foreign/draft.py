"""A recipe in the making: what became of every key of a foreign configuration, and what a person must decide."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What becomes of one foreign key (or of all that a pattern such as `critic.*` matches).

    Written as "name", "name | what differs", "- | why it is not taken over", or "* where | how" where it is computed
    together with others.
    """

    to: str
    note: str = ""
    computed: bool = False

    @classmethod
    def read(cls, text: str) -> "Rule":
        """From its short form."""
        to, _, note = (part.strip() for part in text.partition("|"))
        return cls(to.removeprefix("*").strip().removeprefix("-"), note, to.startswith("*"))


def rules(**texts: str) -> dict[str, Rule]:
    """A project's table from its short forms."""
    return {key: Rule.read(text) for key, text in texts.items()}


@dataclass
class Draft:
    """Keys and values of a recipe, with a comment each where something should be said."""

    given: dict[str, Any]
    table: Mapping[str, Rule]
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Foreign keys that are not taken over, each with the reason."""
    decisions: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def rule(self, key: str) -> Rule | None:
        """The rule of a foreign key."""
        exact = self.table.get(key)
        return exact or next(
            (r for pattern, r in self.table.items() if "*" in pattern and fnmatchcase(key, pattern)), None
        )

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a foreign key that is dealt with here; the default where it is not given, or null."""
        if key not in self.given:
            return default
        self.taken.add(key)
        value = self.given[key]
        return default if value is None else value

    def set(self, key: str, value: Any, note: str = "") -> None:
        """Write a key of the recipe; the later of two stands."""
        self.values[key] = value
        self.notes.pop(key, None)
        if note:
            self.notes[key] = note

    def leave(self, key: str, reason: str) -> None:
        """Not taken over, with the reason."""
        if key in self.given:
            self.taken.add(key)
            self.left[key] = reason

    def decide(self, sentence: str) -> None:
        """Something that a person must decide."""
        self.decisions.append(sentence)

    def apply_table(self, known: frozenset[str] = frozenset()) -> None:
        """What the table says of each key; those in `known` mean the same here, and what nobody knows is asked."""
        for key, value in self.given.items():
            if key in self.taken:
                continue
            rule = self.rule(key)
            if value is None:
                self.taken.add(key)
            elif rule is None and key in known:
                self.taken.add(key)
                self.set(key, value)
            elif rule is None:
                self.leave(key, "not known here")
                self.decide(f"{key}: {value!r} is not known here. Look whether the run needs it.")
            elif rule.computed:
                continue
            elif rule.to:
                self.taken.add(key)
                if rule.to not in self.values:
                    self.set(rule.to, value, rule.note)
            else:
                self.leave(key, rule.note)

    def left_over(self) -> list[str]:
        """Keys that nobody has dealt with: there must be none."""
        return [key for key in self.given if key not in self.taken]

    def environment(self, name: str, value: Any) -> None:
        """Set an environment variable in the recipe."""
        self.values.setdefault("env", {})[name] = str(value)


def split_batch(completions: int, processes: int, at_most: int) -> tuple[int, int] | None:
    """Rows per device and accumulation steps whose product over the processes is a step of so many completions.

    The rows are the largest divisor that is not more than `at_most`; None where the processes do not divide the step.

    >>> split_batch(1280, 8, 80), split_batch(64, 2, 40), split_batch(10, 4, 8)
    ((80, 2), (32, 1), None)
    """
    if completions % processes:
        return None
    each = completions // processes
    rows = next(size for size in range(min(max(1, at_most), each), 0, -1) if each % size == 0)
    return rows, each // rows


def set_batch(
    draft: Draft, *, generated: int, step: int, processes: int, rows: int, sources: tuple[str, str], group: int
) -> None:
    """Batch keys for `generated` completions drawn at once, of which an optimizer step takes `step`."""
    of_generation, of_step = sources
    found = split_batch(step, processes, rows)
    draft.set("num_processes", processes)
    if found is None or generated % step or generated % group:
        draft.set("generation_batch_size", generated, of_generation)
        draft.set("per_device_train_batch_size", rows)
        draft.decide(
            f"The batch: {generated} completions drawn at once, {step} in an optimizer step, {processes} processes do "
            "not divide one another. Choose per_device_train_batch_size, gradient_accumulation_steps and "
            "generation_batch_size."
        )
        return
    size, accumulation = found
    draft.set(
        "per_device_train_batch_size", size, "" if size == rows else f"{rows} there, which does not divide the step"
    )
    draft.set("gradient_accumulation_steps", accumulation, of_step)
    draft.set("generation_batch_size", generated, of_generation)


def whole_groups(draft: Draft, processes_at_most: int = 64) -> None:
    """Where rows and accumulation are whole groups with several processes alone, write the fewest that do."""
    rows, group = draft.values.get("per_device_train_batch_size", 8), draft.values.get("num_generations", 8)
    steps = draft.values.get("steps_per_generation") or draft.values.get("gradient_accumulation_steps", 1)
    evaluated = draft.values.get("eval_strategy", "no") != "no"
    of_eval = draft.values.get("per_device_eval_batch_size", 8), draft.values.get("num_generations_eval") or group
    if {"num_processes", "generation_batch_size"} & draft.values.keys():
        return

    def fit(processes: int) -> bool:
        whole = rows * steps * processes % group == 0
        return whole and not (evaluated and of_eval[0] * processes % of_eval[1])

    if not all(isinstance(value, int) for value in (rows, group, steps, *of_eval)) or fit(1):
        return
    processes = next((n for n in range(2, processes_at_most + 1) if fit(n)), None)
    if processes is not None:
        draft.set("num_processes", processes)
        draft.decide(
            f"num_processes: the file does not say it; {rows} x {steps} completions of each process are whole groups "
            "of "
            f"{group} with {processes} processes, which are written."
        )


def cosine_length(
    draft: Draft, max_length: Any, *, correct: tuple[float, float], wrong: tuple[float, float]
) -> dict[str, Any]:
    """The reward `cosine_length` that goes from the first to the second value of each pair, short to long."""
    (short, long), (short_wrong, long_wrong) = correct, wrong
    if short < long or short_wrong > long_wrong:
        draft.decide(
            f"reward cosine: correct answers go from {short:g} (short) to {long:g} (long), wrong ones from "
            f"{short_wrong:g} "
            f"to {long_wrong:g}. cosine_length lets correct ones lose by length and wrong ones gain: its values are "
            "exchanged where they do not."
        )
    return {
        "name": "cosine_length",
        "kwargs": {
            "max_length": max_length,
            "min_value_correct": min(short, long),
            "max_value_correct": max(short, long),
            "min_value_wrong": min(short_wrong, long_wrong),
            "max_value_wrong": max(short_wrong, long_wrong),
        },
    }
