"""Every rule a config must obey, each answered with the value, the reason and the cure, all at once."""

import dataclasses
import math
import os
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

from beartype.door import is_bearable
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from .advantages import combinations, estimators
from .aggregation import aggregations
from .idle_checks import idle_problems
from .kl import kl_estimators
from .loss_checks import LOSS_RULES, TOWER
from .losses import find
from .ratios import ratios
from .registry import UnknownNameError, did_you_mean


class ConfigError(ValueError):
    """All that is wrong with a recipe; `problems` holds one sentence for each mistake."""

    def __init__(self, problems: list[str]) -> None:
        """Number and join the problems."""
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  - {p}" for p in problems)]))


def problems(config: Any) -> list[str]:
    """What makes `config` unusable; empty when nothing does. Reads raw fields only, before TRL derives any."""
    found: dict[str, str] = {}  # by field: one mistake is told once
    for rule in (type_problems, _choices, _ranges):
        for problem in rule(config):
            found.setdefault(_field(problem), problem)
    basic = set(found)
    return [*found.values(), *(p for p in _relations(config, sound=not found) if _field(p) not in basic)]


def _field(problem: str) -> str:
    """The field that a problem's sentence begins with."""
    return problem.partition("=")[0]


def _relations(config: Any, *, sound: bool) -> Iterator[str]:
    """Problems between fields, each of which may be broken itself unless `sound`."""
    for rule in (_batch_arithmetic, _hardware, _vllm, idle_problems, *LOSS_RULES):
        try:
            yield from rule(config)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            if sound:  # otherwise the rule has stumbled over a field that is reported already
                raise


# Types, names, ranges: one line of a table for each field.

_ALSO_BOOL = {"scale_rewards", "shared_prefix", "resume_from_checkpoint"}
_ALSO_NONE = {"debug"}  # what argparse makes of its default
_ALSO = {"accelerator_config": AcceleratorConfig}  # what transformers makes of the dict, in a copy of a config


def type_problems(config: Any, also: Mapping[str, type] = _ALSO) -> Iterator[str]:
    """YAML values skip argparse's conversions: 1.5 for an int and a scalar for a list would pass.

    `also` names fields that may be of a further type.
    """
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, hint = getattr(config, f.name), hints[f.name]
        if (value is None and f.name in _ALSO_NONE) or isinstance(value, also.get(f.name, ())):
            continue
        if isinstance(value, bool) and f.name not in _ALSO_BOOL:
            fits = bool in (hint, *typing.get_args(hint))
        else:
            fits = isinstance(value, bool) or is_bearable(value, hint, conf=TOWER)
        if fits:
            continue
        if value is False and "no" in _CHOICES.get(f.name, ()):
            yield f"{f.name}=False: YAML reads an unquoted no as false. Write 'no' in quotes."
        else:
            yield f"{f.name}={value!r}: a {type(value).__name__} where {type_name(hint)} is expected. Write one."


def type_name(hint: Any) -> str:
    """A type as a user would write it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _values(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in enum)


_CHOICES: dict[str, Any] = {
    "loss_defaults": ("paper", "trl"),
    "importance_sampling_level": ratios,
    "kl_estimator": kl_estimators,
    "kl_placement": ("loss", "reward"),
    "advantage_estimator": estimators,
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": combinations,
    "shared_prefix": ("auto", "true", "false", True, False),
    "missing_rewards": ("renormalize", "zero"),
    "loss_aggregation": aggregations,
    "rollout_engine": ("auto", "grouped", "generate"),
    "vllm_mode": ("server", "colocate"),
    "vllm_weight_transfer": ("auto", "nccl", "gloo"),
    "vllm_dtype": ("auto", "float32", "bfloat16", "float16"),
    "rollout_drift_action": ("warn", "stop"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "eval_strategy": _values(IntervalStrategy),
    "logging_strategy": _values(IntervalStrategy),
    "save_strategy": _values(SaveStrategy),
    "hub_strategy": _values(HubStrategy),
    "lr_scheduler_type": _values(SchedulerType),
    "optim": _values(OptimizerNames),
}
_OPEN_TO_PATHS = {"kl_estimator", "advantage_estimator", "loss_aggregation"}


def _choices(config: Any) -> Iterator[str]:
    for name, known in _CHOICES.items():
        value = getattr(config, name)
        if value is None or value in known:
            continue
        if name in _OPEN_TO_PATHS and isinstance(value, str):
            try:
                known[value]
            except UnknownNameError as error:
                yield f"{name}={value!r}: {error}"
        else:
            yield unknown_value(name, value, known)
    reporters = [config.report_to] if isinstance(config.report_to, str) else config.report_to or []
    for reporter in reporters:
        if reporter not in (*INTEGRATION_TO_CALLBACK, "all", "none"):
            yield unknown_value("report_to", reporter, (*INTEGRATION_TO_CALLBACK, "all", "none"))
    try:
        find(config.loss_type)
    except UnknownNameError as error:
        yield f"loss_type={config.loss_type!r}: {error}"


def unknown_value(name: str, value: Any, known: Iterable[Any]) -> str:
    """The sentence for a value that a field does not know."""
    return f"{name}={value!r} is not one of its values. {did_you_mean(str(value), map(str, known))}"


_POSITIVE = (0, math.inf, "positive")
_NOT_NEGATIVE = (0, math.inf, "0 or more")
_COUNT = (1, math.inf, "1 or more")
_UNIT = (0, 1, "within [0, 1]")
_FINITE = (-math.inf, math.inf, "a finite number")
_PORT = (1, 65535, "a port, 1 to 65535")
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, math.inf, "positive: at 0 every completion of a group is the same and no advantage is left"),
    "top_p": (0, 1, "within (0, 1]"),
    "top_k": (0, math.inf, "0 (off) or more"),
    "min_p": _UNIT,
    "repetition_penalty": _POSITIVE,
    "beta": _NOT_NEGATIVE,
    "epsilon": _NOT_NEGATIVE,
    "epsilon_high": _NOT_NEGATIVE,
    "delta": _POSITIVE,
    "sapo_temperature_pos": _POSITIVE,
    "sapo_temperature_neg": _POSITIVE,
    "vespo_k_pos": _NOT_NEGATIVE,
    "vespo_k_neg": _NOT_NEGATIVE,
    "vespo_lambda_pos": _NOT_NEGATIVE,
    "vespo_lambda_neg": _NOT_NEGATIVE,
    "off_policy_mask_threshold": _POSITIVE,
    "top_entropy_quantile": _UNIT,
    "entropy_coef": _FINITE,
    "entropy_coef_min": _FINITE,
    "entropy_coef_max": _FINITE,
    "entropy_coef_delta": _NOT_NEGATIVE,
    "entropy_target": _NOT_NEGATIVE,
    "router_aux_loss_coef": _NOT_NEGATIVE,
    "ref_model_mixup_alpha": _UNIT,
    "ref_model_sync_steps": _COUNT,
    "num_generations": (2, math.inf, "2 or more: a group baseline needs at least 2 completions per prompt"),
    "num_generations_eval": _COUNT,
    "dynamic_sampling_max_rounds": _COUNT,
    "max_completion_length": _COUNT,
    "num_iterations": _COUNT,
    "generation_batch_size": _COUNT,
    "steps_per_generation": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "max_tool_calling_iterations": _COUNT,
    "num_completions_to_print": _COUNT,
    "learning_rate": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "adam_beta1": _UNIT,
    "adam_beta2": _UNIT,
    "adam_epsilon": _POSITIVE,
    "num_train_epochs": _POSITIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "vllm_gpu_memory_utilization": (0, 1, "within (0, 1]"),
    "vllm_tensor_parallel_size": _COUNT,
    "vllm_max_model_length": _COUNT,
    "vllm_server_port": _PORT,
    "vllm_group_port": _PORT,
    "vllm_server_timeout": _POSITIVE,
    "rollout_drift": _NOT_NEGATIVE,
    "vllm_importance_sampling_clip_max": _POSITIVE,
    "vllm_importance_sampling_clip_min": _NOT_NEGATIVE,
}
_OPEN_AT_ZERO = {"positive", "within (0, 1]"}


def _ranges(config: Any) -> Iterator[str]:
    for name, (low, high, meaning) in _RANGES.items():
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        above = value > low if meaning.partition(":")[0] in _OPEN_AT_ZERO else value >= low
        if not (above and value <= high and math.isfinite(value)):  # written so that NaN fails
            default = next(f.default for f in dataclasses.fields(config) if f.name == name)
            cure = "Correct it, or leave it unset" if default is None else f"Correct it; the default is {default}"
            yield f"{name}={value!r} must be {meaning}. {cure}."
    yield from _reward_weights(config.reward_weights)
    if config.max_completion_length is None:
        yield (
            "max_completion_length=None: completions would have no limit (stock TRL then generates 20 tokens or "
            "crashes). Set it to the number of tokens a completion may have, for example 512."
        )
    if config.entropy_coef_min > config.entropy_coef_max:
        yield (
            f"entropy_coef_min={config.entropy_coef_min} is above entropy_coef_max={config.entropy_coef_max}. "
            "Swap them."
        )


def _reward_weights(weights: Any) -> Iterator[str]:
    if not isinstance(weights, (list, tuple)):
        return
    for weight in weights:
        if not isinstance(weight, (int, float)) or not math.isfinite(weight):
            yield f"reward_weights={weights!r}: {weight!r} is no finite number. Give one per reward."
            return
    if weights and not any(weights):
        yield f"reward_weights={weights!r}: nothing would be rewarded. Give at least one reward a weight."


# Batch arithmetic.


_PLANNED: ContextVar[int | None] = ContextVar("planned processes", default=None)  # None: this launch is no plan


@contextmanager
def planned_processes(count: int | None) -> Iterator[None]:
    """Check and plan for a launch of `count` processes (None: of this one's) elsewhere, whose GPUs are not here."""
    token = _PLANNED.set(count or world_size())
    try:
        yield
    finally:
        _PLANNED.reset(token)


def planning() -> bool:
    """Whether a launch is only being planned."""
    return _PLANNED.get() is not None


def world_size() -> int:
    """Processes of this launch, as torchrun and accelerate announce them, or of the one being planned."""
    return _PLANNED.get() or int(os.environ.get("WORLD_SIZE", "1"))


def _nearest(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{above}" if below == 0 else f"{below} or {above}"


def _batch_arithmetic(config: Any) -> Iterator[str]:
    per_step = config.per_device_train_batch_size * world_size()
    generation_batch, steps = config.generation_batch_size, config.steps_per_generation
    if generation_batch is not None and steps is not None and generation_batch != per_step * steps:
        yield (
            f"generation_batch_size={generation_batch} contradicts steps_per_generation={steps}: "
            f"per_device_train_batch_size x processes x steps_per_generation = {config.per_device_train_batch_size} x "
            f"{world_size()} x {steps} = {per_step * steps}. Set one of them."
        )
        return
    if generation_batch is not None and generation_batch % per_step:
        yield (
            f"generation_batch_size={generation_batch} is not a multiple of per_device_train_batch_size x processes = "
            f"{config.per_device_train_batch_size} x {world_size()} = {per_step}. Nearest that work: "
            f"{_nearest(generation_batch, per_step)}."
        )
        return
    steps = generation_batch // per_step if generation_batch else steps or config.gradient_accumulation_steps
    yield from _groups_fit(config, per_step, steps)
    if config.loss_defaults == "paper" and steps % config.gradient_accumulation_steps:
        yield (
            f"steps_per_generation={steps} is not a multiple of gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps}: an optimizer step would mix generations and its denominators "
            f"would not be known. Set steps_per_generation to {_nearest(steps, config.gradient_accumulation_steps)}."
        )
    if config.eval_strategy != "no":
        yield from eval_batch_problems(config)


def _groups_fit(config: Any, per_step: int, steps: int) -> Iterator[str]:
    g, total = config.num_generations, per_step * steps
    if total % g == 0:
        return
    divisors = sorted((n for n in range(2, total + 1) if total % n == 0), key=lambda n: abs(n - g))[:2]
    unit = g // math.gcd(g, world_size() * steps)
    yield (
        f"num_generations={g} does not divide the generation batch: per_device_train_batch_size x processes x "
        f"steps_per_generation = {config.per_device_train_batch_size} x {world_size()} x {steps} = {total} "
        f"completions. Nearest that work: per_device_train_batch_size "
        f"{_nearest(config.per_device_train_batch_size, unit)}, or "
        f"num_generations {' or '.join(map(str, divisors)) or 'none'}."
    )


def eval_batch_problems(config: Any) -> Iterator[str]:
    """Whether the evaluation batch holds whole groups."""
    g = config.num_generations_eval or config.num_generations
    total = config.per_device_eval_batch_size * world_size()
    if total % g:
        unit = g // math.gcd(g, world_size())
        yield (
            f"per_device_eval_batch_size={config.per_device_eval_batch_size}: x {world_size()} processes = {total} is "
            f"not a multiple of the {g} completions generated per prompt in evaluation. Nearest that work: "
            f"{_nearest(config.per_device_eval_batch_size, unit)}, or set num_generations_eval."
        )


# Hardware and vLLM.

OF_THE_GPU = ("bf16", "bf16_full_eval", "tf32")
"""Settings that transformers refuses on a machine without the GPU for them."""


def _hardware(config: Any) -> Iterator[str]:
    if config.use_cpu or planning() or is_torch_bf16_gpu_available() or is_torch_xla_available():
        return
    bf16 = not config.fp16 if config.bf16 is None else config.bf16
    for name, value in (("bf16", bf16), ("bf16_full_eval", config.bf16_full_eval)):
        if value:
            yield (
                f"{name}={value}: this machine has no GPU that computes in bf16. Run it where there is one, or set "
                f"use_cpu: true and {name}: false."
            )


def _vllm(config: Any) -> Iterator[str]:
    if config.use_vllm:
        yield from _colocated(config) if config.vllm_mode == "colocate" else _served(config)
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        yield (
            f"vllm_importance_sampling_clip_min={low} is not below "
            f"vllm_importance_sampling_clip_max={high}. Swap them."
        )
    mode = config.vllm_importance_sampling_mode
    if config.vllm_importance_sampling_correction and mode.endswith("truncate") and low is None and high is None:
        yield (
            f"vllm_importance_sampling_mode={mode!r} truncates, but neither vllm_importance_sampling_clip_min nor "
            "vllm_importance_sampling_clip_max is set. Set one."
        )
    corrected = config.use_vllm and config.vllm_importance_sampling_correction
    if config.loss_type == "vespo" and corrected and mode.startswith("sequence"):
        yield (
            f"vllm_importance_sampling_mode={mode!r}: vespo takes the correction per token. "
            "Set 'token_truncate' or 'token_mask'."
        )


def _served(config: Any) -> Iterator[str]:
    if config.use_cpu and config.vllm_weight_transfer == "nccl":
        yield "vllm_weight_transfer='nccl' needs a GPU on this side too, and use_cpu is set. Set 'auto' or 'gloo'."
    if world_size() > 1 and config.vllm_server_timeout >= config.ddp_timeout:
        yield (
            f"vllm_server_timeout={config.vllm_server_timeout:g}: the other processes wait for the one that waits for "
            f"the server, and give up after ddp_timeout={config.ddp_timeout} s. Set it below that."
        )


def _colocated(config: Any) -> Iterator[str]:
    if config.use_cpu and config.vllm_enable_sleep_mode:
        yield "vllm_enable_sleep_mode=True: vLLM cannot put its engine to sleep on a CPU. Remove it."
    parallel, processes = config.vllm_tensor_parallel_size, world_size()
    if processes % parallel:
        yield (
            f"vllm_tensor_parallel_size={parallel} does not divide the number of processes, {processes}: colocated "
            "engines share the training processes. Set it to a divisor, or vllm_mode: server."
        )
    longest = config.vllm_max_model_length
    if longest is not None and longest <= config.max_completion_length:
        yield (
            f"vllm_max_model_length={longest} holds prompt and completion, but max_completion_length="
            f"{config.max_completion_length} alone fills it. Set it above {config.max_completion_length}, by the "
            "length of the longest prompt."
        )
