"""Checks and prepares what a trainer is given: arguments, datasets, rewards, environments, the policy's reference."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, Union

import torch
from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from grpo_ext.config import process_engine
from grpo_ext.config.adapters import peft_problems
from grpo_ext.config.added_losses import added_loss_problems, added_losses, column_problems
from grpo_ext.config.ahead import ahead_problems
from grpo_ext.config.batches import prompts_of_one_generation, too_few
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.images import image_problems
from grpo_ext.config.images import rollout_problems as image_rollout_problems
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import rollout_problems
from grpo_ext.config.vllm import leaves_packed, missing, packs_while_loading, quantized_problem
from grpo_ext.data.eval_sets import best_metric_problems
from grpo_ext.data.given import Checked, as_dataset, prompt_problems
from grpo_ext.data.images import as_read, image_columns, with_opened_images
from grpo_ext.data.rows import check_columns
from grpo_ext.environments.compatibility import beside_problems, setting_problems
from grpo_ext.environments.compatibility import dataset_problems as environment_data_problems
from grpo_ext.environments.composition import EnvironmentSpec, parse_environments
from grpo_ext.errors import ABSENT, ConfigError, DataError, Problem
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.quickstart.model import LESSONS, ensure_once
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.composition import parse_rewards
from grpo_ext.rewards.runtime import Component, Runtime
from grpo_ext.rewards.signatures import callable_name
from grpo_ext.rollout.vllm.lazy_import import grpo_trainer
from grpo_ext.trainer.episodes import environment_reward

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Model: TypeAlias = str | PreTrainedModel | PeftModel
Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Union[Dataset, IterableDataset, Iterable[Row], Callable[[], Iterable[Row]], "pd.DataFrame", Checked]
"""Types that a trainer takes as a dataset."""
Reward: TypeAlias = grpo_trainer.RewardFunc | Row
"""A function, a model, or an entry of `reward_funcs` in a recipe."""
RolloutFunc: TypeAlias = grpo_trainer.RolloutFunc
EnvironmentFactory: TypeAlias = grpo_trainer.EnvironmentFactory


def named_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Make `init` answer an unknown argument with the nearest known one."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                owner = init.__qualname__.partition(".")[0]
                raise TypeError(f"{owner} has no argument {name!r}. {did_you_mean(name, known)}")
        init(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class Prepared:
    """Checked arguments of a trainer, ready for TRL's."""

    model: Any
    reward_funcs: Any
    args: GRPOExtConfig
    train_dataset: Any
    eval_dataset: Any
    environments: list[EnvironmentSpec]


def prepare(
    model: Model,
    reward_funcs: object,
    args: GRPOExtConfig | None,
    train_dataset: object,
    eval_dataset: object,
    environments: Sequence[Any] | None,
    *,
    quantization_config: object,
    peft_config: object,
    reward_workers: int | None,
    rollouts: Mapping[str, Any],
) -> Prepared:
    """Check the arguments of a trainer and prepare them for TRL.

    `rollouts` holds TRL's arguments that generate completions: rollout_func, environment_factory, tools.

    Raises:
        ConfigError: all problems of the arguments.
        TypeError: `args` is not a `GRPOExtConfig`.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = GRPOExtConfig(f"{name.split('/')[-1] or 'model'}-GRPO")
    if not isinstance(args, GRPOExtConfig):
        raise TypeError(f"args is a {type(args).__name__}: give a GRPOExtConfig, which has the same fields and more.")
    checked = isinstance(train_dataset, Checked)
    factory = rollouts["environment_factory"] is not None  # which may bring prompts and a reward
    problems: list[Any] = [*missing(args)]
    train_dataset = seen(as_dataset(train_dataset, "train_dataset"), "train_dataset", problems)
    eval_dataset = seen(as_dataset(eval_dataset, "eval_dataset"), "eval_dataset", problems)
    specs, found = parse_environments(environments)
    problems += [*found, *setting_problems(specs, args), *beside_problems(specs, rollouts)]
    problems += [*rollout_problems(args, rollouts), *process_engine.rollout_problems(args, rollouts)]
    if not checked:
        problems += data_problems(args, train_dataset, eval_dataset, prompts_made=factory)
        evaluated = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        of_rows = [environment_data_problems(specs, dataset) for dataset in (train_dataset, *evaluated)]
        problems += dict.fromkeys(problem for found in of_rows for problem in found)
    if columns := image_columns(train_dataset, eval_dataset):
        problems += [*image_problems(args, columns), *image_rollout_problems(rollouts)]
    losses, known = added_losses(args), getattr(train_dataset, "column_names", None)
    problems += added_loss_problems(losses, plain=not (columns or specs or any(rollouts.values())))
    problems += column_problems(losses, known) if known else []
    problems += quantized_problems(args, model, quantization_config)
    adapters = [peft_config] if peft_config is not None else [*getattr(model, "peft_config", {}).values()]
    problems += [found for config in adapters for found in peft_problems(config)]
    if reward_funcs or not factory:
        own = environment_reward(specs)
        reward_funcs, args = prepare_rewards(reward_funcs, args, reward_workers, train_dataset, own, problems)
    if problems:
        raise ConfigError(problems)
    return Prepared(policy(model), reward_funcs, args, train_dataset, eval_dataset, specs)


# Data and model.


def seen(dataset: Any, name: str, problems: list[Any]) -> Any:
    """Return a dataset, or several by name, with pictures where its columns of images hold paths or bytes.

    A dataset whose images cannot be read is returned as it is, and its problems are added to `problems`.
    """
    if isinstance(dataset, Mapping):
        return {key: seen(value, f"{name}[{key!r}]", problems) for key, value in dataset.items()}
    try:
        return as_read(with_opened_images(dataset, name))
    except DataError as error:
        problems += error.problems
        return dataset


def data_problems(
    args: GRPOExtConfig, train_dataset: object, eval_dataset: object, *, prompts_made: bool = False
) -> Iterator[Any]:
    """Find rows without prompts, columns that collide with TRL's arguments to rewards, and too few rows.

    `prompts_made`: `environment_factory` is given, for which TRL starts a row without a prompt with an empty one.
    """
    evaluated = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval_dataset": eval_dataset}
    clashes: dict[Any, None] = {}
    for name, dataset in {"train_dataset": train_dataset, **evaluated}.items():
        if not prompts_made or "prompt" in (getattr(dataset, "column_names", None) or ()):
            yield from prompt_problems(dataset, name, continued=prompts_made)
        if isinstance(dataset, Dataset):
            clashes |= dict.fromkeys(check_columns(dataset.column_names))
    yield from clashes
    if isinstance(train_dataset, Dataset):
        yield from too_few(args, len(train_dataset))
    yield from ahead_problems(args, train_dataset)


def quantized_problems(args: GRPOExtConfig, model: object, quantization_config: object) -> Iterator[Any]:
    """Find quantized weights that vLLM would be sent in their packed form."""
    if not args.use_vllm:
        return
    own = getattr(getattr(model, "config", None), "quantization_config", None)
    quantizer = getattr(model, "hf_quantizer", None)
    packed_before = getattr(quantizer, "pre_quantized", True)  # vLLM loads the packed weights too
    if leaves_packed(quantization_config) and not packs_while_loading(quantization_config):
        yield quantized_problem("quantization_config", type(quantization_config).__name__)
    elif leaves_packed(own) and (packed_before or not packs_while_loading(own)):
        yield quantized_problem("model", type(model).__name__)


def policy(model: Model) -> Model:
    """Return `model`, or the folder of a tiny one that grpo-ext builds once: 'quickstart', 'quickstart/guess'."""
    return str(ensure_once(model)) if isinstance(model, str) and model in LESSONS else model


def reference_from(model: Model, args: GRPOExtConfig, peft_config: object) -> AbstractContextManager[None]:
    """Make TRL copy the reference from a policy given as an instance; it would load it from disk by name.

    It makes none of an adapter: `add_adapter` would run the adapter's initialisation again, on the policy's base.
    """
    if isinstance(model, PeftModel):
        return temporarily(args, beta=0.0)
    if not isinstance(model, PreTrainedModel) or args.beta == 0.0 or peft_config is not None:
        return nullcontext()

    def copy_policy(_: str, **kwargs: object) -> PreTrainedModel:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
        vars(reference).pop("forward", None)  # an earlier trainer's, which would still run the policy's weights
        return reference

    return temporarily(grpo_trainer, create_model_from_path=copy_policy)


def widen_trained(model: nn.Module) -> None:
    """Keep trained weights in float32 that TRL has made bfloat16, as it does with the adapter of a quantized model.

    A run in fp16 is for a GPU without bfloat16, and scales its gradients, which it does in float32.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


def check_trained(args: GRPOExtConfig, train_dataset: object, steps: int) -> None:
    """Refuse a stream that ended before the first optimizer step; its rows cannot be counted in advance.

    Raises:
        DataError: it did; the message has the numbers.
    """
    if steps == 0 and not isinstance(train_dataset, Dataset):
        _, one_generation = prompts_of_one_generation(args)
        reason = f"the stream ended before {one_generation}, so that 0 steps were trained"
        raise DataError([Problem("train_dataset", ABSENT, reason, "Give a longer one or lower the batch size.")])


# Rewards.


def prepare_rewards(
    reward_funcs: Any,
    args: GRPOExtConfig,
    workers: int | None,
    train_dataset: object,
    of_environments: list[Any],
    problems: list[Any],
) -> tuple[list[Any], GRPOExtConfig]:
    """Return TRL's `reward_funcs`, and `args` with their weights; problems are added to `problems`.

    Functions and models stay; names, paths and mappings become components, as in a recipe. The reward of the
    environments, if they have one, comes last.
    """
    if of_environments and not reward_funcs:
        return of_environments, args
    if isinstance(reward_funcs, str | Mapping) or callable(reward_funcs):
        reward_funcs = [reward_funcs]
    entries = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else reward_funcs
    specs, found = parse_rewards(entries, args.reward_weights)
    if isinstance(entries, list):
        found += [
            problem for i, entry in enumerate(entries) for problem in _call_problems(f"reward_funcs[{i}]", entry)
        ]
    if found:
        problems += found
        return [], args
    own = [spec for entry, spec in zip(entries, specs, strict=True) if not callable(entry)]
    columns = getattr(train_dataset, "column_names", None)  # None for some streams
    for problem in absences(own, [*columns, TRAJECTORY]) if columns else ():  # a rollout may add trajectories
        logger.warning(str(problem))
    failures = Path(args.output_dir or ".") / "reward_failures"
    functions = iter(Runtime(own, workers=workers, failures=failures, seed=args.seed).functions)
    weights = [spec.weight for spec in specs]
    if args.reward_weights is None and any(weight != 1.0 for weight in weights):
        args = args.changed(reward_weights=weights)  # the caller may use them again, with other rewards
    if of_environments and args.reward_weights is not None:
        args = args.changed(reward_weights=[*list(args.reward_weights or ()), 1.0])
    return [*(entry if callable(entry) else next(functions) for entry in entries), *of_environments], args


def check_reward_names(names: list[str]) -> None:
    """Refuse two rewards of one name, which stock TRL averages together in its logs.

    Raises:
        ConfigError: a name is used twice.
    """
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            Problem(
                "reward_funcs",
                ABSENT,
                f"{names.count(name)} rewards have the name {name!r}, so that their logs would be mixed",
                "Give each its own name.",
            )
            for name in repeated
        )


def check_best_metric(args: GRPOExtConfig, eval_dataset: object, names: Sequence[str]) -> None:
    """Refuse a `metric_for_best_model` that is missing in all of several evaluation sets.

    Raises:
        ConfigError: it is one.
    """
    sets = [*map(str, eval_dataset)] if isinstance(eval_dataset, Mapping) else []
    if sets and (found := [*best_metric_problems(args.metric_for_best_model, names, sets)]):
        raise ConfigError(found)


def _call_problems(field: str, function: object) -> Iterator[Problem]:
    """Find why TRL could not call a user's function."""
    if isinstance(function, Mapping) and isinstance(function.get("func"), nn.Module):
        cure = "List the model itself, without a mapping, and set its weight in reward_weights."
        yield Problem(field, function, "TRL scores a loaded model", cure)
    if not callable(function) or isinstance(function, nn.Module | Component):
        return
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        reason = "it does not take **kwargs, but TRL passes it every dataset column"
        yield Problem(field, callable_name(function), reason, "Add **kwargs.")
