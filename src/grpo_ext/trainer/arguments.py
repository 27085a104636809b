"""What a trainer is handed, beyond its config: columns, rows and the names of rewards."""

from typing import Any

from datasets import Dataset

from grpo_ext.config.batches import prompts_of_one_generation, too_few
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
    if isinstance(train_dataset, Dataset):
        problems += too_few(args, len(train_dataset))
    if problems:
        raise ConfigError(problems)


def check_trained(args: GRPOExtConfig, train_dataset: Any, steps: int) -> None:
    """A stream, whose rows nobody can count before, that was too short for one step.

    Raises:
        DataError: with the numbers.
    """
    if steps == 0 and not isinstance(train_dataset, Dataset):
        _, one_generation = prompts_of_one_generation(args)
        raise DataError(
            f"train_dataset: the stream ended before {one_generation}, so that 0 steps were trained. Give a longer "
            "one or lower the batch size."
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
