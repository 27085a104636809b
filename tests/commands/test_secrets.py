"""Secrets of a recipe appear in no file of its run and in no message."""

import json
import logging

import pytest
import yaml

from grpo_ext import GRPOExtConfig
from grpo_ext.data.completions import write_completions
from grpo_ext.errors import (
    ABSENT,
    ConfigError,
    DataError,
    Problem,
    RewardError,
    is_secret,
    redacted,
    redacted_text,
    secret_variables,
    without_secrets,
)
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from support import tiny

PLANTED = "planted-b7f3"
URL = f"http://me:{PLANTED}@127.0.0.1:9/score?sig={PLANTED}"
OPTIONS = {"url": URL, "protocol": "score", "retries": 0, "extra_body": {"api_key": PLANTED}}
JUDGE = {"name": "remote", "kwargs": OPTIONS}
SETTINGS = {"hub_token": PLANTED, "model_init_kwargs": {"token": PLANTED}}


def test_no_file_or_log_line_of_a_run_holds_a_secret(tmp_path, caplog, capfd):
    caplog.set_level(logging.INFO)
    values = {
        **{key: value for key, value in tiny.TRAINING.items() if key != "save_strategy"},
        **{"model_name_or_path": tiny.save(tmp_path / "model", max_position_embeddings=1024)},
        **{"dataset_name": "quickstart/addition", "output_dir": str(tmp_path / "out"), "loss_type": "grpo"},
        **{
            "reward_funcs": ["format", JUDGE],
            "reward_workers": 0,
            "save_steps": 1,
            "max_steps": 1,
        },
        **SETTINGS,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    trainer = train(load_recipe(["--config", str(tmp_path / "recipe.yaml")]))
    assert trainer.args.hub_token == PLANTED  # the run itself has it
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert names >= {"recipe.json", "finished.json", "training_args.bin", "metrics.jsonl", "README.md"}
    assert [str(path) for path in files if PLANTED.encode() in path.read_bytes()] == []
    assert PLANTED not in caplog.text + "".join(capfd.readouterr())
    assert "127.0.0.1:9/score" in next(path for path in files if path.name == "recipe.json").read_text()


MISTAKES = {
    "a reward's options outside kwargs": {"reward_funcs": [{"name": "remote", "api_key": PLANTED, "url": URL}]},
    "an option that is none": {"reward_funcs": [JUDGE | {"kwargs": {"url": URL, "apikey": PLANTED}}]},
    "kwargs that are none": {"reward_funcs": [{"name": "remote", "kwargs": f"api_key: '{PLANTED}'"}]},
    "a mapping of the model": {"model_init_kwargs": {"token": PLANTED, "tp_plan": "auto"}},
    "a mapping that is text": {"model_init_kwargs": f"{{'token': '{PLANTED}'}}"},
    "a token that is a list": {"hub_token": [PLANTED]},
    "a variable": {"WANDB_API_KEY": PLANTED},
    "a variable of env": {"env": {"OPENAI_API_KEY": {"value": PLANTED}}},
    "a header": {"generation_kwargs": {"X-API-Key": PLANTED}},
    "an address of data": {"dataset_name": f"https://me:{PLANTED}@127.0.0.1:9/rows.jsonl"},
    "a server": {"use_vllm": True, "vllm_server_base_url": [URL]},
    "an environment": {"environments": [{"name": "openenv/x", "kwargs": {"api_key": PLANTED}, "url": URL}]},
    "an evaluation": {"eval_sets": [{"name": "a", "reward_funcs": [{"name": "remote", "password": PLANTED}]}]},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistaken_recipe_is_refused_without_its_secrets(name, tmp_path):
    values = {"model_name_or_path": "quickstart", "dataset_name": "quickstart/addition", "reward_funcs": ["accuracy"]}
    values |= {"use_cpu": True, "bf16": False, "report_to": "none"} | MISTAKES[name]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as error:
        load_recipe(["--config", str(tmp_path / "recipe.yaml")])
    assert PLANTED not in str(error.value) + repr(error.value)
    assert PLANTED not in "".join(map(str, error.value.problems))


def test_a_printed_config_holds_no_secret(tmp_path):
    config = GRPOExtConfig(str(tmp_path), **SETTINGS, **tiny.TRAINING)
    assert PLANTED not in str(config) + repr(config) + config.to_json_string() + json.dumps(
        config.to_dict(), default=str
    )
    assert config.model_init_kwargs == {"token": PLANTED}


@pytest.mark.parametrize("kind", [lambda text: DataError([Problem("x", ABSENT, text, "")]), RewardError])
def test_other_errors_hold_no_secret(kind):
    assert "POST http://***@127.0.0.1:9/score?sig=*** failed" in str(kind(f"POST {URL} failed"))


@pytest.mark.parametrize(
    "name", ["token", "hub_token", "HF_TOKEN", "X-API-Key", "apiKey", "db_password", "client_secret"]
)
def test_names_of_secrets(name):
    assert is_secret(name)
    assert redacted({name: PLANTED, "a": [{name: PLANTED}]}) == {name: None, "a": [{name: None}]}
    assert redacted_text(f"{{'{name}': '{PLANTED}'}}, {name}='{PLANTED}', {name}: 12345") == (
        f"{{'{name}': '***'}}, {name}='***', {name}: ***"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("eos_token", "pad_token", "token_truncate", "max_tokens", "api_key_env", "tokenizer"),
        *("stop_token", "think_token", "per_token", "special_token"),
    ],
)
def test_names_of_other_settings(name):
    assert not is_secret(name)
    assert redacted({name: "x"}) == {name: "x"}
    assert redacted_text(f"{name}='x'") == f"{name}='x'"


REDACTED = {
    **{
        f"the server: bad key {key}.": "the server: bad key ***."
        for key in ("hf_abcdefghijklmnopqrst", "sk-proj-abcdefghijklmnop", "ghp_abcdefghijklmnop1234")
    },
    **{text: text for text in ("./hf_reward_functions_of_mine.py: no such file", "task-of-a-very-long-name-here")},
    "reward_funcs: token='abc', key: no": "reward_funcs: token='***', key: no",
    "api_key: c2VjcmV0==": "api_key: ***",
    "GET / Authorization: Basic c2VjcmV0== failed": "GET / Authorization: Basic *** failed",
    "authorization=Bearer abc.def, next": "authorization=Bearer ***, next",
    "at http://me:a@b:c@host:9/x?k=1;j=2#t=3 now": "at http://***@host:9/x?k=***;j=***#t=*** now",
    "basic authorization: see docs": "basic authorization: see docs",
}


@pytest.mark.parametrize("text", REDACTED)
def test_keys_are_redacted_by_their_form_or_their_name(text):
    assert redacted_text(text) == REDACTED[text]


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AZURE_KEY_2", "PGPASSWORD", "SMTP_PASS", "SSH_AUTH_SOCK"]
)
def test_variables_are_secrets_by_their_names(name):
    assert secret_variables({name: "x"}) == {name: "x"}


@pytest.mark.parametrize("name", ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "HF_HOME", "KEYBOARD", "LANG"])
def test_other_variables_are_not(name):
    assert not secret_variables({name: "x"})


def test_values_of_secret_variables_are_in_no_text(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hardly.guessed+1")
    monkeypatch.setenv("MY_API_KEY", "hardly.guessed+1 and more")
    monkeypatch.setenv("OTHER_KEY", "short")
    said = [
        {"role": "user", "content": "a hardly.guessed+1 and more, hardly.guessed+1, short; password = 'x'"},
        3,
        None,
    ]
    shown = [{"role": "user", "content": "a ***, ***, short; password = 'x'"}, 3, None]
    assert without_secrets(said) == shown
    assert without_secrets("sk-" + "a" * 20) == "***"


@pytest.mark.parametrize("between", ["\n", " ", "\\n", "\r\n"])
def test_a_secret_of_several_lines_is_in_no_text_however_they_are_joined(between, monkeypatch):
    monkeypatch.setenv("SSH_PRIVATE_KEY", "hardly.guessed\n  hardly.shown\n")
    assert without_secrets({f"hardly.guessed{between}hardly.shown": ["hardly.shown"]}) == {f"***{between}***": ["***"]}


def test_completions_are_written_without_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hardly.guessed")
    for name in ("a.jsonl", "a.parquet"):
        write_completions(tmp_path / name, [{"completion": [{"role": "assistant", "content": "hardly.guessed"}]}])
        assert b"hardly" not in (tmp_path / name).read_bytes()
