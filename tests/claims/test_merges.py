"""Laws of the claim on merges: what rounding to bfloat16 leaves of an update."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import merges


@pytest.mark.parametrize("share", [0.01, 0.3, 0.49])
def test_an_update_below_half_a_gap_is_lost(share):
    weights, _, gaps = merges.grid()
    assert torch.equal((weights + share * gaps).float().bfloat16().double()[:-1], weights[:-1])


def test_an_update_above_half_a_gap_becomes_a_gap():
    weights, _, gaps = merges.grid()
    pushed = (weights + 0.51 * gaps).float().bfloat16().double()
    assert torch.equal((pushed - weights)[:-1], gaps[:-1])


def test_the_weights_of_the_law_are_a_distribution():
    assert merges.grid()[1].sum().item() == pytest.approx(1.0, abs=1e-12)


def test_small_updates_vanish_and_large_ones_survive():
    assert merges.surviving(1e-7)["projection"] < 0.02
    assert merges.surviving(1e-2)["projection"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("way", merges.WAYS[:2])
def test_layers_lose_what_the_law_says(way):
    policy, weight, update = merges.layer(1e-5, 64, 0)
    got = merges.pushed(way, policy, weight)
    found = ((got * update).sum() / update.square().sum()).item()
    assert found == pytest.approx(merges.surviving(update.std().item())["projection"], abs=0.05)


def nearest_on_the_grid(monkeypatch=None) -> float:
    """Return how much farther the package's sum is from the exact one than the nearest bfloat16, at most."""
    policy, weight, update = merges.layer(1e-5, 16, 0)
    got = weight.double() + merges.pushed("float32 sum, rounded once", policy, weight)
    exact = weight.double() + update
    nearest = exact.bfloat16().double()
    return ((got - exact).abs() - (nearest - exact).abs()).max().item()


def test_the_float32_sum_is_the_nearest_that_the_grid_allows():
    assert nearest_on_the_grid() < 1e-8  # float32's own rounding, of weights below .1


def test_the_law_fails_if_the_update_is_cut(monkeypatch):
    from grpo_ext.rollout.vllm import weights

    monkeypatch.setattr(weights, "_merge", lambda layer: None)
    assert nearest_on_the_grid() > 1e-6
