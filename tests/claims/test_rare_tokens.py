"""Laws of the claim on rare tokens: which tokens each clip leaves, where one token gains a given probability."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import rare_tokens
from rare_tokens import COMMON, LOSSES, MOVES, RARE, cases, coefficients, moved, objective_of, policies, raised, taken

from grpo_ext.objective import surrogates

DISTANCE = 0.1


@pytest.mark.parametrize("policy", ["flat", "peaked"])
@pytest.mark.parametrize(
    ("loss", "coefficient"),
    [
        ("clip .2", lambda p, r: r * (p >= DISTANCE / 0.2)),
        ("dppo .2", lambda p, r: r),
        ("cispo 5", lambda p, r: r.clamp(max=5.0)),
    ],
)
def test_a_token_that_gains_a_probability(policy, loss, coefficient):
    old, objective = policies()[policy], objective_of(**LOSSES[loss])
    for token in range(len(old)):
        new = raised(old, token, DISTANCE)
        assert (new - old).abs().sum().item() / 2 == pytest.approx(DISTANCE, abs=1e-12)
        found = coefficients(objective, old, new, torch.ones_like(old))[token]
        assert found.item() == pytest.approx(coefficient(old[token], new[token] / old[token]).item(), abs=1e-12)


def test_shares_are_those_of_the_closed_form():
    old = policies()["peaked"]
    mass = old + DISTANCE
    for classed, where in {"rare": old < RARE, "common": old >= COMMON}.items():
        where = where & (old + DISTANCE < 1)
        clipped = where & (old < DISTANCE / 0.2)
        found = taken(objective_of(**LOSSES["clip .2"]), "one token", old, DISTANCE)[classed]
        assert found == pytest.approx((mass[clipped].sum() / mass[where].sum()).item(), abs=1e-12)


def takes_below_its_bound() -> float:
    """Return the largest coefficient that DPPO takes from a token at a total variation of its bound."""
    old, draw, worst = policies()["peaked"], torch.Generator().manual_seed(1), 0.0
    for _ in range(20):
        new = moved(old, torch.randn(len(old), generator=draw, dtype=torch.float64), 0.19)
        if new is None:
            continue
        advantages = torch.randn(len(old), generator=draw, dtype=torch.float64)
        found = coefficients(objective_of(**LOSSES["dppo .2"]), old, new, advantages)
        worst = max(worst, (found - new / old * advantages).abs().max().item())
    return worst


def test_dppo_takes_nothing_below_its_bound():
    assert takes_below_its_bound() < 1e-12


def test_the_law_fails_if_dppo_bounds_the_ratio(monkeypatch):
    def by_ratio(advantages, per_token_logps, old_per_token_logps, **_):
        return surrogates.clip_regions(per_token_logps - old_per_token_logps, advantages)

    monkeypatch.setattr(surrogates, "dppo_regions", by_ratio)
    assert takes_below_its_bound() > 0.1


def test_moves_reach_the_same_total_variation():
    for old in policies().values():
        for move in MOVES:
            found = [(new - old).abs().sum().item() / 2 for new, *_ in cases(move, old, DISTANCE)]
            assert len(found) >= 8
            assert found == pytest.approx([DISTANCE] * len(found), abs=1e-10)


def test_a_verdict_needs_figures():
    row = {loss: {"rare": 0.0, "common": 0.0, "all": 0.0} for loss in LOSSES}
    row |= {"policy": "flat", "move": "noise", "distance": rare_tokens.SHOWN}
    found = {"rows": [row], "least cispo coefficient": 1.0}
    assert rare_tokens.judge(found, []).word == rare_tokens.FAILS
    row["clip .2"] = {"rare": 0.5, "common": 0.1, "all": 0.2}
    assert rare_tokens.judge(found, []).word == rare_tokens.HOLDS
    row["dppo .2"] = {"rare": 0.1, "common": 0.1, "all": 0.1}
    assert rare_tokens.judge(found, []).word == rare_tokens.FAILS
