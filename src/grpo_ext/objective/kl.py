r"""Estimators of the KL divergence from the reference, per token, on samples of the policy.

Notation: d = l_ref - l per token, D = sum_t d over a completion. The direction matters: exp(-d) + d - 1 is left out,
since its expectation is chi-squared - KL. Like a surrogate, an estimator requests its tensors by name:
`log_ref_ratio` (d, zero under the mask), `log_ratio` (see `ratios`) and `mask`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_ext.objective.ratios import LOG_RATIO_BOUND
from grpo_ext.registry import Registry


@dataclass(frozen=True)
class KLTraits:
    """Properties of an estimator that other modules use."""

    in_loss: bool = True
    """True if its gradient is useful in the loss."""
    in_reward: bool = True
    """True if its value is useful without a gradient."""
    levels: tuple[str, ...] = ("token", "sequence", "product")
    """The ratio levels at which its formula holds."""
    per_completion: bool = False
    """True if it is one term for a whole completion."""


kl_estimators: Registry = Registry("kl_estimator", KLTraits)


@kl_estimators.register("k1", in_loss=False)
def k1(log_ref_ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """-d: unbiased, of either sign. Its gradient in the loss averages to 0; it belongs in the reward."""
    return -log_ref_ratio


@kl_estimators.register("k2")
def k2(log_ref_ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """d^2 / 2: a biased value whose gradient, -d, is the reverse KL's in expectation. Schulman 2020."""
    return log_ref_ratio.square() / 2


@kl_estimators.register("k3")
def k3(log_ref_ratio: Float[Tensor, " batch #time"]) -> Float[Tensor, " batch #time"]:
    """exp(d) - d - 1 >= 0, by expm1; gradient 1 - exp(d), the forward KL's in expectation. arXiv:2402.03300.

    d is cut at +20 before exp; below, where the pull towards the reference is 1, exp cannot overflow.
    """
    d = log_ref_ratio.clamp(max=LOG_RATIO_BOUND)
    return torch.expm1(d) - d


@kl_estimators.register("k3+", in_reward=False)
def k3_plus(log_ref_ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """The value of k3 with the gradient of k2, -d: the reverse KL's in expectation."""
    surrogate = k2(log_ref_ratio)
    return k3(log_ref_ratio).detach() + (surrogate - surrogate.detach())


@kl_estimators.register("r_k3", in_reward=False, levels=("token",))
def r_k3(
    log_ref_ratio: Float[Tensor, "batch time"], log_ratio: Float[Tensor, " batch #time"]
) -> Float[Tensor, "batch time"]:
    """r k3, unbiased off-policy with the token ratio; on-policy gradient -d. DeepSeek-V3.2, arXiv:2512.02556.

    TRL calls it `use_bias_correction_kl`.
    """
    return log_ratio.exp() * k3(log_ref_ratio)


@kl_estimators.register("abs")
def absolute(log_ref_ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """|d|; gradient -sign(d)."""
    return log_ref_ratio.abs()


@kl_estimators.register("sequence_k3", in_reward=False, per_completion=True)
def sequence_k3(log_ref_ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch 1"]:
    """exp(D) - D - 1 per completion; gradient 1 - exp(D) on every token. DeepSeek-V2/V3, arXiv:2405.04434."""
    return k3(log_ref_ratio.sum(dim=-1, keepdim=True))
