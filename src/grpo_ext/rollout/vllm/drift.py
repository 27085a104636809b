"""The drift check: after each push, compare the sampler's log-probabilities of its samples with the policy's."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.truncation import reshaping
from grpo_ext.errors import RolloutDrift

if TYPE_CHECKING:
    from grpo_ext.rollout.vllm.generation import Generation

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 0.02, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Nats per token, by the coarser dtype of the two sides. Working pairs stay well below: 0.005 was seen in float32."""
HUGE = 1.0
"""Nats per token that only another model, tokenizer or prompt explains."""
WINDOW = 8
"""Pushes over which the trend is taken."""


@dataclass(frozen=True)
class Drift:
    """Difference d = log p(sampler) - log p(policy) of the tokens of a micro-batch, in nats per token.

    Attributes:
        tokens: number of tokens that both sides scored.
        mean: mean of |d|, the figure that `rollout_drift` limits.
        max: maximum of |d|.
        bias: mean of d; as large as `mean` where sampling is truncated.
    """

    tokens: int
    mean: float
    max: float
    bias: float

    @classmethod
    def of(
        cls, policy: Float[Tensor, "B T"], sampler: Float[Tensor, "B T"], mask: Tensor, accelerator: Accelerator
    ) -> "Drift":
        """Measure over the active tokens of all processes; NaN marks tokens that the sampler did not score."""
        active = mask.bool() & ~sampler.isnan()
        d = sampler[active].double() - policy[active].double()
        sums = torch.stack([d.new_tensor(float(d.numel())), d.abs().sum(), d.sum()])
        largest = d.abs().max() if d.numel() else d.new_zeros(())
        count, distance, bias = accelerator.reduce(sums).tolist()
        n = max(count, 1.0)
        return cls(int(count), distance / n, accelerator.gather(largest[None]).max().item(), bias / n)


def tolerance(*dtypes: torch.dtype) -> float:
    """Return the tolerance for the coarsest of `dtypes`."""
    return max(TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]) for dtype in dtypes)


class DriftCheck:
    """Compares the sampler with the policy whose weights were pushed to it.

    Attributes:
        due: whether a generation has not been compared yet; the trainer sets it.
        first: drift of the first push.
        history: drifts of the last `WINDOW` pushes.
    """

    def __init__(self, args: GRPOExtConfig, sampler: "Generation") -> None:
        computes = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else sampler.policy_dtype
        self.dtypes = computes, sampler.sampler_dtype
        self.tolerance = tolerance(*self.dtypes) if args.rollout_drift is None else args.rollout_drift
        self.sampling = reshaping(args)
        self.stops = args.rollout_drift_action == "stop"
        self.sampler, self.due, self._explained = sampler, False, False
        self.first: Drift | None = None
        self.history: deque[Drift] = deque(maxlen=WINDOW)

    def check(self, logps: Tensor, inputs: Mapping[str, Any], accelerator: Accelerator) -> dict[str, float]:
        """Return the figures to log; warn if the drift exceeds the tolerance, at length the first time.

        Args:
            logps: the policy's log-probabilities [batch, time], from before the optimizer step.
            inputs: the micro-batch, with the sampler's log-probabilities.
            accelerator: combines the figures of all processes.

        Raises:
            RolloutDrift: the tolerance is exceeded and `rollout_drift_action` is 'stop'; on all processes.
        """
        self.due = False
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self.add(Drift.of(logps, inputs["sampling_per_token_logps"], mask, accelerator))
        last = self.history[-1]
        if not last.mean <= self.tolerance:  # or NaN
            if self.stops:
                raise RolloutDrift(self.diagnosis())
            logger.warning(self.headline() if self._explained else self.diagnosis())
            self._explained = True
        return {
            "sampling/drift_mean": last.mean,
            "sampling/drift_max": last.max,
            "sampling/drift_trend": self.trend,
            "sampling/weight_sync_seconds": self.sampler.sync_seconds,
            "sampling/weight_sync_mib": self.sampler.sync_bytes / 2**20,
            **({} if (share := self.sampler.push_rounding) is None else {"sampling/push_rounding": share}),
        }

    def add(self, drift: Drift) -> None:
        """Append a measurement."""
        self.first = self.first or drift
        self.history.append(drift)

    def to_list(self) -> list[list[float]]:
        """Return the first measurement and those of the window, for a checkpoint."""
        return [list(astuple(drift)) for drift in (self.first, *self.history) if drift is not None]

    def load(self, measured: list[list[float]]) -> None:
        """Restore what `to_list` returned; checkpoints of earlier versions have further figures."""
        drifts = [Drift(int(tokens), *figures[:3]) for tokens, *figures in measured]
        self.first, self.history = next(iter(drifts), None), deque(drifts[1:], maxlen=WINDOW)

    @property
    def trend(self) -> float:
        """Least-squares slope of the mean drift, in nats per push."""
        middle = (len(self.history) - 1) / 2
        rise = sum((i - middle) * drift.mean for i, drift in enumerate(self.history))
        return rise / (sum((i - middle) ** 2 for i in range(len(self.history))) or 1.0)

    def headline(self) -> str:
        """Return the last measurement as a sentence."""
        last = self.history[-1]
        return (
            f"Sampler and policy disagree: mean |log p(sampler) - log p(trainer)| = {last.mean:.3g} nats per token "
            f"over {last.tokens} tokens (max {last.max:.3g}), rollout_drift allows {self.tolerance:g}."
        )

    def diagnosis(self) -> str:
        """Return the headline and the possible causes, with an arrow at the likeliest."""
        assert self.first is not None
        first, last, trend = self.first.mean, self.history[-1], f"trend {self.trend:+.3g} per push"
        sampling = ", ".join(f"{name}={value}" for name, value in self.sampling.items()) or "none set"
        dtypes = "trainer {}, sampler {}".format(*(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
        grown = last.mean > 3 * max(first, 1e-6) or math.isnan(last.mean)
        causes = {
            f"sampling parameters that truncate or rescale ({sampling}): the sampler gives its samples "
            f"{last.bias:+.3f} nats more than the trainer does, on average. Set top_p 1, top_k 0, min_p 0, "
            "repetition_penalty 1, and start the server with --logprobs-mode processed_logprobs.": (
                bool(self.sampling) and last.bias > 0.5 * last.mean
            ),
            f"another model, tokenizer or chat template, or weights of an earlier run: {first:.3g} nats at the first "
            f"push (huge from {HUGE:g} on). Compare both sides by grpo-ext check.": first > HUGE,
            f"stale weights: {first:.3g} nats at the first push, {last.mean:.3g} now, {trend}. The weights that were "
            "pushed did not arrive.": first <= HUGE and grown and self.trend > 0,
            f"dtype or kernels ({dtypes}): {first:.3g} nats from the first push on, {trend}. Give both sides one "
            "dtype, or raise rollout_drift.": self.tolerance < first <= HUGE and last.mean < 2 * first,
        }
        likely = next((text for text, fits in causes.items() if fits), None)
        lines = [] if likely is None else [f"  -> {likely}"]
        return "\n".join([self.headline(), *lines, *(f"     {text}" for text in causes if text != likely)])
