"""A run without a signal says so once, with what its rewards were."""

import logging
import math

import pytest
import torch
from transformers import TrainerCallback

from grpo_ext.trainer.zero_advantages import PATIENCE, AdvantageMonitor
from support import tiny
from support.trainers import build

TWO = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.5], [0.0, 0.5]]])


def told(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "grpo_ext.trainer.zero_advantages"]


def test_it_is_told_once_and_names_each_rewards_values(caplog):
    monitor = AdvantageMonitor(["accuracy", "format"])
    for _ in range(3 * PATIENCE):
        monitor.add(TWO, True)
    (sentence,) = told(caplog)
    assert f"no signal in {PATIENCE} generations in a row" in sentence
    assert (
        f"these {4 * PATIENCE} completions: accuracy 0 throughout, format 0.5 to 1, alike in each group." in sentence
    )


def test_one_generation_with_a_signal_begins_the_count_anew(caplog):
    monitor = AdvantageMonitor(["accuracy", "format"])
    for i in range(3 * PATIENCE):
        monitor.add(TWO, i % PATIENCE != 0)
    assert not told(caplog)


def test_what_was_not_scored_is_no_value(caplog):
    monitor = AdvantageMonitor(["accuracy", "format"])
    for _ in range(PATIENCE):
        monitor.add(torch.tensor([[[math.nan, 1.0], [math.nan, math.nan]]]), True)
    (sentence,) = told(caplog)
    assert "accuracy None throughout (not scored), format 1 throughout (5 not scored)." in sentence


def test_a_process_that_does_not_tell_is_silent(caplog):
    monitor = AdvantageMonitor(["a"], warns=False)
    for _ in range(PATIENCE):
        monitor.add(torch.zeros(1, 2, 1), True)
    assert not told(caplog)


class StopAt(TrainerCallback):
    """Ends a call of `train` after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


def saved_steps(folder) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")), default=0)


def same(completions, **_):
    return [1.0] * len(completions)


@pytest.mark.parametrize("settings", [{}, {"loss_defaults": "trl", "loss_type": "grpo"}])
def test_a_training_run_tells_of_it(tmp_path, caplog, settings):
    with caplog.at_level(logging.WARNING):
        build(tiny.model(), tmp_path, [same], max_steps=PATIENCE, **settings).train()
    (sentence,) = told(caplog)
    assert "same 1 throughout" in sentence


def test_a_training_run_with_a_signal_does_not(tmp_path, caplog):
    build(tiny.model(), tmp_path, [tiny.count_a], max_steps=PATIENCE).train()
    assert not told(caplog)


def test_a_resumed_run_counts_on_and_warns_once(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": PATIENCE + 2}
    for stop in (PATIENCE - 2, PATIENCE, PATIENCE + 2):
        trainer = build(tiny.model(), tmp_path, [same], **settings)
        last = tmp_path / f"checkpoint-{saved_steps(tmp_path)}"
        trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=str(last) if last.is_dir() else None)
        assert len(told(caplog)) == (stop >= PATIENCE)
