"""`overlap: step` trains what a run without it trains: groups arrive one by one, and nothing else changes."""

import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step
from grpo_ext.errors import ConfigError, SamplerLost
from grpo_ext.objective.losses import losses
from grpo_ext.rollout.samplers import Sampled
from support import tiny, trainers
from support.float64 import float64_throughout
from support.processes import CONFIG, run_forked

SETTINGS = {
    **tiny.TRAINING,
    **{"rollout_engine": "process", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    **{"num_generations": 4, "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "max_steps": 3},
}
OTHER_TIME = ("time", "seconds", "overlap/", "runtime", "second")


class Drawn:
    """A sampler whose completions depend on the row's stream only; reports rows last to first, if it may."""

    versions = frozenset[int]()

    def publish(self, version):
        self.versions = frozenset({version})

    def forget(self, version):
        self.versions -= {version}

    def paused(self):
        return nullcontext()

    def close(self):
        self.versions = frozenset()

    def sample(self, version, contexts, limits, streams, done=None):
        assert version in self.versions
        made = []
        for limit, stream in zip(limits, streams, strict=True):
            ids = stream.integers(3, len(tiny.WORDS), int(stream.integers(1, limit + 1))).tolist()
            made.append(
                Sampled(ids if len(ids) == limit else [*ids, 1], [-1.0] * (len(ids) + (len(ids) < limit)), None)
            )
        for row in reversed(range(len(made))):
            if done is not None:
                done(row, made[row])
        return made


def train(folder, overlap, *, sampler=Drawn, rewards=(tiny.count_a, tiny.length), resume=None, peft=None, **settings):
    args = GRPOExtConfig(output_dir=str(folder), **(SETTINGS | settings), overlap=overlap)
    trainer = GRPOExtTrainer(
        tiny.model(dtype=torch.float64),
        list(rewards),
        args,
        tiny.prompts(64),
        eval_dataset=tiny.prompts(8),
        processing_class=tiny.tokenizer(),
        peft_config=peft,
    )
    if sampler is not None:
        trainer._beside = sampler()
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def figures(trainer):
    rows = ({k: v for k, v in row.items() if not any(w in k for w in OTHER_TIME)} for row in trainer.state.log_history)
    return [{k: v for k, v in row.items() if isinstance(v, float | int)} for row in rows]


def assert_equal(trainer, other):
    weights, others = trainers.weights(trainer.model), trainers.weights(other.model)
    assert trainer.state.log_history[0]["grad_norm"] > 1e-3
    assert (weights - others).abs().max() <= 1e-12
    for row, its in zip(figures(trainer), figures(other), strict=True):
        assert row == pytest.approx(its, rel=1e-5, abs=1e-7)


CASES = {
    "one step a generation": {},
    "the KL penalty": {"beta": 0.1, **tiny.MOVING_REFERENCE},
    "several steps a generation": {"gradient_accumulation_steps": 4, "steps_per_generation": 8},
    "a generation used twice": {"num_iterations": 2, "max_steps": 4},
    "clipped gradients": {"max_grad_norm": 0.01},
    "truncated completions masked": {"mask_truncated_completions": True},
    "groups that fill micro-batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "no shared prefix": {"shared_prefix": "false"},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "an adapter": {"peft": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)},
}


@pytest.mark.parametrize("case", CASES)
def test_overlap_changes_neither_weights_nor_figures(case, tmp_path):
    with float64_throughout():
        plain, overlapped = (train(tmp_path, overlap, **CASES[case]) for overlap in (None, "step"))
    assert_equal(plain, overlapped)


EVERY = {"max_steps": 8, "gradient_accumulation_steps": 4, "rewards": (trainers.binary,), "shared_prefix": "false"}
"""Settings under which every loss is compared: chunks of four rows, two for each process."""


@pytest.mark.slow
@pytest.mark.parametrize("loss", losses)
def test_every_loss_trains_the_same_weights(loss, tmp_path):
    with float64_throughout():
        plain, overlapped = (train(tmp_path, overlap, **EVERY, loss_type=loss) for overlap in (None, "step"))
    assert_equal(plain, overlapped)


def test_a_run_repeats_to_the_bit(tmp_path):
    first, second = (train(tmp_path, "step") for _ in range(2))
    assert torch.equal(trainers.weights(first.model), trainers.weights(second.model))


@pytest.mark.parametrize("case", ["one step a generation", "several steps a generation"])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(case, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4} | CASES[case]
    through = train(tmp_path, "step", **saving)
    for step in (1, 2, 3):
        resumed = train(tmp_path, "step", resume=str(tmp_path / f"checkpoint-{step}"), **saving)
        assert torch.equal(trainers.weights(through.model), trainers.weights(resumed.model))


@pytest.mark.parametrize("case", ["one step a generation", "several steps a generation", "a generation used twice"])
def test_a_sampler_lost_between_two_micro_batches_costs_the_generation_and_no_bit(case, tmp_path):
    settings = CASES[case] | {"max_steps": 6}
    through = train(tmp_path / "through", "step", **settings)
    begun = []

    class Lost(Drawn):
        """Is lost in the third generation, when some of its groups have trained."""

        def sample(self, *request, done=None):
            begun.append(request)
            if len(begun) != 3:
                return super().sample(*request, done=done)
            for row, sampled in enumerate(super().sample(*request)[:8]):
                done(row, sampled)
            raise SamplerLost("the process that samples is gone")

    with pytest.raises(SamplerLost, match=r"resumed from .*checkpoint-(2|4)") as lost:
        train(tmp_path / "lost", "step", sampler=Lost, **settings)
    checkpoint = str(lost.value).rpartition(" ")[2].rstrip(".")
    resumed = train(tmp_path / "lost", "step", resume=checkpoint, **settings)
    assert torch.equal(trainers.weights(through.model), trainers.weights(resumed.model))
    assert figures(resumed)[:-1] == figures(through)[:-1]


class Twice(Conversation):
    """Answers once."""

    answered = False

    def reset(self, row):
        return [{"role": "user", "content": "ab"}]

    def step(self, message):
        done, self.answered = self.answered, True
        return Step(done=True) if done else Step([{"role": "user", "content": "cd"}])

    def get_reward(self):
        return 0.5


def test_environments_are_played_and_logged_as_without_overlap(tmp_path):
    def letters(completions, **_):
        return [float(sum(ord(c) % 5 for message in one for c in message["content"])) for one in completions]

    found = []
    for overlap in (None, "step"):
        args = GRPOExtConfig(output_dir=str(tmp_path), **(SETTINGS | {"max_completion_length": 16}), overlap=overlap)
        rows = [{"prompt": [{"role": "user", "content": f"play {i}"}]} for i in range(64)]
        environments = [{"path": Twice, "isolate": False}]
        model = tiny.model(dtype=torch.float64)
        with float64_throughout():
            trainer = GRPOExtTrainer(
                model, [letters], args, rows, processing_class=tiny.tokenizer(), environments=environments
            )
            trainer._beside = Drawn()
            trainer.train()
        found.append(trainer)
    assert_equal(*found)
    assert found[0].state.log_history[0]["environments/Twice/turns"] > 1


def test_groups_train_while_later_ones_are_still_sampled(tmp_path):
    scored, losses, trained = [], [], threading.Event()

    class Waiting(Drawn):
        """Reports the first group, and the others when a micro-batch has trained."""

        def sample(self, *request, done=None):
            made = super().sample(*request)
            for row, sampled in enumerate(made):
                assert row < 4 or trained.wait(60)
                done(row, sampled)
            return made

    def noting(completions, **_):
        scored.append(len(completions))
        return [float(len(c)) for c in completions]

    class Noting(GRPOExtTrainer):
        def training_step(self, *args, **kwargs):
            losses.append(super().training_step(*args, **kwargs).item())
            trained.set()
            return torch.tensor(losses[-1])

    args = GRPOExtConfig(output_dir=str(tmp_path), **(SETTINGS | {"max_steps": 1}), overlap="step")
    trainer = Noting(tiny.model(), noting, args, tiny.prompts(64), processing_class=tiny.tokenizer())
    trainer._beside = Waiting()
    trainer.train()
    assert scored == [4] * 4  # each group once
    assert losses[:-1] == [0.0] * 7
    assert losses[-1] != 0  # the step's loss, once its denominators are known


def test_a_failing_reward_ends_the_run_as_without_overlap(tmp_path):
    def broken(completions, **_):
        raise RuntimeError("no judge")

    messages = []
    for overlap in (None, "step"):
        with pytest.raises(Exception, match="no judge") as caught:
            train(tmp_path, overlap, rewards=(broken,))
        messages.append(type(caught.value))
    assert messages[0] is messages[1]


WHOLE = {
    "advantages": {"advantage_estimator": "batch"},
    "aggregation": {"loss_type": "bnpo"},
    "entropy": {"entropy_coef": 0.01},
    "one micro-batch": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_needs_the_whole_batch_waits_for_it_and_says_so(case, tmp_path, capsys):
    trainer = train(tmp_path, "step", **WHOLE[case])
    assert "overlap step: none, because" in capsys.readouterr().out
    assert trainer.state.global_step == 3


REFUSED = {
    "rollout_engine": {"rollout_engine": "auto"},
    "colocated vLLM": {"use_vllm": True, "vllm_mode": "colocate"},
    "dynamic_sampling": {"dynamic_sampling": "reward"},
    "loss_defaults": {"loss_defaults": "trl"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_overlap_is_refused(case, tmp_path):
    with pytest.raises(ConfigError, match="overlap"):
        GRPOExtConfig(output_dir=str(tmp_path), **(SETTINGS | REFUSED[case]), overlap="step")


@pytest.mark.slow
def test_two_processes_train_the_same_weights_with_and_without_overlap(tmp_path):
    out = run_forked(__file__, tmp_path, config=CONFIG)
    assert out.count("the same weights") == len(ON_TWO)


ON_TWO = {
    **{loss: EVERY | {"loss_type": loss} for loss in losses},
    "the KL penalty": {"beta": 0.1},
    "several steps": {"gradient_accumulation_steps": 4, "steps_per_generation": 8},
}


def compare_on_two(folder):
    """One of two processes."""
    for settings in ON_TWO.values():
        with float64_throughout():
            plain, overlapped = (train(folder, overlap, **settings) for overlap in (None, "step"))
        assert_equal(plain, overlapped)
        plain.accelerator.print("the same weights")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_process_that_samples_gives_the_same_weights_with_and_without_overlap(tmp_path):
    with float64_throughout():
        plain, overlapped = (train(tmp_path, overlap, sampler=None) for overlap in (None, "step"))
    weights, others = trainers.weights(plain.model), trainers.weights(overlapped.model)
    assert (weights - others).abs().max() <= 1e-12


if __name__ == "__main__":
    compare_on_two(sys.argv[1])
