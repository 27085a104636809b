"""Every rule a config must obey, each answered with the value, the reason and the cure, all at once."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from .field_checks import choice_problems, range_problems, type_problems
from .idle_checks import idle_problems
from .loss_checks import LOSS_RULES
from .mapping_checks import keyword_problems, mapping_problems
from .run_checks import run_problems


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
    for rule in (mapping_problems, type_problems, choice_problems, range_problems):
        for problem in rule(config):
            found.setdefault(_field(problem), problem)
    broken = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in found) or "(?!)")
    return [*found.values(), *(p for p in _relations(config, sound=not found) if not broken.search(p))]


def _field(problem: str) -> str:
    """The field that a problem's sentence begins with."""
    return problem.partition("=")[0]


def _relations(config: Any, *, sound: bool) -> Iterator[str]:
    """Problems between fields, each of which may be broken itself unless `sound`."""
    for rule in (_batch_arithmetic, _hardware, _vllm, run_problems, keyword_problems, idle_problems, *LOSS_RULES):
        try:
            yield from rule(config)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            if sound:  # otherwise the rule has stumbled over a field that is reported already
                raise


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
