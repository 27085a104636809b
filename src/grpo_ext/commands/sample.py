"""`grpo-ext sample`: completions of a recipe's prompts with its rewards, and the pass rate of each prompt."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo_ext.commands.arguments import CONSENT
from grpo_ext.commands.runs import find_trained, loading
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.images import described
from grpo_ext.config.launch import planned_processes
from grpo_ext.data.completions import check_output, check_row, row_with_rewards, write_completions
from grpo_ext.data.images import image_columns, images_as_stored
from grpo_ext.data.rows import WRITTEN, Row
from grpo_ext.environments.composition import any_pays
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.objective.trajectory import Trajectory, of_agents
from grpo_ext.recipe.launching import launch_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.protocol import ENVIRONMENT, deciding_reward
from grpo_ext.rollout.seeds import Source, numbered
from grpo_ext.train import build_trainer
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer

SAMPLING_ONLY: dict[str, Any] = {
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
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "save_strategy": "no",
    "save_steps": GRPOExtArguments.save_steps,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "push_to_hub": False,
    "report_to": "none",
    "log_completions": False,
    "log_completions_hub_repo": None,
    "num_completions_to_print": GRPOExtArguments.num_completions_to_print,
    "log_unique_prompts": False,
}
"""Settings of a trainer that only samples: no optimizer step, no reference model."""


def sampler(recipe: Recipe, num: int, output_dir: str, rows: int | None = None) -> GRPOExtTrainer:
    """Return the recipe's trainer, which samples and scores `num` completions per prompt as in training.

    An evaluation batch has at least `rows` completions, by default one prompt's.
    """
    c = recipe.training
    changes: dict[str, Any] = {
        "num_generations_eval": num,
        "per_device_eval_batch_size": num * -(-(rows or num) // num),
        "per_device_train_batch_size": c.generation_batch_size if c.use_vllm else c.num_generations,
    }
    changed = dataclasses.replace(c, output_dir=output_dir, **SAMPLING_ONLY, **changes)
    with loading(str(recipe.model.model_name_or_path), only_code=True):
        trainer = build_trainer(dataclasses.replace(recipe, training=changed))
    trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)  # in the recipe's precision, by no engine
    trainer.model.eval()
    trainer.state.max_steps = 1  # scheduled reward weights have their first value
    return trainer


def sample(trainer: GRPOExtTrainer, num: int, prompts: int) -> Iterator[list[Row]]:
    """Yield the completions of each training row, with their rewards; `prompts` rows are sampled at a time."""
    names, weights = trainer.reward_func_names, trainer.reward_weights.double()
    missing = trainer.objective.missing_rewards
    data: Any = trainer.train_dataset
    rows, first = iter(data), 0
    while batch := list(islice(rows, prompts)):
        numbers = range(first * num, (first + len(batch)) * num)
        attempts, first = numbered(trainer.args.seed, Source.EVALUATION, numbers, num), first + len(batch)
        examples = [dict(row) for row in batch for _ in range(num)]
        collected = trainer.collector.collect(examples, attempts)
        assert collected.generated is not None
        assert collected.rewards is not None
        completions, rewards = map(described, collected.generated.completions), collected.rewards.double()
        totals = weighted_total(rewards[None], weights.cpu(), missing=missing)[0].tolist()
        scored = [
            row_with_rewards({**as_json_row(example), "completion": text}, dict(zip(names, each, strict=True)), total)
            for example, text, each, total in zip(collected.rows, completions, rewards.tolist(), totals, strict=True)
        ]
        for start in range(0, len(scored), num):
            yield scored[start : start + num]


def as_json_row(example: Mapping[str, Any]) -> Row:
    """Return a row in JSON's types: its trajectory becomes the rewards of its turns, its failure and its branches."""
    episode = example.get(TRAJECTORY)
    if not isinstance(episode, Trajectory):
        return dict(example)
    row = {name: value for name, value in example.items() if name != TRAJECTORY}
    row |= {"turn_rewards": [turn.reward for turn in episode.turns], "failure": episode.failure}
    return row | {name: text for name, [text] in of_agents([episode]).items() if text}


def pass_rate(completions: Sequence[Row], by: str) -> float | None:
    """Return the mean of a reward over the completions of a prompt that it could score."""
    values = [row[f"rewards/{by}"] for row in completions]
    scores = [value for value in values if value == value]
    return sum(scores) / len(scores) if scores else None


def prompt_row(row: Row, answer_format: str | None, rate: float | None) -> Row:
    """Return a row of the data with its pass rate, in the format that the recipe reads."""
    row = dict(row)
    if answer_format is not None and row.get("solution") is not None:
        row["solution"] = WRITTEN[answer_format].format(row["solution"])
    return {**row, "pass_rate": rate}


def with_model(keys: Sequence[str], run: str | None) -> list[str]:
    """Return a command line that gives a recipe another model, whose code the recipe's word does not cover."""
    if run is None:
        return list(keys)
    typed = any(key.partition("=")[0] == CONSENT.names[0] for key in keys)
    trust = [] if typed else [CONSENT.names[0], "false"]
    return [*keys, *trust, "--model_name_or_path", find_trained(run).model, "--use_peft", "false"]


def run(options: argparse.Namespace) -> int:
    """Write the completions, and the prompts with their pass rates."""
    keys = with_model(options.keys, options.model)
    output = check_output(options.output)
    if options.num < 1:
        raise ConfigError([Problem("--num", options.num, "not a number of completions", "Give 1 or more.")])
    processes = launch_of(keys).planned or 1  # processes of the training; one process samples
    with planned_processes(processes, here=True) if processes > 1 else nullcontext():  # a plan leaves precision open
        recipe = load_recipe(keys)
    by = _pass_reward(options.pass_by, recipe)
    prompts = output.with_name(f"{output.stem}_prompts{output.suffix}")
    for file in (output, prompts):
        if Path(str(recipe.script.dataset_name)).expanduser().resolve() == file.resolve():
            reason = f"it would replace {file.name}, the recipe's dataset_name"
            raise ConfigError([Problem("--output", options.output, reason, "Name another file.")])
    batch = max(1, (recipe.training.generation_batch_size or 1) // processes // options.num)
    completions: list[Row] = []
    prompt_rows: list[Row] = []
    trainer = sampler(recipe, options.num, str(output.parent))
    data: Any = trainer.train_dataset
    try:
        for row, images in zip(islice(data, 1), images_as_stored(data), strict=False):
            check_row(output, row | images)
        for images in images_as_stored(data) if image_columns(data) else ():
            check_row(output, images)
        total = len(data) if hasattr(data, "__len__") else None
        groups = tqdm(sample(trainer, options.num, batch), total=total, unit="prompt", disable=None)
        for row, images, group in zip(data, images_as_stored(data), groups, strict=True):
            completions += [each | images for each in group]
            prompt_rows.append(prompt_row({**row, **images}, recipe.data.answer_format, pass_rate(group, by)))
    finally:
        trainer.close_rewards()
    write_completions(output, completions)
    write_completions(prompts, prompt_rows)
    print(f"{output}: {len(prompt_rows)} prompts x {options.num} completions with their rewards.")
    _print_pass_rates(prompts, [row["pass_rate"] for row in prompt_rows if row["pass_rate"] is not None], by)
    return 0


def _pass_reward(pass_by: str | None, recipe: Recipe) -> str:
    """Return the name of the reward that decides whether a completion passes."""
    names = [*(spec.name for spec in recipe.rewards), *([ENVIRONMENT] if any_pays(recipe.environments) else [])]
    by = pass_by or deciding_reward(names or ["accuracy"])
    if by not in names:
        raise ConfigError([Problem("--pass_by", by, "no reward has this name", did_you_mean(by, names))])
    return by


def _print_pass_rates(prompts: Path, rates: list[float], by: str) -> None:
    mean = f"{sum(rates) / len(rates):.3f}" if rates else "not known"
    never, always = sum(rate <= 0 for rate in rates), sum(rate >= 1 for rate in rates)
    print(f"{prompts}: the prompts with pass_rate, the mean of {by}: {mean}; never right {never}, always {always}.")
    print(f"To train on those in between: dataset_name: {prompts}, min_pass_rate: 0.1, max_pass_rate: 0.9")
