"""Divergences from a teacher over the vocabulary, against sums written out and finite differences."""

import math

import pytest
import torch

from grpo_ext.objective.divergence import logit_gradient, pointwise

P = torch.tensor([[0.3, -1.2, 2.0, 0.1], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
Q = torch.tensor([[1.0, 0.4, -0.7, 0.2], [3.0, -2.0, 0.5, 0.0]], dtype=torch.float64)
BETAS = [0.0, 0.3, 0.5, 1.0]


def entry(p, q, beta):
    if beta == 0:
        return q * math.log(q / p)
    if beta == 1:
        return p * math.log(p / q)
    m = beta * q + (1 - beta) * p
    return beta * q * math.log(q / m) + (1 - beta) * p * math.log(p / m)


def summed(z, beta, clip):
    out = []
    for row, teacher in zip(z.softmax(-1).tolist(), Q.softmax(-1).tolist(), strict=True):
        entries = [entry(p, q, beta) for p, q in zip(row, teacher, strict=True)]
        out.append(sum(min(x, math.inf if clip is None else clip) for x in entries))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip", [None, 0.05, 0.2])
def test_value_and_gradient_are_those_of_the_definition(beta, clip):
    values, slopes = pointwise(P.log_softmax(-1), Q.log_softmax(-1), beta=beta, clip=clip)
    torch.testing.assert_close(values.sum(-1), summed(P, beta, clip), rtol=1e-12, atol=1e-12)
    gradient, h = logit_gradient(P.log_softmax(-1), slopes), 1e-4
    for row in range(2):
        for j in range(4):
            step = torch.zeros_like(P)
            step[row, j] = h
            ends = [summed(P + k * step, beta, clip)[row].item() for k in (-2, -1, 1, 2)]
            found = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * h)
            assert gradient[row, j].item() == pytest.approx(found, abs=1e-10)


def test_a_clip_leaves_out_the_entries_above_it():
    values, slopes = pointwise(P.log_softmax(-1), Q.log_softmax(-1), beta=0.5, clip=0.05)
    free, _ = pointwise(P.log_softmax(-1), Q.log_softmax(-1), beta=0.5)
    assert (free > 0.05).any()
    assert (values <= 0.05).all()
    assert (slopes[free > 0.05] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_that_is_the_policy_gives_exactly_nothing(beta):
    values, slopes = pointwise(P.log_softmax(-1), P.log_softmax(-1), beta=beta)
    assert values.abs().max() < 1e-16
    assert logit_gradient(P.log_softmax(-1), slopes).abs().max() < 1e-15
