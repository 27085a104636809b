"""`grpo-ext score`: a recipe's rewards and advantages on saved completions, without a model."""

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from grpo_ext.commands.console import print_sections, take_option
from grpo_ext.config.launch import planned_processes
from grpo_ext.errors import ConfigError, RewardError
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.objective.objective import Objective
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.rewards.columns import CALLBACKS, PLURALS, check_clash
from grpo_ext.rewards.runtime import Component, Runtime
from grpo_ext.rewards.schedule import weight_at

_RESERVED = (*CALLBACKS, "trainer_state")
_START = (0, 1)  # the step of how many at which the weights are taken


@dataclass
class Scored:
    """Rows of a file with what each reward gave them, the weighted total and the advantage."""

    rows: list[dict[str, Any]]
    rewards: dict[str, list[float | None]]
    metrics: dict[str, float]
    total: list[float]
    advantages: list[float]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a jsonl file, each with a `prompt`, a `completion` and the columns that rewards ask for.

    Raises:
        ConfigError: no such file, or a line that is no such row; file, line and column are named.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}). Name a jsonl file in UTF-8."]) from None
    rows, problems = [], []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold what else splitlines takes for an end
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}, line {number}: not valid JSON ({error}). Write one JSON object per line.")
            continue
        problems += [f"{path}, line {number}, {problem}" for problem in _row_problems(rows[-1])]
    if not rows and not problems:
        problems.append(f"{path}: no rows. Give one JSON object per line.")
    if problems:
        raise ConfigError(problems[:5])
    return rows


def _row_problems(row: Any) -> Iterator[str]:
    """What is wrong with a row: column, reason, cure."""
    for name in PLURALS.values():
        value = row.get(name) if isinstance(row, dict) else None
        if value is None:
            yield f"column {name}: missing. Every row needs it."
        elif not (isinstance(value, str) or _is_chat(value)):
            yield f"column {name}: {json.dumps(value)[:80]} is no text. Give a string or a list of messages."
    for name in _RESERVED:
        if isinstance(row, dict) and name in row:
            yield f"column {name}: the trainer hands a {name} of its own to rewards. Rename the column."


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str | list | None) for m in value
    )


def score(recipe: Recipe, rows: Sequence[dict[str, Any]], runtime: Runtime) -> Scored:
    """Score all rows as one batch; rows of the same prompt are a group.

    Raises:
        ConfigError: a reward that only TRL can load, or a column with the name of a reward's option.
    """
    columns, metrics = _columns(rows), dict[str, float]()
    state = SimpleNamespace(global_step=0, max_steps=recipe.training.max_steps)
    given = {
        "log_extra": lambda *_: None,  # what TRL logs beside the completions, and no other reward sees
        "log_metric": metrics.__setitem__,
        "trainer_state": state,
    }
    rewards = {function.__name__: _values(function, columns, given) for function in map(_offline, runtime.functions)}
    weights = torch.tensor([function.weight(*_START) for function in runtime.functions], dtype=torch.float64)
    values = torch.tensor([[math.nan if v is None else v for v in column] for column in rewards.values()]).double().T
    total, advantages = grouped(
        recipe.training.objective, values, weights, [json.dumps(row["prompt"]) for row in rows]
    )
    return Scored(list(rows), rewards, metrics, total.tolist(), advantages.tolist())


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = {name for row in rows for name in row}
    columns = {plural: [row[name] for row in rows] for plural, name in PLURALS.items()}
    return columns | {name: [row.get(name) for row in rows] for name in names - set(PLURALS.values()) - set(columns)}


def _offline(function: Any) -> Component:
    if isinstance(function, str):
        raise ConfigError([f"reward_funcs: {function!r} is loaded by TRL. Use reward_model to score it offline."])
    return function


def _values(function: Component, columns: dict[str, list[Any]], given: dict[str, Any]) -> list[float | None]:
    try:
        check_clash(function.spec, columns)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    values = function(**columns, **given)
    return asyncio.run(values) if inspect.iscoroutine(values) else values


def grouped(objective: Objective, values: Tensor, weights: Tensor, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Weighted total and advantage of each row; groups of unequal size are filled up with unscorable completions."""
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


def summary(scored: Scored) -> list[tuple[str, ...]]:
    """Rows of a table: for each reward and the total, mean, std, least, greatest, None, errors, seconds."""
    table: list[tuple[str, ...]] = []
    columns: dict[str, Sequence[float | None]] = {**scored.rewards, "total": scored.total}
    for name, column in columns.items():
        known = [v for v in column if v is not None and not math.isnan(v)]
        mean = sum(known) / len(known) if known else math.nan
        std = math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1)) if len(known) > 1 else 0.0
        figures = (mean, std, min(known, default=math.nan), max(known, default=math.nan))
        errors, seconds = (scored.metrics.get(f"rewards/{name}/{key}") for key in ("errors", "seconds"))
        table.append(
            (
                name,
                *(f"{figure:.3f}" for figure in figures),
                str(len(column) - len(known)),
                "" if errors is None else f"{errors:.0f}",
                "" if seconds is None else f"{seconds:.3f}",
            )
        )
    return table


def explain(scored: Scored, index: int, recipe: Recipe) -> list[tuple[str, str]]:
    """One row piece by piece: prompt, completion, each reward with its weight, total, advantage."""
    row = scored.rows[index]
    text = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in row.items()]
    pieces = [
        (
            spec.name,
            f"{scored.rewards[spec.name][index]} x {weight_at(spec.weight, spec.weight_schedule, *_START):g}   "
            f"({spec.function} {dict(spec.kwargs) or ''})",
        )
        for spec in recipe.rewards
    ]
    total, advantage = scored.total[index], scored.advantages[index]
    return [*text, *pieces, ("total", f"{total:.4f}"), ("advantage", f"{advantage:.4f}")]


def run(argv: list[str]) -> int:
    """Print what the recipe's rewards and estimator make of a file; 2 when the recipe or the file has problems."""
    file, row = take_option(argv, "--file"), take_option(argv, "--explain")
    try:
        if file is None:
            raise ConfigError(["--file: missing. Name a jsonl file of prompts and completions."])
        with planned_processes(launch_of(argv).planned):  # the machine that scores need not be the one that trains
            recipe, rows = load_recipe(argv), read_rows(file)
        if row is not None and not (row.isdigit() and int(row) < len(rows)):
            raise ConfigError([f"--explain {row}: the rows are numbered 0 to {len(rows) - 1}."])
        runtime = Runtime(recipe.rewards, workers=recipe.script.reward_workers)
        try:
            scored = score(recipe, rows, runtime)
        finally:
            runtime.close()
    except (ConfigError, RewardError) as error:
        print(error, file=sys.stderr)
        return 2
    _print_scores(scored, recipe, None if row is None else int(row))
    return 0


def _print_scores(scored: Any, recipe: Any, row: int | None) -> None:
    if row is not None:
        print_sections({f"Row {row}": explain(scored, row, recipe)})
        return
    console = Console()
    table = Table("reward", "mean", "std", "min", "max", "None", "errors", "seconds", title=f"{len(scored.rows)} rows")
    for line in summary(scored):
        table.add_row(*line)
    console.print(table)
    names = list(scored.rewards)
    table = Table("row", *names, "total", "advantage", title="Rows")
    for i in range(len(scored.rows)):
        values = [scored.rewards[name][i] for name in names]
        cells = ["None" if value is None else f"{value:.3f}" for value in values]
        table.add_row(str(i), *cells, f"{scored.total[i]:.3f}", f"{scored.advantages[i]:+.3f}")
    console.print(table)
