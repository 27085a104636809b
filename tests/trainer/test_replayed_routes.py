"""A run with `router_replay`: the routes of another sampler, or of the old policy, in every forward that trains."""

from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig

from grpo_ext import ConfigError, GRPOExtTrainer
from grpo_ext.packing.routes import ROUTES
from grpo_ext.rollout.route_log import RouteLog
from support import experts, tiny
from support.trainers import build, number, weights


class Watched(GRPOExtTrainer):
    """Samples by weights that differ from the policy's, and keeps what it scores."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    @contextmanager
    def _drawing(self):
        before = [p.detach().clone() for p in self.model.parameters()]
        g = torch.Generator().manual_seed(5)
        for p in self.model.parameters():
            p.data.mul_(1 + 0.1 * torch.randn(p.shape, generator=g))
        try:
            with super()._drawing() as drawn:
                yield drawn
        finally:
            for p, values in zip(self.model.parameters(), before, strict=True):
                p.data.copy_(values)

    def _scores(self, model, inputs, live):
        scores = super()._scores(model, inputs, live)
        self.seen.append((inputs, scores[0].detach()))
        return scores


def by_half(prompts, completions, **_):
    """Every second prompt's completions score alike, and have no advantage."""
    return [len(c) * (number(p) % 2) / 10 for p, c in zip(prompts, completions, strict=True)]


def trained(tmp_path, peft_config=None, rewards=(tiny.count_a, tiny.length), **settings):
    common = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 2, "learning_rate": 0.05, "logging_steps": 1}
    common |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    further = {"kind": Watched, "peft_config": peft_config, **common, **settings}
    trainer = build(experts.model(), tmp_path, rewards, **further)
    trainer.train()
    return trainer


@pytest.mark.parametrize("replay", ["rollout", "old"])
def test_old_policy_reference_and_loss_take_the_same_routes(replay, tmp_path):
    """At learning rate 0 the log-ratio is 0 to the bit and the KL 0, also where the policy would choose others."""
    settings = {"learning_rate": 0.0, "beta": 0.1, "num_iterations": 2, "shared_prefix": "true"}
    trainer = trained(tmp_path, router_replay=replay, **settings)
    first, second = (entry for entry in trainer.state.log_history if "kl" in entry)
    assert (first["sampling/route_agreement"] < 1.0) == (replay == "rollout")
    assert second["sampling/route_agreement"] == first["sampling/route_agreement"]
    assert max(first["kl"], second["kl"]) < 1e-10
    compared = [(inputs["old_per_token_logps"], logps) for inputs, logps in trainer.seen]
    assert len(compared) >= 4
    assert all(torch.equal(old, logps) for old, logps in compared)


def test_weights_do_not_depend_on_how_the_forward_is_made(tmp_path):
    common = {"router_replay": "rollout", "num_iterations": 2, "rewards": (by_half,)}
    ends = {
        name: weights(trained(tmp_path, **{**common, **settings}).model)
        for name, settings in {
            "packed": {"shared_prefix": "true"},
            "rows": {"shared_prefix": "false", "gradient_checkpointing": True},
            "silent rows too": {"skip_zero_advantages": False},
            "one micro-batch": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            "off": {"router_replay": None},
        }.items()
    }
    for name in ("rows", "silent rows too", "one micro-batch"):
        torch.testing.assert_close(ends[name], ends["packed"], rtol=0, atol=1e-5)
    assert (ends["off"] - ends["packed"]).abs().max() > 1e-3


def test_an_adapter_trains_by_the_routes_of_the_sampler(tmp_path):
    """Its reference is the model without it, and takes the same routes."""
    ends = []
    for sharing in ("true", "false"):
        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        trainer = trained(tmp_path, lora, router_replay="rollout", shared_prefix=sharing, beta=0.1)
        assert trainer.state.log_history[0]["sampling/route_agreement"] < 1
        ends.append(weights(trainer.model))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replay", ["rollout", "old"])
def test_replaced_groups_bring_their_routes(replay, tmp_path):
    trainer = trained(
        tmp_path, router_replay=replay, dynamic_sampling="length", learning_rate=0.0, router_aux_loss_coef=0.1
    )
    for inputs, _ in trainer.seen:
        lengths = inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1) - 1
        assert [len(row) for row in inputs[ROUTES]] == lengths.tolist()


def test_a_batch_without_routes_does_not_train(tmp_path, monkeypatch):
    monkeypatch.setattr(RouteLog, "routes", lambda self, completions: [])
    with pytest.raises(RuntimeError, match="no routes"):
        trained(tmp_path, router_replay="rollout")


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="router_replay='old': LlamaForCausalLM has no experts"):
        build(tiny.model(), tmp_path, router_replay="old")


def test_rollouts_whose_contexts_may_be_rewritten_are_refused(tmp_path):
    def rollout(prompts, trainer):
        """Never called."""

    with pytest.raises(ConfigError, match="rollout_func may be rewritten"):
        build(experts.model(), tmp_path, router_replay="old", rollout=rollout)
