"""The model card, and on the hub a branch for each checkpoint."""

import ast
import logging
import time

import pytest
import yaml
from huggingface_hub import HfApi, constants
from transformers.utils import hub as hub_of_transformers

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from grpo_ext.trainer.card import model_card, on_the_hub
from support import adapted, tiny
from support.fake_hub import fake_hub
from support.trainers import build

RUN = {
    "push_to_hub": True,
    "push_to_hub_revision": True,
    "hub_model_id": "me/run",
    "hub_token": "hf_token",
    "hub_revision": "lab",
    "save_strategy": "steps",
    "save_steps": 1,
}


def test_each_checkpoint_goes_to_a_branch_of_its_own(tmp_path, monkeypatch):
    tiny.save(tmp_path / "base")
    adapted.sft(str(tmp_path / "base"), str(tmp_path / "sft"))
    argv = adapted.write_recipe(tmp_path, str(tmp_path / "sft"), tmp_path / "run", beta=0.1, **RUN)
    with fake_hub(monkeypatch) as hub:
        train(load_recipe(argv))
    assert hub.unknown == []
    assert set(hub.branches) == {"main", "lab", "lab-step-000000001", "lab-step-000000002"}
    assert hub.branches["main"] == {}
    for step in (1, 2):
        files = hub.branches[f"lab-step-00000000{step}"]
        assert {"adapter_model.safetensors", "tokenizer.json", "README.md", "recipe.json"} <= set(files)
        assert not any(name.endswith((".pt", ".pth", ".bin")) or "/" in name for name in files)
        weights = tmp_path / "run" / f"checkpoint-{step}" / "adapter_model.safetensors"
        assert files["adapter_model.safetensors"] == weights.read_bytes()
        assert (b"after 1 of 2 steps" in files["README.md"]) == (step == 1)
    final = hub.branches["lab"]
    assert not any(name.startswith("ref/") for name in final)
    assert b'from_pretrained("me/run")' in final["README.md"]
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(b"hf_token" in file for file in [*files, *final.values()])


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "push_to_hub=True: the hub cannot be reached ([Errno"),
        (401, "push_to_hub=True: the hub does not accept the repository 'me/run' (Client error '401"),
    ],
)
def test_a_hub_that_refuses_is_an_error_before_a_model_is_loaded(status, words, tmp_path, monkeypatch, model_path):
    argv = adapted.write_recipe(tmp_path, model_path, tmp_path / "run", **RUN)
    monkeypatch.setattr("grpo_ext.train.build_trainer", lambda *_: pytest.fail("loaded"))
    with fake_hub(monkeypatch) as hub:
        recipe = load_recipe(argv)
        hub.refuses = status
        if status is None:
            monkeypatch.setattr(hub_of_transformers, "_hf_api", HfApi(endpoint="http://127.0.0.1:9", token="hf_token"))
        with pytest.raises(ConfigError) as caught:
            train(recipe)
        with pytest.raises(ConfigError, match="push_to_hub=True"):
            build(model_path, tmp_path / "other", max_steps=1, **RUN)
    [problem] = caught.value.problems
    assert str(problem).startswith("push_to_hub=True: the hub ")
    assert words in str(problem)


def test_a_push_while_offline_is_an_error_of_the_recipe(tmp_path, monkeypatch, model_path):
    argv = adapted.write_recipe(tmp_path, model_path, tmp_path / "run", **RUN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="push_to_hub=True: HF_HUB_OFFLINE"):
        load_recipe(argv)


def test_a_failed_push_is_a_warning_and_the_run_continues(model_path, tmp_path, monkeypatch, caplog):
    settings = {key: value for key, value in RUN.items() if key != "hub_revision"}
    with fake_hub(monkeypatch) as hub:
        trainer = build(model_path, tmp_path / "run", max_steps=1, hub_strategy="end", **settings)
        hub.server_close()
        with caplog.at_level(logging.WARNING):
            trainer.train()
            trainer._finish_current_push()
            warned, ends = "revision main-step-000000001 could not be pushed", time.monotonic() + 30
            while warned not in caplog.text and time.monotonic() < ends:  # warned of behind the end of the push
                time.sleep(0.05)
    assert trainer.state.global_step == 1
    assert warned in caplog.text


def test_the_card_has_the_facts_of_the_run(tmp_path, model_path):
    argv = adapted.write_recipe(
        tmp_path,
        model_path,
        tmp_path / "run",
        loss_type="dr_grpo",
        advantage_estimator="group",
        temperature=0.7,
        reward_funcs=[
            {"name": "a", "func": "support.tiny:count_a", "weight": 0.5},
            {"name": "tags", "kwargs": {"newlines": False}},
        ],
    )
    trainer = train(load_recipe(argv))
    card = (tmp_path / "run" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    head = yaml.safe_load(head)
    assert "base_model" not in head  # a folder here is no model of the hub
    assert "datasets" not in head
    assert {"trl", "grpo-ext", "generated_from_trainer"} <= set(head["tags"])
    log = [row for row in trainer.state.log_history if "reward" in row]
    for expected in (
        f"`{model_path}`, trained by",
        "prompts were plain text",
        "temperature=0.7",
        trainer.objective.row.formula,
        "Dr. GRPO, arXiv:[2503.20783]",
        "advantage_estimator 'group' in place of 'none'",
        "| `a` | 0.5 |  |",
        "| `tags` | 1 | newlines: False |",
        f"`{tmp_path / 'train.jsonl'}`, train, 8 rows",
        f"| `reward` | {log[0]['reward']:.4g} | {log[-1]['reward']:.4g} | 2 |",
        "trl 1.16",
    ):
        assert expected in body, expected
    assert "2402.03300" not in card  # DeepSeekMath's, which TRL cites whatever the loss
    assert "after" not in body.split("## How")[0]
    (tmp_path / "run" / "README.md").write_text("A better one.")
    assert train(load_recipe(argv)) is None  # the run is as finished as it was
    assert (tmp_path / "run" / "README.md").read_text() == "A better one."


RECORD = {"dataset_name": "openai/gsm8k", "dataset_config": "main", "dataset_train_split": "train", "rows_per_step": 8}


def card(record, adapter_of=None):
    loss = GRPOExtConfig("out", use_cpu=True, bf16=False, loss_type="grpo", report_to="none").objective
    facts = {"objective": loss, "rewards": {}, "log": [], "steps": (1, 2), "tags": []}
    return model_card("run", address="me/run", record=RECORD | record, adapter_of=adapter_of, **facts)


@pytest.mark.parametrize(
    ("record", "adapter_of", "expected"),
    [
        ({"model_name_or_path": "org/base"}, None, ["base_model: org/base", "- openai/gsm8k", "library_name: transf"]),
        (
            {"model_name_or_path": "org/base"},
            "org/base",
            ["An adapter for [org/base](https://huggingface.co/org/base)"],
        ),
        ({"model_name_or_path": "org/sft"}, "org/base", ["base_model: org/base", "trained further from [org/sft]"]),
        ({"model_name_or_path": "quickstart"}, None, ["`quickstart`, trained by"]),
        ({}, None, ["whose name is not known", "after 1 of 2 steps", "Nothing was logged."]),
        ({"system_prompt": "Be |brief|."}, None, ["with the system prompt `Be |brief|.`", "'role': 'system'"]),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None, ["enable_thinking=False"]),
        ({"min_pass_rate": 0.1, "data": "9 rows, abc"}, None, ["main, train, 9 rows, min_pass_rate 0.1"]),
        ({"datasets": [{"path": "a/b"}, {"path": "c/d"}], "dataset_name": None}, None, ["- a/b\n- c/d"]),
    ],
)
def test_the_card_by_kind_of_model_and_data(record, adapter_of, expected):
    written = card(record, adapter_of)
    for words in expected:
        assert words in written, words


def test_the_snippet_is_python():
    for record in ({"system_prompt": "x"}, {"conversational": False}, {"chat_template_kwargs": {"a": 1}}):
        for adapter in (None, "org/base"):
            code = card(record, adapter).split("```python\n")[1].split("```")[0]
            assert ast.parse(code).body


def test_names_of_tasks_and_files_are_not_names_of_the_hub(tmp_path):
    names = ("quickstart/addition", "reasoning_gym/x", "./a/b", "/a/b", "data/x.jsonl", "gsm8k", str(tmp_path), None)
    assert not any(map(on_the_hub, names))
    assert on_the_hub("openai/gsm8k")
