"""What a trainer is handed, beyond its config: columns, rows and the names of rewards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, Union

from datasets import Dataset, IterableDataset

from grpo_ext.config.batches import prompts_of_one_generation, too_few
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.vllm import leaves_packed, quantized_problem
from grpo_ext.data.given import prompt_problems
from grpo_ext.data.rows import check_columns
from grpo_ext.errors import ConfigError, DataError
from grpo_ext.quickstart.model import LESSONS, ensure_once
from grpo_ext.registry import did_you_mean
from grpo_ext.rollout.vllm.lazy_import import grpo_trainer

if TYPE_CHECKING:
    import pandas as pd

P = ParamSpec("P")
Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Union[Dataset, IterableDataset, Iterable[Row], Callable[[], Iterable[Row]], "pd.DataFrame"]
"""What a trainer takes as a dataset."""
Reward: TypeAlias = grpo_trainer.RewardFunc | Row
"""A function, a model, or what `reward_funcs` of a recipe may hold."""
RolloutFunc: TypeAlias = grpo_trainer.RolloutFunc
EnvironmentFactory: TypeAlias = grpo_trainer.EnvironmentFactory


def named_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Answer an argument that `init` does not have with the nearest one that it has."""
    known = [name for name in signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                owner = init.__qualname__.partition(".")[0]
                raise TypeError(f"{owner} has no argument {name!r}. {did_you_mean(name, known)}")
        init(*args, **kwargs)

    return checked


def data_problems(
    args: GRPOExtConfig, train_dataset: Any, eval_dataset: Any, *, prompts_made: bool = False
) -> Iterator[str]:
    """Rows without prompts, columns that collide with TRL's arguments to rewards, too few rows for one generation.

    `prompts_made`: `environment_factory` is given, for which TRL begins a row without a prompt with an empty one.
    """
    evaluated = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval_dataset": eval_dataset}
    clashes: dict[str, None] = {}
    for name, dataset in {"train_dataset": train_dataset, **evaluated}.items():
        if not prompts_made or "prompt" in (getattr(dataset, "column_names", None) or ()):
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
