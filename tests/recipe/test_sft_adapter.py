"""An SFT adapter as `model_name_or_path`: trained further by a recipe, resumed, saved, loaded from anywhere."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from trl.trainer.utils import use_adapter

from grpo_ext import ConfigError
from grpo_ext.commands.cli import main
from grpo_ext.config.adapters import base_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import build_trainer, train
from support import adapted, tiny
from support.interrupted import logged
from support.trainers import weights

IDS = torch.tensor([[5, 6, 7, 8, 9]])
STEPS = {"beta": 0.1, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "weight_decay": 0.5}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder whose adapter calls its base `base`, as its user did who trained it from there."""
    folder = tmp_path_factory.mktemp("project")
    tiny.save(folder / "base")
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        adapted.sft("base", "sft")
    assert json.loads((folder / "sft" / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    return folder


@pytest.fixture(scope="module")
def trained(project):
    """The run, from a directory where the base's path leads nowhere."""
    return train(load_recipe(adapted.write_recipe(project, str(project / "sft"), project / "run", **STEPS)))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def policy(project: Path, adapter: str) -> torch.Tensor:
    """Logits of an adapter on the base, by PEFT alone."""
    from peft import PeftModel

    return logits(PeftModel.from_pretrained(tiny.load(str(project / "base")), str(project / adapter)))


def test_the_reference_is_the_sft_policy(trained, project):
    assert trained.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert trained.state.log_history[3]["kl"] > 1e-4
    with torch.no_grad(), trained._initial.replacing(trained.model):
        assert torch.equal(logits(trained.model), policy(project, "sft"))
    assert not torch.allclose(logits(trained.model), policy(project, "sft"), atol=1e-3)
    with use_adapter(trained.model, None):
        assert torch.equal(logits(trained.model), logits(tiny.load(str(project / "base"))))


def test_a_resumed_run_ends_at_the_same_bits(trained, project):
    argv = adapted.write_recipe(project, str(project / "sft"), project / "resumed", **STEPS)
    shutil.copytree(project / "run" / "checkpoint-2", project / "resumed" / "checkpoint-2")
    resumed = train(load_recipe(argv))
    assert logged(resumed) == logged(trained)
    assert torch.equal(weights(resumed.model), weights(trained.model))


def test_what_is_saved_is_one_adapter_that_loads_from_anywhere(trained, project, monkeypatch, tmp_path):
    assert not (project / "run" / "ref").exists()
    saved = json.loads((project / "run" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str((project / "base").resolve())
    monkeypatch.chdir(tmp_path)
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(project / "run"))
    torch.testing.assert_close(logits(loaded), logits(trained.model), rtol=0, atol=1e-6)


def test_a_fresh_adapter_loads_from_anywhere_too(project, monkeypatch):
    monkeypatch.chdir(project)
    recipe = load_recipe(adapted.write_recipe(project, "base", project / "fresh", use_peft=True))
    trainer = build_trainer(recipe)
    assert trainer.model.peft_config["default"].base_model_name_or_path == str((project / "base").resolve())


def test_an_adapter_without_a_tokenizer_has_its_bases(project, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(project / "sft" / name, tmp_path / name)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(project / "base")})
    )
    recipe = load_recipe(adapted.write_recipe(project, str(tmp_path), project / "bare"))
    trainer = build_trainer(recipe)
    assert trainer.processing_class.chat_template == tiny.TEMPLATE
    assert trainer.processing_class.padding_side == "left"


def test_a_new_adapter_on_top_of_one_is_refused(project):
    with pytest.raises(ConfigError, match="is it to be trained, or a new one on top"):
        load_recipe(adapted.write_recipe(project, str(project / "sft"), project / "refused", use_peft=True))


@pytest.mark.parametrize(
    ("base", "expected"),
    [(None, "names no base model"), ("./gone", "is not a folder here"), ("/gone", "is not a folder")],
)
def test_an_adapter_whose_base_is_not_there(base, expected, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with pytest.raises(ConfigError, match=expected):
        load_recipe(adapted.write_recipe(tmp_path, str(tmp_path), tmp_path / "out"))


def test_an_adapter_of_the_hub_keeps_the_name_of_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/m", "revision": "v1"}))
    assert base_of(str(tmp_path)) == ("org/m", "v1")
    assert base_of(str(tmp_path.parent)) is None


def test_check_counts_the_adapter(project, capsys):
    with pytest.raises(SystemExit) as end:
        main(["check", *adapted.write_recipe(project, str(project / "sft"), project / "checked")])
    assert end.value.code == 0
    assert "0.02 M, 0.00 M trained" in capsys.readouterr().out
