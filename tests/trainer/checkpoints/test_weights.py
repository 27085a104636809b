"""A checkpoint's weights are the model's again, whatever names they were saved under, or the load ends."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_ext.errors import ConfigError
from support import architectures, experts, image_text, tiny, trainers

SAVED = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
CAUSAL = [name for name in architectures.CAUSAL if name not in architectures.NOT_BUILT]
IMAGE_TEXT = [name for name in image_text.IMAGE_TEXT if name not in image_text.NOT_BUILT]
UNREAD = {"shieldgemma2": "model.language_model", "deepseek_v4": "mlp_layer_types"}
"""Those whose own files transformers 5.17 does not read, and what it names."""


def as_saved(folder) -> torch.Tensor:
    return trainers.weights(experts.Qwen3MoeForCausalLM.from_pretrained(folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer whose mixture of experts has made two steps, its folder, and the weights at the end."""
    folder = tmp_path_factory.mktemp("experts")
    one = trainers.build(experts.model(), folder, **SAVED)
    one.train()
    return one, folder, trainers.weights(one.model)


def test_a_run_resumes_from_the_experts_of_its_checkpoint(trained, tmp_path):
    """transformers 5 saves each expert of Qwen3-MoE by itself; the model holds all in one weight."""
    _, folder, final = trained
    resumed = trainers.build(experts.model(seed=5), tmp_path, **SAVED)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert torch.equal(trainers.weights(resumed.model), final)


def test_the_best_checkpoint_is_loaded_whole(trained, tmp_path):
    folder = trained[1] / "checkpoint-1"
    one = trainers.build(experts.model(seed=5), tmp_path, evaluated=tiny.prompts(2), **SAVED, **BEST)
    one.state.best_model_checkpoint = str(folder)
    one._load_best_model()
    assert torch.equal(trainers.weights(one.model), as_saved(folder))


@pytest.mark.parametrize(
    ("change", "named"), [("lost", "model.norm.weight"), ("expert", "down_proj"), ("foreign", "model.foreign.weight")]
)
def test_a_checkpoint_with_other_weights_than_the_models_ends_the_run(change, named, trained, tmp_path):
    one, folder, _ = trained
    weights = load_file(folder / "checkpoint-1" / "model.safetensors")
    if change == "foreign":
        weights[named] = torch.ones(2)
    else:
        del weights[named if change == "lost" else "model.layers.1.mlp.experts.0.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(one.model.config.to_dict()))
    with pytest.raises(ConfigError, match=named):
        one._load_from_checkpoint(str(tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CAUSAL, *IMAGE_TEXT])
@pytest.mark.cases(58)
def test_every_architecture_loads_what_it_saved(name, trained, tmp_path, monkeypatch):
    one, *_ = trained
    model = (architectures if name in CAUSAL else image_text).model(name)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    monkeypatch.setattr(one, "model", model)
    if name in UNREAD:
        with pytest.raises(Exception, match=UNREAD[name]):
            one._load_from_checkpoint(str(tmp_path))
        return
    one._load_from_checkpoint(str(tmp_path))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
