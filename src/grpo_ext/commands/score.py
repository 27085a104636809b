"""`grpo-ext score`: a recipe's rewards and advantages on saved completions, without a model."""

import math
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_ext.commands.console import print_sections, take_option
from grpo_ext.config.launch import planned_processes
from grpo_ext.data.completions import check_output, read_completions, write_completions
from grpo_ext.errors import ConfigError, DataError, RewardError
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.scoring import Scored, explain, score, summary
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.runtime import Runtime

SHOWN = 30
"""Rows that are shown one by one; of more, the best and the worst are."""


def run(argv: list[str]) -> int:
    """Print, and write, what the recipe's rewards and estimator make of a file; 2 when one of them has problems."""
    file, row, output = (take_option(argv, option) for option in ("--file", "--explain", "--output"))
    try:
        if file is None:
            raise ConfigError(["--file: missing. Name a jsonl or parquet file of completions, or a run's folder."])
        if output is not None:
            check_output(output)
        with planned_processes(launch_of(argv).planned):  # the machine that scores need not be the one that trains
            recipe = load_recipe(argv, rewards_only=True)
        rows = read_completions(file, recipe.data)
        if row is not None and not (row.isdigit() and int(row) < len(rows)):
            raise ConfigError([f"--explain {row}: the rows are numbered 0 to {len(rows) - 1}."])
        for sentence in absences(recipe.rewards, {name for row in rows for name in row}, source=file):
            print(sentence, file=sys.stderr)
        runtime = Runtime(recipe.rewards, workers=recipe.script.reward_workers, seed=recipe.training.seed)
        try:
            scored = score(recipe, rows, runtime)
        finally:
            runtime.close()
        if output is not None:
            write_completions(output, list(scored.written()))
    except (ConfigError, DataError, RewardError) as error:
        print(error, file=sys.stderr)
        return 2
    _print_scores(scored, recipe, None if row is None else int(row))
    if output is not None:
        print(f"{len(rows)} rows written to {output}.")
    return 0


def _print_scores(scored: Scored, recipe: Any, row: int | None) -> None:
    if row is not None:
        print_sections({f"Row {row}": explain(scored, row, recipe)})
        return
    console = Console()
    table = Table("reward", "mean", "std", "min", "max", "None", "errors", "seconds", title=f"{len(scored.rows)} rows")
    for line in summary(scored):
        table.add_row(*line)
    console.print(table)
    numbers, title = shown_rows(scored.total)
    names = list(scored.rewards)
    table = Table("row", *names, "total", "advantage", title=title)
    for i in numbers:
        values = [scored.rewards[name][i] for name in names]
        cells = ["None" if value is None else f"{value:.3f}" for value in values]
        table.add_row(str(i), *cells, f"{scored.total[i]:.3f}", f"{scored.advantages[i]:+.3f}")
    console.print(table)


def shown_rows(total: list[float]) -> tuple[list[int], str]:
    """Numbers of the rows that are shown one by one, and what they are."""
    if len(total) <= SHOWN:
        return list(range(len(total))), "Rows"
    ranked = sorted((i for i, value in enumerate(total) if not math.isnan(value)), key=lambda i: -total[i])
    best, worst = ranked[:5], ranked[5:][-5:]
    return [*best, *worst], f"The {len(best)} best and {len(worst)} worst; --output writes all, --explain N shows one"
