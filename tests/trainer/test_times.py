"""What a step's time went to, and tokens a second; an entropy of nothing is no figure."""

import time

import pytest

from grpo_ext.trainer.callbacks import THROUGHPUT
from support import tiny
from support.trainers import build

PARTS = ("time/rollout", "time/rewards", "time/training")


def slow(completions, **_):
    time.sleep(0.3)
    return [float(len(text)) for text in completions]


def steps(trainer):
    began = time.perf_counter()
    trainer.train()
    elapsed = time.perf_counter() - began
    return [row for row in trainer.state.log_history if "reward" in row or "loss" in row], elapsed


@pytest.mark.slow
def test_parts_of_a_step_stand_apart_and_add_up_to_no_more_than_the_run(tmp_path):
    """Two steps to a generation, and an evaluation after each, whose rewards are no part of a step."""
    settings = {"steps_per_generation": 2, "eval_strategy": "steps", "evaluated": tiny.prompts(2)}
    trainer = build(tiny.model(), tmp_path, [slow], loss_type="dapo", max_steps=4, **settings)
    rows, elapsed = steps(trainer)
    logs = [row for row in rows if "loss" in row]
    assert [row["time/rewards"] >= 0.3 for row in logs] == [True, False, True, False]
    assert [row["time/rollout"] > 0 for row in logs] == [True, False, True, False]
    assert min(row["time/training"] for row in logs) > 0
    assert sum(row[part] for row in logs for part in PARTS) < elapsed - 4 * 0.3
    assert [THROUGHPUT in row for row in logs] == [True, False, True, False]
    of_two_steps = sum(row[part] for row in logs[1:3] for part in PARTS)
    tokens = trainer.state.num_input_tokens_seen - logs[0]["num_tokens"]
    assert logs[2][THROUGHPUT] == pytest.approx(tokens / of_two_steps)


def test_a_step_without_an_advantage_has_no_entropy(tmp_path):
    def constant(completions, **_):
        return [1.0] * len(completions)

    trainer = build(tiny.model(), tmp_path, [constant], loss_type="dapo", max_steps=1)
    [row] = steps(trainer)[0]
    assert "entropy" not in row
    assert "log_ratio/clamped_frac" not in row
    assert row["clip_ratio/region_mean"] == 0
