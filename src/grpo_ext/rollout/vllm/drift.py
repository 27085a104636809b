"""Whether the sampler is the policy: its log-probabilities of the sampled tokens against the trainer's."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

TOLERANCES = {torch.float32: 0.02, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Nats per token by the coarser dtype of the two sides. Sound pairs stay well below: .005 was seen in float32."""

HUGE = 1.0
"""Nats per token beyond which two models do not speak of the same text."""

WINDOW = 8
"""Pushes over which the trend is taken."""


def tolerance(*dtypes: torch.dtype) -> float:
    """The tolerance that suits the coarsest of `dtypes`."""
    return max(TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]) for dtype in dtypes)


def moments(
    trainer: Float[Tensor, "B T"], sampler: Float[Tensor, "B T"], mask: Tensor
) -> tuple[Float[Tensor, "7"], Float[Tensor, ""]]:
    """Sums that add up over processes, and the maximum, which does not.

    With x the trainer's and y the sampler's log-probability of a token, d = y - x: the number of tokens and the sums
    of abs d, d, d > 0, x, x^2, x y over tokens that are live and that the sampler has scored.
    """
    live = mask.bool() & ~sampler.isnan()
    x, y = trainer[live].double(), sampler[live].double()
    d = y - x
    sums = torch.stack([torch.tensor(float(d.numel())).to(d), d.abs().sum(), d.sum(), (d > 0).sum().to(d)])
    sums = torch.cat([sums, torch.stack([x.sum(), (x * x).sum(), (x * y).sum()])])
    return sums, d.abs().max() if d.numel() else d.new_zeros(())


@dataclass(frozen=True)
class Drift:
    """What one generation batch shows; nats per token.

    `bias` is the mean of sampler minus trainer, `surer` the share of tokens that the sampler gives more probability,
    `slope` the regression of sampler on trainer, which a different temperature makes other than 1.
    """

    tokens: int
    mean: float
    max: float
    bias: float
    surer: float
    slope: float

    @classmethod
    def of(cls, sums: Float[Tensor, "7"], largest: float) -> "Drift":
        """From the `moments` of all processes."""
        count, distance, bias, surer, x, xx, xy = sums.tolist()
        n = max(count, 1.0)
        variance = xx - x * x / n
        covariance = xy - x * (x + bias) / n
        slope = covariance / variance if variance > 1e-9 * n else 1.0
        return cls(int(count), distance / n, largest, bias / n, surer / n, slope)


@dataclass
class DriftMonitor:
    """The drift after each push, its trend, and what it tells.

    Attributes:
        tolerance: of the mean, in nats per token; infinite for none.
        dtypes: of both sides, for the message.
        sampling: what truncates or rescales the sampler's distribution, such as {'top_p': 0.9}.
    """

    tolerance: float
    dtypes: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    history: deque[Drift] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first: Drift | None = None
    explained: bool = False

    def add(self, drift: Drift) -> None:
        """Keep one measurement."""
        self.first = self.first or drift
        self.history.append(drift)

    def to_list(self) -> list[list[float]]:
        """The first measurement and those of the window, for a checkpoint."""
        return [list(astuple(drift)) for drift in (self.first, *self.history) if drift is not None]

    def load(self, measured: list[list[float]]) -> None:
        """From what `to_list` gave."""
        drifts = [Drift(int(tokens), *figures) for tokens, *figures in measured]
        self.first, self.history = next(iter(drifts), None), deque(drifts[1:], maxlen=WINDOW)

    @property
    def trend(self) -> float:
        """Least-squares slope of the mean drift, in nats per push."""
        n = len(self.history)
        if n < 2:
            return 0.0
        middle = (n - 1) / 2
        rise = sum((i - middle) * drift.mean for i, drift in enumerate(self.history))
        return rise / sum((i - middle) ** 2 for i in range(n))

    @property
    def exceeded(self) -> bool:
        """Whether the last measurement is beyond the tolerance, or no number at all."""
        return not self.history[-1].mean <= self.tolerance

    def warning(self) -> str:
        """What is wrong: in full the first time, the figure after that."""
        text = self.headline() if self.explained else self.diagnosis()
        self.explained = True
        return text

    def headline(self) -> str:
        """The figure."""
        last = self.history[-1]
        return (
            f"The sampler is not the policy: mean |log p(sampler) - log p(trainer)| = {last.mean:.3g} nats per token "
            f"over {last.tokens} tokens (max {last.max:.3g}), rollout_drift allows {self.tolerance:g}."
        )

    def diagnosis(self) -> str:
        """The figure and the causes, each with the figure of its test; an arrow leads to the likeliest."""
        assert self.first is not None
        first, last = self.first, self.history[-1]
        causes = [
            (
                self._truncated(last),
                f"sampling parameters that truncate or rescale ({self._sampling()}): the sampler is surer than the "
                f"trainer of {last.surer:.0%} of the tokens, by {last.bias:+.3f} nats on average; slope "
                f"{last.slope:.2f} (1 without). Set top_p 1, top_k 0, min_p 0, repetition_penalty 1, and start the "
                "server with --logprobs-mode processed_logprobs.",
            ),
            (
                first.mean > HUGE,
                f"another model, tokenizer or chat template, or an earlier run's weights: {first.mean:.3g} nats at "
                f"the first push (huge from {HUGE:g} on). Compare both sides by grpo-ext check.",
            ),
            (
                first.mean <= HUGE and self._stale(first, last),
                f"stale weights: {first.mean:.3g} nats at the first push, {last.mean:.3g} now, trend "
                f"{self.trend:+.3g} per push. The weights that were pushed did not arrive.",
            ),
            (
                self.tolerance < first.mean <= HUGE and last.mean < 2 * first.mean,
                f"dtype or kernels ({self.dtypes}): {first.mean:.3g} nats from the first push on, trend "
                f"{self.trend:+.3g} per push. Give both sides one dtype, or raise rollout_drift.",
            ),
        ]
        likely = next((text for fits, text in causes if fits), None)
        lines = [] if likely is None else [f"  -> {likely}"]
        lines += [f"     {text}" for _, text in causes if text != likely]
        return "\n".join([self.headline(), *lines])

    def _sampling(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.sampling.items()) or "none set"

    def _truncated(self, last: Drift) -> bool:
        one_sided = last.bias > 0.5 * last.mean and last.surer > 0.5
        return bool(self.sampling) and (one_sided or abs(last.slope - 1) > 0.1)

    def _stale(self, first: Drift, last: Drift) -> bool:
        grown = last.mean > 3 * max(first.mean, 1e-6) or math.isnan(last.mean)
        return grown and self.trend > 0
