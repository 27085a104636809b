"""The losses once more, as their papers write them, for one row in the plainest torch: what splits are judged by."""

from typing import Any

import torch
from torch import Tensor

from grpo_ext.objective.objective import Objective


def loss_of_row(objective: Objective, inputs: dict[str, Any]) -> Tensor:
    """Losses [1, tokens] of a row: surrogate and KL."""
    logps, old, a = inputs["per_token_logps"][0], inputs["old_per_token_logps"][0], inputs["advantages"][0]
    a, o = a.to(logps.dtype), dict(objective.options)
    surrogate = objective.row.surrogate
    moved = logps - old
    r = {"token": moved, "sequence": moved.mean(), "product": moved.sum()}[objective.ratio].exp()
    marks = inputs["marks"][0] if "marks" in inputs else None
    loss = SURROGATES[surrogate](r=r, a=a, logps=logps, old=old, marks=marks, **o)
    if objective.kl_in_loss:
        loss = loss + objective.beta * KL[objective.kl](inputs["ref_per_token_logps"][0] - logps, moved)
    return loss.expand_as(logps)[None]


def least(x, bound):
    return torch.where(x < bound, x, torch.full_like(x, bound))


def most(x, bound):
    return torch.where(x > bound, x, torch.full_like(x, bound))


def clip(r, a, epsilon_low, epsilon_high, delta=None, **_):
    capped = r if delta is None else least(r, delta)
    clipped = least(most(r, 1 - epsilon_low), 1 + epsilon_high)
    return -torch.minimum(capped * a, clipped * a)


def reinforce(a, logps, **_):
    return -a * logps


def cispo(r, a, logps, epsilon_high, **_):
    return -least(r.detach(), epsilon_high) * a * logps


def sapo(r, a, temperature_pos, temperature_neg, **_):
    def gate(tau):
        return 4 / tau / (1 + torch.exp(-tau * (r - 1))) * a

    return -torch.where(a > 0, gate(temperature_pos), gate(temperature_neg))


def vespo(a, logps, old, k_pos, lambda_pos, k_neg, lambda_neg, **_):
    s = (logps - old).sum().exp().detach()

    def phi(k, lam):
        return torch.exp(torch.tensor(lam, dtype=s.dtype)) * s**k * torch.exp(-lam * s)

    return -torch.where(a >= 0, phi(k_pos, lambda_pos), phi(k_neg, lambda_neg)) * a * logps


def gmpo(a, logps, old, epsilon_low, epsilon_high, **_):
    up = least(logps - old, epsilon_high)
    down = most(logps - old, -epsilon_low)
    return -a * torch.where(a > 0, up, down).mean().exp()


def topr(r, a, logps, **_):
    return -torch.where(a >= 0, torch.ones_like(r), torch.minimum(r, torch.ones_like(r))).detach() * a * logps


def dppo(r, a, logps, old, epsilon_low, epsilon_high, divergence, **_):
    p, q = logps.exp().detach(), old.exp()
    shift = p - q
    if divergence == "kl":
        shift = shift.sign() * (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log())
    kept = torch.where(a > 0, shift <= epsilon_high, shift >= -epsilon_low)
    return -r * a * kept


def dro(a, logps, old, tau, **_):
    return tau / 2 * (logps - old).sum() ** 2 / len(logps) - a * logps


def p3o(r, a, logps, old, **_):
    r = r.detach()
    e, d = r.sum() ** 2 / (len(r) * (r**2).sum()), old - logps
    return (1 - e) * (d.exp() - d - 1) - torch.minimum(r, e) * a * logps


def kl_cov(r, a, logps, old, marks, kl_coef, **_):
    moved = logps - old
    distance = torch.where(moved.abs() > 1e-9, moved.abs(), 0.0)  # rounding has a sign
    return marks * kl_coef * distance - r * a


def clip_cov(r, a, marks, epsilon_low, epsilon_high, **_):
    return clip(r, a, epsilon_low, epsilon_high) * ~marks


SURROGATES = {
    f.__name__: f for f in (clip, reinforce, cispo, sapo, vespo, gmpo, topr, dppo, dro, p3o, kl_cov, clip_cov)
}
KL = {
    "k2": lambda d, moved: d**2 / 2,
    "k3": lambda d, moved: d.exp() - d - 1,
    "r_k3": lambda d, moved: moved.exp() * (d.exp() - d - 1),
    "sequence_k3": lambda d, moved: d.sum().exp() - d.sum() - 1,
}
