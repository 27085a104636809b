"""Laws of the claim on stale batches: the ESS of tokens and of completions, and the counts behind the verdict."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "claims"))

import staleness
from staleness import DELAYS, LOSSES, effective_sizes


@pytest.mark.parametrize("n", [1, 8, 64])
@pytest.mark.parametrize("s", [0.02, 0.1])
def test_the_ess_of_completions_is_that_of_tokens_to_the_power_of_the_length(n, s):
    of_tokens, of_completions = effective_sizes(n, s)
    assert of_completions == pytest.approx(of_tokens**n, abs=1e-10)


def test_the_law_fails_for_the_geometric_mean():
    of_tokens, of_completions = effective_sizes(64, 0.1, level="sequence")
    assert of_completions > of_tokens**64 + 0.1


def replayed(passed: list[float], ess: list[float], named: int | None = None) -> dict:
    diagnosis = [] if named is None else [[named, "steps too large"]]
    return {"passed": passed, "ess": ess, "diagnosis": diagnosis}


def run_of(replay: dict) -> list[dict]:
    """Return a run all of whose replays are this one."""
    every = [replay | {"loss": loss, "delay": delay} for loss in LOSSES for delay in DELAYS]
    return [{"key": [0], "start": 0.5, "replays": every}]


@pytest.mark.parametrize(
    ("replay", "word"),
    [
        (replayed([0.5, 0.5], [1.0, 1.0]), staleness.FAILS),  # nothing falls
        (replayed([0.5, 0.3], [1.0, 0.4]), staleness.HOLDS),  # the ESS of a batch is known before it trains
        (replayed([0.3, 0.3], [1.0, 0.4]), staleness.FAILS),  # too late
    ],
)
def test_the_verdict_follows_the_order_of_warning_and_harm(replay, word):
    assert staleness.judge({}, run_of(replay)).word == word


def test_alarms_of_sound_replays_limit_the_claim():
    [run] = run_of(replayed([0.5, 0.3], [0.4, 0.4], named=2))
    run["replays"][0] |= replayed([0.5, 0.5], [0.4, 0.4])
    assert staleness.warnings_of([run])["ess though sound"] == 1
    assert staleness.warnings_of([run])["diagnosed before"] == len(LOSSES) * len(DELAYS) - 1
    assert staleness.judge({}, [run]).word == staleness.ONLY_IF


def test_answers_and_rewards():
    assert staleness.answer("12") == "581470"
    assert staleness.right(["12", "12", "12"], ["581470", "58147", "x"]) == [1.0, 5 / 6, 0.0]
