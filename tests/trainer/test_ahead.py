"""`rollout_ahead: K` trains what a run in sequence trains that samples each generation by weights K windows old."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step
from grpo_ext.errors import ConfigError, RewardError, RunInterrupted, SamplerLost
from grpo_ext.trainer import in_flight
from support import tiny, trainers
from support.interrupted import without_clocks
from support.processes import CONFIG, run_forked
from support.samplers import Copies

SETTINGS = {
    **tiny.TRAINING,
    **{"rollout_engine": "process", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    **{"num_generations": 4, "learning_rate": 0.02, "max_steps": 7, "max_completion_length": 5},
    "shared_prefix": "false",  # packed forwards must not run beside others in one process
}
PLAY = [{"prompt": [{"role": "user", "content": f"play {i}"}]} for i in range(8)]


class InSequence(GRPOExtTrainer):
    """Samples each generation when it begins to train, by weights that it has kept since `ahead` generations."""

    def __init__(self, *args, ahead, **kwargs):
        super().__init__(*args, **kwargs)
        self.args.rollout_ahead, self.collector._published = ahead, self._publish

    def _publish(self, sampler):
        generation = self._step // self._uses
        if generation not in sampler.versions:
            sampler.publish(generation)
        return max(0, generation - self.args.rollout_ahead)


class Once(Conversation):
    """Answers once."""

    answered = False

    def reset(self, row):
        return [{"role": "user", "content": "ab"}]

    def step(self, message):
        done, self.answered = self.answered, True
        return Step(done=True) if done else Step([{"role": "user", "content": "cd"}])


def trainer_of(folder, ahead, *, in_sequence=False, sampler=Copies, plays=False, rewards=None, peft=None, **settings):
    args = GRPOExtConfig(output_dir=str(folder), **(SETTINGS | settings), rollout_ahead=0 if in_sequence else ahead)
    kind, more = (InSequence, {"ahead": ahead}) if in_sequence else (GRPOExtTrainer, {})
    if plays:
        more["environments"] = [{"path": Once, "isolate": False}]
    trainer = kind(
        tiny.model(),
        rewards or [tiny.spread if plays else tiny.count_a],
        args,
        PLAY if plays else tiny.prompts(12),
        eval_dataset=None if plays else tiny.prompts(4),
        processing_class=tiny.tokenizer(),
        peft_config=peft,
        **more,
    )
    if sampler is not None:
        sample_by(trainer, sampler(lambda: trainer.accelerator.unwrap_model(trainer.model), trainer.eos_token_ids))
    return trainer


def sample_by(trainer, sampler):
    """Let a trainer sample by another one beside it."""
    trainer.collector.inference_engine = sampler
    if trainer.collector.ahead is not None:
        trainer.collector.ahead.sampler = sampler
    return sampler


class Until(TrainerCallback):
    """Ends the run after a step."""

    def __init__(self, last):
        self.last = last

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.last


def trained(*args, resume=None, until=None, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    if until is not None:
        trainer.add_callback(Until(until))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(trainer, other):
    weights, others = trainers.weights(trainer.model), trainers.weights(other.model)
    assert torch.equal(weights, others)
    assert not torch.equal(weights, trainers.weights(tiny.model()))
    for row, its in zip(trainer.state.log_history, other.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "reward", "completions/mean_length", "sampling/kept", "kl"):
            assert row.get(name) == its.get(name), (row["step"], name)


def often_silent(completions, **_):
    """A reward that is the same for all of many a group."""
    return [float("e" in completion) for completion in completions]


CASES = {
    "plain": {},
    "several steps a generation": {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 9},
    "a generation used twice": {"num_iterations": 2, "max_steps": 9},
    "the KL penalty, tokens masked, sequences rejected": {
        "beta": 0.1,
        **tiny.MOVING_REFERENCE,
        "sampler_correction": [
            {"level": "token", "lower": 0.5, "upper": 2.0, "action": "mask"},
            {"level": "geometric", "statistic": "k1", "upper": 0.5, "lower": -0.5, "action": "reject"},
        ],
    },
    "an adapter": {"peft": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)},
    "environments": {"plays": True, "max_completion_length": 12, "max_steps": 5},
    "dynamic sampling": {"dynamic_sampling": "reward", "rewards": [often_silent], "max_steps": 5},
    "the sampler's old log-probabilities": {"old_logps": "sampler"},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("plain", "epochs")])
def test_the_bits_are_those_of_sampling_in_sequence_by_older_weights(case, tmp_path):
    ahead = 1 if case == "several steps a generation" else 2
    trainer = trained(tmp_path / "ahead", ahead, **CASES[case])
    assert_same(trainer, trained(tmp_path / "sequence", ahead, in_sequence=True, **CASES[case]))
    if case == "dynamic sampling":
        assert len(trainer.collector.inference_engine.asked) > 2 * trainer.state.max_steps, (
            "hardly a group was replaced"
        )


@pytest.mark.slow
def test_older_weights_sample_and_are_forgotten(tmp_path):
    fresh, older = (trained(tmp_path, ahead, in_sequence=True) for ahead in (0, 2))
    assert not torch.equal(trainers.weights(fresh.model), trainers.weights(older.model))
    trainer = trained(tmp_path, 2)
    sampler = trainer.collector.inference_engine
    assert sampler.asked == [(version, 8) for version in (0, 0, 0, 1, 2, 3, 4)]
    assert sampler.published == [0, 1, 2, 3, 4]
    assert sampler.forgotten[:4] == [0, 1, 2, 3]
    assert [row["overlap/age"] for row in trainer.state.log_history[:-1]] == [0, 1, 2, 2, 2, 2, 2]
    ratios = [row["sampling/importance_sampling_ratio/max"] for row in trainer.state.log_history[:-1]]
    assert ratios[0] == pytest.approx(1, abs=1e-5)  # sampled by the weights that train
    assert max(ratios) > 1.05


def test_a_generation_is_sampled_while_an_earlier_one_trains(tmp_path):
    steps, begun = [], threading.Event()

    class Waiting(Copies):
        """Samples the second window only when the first has begun to train."""

        def sample(self, version, *request, **more):
            assert version == 0 or begun.wait(60)
            return super().sample(version, *request, **more)

    class Noting(GRPOExtTrainer):
        def training_step(self, *args, **kwargs):
            begun.set()
            loss = super().training_step(*args, **kwargs)
            steps.append([*self.collector.ahead.submitted])
            return loss

    args = GRPOExtConfig(output_dir=str(tmp_path), **SETTINGS, rollout_ahead=1)
    trainer = Noting(tiny.model(), tiny.count_a, args, tiny.prompts(12), processing_class=tiny.tokenizer())
    sample_by(trainer, Waiting(lambda: trainer.model, trainer.eos_token_ids))
    trainer.train()
    assert steps[::2] == [[1], [2], [3], [4], [5], [6], []]


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", ["a generation used twice", "environments", "dynamic sampling", "epochs"])
def test_a_resumed_run_has_the_bits_of_one_that_went_through_and_samples_nothing_twice(case, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1} | CASES[case]
    through = trained(tmp_path, 2, **saving)
    windows = -(-through.state.max_steps * through.args.gradient_accumulation_steps // through._uses)
    for step in (3, through.state.max_steps - 2) if case == "a generation used twice" else (3,):
        resumed = trained(tmp_path, 2, resume=str(tmp_path / f"checkpoint-{step}"), **saving)
        assert torch.equal(trainers.weights(through.model), trainers.weights(resumed.model))
        begun = -(-step * through.args.gradient_accumulation_steps // through._uses)
        if case not in ("environments", "dynamic sampling"):  # which ask for more than one batch a window
            assert len(resumed.collector.inference_engine.asked) == max(0, windows - begun - 2)


@pytest.mark.slow
def test_a_resumed_run_that_is_stopped_at_once_can_be_resumed(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "max_steps": 6}
    through = trained(tmp_path / "through", 1, **saving)
    trained(tmp_path / "twice", 1, until=3, **saving)
    # from the middle of a generation to its end, so that none begins
    trained(tmp_path / "twice", 1, until=4, resume=str(tmp_path / "twice" / "checkpoint-3"), **saving)
    resumed = trained(tmp_path / "twice", 1, resume=str(tmp_path / "twice" / "checkpoint-4"), **saving)
    assert torch.equal(trainers.weights(through.model), trainers.weights(resumed.model))


class LostAt(Copies):
    """Is lost at one of its requests."""

    fails_at = 3

    def sample(self, *args, **kwargs):
        if len(self.asked) == self.fails_at:
            raise SamplerLost("the process that samples is gone")
        return super().sample(*args, **kwargs)


def test_a_lost_sampler_ends_the_run_which_resumes_with_the_same_bits(tmp_path):
    with pytest.raises(SamplerLost, match=r"is gone\nThe run can be resumed from .*checkpoint-3"):
        trained(tmp_path / "lost", 2, sampler=LostAt)
    resumed = trained(tmp_path / "lost", 2, resume=str(tmp_path / "lost" / "checkpoint-3"))
    assert torch.equal(trainers.weights(resumed.model), trainers.weights(trained(tmp_path, 2).model))


class Told(TrainerCallback):
    """Gets a signal in the third step, which does not end before something hangs."""

    def __init__(self, hangs):
        self.hangs = hangs

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # another thread reads it

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        assert state.global_step < 2 or self.hangs.wait(300)


def of_its_step(completions, trainer_state, **_):
    """A reward that depends on when it was asked for."""
    last = len(trainer_state.log_history)
    return [trainer_state.global_step + 0.1 * last + a for a in tiny.count_a(completions)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("hanging", "again"), [("sampler", [(2, 8)]), ("reward", [])])
def test_a_signal_does_not_wait_for_windows_in_flight_and_costs_no_bit(hanging, again, tmp_path):
    """The second of two windows in flight hangs; its completions are sampled again if they are what it lacked."""
    hangs, ended = threading.Event(), threading.Event()

    class Hanging(Copies):
        def sample(self, *args, **kwargs):
            if hanging == "sampler" and len(self.asked) == 4 and not ended.is_set():
                hangs.set()
                self.seconds = 600.0
            return super().sample(*args, **kwargs)

    def judge(completions, trainer_state, **_):
        if hanging == "reward" and trainer_state.global_step == 2 and not ended.is_set():
            hangs.set()
            ended.wait(600)
        return of_its_step(completions, trainer_state)

    settings = {"rewards": [judge], "save_strategy": "no"}
    trainer = trainer_of(tmp_path / "told", 2, sampler=Hanging, **settings)
    trainer.add_callback(Told(hangs))
    began = time.monotonic()
    with pytest.raises(RunInterrupted, match="saved checkpoint-3"):
        trainer.train()
    assert time.monotonic() - began < 300
    ended.set()
    resumed = trained(tmp_path / "told", 2, resume=True, **settings)
    assert_same(trained(tmp_path / "through", 2, **settings), resumed)
    assert resumed.collector.inference_engine.asked == [*again, (3, 8), (4, 8)]


class LostForReplacements(Copies):
    """Is lost when the main thread asks for the fifth time for groups in place of silent ones."""

    replacements = 0

    def sample(self, *args, **kwargs):
        if threading.current_thread() is threading.main_thread():
            self.replacements += 1
            if self.replacements == 5:
                raise SamplerLost("the process that samples is gone")
        return super().sample(*args, **kwargs)


@pytest.mark.slow
def test_a_sampler_lost_in_the_middle_of_a_window_costs_no_completion_of_it(tmp_path):
    """It is lost in the third window, whose one round of replacements has a group with a signal."""
    settings = CASES["dynamic sampling"] | {"max_steps": 3}
    with pytest.raises(SamplerLost, match=r"resumed from .*checkpoint-2"):
        trained(tmp_path / "lost", 2, sampler=LostForReplacements, **settings)
    resumed = trained(tmp_path / "lost", 2, resume=str(tmp_path / "lost" / "checkpoint-2"), **settings)
    through = trained(tmp_path, 2, **settings)
    assert through.state.log_history[2]["dynamic_sampling/rounds"] == 1
    assert torch.equal(trainers.weights(resumed.model), trainers.weights(through.model))
    assert without_clocks(resumed.state.log_history[2:3]) == without_clocks(through.state.log_history[2:3])


class Odd:
    """Something that no checkpoint reads back."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("logged", "scorings"), [(np.int64(3), 2), (Odd(), 4)])
def test_scores_that_a_checkpoint_cannot_hold_are_made_again_but_no_completion_is(logged, scorings, tmp_path):
    calls = []

    def logs(completions, log_extra, log_metric, **_):
        calls.append(len(completions))
        log_extra("column", [logged for _ in completions])
        log_metric("mean", np.mean([1.0, 2.0]))
        return tiny.count_a(completions)

    saving = {"save_strategy": "steps", "save_steps": 1, "rewards": [logs]}
    through = trained(tmp_path, 2, **saving)
    calls.clear()
    resumed = trained(tmp_path, 2, resume=str(tmp_path / "checkpoint-3"), **saving)
    assert torch.equal(trainers.weights(through.model), trainers.weights(resumed.model))
    assert resumed.collector.inference_engine.asked == [(version, 8) for version in (3, 4)]
    assert len(calls) == scorings


@pytest.mark.slow
def test_a_resumed_run_asks_a_reward_again_that_had_failed_for_windows_in_flight(tmp_path):
    broken = [True]

    def judge(completions, trainer_state, **_):
        if broken and trainer_state.global_step > 1:
            raise RuntimeError("no judge")
        return tiny.count_a(completions)

    saving = {"save_strategy": "steps", "save_steps": 1, "rewards": [judge]}
    with pytest.raises(RewardError, match="no judge"):
        trained(tmp_path, 2, **saving)
    broken.clear()
    resumed = trained(tmp_path, 2, resume=True, **saving)
    through = trained(tmp_path / "through", 2, **saving)
    assert torch.equal(trainers.weights(through.model), trainers.weights(resumed.model))
    assert len(resumed.collector.inference_engine.asked) == 1


@pytest.mark.slow
def test_an_error_ends_a_reward_that_is_scored_in_flight(tmp_path, caplog):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ValueError("of a callback")

    stuck = {"name": "stuck", "func": "support.samplers:stuck_at_the_second_call", "timeout": 600}
    trainer = trainer_of(tmp_path, 2, rewards=[stuck])
    trainer.add_callback(Failing())
    began = time.monotonic()
    with pytest.raises(ValueError, match="of a callback"):
        trainer.train()
    assert time.monotonic() - began < 300
    assert not [thread for thread in threading.enumerate() if "grpo_ext background" in thread.name]
    assert not [worker for worker in trainer.reward_runtime.pool._workers if worker is not None]
    assert "failed" not in caplog.text  # the reward did not


def test_a_failing_reward_ends_the_run_as_in_sequence(tmp_path):
    def broken(completions, trainer_state, **_):
        if trainer_state.global_step > 1:
            raise RuntimeError("no judge")
        return tiny.count_a(completions)

    messages = []
    for in_sequence in (True, False):
        with pytest.raises(Exception, match="no judge") as caught:
            trained(tmp_path, 1, rewards=[broken], in_sequence=in_sequence)
        messages.append(type(caught.value))
    assert messages[0] is messages[1]
    assert not [thread for thread in threading.enumerate() if "grpo_ext background" in thread.name]


def test_rows_that_the_dataloader_changes_are_refused(tmp_path):
    class Changed(GRPOExtTrainer):
        def get_train_dataloader(self):
            self.train_dataset = self.train_dataset.map(lambda row: {"prompt": row["prompt"] + "!"})
            loader = super().get_train_dataloader()
            self.train_dataset = tiny.prompts(12)
            return loader

    args = GRPOExtConfig(output_dir=str(tmp_path), **SETTINGS, rollout_ahead=1)
    trainer = Changed(tiny.model(), tiny.count_a, args, tiny.prompts(12), processing_class=tiny.tokenizer())
    sample_by(trainer, Copies(lambda: trainer.model, trainer.eos_token_ids))
    with pytest.raises(ConfigError, match="the dataloader's rows are not those"):
        trainer.train()


class OneVersion(Copies):
    """Has one version, as a vLLM server; a push waits only for requests that have begun."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.working = threading.Lock()

    def publish(self, version, weights=None):
        with self.working:
            self.models.clear()
            super().publish(version, weights)

    def copy_of(self, version):
        return None

    def sample(self, *args, **kwargs):
        with self.working:
            return super().sample(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "ahead"), [("plain", 4), ("environments", 2)])
def test_a_server_gets_new_weights_when_no_window_needs_the_old_ones(case, ahead, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_ext.trainer.ahead.samples_by_server", lambda _: True)
    monkeypatch.setattr(GRPOExtTrainer, "vllm_generation", SimpleNamespace(adapts=False), raising=False)
    assert_same(
        trained(tmp_path / "server", ahead, sampler=OneVersion, **CASES[case]),
        trained(tmp_path / "sequence", ahead, in_sequence=True, **CASES[case]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", ["evaluation in between", "dynamic sampling"])
def test_rewards_are_never_called_by_two_threads_at_once(case, tmp_path):
    calls, together = threading.Lock(), []

    def reward(completions, **_):
        free = calls.acquire(blocking=False)
        together.append(not free)
        time.sleep(0.03)
        if free:
            calls.release()
        return often_silent(completions)

    trained(tmp_path, 4, **(CASES[case] | {"rewards": [reward]}))
    assert len(together) > 7
    assert not any(together)


def test_a_second_call_of_train_does_not_begin_with_what_a_checkpoint_had(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "max_steps": 6}
    trained(tmp_path / "saved", 1, until=3, **saving)
    trainer = trainer_of(tmp_path / "saved", 1, **saving)
    trainer.add_callback(stop := Until(4))
    # ends with the generation in whose middle it resumes, so that none begins
    trainer.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-3"))
    trainer.remove_callback(stop)
    sampler = sample_by(trainer, Copies(lambda: trainer.model, trainer.eos_token_ids))
    trainer.train()
    assert sampler.asked[:3] == [(0, 8), (0, 8), (1, 8)]


def test_older_weights_are_those_of_the_process_that_saves_on_this_machine(tmp_path):
    """Under `save_on_each_node` the second machine has files of its own processes only, 2 and 3."""
    in_flight.write(tmp_path, 2, in_flight.InFlight([(1, None)], {1: {"w": torch.ones(2)}}, 4))
    in_flight.write(tmp_path, 3, in_flight.InFlight([(1, None)], {}, 4))
    assert [*in_flight.read(tmp_path, 3, saver=2).weights] == [1]
    assert not in_flight.read(tmp_path, 3).weights


@pytest.mark.slow
@pytest.mark.usefixtures("forked_samplers")
@pytest.mark.parametrize("case", ["plain", "an adapter"])
def test_the_process_that_samples_gives_the_same_bits_ahead_as_in_sequence(case, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "sampler": None} | CASES[case]
    ahead = trained(tmp_path / "ahead", 2, **saving)
    assert_same(ahead, trained(tmp_path / "sequence", 2, in_sequence=True, **saving))
    resumed = trained(tmp_path / "ahead", 2, resume=str(tmp_path / "ahead" / "checkpoint-3"), **saving)
    assert torch.equal(trainers.weights(ahead.model), trainers.weights(resumed.model))


@pytest.mark.slow
def test_two_processes_train_the_bits_of_sampling_in_sequence(tmp_path):
    out = run_forked(__file__, tmp_path, config=CONFIG)
    assert out.count("the same bits") == len(ON_TWO)


ON_TWO = {"a generation used twice": 2, "environments": 2, "dynamic sampling": 4, "an adapter": 1}
"""Generations ahead."""


def compare_on_two(folder):
    """One of two processes."""
    for case, ahead in ON_TWO.items():
        settings = CASES[case] | {"per_device_train_batch_size": 2}
        saving = settings | {"save_strategy": "steps", "save_steps": 4}
        whole = trained(folder, ahead, in_sequence=True, **settings)
        assert_same(trained(f"{folder}/{case}", ahead, **saving), whole)
        resumed = trained(f"{folder}/{case}", ahead, resume=f"{folder}/{case}/checkpoint-4", **saving)
        assert torch.equal(trainers.weights(whole.model), trainers.weights(resumed.model))
        whole.accelerator.print("the same bits")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    compare_on_two(sys.argv[1])
