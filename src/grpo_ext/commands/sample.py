"""`grpo-ext sample`: completions of a recipe's prompts, with its rewards, and how many of each prompt's are right."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo_ext.commands.runs import find
from grpo_ext.config.launch import planned_processes
from grpo_ext.data.completions import check_output, with_rewards, write_completions
from grpo_ext.data.rows import WRITTEN
from grpo_ext.environments.composition import any_pays
from grpo_ext.errors import ConfigError, DataError, NonFiniteError, RewardError
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.objective.trajectory import Trajectory
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.protocol import ENVIRONMENT
from grpo_ext.rollout.seeds import Source, numbered
from grpo_ext.train import build_trainer

ALONE: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "generation_batch_size": None,
    "num_iterations": 1,
    "beta": 0.0,
    "kl_estimator": None,
    "kl_placement": None,
    "sync_ref_model": False,
    "dynamic_sampling": None,
    "do_eval": False,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": "none",
    "log_completions": False,
    "num_completions_to_print": None,
}
"""Settings that sampling sets aside: it takes no step, and needs no reference."""


def sampler(recipe: Recipe, num: int, output_dir: str, rows: int | None = None) -> Any:
    """The recipe's trainer, which rolls out and scores as in training, `num` completions a prompt.

    An evaluation batch has at least `rows` completions, by default one prompt's.
    """
    c = recipe.training
    changes: dict[str, Any] = {
        "num_generations_eval": num,
        "per_device_eval_batch_size": num * -(-(rows or num) // num),
        "per_device_train_batch_size": c.generation_batch_size if c.use_vllm else c.num_generations,
    }
    changed = dataclasses.replace(c, output_dir=output_dir, **ALONE, **changes)
    trainer = build_trainer(dataclasses.replace(recipe, training=changed))
    trainer.model.eval()
    trainer.state.max_steps = 1  # of which weights that move are at the first
    return trainer


def sample(trainer: Any, num: int, prompts: int) -> Iterator[list[dict[str, Any]]]:
    """For each row of the training set its completions with their rewards, `prompts` rows at a time."""
    names, weights = trainer.reward_func_names, trainer.reward_weights.double()
    missing = trainer.objective.missing_rewards
    rows, first = iter(trainer.train_dataset), 0
    while batch := list(islice(rows, prompts)):
        numbers = range(first * num, (first + len(batch)) * num)
        attempts, first = numbered(trainer.args.seed, Source.EVALUATION, numbers, num), first + len(batch)
        examples = [dict(row) for row in batch for _ in range(num)]
        collected = trainer.collect(examples, attempts)
        examples, completions, rewards = (
            collected.rows,
            collected.generated.completions,
            collected.rewards.double().cpu(),
        )
        totals = weighted_total(rewards[None], weights.cpu(), missing=missing)[0].tolist()
        scored = [
            with_rewards({**written(example), "completion": text}, dict(zip(names, each, strict=True)), total)
            for example, text, each, total in zip(examples, completions, rewards.tolist(), totals, strict=True)
        ]
        for start in range(0, len(scored), num):
            yield scored[start : start + num]


def written(example: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a file can hold it: of a trajectory what its turns earned, and what ended it."""
    attempt = example.get(TRAJECTORY)
    if not isinstance(attempt, Trajectory):
        return dict(example)
    row = {name: value for name, value in example.items() if name != TRAJECTORY}
    return row | {"turn_rewards": [turn.reward for turn in attempt.turns], "failure": attempt.failure}


def pass_rate(completions: Sequence[dict[str, Any]], by: str) -> float | None:
    """Mean of a reward over the completions of a prompt that it could score: of one that is 0 or 1, the share of 1."""
    values = [row[f"rewards/{by}"] for row in completions]
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else None


def prompt_row(row: dict[str, Any], answer_format: str | None, rate: float | None) -> dict[str, Any]:
    """A row of the data, as the same recipe reads it again, with its pass rate."""
    row = dict(row)
    if answer_format is not None and row.get("solution") is not None:
        row["solution"] = WRITTEN[answer_format].format(row["solution"])
    return {**row, "pass_rate": rate}


def run(argv: Sequence[str]) -> int:
    """Write both files and say what is in them; 2 when something is wrong."""
    parser = argparse.ArgumentParser(prog="grpo-ext sample", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", metavar="RUN", help="a run, checkpoint, model or adapter, in place of the recipe's")
    parser.add_argument(
        "--num", type=int, default=8, metavar="N", help="completions of a prompt (default: %(default)s)"
    )
    parser.add_argument("--output", metavar="FILE", required=True, help=".jsonl or .parquet; FILE_prompts beside it")
    parser.add_argument("--pass_by", metavar="REWARD", help="the reward that says what is right (default: accuracy)")
    options, rest = parser.parse_known_args(argv)
    try:
        _sample(options, [*rest, *model_keys(options.model)])
    except (ConfigError, DataError, NonFiniteError, RewardError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def model_keys(run: str | None) -> list[str]:
    """What the command line would say to have a recipe with another model."""
    return [] if run is None else ["--model_name_or_path", find(run).model, "--use_peft", "false"]


def _sample(options: argparse.Namespace, argv: list[str]) -> None:
    output = check_output(options.output)
    if options.num < 1:
        raise ConfigError([f"--num {options.num}: no number of completions. Give 1 or more."])
    processes = launch_of(argv).planned or 1  # that train; one samples
    with planned_processes(processes, here=True):
        recipe = load_recipe(argv)
    names = [*(spec.name for spec in recipe.rewards), *([ENVIRONMENT] if any_pays(recipe.environments) else [])]
    by = _judge(options.pass_by, names)
    batch = max(1, (recipe.training.generation_batch_size or 1) // processes // options.num)
    completions: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    trainer = sampler(recipe, options.num, str(output.parent))
    data = trainer.train_dataset
    try:
        total = len(data) if hasattr(data, "__len__") else None
        groups = tqdm(sample(trainer, options.num, batch), total=total, unit="prompt", disable=None)
        for row, group in zip(data, groups, strict=True):
            completions += group
            asked.append(prompt_row(row, recipe.data.answer_format, pass_rate(group, by)))
    finally:
        trainer.close_rewards()
    prompts = output.with_name(f"{output.stem}_prompts{output.suffix}")
    write_completions(output, completions)
    write_completions(prompts, asked)
    _tell(output, prompts, [row["pass_rate"] for row in asked], options.num, by)


def _judge(given: str | None, names: list[str]) -> str:
    by = given or ("accuracy" if "accuracy" in names else next(iter(names), "accuracy"))
    if by not in names:
        raise ConfigError([f"--pass_by {by}: no reward has this name. {did_you_mean(by, names)}"])
    return by


def _tell(output: Path, prompts: Path, rates: list[float | None], num: int, by: str) -> None:
    known = [rate for rate in rates if rate is not None]
    print(f"{output}: {len(rates)} prompts x {num} completions with their rewards.")
    mean = f"{sum(known) / len(known):.3f}" if known else "not known"
    never, always = sum(rate <= 0 for rate in known), sum(rate >= 1 for rate in known)
    print(f"{prompts}: the prompts with pass_rate, the mean of {by}: {mean}; never right {never}, always {always}.")
    print(f"To train on those in between: dataset_name: {prompts}, min_pass_rate: 0.1, max_pass_rate: 0.9")
