"""The collector of generations with a fake sampler and a trainer of hooks alone: no model, no engine."""

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grpo_ext.rollout.collected import Collected, Finished

from grpo_ext.errors import ConfigError, SamplerLost
from grpo_ext.rewards.containment import for_trl
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.seeds import Source, numbered
from grpo_ext.trainer.collecting import Collector

ROWS = [{"prompt": prompt, "number": i} for i, prompt in enumerate(("one", "one", "two", "two"))]
ATTEMPTS = numbered(7, Source.TRAINING, range(4), 2)
END = 9


class Echo:
    """Says each context backwards, with one token of the row's own random numbers; it forgets nothing by itself."""

    together, takes_streams, limit = False, True, 3

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

    def sample(self, version, contexts, limits, streams):
        assert version in self.versions
        return super().sample(contexts, limits, streams)

    @contextmanager
    def paused(self):
        yield

    def close(self):
        self.closed = True


class Trainer:
    """TRL's hooks: prompts are numbers of letters, rewards the first token."""

    def __init__(self, beside=None, training=True, **settings):
        self.model, self.use_vllm, self._last_loaded_step = SimpleNamespace(training=training), False, None
        self.state, self.args = SimpleNamespace(global_step=0), SimpleNamespace(environment_waves="ready", **settings)
        self._tokenizer, self.eos_token_ids = SimpleNamespace(eos_token_id=END, pad_token_id=0), [END]
        self._times = SimpleNamespace(during=lambda _: nullcontext())
        self._pending_extra_logs, self._metrics = defaultdict(list), {"train": defaultdict(list)}
        self._evaluated, self._sampler_corrected, self.environment_factories, self.tools = None, False, None, []
        self._scorer = SimpleNamespace(choose_way=lambda *_: None, multimodal=())
        self.accelerator, self._unwrapped = SimpleNamespace(gather=lambda values: values), None
        self.reward_weights = torch.ones(1)
        rewards = SimpleNamespace(
            schedule_weights=lambda *_: None,
            checked=lambda rewards, *_: rewards,
            turn_rewards=lambda *_: [],
            runtime=None,
        )
        self.collector = Collector(self, Echo(), beside, rewards)

    def attempt_ids(self, rows):
        return ATTEMPTS[:rows]

    def _sampling(self):
        return nullcontext()

    def _generate(self, prompts):
        def stock(prompts):
            ids = [[len(prompt), place] for place, prompt in enumerate(prompts)]
            completions, logps = self.collector.turn(ids, {}, 2, has_tool_images=False)
            return ids, completions, None, [str(made) for made in completions], logps, {"column": "x"}, None, []

        return self.collector.generated(stock, prompts)

    def _calculate_rewards(self, rows, prompts, completions, completion_ids):
        stock = lambda *given: torch.tensor([[float(ids[0])] for ids in completion_ids])  # noqa: E731
        return self.collector.rewarded(stock, rows, prompts, completions, completion_ids)


def test_a_generation_has_its_rows_completions_and_rewards_in_order():
    trainer = Trainer()
    made = trainer.collector.generation(ROWS)
    assert made.generated.completion_ids == [[0, 3], [1, 3], [2, 3], [3, 3]]
    assert made.generated.logprobs == [[-0.5, -0.5]] * 4
    assert made.rewards.tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert [row["number"] for row in made.rows] == [0, 1, 2, 3]
    assert all(row["column"] == "x" for row in made.rows)
    assert trainer.collector.own.asked == [(4, [3] * 4, False, {"fields": {}, "group": 2})]


def test_what_samples_beside_the_training_gets_the_weights_of_each_step_once_and_a_stream_for_each_attempt():
    beside = Beside()
    trainer = Trainer(beside)
    first, again = (trainer.collector.generation(ROWS).generated.completion_ids for _ in range(2))
    trainer.state.global_step = 1
    trainer.collector.generation(ROWS)
    assert beside.published == [0, 1]
    assert beside.versions == {1}
    contexts = ([3, place] for place in range(4))
    assert first == again == [[*ids[::-1], number] for ids, number in zip(contexts, numbers(), strict=True)]
    assert trainer.collector.own.asked == []


def numbers():
    return [int(np.random.Generator.integers(attempt.stream(), 9)) for attempt in ATTEMPTS]


def test_an_evaluation_samples_by_the_policy_itself():
    beside = Beside()
    trainer = Trainer(beside, training=False)
    trainer.collector.generation(ROWS)
    assert not beside.asked
    assert len(trainer.collector.own.asked) == 1


def test_a_window_that_is_ready_is_neither_sampled_nor_published_again():
    beside = Beside()
    trainer = Trainer(beside)
    finished = Finished([[5], [6], [7], [8]], [[-1.0]] * 4, ["a", "b", "c", "d"])
    trainer.collector.ahead = SimpleNamespace(taking=lambda rows: nullcontext(), finished=lambda _: finished, age=2)
    made = trainer.collector.generation(ROWS)
    assert made.generated.completion_ids == [[5], [6], [7], [8]]
    assert made.rewards.tolist() == [[5.0], [6.0], [7.0], [8.0]]
    assert (beside.asked, beside.published, trainer.collector.age) == ([], [], 2)


def test_an_empty_completion_is_the_end_token_whose_probability_is_unknown():
    trainer = Trainer()
    trainer.collector.own.said = lambda contexts, streams: [Sampled([], [], None)] * len(contexts)
    made = trainer.collector.generation(ROWS).generated
    assert made.completion_ids == [[END]] * 4
    assert made.logprobs == [[None]] * 4


def test_a_lost_sampler_leaves_nothing_half_made():
    beside = Beside()
    trainer = Trainer(beside)

    def lost(*_):
        raise SamplerLost("gone")

    beside.said = lost
    with pytest.raises(SamplerLost, match="gone"):
        trainer.collector.generation(ROWS)
    assert trainer.collector._current is None
    del beside.said
    assert trainer.collector.generation(ROWS).rewards.shape == (4, 1)
    assert beside.published == [0]


def test_tools_that_return_images_are_refused():
    with pytest.raises(ConfigError, match="image"):
        Trainer().collector.turn([[1]], {}, 1, has_tool_images=True)


def test_all_that_samples_and_scores_beside_this_process_ends_with_the_run():
    beside = Beside()
    trainer = Trainer(beside, vllm_mode="colocate")
    trainer.collector.close()
    assert beside.closed


def test_an_environments_reward_may_be_called_with_its_environments_alone():
    trainer, taken = Trainer(), []
    score = for_trl(paid_by_environments, lambda *scores: taken.append(scores), trainer.collector.ready_scores)
    trainer.collector._current = Collected(ROWS[:2], ready=Finished([[1]], None, ["a"]))
    assert score(environments=[3, 4]) == [3.0, 4.0]
    assert taken[0][1].values == [3.0, 4.0]


def paid_by_environments(environments, **_):
    return list(map(float, environments))
