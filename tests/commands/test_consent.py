"""Code in a run's folder is run by the word of whoever types the command, never by the folder's."""

import json
import shutil

import pytest
import yaml

from grpo_ext.commands.runs import find_trained
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from support import adapted, tiny
from support.commands import command

MARK = "from pathlib import Path\nPath({mark!r}).touch()\n"
OWN_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "planted"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "planted.OwnConfig", "AutoModelForCausalLM": "planted.OwnModel"}


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a tiny base, and one of an adapter."""
    folder = tmp_path_factory.mktemp("trained")
    tiny.save(folder / "base")
    adapted.sft(str(folder / "base"), str(folder / "sft"))
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(load_recipe(adapted.write_recipe(folder, str(folder / "base"), folder / "run", **settings)))
    return folder


@pytest.fixture
def stranger(trained, tmp_path):
    """A copy of the run that brings code, and says in each of its files that it is trusted; and the mark it leaves."""
    folder, mark = tmp_path / "stranger", tmp_path / "mark"
    shutil.copytree(trained / "run", folder)
    for place in (folder, folder / "checkpoint-1"):
        changed(place / "config.json", model_type="planted", auto_map=AUTO_MAP, trust_remote_code=True)
        (place / "planted.py").write_text(MARK.format(mark=str(mark)) + OWN_MODEL)
    finished = json.loads((folder / "finished.json").read_text())
    finished["recipe"] |= {"trust_remote_code": True, "model_init_kwargs": {"trust_remote_code": True}}
    (folder / "finished.json").write_text(json.dumps(finished))
    changed(folder / "checkpoint-1" / "recipe.json", trust_remote_code=True)
    return folder, mark


@pytest.fixture
def recipe(trained, tmp_path):
    """A recipe whose own model is trusted."""
    argv = adapted.write_recipe(
        tmp_path, str(trained / "base"), tmp_path / "mine", trust_remote_code=True, test_size=2
    )
    return argv[1]


def commands(folder, recipe, tmp_path):
    adapter = tmp_path / "adapter"
    return {
        "try": ["try", folder, "--prompt", "a1:", "--max_new_tokens", "2"],
        "try --compare": ["try", adapter, "--compare", "--prompt", "a1:", "--max_new_tokens", "2"],
        "merge": ["merge", adapter, "--output", tmp_path / "merged"],
        "sample": ["sample", "--config", recipe, "--model", folder, "--output", tmp_path / "s.jsonl", "--num", "2"],
        "eval": ["eval", "--config", recipe, "--model", folder, "--limit", "1"],
    }


@pytest.mark.parametrize("what", ["try", "try --compare", "merge", "sample", "eval"])
def test_a_folders_code_runs_only_by_a_typed_word(what, stranger, recipe, trained, tmp_path, capsys):
    folder, mark = stranger
    shutil.copytree(trained / "sft", tmp_path / "adapter")
    changed(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(folder))
    argv = commands(folder, recipe, tmp_path)[what]
    assert command(*argv) == 2, (capsys.readouterr(), mark.exists())
    message = capsys.readouterr().err
    assert f"it asks to run code of its own ({folder}" in message
    assert "planted.py)" in message
    assert "add --trust_remote_code to the command" in message
    assert not mark.exists()
    assert command(*argv, "--trust_remote_code") == 0, capsys.readouterr().err
    assert mark.exists()


def test_options_of_generate_that_name_code_are_left_out(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained / "run", folder)
    finished = json.loads((folder / "finished.json").read_text())
    finished["recipe"]["generation_kwargs"] = {"custom_generate": "x", "trust_remote_code": True, "num_beams": 2}
    (folder / "finished.json").write_text(json.dumps(finished))
    given = find_trained(str(folder)).sampling()
    assert given["num_beams"] == 2
    assert not {"custom_generate", "trust_remote_code"} & given.keys()


def test_an_adapter_that_loads_modules_by_name_is_refused(trained, tmp_path, capsys):
    shutil.copytree(trained / "sft", tmp_path / "adapter")
    changed(tmp_path / "adapter" / "adapter_config.json", megatron_config={}, megatron_core="planted")
    assert command("try", tmp_path / "adapter", "--prompt", "a") == 2
    assert "megatron_config, which loads modules by name" in capsys.readouterr().err


# Poisoned records.

DEEP = "[" * 5_000 + "]" * 5_000
BAD_RECORDS = {
    "a list": "[]",
    "a number": "7",
    "torn": '{"temperature": 1.0, ',
    "empty": "",
    "deep": DEEP,
    **{
        key: json.dumps({key: value})
        for key, value in {
            "max_completion_length": "many",
            "temperature": [1],
            "system_prompt": {"a": 1},
            "chat_template_kwargs": [1],
            "dtype": "load",
            "model_name_or_path": 7,
        }.items()
    },
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_malformed_record_is_one_line(name, trained, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(trained / "base", folder)
    (folder / "recipe.json").write_text(BAD_RECORDS[name])
    assert command("try", folder, "--prompt", "a") == 2
    message = capsys.readouterr().err
    assert str(folder) in message
    assert message.count("\n") == 2


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", ["", "[]", DEEP, '{"model_type": 7}'])
def test_a_model_that_cannot_be_loaded_is_one_line(file, content, trained, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(trained / "base", folder)
    (folder / file).write_text(content)
    assert command("try", folder, "--prompt", "a") == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_what_check_imports_it_says(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def good(completions, **_):\n    return [1.0] * len(completions)\n")
    values = {
        "model_name_or_path": "quickstart",
        "dataset_name": "quickstart/addition",
        "use_cpu": True,
        "bf16": False,
    }
    for functions, said in ((["./mine.py:good"], 1), (["accuracy"], 0), (["./mine.py:gone"], 1)):
        (tmp_path / "recipe.yaml").write_text(
            yaml.safe_dump(values | {"reward_funcs": functions, "report_to": "none"})
        )
        command("check", "--config", tmp_path / "recipe.yaml")
        line = f"check has imported code that the recipe names: {tmp_path / 'mine.py'}"
        assert capsys.readouterr().out.count(line) == said
