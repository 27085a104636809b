"""Batch arithmetic: whole groups in every generation, whole generations in every optimizer step."""

import math
from collections.abc import Iterator
from typing import Any

from grpo_ext.config.launch import world_size


def _nearest(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{above}" if below == 0 else f"{below} or {above}"


def batch_problems(config: Any) -> Iterator[str]:
    """Whether generations hold whole groups, and optimizer steps divide them."""
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
