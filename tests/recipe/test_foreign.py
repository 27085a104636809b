"""Configurations of other projects: recognised, turned into recipes with every key accounted for, or refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_ext.commands import migrate
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.files import packaged_recipes, read_yaml, recipes_folder
from grpo_ext.recipe.foreign import openrlhf, projects
from grpo_ext.recipe.foreign.draft import Draft, Rule, split_batch
from grpo_ext.recipe.foreign.script import read_script
from grpo_ext.recipe.foreign.words import arguments
from grpo_ext.recipe.foreign.writing import written
from grpo_ext.recipe.launching import FLAGS, VALUES
from grpo_ext.recipe.parsing import all_keys, load_recipe

FOLDER = Path(__file__).parent / "foreign"
CONFIGURATIONS = read_yaml(FOLDER / "configurations.yaml")
OF_A_RECIPE = {*all_keys(), *VALUES, *FLAGS, "env", "num_processes", "accelerate_config"}


@pytest.mark.parametrize("name", [name for name, case in CONFIGURATIONS.items() if "keys" in case])
def test_a_foreign_configuration_becomes_a_recipe(name):
    case = CONFIGURATIONS[name]
    kind, draft = migrate.migrated(FOLDER / name)
    text = written(draft, name, projects.PROJECTS[kind].title, "recipe.yaml")
    recipe = yaml.safe_load(text)

    assert kind == case["kind"]
    assert {key: draft.values[key] for key in case["values"]} == case["values"]
    assert recipe.keys() == draft.values.keys() <= OF_A_RECIPE
    assert (len(draft.given), len(draft.left), len(draft.decisions)) == (case["keys"], case["left"], case["decisions"])
    assert draft.taken == draft.given.keys()
    assert all(reason for reason in draft.left.values())
    assert all(f"#   {key}: " in text for key in draft.left)
    assert [problem.partition("=")[0].split("[")[0] for problem in migrate.refusals(text)] == case.get("refused", [])
    assert draft.decisions or "refused" not in case


def test_every_configuration_of_the_folder_is_listed():
    assert CONFIGURATIONS.keys() == {path.name for path in FOLDER.iterdir()} - {"configurations.yaml"}
    assert len(CONFIGURATIONS) > 30
    assert {case["kind"] for case in CONFIGURATIONS.values()} >= projects.PROJECTS.keys()


def test_values_arrive_as_they_are_written(tmp_path):
    """What a recipe is read as is what the draft holds: numbers, text of several lines, lists, mappings."""
    values = {"learning_rate": 1e-06, "system_prompt": "a: b\n# c\n", "report_to": [], "env": {"A": "1"}}
    values |= {"reward_funcs": [{"name": "accuracy", "weight": 0.5}, "org/model"], "eval_strategy": "no"}
    draft = Draft({}, {})
    for key, value in values.items():
        draft.set(key, value, "a note that says why " * 8)
    (tmp_path / "r.yaml").write_text(written(draft, "x", "TRL", "r.yaml"))
    assert read_yaml(tmp_path / "r.yaml") == values


NO_RECIPES = {
    "an SFT recipe": {"model_name_or_path": "m", "max_length": 512, "packing": True},
    "a DPO recipe": {"model_name_or_path": "m", "precompute_ref_log_probs": True, "label_smoothing": 0.1},
    "a launch configuration of accelerate": {"compute_environment": "LOCAL_MACHINE", "num_processes": 8},
    "a configuration of DeepSpeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1},
    "a LLaMA-Factory configuration": {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora"},
    "a configuration of unsloth's SFT": {"model": "m", "training": {"training_type": "lora"}, "data": {}},
}


@pytest.mark.parametrize("what", NO_RECIPES)
def test_a_file_that_is_no_recipe_is_called_what_it_is(what, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(NO_RECIPES[what]))
    for read in (lambda: load_recipe(["--config", str(path)]), lambda: migrate.migrated(path)):
        with pytest.raises(ConfigError) as error:
            read()
        assert len(error.value.problems) == 1
        assert f"is {what}" in error.value.problems[0]


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("a verl", "verl_lora.yaml"),
        ("an axolotl", "axolotl_grpo.yaml"),
        ("an ms-swift", "swift_ray.yaml"),
        ("an Open-R1", "open_r1_qwen_demo.yaml"),
    ],
)
def test_a_whole_foreign_file_is_one_message(title, name):
    with pytest.raises(ConfigError) as error:
        load_recipe(["--config", str(FOLDER / name)])
    (told,) = error.value.problems
    assert f"{title} configuration" in told
    assert f"`grpo-ext migrate {FOLDER / name}`" in told


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pretrain": "m", "n_samples_per_prompt": 8}, "openrlhf"),
        ({"actor": {"model_name_or_path": "m"}}, "openrlhf"),
        ({"rlhf_type": "dpo", "model": "m"}, "dpo"),
        ({"base_model": "m", "datasets": []}, "sft"),
        ({"model_name_or_path": "m", "base_model": "n", "reward_funcs": ["accuracy"]}, None),
        ({"model_name_or_path": "m", "packing": True}, "sft"),
        ({"base_model": "m", "rl": "dpo"}, "dpo"),
        ({"dataset_prompt_column": "p"}, "open-r1"),
        ({"model_name_or_path": "m", "num_genrations": 8, "max_lenght": 3}, None),
        ({"model_name_or_path": "m", "max_length": 512, "packing": True, "reward_funcs": ["accuracy"]}, None),
    ],
)
def test_whose_configuration_it_is(config, kind):
    assert projects.kind_of(config, frozenset(all_keys())) == kind


def test_no_packaged_recipe_is_taken_for_a_foreign_one():
    known = frozenset(all_keys())
    assert {projects.kind_of(read_yaml(path), known) for path in packaged_recipes().values()} == {None}
    launches = (recipes_folder() / "accelerate_configs").glob("*.yaml")
    assert {projects.kind_of(read_yaml(path), known) for path in launches} == {"accelerate"}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("n_samples_per_prompt", ["OpenRLHF has it as rollout.n_samples_per_prompt", "num_generations"]),
        ("micro_batch_size", ["Write per_device_train_batch_size"]),
        ("ppo_mini_batch_size", ["verl", "gradient_accumulation_steps", "prompts"]),
        ("kl_loss_coef", ["verl", "beta"]),
        ("init_kl_coef", ["OpenRLHF", "beta"]),
        ("sleep_level", ["ms-swift", "vllm_enable_sleep_mode"]),
        ("benchmarks", ["Open-R1 calls it so", "not taken over", "Remove it"]),
        ("fast_inference", ["unsloth calls it so", "use_vllm", "colocate"]),
        ("warmup_ratio", ["warmup_steps"]),
        ("sequence_len", ["axolotl", "vllm_max_model_length"]),
    ],
)
def test_a_key_of_another_project_answers_with_what_to_write_here(key, words, tmp_path):
    if key in all_keys():
        pytest.skip("the key is still one in this transformers")
    (tmp_path / "r.yaml").write_text(f"model_name_or_path: quickstart\n{key}: 1\nreward_funcs: [accuracy]\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(["--config", str(tmp_path / "r.yaml")])
    (told,) = (problem for problem in error.value.problems if problem.startswith(f"{key}=1"))
    assert "Did you mean" not in told
    assert not [word for word in words if word not in told], told


@pytest.mark.parametrize("project", projects.PROJECTS.values(), ids=projects.PROJECTS)
def test_what_the_tables_point_to_is_there(project):
    named = {to.strip() for rule in project.table.values() for to in rule.to.split(",") if rule.to}
    assert named <= OF_A_RECIPE
    assert all(rule.to or rule.note for rule in project.table.values())


def test_the_old_flags_of_openrlhf_have_rules():
    draft = Draft({}, openrlhf.TABLE)
    assert not [old for old, new in openrlhf.OLD.items() if draft.rule(new) is None]


def test_a_rule_in_its_short_forms():
    assert Rule.read("beta") == Rule("beta")
    assert Rule.read("beta | a | b") == Rule("beta", "a | b")
    assert Rule.read("- | why") == Rule("", "why")
    assert Rule.read("* beta, epsilon | how") == Rule("beta, epsilon", "how", computed=True)
    assert Rule.read("* - | not here") == Rule("", "not here", computed=True)


def test_an_unknown_key_is_neither_dropped_nor_taken(tmp_path):
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\nreward_funcs: [accuracy]\nfancy_new_thing: 3\n")
    _, draft = migrate.migrated(tmp_path / "c.yaml")
    assert "fancy_new_thing" in draft.left
    assert "fancy_new_thing" not in draft.values
    assert any(decision.startswith("fancy_new_thing: 3") for decision in draft.decisions)


def test_what_cannot_be_shared_out_is_asked():
    assert split_batch(160 * 8, 8, 80) == (80, 2)
    assert split_batch(30, 2, 4) == (3, 5)
    assert split_batch(10, 4, 8) is None
    config = {"actor_rollout_ref": {"rollout": {"n": 5}, "actor": {"ppo_mini_batch_size": 3}}, "data": {}}
    draft = projects.draft_of("verl", config)
    assert [sentence for sentence in draft.decisions if sentence.startswith("The batch: 5120 completions")]


def test_what_only_a_shell_would_tell_is_asked():
    words = "actor_rollout_ref.rollout.n=4 trainer.nnodes=$NODES trainer.n_gpus_per_node=${GPUS:-2}"
    draft = projects.draft_of("verl", arguments(f"python3 -m verl.trainer.main_ppo {words}"))
    assert draft.values["num_processes"] == 2
    assert draft.left["trainer.nnodes"] == "only a shell would tell"
    assert [decision for decision in draft.decisions if decision.startswith("trainer.nnodes: $NODES is what only")]


# Options of rewards.


def test_options_of_open_r1s_rewards_go_with_them():
    config = {
        "reward_funcs": ["cosine", "repetition_penalty", "soft_overlong_punishment", "length"],
        "reward_weights": [1.0, 0.5, 0.25, 2.0],
        "cosine_max_value_wrong": -0.25,
        "cosine_max_len": 900,
        "repetition_n_grams": 4,
        "max_completion_len": 100,
        "soft_punish_cache": 10,
        "code_language": "cpp",
        "max_completion_length": 700,
    }
    draft = projects.draft_of("open-r1", config)
    assert draft.values["reward_funcs"] == [
        {
            "name": "cosine_length",
            "kwargs": {
                "max_length": 700,
                "min_value_correct": 0.5,
                "max_value_correct": 1.0,
                "min_value_wrong": -0.25,  # Open-R1's short ones get 0, its long ones -0.25: exchanged, and asked
                "max_value_wrong": 0.0,
            },
            "weight": 1.0,
        },
        {"name": "repetition_penalty", "kwargs": {"ngram_size": 4, "max_penalty": -1.0}, "weight": 0.5},
        {
            "name": "soft_overlong_punishment",
            "kwargs": {"max_completion_len": 100, "soft_punish_cache": 10},
            "weight": 0.25,
        },
    ]
    assert draft.left == {"code_language": "its reward is not in reward_funcs"}
    assert len(draft.decisions) == 3  # cosine's length, its values, and the reward length


def test_cosine_of_ms_swift_is_the_very_formula():
    config = {"rlhf_type": "grpo", "model": "m", "reward_funcs": "cosine", "cosine_max_len": 99}
    draft = projects.draft_of("swift", config | {"cosine_min_len_value_wrong": -0.75})
    assert draft.values["reward_funcs"][0]["kwargs"] == {
        "max_length": 99,
        "min_value_correct": 0.5,
        "max_value_correct": 1.0,
        "min_value_wrong": -0.75,
        "max_value_wrong": 0.0,
    }
    assert not [sentence for sentence in draft.decisions if "cosine" in sentence]


def test_a_mixture_of_open_r1():
    mixture = {"datasets": [{"id": "a/b", "config": "c", "split": "train", "columns": ["x"]}], "test_split_size": 0.1}
    draft = projects.draft_of("open-r1", {"dataset_mixture": mixture | {"seed": 3}})
    assert draft.values["datasets"] == [{"path": "a/b", "name": "c", "split": "train", "columns": ["x"]}]
    assert (draft.values["test_split_size"], draft.values["split_seed"]) == (0.1, 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, ("grpo", "seq-mean-token-sum-norm", "group", 0.2, 3.0)),
        ({"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_c": 10.0}, ("grpo", None, "group", 0.2, 10.0)),
        ({"policy_loss": {"loss_mode": "gspo"}, "clip_ratio": 0.0003}, ("gspo", None, "group", 0.0003, None)),
        ({"policy_loss": {"loss_mode": "cispo"}}, ("cispo", "token-mean", "group", 1.2, None)),
    ],
)
def test_the_loss_that_verl_puts_together(given, expected):
    config = {"actor_rollout_ref": {"actor": given, "rollout": {"n": 8}}, "algorithm": {"adv_estimator": "grpo"}}
    values = projects.draft_of("verl", config).values
    keys = ("loss_type", "loss_aggregation", "advantage_estimator", "epsilon_high", "delta")
    assert tuple(values.get(key) for key in keys) == expected


# Shell scripts and Python.


def test_words_of_a_script_are_read_as_a_shell_would():
    script = r"""
    #!/bin/bash
    set -x
    size=$((2 * 4 + n))
    n=3
    size=$((2 * 4 + n))  # eleven
    name="${NAME:-a b}"
    UP=ABC
    ARGS=(
       --inside "$name"
       # --left-out 1
       --list 1 2.5
    )
    CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 run --size ${size} --flag --low ${UP,,} --data 'x/y#100' \
        --equals=1e-6 a.b.c="['u', 'v']" +d.e=True "${ARGS[@]}" --path $HOME/x --text 'one
    two' --last null "$@"
    """
    assert arguments(script) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NPROC_PER_NODE": 2,
        "size": 11,
        "flag": True,
        "low": "abc",
        "data": "x/y#100",
        "equals": 1e-6,
        "a.b.c": ["u", "v"],
        "d.e": True,
        "inside": "a b",
        "list": [1, 2.5],
        "path": "~/x",
        "text": "one\n    two",
        "last": [None, "$@"],
    }


def test_the_words_of_two_commands_are_apart():
    assert arguments("serve --port 1\nMAX_PIXELS=3 OTHER=4 train --key 1 2 |& tee log\n") == {
        "port": 1,
        "MAX_PIXELS": 3,
        "key": [1, 2, "|&", "tee", "log"],
    }


def test_a_launchers_own_words_are_left_out():
    script = "export NPROC_PER_NODE=4\nray job submit --address http://x -- python3 -m t --key 1\n"
    assert arguments(script) == {"NPROC_PER_NODE": 4, "key": 1}


def test_a_script_is_read_and_not_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "raise SystemExit('run')\nn = 4\nfrom trl import GRPOConfig\n"
        "GRPOConfig(num_generations=2 * n, beta=-0.5, seed=seed, report_to=['a'], max_steps=n)\n"
    )
    values, unread = read_script(script)
    assert values == {"num_generations": 8, "beta": -0.5, "report_to": ["a"], "max_steps": 4}
    (told,) = unread
    assert told.startswith("seed: GRPOConfig is given seed")
    notebook = tmp_path / "train.ipynb"
    cells = [{"cell_type": "code", "source": ["%pip install trl\n", "!ls\n", "GRPOConfig(seed=3)"]}]
    notebook.write_text(json.dumps({"cells": [*cells, {"cell_type": "markdown", "source": ["GRPOConfig("]}]}))
    assert read_script(notebook) == ({"seed": 3}, [])


# The command.


def test_the_command_writes_a_recipe_and_says_what_is_left_to_do(tmp_path, capsys):
    output = tmp_path / "out.yaml"
    assert migrate.run([str(FOLDER / "open_r1_qwen_demo.yaml"), "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "39 keys: 38 taken over, 1 not" in said.err
    assert "check lets it pass." in said.err
    assert read_yaml(output)["prompt_column"] == "problem"
    assert migrate.run([str(FOLDER / "open_r1_qwen_demo.yaml"), "--output", str(output)]) == 2
    assert "it exists" in capsys.readouterr().err


def test_the_command_prints_a_recipe_that_is_not_complete(capsys):
    assert migrate.run([str(FOLDER / "openrlhf_dapo.sh")]) == migrate.DECISIONS
    said = capsys.readouterr()
    assert yaml.safe_load(said.out)["generation_batch_size"] == 1024
    assert "To decide (2)" in said.err
    assert "check refuses it (1)" in said.err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.yaml", "- 1\n", "not a mapping"),
        ("a.yaml", "x: [\n", "not valid YAML"),
        ("a.yaml", "x: 1\n", "no configuration that is known here"),
        ("a.json", '{"x": 1}', "no configuration that is known here"),
        ("a.py", "def (", "cannot be read"),
        ("a.py", "print(1)", "calls no GRPOConfig"),
        ("a.ipynb", "{}", "cannot be read"),
        ("a.sh", "echo hello\n", "no configuration that is known here"),
        (None, "", "no such file"),
    ],
)
def test_a_file_that_cannot_be_read(name, text, told, tmp_path, capsys):
    path = tmp_path / (name or "missing.yaml")
    if name:
        path.write_text(text)
    assert migrate.run([str(path)]) == 2
    assert told in capsys.readouterr().err


def test_the_command_wants_one_file(capsys):
    for argv in ([], ["a", "b"]):
        assert migrate.run(argv) == 2
        assert "one file is expected" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_as_a_user_starts_it():
    command = [sys.executable, "-m", "grpo_ext.commands.cli", "migrate", str(FOLDER / "trl_num_processes.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["num_processes"] == 4
