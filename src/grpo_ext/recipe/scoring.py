"""Score rows of completions with a recipe's rewards, without a model: rewards, totals and advantages."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from grpo_ext.config.weight_schedule import weight_at
from grpo_ext.data.completions import row_with_rewards
from grpo_ext.data.rows import Row
from grpo_ext.errors import ConfigError, Problem, RewardError
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.objective.objective import Objective
from grpo_ext.recipe.parts import Recipe
from grpo_ext.rewards.columns import PLURALS
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.runtime import Component, Runtime

BATCH = 1024  # rows of one call of a reward, whose timeout suits a batch of training
_START = (0, 1)  # the weights are those of step 0 of 1


@dataclass
class ScoredRows:
    """Scores of the rows of a file.

    Args:
        rows: as they were read.
        rewards: values of each reward.
        total: the weighted totals.
        advantages: one for each row.
        metrics: logged by rewards.
        extras: columns that rewards logged.
    """

    rows: list[Row]
    rewards: dict[str, list[float | None]]
    total: list[float]
    advantages: list[float]
    metrics: Mapping[str, list[float]] = field(default_factory=dict)
    extras: Mapping[str, list[object]] = field(default_factory=dict)

    def written(self) -> Iterator[Row]:
        """Yield the rows as `data.completions` writes them."""
        for i, row in enumerate(self.rows):
            extras = {name: values[i] for name, values in self.extras.items()}
            rewards = {name: values[i] for name, values in self.rewards.items()}
            yield row_with_rewards({**row, **extras}, rewards, self.total[i], self.advantages[i])


def score_rows(recipe: Recipe, rows: Sequence[Row], runtime: Runtime) -> ScoredRows:
    """Score all rows; those of one prompt (and of one step, if the rows have steps) are a group.

    Raises:
        ConfigError: a reward that only TRL can load, or a column with the name of a reward's option.
        RewardError: a reward failed, and its failure ends the run.
    """
    if by_trl := next((function for function in runtime.functions if isinstance(function, str)), None):
        cure = "Use reward_model to score it offline."
        raise ConfigError([Problem("reward_funcs", by_trl, "TRL loads it, for training only", cure)])
    functions: list[Component] = runtime.functions
    rewards: dict[str, list[float | None]] = {function.spec.name: [] for function in functions}
    metrics, extras = defaultdict[str, list[float]](list), dict[str, list[object]]()
    names = {name for row in rows for name in row} - set(PLURALS.values())
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        columns: dict[str, object] = {plural: [row[name] for row in batch] for plural, name in PLURALS.items()}
        columns |= {name: [row.get(name) for row in batch] for name in names - set(columns)}
        columns |= {"trainer_state": SimpleNamespace(global_step=0, max_steps=recipe.training.max_steps)}
        for function in functions:
            scores = function.scores(columns)
            if scores.error:
                raise RewardError(scores.error)
            rewards[function.spec.name] += scores.values
            for name, value in scores.metrics:
                metrics[name].append(value)
            for name, logged in scores.extras:
                if name not in names:  # the row's own columns have priority
                    extras.setdefault(name, [None] * len(rows))[start : start + len(logged)] = logged
    weights = torch.tensor([function.weight(*_START) for function in functions], dtype=torch.float64)
    values = torch.tensor([[math.nan if v is None else v for v in column] for column in rewards.values()]).double().T
    keys = [json.dumps([row.get("step"), row["prompt"]]) for row in rows]
    total, advantages = grouped(recipe.training.objective, values, weights, keys)
    return ScoredRows(list(rows), rewards, total.tolist(), advantages.tolist(), metrics, extras)


def grouped(objective: Objective, values: Tensor, weights: Tensor, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the total and advantage of each row; groups of unequal size are padded with unscored completions."""
    groups: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    size = max(map(len, groups.values()))
    table = torch.full((len(groups), size, values.shape[1]), math.nan, dtype=torch.float64)
    for g, members in enumerate(groups.values()):
        table[g, : len(members)] = values[members]
    estimated = objective.advantages(table, weights)
    advantages = torch.zeros(len(keys), dtype=torch.float64)
    for g, members in enumerate(groups.values()):
        advantages[members] = estimated[g, : len(members)]
    total = weighted_total(values[None], weights, missing=objective.missing_rewards)[0]
    return total, advantages


def summary(scored: ScoredRows) -> list[tuple[str, ...]]:
    """Return rows of a table: for each reward and the total, mean, std, min, max, None, errors, seconds."""
    table: list[tuple[str, ...]] = []
    columns: dict[str, Sequence[float | None]] = {**scored.rewards, "total": scored.total}
    for name, column in columns.items():
        scores = [v for v in column if v is not None and not math.isnan(v)]
        mean = sum(scores) / len(scores) if scores else math.nan
        std = math.sqrt(sum((v - mean) ** 2 for v in scores) / (len(scores) - 1)) if len(scores) > 1 else 0.0
        figures = (mean, std, min(scores, default=math.nan), max(scores, default=math.nan))
        errors, seconds = (scored.metrics.get(f"rewards/{name}/{key}") for key in ("errors", "seconds"))
        table.append(
            (
                name,
                *(f"{figure:.3f}" for figure in figures),
                str(len(column) - len(scores)),
                "" if errors is None else f"{sum(errors):.0f}",
                "" if seconds is None else f"{sum(seconds):.3f}",
            )
        )
    return table


def explain(scored: ScoredRows, index: int, recipe: Recipe) -> list[tuple[str, str]]:
    """Return the parts of one row's score: its columns, each reward with its weight, total and advantage."""
    row = {**scored.rows[index], **{name: values[index] for name, values in scored.extras.items()}}
    again = {"reward", "advantage", *(f"rewards/{name}" for name in scored.rewards)}  # as they were in the file
    columns = [(name, value) for name, value in row.items() if name not in again]
    text = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in columns]
    pieces = [(spec.name, _piece(scored.rewards[spec.name][index], spec)) for spec in recipe.rewards]
    total, advantage = scored.total[index], scored.advantages[index]
    return [*text, *pieces, ("total", f"{total:.4f}"), ("advantage", f"{advantage:.4f}")]


def _piece(value: float | None, spec: RewardSpec) -> str:
    """Return a reward's value, its weight, and the function and options unless the name implies them."""
    weighted = f"{value} x {weight_at(spec.weight, spec.weight_schedule, *_START):g}"
    more = [str(spec.function)] if spec.function != spec.name else []
    more += [f"{option}={setting!r}" for option, setting in spec.kwargs.items()]
    return f"{weighted}   ({', '.join(more)})" if more else weighted
