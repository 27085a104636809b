"""What stock TRL lets through when a trainer is built, checked or set right."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl.trainer import grpo_trainer
from trl.trainer.utils import disable_dropout_in_model, get_callable_name, is_async_callable

from .config import ConfigError, GRPOExtConfig
from .data import check_columns
from .rewards.runtime import Component
from .rewards.worker import last_lines


def check_data(args: GRPOExtConfig, train_dataset: Any, eval_dataset: Any) -> None:
    """Columns that would collide with TRL's arguments to rewards; a dataset too small for one generation.

    Raises:
        ConfigError: naming them, with the numbers.
    """
    problems = []
    for dataset in (train_dataset, eval_dataset):
        if isinstance(dataset, Dataset):
            problems += [p for p in check_columns(dataset.column_names) if p not in problems]
    prompts = (args.generation_batch_size or 0) // (args.num_generations or 1)
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts:
        problems.append(
            f"train_dataset has {len(train_dataset)} rows, fewer than the {prompts} prompts of one generation "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}): "
            "stock TRL would train 0 steps. Add rows or lower the batch size."
        )
    if problems:
        raise ConfigError(problems)


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


@contextmanager
def reference_copied_from(model: Any, args: GRPOExtConfig, peft_config: Any) -> Iterator[None]:
    """Make the reference a copy of a policy handed in as an instance; stock TRL reloads it by name from disk."""
    if not isinstance(model, PreTrainedModel) or args.beta == 0.0 or peft_config is not None:
        yield
        return

    def copy_policy(_: str, **kwargs: Any) -> PreTrainedModel:
        reference = deepcopy(model).eval().requires_grad_(False)
        vars(reference).pop("forward", None)  # an earlier trainer's, which would go on running the policy's weights
        return reference

    with patch.object(grpo_trainer, "create_model_from_path", copy_policy):
        yield


@cache
def accept_numbered_cpu() -> None:
    """Let a checkpoint be loaded to `cpu:0`, as transformers before 5.23 asks for on several CPU processes."""
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, location: storage if re.fullmatch(r"cpu:\d+", location) else None
    )


def _functional_dropout(module: torch.nn.Module) -> list[str]:
    """Attributes that a module hands to `torch.nn.functional.dropout`, or to its attention."""
    return [n for n, value in vars(module).items() if "dropout" in n and isinstance(value, float) and value > 0]


def active_dropout(model: torch.nn.Module) -> list[str]:
    """Names of the modules that drop something in training."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Dropout) and module.p > 0) or _functional_dropout(module)
    ]


def switch_dropout_off(model: torch.nn.Module) -> None:
    """No dropout in modules nor in attention, so that rollouts, old log-probabilities and loss see one network."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name in _functional_dropout(module):
            setattr(module, name, 0.0)


def forward_obstacle(model: torch.nn.Module, args: GRPOExtConfig) -> str | None:
    """Why completions cannot share one forward of their prompt, as far as the run and not the architecture says."""
    if dropout := active_dropout(model):
        return f"dropout is active in {dropout[0]}, and each completion would see the same one"
    if args.neftune_noise_alpha is not None:
        return "neftune_noise_alpha adds noise to the embeddings"
    parallel = args.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        return "sequences are spread over processes"
    return "torch_compile compiles the plain forward" if args.torch_compile else None


def fill_empty(completion_ids: list[list[int]], logprobs: list | None, eos_token_id: int) -> None:
    """Make an empty completion one end-of-sequence token; stock TRL crashes looking for its last token."""
    for i, ids in enumerate(completion_ids):
        if not ids:
            completion_ids[i] = [eos_token_id]
            if logprobs is not None:
                logprobs[i] = [None]  # unknown to the sampler: TRL then applies no correction


def without_empty_completions(rollout_func: Callable[..., dict], eos_token_id: int) -> Callable[..., dict]:
    """`rollout_func` with its empty completions filled."""

    def rollout(*args: Any, **kwargs: Any) -> dict:
        output = rollout_func(*args, **kwargs)
        if "completion_ids" in output:
            fill_empty(output["completion_ids"], output.get("logprobs"), eos_token_id)
        return output

    return rollout


def contained(function: Any, errors: list[str]) -> Any:
    """A reward of the user's own that, should it raise, scores nothing and leaves its message in `errors`."""
    if isinstance(function, Component | torch.nn.Module):
        return function

    def report(error: Exception, columns: dict[str, Any]) -> list[None]:
        errors.append(f"reward {name!r} raised: {last_lines(error)}")
        return [None] * len(columns["completions"])

    def checked(values: Any, columns: dict[str, Any]) -> list:
        values, expected = list(values), len(columns["completions"])
        torch.tensor([torch.nan if v is None else v for v in values], dtype=torch.float32)  # as TRL will, unguarded
        if len(values) != expected:
            raise ValueError(f"it returned {len(values)} values for {expected} completions")
        return values

    name = get_callable_name(function)

    async def reward_async(**columns: Any) -> Any:
        try:
            return checked(await function(**columns), columns)
        except Exception as error:
            return report(error, columns)

    def reward(**columns: Any) -> Any:
        try:
            return checked(function(**columns), columns)
        except Exception as error:
            return report(error, columns)

    chosen: Any = reward_async if is_async_callable(function) else reward
    chosen.__name__ = name
    return chosen
