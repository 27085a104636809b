"""A run with `replay_routes`: the routes of a sampler that is not quite the policy, in the forwards that train.

The sampler stands in for vLLM: another network, whose routes are recorded as vLLM returns them.
"""

import numpy as np
import pytest
import torch
from peft import LoraConfig

from grpo_ext import ConfigError, GRPOExtConfig, GRPOExtTrainer
from grpo_ext.config.images import image_problems
from grpo_ext.config.routes import rollout_problems
from grpo_ext.errors import Problem
from grpo_ext.packing.routes import ROUTES
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from grpo_ext.trainer import in_flight
from grpo_ext.trainer.in_flight import InFlight
from support import experts, samplers, tiny
from support.trainers import build, number, weights


class StandIn:
    """Samples by weights that differ from the policy's, and returns its routes."""

    collective, takes_streams, limit = False, False, 6

    def __init__(self):
        self.model = experts.model()
        g = torch.Generator().manual_seed(5)
        for p in self.model.parameters():
            p.data.mul_(1 + 0.1 * torch.randn(p.shape, generator=g))

    def sample(self, contexts, limits, streams=None, **options):
        drawn = [
            samplers.sampled(self.model, ids, np.random.default_rng([row, *ids]).random(n), [1])
            for row, (ids, n) in enumerate(zip(contexts, limits, strict=True))
        ]
        rows = zip(drawn, contexts, strict=True)
        return [one._replace(routes=experts.chosen(self.model, [*context, *one.ids])) for one, context in rows]


class Watched(GRPOExtTrainer):
    """Keeps what it scores."""

    def _scores(self, model, inputs, active):
        scores = super()._scores(model, inputs, active)
        self.seen = [*getattr(self, "seen", []), (inputs, scores[0].detach())]
        return scores


def by_half(prompts, completions, **_):
    """Every second prompt's completions score alike, and have no advantage."""
    return [len(c) * (number(p) % 2) / 10 for p, c in zip(prompts, completions, strict=True)]


def made(tmp_path, peft_config=None, rewards=(tiny.count_a, tiny.length), replays=True, **settings):
    common = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 2, "learning_rate": 0.05, "logging_steps": 1}
    common |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "shared_prefix": "false"}
    trainer = build(experts.model(), tmp_path, rewards, kind=Watched, peft_config=peft_config, **common | settings)
    trainer.args.replay_routes = replays  # a config that asks for it needs vLLM
    trainer.collector.policy = StandIn()
    return trainer


def trained(*args, **settings):
    trainer = made(*args, **settings)
    trainer.train()
    return trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_old_policy_and_loss_take_the_same_routes(tmp_path):
    """At learning rate 0 the log-ratio is 0 to the bit, though the policy would choose others."""
    every = {"learning_rate": 0.0, "num_iterations": 2, "skip_zero_advantages": False}
    trainer = trained(tmp_path, **every)
    first, second = logged(trainer, "sampling/routes_changed")
    assert 0.01 < first < 1
    assert second == pytest.approx(first)
    compared = [(inputs["old_per_token_logps"], logps) for inputs, logps in trainer.seen]
    assert len(compared) >= 4
    assert all(torch.equal(old, logps) for old, logps in compared)
    plain = trained(tmp_path / "off", replays=False, **every)
    assert not logged(plain, "sampling/routes_changed")
    assert (plain.seen[0][1] - trainer.seen[0][1]).abs().max() > 1e-3


def test_weights_do_not_depend_on_how_the_forward_is_made(tmp_path):
    common = {"num_iterations": 2, "rewards": (by_half,)}
    ends = {
        name: weights(trained(tmp_path, **{**common, **settings}).model)
        for name, settings in {
            "plain": {},
            "checkpointing": {"gradient_checkpointing": True},
            "silent rows too": {"skip_zero_advantages": False},
            "one micro-batch": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            "pieces": {"micro_batch_tokens": 24},
            "off": {"replays": False},
        }.items()
    }
    for name in ("checkpointing", "silent rows too", "one micro-batch", "pieces"):
        torch.testing.assert_close(ends[name], ends["plain"], rtol=0, atol=1e-5)
    assert (ends["off"] - ends["plain"]).abs().max() > 1e-3


def test_the_reference_and_evaluations_choose_for_themselves(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = made(tmp_path, lora, beta=0.1, learning_rate=0.0, evaluated=tiny.prompts(4))
    trainer.train()
    assert logged(trainer, "kl")[0] > 1e-6  # of the same weights, by other routes
    trainer.seen.clear()
    trainer.evaluate()
    assert trainer.seen
    assert all(ROUTES not in inputs for inputs, _ in trainer.seen)


def test_an_adapter_trains_by_the_routes_of_the_sampler(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ends = [weights(trained(tmp_path, lora, replays=replays).model) for replays in (True, False)]
    assert (ends[0] - ends[1]).abs().max() > 1e-4


def test_replaced_groups_bring_their_routes(tmp_path):
    trainer = trained(tmp_path, dynamic_sampling="length", learning_rate=0.0)
    assert max(logged(trainer, "dynamic_sampling/rounds")) > 0
    for inputs, _ in trainer.seen:
        lengths = inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1) - 1
        assert [len(row) for row in inputs[ROUTES]] == lengths.tolist()


@pytest.mark.parametrize(
    "settings", [{"steps_per_generation": 4}, {"num_iterations": 2, "dynamic_sampling": "length"}]
)
def test_a_run_that_was_stopped_within_a_generation_goes_on_by_its_routes(settings, tmp_path):
    ends, settings = [], settings | {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    for name, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-1"))):
        trainer = made(tmp_path / name, **settings)
        trainer.train(resume_from_checkpoint=resume)
        ends.append((weights(trainer.model), logged(trainer, "sampling/routes_changed")))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert len(ends[0][1]) == 3


def test_a_batch_without_routes_does_not_train(tmp_path):
    trainer = made(tmp_path)
    stand_in = StandIn()
    trainer.collector.policy.sample = lambda *rows, **options: [
        one._replace(routes=None) for one in stand_in.sample(*rows, **options)
    ]
    with pytest.raises(RuntimeError, match="has returned no routes"):
        trainer.train()


def test_generations_of_a_checkpoint_keep_their_routes(tmp_path):
    routes = [torch.randint(0, 6, (4, 2, 2), dtype=torch.uint8), torch.randint(0, 600, (7, 2, 2), dtype=torch.int16)]
    generated = Generated([[5]] * 2, [[6]] * 2, None, ["a", "b"], None, {}, None, [])
    kept = in_flight.to_be_kept(RolloutBatch([], generated=generated, routes=routes))
    in_flight.write(tmp_path, 0, InFlight([(3, kept)]))
    [(version, read)] = in_flight.read(tmp_path, 0).generations
    assert version == 3
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(read.routes, routes, strict=True))


# Refusals.


def refused(tmp_path, **settings) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        GRPOExtConfig(str(tmp_path), **tiny.TRAINING | {"replay_routes": True} | settings)
    return [problem for problem in error.value.problems if problem.field == "replay_routes"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "only vLLM returns its routes"),
        ({"use_vllm": True, "torch_compile": True}, "compiled forward"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2, "vllm_mode": "colocate"}, "first process of an engine"),
        ({"use_vllm": True, "losses": [{"type": "reverse_kl", "teacher": "initial", "weight": 1.0}]}, "teacher"),
    ],
)
def test_settings_under_which_routes_do_not_arrive_are_refused(settings, words, tmp_path):
    [problem] = refused(tmp_path, **settings)
    assert words in problem.reason
    assert problem.cure


def test_weights_that_are_split_over_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    [problem] = refused(tmp_path, use_vllm=True)
    assert "split over processes" in problem.reason


def test_rollouts_of_several_turns_and_images_are_refused(tmp_path):
    def rollout(prompts, trainer):
        """Never called."""

    settings = {"use_vllm": True, "vllm_mode": "server", "replay_routes": True}
    with pytest.raises(ConfigError) as error:
        build(experts.model(), tmp_path, rollout=rollout, **settings)
    assert "Remove replay_routes or rollout_func." in [problem.cure for problem in error.value.problems]
    args = GRPOExtConfig(str(tmp_path), **tiny.TRAINING | settings)
    assert "replay_routes" in {problem.field for problem in image_problems(args, ["image"])}
    assert [*rollout_problems(args, {"environments": ["guess"], "tools": None})]
    assert not [*rollout_problems(args.changed(replay_routes=False), {"environments": ["guess"]})]
