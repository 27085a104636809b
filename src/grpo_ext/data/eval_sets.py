"""`eval_sets` of a recipe: the data to evaluate on, how to sample, and how often."""

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from grpo_ext.config.spec import Spec
from grpo_ext.data.config import DataConfig, dataset_problems
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.objective.options import Count, Within
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.composition import RewardSpec, parse_rewards
from grpo_ext.rewards.protocol import ENVIRONMENT, RIGHT, deciding_reward

DATA_KEYS = tuple(f.name for f in dataclasses.fields(DataConfig))
"""Keys of the data that a set may override; the recipe has the others."""


@dataclass(frozen=True)
class EvalSet:
    """One entry of `eval_sets`.

    Args:
        name: appears in the names of figures and files.
        dataset_name: as in a recipe; None: the recipe's own.
        dataset_config: configuration of that dataset.
        split: of the dataset; None: the recipe's `dataset_test_split`.
        data: the recipe's data keys that this set overrides.
        rewards: by default those of the recipe.
        judge: reward that decides what is right, by a value of at least `threshold`; several, such as a strict and a
            lenient one, judge beside each other; None: `accuracy`, else the first.
        threshold: a judge's value from which a completion is right.
        samples: completions per prompt.
        k: of pass@k and maj@k; empty: the powers of 2 up to `samples`.
        temperature: 0 decodes greedily.
        top_p: as in a recipe.
        top_k: as in a recipe; 0: off.
        min_p: as in a recipe.
        max_completion_length: None: the recipe's.
        limit: evaluates only the first prompts; None: all.
        every: optimizer steps between two evaluations while training; None: only before and after training.
        source_column: column with the source of a prompt; figures are also given for each source.
        seed: of the samples.
        plays: whether the recipe's environments have a reward of their own, which counts as one more.
    """

    name: str
    dataset_name: str | None = None
    dataset_config: str | None = None
    split: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    rewards: Sequence[RewardSpec] = ()
    judge: tuple[str, ...] = ()
    threshold: float = RIGHT
    samples: Count = 1
    k: tuple[int, ...] = ()
    temperature: Annotated[float, Within(least=0.0)] = 1.0
    top_p: Annotated[float, Within(above=0.0, most=1.0)] = 1.0
    top_k: Annotated[int, Within(least=0.0)] = 0
    min_p: Annotated[float, Within(least=0.0, most=1.0)] | None = None
    max_completion_length: Count | None = None
    limit: Count | None = None
    every: Count | None = None
    source_column: str = "data_source"
    seed: int = 0
    plays: bool = False

    @property
    def reward_names(self) -> list[str]:
        """Names of all rewards of a completion."""
        return [*(spec.name for spec in self.rewards), *([ENVIRONMENT] if self.plays else [])]

    @property
    def ks(self) -> tuple[int, ...]:
        """`k`, or its default."""
        return self.k or tuple(2**i for i in range(self.samples.bit_length()) if 2**i <= self.samples)

    @property
    def judges(self) -> tuple[str, ...]:
        """`judge`, or its default."""
        return self.judge or (deciding_reward(self.reward_names),)


_OWN = Spec.of(EvalSet, "data", "rewards", "plays", "k", "judge")
_SPEC = Spec.of(
    EvalSet,
    "data",
    "rewards",
    "plays",
    example="{name: test, samples: 4}",
    **typing.get_type_hints(DataConfig),
    k=int | list[int] | tuple[int, ...],
    judge=str | list[str] | tuple[str, ...],
    reward_funcs=object,
)


def parse_eval_sets(
    entries: object, recipe_rewards: Sequence[RewardSpec], folder: Path | None = None, *, plays: bool = False
) -> tuple[list[EvalSet], list[Problem]]:
    """Return the sets of the entries that have no problem, and all problems; `folder` is the recipe's."""
    if entries is None:
        return [], []
    if not isinstance(entries, list):
        return [], [*_SPEC.list_problems("eval_sets", entries)]
    sets, problems = [], list[Problem]()
    for i, entry in enumerate(entries):
        place = f"eval_sets[{i}]"
        if entry_problems := [*_SPEC.problems(place, entry)]:
            problems += entry_problems
            continue
        rewards = list(recipe_rewards)
        if entry.get("reward_funcs") is not None:
            rewards, entry_problems = parse_rewards(entry["reward_funcs"], folder=folder)
        values = {key: entry[key] for key in _OWN.hints if entry.get(key) is not None}
        data = {key: entry[key] for key in DATA_KEYS if key in entry}
        k, judges = _several(entry.get("k")), _several(entry.get("judge"))
        chosen = EvalSet(**values, k=k, judge=judges, data=data, rewards=rewards, plays=plays)
        entry_problems += problems_of(chosen)
        problems += [replace(problem, field=f"{place}.{problem.field}") for problem in entry_problems]
        sets += [] if entry_problems else [chosen]
    names = [chosen.name for chosen in sets]
    problems += [
        Problem("eval_sets", ABSENT, f"{names.count(name)} sets have the name {name!r}", "Give each its own.")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    return sets, problems


def _several(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def problems_of(chosen: EvalSet) -> Iterator[Problem]:
    """Yield what is wrong with a set's values."""
    yield from (p for name in _OWN.hints for p in _OWN.value_problems(name, name, getattr(chosen, name)))
    name, samples, names = chosen.name, chosen.samples, chosen.reward_names
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        yield Problem("name", name, "figures and files are named by it", "Use letters, digits, - or _.")
    if chosen.temperature == 0 and samples > 1:
        cure = "Set samples: 1, or a temperature."
        yield Problem("samples", samples, "greedy samples are all equal", cure, {"temperature": 0})
    for k in chosen.k:
        if not 1 <= k <= samples:
            cure = "Give whole numbers from 1 to samples, or raise samples."
            yield Problem("k", k, "out of range", cure, {"samples": samples})
    for judge in chosen.judge:
        if judge not in names:
            yield Problem("judge", judge, "no reward has this name", did_you_mean(judge, names))
    if models := [spec.name for spec in chosen.rewards if spec.is_model]:
        reason = f"TRL loads {', '.join(models)} itself, for training only"
        yield Problem("reward_funcs", ABSENT, reason, "Use reward_model in its place.")
    if chosen.dataset_name is not None:
        if (size := chosen.data.get("test_size")) is not None:
            cure = "Unset test_size; `limit` takes the first prompts, a task's dataset_kwargs have its size."
            yield Problem("test_size", size, "a set has all rows of its own data", cure)
        config = DataConfig(**chosen.data)  # of the types that `parse` has checked
        yield from dataset_problems(config, chosen.dataset_name, dataset_config=chosen.dataset_config)


# Which evaluation decides.

_METRICS = ("loss", "reward", "reward_std", "kl", "entropy", "frac_reward_zero_std", "completions/mean_length")


def best_metric_problems(metric: str | None, rewards: Sequence[str], sets: Sequence[str] = ()) -> Iterator[Problem]:
    """Yield what is wrong with `metric_for_best_model`.

    Figures of several `sets` begin with their name. Without sets, only a name close to a known one is a mistake.
    """
    wanted = str(metric or "").removeprefix("eval_")
    of_set = next((f"{name}_" for name in sets if wanted.startswith(f"{name}_")), f"{sets[0]}_" if sets else "")
    figure = wanted.removeprefix(of_set)
    figures = {name: name for name in _METRICS} | {f"rewards/{name}/mean": f"rewards/{name}/mean" for name in rewards}
    right = figure in figures or re.fullmatch(r"(rewards|completions)/.*", figure)
    if not wanted or (right and wanted.startswith(of_set)):
        return
    figures |= {name: f"rewards/{name}/mean" for name in rewards}
    close = get_close_matches(figure, figures, n=1, cutoff=0.8)
    if close or sets:
        cure = f"Set metric_for_best_model: eval_{of_set}{figures[close[0]] if close else 'reward'}."
        yield Problem("metric_for_best_model", metric, "no evaluation has this metric", cure)
