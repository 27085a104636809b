"""Batch arithmetic: whole groups in every generation, whole generations in every optimizer step."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_ext.config.broken import Rule
from grpo_ext.config.launch import world_size


@dataclass(frozen=True)
class _Batch:
    """The settings that make a generation batch, as they are or as they might be."""

    per_device_train_batch_size: int
    processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int | None
    generation_batch_size: int | None
    num_generations: int
    whole_steps: bool
    """Whether an optimizer step may not mix generations."""

    @property
    def per_step(self) -> int:
        return self.per_device_train_batch_size * self.processes

    @property
    def steps(self) -> int:
        """Micro-batches of a generation."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.per_step
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def sound(self) -> bool:
        """Whether it can be trained with."""
        whole = self.generation_batch_size is None or self.generation_batch_size % self.per_step == 0
        fits = self.steps > 0 and self.per_step * self.steps % self.num_generations == 0
        return whole and fits and not (self.whole_steps and self.steps % self.gradient_accumulation_steps)


def _batch_of(config: Any) -> _Batch:
    return _Batch(
        config.per_device_train_batch_size,
        world_size(),
        config.gradient_accumulation_steps,
        config.steps_per_generation,
        config.generation_batch_size,
        config.num_generations,
        config.loss_defaults == "paper",
    )


def _with(batch: _Batch, name: str, value: Any) -> _Batch:
    return replace(batch, **{name: value})


def _nearest(value: int, sound: Mapping[int, bool]) -> list[int]:
    """Of what is sound, the last below `value` and the first above it."""
    works = sorted(n for n, fits in sound.items() if fits)
    return [*[n for n in works if n < value][-1:], *[n for n in works if n > value][:1]]


def _candidates(batch: _Batch, name: str, start: int) -> range:
    """Enough values of a setting for a sound one to be among them, if there is one."""
    g, accumulation = batch.num_generations, batch.gradient_accumulation_steps
    if name == "num_generations":
        return range(2, batch.per_step * batch.steps + 1)
    if name == "generation_batch_size":
        most = start + math.lcm(g, batch.per_step * accumulation)
        return range(batch.per_step, most + 1, batch.per_step)
    return range(1, start + g * accumulation + 1)


def _cures(batch: _Batch, *names: str, evaluated: int | None = None) -> str:
    """Values near those that are set, of each setting alone, with which all of the arithmetic works."""
    words = []
    for name in names:
        value = getattr(batch, name)
        start = value if value is not None else batch.steps
        sound = {n: _with(batch, name, n).sound for n in _candidates(batch, name, start) if n != value}
        if name == "num_generations" and evaluated:
            sound = {n: fits and evaluated % n == 0 for n, fits in sound.items()}
        if near := " or ".join(map(str, _nearest(start, sound))):
            words.append(f"--num_processes {near}" if name == "processes" else f"{name} {near}")
    return f"Nearest that work: {'; or '.join(words)}."


_SIZES = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "steps_per_generation")


def batch_problems(config: Any) -> Iterator[str]:
    """Whether generations hold whole groups, and optimizer steps divide them.

    One matter: the sizes that would work are computed from all of them.
    """
    batch = _batch_of(config)
    generation_batch, steps, per_step = batch.generation_batch_size, batch.steps_per_generation, batch.per_step
    micro_batch = f"{batch.per_device_train_batch_size} x {batch.processes}"
    evaluated = config.eval_strategy != "no"
    held = (
        config.per_device_eval_batch_size * batch.processes if evaluated and not config.num_generations_eval else None
    )
    if generation_batch is not None and steps is not None and generation_batch != per_step * steps:
        yield (
            f"generation_batch_size={generation_batch} contradicts steps_per_generation={steps}: "
            f"per_device_train_batch_size x processes x steps_per_generation = {micro_batch} x {steps} = "
            f"{per_step * steps}. Set one of them."
        )
        return
    if generation_batch is not None and generation_batch % per_step:
        yield (
            f"generation_batch_size={generation_batch} is not a multiple of per_device_train_batch_size x processes = "
            f"{micro_batch} = {per_step}. {_cures(batch, 'generation_batch_size')}"
        )
        return
    of_steps = "steps_per_generation" if generation_batch is None else "generation_batch_size"
    if per_step * batch.steps % batch.num_generations:
        sizes = _SIZES if generation_batch is None else ("generation_batch_size", "num_generations")
        yield (
            f"num_generations={batch.num_generations} does not divide the generation batch: "
            f"per_device_train_batch_size x processes x steps_per_generation = {micro_batch} x {batch.steps} = "
            f"{per_step * batch.steps} completions. {_cures(batch, *sizes, 'processes', evaluated=held)}"
        )
    elif batch.whole_steps and batch.steps % batch.gradient_accumulation_steps:
        yield (
            f"steps_per_generation={batch.steps} is not a multiple of gradient_accumulation_steps="
            f"{batch.gradient_accumulation_steps}: an optimizer step would mix generations and its denominators "
            f"would not be known. {_cures(batch, of_steps, 'gradient_accumulation_steps')}"
        )


def _eval_batch(config: Any) -> Iterator[str]:
    if config.eval_strategy != "no":
        yield from eval_batch_problems(config)


def eval_batch_problems(config: Any) -> Iterator[str]:
    """Whether the evaluation batch holds whole groups."""
    g, size = config.num_generations_eval or config.num_generations, config.per_device_eval_batch_size
    total = size * world_size()
    if total % g:
        sizes = _nearest(size, {n: n * world_size() % g == 0 for n in range(1, size + g + 1)})
        groups = _nearest(g, {n: total % n == 0 for n in range(1, total + 1)})
        yield (
            f"per_device_eval_batch_size={size}: x {world_size()} processes = {total} is not a multiple of the {g} "
            "completions generated per prompt in evaluation. Nearest that work: per_device_eval_batch_size "
            f"{' or '.join(map(str, sizes))}; or num_generations_eval {' or '.join(map(str, groups))}."
        )


BATCH_RULES: tuple[Rule, ...] = (batch_problems, _eval_batch)


def too_few(config: Any, rows: int) -> Iterator[str]:
    """Whether training data make up one generation."""
    prompts, one_generation = prompts_of_one_generation(config)
    if rows < prompts:
        batch = replace(_batch_of(config), generation_batch_size=None)
        sizes = [replace(batch, per_device_train_batch_size=n) for n in range(1, batch.per_device_train_batch_size)]
        fitting = [b for b in sizes if b.sound and b.per_step * b.steps <= rows * b.num_generations]
        smaller = (
            f", for example per_device_train_batch_size: {fitting[-1].per_device_train_batch_size}" if fitting else ""
        )
        yield (
            f"train_dataset has {rows} rows, fewer than {one_generation}: stock TRL would train 0 steps. Add rows or "
            f"lower the batch size{smaller}."
        )


def prompts_of_one_generation(config: Any) -> tuple[int, str]:
    """How many, and in words."""
    prompts = (config.generation_batch_size or 0) // (config.num_generations or 1)
    return prompts, (
        f"the {prompts} prompts of one generation (generation_batch_size {config.generation_batch_size} / "
        f"num_generations {config.num_generations})"
    )
