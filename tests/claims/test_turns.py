"""Share of the squared advantage on each turn, where the third of five turns decides."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))
import turns

SHARES = {
    "group": [1 / 5] * 5,
    "turn_return, gamma 1": [1 / 3, 1 / 3, 1 / 3, 0, 0],
    "turn_return, gamma 0": [0, 0, 1, 0, 0],
}


@pytest.mark.parametrize("name", SHARES)
def test_shares_of_the_turns(name):
    assert turns.shares(name, completions=4) == pytest.approx(SHARES[name], abs=1e-10)


def test_gigpo_doubles_the_advantage_up_to_the_turn_that_decides(monkeypatch):
    monkeypatch.setitem(turns.ESTIMATORS, "gigpo", ("gigpo", {"eps": 0.0}))
    expected = [4 / 14, 4 / 14, 4 / 14, 1 / 14, 1 / 14]
    assert turns.shares("gigpo", completions=4) == pytest.approx(expected, abs=1e-10)


def test_the_law_fails_without_the_advantage_of_the_step(monkeypatch):
    monkeypatch.setitem(turns.ESTIMATORS, "gigpo", ("gigpo", {"step_weight": 0.0}))
    assert turns.shares("gigpo", completions=4) == pytest.approx(SHARES["group"], abs=1e-10)
