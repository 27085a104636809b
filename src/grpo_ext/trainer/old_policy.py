"""The policy that a generation begins with: old log-probabilities by the very forward that the loss runs.

Rows that are computed together, padded and packed alike, have the same log-probabilities to the last bit; in half
precision another micro-batch moves them by hundredths. So a micro-batch that the loss reaches before the policy moves
keeps the log-probabilities of that pass, and the others get theirs from `remember`, just before it moves.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from trl.models.utils import disable_gradient_checkpointing


@contextmanager
def no_early_pass(args: Any) -> Iterator[None]:
    """Leave out TRL's pass for old log-probabilities over rows that are not in their micro-batches yet.

    TRL runs it where an optimizer step may begin within a generation, judging by `gradient_accumulation_steps` alone;
    with vLLM's importance sampling correction it still runs, for the sampler's ratio.
    """
    generation = args.steps_per_generation * args.num_iterations
    with patch.object(args, "gradient_accumulation_steps", generation):
        yield


@contextmanager
def forward_only(trainer: Any) -> Iterator[None]:
    """No gradient, and no checkpoints, which torch would miss it for."""
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        yield


def remember(trainer: Any, micro_batches: Sequence[dict[str, Any]]) -> None:
    """Give old log-probabilities to those of a generation's `micro_batches` that have none, in the same forward."""
    new = [inputs for inputs in micro_batches if "old_per_token_logps" not in inputs]
    if not new:
        return
    with forward_only(trainer):
        for inputs in new:
            live = trainer._live_rows(inputs, "train")
            inputs["old_per_token_logps"] = trainer._scores(trainer.model, inputs, live)[0]
