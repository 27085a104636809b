"""Checks and prepares what a trainer is given: arguments, datasets, rewards, environments, the policy's reference."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, Union

import torch
from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import nn
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.integrations import get_reporting_integration_callbacks
from trl.trainer.utils import get_config_model_id

from grpo_ext.config import process_engine, routes
from grpo_ext.config.adapters import base_of, peft_problems
from grpo_ext.config.batches import prompts_of_one_generation
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.images import rollout_problems as image_rollout_problems
from grpo_ext.config.launch import rank
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import plain, refusal
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import rollout_problems
from grpo_ext.config.vllm import leaves_packed, missing, packs_while_loading, quantized_problem, tool_problems
from grpo_ext.data.eval_sets import best_metric_problems
from grpo_ext.data.images import image_columns
from grpo_ext.data.python_data import Data
from grpo_ext.environments.compatibility import beside_problems, setting_problems
from grpo_ext.environments.composition import EnvironmentSpec, parse_environments
from grpo_ext.errors import ABSENT, ConfigError, DataError, Problem
from grpo_ext.preflight import Run, data_problems
from grpo_ext.quickstart.model import LESSONS, ensure_once
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.composition import RewardSpec, parse_rewards
from grpo_ext.rewards.runtime import Component, Runtime
from grpo_ext.rollout.vllm.lazy_import import grpo_trainer
from grpo_ext.trainer.episodes import environment_reward
from grpo_ext.trainer.reference import frozen_copy

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Model: TypeAlias = str | PreTrainedModel | PeftModel
Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Union[Dataset, IterableDataset, Iterable[Row], Callable[[], Iterable[Row]], "pd.DataFrame"]
"""Types that a trainer takes as a dataset."""
Reward: TypeAlias = grpo_trainer.RewardFunc | Row
"""A function, a model, or an entry of `reward_funcs` in a recipe."""
RolloutFunc: TypeAlias = grpo_trainer.RolloutFunc
EnvironmentFactory: TypeAlias = grpo_trainer.EnvironmentFactory
ROLLOUTS = ("rollout_func", "environment_factory", "tools")
"""TRL's arguments that make rollouts."""


def named_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Make `init` answer an unknown argument with the nearest known one."""
    arguments = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in arguments:
                owner = init.__qualname__.partition(".")[0]
                raise TypeError(f"{owner} has no argument {name!r}. {did_you_mean(name, arguments)}")
        init(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class Ready:
    """What a trainer is made of, checked before a model is loaded; `trl` are further arguments of TRL's trainer."""

    model: Any
    reward_funcs: Any
    args: GRPOExtConfig
    data: Data
    environments: list[EnvironmentSpec]
    trl: Mapping[str, Any]

    @property
    def rollouts(self) -> dict[str, Any]:
        """TRL's arguments that make rollouts."""
        return {name: self.trl.get(name) for name in ROLLOUTS}


def check(
    model: Model,
    reward_funcs: object,
    args: GRPOExtConfig | None,
    data: Data,
    environments: Sequence[Any] | None = None,
    reward_workers: int | None = None,
    **trl: Any,
) -> Ready:
    """Check the arguments of a trainer, and its data for them, and prepare them for TRL.

    `trl` are further arguments of TRL's trainer, such as `peft_config`. Warnings are logged.

    Raises:
        ConfigError: all problems.
        TypeError: `args` is not a `GRPOExtConfig`.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = GRPOExtConfig(f"{name.split('/')[-1] or 'model'}-GRPO")
    if not isinstance(args, GRPOExtConfig):
        raise TypeError(f"args is a {type(args).__name__}: give a GRPOExtConfig, which has the same fields and more.")
    specs, found = parse_environments(environments)
    ready = Ready(policy(model), [], args, data, specs, trl)
    rollouts, peft_config = ready.rollouts, trl.get("peft_config")
    problems: list[Problem] = [*missing(args), *_uninstalled(args, trl.get("optimizers")), *data.problems, *found]
    problems += [*setting_problems(specs, args), *beside_problems(specs, rollouts)]
    problems += [*rollout_problems(args, rollouts["rollout_func"]), *process_engine.rollout_problems(args, rollouts)]
    problems += tool_problems(args, rollouts)
    problems += routes.rollout_problems(args, {**rollouts, "environments": specs})
    problems += quantized_problems(args, model, trl.get("quantization_config"))
    adapters = [peft_config] if peft_config is not None else [*getattr(model, "peft_config", {}).values()]
    problems += [problem for config in adapters for problem in peft_problems(config)]
    rewards: tuple[list[RewardSpec], list[RewardSpec]] = [], []
    if reward_funcs or rollouts["environment_factory"] is None:  # which may bring a reward
        ready, rewards = _with_rewards(ready, reward_funcs, reward_workers, problems)
    ready = _with_processor(ready)
    problems += _image_problems(ready)
    processor = ready.trl["processing_class"]
    tokenizer = None if data.problems else getattr(processor, "tokenizer", processor)
    run = Run(args, data, *rewards, specs, tokenizer, extended=any(rollouts.values()))
    found, notes = data_problems(run)
    if problems := [*problems, *found]:
        raise ConfigError(problems)
    for note in notes if rank() == 0 else ():
        logger.warning(note)
    return ready


def _uninstalled(args: GRPOExtConfig, optimizers: tuple[Any, Any] | None) -> Iterator[Problem]:
    """Yield what transformers says of trackers that it does not know, and of packages that are not installed."""
    try:
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    except (ImportError, RuntimeError, ValueError) as error:
        yield replace(refusal(error, args, "report_to"), field="report_to", value=args.report_to)
    try:
        if not any(optimizers or ()):
            Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:
        if "install" in str(error):  # others need the model
            yield replace(refusal(error, args, "optim"), field="optim", value=plain(args.optim))


# Model and data.


def _with_processor(ready: Ready) -> Ready:
    """Add the tokenizer or processor that TRL would load; where it cannot be loaded TRL says why."""
    if ready.trl.get("processing_class") is not None:
        return ready
    model, args, revision, loaded = ready.model, ready.args, None, None
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    if isinstance(model, str):
        revision = as_mapping(args.model_init_kwargs).get("revision")
    with suppress(Exception):
        with suppress(OSError):  # of a hub that does not answer
            name = (base_of(name, revision) or (name,))[0]
        sides, trust = {"truncation_side": "left", "padding_side": "left"}, args.trust_remote_code
        loaded = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust, **sides)
    return replace(ready, trl={**ready.trl, "processing_class": loaded})


def _image_problems(ready: Ready) -> Iterator[Problem]:
    """Yield why images in the data would not reach the model."""
    columns, processor = image_columns(ready.data.named), ready.trl["processing_class"]
    if columns:
        yield from image_rollout_problems(ready.rollouts["rollout_func"])
    if columns and isinstance(processor, PreTrainedTokenizerBase):  # which would write them into the prompt as text
        reason = f"the processor is a {type(processor).__name__}, so the model would not see the images"
        cure = "Name a model of images and text with its processor, or remove the column."
        yield Problem(f"column {columns[0]!r}", ABSENT, reason, cure)


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
    return temporarily(grpo_trainer, create_model_from_path=lambda *_, **__: frozen_copy(model))


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


def _with_rewards(
    ready: Ready, reward_funcs: Any, workers: int | None, problems: list[Problem]
) -> tuple[Ready, tuple[list[RewardSpec], list[RewardSpec]]]:
    """Add TRL's `reward_funcs` and their weights, and return the specs of those that are named and of functions.

    Functions and models stay; names, paths and mappings become components, as in a recipe. The reward of the
    environments, if they have one, comes last. Problems are added to `problems`.
    """
    args, of_environments = ready.args, environment_reward(ready.environments)
    if of_environments and not reward_funcs:
        return replace(ready, reward_funcs=of_environments), ([], [])
    if isinstance(reward_funcs, str | Mapping) or callable(reward_funcs):
        reward_funcs = [reward_funcs]
    entries = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else reward_funcs
    specs, found = parse_rewards(entries, args.reward_weights)
    for i, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, Mapping) and isinstance(entry.get("func"), nn.Module):
            cure = "List the model itself, without a mapping, and set its weight in reward_weights."
            found.append(Problem(f"reward_funcs[{i}]", entry, "TRL scores a loaded model", cure))
    if found:
        problems += found
        return ready, ([], [])
    pairs = [*zip(entries, specs, strict=True)]
    own = [spec for entry, spec in pairs if not callable(entry)]
    failures = Path(args.output_dir or ".") / "reward_failures"
    components = iter(Runtime(own, workers=workers, failures=failures, seed=args.seed).functions)
    weights = [spec.weight for spec in specs]
    if args.reward_weights is None and any(weight != 1.0 for weight in weights):
        args = args.changed(reward_weights=weights)  # the caller may use them again, with other rewards
    if of_environments and args.reward_weights is not None:
        args = args.changed(reward_weights=[*list(args.reward_weights or ()), 1.0])
    functions = [entry if callable(entry) else next(components) for entry in entries]
    named = [*own, *(entry.spec for entry in entries if isinstance(entry, Component))]
    others = [spec for entry, spec in pairs if callable(entry) and not isinstance(entry, Component)]
    return replace(ready, reward_funcs=[*functions, *of_environments], args=args), (named, others)


def name_problems(args: GRPOExtConfig, evaluation: object, names: Sequence[str]) -> Iterator[Problem]:
    """Yield rewards of one name, which stock TRL averages in its logs, and a best metric that no evaluation has."""
    for name in sorted({name for name in names if names.count(name) > 1}):
        reason = f"{names.count(name)} rewards have the name {name!r}, so that their logs would be mixed"
        yield Problem("reward_funcs", ABSENT, reason, "Give each its own name.")
    if isinstance(evaluation, Mapping) and evaluation:
        yield from best_metric_problems(args.metric_for_best_model, names, [*map(str, evaluation)])
