"""KL estimators against FORMULAS' closed forms, and their expected gradients against the divergences themselves."""

import math

import pytest
import torch

from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.options import bind

LOG_RATIO = [0.3, -0.7, 0.0]  # of the policy to the sampler, for r_k3
RATIO = [math.exp(x) for x in LOG_RATIO]


def k3_value(d):
    return math.expm1(d) - d


# name -> (value, gradient in l) of one token from (d, r); d = l_ref - l
BY_HAND = {
    "k1": (lambda d, r: -d, lambda d, r: 1.0),
    "k2": (lambda d, r: d * d / 2, lambda d, r: -d),
    "k3": (lambda d, r: k3_value(d), lambda d, r: 1 - math.exp(d)),
    "k3+": (lambda d, r: k3_value(d), lambda d, r: -d),
    "r_k3": (lambda d, r: r * k3_value(d), lambda d, r: -r * d),
    "abs": (lambda d, r: abs(d), lambda d, r: -math.copysign(1.0, d)),
}
PER_COMPLETION = {"sequence_k3"}
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def run(name, d, dtype, log_ratio=LOG_RATIO):
    """Value and gradient in l of the estimator's sum, for one completion of three tokens."""
    logps = torch.tensor([[-1.0, -2.0, -0.5]], dtype=dtype, requires_grad=True)
    ref = logps.detach() + torch.tensor([d], dtype=dtype)
    old = logps.detach() - torch.tensor([log_ratio], dtype=dtype)
    offered = {"log_ref_ratio": ref - logps, "log_ratio": logps - old, "mask": torch.ones(1, 3)}
    out = bind(kl_estimators[name], offered)()
    out.sum().backward()
    return out.detach(), logps.grad


def test_every_estimator_has_a_reference_here():
    assert set(kl_estimators) == set(BY_HAND) | PER_COMPLETION


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("d", [[0.5, -0.25, 1.5], [-3.0, 2.0, -0.01], [-30.0, 6.0, -100.0]])
@pytest.mark.parametrize("name", BY_HAND)
def test_value_and_gradient(name, d, dtype, tolerance):
    value, gradient = BY_HAND[name]
    out, grad = run(name, d, dtype)
    assert out.dtype == dtype
    expected = [value(*x) for x in zip(d, RATIO, strict=True)]
    assert out[0].tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance / 100)  # expm1(d) - d cancels
    assert grad[0].tolist() == pytest.approx([gradient(*x) for x in zip(d, RATIO, strict=True)], rel=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("d", [[0.5, -0.25, 1.5], [-3.0, 2.0, -0.01], [-9.0, -9.0, -9.0]])
def test_sequence_k3(d, dtype, tolerance):
    out, grad = run("sequence_k3", d, dtype)
    assert out.shape == (1, 1)
    assert out.item() == pytest.approx(k3_value(sum(d)), rel=tolerance)
    assert grad[0].tolist() == pytest.approx([1 - math.exp(sum(d))] * 3, rel=tolerance)


def test_k3_is_positive_where_exp_would_round_it_to_0():
    out, _ = run("k3", [1e-4, -1e-4, 2e-3], torch.float32)
    exact = [d * d / 2 + d**3 / 6 for d in (1e-4, -1e-4, 2e-3)]
    assert all(v > 0 for v in out[0].tolist())
    assert out[0, :2].tolist() == pytest.approx(exact[:2], rel=5e-3)  # expm1's last bit is 7e-12 of 5e-9
    assert out[0, 2].item() == pytest.approx(exact[2], rel=1e-4)


@pytest.mark.parametrize("name", ["k3", "k3+", "r_k3", "sequence_k3"])
def test_beyond_20_the_exponential_is_cut(name):
    """Above the bound value and gradient stand still (r_k3: up to its ratio); below, nothing is lost."""
    high, _ = run(name, [100.0, 0.0, 0.0], torch.float32, log_ratio=[0.0] * 3)
    assert high.sum().item() == pytest.approx(math.expm1(20.0) - 20, rel=1e-6)
    low, gradient = run(name, [-100.0, 0.0, 0.0], torch.float32, log_ratio=[0.0] * 3)
    assert low.sum().item() == pytest.approx(99.0, rel=1e-6)
    assert gradient[0, 0].item() == pytest.approx(1.0 if name in ("k3", "sequence_k3") else 100.0, rel=1e-6)


# The expectation under samples of the policy, by enumeration of a vocabulary of four.
LOGITS, REF = [0.3, -0.5, 1.1, 0.0], [0.2, 0.15, 0.25, 0.4]


def expected_gradient(name):
    """E_{x ~ pi}[d estimator / d logits]: the samples are fixed, the estimator is differentiated."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(-1)[:, None]
    ref = torch.tensor(REF, dtype=torch.float64).log()[:, None]
    offered = {"log_ref_ratio": ref - logps, "log_ratio": logps - logps.detach(), "mask": torch.ones(4, 1)}
    (logps.detach().exp() * bind(kl_estimators[name], offered)()).sum().backward()
    return logits.grad


def divergence_gradient(divergence):
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logps, ref = logits.log_softmax(-1), torch.tensor(REF, dtype=torch.float64)
    divergence(logps, ref).backward()
    return logits.grad


DIVERGENCES = {
    "zero": lambda logps, ref: 0 * logps.sum(),
    "reverse": lambda logps, ref: (logps.exp() * (logps - ref.log())).sum(),  # KL(pi || ref)
    "forward": lambda logps, ref: (ref * (ref.log() - logps)).sum(),  # KL(ref || pi)
}


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("k1", "zero"),
        ("k2", "reverse"),
        ("k3", "forward"),
        ("k3+", "reverse"),
        ("r_k3", "reverse"),
        ("sequence_k3", "forward"),
    ],
)
def test_expected_gradient(name, divergence):
    torch.testing.assert_close(
        expected_gradient(name), divergence_gradient(DIVERGENCES[divergence]), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("name", ["k1", "k3", "k3+", "r_k3", "sequence_k3"])
def test_expected_value_is_the_reverse_kl(name):
    """The one thing that the wrong direction, exp(-d) + d - 1, gets wrong."""
    logps, ref = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(-1), torch.tensor(REF, dtype=torch.float64)
    d = (ref.log() - logps)[:, None]
    offered = {"log_ref_ratio": d, "log_ratio": torch.zeros_like(d), "mask": torch.ones(4, 1)}
    mean = (logps.exp()[:, None] * bind(kl_estimators[name], offered)()).sum()
    assert mean.item() == pytest.approx(DIVERGENCES["reverse"](logps, ref).item(), rel=1e-12)
