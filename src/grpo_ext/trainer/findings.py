"""Find the first non-finite tensor of a micro-batch, in order of computation."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_ext.packing.micro_batches import live_mask

BEFORE_THE_FORWARD = (
    "advantages",
    "importance_sampling_ratio",
    "ref_per_token_logps",
    "old_per_token_logps",
)
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
Batches of the step in which NaN or inf was found, before optimizer step {step}; one file for each rank.
`grpo-ext replay` on this folder computes the step again, under any loss. By hand:

    import torch
    kept = torch.load("rank_0.pt")
    kept["findings"]       the first bad tensor of this rank, its micro-batch and rows; empty where it had none
    kept["micro_batches"]  each micro-batch of the step: token ids, masks, advantages, log-probabilities, loss
    kept["parameters"]     names of the parameters whose gradient was not finite
    kept["rewards"]        and prompts, completions, reward_names instead, where a reward returned it

Weights and optimizer were not touched: the last checkpoint has the weights of its own step.
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
        mask = live_mask(self.inputs).bool() if "completion_mask" in self.inputs else None
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
