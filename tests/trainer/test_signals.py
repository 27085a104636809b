"""Signals: the first is noted, a second ends the process, handlers of others are kept."""

import os
import signal
import time
from functools import partial

import pytest
from transformers import TrainerCallback

from grpo_ext.config.launch import EXIT_CODE_FILE
from grpo_ext.errors import NOT_FINISHED, OutOfMemory, RunInterrupted
from grpo_ext.trainer.signals import REPEATED_WITHIN, Signals, signals
from support import interrupted, tiny
from support.trainers import build, weights


@pytest.fixture(autouse=True)
def default_handlers():
    """Whatever started the tests may ignore some (nohup, a script's background job)."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    earlier = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.fixture
def watched(default_handlers):
    own = Signals()
    assert own.watch()
    yield own
    own.stop_watching()


def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("phase", "code"), [("ending", NOT_FINISHED), ("training", 143)])
def test_the_launcher_s_signal_to_what_ends_later_leaves_the_code_that_is_written(phase, code, monkeypatch, tmp_path):
    """As the second signal, after a user's: the launcher ends what is left when the first process has gone."""
    file = tmp_path / "exit_code"
    file.write_text(str(NOT_FINISHED))
    monkeypatch.setenv(EXIT_CODE_FILE, str(file))
    if not (child := os.fork()):
        own = Signals()
        own.phase, own.requested = phase, signal.SIGTERM
        own.arrived(signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    assert int(file.read_text()) == code


def test_the_first_is_noted_its_echo_is_ignored_and_a_second_ends_the_process(watched, monkeypatch):
    left = []
    monkeypatch.setattr(watched, "leave_now", lambda code, line: left.append(code))
    watched.phase = "training"
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: watched.requested)
    os.kill(os.getpid(), signal.SIGINT)  # as a launcher adds its own to the terminal's
    time.sleep(0.2)
    assert (watched.requested, left) == (signal.SIGTERM, [])
    watched._first -= REPEATED_WITHIN
    os.kill(os.getpid(), signal.SIGINT)
    until(lambda: left)
    assert left == [128 + signal.SIGINT]


@pytest.mark.parametrize(("phase", "code"), [("loading", [NOT_FINISHED]), ("training", []), ("ending", [])])
def test_only_while_loading_the_first_ends_the_process(phase, code, watched, monkeypatch):
    left = []
    monkeypatch.setattr(watched, "leave_now", lambda code, line: left.append(code))
    watched.phase = phase
    watched.arrived(signal.SIGTERM)
    assert left == code


def test_handlers_are_restored_and_custom_ones_kept():
    def of_another(*_):
        """Somebody's own."""

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGHUP, of_another)
    try:
        own = Signals()
        own.watch()
        assert signal.getsignal(signal.SIGHUP) is of_another
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        own.stop_watching()
        assert {number: signal.getsignal(number) for number in before} == before
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_the_default_handlers(monkeypatch):
    monkeypatch.setattr(signals, "requested", 0)  # an earlier run of this process may have been ended
    signals.watch()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not signals.requested
    finally:
        signals.stop_watching()


def test_a_trainer_without_a_recipe_saves_stops_and_resumes_exactly(tmp_path):
    """In the middle of an interval, on another step than those that save; the evaluation that is due is left out."""
    path, settings = tiny.save(tmp_path / "model"), {"max_steps": 6, "save_strategy": "steps", "save_steps": 4}

    def reward(completions, trainer_state, **_):
        if trainer_state.global_step == 2:
            signals.arrived(signal.SIGTERM)
        return tiny.count_a(completions)

    trainer = build(path, tmp_path / "out", [reward], **settings)
    with pytest.raises(RunInterrupted, match="SIGTERM: saved checkpoint-3 of 6 steps") as left:
        trainer.train()
    assert left.value.code == NOT_FINISHED
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    trainer = build(path, tmp_path / "out", [tiny.count_a], **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    whole = build(path, tmp_path / "whole", [tiny.count_a], **settings)
    whole.train()
    assert (weights(trainer.model) == weights(whole.model)).all()


EVALUATED = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
LEFT_IN = {
    "ours": {},
    "stock TRL's, at the last step": {"loss_defaults": "trl", "log_completions": True},
    "one of two sets, logged already": {"two_sets": True},
    "sampled ahead": {"rollout_ahead": 1, "rollout_engine": "process"},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", LEFT_IN)
def test_a_signal_leaves_an_evaluation_and_the_resumed_run_repeats_it_at_the_same_bits(case, tmp_path):
    path, settings = tiny.save(tmp_path / "model"), {**EVALUATED, **LEFT_IN[case]}
    evaluated = tiny.prompts(4)
    if settings.pop("two_sets", False):
        evaluated = {"first": tiny.prompts(1), "second": evaluated}
    batches, signalled = [], 4 if "last" in case else 2

    def reward(completions, trainer_state, **_):
        if not made.model.training and trainer_state.global_step == signalled:
            batches.append(len(completions))
            if stops and len(batches) == 2:
                signals.arrived(signal.SIGTERM)
        return tiny.count_a(completions)

    def trainer(name):
        return build(path, tmp_path / name, [reward], evaluated=evaluated, **settings)

    stops, made = True, trainer("out")
    with pytest.raises(RunInterrupted, match=f"SIGTERM: saved checkpoint-{signalled} of 4 steps"):
        made.train()
    assert len(batches) == 2
    stops, made = False, trainer("out")
    made.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{signalled}"))
    resumed, made = made, trainer("whole")
    made.train()
    assert interrupted.logged(resumed) == interrupted.logged(made)
    assert (weights(resumed.model) == weights(made.model)).all()


@pytest.mark.parametrize(
    ("place", "left"),
    [
        ("compute_loss", "The run can be resumed from "),
        ("evaluate", "The run can be resumed from "),
        ("optimizer", "or lower max_completion_length."),  # half of the weights may be new
    ],
)
def test_a_run_without_memory_saves_its_last_whole_step_and_says_what_needs_less(place, left, tmp_path):
    path, settings = tiny.save(tmp_path / "model"), {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}

    def trainer(name):
        return build(path, tmp_path / name, evaluated=tiny.prompts(4), **settings)

    def full(stock, *args, **kwargs):
        if made.state.global_step == 2:
            raise MemoryError("planted")
        return stock(*args, **kwargs)

    made = trainer("out")
    owner, name = (TrainerCallback(), "on_optimizer_step") if place == "optimizer" else (made, place)
    setattr(owner, name, partial(full, getattr(owner, name)))
    if place == "optimizer":
        made.add_callback(owner)
    words = r"After step 2 of 3: too little memory \(MemoryError: planted\)\. Halve per_device_train_batch_size"
    with pytest.raises(OutOfMemory, match=words) as error:
        made.train()
    saved = tmp_path / "out" / "checkpoint-2"
    assert str(error.value).endswith(f"{left}{saved}." if place != "optimizer" else left)
    assert saved.exists() == (place != "optimizer")
    if saved.exists():
        resumed = trainer("out")
        resumed.train(resume_from_checkpoint=str(saved))
        made = trainer("whole")
        made.train()
        assert interrupted.logged(resumed) == interrupted.logged(made)
        assert (weights(resumed.model) == weights(made.model)).all()


def test_a_signal_before_the_first_step_leaves_its_evaluation(tmp_path):
    def reward(completions, **_):
        signals.arrived(signal.SIGTERM)
        return tiny.count_a(completions)

    settings = EVALUATED | {"eval_on_start": True}
    with pytest.raises(RunInterrupted, match="SIGTERM: no step had been made"):
        build(tiny.model(), tmp_path, [reward], evaluated=tiny.prompts(4), **settings).train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_signal_after_training_is_ignored_while_the_model_is_saved(monkeypatch):
    own, left = Signals(), []
    monkeypatch.setattr(own, "leave_now", lambda code, line: left.append(code))
    with own.training():
        pass
    own.arrived(signal.SIGTERM)
    assert left == []
