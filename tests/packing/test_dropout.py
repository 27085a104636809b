"""Dropout that is switched off is off wherever a model reads its rate, and a checkpoint keeps the rates it had."""

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from grpo_ext.packing.dropout import active_dropout, switch_dropout_off
from support import architectures

IDS = torch.arange(3, 43).view(2, 20)


def with_rates(model_type):
    """A tiny model with a rate of .5 in everything that its config calls dropout, layers left out included."""
    config = architectures.config(model_type)
    for part in (config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.5)
    return architectures.model(model_type, config)


@torch.no_grad()
def off_train(model):
    """How far a forward in training is from one in evaluation."""
    expected = model.eval()(IDS).logits
    return (model.train()(IDS).logits - expected).abs().max().item()


def rates(config):
    return {name: value for name, value in vars(config).items() if "drop" in name}


@pytest.mark.parametrize(
    "model_type",
    ["falcon", "persimmon", "llama", "opt", "seed_oss", "gpt2", pytest.param("dbrx", id="dbrx, rates called pdrop")],
)
def test_without_dropout_a_training_forward_equals_evaluation(model_type):
    """Falcon and Persimmon read their rates from the config at each forward; OPT leaves layers out."""
    model = with_rates(model_type)
    assert off_train(model) > 0.1
    assert active_dropout(model)
    switch_dropout_off(model)
    assert off_train(model) == 0
    assert active_dropout(model) == []


@pytest.mark.parametrize("model_type", ["falcon", "persimmon"])
def test_a_checkpoint_keeps_the_rates_of_its_config(model_type, tmp_path):
    model = with_rates(model_type)
    before = rates(model.config)
    switch_dropout_off(model)
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    for name in ("whole", "base"):
        assert rates(AutoConfig.from_pretrained(tmp_path / name)) == before
    assert off_train(model) == 0
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="no_such_shard_size"):
        model.save_pretrained(tmp_path / "whole", max_shard_size="no_such_shard_size")
    assert off_train(model) == 0


def test_save_pretrained_is_not_replaced_where_the_config_has_no_rate():
    model = with_rates("llama")
    switch_dropout_off(model)
    assert "save_pretrained" not in vars(model)
    assert model.config.attention_dropout == 0.5


NOISY = {"phimoe": "samples its experts in training"}
REFUSED = {"diffllama": "its config takes no dropout"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [name for name in architectures.CAUSAL if name not in architectures.NOT_BUILT | NOISY | REFUSED]
)
@pytest.mark.cases(40)
def test_every_causal_architecture(model_type):
    model = with_rates(model_type)
    switch_dropout_off(model)
    assert off_train(model) < 1e-9
    assert active_dropout(model) == []
