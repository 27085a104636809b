"""The rules of single fields: their types, names and ranges, one line of a table for each field."""

import dataclasses
import inspect
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from beartype.door import is_bearable
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, trainer_log_levels

from grpo_ext.config.options import TOWER, wrong_type
from grpo_ext.errors import UnknownNameError
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import find
from grpo_ext.objective.ratios import ratios
from grpo_ext.registry import did_you_mean

# Types.

_ALSO_BOOL = {"scale_rewards", "shared_prefix", "resume_from_checkpoint"}
_ALSO_NONE = {"debug"}  # what argparse makes of its default
_ALSO = {"accelerator_config": AcceleratorConfig}  # what transformers makes of the dict, in a copy of a config


def type_problems(config: Any, also: Mapping[str, type] = _ALSO) -> Iterator[str]:
    """YAML values skip argparse's conversions: 1.5 for an int and a scalar for a list would pass.

    `also` names fields that may be of a further type.
    """
    yield from _type_problems(config, type(config), also)


def sound_values(part: type, values: Any, also: Mapping[str, type] = {}) -> tuple[dict[str, Any], list[str]]:
    """The values that fit a dataclass's fields, before its own `__post_init__` stumbles over those that do not."""
    told = list(_type_problems(values, part, also))
    wrong = {problem.partition("=")[0] for problem in told}
    names = [f.name for f in dataclasses.fields(part) if f.init and f.name not in wrong]
    return {name: getattr(values, name) for name in names}, told


def _type_problems(config: Any, part: type, also: Mapping[str, type]) -> Iterator[str]:
    hints = typing.get_type_hints(part)
    for f in dataclasses.fields(part):
        value, hint = getattr(config, f.name), hints[f.name]
        if (value is None and f.name in _ALSO_NONE) or isinstance(value, also.get(f.name, ())):
            continue
        if isinstance(value, bool) and f.name not in _ALSO_BOOL:
            fits = bool in (hint, *typing.get_args(hint))
        else:
            fits = isinstance(value, bool) or is_bearable(value, hint, conf=TOWER)
        if fits:
            continue
        if value is False and "no" in CHOICES.get(f.name, ()):
            yield f"{f.name}=False: YAML reads an unquoted no as false. Write 'no' in quotes."
        else:
            known = _REPORTERS if f.name == "report_to" else () if f.name in OPEN_TO_PATHS else CHOICES.get(f.name, ())
            yield wrong_type(f.name, value, hint, None if f.default is dataclasses.MISSING else f.default, known)


def _values(enum: type[Enum]) -> tuple[str, ...]:
    return tuple(str(member.value) for member in enum)


CHOICES: dict[str, Any] = {
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
    "completion_length_counts": ("all", "policy"),
    "environment_waves": ("ready", "turn"),
    "rollout_engine": ("auto", "grouped", "generate"),
    "vllm_mode": ("server", "colocate"),
    "vllm_weight_transfer": ("auto", "nccl", "gloo"),
    "vllm_dtype": ("auto", "float32", "bfloat16", "float16"),
    "rollout_drift_action": ("warn", "stop"),
    "on_nonfinite": ("stop", "skip"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "log_level": tuple(trainer_log_levels),
    "log_level_replica": tuple(trainer_log_levels),
    "ddp_backend": ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"),
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "pad_to_multiple_of": ("auto",),
    "eval_strategy": _values(IntervalStrategy),
    "logging_strategy": _values(IntervalStrategy),
    "save_strategy": _values(SaveStrategy),
    "hub_strategy": _values(HubStrategy),
    "lr_scheduler_type": _values(SchedulerType),
    "optim": _values(OptimizerNames),
}
_REPORTERS = (*INTEGRATION_TO_CALLBACK, "all", "none")
OPEN_TO_PATHS = ("loss_type", "kl_estimator", "advantage_estimator", "loss_aggregation")
"""Fields that may name a function of the user's own."""


def choice_problems(config: Any) -> Iterator[str]:
    """Names that are none of a field's."""
    for name, known in CHOICES.items():
        value = getattr(config, name, None)  # not every release of transformers that will do has every field
        if not isinstance(value, (str, bool)) or value in known:  # what is no name is of the wrong type
            continue
        if name in OPEN_TO_PATHS and isinstance(value, str):
            yield from _import_problems(name, value, known)
        else:
            default = next(f.default for f in dataclasses.fields(config) if f.name == name)
            yield unknown_value(name, value, known, default)
    reporters = config.report_to if isinstance(config.report_to, (list, tuple)) else [config.report_to]
    for reporter in reporters:
        if isinstance(reporter, str) and reporter not in _REPORTERS:
            yield unknown_value("report_to", reporter, _REPORTERS)
    if isinstance(config.loss_type, str):
        try:
            find(config.loss_type)
        except UnknownNameError as error:
            yield f"loss_type={config.loss_type!r}: {error}"


def _import_problems(name: str, path: str, known: Mapping[str, Any]) -> Iterator[str]:
    try:
        found = known[path]
    except UnknownNameError as error:
        yield f"{name}={path!r}: {error}"
        return
    try:
        inspect.signature(found)
    except (TypeError, ValueError):  # no function, or one of C without named parameters
        yield f"{name}={path!r}: a {type(found).__name__}, not a function with named parameters. Name one."


def unknown_value(name: str, value: Any, known: Iterable[Any], default: Any = None) -> str:
    """The sentence for a value that a field does not know; one that its default begins with probably means that."""
    usual = str(getattr(default, "value", default))
    hint = f"Did you mean {usual!r}?" if usual.startswith(f"{value}_") else did_you_mean(str(value), map(str, known))
    return f"{name}={value!r} is not one of its values. {hint}"


_POSITIVE = (0, math.inf, "positive")
NOT_NEGATIVE = (0, math.inf, "0 or more")
COUNT = (1, math.inf, "1 or more")
_UNIT = (0, 1, "within [0, 1]")
_FINITE = (-math.inf, math.inf, "a finite number")
BELOW_ONE = (0, math.nextafter(1, 0), "within [0, 1)")
_SEED = (0, 2**32 - 1, "within [0, 2^32 - 1], as NumPy's are")
_PORT = (1, 65535, "a port, 1 to 65535")
RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, math.inf, "positive: at 0 every completion of a group is the same and no advantage is left"),
    "top_p": (0, 1, "within (0, 1]"),
    "top_k": (0, math.inf, "0 (off) or more"),
    "min_p": _UNIT,
    "repetition_penalty": _POSITIVE,
    "beta": NOT_NEGATIVE,
    "epsilon": NOT_NEGATIVE,
    "epsilon_high": NOT_NEGATIVE,
    "delta": _POSITIVE,
    "sapo_temperature_pos": _POSITIVE,
    "sapo_temperature_neg": _POSITIVE,
    "vespo_k_pos": NOT_NEGATIVE,
    "vespo_k_neg": NOT_NEGATIVE,
    "vespo_lambda_pos": NOT_NEGATIVE,
    "vespo_lambda_neg": NOT_NEGATIVE,
    "off_policy_mask_threshold": _POSITIVE,
    "top_entropy_quantile": _UNIT,
    "entropy_coef": _FINITE,
    "entropy_coef_min": _FINITE,
    "entropy_coef_max": _FINITE,
    "entropy_coef_delta": NOT_NEGATIVE,
    "entropy_target": NOT_NEGATIVE,
    "router_aux_loss_coef": NOT_NEGATIVE,
    "ref_model_mixup_alpha": _UNIT,
    "ref_model_sync_steps": COUNT,
    "num_generations": (2, math.inf, "2 or more: a group baseline needs at least 2 completions per prompt"),
    "num_generations_eval": COUNT,
    "dynamic_sampling_max_rounds": COUNT,
    "max_completion_length": COUNT,
    "num_iterations": COUNT,
    "generation_batch_size": COUNT,
    "steps_per_generation": COUNT,
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "max_tool_calling_iterations": COUNT,
    "num_completions_to_print": NOT_NEGATIVE,  # at 0 the files alone are written
    "pad_to_multiple_of": COUNT,
    "seed": _SEED,
    "data_seed": _SEED,
    "record_batches": NOT_NEGATIVE,
    "logging_steps": NOT_NEGATIVE,
    "save_steps": NOT_NEGATIVE,
    "eval_steps": NOT_NEGATIVE,
    "eval_delay": NOT_NEGATIVE,
    "eval_accumulation_steps": COUNT,
    "save_total_limit": COUNT,
    "torch_empty_cache_steps": COUNT,
    "dataloader_num_workers": NOT_NEGATIVE,
    "dataloader_prefetch_factor": COUNT,
    "ddp_timeout": COUNT,
    "ddp_bucket_cap_mb": COUNT,
    "neftune_noise_alpha": NOT_NEGATIVE,
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "adam_epsilon": _POSITIVE,
    "num_train_epochs": _POSITIVE,
    "warmup_steps": NOT_NEGATIVE,
    "vllm_gpu_memory_utilization": (0, 1, "within (0, 1]"),
    "vllm_tensor_parallel_size": COUNT,
    "vllm_max_model_length": COUNT,
    "vllm_server_port": _PORT,
    "vllm_group_port": _PORT,
    "vllm_server_timeout": _POSITIVE,
    "rollout_drift": NOT_NEGATIVE,
    "vllm_importance_sampling_cap": _POSITIVE,
    "vllm_importance_sampling_clip_max": _POSITIVE,
    "vllm_importance_sampling_clip_min": NOT_NEGATIVE,
}
_OPEN_AT_ZERO = {"positive", "within (0, 1]"}


def range_problems(config: Any) -> Iterator[str]:
    """Numbers that are out of their range."""
    yield from outside(config, RANGES)
    yield from _reward_weights(config.reward_weights)
    if config.max_completion_length is None:
        yield (
            "max_completion_length=None: completions would have no limit (stock TRL then generates 20 tokens or "
            "crashes). Set it to the number of tokens a completion may have, for example 512."
        )
    if config.num_generations is None:
        yield "num_generations=None: a group has a size. Set it to 2 or more; the default is 8."
    if isinstance(config.max_steps, int) and (config.max_steps == 0 or config.max_steps < -1):
        yield (
            f"max_steps={config.max_steps!r}: transformers would train for num_train_epochs instead. Set it to 1 or "
            "more, or to -1 to train for num_train_epochs."
        )
    low, high = config.entropy_coef_min, config.entropy_coef_max
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        yield f"entropy_coef_min={low} is above entropy_coef_max={high}. Swap them."


def outside(part: Any, ranges: Mapping[str, tuple[float, float, str]]) -> Iterator[str]:
    """Sentences for the fields that are out of their range: lowest, highest, and both in words."""
    for name, (low, high, meaning) in ranges.items():
        value = getattr(part, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        above = value > low if meaning.partition(":")[0] in _OPEN_AT_ZERO else value >= low
        if not (above and value <= high and math.isfinite(value)):  # written so that NaN fails
            default = next(f.default for f in dataclasses.fields(part) if f.name == name)
            cure = "Correct it, or leave it unset" if default is None else f"Correct it; the default is {default}"
            yield f"{name}={value!r} must be {meaning}. {cure}."


def _reward_weights(weights: Any) -> Iterator[str]:
    if not isinstance(weights, (list, tuple)):
        return
    for weight in weights:
        if not isinstance(weight, (int, float)) or not math.isfinite(weight):
            yield f"reward_weights={weights!r}: {weight!r} is no finite number. Give one per reward."
            return
    if weights and not any(weights):
        yield f"reward_weights={weights!r}: nothing would be rewarded. Give at least one reward a weight."
