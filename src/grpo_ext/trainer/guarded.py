"""GuardedTrainer: TRL's GRPOTrainer whose optimizer sees no NaN, and which leaves after a step when it is told to."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from grpo_ext.errors import NonFiniteError
from grpo_ext.trainer.checkpoints.agreement import everywhere
from grpo_ext.trainer.checkpoints.shards import local
from grpo_ext.trainer.checkpoints.writing import WritingTrainer
from grpo_ext.trainer.leaving import interrupted, leave_after_this_step, told_of_lost_ranks
from grpo_ext.trainer.nonfinite import SKIPPED, NonFiniteGuard
from grpo_ext.trainer.signals import signals

LARGEST = 1e18
"""Absolute value above which a weight counts as overflowed: the product of two exceeds float32 and bfloat16."""


def overflowed(weights: Sequence[tuple[str, Tensor]]) -> str | None:
    """Name of the first weight that holds NaN, inf or a value beyond LARGEST; waits for the device once."""
    sizes = largest_by_name(weights)
    if not sizes or torch.stack(list(sizes.values())).max() <= LARGEST:  # False where the maximum is NaN
        return None
    return next(name for name, size in sizes.items() if not size <= LARGEST)


def largest_by_name(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Largest absolute value of each floating-point weight, as scalars on the first weight's device.

    Weights of one byte (FP8) are left out: torch has no norm of them, and their largest value is 57344.
    """
    wide = [(name, w.detach()) for name, w in weights if w.is_floating_point() and w.dtype.itemsize > 1]
    floating = [(name, w) for name, w in wide if w.numel()]
    return {n: torch.linalg.vector_norm(w, math.inf).to(floating[0][1].device, torch.float32) for n, w in floating}


class GuardedTrainer(WritingTrainer):
    """`trl.GRPOTrainer` that looks at each micro-batch, decides before each step, and logs what was."""

    model: Any
    _guard: NonFiniteGuard
    _left_at: int | None = None
    """The step after which this run was told to end."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, to its end or until it is told to end.

        Raises:
            NonFiniteError: NaN or inf was found, and the run is to stop.
            RankLost: another process is gone.
            RunInterrupted: it was told to end, and has saved a checkpoint.
        """
        self._guard.start()
        self._left_at = None
        with signals.training(), told_of_lost_ranks(self.args):
            output = super().train(*args, **kwargs)
        if self._guard.requested:
            raise interrupted(self)
        self._guard.tell()
        return output

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, and watched."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return self._guard.watch(inputs, loss) if self.model.training else loss

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._guard.clip(model, self.args.max_grad_norm, partial(super()._clip_grad_norm, model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # max_grad_norm is 0
            grad_norm = self._guard.clip(model, math.inf, partial(super()._get_grad_norm, model))
        return super()._get_grad_norm(model, grad_norm)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        total = self._total_loss_scalar
        if self._guard.requested:
            leave_after_this_step(self)
        weights_alone = self.args.save_only_model and not self._guard.requested  # else nothing could go on from it
        with patch.object(self.args, "save_only_model", weights_alone):
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._guard.skipped_since_log and self._globalstep_last_logged == self.state.global_step:
            self._guard.skipped_since_log = False
            self._tr_loss.zero_()  # nan less nan is no 0
            self._total_loss_scalar = total

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._check_weights()
        super()._save_checkpoint(model, trial)

    def save_final(self, output_dir: str | Path) -> None:
        """Save the final model.

        Raises:
            NonFiniteError: a weight is NaN or inf, and nothing is written; on all processes.
        """
        self._check_weights()
        super().save_final(output_dir)

    def _check_weights(self) -> None:
        """Stop before weights that overflowed are saved or sampled from; a step may overflow from finite gradients.

        Raises:
            NonFiniteError: a weight is NaN, inf or beyond LARGEST; on all processes.
        """
        step, steps = self.state.global_step, self.state.max_steps
        checked = [(name, local(p)) for name, p in self.model.named_parameters() if p.requires_grad or not step]
        named = next((name for name in everywhere(overflowed(checked)) if name is not None), None)
        if named is None:
            return
        if step == 0:
            raise NonFiniteError(
                f"The weights {named} hold NaN, inf or values beyond {LARGEST:g} before the first step. Load a sound "
                "model, or load it in another precision (dtype)."
            )
        raise NonFiniteError(
            f"After step {step} of {steps} the weights {named} hold NaN, inf or values beyond {LARGEST:g}, although "
            "every gradient was finite: the step was too large. These weights are not saved. Lower learning_rate or "
            "train in another precision, and resume from the last checkpoint."
        )

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Name step, parameter and cure where the policy's logits leave nothing to sample from.

        Raises:
            NonFiniteError: a weight has overflowed, or the logits hold NaN or inf.
        """
        self._check_weights()
        try:
            yield
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):
                raise
            sizes = largest_by_name([(name, local(p)) for name, p in self.model.named_parameters()])
            name, size = max(sizes.items(), key=lambda item: item[1].item())
            raise NonFiniteError(
                f"After step {self.state.global_step} of {self.state.max_steps} the policy's logits hold NaN or inf, "
                f"so no completion can be sampled. Its largest weight is {size.item():.3g}, in {name}. Lower "
                "learning_rate or train in another precision, and resume from the last checkpoint."
            ) from error

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, with the number of steps that were skipped since the last time."""
        skipped = self._metrics["train"].pop(SKIPPED, []) if self.model.training else []
        if skipped and self.args.on_nonfinite == "skip":
            logs = {**logs, SKIPPED: sum(skipped)}
        super().log(logs, start_time)
