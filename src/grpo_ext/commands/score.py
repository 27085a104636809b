"""`grpo-ext score`: a recipe's rewards and advantages on saved completions, without a model."""

import argparse
import math
import sys
from contextlib import closing, suppress

from grpo_ext.commands.check import print_sections
from grpo_ext.config.launch import planned_processes
from grpo_ext.config.mappings import as_mapping
from grpo_ext.data.chat_template import template_opens
from grpo_ext.data.completions import check_output, read_completions, write_completions
from grpo_ext.environments.composition import any_pays
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.quickstart.model import LESSONS
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.loading import load_tokenizer
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.scoring import ScoredRows, explain, score_rows, summary
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.tables import Table, show

_SHOWN = 30
"""Largest number of rows that are printed in full; of more, only the best and the worst."""


def run(options: argparse.Namespace) -> int:
    """Print, and write, rewards and advantages of the rows of a file."""
    if options.file is None:
        cure = "Name a jsonl or parquet file of completions, or a run's folder."
        raise ConfigError([Problem("--file", ABSENT, "missing", cure)])
    if options.output is not None:
        check_output(options.output)
    with planned_processes(launch_of(options.keys).planned):  # scoring needs no training machine
        recipe = load_recipe(options.keys, rewards_only=True)
    if not recipe.rewards:
        reason = "the recipe has none: its environments pay for what is played, and saved completions are not played"
        raise ConfigError([Problem("reward_funcs", None, reason, "Name rewards, such as --reward_funcs accuracy.")])
    if any_pays(recipe.environments):
        print("What environments have paid is not part of these totals and advantages.", file=sys.stderr)
    rows = read_completions(options.file, recipe.data)
    if options.explain is not None and not 0 <= options.explain < len(rows):
        raise ConfigError([Problem("--explain", options.explain, "no such row", f"Give 0 to {len(rows) - 1}.")])
    for problem in absences(recipe.rewards, {name for row in rows for name in row}, source=options.file):
        print(problem, file=sys.stderr)
    runtime = Runtime(recipe.rewards, workers=recipe.script.reward_workers, seed=recipe.training.seed)
    if recipe.model.model_name_or_path not in (None, *LESSONS):
        with suppress(Exception):  # no tokenizer at hand
            runtime.opened = template_opens(load_tokenizer(recipe), as_mapping(recipe.training.chat_template_kwargs))
    with closing(runtime):
        scored = score_rows(recipe, rows, runtime)
    if options.output is not None:
        write_completions(options.output, list(scored.written()))
    if options.explain is None:
        _print_scores(scored)
    else:
        print_sections({f"Row {options.explain}": explain(scored, options.explain, recipe)})
    if options.output is not None:
        print(f"{len(rows)} rows written to {options.output}.")
    return 0


def _print_scores(scored: ScoredRows) -> None:
    table = Table("reward", "mean", "std", "min", "max", "None", "errors", "seconds", title=f"{len(scored.rows)} rows")
    for line in summary(scored):
        table.add_row(*line)
    show(table)
    numbers, title = shown_rows(scored.total)
    names = list(scored.rewards)
    table = Table("row", *names, "total", "advantage", title=title)
    for i in numbers:
        values = [scored.rewards[name][i] for name in names]
        cells = ["None" if value is None else f"{value:.3f}" for value in values]
        table.add_row(str(i), *cells, f"{scored.total[i]:.3f}", f"{scored.advantages[i]:+.3f}")
    show(table)


def shown_rows(total: list[float]) -> tuple[list[int], str]:
    """Return the numbers of the rows to print, and a title."""
    if len(total) <= _SHOWN:
        return list(range(len(total))), "Rows"
    ranked = sorted((i for i, value in enumerate(total) if not math.isnan(value)), key=lambda i: -total[i])
    best, worst = ranked[:5], ranked[5:][-5:]
    return [*best, *worst], f"The {len(best)} best and {len(worst)} worst; --output writes all, --explain N shows one"
