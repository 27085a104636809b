"""An objective and a batch for the pure modules: no model, no trainer, no TRL."""

from types import SimpleNamespace

import torch

from grpo_ext.objective.aggregation import StepTotals, step_totals
from grpo_ext.objective.objective import Objective, resolve

L_MAX = 7
UNSET = (
    "importance_sampling_level",
    "loss_kwargs",
    "epsilon",
    "epsilon_high",
    "delta",
    "kl_estimator",
    "kl_placement",
    "use_bias_correction_kl",
    "advantage_estimator",
    "advantage_kwargs",
    "scale_rewards",
    "multi_objective_aggregation",
    "missing_rewards",
    "loss_aggregation",
    "loss_aggregation_kwargs",
)


def objective(loss_type: str, **settings) -> Objective:
    """What `GRPOExtConfig(loss_type=..., **settings).objective` is, without importing TRL."""
    defaults = {"loss_defaults": "paper", "beta": 0.0, "max_completion_length": L_MAX} | dict.fromkeys(UNSET)
    return resolve(SimpleNamespace(**(defaults | {"loss_type": loss_type} | settings)))


def batch(dtype: torch.dtype = torch.float64, spread: float = 0.3, sampler: bool = False, seed: int = 0) -> dict:
    """Off-policy inputs as the trainer hands them on: ragged, with a hole (a tool's token) and a row with no token."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 3, 1, 0, 4, 2, 5, 3])
    mask = (torch.arange(5) < lengths[:, None]).long()
    mask[0, 2] = 0

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    logps = -normal(8, 5).abs() - 0.1
    inputs = {
        "per_token_logps": logps,
        "old_per_token_logps": logps + spread * normal(8, 5),
        "ref_per_token_logps": logps + spread * normal(8, 5),
        "advantages": torch.tensor([1.5, -0.5, 0.25, 2.0, 0.0, -1.25, 0.75, -2.0], dtype=dtype),
        "mask": mask,
    }
    return inputs | ({"importance_sampling_ratio": (spread * normal(8, 5)).exp()} if sampler else {})


def rows(inputs: dict, index) -> dict:
    """Some rows of a batch."""
    return {name: value[index] for name, value in inputs.items()}


def loss(objective: Objective, inputs: dict, totals: StepTotals | None = None) -> torch.Tensor:
    """Surrogate, the sampler's correction, KL, aggregation: the trainer's loss without the trainer."""
    mask = inputs["mask"]
    tensors = objective.tensors(inputs["per_token_logps"], inputs, mask)
    per_token_loss = objective.surrogate_loss(tensors)
    if tensors["importance_sampling_ratio"] is not None and not objective.corrects_sampler:
        per_token_loss = per_token_loss * tensors["importance_sampling_ratio"]
    if objective.kl_in_loss:
        per_token_loss = per_token_loss + objective.beta * objective.kl_penalty(tensors)
    return objective.aggregate(per_token_loss, mask, totals or step_totals([mask]))


def loss_and_gradient(
    objective: Objective, inputs: dict, totals: StepTotals | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient in l."""
    leaf = inputs["per_token_logps"].clone().requires_grad_()
    value = loss(objective, inputs | {"per_token_logps": leaf}, totals)
    value.backward()
    return value.detach(), leaf.grad
