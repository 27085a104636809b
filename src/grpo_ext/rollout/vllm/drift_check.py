"""The drift check of a trainer with vLLM: once after every push, at no forward of its own."""

import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_ext.errors import RolloutDrift
from grpo_ext.rollout.vllm.drift import Drift, DriftMonitor, moments, tolerance

logger = logging.getLogger(__name__)

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Values that leave the sampler's distribution as it is."""


class HasSampler(Protocol):
    """A trainer whose completions come from vLLM."""

    accelerator: Any
    args: Any
    vllm_generation: Any
    _metrics: Any


def monitor_for(trainer: HasSampler) -> DriftMonitor:
    """With the tolerance that suits the dtypes of both sides."""
    generation, args = trainer.vllm_generation, trainer.args
    computes = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else generation.policy_dtype
    dtypes = computes, generation.sampler_dtype
    sampling = {name: getattr(args, name) for name, value in NEUTRAL.items() if getattr(args, name) != value}
    limit = tolerance(*dtypes) if args.rollout_drift is None else args.rollout_drift
    ours, samplers = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return DriftMonitor(limit, f"trainer {ours}, sampler {samplers}", sampling)


class DriftCheck:
    """Compares the sampler with the policy that has just been pushed to it.

    Attributes:
        due: whether completions have come since the last comparison.
    """

    def __init__(self, trainer: HasSampler) -> None:
        """For a trainer whose engine is up."""
        self.trainer, self.monitor = trainer, monitor_for(trainer)
        self.due = False

    def __call__(self, logps: Tensor, inputs: dict[str, Any]) -> None:
        """Log the drift, and say so where it is beyond the tolerance.

        Args:
            logps: the policy's log-probabilities [batch, time], from before the optimizer step.
            inputs: the micro-batch, with the sampler's.

        Raises:
            RolloutDrift: it is, and `rollout_drift_action` is 'stop'; on all processes.
        """
        self.due = False
        trainer, generation = self.trainer, self.trainer.vllm_generation
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        sums, largest = moments(logps, inputs["sampling_per_token_logps"], mask)
        accelerator = trainer.accelerator
        drift = Drift.of(accelerator.reduce(sums), accelerator.gather(largest[None]).max().item())
        self.monitor.add(drift)
        for name, value in (
            ("drift_mean", drift.mean),
            ("drift_max", drift.max),
            ("drift_trend", self.monitor.trend),
            ("weight_sync_seconds", generation.sync_seconds),
            ("weight_sync_mib", generation.sync_bytes / 2**20),
        ):
            trainer._metrics["train"][f"sampling/{name}"].append(value)
        if self.monitor.exceeded:
            if trainer.args.rollout_drift_action == "stop":
                raise RolloutDrift(self.monitor.diagnosis())
            logger.warning(self.monitor.warning())
