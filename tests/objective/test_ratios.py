"""Ratio levels against sums written out by hand."""

import math

import pytest
import torch

from grpo_ext.objective.ratios import LOG_RATIO_BOUND, active_tokens, masked, ratios

NAN = math.nan
LOG_RATIO = [[0.1, -0.4, NAN, 0.6], [0.25, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]]
MASK = [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]  # a hole, a tail, nothing alive
BY_HAND = {
    "token": [[0.1, -0.4, 0.0, 0.6], [0.25, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
    "sequence": [[(0.1 - 0.4 + 0.6) / 3], [0.25], [0.0]],
    "product": [[0.1 - 0.4 + 0.6], [0.25], [0.0]],
}
GRADIENT_OF_SUM = {
    "token": [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]],
    "sequence": [[1 / 3, 1 / 3, 0, 1 / 3], [1, 0, 0, 0], [0, 0, 0, 0]],
    "product": [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]],
}


def test_every_level_has_a_reference_here():
    assert set(ratios) == set(BY_HAND)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("level", BY_HAND)
def test_value_and_gradient(level, dtype, tolerance):
    log_ratio = torch.tensor(LOG_RATIO, dtype=dtype, requires_grad=True)
    out = ratios[level](log_ratio, torch.tensor(MASK))
    out.sum().backward()
    expected = torch.tensor(BY_HAND[level], dtype=dtype)
    torch.testing.assert_close(out.detach(), expected, rtol=tolerance, atol=tolerance)
    expected = torch.tensor(GRADIENT_OF_SUM[level], dtype=dtype)
    torch.testing.assert_close(log_ratio.grad, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("level", "log_ratio", "expected", "gradient"),
    [
        ("token", [100.0, -100.0, 3.0, 20.0], [20.0, -20.0, 3.0, 20.0], [0.0, 0.0, 1.0, 1.0]),
        ("product", [12.0, 12.0, 1.0, 1.0], [20.0], [0.0] * 4),
        ("product", [100.0, -100.0, 1.0, 1.0], [2.0], [1.0] * 4),  # the sum is bounded, not its terms
        ("product", [-12.0, -12.0, 1.0, 1.0], [-20.0], [0.0] * 4),
        ("sequence", [12.0, 12.0, 1.0, 1.0], [6.5], [0.25] * 4),
        ("sequence", [100.0, 100.0, 1.0, 1.0], [20.0], [0.0] * 4),
    ],
)
def test_a_log_ratio_beyond_the_bound_is_cut_and_has_no_gradient(level, log_ratio, expected, gradient):
    leaf = torch.tensor([log_ratio], requires_grad=True)
    out = ratios[level](leaf, torch.ones(1, 4))
    out.sum().backward()
    assert LOG_RATIO_BOUND == 20.0
    assert out.tolist() == [expected]
    assert leaf.grad.tolist() == [gradient]


@pytest.mark.parametrize("level", ratios)
def test_bfloat16_is_summed_in_float32(level):
    out = ratios[level](torch.full((1, 8192), 7e-7, dtype=torch.bfloat16), torch.ones(1, 8192))
    assert out.dtype == torch.float32
    assert out.sum().item() == pytest.approx(7e-7 if level == "sequence" else 8192 * 7e-7, rel=5e-3)


def test_masked_keeps_float64_casts_others_to_float32_and_zeroes_the_rest():
    garbage = torch.tensor([[1.0, NAN, math.inf, -math.inf, 1e30]], dtype=torch.float64, requires_grad=True)
    out = masked(garbage, torch.tensor([[1, 0, 0, 0, 0]]))
    out.square().sum().backward()
    assert out.dtype == torch.float64
    assert out.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]
    assert garbage.grad.tolist() == [[2.0, 0.0, 0.0, 0.0, 0.0]]
    assert masked(torch.zeros(1, 1, dtype=torch.float16), torch.ones(1, 1)).dtype == torch.float32


def test_live_tokens_is_at_least_1():
    assert active_tokens(torch.tensor(MASK), torch.float64).tolist() == [[3.0], [1.0], [1.0]]
