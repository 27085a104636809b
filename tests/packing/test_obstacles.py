"""What keeps siblings apart in the loss and what does so in rollouts, beyond the architectures as they come."""

import pytest

from grpo_ext.packing.obstacles import Forward, obstacles
from support import architectures

BOTH, LOSS = (Forward.LOSS, Forward.ROLLOUT), (Forward.LOSS,)


def changed(model_type, **settings):
    config = architectures.config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    return architectures.model(model_type, config)


def devices(model):
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}


def jitter(model):
    model.transformer.blocks[0].ffn.moe_jitter_eps = 0.01


@pytest.mark.parametrize(
    ("model_type", "settings", "words", "uses"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "noisy in training", BOTH),
        ("llama", {"attention_dropout": 0.1}, "dropout is active in model.layers.0.self_attn", BOTH),
        ("gemma3_text", {"layer_types": ["full_attention"] * 4, "use_bidirectional_attention": True}, "ahead", LOSS),
    ],
)
def test_a_setting(model_type, settings, words, uses):
    model = changed(model_type, **settings).train()
    for use in Forward:
        assert any(words in reason for reason in obstacles(model, use)) == (use in uses)


@pytest.mark.parametrize(
    ("model_type", "change", "words", "uses"),
    [("llama", devices, "several devices", tuple(Forward)), ("dbrx", jitter, "noisy", BOTH)],
)
def test_a_change(model_type, change, words, uses):
    model = architectures.model(model_type).train()
    assert [use for use in Forward if next(obstacles(model, use), None)] == []
    change(model)
    assert tuple(use for use in Forward if words in next(obstacles(model, use), "")) == uses


def test_noise_of_training_keeps_no_rollout_of_an_evaluation_apart():
    model = changed("llama", attention_dropout=0.1)
    assert next(obstacles(model.eval(), Forward.ROLLOUT), None) is None
    assert "dropout" in next(obstacles(model.eval(), Forward.LOSS))
