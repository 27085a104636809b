"""Configurations of other projects: recognised, turned into recipes with every key accounted for, or refused."""

import json
from pathlib import Path

import pytest
import yaml

from grpo_ext.commands import migrate
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError
from grpo_ext.objective.losses import losses
from grpo_ext.objective.objective import resolve
from grpo_ext.recipe.files import packaged_recipes, read_yaml, recipes_folder
from grpo_ext.recipe.foreign import recognise
from grpo_ext.recipe.foreign.engine import Draft, defaults_at, own_default, version_key
from grpo_ext.recipe.foreign.shell import read_script
from grpo_ext.recipe.foreign.writing import recipe_text
from grpo_ext.recipe.launching import FLAGS, VALUES
from grpo_ext.recipe.parsing import all_keys, load_recipe
from support.commands import command

FOLDER = Path(__file__).parent / "foreign"
FILES = sorted(path.name for path in FOLDER.iterdir())
OF_A_RECIPE = {*all_keys(), *VALUES, *FLAGS, "env", "num_processes", "accelerate_config"}
IF_USED = {key for key in OF_A_RECIPE if key.startswith("vllm_")} | {"use_bias_correction_kl"}
"""Defaults that are written only where they have an effect."""


def draft_of(kind: str, given, version: str = "") -> Draft:
    return recognise.PROJECTS[kind].convert(given, version)


def drafted(kind: str, **given) -> Draft:
    """Return the recipe of a few keys."""
    return draft_of(kind, given)


# Whole files.

EXPECTED = yaml.safe_load((FOLDER.parent / "foreign_expected.yaml").read_text())


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_becomes_a_recipe(name):
    kind, values, left, decisions = EXPECTED[name].values()
    found, draft = migrate.migrated(FOLDER / name)
    text = recipe_text(draft, name, "recipe.yaml")
    assert found == kind
    assert {key: draft.values.get(key) for key in values} == values
    assert sorted(draft.left) == left
    assert len(draft.decisions) == len(decisions), draft.decisions
    assert not [begin for begin in decisions if not any(decision.startswith(begin) for decision in draft.decisions)]
    assert yaml.safe_load(text).keys() == draft.values.keys() <= OF_A_RECIPE
    assert all(f"#   {key}: " in text for key in draft.left)
    assert draft.decisions or not migrate.refusals(text)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_converted_or_asked_or_left_out_with_a_reason(name):
    _, draft = migrate.migrated(FOLDER / name)
    assert draft.converted | draft.asked | draft.left.keys() == draft.given.keys()
    assert not draft.converted & draft.left.keys()
    assert all(draft.left.values())


def others(value) -> list:
    """Return other values of the same kind; None removes the key."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [value * 2, 0, 1, None]
    if isinstance(value, list):
        return [[*others(value[0])[:1], *value[1:]], None]
    return [{"changed": 1} if isinstance(value, dict) else f"another-{value}", None]


@pytest.mark.parametrize("name", FILES)
def test_a_converted_key_changes_the_recipe(name):
    kind, draft = migrate.migrated(FOLDER / name)

    def outcome(given):
        try:
            found = draft_of(kind, given, draft.version)
        except (ValueError, ArithmeticError):
            return None
        return recipe_text(found, "x", "z").partition("# Left out")[0]

    before = outcome(draft.given)
    same = [
        key
        for key in draft.converted
        if {outcome(draft.given | {key: other}) for other in others(draft.given[key])} <= {before, None}
    ]
    assert same == []


# Defaults where a file is silent.


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", [name for name, row in losses.items() if row.trl])
def test_a_silent_recipe_of_trl_keeps_the_loss_of_stock_trl(loss_type, beta):
    options = {"vllm_importance_sampling_mode": "token_truncate", "use_cpu": True, "report_to": "none", "bf16": False}
    options |= {"luspo": {"importance_sampling_level": "sequence"}, "cispo": {"epsilon_high": 5.0}}.get(loss_type, {})
    given = {"loss_type": loss_type, "beta": beta, **options}
    stock = resolve(GRPOExtConfig("out", loss_defaults="trl", **given))
    migrated = drafted("trl", **given, reward_funcs=["accuracy"]).values
    migrated.pop("reward_funcs")
    assert resolve(GRPOExtConfig("out", **migrated)) == stock


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.16", {"loss_type": "bnpo", "beta": 0.04, "temperature": 0.9, "use_bias_correction_kl": False}),
        ("0.19.1", {"loss_type": "bnpo", "beta": None, "vllm_importance_sampling_correction": False}),
        ("0.24", {"loss_type": None, "max_completion_length": 256, "vllm_importance_sampling_clip_max": 2.0}),
        ("1.16", {"loss_type": None, "use_bias_correction_kl": None, "vllm_importance_sampling_clip_max": None}),
    ],
)
def test_defaults_are_those_of_the_version_that_is_named(version, expected):
    draft = draft_of("trl", {"use_vllm": True}, version)
    assert {key: draft.values.get(key) for key in expected} == expected


def test_trls_lower_bound_without_an_upper_one_asks_for_it():
    low, high = "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
    asked = [high in decision for decision in draft_of("trl", {"use_vllm": True, low: 0.5}).decisions]
    assert any(asked)
    assert not any(high in decision for decision in draft_of("trl", {"use_vllm": True, low: 0.5, high: 2.0}).decisions)


@pytest.mark.parametrize(("kind", "project"), recognise.PROJECTS.items())
def test_a_default_that_differs_from_ours_is_written_with_its_origin(kind, project):
    draft = draft_of(kind, {})
    found = defaults_at(project.defaults, draft.version)
    wanted = {key: value for key, value in found.items() if value != own_default(key) and key not in IF_USED}
    assert wanted.keys() <= draft.values.keys()
    assert [key for key in wanted if draft.values[key] == wanted[key] and not draft.notes.get(key)] == []
    versioned = (values for values in project.defaults.values() if isinstance(values, dict))
    known = {version for values in versioned for version in values}
    assert list(project.versions) == sorted(project.versions, key=version_key)
    assert kind == "open-r1" or known <= set(project.versions)


def test_a_version_that_is_not_known_is_refused(capsys):
    for version in ("0.9", "latest"):
        assert command("migrate", str(FOLDER / "trl.yaml"), "--version", version) == 2
        assert "the defaults of TRL are known since 0.16" in capsys.readouterr().err
    assert defaults_at({"beta": {"0.9": 1, "0.10": 2}}, "0.11.3") == {"beta": 2}


NO_RECIPES = {
    "an SFT recipe": {"base_model": "m", "datasets": []},
    "a DPO recipe": {"rlhf_type": "dpo", "model": "m"},
    "a launch configuration of accelerate": {"compute_environment": "LOCAL_MACHINE", "num_processes": 8},
    "a configuration of DeepSpeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1},
    "a LLaMA-Factory configuration": {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora"},
    "a configuration of unsloth's SFT": {"model": "m", "training": {"training_type": "lora"}, "data": {}},
    "an OpenRLHF configuration": {"pretrain": "m", "n_samples_per_prompt": 8},
    "a verl configuration": {"actor_rollout_ref": {"rollout": {"n": 8}}, "data": {"train_batch_size": 256}},
    "an ms-swift configuration": {"rlhf_type": "grpo", "model": "m", "num_generations": 8},
    "an axolotl configuration": {"base_model": "m", "rl": "grpo", "trl": {"num_generations": 8}},
}


@pytest.mark.parametrize("what", NO_RECIPES)
def test_a_file_that_is_not_a_recipe_is_named(what, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(NO_RECIPES[what]))
    for read in (lambda: load_recipe(["--config", str(path)]), lambda: migrate.migrated(path)):
        with pytest.raises(ConfigError) as error:
            read()
        assert len(error.value.problems) == 1
        assert f"is {what}" in str(error.value.problems[0])


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a verl", "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"),
        ("an ms-swift", "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model m --num_generations 8"),
    ],
)
def test_a_script_that_is_not_converted_names_the_page(what, line, tmp_path, capsys):
    (tmp_path / "run.sh").write_text(line)
    assert command("migrate", tmp_path / "run.sh") == 2
    said = capsys.readouterr().err
    assert said.count("\n  - ") == 1
    assert f"is {what} configuration, which is not converted" in said
    assert "docs/migrating.md" in said


def test_a_whole_file_of_open_r1_is_one_message():
    with pytest.raises(ConfigError) as error:
        load_recipe(["--config", str(FOLDER / "open_r1.yaml")])
    (problem,) = error.value.problems
    assert problem.reason.endswith("an Open-R1 configuration")
    assert problem.cure.startswith(f"`grpo-ext migrate {FOLDER / 'open_r1.yaml'}`")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"actor": {"model_name_or_path": "m"}}, "openrlhf"),
        ({"model_name_or_path": "m", "base_model": "n", "reward_funcs": ["accuracy"]}, None),
        ({"base_model": "m", "rl": "dpo"}, "dpo"),
        ({"dataset_prompt_column": "p"}, "open-r1"),
        ({"model_name_or_path": "m", "num_genrations": 8, "max_lenght": 3}, None),
    ],
)
def test_the_project_of_a_configuration_is_recognised(config, kind):
    assert recognise.kind_of(config) == kind


def test_no_packaged_recipe_is_taken_for_a_foreign_one():
    assert {recognise.kind_of(read_yaml(path)) for path in packaged_recipes().values()} == {None}
    launches = (recipes_folder() / "accelerate_configs").glob("*.yaml")
    assert {recognise.kind_of(read_yaml(path)) for path in launches} == {"accelerate"}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("micro_batch_size", ["Write per_device_train_batch_size"]),
        ("kl_loss_coef", ["Write beta"]),
        ("benchmarks", ["Open-R1 has this key", "not converted", "Remove it"]),
        ("warmup_ratio", ["warmup_steps"]),
    ],
)
def test_a_key_of_another_project_is_refused_with_the_key_to_write(key, words, tmp_path):
    if key in all_keys():
        pytest.skip("the key is still one in this transformers")
    (tmp_path / "r.yaml").write_text(f"model_name_or_path: quickstart\n{key}: 1\nreward_funcs: [accuracy]\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(["--config", str(tmp_path / "r.yaml")])
    (message,) = (str(problem) for problem in error.value.problems if problem.field == key)
    assert "Did you mean" not in message
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize("project", recognise.PROJECTS.values(), ids=recognise.PROJECTS)
def test_tables_name_keys_of_a_recipe(project):
    named = {to.partition(".")[0] for rule in project.table.values() for to in rule.to.split(", ") if rule.to}
    assert named <= OF_A_RECIPE
    assert all(rule.to or rule.note for rule in project.table.values())


def test_an_unknown_key_is_left_out_and_asked_about(tmp_path):
    (tmp_path / "c.yaml").write_text("model_name_or_path: m\nreward_funcs: [accuracy]\nfancy_new_thing: 3\n")
    _, draft = migrate.migrated(tmp_path / "c.yaml")
    assert "fancy_new_thing" in draft.left
    assert "fancy_new_thing" not in draft.values
    assert any(decision.startswith("fancy_new_thing: 3") for decision in draft.decisions)


def test_shell_variables_without_a_value_are_asked_about():
    words = "--model_name_or_path m --max_steps $STEPS --seed ${SEED:-2} --output_dir $SCRATCH/$(date +%Y)/run"
    draft = draft_of("trl", read_script(f"trl grpo {words}")[0])
    assert draft.values["seed"] == 2
    assert draft.left["max_steps"] == "only running the script would show it"
    printed = "\n".join(draft.decisions)
    assert "max_steps: only running the script would show $STEPS" in printed
    assert "output_dir: the file has no value for $SCRATCH, $(date +%Y)" in printed


def test_an_option_of_a_reward_that_is_not_listed_is_left_out():
    draft = drafted("open-r1", reward_funcs=["length"], code_language="cpp")
    assert draft.left == {"code_language": "its reward is not in reward_funcs"}
    assert [sentence[:14] for sentence in draft.decisions] == ["reward length:"]


def test_a_dataset_mixture_of_open_r1():
    mixture = {"datasets": [{"id": "a/b", "config": "c", "split": "train", "columns": ["x"]}], "test_split_size": 0.1}
    draft = draft_of("open-r1", {"dataset_mixture": mixture | {"seed": 3}})
    assert draft.values["datasets"] == [{"path": "a/b", "name": "c", "split": "train", "columns": ["x"]}]
    assert (draft.values["test_split_size"], draft.values["split_seed"]) == (0.1, 3)


# Shell scripts.


def test_a_script_is_read_as_a_shell_does():
    script = r"""
    #!/bin/bash
    set -x
    n=3
    size=$((2 * 4 + n))  # eleven
    name="${NAME:-a b}"
    SCRIPT="$(basename -- "${BASH_SOURCE[0]}" .sh)"
    UP=ABC
    deep=${DEEP:-"${OTHER:-5}"}
    EMPTY=()
    ARGS=(
       --inside "$name"
       # --left-out 1
       --list 1 2.5
    )
    ARGS+=(--more yes)
    CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 run --size ${size} --flag --low ${UP,,} --data 'x/y#100' \
        --equals=1e-6 a.b.c="['u', 'v']" +d.e=True "${ARGS[@]}" "${EMPTY[@]}" --path $HOME/x --text 'one
two' --deep $deep --name $SCRIPT --engine ${1:-vllm} --last null "$@" 2>&1 | tee log --no
    """
    assert read_script(script)[0] == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "size": 11,
        "flag": True,
        "low": "abc",
        "data": "x/y#100",
        "equals": 1e-6,
        "a.b.c": ["u", "v"],
        "d.e": True,
        "inside": "a b",
        "list": [1, 2.5],
        "more": "yes",
        "path": "~/x",
        "text": "one\ntwo",
        "deep": 5,
        "name": '$(basename -- "${BASH_SOURCE[0]}" .sh)',
        "engine": "vllm",
        "last": None,
    }


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("serve --port 1\nCUDA_VISIBLE_DEVICES=3 OTHER=4 train --key 1 2 |& tee log\n",
         {"CUDA_VISIBLE_DEVICES": 3, "key": [1, 2]}),
        ("export CUDA_VISIBLE_DEVICES=4\nray job submit --address http://x -- python3 -m t --key 1\n",
         {"CUDA_VISIBLE_DEVICES": 4, "key": 1}),
        ("uv run --frozen --extra vllm python3 -m t --key 1", {"key": 1}),
        ("accelerate launch --config_file c.yaml train.py --key 1", {"config_file": "c.yaml", "key": 1}),
        ("accelerate launch --multi_gpu train.py --key 1", {"multi_gpu": True, "key": 1}),
        ("export WANDB_PROJECT=me\ntrain --key 010 --m 1:30", {"WANDB_PROJECT": "me", "key": "010", "m": "1:30"}),
        ("hf jobs uv run --flavor a100 train.py --key 1", {"key": 1}),
        ("run --key 1\\\n  --more 2", {"key": 1, "more": 2}),
        ("run --host <ip one> <ip2> --key 1 <in", {"host": ["<ip one>", "<ip2>"], "key": 1}),
        ('a=1; srun bash -c "python3 -m t --key $a --more 2 --most 3"', {"key": 1, "more": 2, "most": 3}),
    ],
)  # fmt: skip
def test_only_the_words_of_the_training_command_are_read(script, expected):
    assert read_script(script)[0] == expected


def test_a_switch_that_is_off_and_a_single_weight_are_converted():
    draft = drafted("trl", no_gradient_checkpointing=True, reward_weights=0.5, WANDB_PROJECT="mine")
    assert draft.values["gradient_checkpointing"] is False
    assert draft.values["reward_weights"] == [0.5]
    assert draft.values["env"] == {"WANDB_PROJECT": "mine"}


def test_a_value_that_depends_on_a_condition_is_the_first_and_is_asked_about():
    script = "a=1\nb=2\nif [ $X = y ]; then a=3; b=2; c=4; else c=5; fi\nrun --a $a --b $b --c ${c}\n"
    found, unsure = read_script(script)
    assert (found, unsure) == ({"a": 1, "b": 2, "c": 4}, ["a", "c"])
    draft = recognise.PROJECTS["trl"].convert({"beta": 1.0}, unsure=unsure)
    assert "The script sets a, c under a condition; the first value is written." in draft.decisions


# Python.


def test_a_python_script_gets_the_classes_to_exchange(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import unsloth\nfrom trl import GRPOConfig, TrlParser\nGRPOConfig(seed=1)\n")
    assert command("migrate", str(script)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "from grpo_ext import GRPOExtConfig, GRPOExtTrainer" in printed.err
    assert 'loss_defaults="trl"' in printed.err
    assert "grpo-ext migrate run.sh" in printed.err
    assert 'loss_type="bnpo", beta=0.001' in printed.err
    notebook = tmp_path / "train.ipynb"
    cells = [{"cell_type": "code", "source": ["!pip install trl\n", "GRPOTrainer(model)"]}]
    notebook.write_text(json.dumps({"cells": [*cells, {"cell_type": "markdown", "source": ["Then import unsloth."]}]}))
    assert command("migrate", str(notebook)) == 2
    printed = capsys.readouterr().err
    assert "GRPOExtTrainer" in printed
    assert "unsloth" not in printed
    assert "run.sh" not in printed


def test_arguments_of_a_script_that_trl_has_dropped_are_named(tmp_path, capsys):
    (tmp_path / "a.py").write_text("GRPOConfig('out', max_prompt_length=512, torch_dtype='auto', beta=0.1)")
    assert command("migrate", str(tmp_path / "a.py")) == 2
    printed = capsys.readouterr().err
    assert "max_prompt_length: leave it out" in printed
    assert "torch_dtype: write dtype" in printed
    assert "beta" not in printed


def test_open_r1_pushes_where_one_of_its_two_keys_says_so(tmp_path, capsys):
    keys = "reward_funcs: [tag_count]\npush_to_hub_revision: false\npush_to_hub: true\n"
    (tmp_path / "a.yaml").write_text(f"model_name_or_path: a/b\ndataset_name: c/d\n{keys}")
    command("migrate", str(tmp_path / "a.yaml"))
    printed = capsys.readouterr()
    assert "from the Open-R1 configuration" in printed.out
    assert yaml.safe_load(printed.out)["push_to_hub"] is True
    assert "Left out" not in printed.out


def test_a_loader_of_files_gives_way_to_the_file(tmp_path, capsys):
    keys = "dataset_name: json\ndataset_config: {data_files: rows.json}\nreward_funcs: [accuracy]\n"
    (tmp_path / "a.yaml").write_text(f"model_name_or_path: a/b\n{keys}")
    command("migrate", str(tmp_path / "a.yaml"))
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["dataset_name"] == "rows.json"
    assert "dataset_config" not in recipe


# The command.


def test_the_command_writes_a_recipe_and_a_summary(tmp_path, capsys):
    output = tmp_path / "out.yaml"
    assert command("migrate", str(FOLDER / "trl.yaml"), "--output", str(output)) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "13 of 14 keys were converted; not converted: overwrite_output_dir." in printed.err
    assert "`grpo-ext check` accepts it." in printed.err
    assert read_yaml(output)["dtype"] == "bfloat16"
    assert command("migrate", str(FOLDER / "trl.yaml"), "--output", str(output)) == 2
    assert "it exists" in capsys.readouterr().err


def test_the_command_prints_a_recipe_that_is_not_complete(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: [ioi_code]\n")
    assert command("migrate", tmp_path / "a.yaml") == migrate.DECISIONS
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["loss_type"] == "bnpo"
    assert "To decide (1)" in printed.err
    assert "`grpo-ext check` refuses it (1)" in printed.err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- 1\n", "not a mapping"),
        ("a.yaml", "x: [\n", "not valid YAML"),
        ("a.yaml", "x: 1\n", "not a configuration of a known project"),
        ("a.json", '{"x": 1}', "not a configuration of a known project"),
        ("a.py", "def (", "does not call GRPOConfig"),
        ("a.py", "print(1)", "does not call GRPOConfig"),
        ("a.ipynb", "{}", "does not call GRPOConfig"),
        ("a.py", b"\xff", "cannot be read"),
        ("a.sh", "echo hello\n", "not a configuration of a known project"),
        (None, "", "no such file"),
    ],
)
def test_a_file_that_cannot_be_read(name, text, message, tmp_path, capsys):
    path = tmp_path / (name or "missing.yaml")
    if name:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert command("migrate", str(path)) == 2
    assert message in capsys.readouterr().err
