"""A second call of `train` begins without the errors of the first; a stream that is too short is an error."""

import pytest

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.errors import DataError, RewardError
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.runtime import Runtime
from support import tiny
from support.trainers import build, scripted_rollout


class Flaky:
    """A reward that fails while it is broken."""

    broken = True

    def score(self, completions, **_):
        if self.broken:
            raise RuntimeError("the judge is away")
        return tiny.count_a(completions)


def of_a_user(flaky):
    return [flaky.score]


def of_a_recipe(flaky, monkeypatch):
    monkeypatch.setattr(RewardSpec, "callable", property(lambda self: flaky.score))
    return Runtime([RewardSpec("flaky", "support.tiny:count_a", on_error="raise")], workers=0).functions


@pytest.mark.parametrize("recipe", [False, True])
def test_an_error_of_a_reward_is_raised_once_per_call(recipe, model_path, tmp_path, monkeypatch):
    flaky = Flaky()
    rewards = of_a_recipe(flaky, monkeypatch) if recipe else of_a_user(flaky)
    trainer = build(model_path, tmp_path, rewards, rollout=scripted_rollout, max_steps=1)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"^[^\n]*the judge is away[^\n]*$"):
            trainer.train()
    flaky.broken = False
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_a_stream_shorter_than_one_generation_is_an_error(rows, model_path, tmp_path):
    """Stock TRL trains 0 steps and reports success; as many prompts as one generation takes are enough."""
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | {"max_steps": 1}))
    stream = tiny.prompts(rows).to_iterable_dataset()
    trainer = GRPOExtTrainer(model_path, [tiny.length], args, stream, processing_class=tiny.tokenizer())
    if rows == 1:
        with pytest.raises(DataError, match=r"before the 2 prompts .* 8 / num_generations 4\), so that 0 steps"):
            trainer.train()
    else:
        assert trainer.train().global_step == 1
