"""Variables and home folders in paths: one table says which settings are paths, and all of them are expanded alike."""

import dataclasses
import os

import pytest

from grpo_ext import GRPOExtConfig
from grpo_ext.config.paths import _ENTRIES, OF_THE_RUN, PATHS, expand, unknown
from grpo_ext.config.settings import FUNCTIONS
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import PARTS

FIELDS = {f.name: f for part in PARTS for f in dataclasses.fields(part) if f.init}
NO_PATH = {
    **dict.fromkeys(("log_completions_hub_repo", "hub_model_id"), "a repository of the hub"),
    **dict.fromkeys(("save_total_limit", "on_nonfinite", "push_to_hub"), "speaks of output_dir"),
    **dict.fromkeys(("system_prompt", "debug", "skip_memory_metrics", "use_dora"), "only mentions one"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "train_sampling_strategy"), "only mentions one"),
    **dict.fromkeys(("save_on_each_node", "save_only_model", "dataset_kwargs"), "only mentions one"),
}


def test_each_setting_whose_help_speaks_of_a_path_is_in_the_table():
    words = ("path", "folder", " file", "directory", ".json")
    speaking = {name for name, f in FIELDS.items() if any(w in str(f.metadata.get("help", "")).lower() for w in words)}
    named = {name for name in FIELDS if name.endswith(("_dir", "_path", "_file"))}
    assert (speaking | named) - PATHS - NO_PATH.keys() == set()
    assert PATHS - FIELDS.keys() == {"accelerate_config", "deepspeed_config_file"}


def wrapped(key: str, text: str) -> list:
    """Values of a setting with this text in every place that may hold a path."""
    if key not in _ENTRIES:
        return [text, [text]]
    inside = [{name: value} for name in _ENTRIES[key] for value in wrapped(name, text)]
    return [*inside, inside]


@pytest.mark.parametrize("key", sorted(PATHS))
def test_a_path_is_expanded_in_each_place_of_each_setting(key, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/users/me")
    for text, path in {"$SCRATCH/a": "/scratch/me/a", "x${SCRATCH}b": "x/scratch/meb", "~/c": "/users/me/c"}.items():
        assert [expand(key, value) for value in wrapped(key, text)] == wrapped(key, path)
        assert not [found for value in wrapped(key, text) for found in unknown(key, value)]
    monkeypatch.delenv("SCRATCH")
    for value in wrapped(key, "$SCRATCH/a"):
        found = list(unknown(key, value))
        assert found
        assert all(p.value == "$SCRATCH/a" and "variable SCRATCH is not set" in p.reason for p in found)


def test_an_empty_variable_is_as_good_as_none(monkeypatch):
    monkeypatch.setenv("SCRATCH", "")
    assert [p.value for p in unknown("output_dir", "$SCRATCH/run")] == ["$SCRATCH/run"]


@pytest.mark.parametrize("text", ['{"zero": "$A"}', "{{ messages }} $x", "{% if a %}$5{% endif %}"])
def test_json_and_jinja_are_no_paths(text):
    assert expand("deepspeed", text) == text
    assert not list(unknown("chat_template", text))


def test_a_setting_that_may_name_a_function_may_be_a_path():
    assert {*FUNCTIONS} <= {*OF_THE_RUN}


@pytest.mark.parametrize("name", OF_THE_RUN)
def test_the_config_refuses_an_unknown_variable_in_python_too(name, tmp_path):
    settings = {"use_cpu": True, "bf16": False, "report_to": "none"} | {name: "$GRPO_EXT_NOT_SET/x"}
    with pytest.raises(ConfigError, match="variable GRPO_EXT_NOT_SET is not set") as error:
        GRPOExtConfig(**settings)
    assert len(error.value.problems) == 1


def test_a_recipe_is_expanded_from_env_and_on_the_command_line(tmp_path, monkeypatch):
    for name in ("GRPO_EXT_TEST_DATA", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("GRPO_EXT_TEST_RUNS", str(tmp_path / "runs"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "solution": "b"}\n' * 16)
    (tmp_path / "rewards.py").write_text("def one(completions, **_): return [1.0] * len(completions)\n")
    (tmp_path / "recipe.yaml").write_text(
        f"env: {{GRPO_EXT_TEST_DATA: {tmp_path}, TENSORBOARD_LOGGING_DIR: $GRPO_EXT_TEST_RUNS/tb}}\n"
        "model_name_or_path: quickstart\ndataset_name: $GRPO_EXT_TEST_DATA/train.jsonl\n"
        "reward_funcs: [{name: one, func: '$GRPO_EXT_TEST_DATA/rewards.py:one'}]\n"
        "eval_sets: [{name: same, dataset_name: '${GRPO_EXT_TEST_DATA}/train.jsonl'}]\n"
        "use_cpu: true\nbf16: false\nreport_to: none\n"
    )
    recipe = load_recipe(["--config", str(tmp_path / "recipe.yaml"), "--output_dir", "$GRPO_EXT_TEST_RUNS/a"])
    assert recipe.training.output_dir == str(tmp_path / "runs" / "a")
    assert recipe.script.dataset_name == str(tmp_path / "train.jsonl") == recipe.eval_sets[0].dataset_name
    assert recipe.rewards[0].callable(["x"]) == [1.0]
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "runs" / "tb")
