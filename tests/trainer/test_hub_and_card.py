"""What goes to the hub, by transformers' push, and TRL's model card with our section."""

import pytest
import yaml
from huggingface_hub import HfApi, constants
from transformers.utils import hub as hub_of_transformers

from grpo_ext import ConfigError
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from support import adapted, tiny
from support.fake_hub import fake_hub
from support.trainers import build

RUN = {
    "push_to_hub": True,
    "hub_model_id": "me/run",
    "hub_token": "hf_token",
    "hub_revision": "lab",
    "hub_strategy": "end",
    "save_strategy": "steps",
    "save_steps": 1,
}


def test_a_run_is_pushed_to_its_branch_without_secrets(tmp_path, monkeypatch):
    tiny.save(tmp_path / "base")
    adapted.sft(str(tmp_path / "base"), str(tmp_path / "sft"))
    argv = adapted.write_recipe(tmp_path, str(tmp_path / "sft"), tmp_path / "run", beta=0.1, **RUN)
    with fake_hub(monkeypatch) as hub:
        train(load_recipe(argv))
    assert hub.unknown == []
    assert set(hub.branches) == {"main", "lab"}
    assert hub.branches["main"] == {}
    pushed = hub.branches["lab"]
    assert {"adapter_model.safetensors", "tokenizer.json", "README.md"} <= pushed.keys()
    assert not any(name.startswith(("ref/", "checkpoint-")) for name in pushed)
    assert pushed["README.md"] == (tmp_path / "run" / "README.md").read_bytes()
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(b"hf_token" in file for file in [*files, *pushed.values()])


@pytest.mark.parametrize("status", [None, 401])
def test_a_hub_that_refuses_is_an_error_before_the_first_step(status, tmp_path, monkeypatch, model_path):
    with fake_hub(monkeypatch) as hub:
        hub.refuses = status
        if status is None:
            monkeypatch.setattr(hub_of_transformers, "_hf_api", HfApi(endpoint="http://127.0.0.1:9", token="hf_token"))
        words = r"\[Errno" if status is None else "401"
        with pytest.raises(ConfigError, match=rf"push_to_hub=True: the hub cannot be reached, or refuses \(.*{words}"):
            build(model_path, tmp_path / "other", max_steps=1, **RUN)


def test_a_push_while_offline_is_an_error_before_the_first_step(tmp_path, monkeypatch, model_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"push_to_hub=True: the hub cannot be reached, or refuses \(.*offline"):
        build(model_path, tmp_path / "run", max_steps=1, **RUN)


def test_trls_card_has_the_results_of_the_run(tmp_path, model_path):
    argv = adapted.write_recipe(tmp_path, model_path, tmp_path / "run", loss_type="dr_grpo", save_steps=1)
    trainer = train(load_recipe(argv))
    card = (tmp_path / "run" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    head = yaml.safe_load(head)
    assert "base_model" not in head  # a folder here is no model of the hub
    assert "datasets" not in head
    assert {"trl", "grpo-ext", "generated_from_trainer"} <= set(head["tags"])
    log = [row for row in trainer.state.log_history if "reward" in row]
    for expected in (
        "# Model Card for run",
        "2 of 2 steps. Loss (Dr. GRPO, arXiv:2503.20783): `dr_grpo: clip(",
        f"| `reward` | {log[0]['reward']:.4g} | {log[-1]['reward']:.4g} | 2 |",
    ):
        assert body.count(expected) == 1, expected
    assert "2402.03300" not in card  # DeepSeekMath's, which TRL cites whatever the loss
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / "README.md").unlink()
    (tmp_path / "run" / "README.md").symlink_to(tmp_path / "mine")
    trainer.create_model_card()
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "run" / "README.md").read_text() == card
    (tmp_path / "run" / "README.md").write_text("A better one.")
    assert train(load_recipe(argv)) is None  # the run is as finished as it was
    assert (tmp_path / "run" / "README.md").read_text() == "A better one."
