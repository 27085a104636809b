"""What a trainer is handed, beyond its config: columns, rows and the names of rewards."""

from typing import Any

from datasets import Dataset

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.data.rows import check_columns
from grpo_ext.errors import ConfigError, DataError


def check_data(args: GRPOExtConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Columns that would collide with TRL's arguments to rewards; a dataset too small for one generation.

    Raises:
        ConfigError: naming them, with the numbers.
    """
    problems = []
    for dataset in (train_dataset, eval_dataset):
        if isinstance(dataset, Dataset):
            problems += [p for p in check_columns(dataset.column_names) if p not in problems]
    prompts, one_generation = _prompts_of_one_generation(args)
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts:
        problems.append(
            f"train_dataset has {len(train_dataset)} rows, fewer than {one_generation}: "
            "stock TRL would train 0 steps. Add rows or lower the batch size."
        )
    if problems:
        raise ConfigError(problems)


def check_trained(args: GRPOExtConfig, train_dataset: Any, steps: int) -> None:
    """A stream, whose rows nobody can count before, that was too short for one step.

    Raises:
        DataError: with the numbers.
    """
    if steps == 0 and not isinstance(train_dataset, Dataset):
        _, one_generation = _prompts_of_one_generation(args)
        raise DataError(
            f"train_dataset: the stream ended before {one_generation}, so that 0 steps were trained. Give a longer "
            "one or lower the batch size."
        )


def _prompts_of_one_generation(args: GRPOExtConfig) -> tuple[int, str]:
    prompts = (args.generation_batch_size or 0) // (args.num_generations or 1)
    return prompts, (
        f"the {prompts} prompts of one generation (generation_batch_size {args.generation_batch_size} / "
        f"num_generations {args.num_generations})"
    )


def check_reward_names(names: list[str]) -> None:
    """Two rewards of one name, which stock TRL averages together in its logs.

    Raises:
        ConfigError: naming them.
    """
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            [
                f"reward_funcs: the name {name!r} stands for {names.count(name)} rewards, whose logs would be mixed. "
                "Give each its own name."
                for name in repeated
            ]
        )
