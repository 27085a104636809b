"""Batch arithmetic: whole groups in every generation, whole generations in every optimizer step, and pieces."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.launch import world_size
from grpo_ext.config.rules import Conflict, Rule, plain
from grpo_ext.errors import ABSENT, Problem


@dataclass(frozen=True)
class _GenerationBatch:
    """The settings that make a generation batch, as they are or as they might be."""

    per_device_train_batch_size: int
    processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int | None
    generation_batch_size: int | None
    num_generations: int
    whole_steps: bool
    """True if an optimizer step may not mix generations."""

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
    def per_generation(self) -> int:
        return self.per_step * self.steps

    @property
    def sound(self) -> bool:
        """True if these sizes can be trained with."""
        whole = self.generation_batch_size is None or self.generation_batch_size % self.per_step == 0
        fits = self.steps > 0 and self.per_generation % self.num_generations == 0
        return whole and fits and not (self.whole_steps and self.steps % self.gradient_accumulation_steps)


def _batch_of(config: GRPOExtArguments) -> _GenerationBatch:
    return _GenerationBatch(
        config.per_device_train_batch_size,
        world_size(),
        config.gradient_accumulation_steps,
        config.steps_per_generation,
        config.generation_batch_size,
        config.num_generations or 1,
        config.loss_defaults == "paper",
    )


def micro_batches_of_one_generation(config: GRPOExtArguments) -> int:
    """Return the micro-batches of a generation on each process."""
    return _batch_of(config).steps


def _nearest(value: int, sound: Mapping[int, bool]) -> list[int]:
    """Return the last sound value below `value` and the first above it."""
    works = sorted(n for n, fits in sound.items() if fits)
    return [*[n for n in works if n < value][-1:], *[n for n in works if n > value][:1]]


def _candidates(batch: _GenerationBatch, name: str, start: int) -> range:
    """Return enough values of a setting for a sound one to be among them, if there is one."""
    g, accumulation = batch.num_generations, batch.gradient_accumulation_steps
    if name == "num_generations":
        return range(2, batch.per_step * batch.steps + 1)
    if name == "generation_batch_size":
        most = start + math.lcm(g, batch.per_step * accumulation)
        return range(batch.per_step, most + 1, batch.per_step)
    return range(1, start + g * accumulation + 1)


def _cures(batch: _GenerationBatch, *names: str, evaluated: int | None = None) -> str:
    """Return the nearest values of each single setting with which all of the arithmetic works."""
    words = []
    for name in names:
        value = getattr(batch, name)
        start = value if value is not None else batch.steps
        sound = {
            n: replace(batch, **dict[str, Any]({name: n})).sound for n in _candidates(batch, name, start) if n != value
        }
        if name == "num_generations" and evaluated:
            sound = {n: fits and evaluated % n == 0 for n, fits in sound.items()}
        if near := " or ".join(map(str, _nearest(start, sound))):
            words.append(f"--num_processes {near}" if name == "processes" else f"{name} {near}")
    return f"Nearest that work: {'; or '.join(words)}."


_SIZES = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "steps_per_generation")


def batch_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse generations that do not hold whole groups, and optimizer steps that do not divide them.

    One matter: the sizes that would work are computed from all of them.
    """
    batch = _batch_of(config)
    generation_batch, steps, per_step = batch.generation_batch_size, batch.steps_per_generation, batch.per_step
    processes = f"{batch.per_device_train_batch_size} x {batch.processes}"
    completions = f"{processes} x {batch.steps} = {per_step * batch.steps} completions"
    product = "per_device_train_batch_size x processes x steps_per_generation"
    if generation_batch is not None and steps is not None and generation_batch != per_step * steps:
        reason = f"{product} = {processes} x {steps} = {per_step * steps}"
        beside = {"steps_per_generation": steps}
        yield Problem("generation_batch_size", generation_batch, reason, "Set one of them.", beside)
    elif generation_batch is not None and generation_batch % per_step:
        reason = f"it is not a multiple of per_device_train_batch_size x processes = {processes} = {per_step}"
        yield Problem("generation_batch_size", generation_batch, reason, _cures(batch, "generation_batch_size"))
    elif per_step * batch.steps % batch.num_generations:
        sizes = _SIZES if generation_batch is None else ("generation_batch_size", "num_generations")
        evaluated = config.eval_strategy != "no" and not config.num_generations_eval
        held = config.per_device_eval_batch_size * batch.processes if evaluated else None
        reason = f"it does not divide the generation batch: {product} = {completions}"
        cure = _cures(batch, *sizes, "processes", evaluated=held)
        yield Problem("num_generations", batch.num_generations, reason, cure)
    if batch.whole_steps and batch.steps % batch.gradient_accumulation_steps:
        size = "steps_per_generation" if generation_batch is None else "generation_batch_size"
        yield Problem(
            "steps_per_generation",
            batch.steps,
            "it is not a multiple of gradient_accumulation_steps, so an optimizer step would mix generations and its "
            "denominators would not be known",
            _cures(batch, size, "gradient_accumulation_steps"),
            {"gradient_accumulation_steps": batch.gradient_accumulation_steps},
        )


def _eval_batch(config: GRPOExtArguments) -> Iterator[Problem]:
    if config.eval_strategy != "no":
        yield from eval_batch_problems(config)


def eval_batch_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse evaluation batches that do not hold whole groups."""
    g = config.num_generations_eval or config.num_generations or 1
    size = config.per_device_eval_batch_size
    total = size * world_size()
    if total % g:
        sizes = _nearest(size, {n: n * world_size() % g == 0 for n in range(1, size + g + 1)})
        groups = _nearest(g, {n: total % n == 0 for n in range(1, total + 1)})
        yield Problem(
            "per_device_eval_batch_size",
            size,
            f"x {world_size()} processes = {total} is not a multiple of the {g} completions generated per prompt in "
            "evaluation",
            f"Nearest that work: per_device_eval_batch_size {' or '.join(map(str, sizes))}; or num_generations_eval "
            f"{' or '.join(map(str, groups))}.",
        )


PIECE_RULES: tuple[Rule, ...] = (
    Conflict(
        "micro_batch_tokens loss_aggregation",
        lambda c: c.micro_batch_tokens is not None and not c.objective.additive,
        "loss_aggregation {c.objective.aggregation!r} depends on which rows are in a micro-batch",
        "Set loss_aggregation: token-mean, or unset micro_batch_tokens.",
    ),
    Conflict(
        "micro_batch_tokens top_entropy_quantile",
        lambda c: c.micro_batch_tokens is not None and c.top_entropy_quantile < 1,
        "the quantile is over the tokens of a micro-batch",
        "Set top_entropy_quantile: 1.0, or unset micro_batch_tokens.",
    ),
    Conflict(
        "micro_batch_tokens loss_defaults",
        lambda c: (
            c.micro_batch_tokens is not None
            and c.loss_defaults == "trl"
            and (c.entropy_coef or c.use_adaptive_entropy)
        ),
        "stock TRL's entropy bonus is a mean over a micro-batch",
        "Set loss_defaults: paper, or unset micro_batch_tokens.",
    ),
    Conflict(
        "micro_batch_tokens optim",
        lambda c: c.micro_batch_tokens is not None and plain(c.optim) in ("lomo", "adalomo"),
        "it updates the weights in its backward pass, before the last piece is computed",
        "Choose another optimizer, or unset micro_batch_tokens.",
    ),
)
"""What `micro_batch_tokens` excludes."""
BATCH_RULES: tuple[Rule, ...] = (batch_problems, _eval_batch, *PIECE_RULES)


def too_few(config: GRPOExtArguments, rows: int) -> Iterator[Problem]:
    """Refuse training data that do not make up one generation."""
    prompts, one_generation = prompts_of_one_generation(config)
    if rows < prompts:
        batch = replace(_batch_of(config), generation_batch_size=None)
        sizes = [replace(batch, per_device_train_batch_size=n) for n in range(1, batch.per_device_train_batch_size)]
        fits = [
            b.per_device_train_batch_size for b in sizes if b.sound and b.per_generation <= rows * b.num_generations
        ]
        smaller = f", for example per_device_train_batch_size: {fits[-1]}" if fits else ""
        reason = f"{rows} rows are fewer than {one_generation}, so stock TRL would train 0 steps"
        yield Problem("train_dataset", ABSENT, reason, f"Add rows or lower the batch size{smaller}.")


def prompts_of_one_generation(config: GRPOExtArguments) -> tuple[int, str]:
    """Return the number of prompts of one generation, and the words for it."""
    prompts = (config.generation_batch_size or 0) // (config.num_generations or 1)
    return prompts, (
        f"the {prompts} prompts of one generation (generation_batch_size {config.generation_batch_size} / "
        f"num_generations {config.num_generations})"
    )
