"""Weights that overflowed, by name and type."""

import pytest
import torch

from grpo_ext.trainer.findings import LARGEST_WEIGHT, overflowed


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2 * LARGEST_WEIGHT])
def test_the_first_weight_that_overflowed_is_named(kind, value):
    weights = [("a", torch.ones(2, dtype=kind)), ("b", torch.tensor([1.0, value]).to(kind)), ("c", torch.ones(0))]
    assert overflowed(weights) == "b"
    assert overflowed([weights[0], weights[2]]) is None


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_frozen_base_in_fp8_is_no_error(kind):
    """torch has no norm of such a tensor."""
    weights = [("base", torch.ones(2).to(kind)), ("packed", torch.ones(2, dtype=torch.uint8))]
    assert overflowed(weights) is None
    assert overflowed([*weights, ("adapter", torch.tensor(float("inf")))]) == "adapter"
