"""What transformers forgets of a run that it resumes: adapters, callbacks, the evaluation that was due, the best."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.errors import RunInterrupted
from grpo_ext.trainer.checkpoints.state import find_best_checkpoint
from support import tiny
from support.interrupted import logged
from support.trainers import weights

BEST = {
    "eval_strategy": "steps",
    "metric_for_best_model": "eval_reward",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}


class Told(TrainerCallback):
    """Sends this process a signal before the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def build(folder: Path, model=None, callbacks=(), **settings) -> GRPOExtTrainer:
    settings = tiny.TRAINING | {"max_steps": 6, "save_strategy": "steps", "save_steps": 1} | settings
    return GRPOExtTrainer(
        model or tiny.model(),
        [tiny.count_a],
        GRPOExtConfig(output_dir=str(folder), **settings),
        tiny.prompts(8),
        tiny.prompts(4),
        tiny.tokenizer(),
        callbacks=list(callbacks),
    )


def with_adapter(seed=1):
    base = tiny.model()
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.slow
def test_an_adapter_beside_its_reference_is_restored(tmp_path):
    """Also where the adapter was drawn otherwise when the trainer was made again."""
    whole = build(tmp_path / "whole", with_adapter(), beta=0.1)
    whole.train()
    resumed = build(tmp_path / "resumed", with_adapter(seed=2), beta=0.1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    expected = whole._initial.weights
    assert all(torch.equal(value, expected[name]) for name, value in resumed._initial.weights.items())
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert logged(resumed) == logged(whole)


def test_the_patience_of_early_stopping_is_restored(tmp_path):
    def run(name, checkpoint=None):
        one = build(tmp_path / name, callbacks=[EarlyStoppingCallback(3, 100.0)], eval_steps=1, **BEST)
        one.train(resume_from_checkpoint=checkpoint)
        return one.state.global_step

    assert run("whole") == run("resumed", str(tmp_path / "whole" / "checkpoint-2")) == 4


BY_STEPS, BY_EPOCHS = {**BEST, "eval_steps": 3, "save_steps": 3}, {"eval_strategy": "epoch"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (3, BY_STEPS),
        (4, BY_EPOCHS | {"max_steps": 4}),  # the end of an epoch and of the run
        pytest.param(3, BY_EPOCHS, marks=pytest.mark.slow),
        *(pytest.param(step, how, marks=pytest.mark.slow) for step in (4, 6) for how in (BY_STEPS, BY_EPOCHS)),
    ],
)
def test_an_evaluation_that_a_signal_prevented_is_made_up_for(step, settings, tmp_path):
    whole = build(tmp_path / "whole", **settings)
    whole.train()
    with pytest.raises(RunInterrupted):
        build(tmp_path / "killed", callbacks=[Told(step)], **settings).train()
    resumed = build(tmp_path / "killed", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    best = [Path(one.state.best_model_checkpoint or "none").name for one in (whole, resumed)]
    assert best[0] == best[1]


def test_an_evaluation_that_is_made_up_for_may_end_the_run(tmp_path):
    def run(name, *callbacks):
        one = build(
            tmp_path / name, callbacks=[EarlyStoppingCallback(1, 100.0), *callbacks], **BEST | {"eval_steps": 1}
        )
        with pytest.raises(RunInterrupted) if callbacks else nullcontext():
            one.train(resume_from_checkpoint=None if callbacks or name == "whole" else True)
        return one

    run("killed", Told(2))
    resumed, whole = run("killed"), run("whole")
    assert resumed.state.global_step == whole.state.global_step == 2
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_the_best_checkpoint_of_a_moved_folder_is_found(tmp_path):
    build(tmp_path / "old", eval_steps=1, **BEST).train()
    (tmp_path / "old").rename(tmp_path / "new")
    resumed = build(tmp_path / "new", eval_steps=1, **BEST)
    resumed.train(resume_from_checkpoint=True)
    assert Path(resumed.state.best_model_checkpoint).parent == tmp_path / "new"


def test_a_signal_saves_a_complete_checkpoint_despite_save_only_model(tmp_path):
    with pytest.raises(RunInterrupted, match="saved checkpoint-2 of 6"):
        build(tmp_path, callbacks=[Told(2)], save_only_model=True).train()
    resumed = build(tmp_path, save_only_model=True)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[2]["step"] == 3


def test_the_best_checkpoint_of_a_copy_is_in_the_copy(tmp_path):
    """Two folders of one run: the other user may rotate, or go back in, the original."""
    for folder in ("original", "copy"):
        (tmp_path / folder / "checkpoint-1").mkdir(parents=True)
    recorded = str(tmp_path / "original" / "checkpoint-1")
    state = TrainerState(best_global_step=1, best_model_checkpoint=recorded)
    find_best_checkpoint(state, tmp_path / "elsewhere" / "checkpoint-2")
    assert state.best_model_checkpoint == recorded
    find_best_checkpoint(state, tmp_path / "copy" / "checkpoint-2")
    assert state.best_model_checkpoint == str(tmp_path / "copy" / "checkpoint-1")
