"""What would make the steps of a probe faster or smaller, by the parts that were measured."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from grpo_ext.commands.memory import gib
from grpo_ext.config.grpo_config import GRPOExtConfig

MOST = 3
"""Most sentences of advice."""
_ROLLOUT, _REWARDS, _LOGPS, _OPTIMIZER = 0.5, 0.2, 0.2, 0.25
"""Shares of a step from which a part is worth a sentence."""
_CUT, _SILENT, _FULL = 0.2, 0.5, 0.85
"""Shares of completions that are cut off, of groups without an advantage, of the device's memory, likewise."""


class Measured(NamedTuple):
    """What a probe has measured.

    Attributes:
        seconds: of each part of a step; they add up to the step.
        peak: most bytes of the device, or of the process on a CPU.
        before: bytes of the process before the model was loaded.
        throughput: tokens a second.
        length: mean tokens of a completion.
        cut: share of completions that `max_completion_length` has cut off.
        silent: share of groups whose completions have equal rewards.
    """

    seconds: Mapping[str, float]
    peak: int
    before: int = 0
    throughput: float = 0.0
    length: float = 0.0
    cut: float = 0.0
    silent: float = 0.0


def helpful(found: Measured, training: GRPOExtConfig, device: int | None) -> list[str]:
    """Return at most three sentences of advice, the first those on which others depend.

    Args:
        found: what was measured.
        training: the recipe's settings.
        device: bytes of the device; None if it is not known.
    """
    lines = (*_memory(found, training, device), *_completions(found, training), *_parts(found, training))
    return [*lines[:MOST]] or ["nothing stands out: no part, no length and no memory is near a limit."]


def _memory(found: Measured, training: GRPOExtConfig, device: int | None) -> Iterator[str]:
    if device is None or found.peak < _FULL * device:
        return
    cures = ["use_peft: true with load_in_4bit"] if not training.use_cpu else ["use_peft: true"]
    if training.micro_batch_tokens is None:
        cures.insert(0, "micro_batch_tokens, which keeps the gradient")
    if not training.gradient_checkpointing:
        cures.insert(0, "gradient_checkpointing: true")
    yield f"memory is near its limit ({gib(found.peak)} of {gib(device)}): {', or '.join(cures)}."


def _completions(found: Measured, training: GRPOExtConfig) -> Iterator[str]:
    if found.cut >= _CUT:
        yield (
            f"{found.cut:.0%} of the completions are cut off at max_completion_length="
            f"{training.max_completion_length}, mostly before an answer: raise it, or ask for short ones."
        )
    if found.silent >= _SILENT:
        yield (
            f"{found.silent:.0%} of the groups have equal rewards, and train nothing: prompts of another difficulty, "
            "a larger num_generations, or dynamic_sampling. Steps whose groups differ take longer than these."
        )


def _parts(found: Measured, training: GRPOExtConfig) -> Iterator[str]:
    """Yield advice for parts of a step that take much of it."""
    whole = sum(found.seconds.values()) or 1.0
    share = {part: seconds / whole for part, seconds in found.seconds.items()}
    if share["rollout"] >= _ROLLOUT and not training.use_vllm and not training.rollout_ahead:
        cure = "free cores (rollout_engine: process)" if training.use_cpu else "a vLLM engine (use_vllm: true)"
        yield f"rollouts are {share['rollout']:.0%} of a step: {cure}, or a lower max_completion_length."
    if share["rewards"] >= _REWARDS:
        yield f"rewards are {share['rewards']:.0%} of a step: more reward_workers, or rollout_ahead: 1."
    if share["logps"] >= _LOGPS and training.beta:
        yield f"log-probabilities before the loss are {share['logps']:.0%} of a step: beta: 0 has no reference."
    if share["optimizer"] >= _OPTIMIZER:
        yield f"the optimizer is {share['optimizer']:.0%} of a step: use_peft: true, or more completions a step."
    if training.gradient_checkpointing and share["forward_backward"] >= _ROLLOUT:
        part = f"forward and backward are {share['forward_backward']:.0%} of a step"
        yield f"{part}: gradient_checkpointing: false leaves out a second forward, where memory is enough."
