"""What a trainer is handed, beyond its config: columns, rows and the names of rewards."""

from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset

from grpo_ext.config.batches import prompts_of_one_generation, too_few
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.vllm import leaves_packed, quantized_problem
from grpo_ext.data.given import prompt_problems
from grpo_ext.data.rows import check_columns
from grpo_ext.errors import ConfigError, DataError
from grpo_ext.quickstart.model import LESSONS, ensure_once


def data_problems(args: GRPOExtConfig, train_dataset: Any, eval_dataset: Any) -> Iterator[str]:
    """Rows without prompts, columns that collide with TRL's arguments to rewards, too few rows for one generation."""
    evaluated = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval_dataset": eval_dataset}
    clashes: dict[str, None] = {}
    for name, dataset in {"train_dataset": train_dataset, **evaluated}.items():
        yield from prompt_problems(dataset, name)
        if isinstance(dataset, Dataset):
            clashes |= dict.fromkeys(check_columns(dataset.column_names))
    yield from clashes
    if isinstance(train_dataset, Dataset):
        yield from too_few(args, len(train_dataset))


def quantized_problems(args: GRPOExtConfig, model: Any, quantization_config: Any) -> Iterator[str]:
    """A model whose weights are packed, or are to be, which vLLM would be sent as they are."""
    if not args.use_vllm:
        return
    if leaves_packed(quantization_config):
        yield quantized_problem(f"quantization_config={type(quantization_config).__name__}")
    elif leaves_packed(getattr(getattr(model, "config", None), "quantization_config", None)):
        yield quantized_problem(f"model={type(model).__name__}, whose weights are quantized,")


def policy(model: Any) -> Any:
    """`model`, or the folder of a tiny one that grpo-ext builds itself, once: 'quickstart', 'quickstart/guess'."""
    return str(ensure_once(model)) if isinstance(model, str) and model in LESSONS else model


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
