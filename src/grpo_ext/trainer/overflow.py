"""Find weights that have overflowed, before they are saved or sampled from.

A step may overflow although all of its gradients were finite, so the check of gradients does not find it.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from grpo_ext.errors import NonFiniteError
from grpo_ext.trainer.checkpoints.processes import everywhere, local

LARGEST = 1e18
"""Absolute value above which a weight counts as overflowed: the product of two exceeds float32 and bfloat16."""
_CURE = "Lower learning_rate or train in another precision, and resume from the last checkpoint."


class Steps(Protocol):
    """Steps that are done, and steps in all."""

    global_step: int
    max_steps: int


def overflowed(weights: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight that holds NaN, inf or a value beyond LARGEST; one device sync."""
    sizes = largest_by_name(weights)
    if not sizes or torch.stack(list(sizes.values())).max() <= LARGEST:  # False where the maximum is NaN
        return None
    return next(name for name, size in sizes.items() if not size <= LARGEST)


def largest_by_name(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the largest absolute value of each floating-point weight, as scalars on the first weight's device.

    Quantized weights are left out: torch has no norm of numbers of 8 bits, nor of tensor types for packed ones.
    """
    floating = [(name, w.detach()) for name, w in weights if w.is_floating_point() and w.numel()]
    floating = [(name, w) for name, w in floating if w.dtype.itemsize > 1 and type(w) is Tensor]
    return {n: torch.linalg.vector_norm(w, math.inf).to(floating[0][1].device, torch.float32) for n, w in floating}


def check_weights(model: nn.Module, steps: Steps) -> None:
    """Check the trained weights; before the first step, all weights.

    Raises:
        NonFiniteError: a weight is NaN, inf or beyond LARGEST; on all processes.
    """
    step = steps.global_step
    checked = [(name, local(p)) for name, p in model.named_parameters() if p.requires_grad or not step]
    named = next((name for name in everywhere(overflowed(checked)) if name is not None), None)
    if named is None:
        return
    if step == 0:
        raise NonFiniteError(
            f"The weights {named} hold NaN, inf or values beyond {LARGEST:g} before the first step. Load a sound "
            "model, or load it in another precision (dtype)."
        )
    raise NonFiniteError(
        f"After step {step} of {steps.max_steps} the weights {named} hold NaN, inf or values beyond {LARGEST:g}, "
        f"although every gradient was finite: the step was too large. These weights are not saved. {_CURE}"
    )


@contextmanager
def sampling(model: nn.Module, steps: Steps) -> Iterator[None]:
    """Check the weights, then replace torch's error about probabilities by one with step, weight and cure.

    Raises:
        NonFiniteError: a weight has overflowed, or the logits hold NaN or inf.
    """
    check_weights(model, steps)
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        sizes = largest_by_name([(name, local(p)) for name, p in model.named_parameters()])
        name, size = max(sizes.items(), key=lambda item: item[1].item())
        raise NonFiniteError(
            f"After step {steps.global_step} of {steps.max_steps} the policy's logits hold NaN or inf, so no "
            f"completion can be sampled. Its largest weight is {size.item():.3g}, in {name}. {_CURE}"
        ) from error
