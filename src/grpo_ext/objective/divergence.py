r"""Divergences between the next-token distributions of a policy p and a teacher q, over the whole vocabulary.

The generalised Jensen-Shannon divergence with m = beta q + (1 - beta) p is sum_v f_v,
f_v = beta q_v log(q_v / m_v) + (1 - beta) p_v log(p_v / m_v); it becomes KL(q || p) with beta = 0 and KL(p || q) with
beta = 1 (each divided by the vanishing weight). GKD, arXiv:2306.13649.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def pointwise(
    log_p: Float[Tensor, "positions vocabulary"],
    log_q: Float[Tensor, "positions vocabulary"],
    *,
    beta: float = 0.5,
    clip: float | None = None,
) -> tuple[Float[Tensor, "positions vocabulary"], Float[Tensor, "positions vocabulary"]]:
    r"""Return f_v of each token of the vocabulary, and p_v df_v/dp_v.

    With `clip`, min(f_v, clip) in place of f_v: a few tokens of style would outweigh the rest. OPSD, arXiv:2601.18734.
    """
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        values, slopes = q * (log_q - log_p), -q
    elif beta == 1.0:
        values = p * (log_p - log_q)
        slopes = values + p
    else:
        log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
        slopes = (1 - beta) * p * (log_p - log_m)
        values = beta * q * (log_q - log_m) + slopes
    if clip is not None:
        slopes = torch.where(values < clip, slopes, 0.0)
        values = values.clamp(max=clip)
    return values, slopes


def logit_gradient(
    log_p: Float[Tensor, "positions vocabulary"], slopes: Float[Tensor, "positions vocabulary"]
) -> Float[Tensor, "positions vocabulary"]:
    r"""d(sum_v f_v)/dz_j = s_j - p_j sum_v s_v with s_v = p_v df_v/dp_v and p = softmax(z)."""
    return slopes - log_p.exp() * slopes.sum(dim=-1, keepdim=True)
