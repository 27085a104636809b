"""Test on a few tokens whether a loss, also a user's own, can train on advantages that differ by token."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

LOGPS = [[-1.0, -0.5, -2.0], [-0.7, -1.5, -0.3]]
MOVED = [[0.1, -0.3, 0.2], [-0.2, 0.2, 0.0]]
"""Log-ratios by token whose sum over a completion is 0, so that no level's clip cuts them all."""
ADVANTAGES = [[1.0, -2.0, 0.5], [-1.0, 1.5, 2.0]]
MASK = [[1, 1, 1], [1, 1, 0]]


def mixes_tokens(objective: Any, sampler: Float[Tensor, "2 #3"] | None = None) -> bool:
    """Return whether a token's gradient depends on the advantage of another token of its completion.

    Args:
        objective: an `Objective`.
        sampler: the sampler's importance ratio, if the loss takes one.
    """
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    plain = _gradient(objective, advantages, sampler)
    for token in range(len(MASK[0])):
        changed = advantages.clone()
        changed[:, token] *= -3.0
        moved = (_gradient(objective, changed, sampler) - plain).abs() > 1e-9
        moved[:, token] = False
        if moved.any():
            return True
    return False


def _gradient(objective: Any, advantages: Tensor, sampler: Tensor | None) -> Float[Tensor, "2 3"]:
    logps = torch.tensor(LOGPS, dtype=torch.float64).requires_grad_()
    mask = torch.tensor(MASK)
    inputs = {
        "advantages": advantages,
        "old_per_token_logps": torch.tensor(LOGPS, dtype=torch.float64) - torch.tensor(MOVED, dtype=torch.float64),
        "importance_sampling_ratio": None if sampler is None else sampler.double(),
    }
    # the KL does not depend on advantages, so it is left out with its reference
    tensors = objective.tensors(logps, inputs | {"ref_per_token_logps": logps.detach()}, mask)
    loss = objective.surrogate_loss(tensors).expand(mask.shape)
    torch.where(mask.bool(), loss, 0.0).sum().backward()
    assert logps.grad is not None
    return logps.grad
