"""The collector of rollouts in a real trainer, whose sampler says each context backwards."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_ext import GRPOExtTrainer
from grpo_ext.errors import SamplerLost
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rewards.scorers import OwnFunction, scored_by
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from grpo_ext.rollout.samplers import Sampled
from support import tiny
from support.trainers import build

ROWS = [{"prompt": prompt, "number": i} for i, prompt in enumerate(("abc:", "abc:", "de:", "de:"))]
END = 1
"""The tokenizer's end of a sequence."""


class Echo:
    """Says each context backwards, with one token of the row's own random numbers; it forgets nothing by itself."""

    collective, takes_streams, limit = False, True, 3

    def __init__(self):
        self.asked, self.published, self.versions = [], [], frozenset()

    def sample(self, contexts, limits, streams=None, **options):
        self.asked.append((len(contexts), list(limits), streams is not None, options))
        return self.said(contexts, streams)

    def said(self, contexts, streams):
        drawn = [[]] * len(contexts) if streams is None else [[int(stream.integers(9))] for stream in streams]
        return [
            Sampled(ids[::-1] + last, [-0.5] * (len(ids) + len(last)), None)
            for ids, last in zip(contexts, drawn, strict=True)
        ]


class Beside(Echo):
    def publish(self, version, weights=None):
        self.published.append(version)
        self.versions = self.versions | {version}

    def forget(self, version):
        self.versions = self.versions - {version}

    def sample(self, version, contexts, limits, streams, images=None):
        assert version in self.versions
        return super().sample(contexts, limits, streams)

    @contextmanager
    def paused(self):
        yield

    def close(self):
        self.closed = True


def first_token(completions, completion_ids, number, log_extra, log_metric, **_):
    log_extra("seen", list(number))
    log_metric("numbers", float(sum(number)))
    return [float(ids[0]) for ids in completion_ids]


@pytest.fixture
def make(tmp_path):
    def made(beside=None, kind=GRPOExtTrainer, training=True, **settings):
        settings = {"num_generations": 2, "generation_batch_size": 4, "gradient_accumulation_steps": 1} | settings
        one = build(tiny.model(), tmp_path, [first_token], kind=kind, per_device_train_batch_size=4, **settings)
        one.collector.policy, one.collector.inference_engine = Echo(), beside
        one.model.train(training)
        return one

    return made


def contexts():
    return tiny.tokenizer()([row["prompt"] for row in ROWS])["input_ids"]


def test_a_generation_has_its_rows_completions_and_rewards_in_order(make):
    trainer = make()
    made = trainer.collector.generation(ROWS)
    backwards = [ids[::-1] for ids in contexts()]
    assert made.generated.completion_ids == backwards
    assert made.generated.completions == tiny.tokenizer().batch_decode(backwards, skip_special_tokens=True)
    assert made.generated.logprobs == [[-0.5] * len(ids) for ids in backwards]
    assert made.rewards.tolist() == [[float(ids[0])] for ids in backwards]
    assert made.logged == {"seen": [0, 1, 2, 3]}
    assert trainer._pending_metrics["numbers"] == [6.0]
    assert [row["number"] for row in made.rows] == [0, 1, 2, 3]
    assert trainer.collector.policy.asked == [(4, [3] * 4, False, {"fields": {}, "images": None, "group": 2})]
    assert trainer._metrics["train"]["completions/mean_length"] == [3.5]
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [1.0]
    assert trainer.state.num_input_tokens_seen == 28


def test_what_samples_beside_the_training_gets_the_weights_of_each_step_once_and_a_stream_for_each_attempt(make):
    beside = Beside()
    trainer = make(beside)
    attempts = trainer.attempt_ids(4)
    first, again = (trainer.collector.generation(ROWS).generated.completion_ids for _ in range(2))
    trainer.state.global_step = 1
    trainer.collector.generation(ROWS)
    assert beside.published == [0, 1]
    assert beside.versions == {1}
    drawn = [int(np.random.Generator.integers(attempt.stream(), 9)) for attempt in attempts]
    assert first == again == [[*ids[::-1], last] for ids, last in zip(contexts(), drawn, strict=True)]
    assert trainer.collector.policy.asked == []


def test_an_evaluation_samples_by_the_policy_itself(make):
    beside = Beside()
    trainer = make(beside, training=False)
    trainer.collector.generation(ROWS)
    assert not beside.asked
    assert len(trainer.collector.policy.asked) == 1


class Longer(GRPOExtTrainer):
    """Adds a token to each completion, as a subclass may."""

    def _generate(self, prompts):
        made = super()._generate(prompts)
        return made._replace(completion_ids=[[*ids, END] for ids in made.completion_ids], logprobs=None)


@pytest.mark.parametrize("kind", [GRPOExtTrainer, Longer])
def test_a_window_that_is_ready_is_not_sampled_again_and_scored_again_only_if_it_was_changed(make, kind):
    beside = Beside()
    trainer = make(beside, kind)
    ids = [[5], [6], [7], [8]]
    ready = Generated([[9]] * 4, ids, None, ["a", "b", "c", "d"], [[-1.0]] * 4, {}, None, [])
    scored = {"first_token": Scores([0.5] * 4, [None] * 4, metrics=[("ready", 1.0)])}
    found = RolloutBatch([], generated=ready, scored=scored)
    trainer.collector.ahead = SimpleNamespace(taking=lambda rows: nullcontext(), finished=lambda _: found, age=2)
    made = trainer.collector.generation(ROWS)
    assert [row[:1] for row in made.generated.completion_ids] == ids
    assert made.rewards.tolist() == ([[0.5]] * 4 if kind is GRPOExtTrainer else [[5.0], [6.0], [7.0], [8.0]])
    assert ("ready" in trainer._pending_metrics) is (kind is GRPOExtTrainer)
    assert (beside.asked, beside.published, trainer.collector.age) == ([], [], 2)


class Turns(GRPOExtTrainer):
    """Ends each turn, as a subclass may: TRL's loop then asks for it."""

    def _generate_single_turn(self, *given):
        return [[*ids, END] for ids in super()._generate_single_turn(*given)[0]], None


def test_the_turns_of_a_subclass_are_used(make):
    trainer = make(kind=Turns)
    made = trainer.collector.generation(ROWS)
    assert made.generated.completion_ids == [[*ids[::-1], END] for ids in contexts()]
    assert trainer._metrics["train"]["completions/mean_length"] == [4.5]
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [0.0]


def test_a_completion_that_no_reward_scores_is_shown(make, caplog):
    trainer = make()
    trainer.collector.rewards.scorers["first_token"] = OwnFunction(lambda completions, **_: [1.0, None, 1.0, None])
    trainer.collector.generation(ROWS)
    [record] = [record for record in caplog.records if "returned None" in record.message]
    assert "prompt 'abc:', completion" in record.message


def test_the_turns_of_a_subclass_are_used_of_what_was_sampled_ahead(make):
    beside = Beside()
    trainer = make(beside, Turns)
    found = RolloutBatch(
        [], generated=Generated([[9]] * 4, [[5], [6], [7], [8]], None, [], [[-1.0]] * 4, {}, None, [])
    )
    trainer.collector.ahead = SimpleNamespace(taking=lambda rows: nullcontext(), finished=lambda _: found, age=2)
    made = trainer.collector.generation(ROWS)
    assert made.generated.completion_ids == [[5, END], [6, END], [7, END], [8, END]]
    assert (beside.asked, beside.published) == ([], [])


def test_an_empty_completion_is_the_end_token_whose_probability_is_unknown(make):
    trainer = make()
    trainer.collector.policy.said = lambda contexts, streams: [Sampled([], [], None)] * len(contexts)
    made = trainer.collector.generation(ROWS).generated
    assert made.completion_ids == [[END]] * 4
    assert made.logprobs == [[None]] * 4


def test_a_lost_sampler_leaves_nothing_half_made(make):
    beside = Beside()
    trainer = make(beside)

    def lost(*_):
        raise SamplerLost("gone")

    beside.said = lost
    with pytest.raises(SamplerLost, match="gone"):
        trainer.collector.generation(ROWS)
    assert trainer.collector._current is None
    del beside.said
    assert trainer.collector.generation(ROWS).rewards.shape == (4, 1)
    assert beside.published == [0]


def test_all_that_samples_and_scores_beside_this_process_ends_with_the_run(make):
    beside = Beside()
    make(beside).collector.close()
    assert beside.closed


def test_an_environments_reward_may_be_called_with_its_environments_alone():
    [scores] = scored_by({"paid": OwnFunction(paid_by_environments)}, {"environments": [3, 4]}, None).values()
    assert scores.values == [3.0, 4.0]


def paid_by_environments(environments, **_):
    return list(map(float, environments))
