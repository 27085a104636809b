"""Subclasses that override TRL's hooks, as users of stock TRL do: what they return is what trains."""

import pytest
import torch

from grpo_ext import ConfigError, GRPOExtConfig, GRPOExtTrainer
from support import tiny

LONGEST = 3


class Forward(GRPOExtTrainer):
    trained = 0

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.trained += torch.is_grad_enabled()
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class Cut(GRPOExtTrainer):
    """Generates two completions for each prompt and keeps the beginning of the second."""

    def _generate(self, prompts):
        first, second = super()._generate(prompts), super()._generate([*prompts, *prompts])
        assert len(second[1]) == 2 * len(first[1]) or self.args.dynamic_sampling
        kept = [part[-len(prompts) :] if isinstance(part, list) and part else part for part in second]
        for place in (1, 3, 4):
            kept[place] = kept[place] and [row[:LONGEST] for row in kept[place]]
        return tuple(kept)


class Scored(GRPOExtTrainer):
    """Scores twice; the second time counts."""

    def _calculate_rewards(self, inputs, prompts, completions, ids):
        super()._calculate_rewards(inputs, prompts, completions, ids)
        return super()._calculate_rewards(inputs, prompts, [f"{text}aaaaaaaaa" for text in completions], ids)


def log_of(kind, tmp_path, **settings):
    args = GRPOExtConfig(str(tmp_path), **(tiny.TRAINING | {"max_steps": 1, "seed": 1} | settings))
    trainer = kind(tiny.model(), tiny.count_a, args, tiny.prompts(), processing_class=tiny.tokenizer())
    trainer.train()
    return trainer, trainer.state.log_history[0]


@pytest.mark.parametrize("dynamic", [None, "reward"])
def test_what_a_subclass_returns_is_what_trains(dynamic, tmp_path):
    trainer, _ = log_of(Forward, tmp_path, dynamic_sampling=dynamic)
    assert trainer.trained == 1
    _, log = log_of(Cut, tmp_path, dynamic_sampling=dynamic)
    assert log["completions/length_above"] <= LONGEST
    assert log["completions/length_below"] <= LONGEST
    _, log = log_of(Scored, tmp_path, dynamic_sampling=dynamic)
    assert log["reward"] >= 9


class Scheduled(GRPOExtTrainer):
    """Changes something after the first step, which stock TRL reads at every step."""

    change = {}  # noqa: RUF012

    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 1:
            vars(self).update(self.change)
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("change", [{"epsilon_low": 0.1}, {"beta": 0.2}, {"reward_funcs": [len]}])
def test_what_is_read_once_cannot_be_changed_later(change, tmp_path):
    [name] = change
    with pytest.raises(ConfigError, match=rf"trainer\.{name}=.*: changed from .* after the trainer was made"):
        log_of(type("Changed", (Scheduled,), {"change": change}), tmp_path, max_steps=3)


def test_what_is_read_once_has_the_value_that_trains(tmp_path):
    trainer, _ = log_of(type("Same", (Scheduled,), {"change": {"epsilon_high": 0.28}}), tmp_path, max_steps=2)
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.28)  # dapo's


def test_weights_of_rewards_may_be_changed_later(tmp_path):
    change = {"reward_weights": torch.tensor([-1.0])}
    trainer, _ = log_of(type("Changed", (Scheduled,), {"change": change}), tmp_path, max_steps=3, logging_steps=1)
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert rewards[0] > 0 > rewards[-1]
