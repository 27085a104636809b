"""`eval_sets` of a recipe: what to evaluate on, how to sample, and how often."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.config.fields import sound_values
from grpo_ext.data.config import DataConfig
from grpo_ext.data.config import problems as data_problems
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.composition import parse as parse_rewards
from grpo_ext.rewards.protocol import ENVIRONMENT, RIGHT

DATA_KEYS = tuple(f.name for f in dataclasses.fields(DataConfig))
"""Keys of the data that a set may have for itself; what it leaves out is the recipe's."""


@dataclass(frozen=True)
class EvalSet:
    """One entry of `eval_sets`."""

    name: str
    dataset_name: str | None = None
    """As in a recipe; None: the recipe's own."""
    dataset_config: str | None = None
    split: str | None = None
    """Of the dataset; None: the recipe's `dataset_test_split`."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's data keys that are others here."""
    rewards: Sequence[RewardSpec] = ()
    """None: the recipe's."""
    judge: str | None = None
    """Reward that says what is right, by a value of at least `threshold`; None: `accuracy`, else the first."""
    threshold: float = RIGHT
    samples: int = 1
    k: tuple[int, ...] = ()
    """Of pass@k and maj@k; none: the powers of 2 up to `samples`."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    max_completion_length: int | None = None
    limit: int | None = None
    """Prompts, the first of the set; None: all."""
    every: int | None = None
    """Optimizer steps between two evaluations while training; None: at its beginning and end alone."""
    source_column: str = "data_source"
    """Column that names where a prompt is from; with it, figures are also given for each source."""
    seed: int = 0
    plays: bool = False
    """Whether the recipe's environments have a reward of their own, which counts as one more."""

    @property
    def reward_names(self) -> list[str]:
        """Of all that is said of a completion."""
        return [*(spec.name for spec in self.rewards), *([ENVIRONMENT] if self.plays else [])]

    @property
    def ks(self) -> tuple[int, ...]:
        """Of pass@k and maj@k."""
        return self.k or tuple(2**i for i in range(self.samples.bit_length()) if 2**i <= self.samples)


_OWN = tuple(f.name for f in dataclasses.fields(EvalSet) if f.name not in ("data", "rewards", "plays"))
KEYS = (*_OWN, "reward_funcs", *DATA_KEYS)


def parse(
    entries: Any, recipe_rewards: Sequence[RewardSpec], folder: Path | None = None, *, plays: bool = False
) -> tuple[list[EvalSet], list[str]]:
    """Sets of the valid entries, and every problem with value, reason and cure; `folder` is the recipe's."""
    if entries is None:
        return [], []
    if not isinstance(entries, list):
        return [], [f"eval_sets={entries!r}: not a list. Write eval_sets: [{{name: test, samples: 4}}]."]
    sets, problems = [], []
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            problems.append(f"eval_sets[{i}]={entry!r}: not a mapping. Write {{name: test, samples: 4}}.")
            continue
        chosen, found = _parse_entry(entry, recipe_rewards, folder, plays)
        problems += [f"eval_sets[{i}]: {problem}" for problem in found]
        sets += [chosen] if chosen is not None and not found else []
    names = [chosen.name for chosen in sets]
    problems += [
        f"eval_sets: {names.count(name)} sets have the name {name!r}. Give each its own."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    return sets, problems


def _parse_entry(
    entry: Mapping[str, Any], recipe_rewards: Sequence[RewardSpec], folder: Path | None, plays: bool
) -> tuple[EvalSet | None, list[str]]:
    problems = [f"{key}: no such key. {did_you_mean(str(key), KEYS)}" for key in entry if key not in KEYS]
    rewards, found = list(recipe_rewards), list[str]()
    if entry.get("reward_funcs") is not None:
        rewards, found = parse_rewards(entry["reward_funcs"], folder=folder)
    problems += map(str, found)
    values = {"name": "", "plays": plays, **{key: entry[key] for key in _OWN if entry.get(key) is not None}}
    k = values.pop("k", ())
    sound, told = sound_values(EvalSet, EvalSet(**values), {"data": object, "rewards": object, "k": object})
    problems += map(str, told)
    ks = tuple(k) if isinstance(k, list | tuple) else (k,)
    chosen = EvalSet(**{**sound, "k": ks, "rewards": rewards, "data": {n: entry[n] for n in DATA_KEYS if n in entry}})
    problems += [] if told else list(problems_of(chosen))
    return chosen, problems


def problems_of(s: EvalSet) -> Iterator[str]:
    """What is wrong with a set's values."""
    if not s.name or not s.name.replace("_", "").replace("-", "").isalnum():
        yield f"name={s.name!r}: figures and files go by it. Give letters, digits, - or _."
    for name, least in (("samples", 1), ("limit", 1), ("every", 1), ("max_completion_length", 1), ("top_k", 0)):
        value = getattr(s, name)
        if value is not None and value < least:
            yield f"{name}={value}: below {least}. Give a whole number from {least} on."
    if s.temperature < 0:
        yield f"temperature={s.temperature:g}: below 0. Give 0 (greedy) or more."
    elif s.temperature == 0 and s.samples > 1:
        yield f"samples={s.samples} at temperature 0: all would be equal. Set samples: 1, or a temperature."
    if not 0 < s.top_p <= 1:
        yield f"top_p={s.top_p:g}: not above 0 and up to 1. Give 1 for all tokens."
    for k in s.k:
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= s.samples:
            yield f"k={k!r} of {s.samples} samples: give whole numbers from 1 to samples, or raise samples."
    if s.judge is not None and s.judge not in s.reward_names:
        yield f"judge={s.judge!r}: no reward has this name. {did_you_mean(s.judge, s.reward_names)}"
    if models := [spec.name for spec in s.rewards if spec.is_model]:
        yield f"reward_funcs: {', '.join(models)} is loaded by TRL alone. Use reward_model in its place."
    if s.dataset_name is not None:
        yield from data_problems(DataConfig(**s.data), s.dataset_name, dataset_config=s.dataset_config)
