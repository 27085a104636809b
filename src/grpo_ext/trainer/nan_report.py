"""Find the first non-finite tensor of a micro-batch, in order of computation, and weights that have overflowed.

A step may overflow although all of its gradients were finite, so the check of gradients does not find it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import TrainerState

from grpo_ext.errors import NonFiniteError
from grpo_ext.packing.images import IMAGES
from grpo_ext.packing.micro_batches import active_mask
from grpo_ext.packing.routes import ROUTES
from grpo_ext.packing.sampling_support import SUPPORTS
from grpo_ext.safe_reading import replacing
from grpo_ext.trainer.checkpoints.manifest import sync
from grpo_ext.trainer.checkpoints.processes import everywhere, local

BEFORE_THE_FORWARD = ("advantages", "importance_sampling_ratio", "ref_per_token_logps", "old_per_token_logps")
ORDER = ("rewards", *BEFORE_THE_FORWARD, "per_token_logps", "per_token_loss", "loss", "gradient")
"""Tensors to check, in order of computation.

The sampler's log-probabilities are left out: NaN there marks a token that the sampler could not score. The importance
ratio and the off-policy mask, their only readers in the loss, count such a token as unchanged.
"""
NAMES = {
    "per_token_logps": "log-probabilities",
    "old_per_token_logps": "old log-probabilities",
    "ref_per_token_logps": "the reference's log-probabilities",
    "importance_sampling_ratio": "the sampler's importance ratios",
    "per_token_loss": "the loss of single tokens",
    "loss": "the loss",
}
HOW_TO_LOOK = """\
Batches of optimizer step {step}, in which NaN or inf was found; one file for each rank. Weights and optimizer were not
touched. torch.load("rank_0.pt") has `findings`, the first bad tensor of the rank, with `micro_batches` as the loss saw
them and `parameters` whose gradient was not finite; or `rewards`, with prompts and completions, where a reward
returned it.
"""


@dataclass(frozen=True)
class BadTensor:
    """The first tensor of a process that is not finite.

    Attributes:
        tensor: one of ORDER.
        name: the reward's or the parameter's.
        text: beginning of the first row's completion.
    """

    tensor: str
    rank: int
    value: str = "nan"
    name: str = ""
    micro_batch: int = 0
    rows: tuple[int, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        if self.tensor == "gradient":
            return f"{self.value} in the gradient{self.name and f' of {self.name}'}"
        if self.tensor == "rewards":
            return f"{self.value} returned by reward {self.name!r} on rank {self.rank}, {self._rows()}"
        what = NAMES.get(self.tensor, self.tensor)
        return f"{self.value} in {what} of micro-batch {self.micro_batch} on rank {self.rank}, {self._rows()}"

    def _rows(self) -> str:
        if not self.rows:
            return "in no particular row"
        shown = ", ".join(map(str, self.rows[:8])) + (", ..." if len(self.rows) > 8 else "")
        return f"row{'s' * (len(self.rows) > 1)} {shown} (the first begins {self.text!r})"


def in_order(finding: BadTensor) -> tuple[int, bool]:
    """Sort key: the earliest tensor first; gradients with a known parameter first (a shard may not hold it)."""
    return ORDER.index(finding.tensor), finding.tensor == "gradient" and not finding.name


@dataclass
class ObservedBatch:
    """A micro-batch, and the tensors that the loss computed from it."""

    inputs: dict[str, Any]
    computed: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield floating-point tensors in order of computation, with 0 where the mask is 0."""
        mask = active_mask(self.inputs).bool() if "completion_mask" in self.inputs else None
        logps = self.computed.get("per_token_logps")
        for name in ORDER:
            values = self.inputs.get(name) if name in BEFORE_THE_FORWARD else self.computed.get(name)
            if not isinstance(values, Tensor):
                continue
            if name == "old_per_token_logps" and logps is not None and values.data_ptr() == logps.data_ptr():
                continue  # the same tensor
            yield name, values if mask is None or values.shape != mask.shape else torch.where(mask, values, 0.0)

    def bad(self) -> Tensor:
        """Return on the device whether a tensor is not finite: its sum is finite if all of its terms are."""
        sums = [values.detach().sum(dtype=torch.float32) for _, values in self.tensors()]
        return ~torch.stack(sums).sum().isfinite()

    def first_bad(self) -> tuple[str, Tensor] | None:
        """Return name and values of the first tensor that is not finite."""
        return next(((name, v) for name, v in self.tensors() if not v.isfinite().all()), None)


def value_in(values: Tensor) -> str:
    """Return "nan" if there is a NaN among the values, else "inf"."""
    return "nan" if values.isnan().any() else "inf"


# Weights, before they are saved or sampled from.

LARGEST_WEIGHT = 1e18
"""Absolute value above which a weight counts as overflowed: the product of two exceeds float32 and bfloat16."""
_CURE = "Lower learning_rate or train in another precision, and resume from the last checkpoint."


def overflowed(weights: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight that holds NaN, inf or a value beyond LARGEST_WEIGHT; one device sync.

    No value exceeds the norm of all, which is several times faster than the largest one; it is NaN or inf with one.
    """
    if get_total_norm([w for _, w in _floating(weights)]).float() <= LARGEST_WEIGHT:  # float16 holds no such bound
        return None
    return next((name for name, size in largest_by_name(weights).items() if not size <= LARGEST_WEIGHT), None)


def largest_by_name(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the largest absolute value of each floating-point weight, as scalars on the first weight's device."""
    floating = _floating(weights)
    return {n: torch.linalg.vector_norm(w, math.inf).to(floating[0][1].device, torch.float32) for n, w in floating}


def _floating(weights: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Leave out quantized weights: torch has no norm of numbers of 8 bits, nor of tensor types for packed ones."""
    floating = [(name, w.detach()) for name, w in weights if w.is_floating_point() and w.numel()]
    return [(name, w) for name, w in floating if w.dtype.itemsize > 1 and type(w) is Tensor]


def check_weights(model: nn.Module, steps: TrainerState) -> None:
    """Check the trained weights; before the first step, all weights.

    Raises:
        NonFiniteError: a weight is NaN, inf or beyond LARGEST_WEIGHT; on all processes.
    """
    step = steps.global_step
    checked = [(name, local(p)) for name, p in model.named_parameters() if p.requires_grad or not step]
    named = next((name for name in everywhere(overflowed(checked)) if name is not None), None)
    if named is None:
        return
    if step == 0:
        raise NonFiniteError(
            f"The weights {named} hold NaN, inf or values beyond {LARGEST_WEIGHT:g} before the first step. Load a "
            "sound model, or load it in another precision (dtype)."
        )
    raise NonFiniteError(
        f"After step {step} of {steps.max_steps} the weights {named} hold NaN, inf or values beyond "
        f"{LARGEST_WEIGHT:g}, although every gradient was finite: the step was too large. These weights are not "
        f"saved. {_CURE}"
    )


@contextmanager
def sampling(model: nn.Module, steps: TrainerState) -> Iterator[None]:
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


def on_cpu(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a micro-batch's tensors on the CPU, its sampling supports, routes and images."""
    found: dict[str, Any] = {n: v.detach().cpu().clone() for n, v in batch.items() if isinstance(v, Tensor)}
    for name in {SUPPORTS, ROUTES} & batch.keys():
        found[name] = [of_row.cpu() for of_row in batch[name]]
    if IMAGES in batch:  # those of a prompt are one object for all its rows, on the disk too
        found[IMAGES] = batch[IMAGES]
    return found


def write(path: Path, dump: Mapping[str, Any]) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: the disk refuses.
        RuntimeError: the same, raised by torch.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        torch.save(dict(dump), aside)
        sync(aside)
