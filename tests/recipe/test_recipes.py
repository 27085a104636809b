"""Recipes: each packaged one is what its header says; each bad one is refused with one sentence that helps."""

import json
import os
import re
from pathlib import Path

import datasets
import pytest
import transformers
import yaml
from transformers import Qwen2Config

from grpo_ext.commands import cli
from grpo_ext.commands.check import plan
from grpo_ext.config import machine
from grpo_ext.config.launch import planned_processes
from grpo_ext.errors import ConfigError
from grpo_ext.objective.losses import losses
from grpo_ext.recipe.files import packaged_recipes, read_yaml, recipes_folder
from grpo_ext.recipe.launching import accelerate_config
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.recipe.preflight import Preflight
from support.resuming import checkpoint_to_resume
from support.run_folders import checkpoint

pytestmark = pytest.mark.usefixtures("few_rows")
PACKAGED = packaged_recipes()
WITH_RECIPES = ("grpo", "deepseek_v3", "bnpo", "beta_bnpo", "dr_grpo", "minimind", "dapo", "gspo")
SOUND = {
    "model_name_or_path": "quickstart",
    "dataset_name": "quickstart/addition",
    "loss_type": "grpo",
    "reward_funcs": ["accuracy"],
    "num_generations": 4,
    "max_completion_length": 64,
    "per_device_train_batch_size": 8,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    """Neither model, tokenizer nor dataset: a recipe is judged before any of them."""

    def load(*args, **kwargs):
        raise AssertionError(f"loaded {args}")

    for name in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", load)
    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch):
    monkeypatch.setattr(machine, "is_torch_bf16_gpu_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write(tmp_path):
    def write(**changes) -> list[str]:
        values = {k: v for k, v in (SOUND | changes).items() if v is not ...}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return ["--config", str(tmp_path / "recipe.yaml")]

    return write


def problems(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_recipe(argv)
    return [str(problem) for problem in error.value.problems]


def resumed(argv: list[str]) -> str | None:
    training = load_recipe(argv).training
    return checkpoint_to_resume(Path(training.output_dir), training.resume_from_checkpoint)


def planned(argv: list[str]) -> tuple[Recipe, dict[str, list]]:
    preflight = Preflight()
    recipe = load_recipe(argv, preflight)
    return recipe, plan(recipe, preflight)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(argv))
    return end.value.code


# What is wrong, and what is not.


def test_lora_settings_of_a_recipe_have_an_effect_where_eval_names_its_adapter(write, tmp_path, caplog):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    lora = {"use_peft": False, "lora_r": 4, "lora_target_modules": "q_proj"}
    load_recipe(write(**lora))
    assert "lora_r" in caplog.text
    caplog.clear()
    load_recipe(write(**lora, model_name_or_path=str(tmp_path)))
    assert not caplog.text


def test_the_base_of_the_bad_recipes_is_sound(write, caplog):
    load_recipe(write())
    assert not [r for r in caplog.records if r.name.startswith("grpo_ext")]


@pytest.mark.parametrize(
    ("broken", "other", "words"),
    [
        ({"per_device_train_batch_size": "eight"}, {"logging_steps": 1.5}, "logging_steps=1.5"),
        ({"learning_rate": "fast"}, {"lr_scheduler_type": "cosin"}, "lr_scheduler_type='cosin'"),
        ({"temperature": -1}, {"generation_kwargs": {"temperature": 1}}, "generation_kwargs.temperature=1"),
        ({"epsilon": "x"}, {"resume_from_checkpoint": "/nowhere"}, "resume_from_checkpoint='/nowhere'"),
        ({"epsilon": "x"}, {"dynamic_sampling": "acuracy"}, "dynamic_sampling='acuracy'"),
        ({"epsilon": "x"}, {"metric_for_best_model": "rewrd"}, "metric_for_best_model='rewrd'"),
        ({"epsilon": "x"}, {"reward_weights": [1.0, 2.0]}, "2 weights for 1 rewards"),
        ({"epsilon": "x"}, {"environment_waves": "turn"}, "environment_waves='turn'"),
        ({"max_steps": "x"}, {"model_init_kwargs": {"tp_plan": "auto"}}, "model_init_kwargs.tp_plan='auto'"),
    ],
)
def test_a_refused_value_hides_no_independent_mistake(broken, other, words, write):
    found = problems(write(**broken, **other))
    assert len(found) == 2, found
    assert found[0].startswith(f"{next(iter(broken))}=")
    assert words in found[1]


def test_a_list_on_the_command_line_may_be_json(write):
    recipe = load_recipe([*write(), "--reward_funcs", '["accuracy", {"name": "format", "weight": 0.5}]'])
    assert [(spec.name, spec.weight) for spec in recipe.rewards] == [("accuracy", 1.0), ("format", 0.5)]
    words = ["--reward_funcs", "accuracy", '{"name": "format", "weight": 0.5}']
    assert load_recipe([*write(), *words]).rewards == recipe.rewards
    targets = load_recipe([*write(use_peft=True), "--lora_target_modules", '["q_proj", "v_proj"]']).model
    assert targets.lora_target_modules == ["q_proj", "v_proj"]
    assert load_recipe([*write(), "--report_to", "[]"]).training.report_to == []
    [empty] = problems([*write(), "--reward_funcs", "[]"])
    assert "reward_funcs=[]: no source of rewards" in empty
    [broken] = problems([*write(), "--reward_funcs", '["accuracy"'])
    assert "not a list in JSON" in broken


def test_every_value_of_the_wrong_type_is_reported_at_once(write):
    values = {"learning_rate": "abc", "beta": "xyz", "max_steps": "many", "bf16": "maybe", "lora_r": "big"}
    values |= {"temperature": -1, "loss_type": "grop", "dataset_name": 5, "lora_target_modules": {"a": 1}}
    found = problems([*write(**values), "--reward_workers", "some"])
    assert sorted(problem.split("=")[0] for problem in found) == sorted([*values, "reward_workers"])


@pytest.mark.parametrize("value", [3, True, 1.5], ids=str)
@pytest.mark.parametrize("name", ["sampler_correction", "generation_kwargs", "vllm_engine_kwargs", "loss_kwargs"])
def test_the_cure_of_what_is_no_mapping_is_one(name, value, write):
    (found,) = problems([*write(**{name: value, "use_vllm": True})])
    assert found.endswith(f"Write {name}: {{option: value}}, or leave it out.")


def test_the_cure_of_a_value_of_the_wrong_type_is_a_known_name(write):
    (found,) = problems([*write(loss_type=3)])
    assert found.endswith("Write loss_type: dapo.")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("5E3", 5000.0), ("1.5e-2", 0.015), ("'1e-6'", "1e-6"), ("e3", "e3"), ("1", 1)]
)
def test_numbers_of_yaml_1_2_are_numbers(tmp_path, text, value):
    (tmp_path / "r.yaml").write_text(f"a: {text}\nb: {{c: {text}}}\n")
    read = read_yaml(tmp_path / "r.yaml")
    assert read == {"a": value, "b": {"c": value}}
    assert type(read["a"]) is type(value)


# Packaged recipes.


def header(path: Path) -> dict[str, str]:
    """The labelled lines of the comment at the top, continuation lines joined."""
    entries: dict[str, str] = {}
    for line in path.read_text().splitlines()[1:]:
        if not line.startswith("#"):
            break
        found = re.match(r"# (\w+): +(.*)", line)
        if found:
            label = found[1]
            entries[label] = found[2]
        elif line != "#":
            entries[label] += " " + line.removeprefix("#").strip()
    return entries


def loss_in_the_name(name: str) -> str:
    if name in ("quickstart/distill", "quickstart/opsd"):
        return "dr_grpo"  # named by what stands beside it
    return max((loss for loss in WITH_RECIPES if loss in re.split("[-/]", name)), key=len, default="grpo")


@pytest.mark.cases(39)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.extra("tasks") if n.endswith("-sums") else ()) for n in PACKAGED]
)
def test_a_packaged_recipe_is_what_its_header_says(name):
    path = PACKAGED[name]
    with planned_processes(1):
        recipe, sections = planned(["--config", name])
    objective, row = recipe.training.objective, losses[loss_in_the_name(name)]
    says = header(path)

    assert recipe.training.loss_type == loss_in_the_name(name)
    assert says["Loss"] == objective.describe().partition(": ")[2].replace("()", "")
    assert (objective.ratio, objective.advantage, objective.aggregation) == (row.ratio, row.advantage, row.aggregation)
    assert objective.options.items() >= row.options.items()
    assert (objective.kl, objective.kl_placement, objective.combination) == (row.kl, row.kl_placement, row.combination)
    assert f"--config {name}" in says["Run"]
    papers = re.findall(r"\d{4}\.\d{5}", row.paper)
    assert papers or row.paper.startswith(("MiniMind", "TRL"))
    assert all(paper in says["Source"] for paper in papers)
    assert says["Departures"]
    assert says["Measured"]
    sections_of_the_file = re.findall(r"^# (Model and data|Loss and rewards|Training)$", path.read_text(), re.M)
    assert sections_of_the_file == ["Model and data", "Loss and rewards", "Training"]
    assert dict(sections["Batch"])["optimizer steps"]
    assert recipe.training.output_dir == f"outputs/{name.replace('/', '-')}"
    assert not [w for _, w in sections["Warnings"] if "loss_type='bnpo'" not in w]


@pytest.mark.parametrize("name", [n for n in PACKAGED if n.startswith("quickstart/")])
def test_a_quickstart_recipe_needs_no_gpu_and_no_hub(name):
    recipe = load_recipe(["--config", name])  # not planned: this machine is to run it
    assert recipe.training.use_cpu
    plays = name in ("quickstart/agent", "quickstart/guess")
    expected = ("quickstart/guess",) * 2 if plays else ("quickstart", "quickstart/addition")
    assert (recipe.model.model_name_or_path, recipe.script.dataset_name) == expected


def test_every_loss_of_the_quickstart_has_its_recipe():
    names = set(PACKAGED)
    assert {f"quickstart/{loss}" for loss in WITH_RECIPES} <= names
    for loss in WITH_RECIPES:
        assert [n for n in names if re.fullmatch(rf"gsm8k/.*-{loss}-vllm-colocate", n)], loss
    for loss in ("grpo", "dapo", "deepseek_v3"):
        assert [n for n in names if re.fullmatch(rf"gsm8k/.*-{loss}-vllm-server", n)], loss


@pytest.mark.parametrize("name", [n for n in PACKAGED if n.startswith("gsm8k/")])
def test_the_name_of_a_gsm8k_recipe_tells_how_it_generates(name):
    with planned_processes(1):
        recipe = load_recipe(["--config", name])
    assert recipe.training.bf16 is True
    assert recipe.training.use_vllm == ("vllm" in name)
    if recipe.training.use_vllm:
        assert name.endswith(f"-vllm-{recipe.training.vllm_mode}")
    assert recipe.model.use_peft == ("-lora-" in name)
    assert str(recipe.model.model_name_or_path).split("/")[1].lower().startswith(name[6:].split("-")[0])
    assert (recipe.script.dataset_name, recipe.data.answer_format) == ("openai/gsm8k", "gsm8k")


WIDTHS = {  # public: layers, hidden, heads, key heads, inner, vocabulary
    "0.5b": (24, 896, 14, 2, 4864, 151_936),
    "1.5b": (28, 1536, 12, 2, 8960, 151_936),
    "3b": (36, 2048, 16, 2, 11_008, 151_936),
    "7b": (28, 3584, 28, 4, 18_944, 152_064),
}
"""Sizes of Qwen2.5's models."""


def qwen(size: str) -> Qwen2Config:
    layers, hidden, heads, keys, inner, vocabulary = WIDTHS[size]
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": keys, "tie_word_embeddings": size != "7b"}
    return Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"])


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", [n for n in PACKAGED if "Memory" in header(PACKAGED[n])])
def test_a_recipe_for_a_small_machine_fits_it_by_its_header(name, monkeypatch):
    size = re.search(r"-([\d.]+b)-", name)[1]
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *args, **kwargs: qwen(size))
    with planned_processes(1):
        recipe, sections = planned(["--config", name])
    foretold = dict(sections["Memory"])["memory per replica"]
    assert header(PACKAGED[name])["Memory"] == f"foretold by `check`: {foretold}"
    machine = 16 if name.startswith("laptop/") else int(re.match(r"gpu-(\d+)gb/", name)[1])
    assert float(re.match(r"about ([\d.]+) GiB", foretold)[1]) < 0.8 * machine  # the rest: libraries, fragments
    assert f"-{size.upper()}-" in recipe.model.model_name_or_path
    assert recipe.training.use_cpu == name.startswith("laptop/")
    assert (recipe.training.bf16, recipe.training.fp16) == (machine != 16 or recipe.training.use_cpu, "gpu-16" in name)
    assert (recipe.model.use_peft, recipe.model.load_in_4bit) == ("lora" in name, "qlora" in name)


def test_a_gpu_recipe_is_refused_where_there_is_no_gpu():
    assert problems(["--config", "gsm8k/qwen2.5-0.5b-grpo"])[0].startswith(
        "bf16=True: Your setup doesn't support bf16"
    )


# Finding, parsing, precedence.


def test_a_packaged_recipe_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argv in (["--config", "quickstart/grpo"], ["--config=quickstart/grpo"], ["--config", "quickstart/grpo.yaml"]):
        assert load_recipe(argv).training.output_dir == "outputs/quickstart-grpo"
    assert "'quickstart/grpo'" in problems(["--config", "quickstart/gpro"])[0]


def test_a_file_wins_over_a_packaged_name(tmp_path, monkeypatch, write):
    write(seed=77)
    monkeypatch.chdir(tmp_path)
    assert load_recipe(["--config=recipe.yaml"]).training.seed == 77


def test_an_emoji_as_json_writes_it_is_one_character(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"system_prompt": "Think \U0001f914"}))  # "\\ud83e\\udd14"
    assert read_yaml(path) == {"system_prompt": "Think \U0001f914"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [('a: "\\ud83e"', "line 1: the text has half"), ("a: 010", "010 is another"), ("a: 1:30", "1:30 is another")],
)
def test_text_and_numbers_of_two_meanings_are_refused(text, expected, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read_yaml(path)


def test_command_line_over_recipe_over_default(write):
    recipe = load_recipe([*write(seed=7, learning_rate=1e-4), "--learning_rate", "2e-4", "--lora_r=4", "--use_peft"])
    assert (recipe.training.seed, recipe.training.learning_rate, recipe.training.top_p) == (7, 2e-4, 1.0)
    assert (recipe.model.lora_r, recipe.model.use_peft, recipe.model.lora_alpha) == (4, True, 32)
    assert load_recipe([*write(use_peft=True), "--use_peft", "false"]).model.use_peft is False


def test_the_recipe_goes_to_trl_with_its_weights(write):
    rewards = ["accuracy", {"name": "format", "weight": 0.5, "kwargs": {"style": "boxed"}}]
    recipe = load_recipe(write(reward_funcs=rewards))
    assert recipe.training.reward_weights == [1.0, 0.5]
    assert [(spec.name, spec.kwargs) for spec in recipe.rewards] == [("accuracy", {}), ("format", {"style": "boxed"})]
    recipe = load_recipe([*write(reward_funcs=["accuracy", "format"]), "--reward_weights", "1.0", "0.25"])
    assert [spec.weight for spec in recipe.rewards] == recipe.training.reward_weights == [1.0, 0.25]


def test_trls_reward_model_comes_first(write):
    recipe = load_recipe(write(reward_model_name_or_path="org/judge", reward_funcs=["accuracy"]))
    rewards = [(spec.name, spec.function) for spec in recipe.rewards]
    assert rewards == [("judge", "org/judge"), ("accuracy", "accuracy")]


def test_json_on_the_command_line_is_checked_like_yaml(write):
    recipe = load_recipe([*write(), "--advantage_kwargs", '{"ddof": 0}'])
    assert recipe.training.objective.advantage_kwargs == {"ddof": 0}
    assert problems([*write(), "--advantage_kwargs", '{"ddoff": 0}'])[0].startswith("advantage_kwargs.ddoff=0")
    (found,) = problems([*write(), "--advantage_kwargs", "{ddof: 0}"])
    assert "not JSON" in found
    (found,) = problems([*write(), "--advantage_kwargs", "ddof=0"])
    assert "--advantage_kwargs '{\"option\": value}'" in found
    (found,) = problems([*write(), "--generation_kwargs", '{"temperature": 0.5}'])
    assert found.startswith("generation_kwargs.temperature=0.5")


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (["quickstart/grpo"], "command line: 'quickstart/grpo' belongs to no key"),
        (["--temprature", "1.0"], "temprature: no such key. Did you mean 'temperature'"),
        (["--kl_coef", "0.1"], "kl_coef: no such key. It is beta here"),
        (
            ["--num_generations", "four"],
            "num_generations='four': text where a whole number is expected. Write a whole number, or leave",
        ),
        (
            ["--no_log_completions"],
            "no_log_completions: no such key, and it would be ignored. Write --log_completions fa",
        ),
        (["--no-use-peft"], "no_use_peft: no such key, and it would be ignored. Write --use_peft false"),
        (["--no_beta"], "no_beta: no such key, and it would be ignored. Write --beta VALUE"),
        (["--model_init_kwargs", "a=b"], "model_init_kwargs='a=b': not a mapping"),
        (["--liger_kernel_config", "{rope}"], "liger_kernel_config='{rope}': not JSON"),
        (["--lr_scheduler_type", "cosin"], "lr_scheduler_type='cosin': cosin is not a valid SchedulerType"),
        (["--scale_rewards", "Fales"], "scale_rewards='Fales': not one of its values. Did you mean 'False'"),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere': no such folder"),
        (["--max_steps"], "command line: --max_steps/--max-steps: expected one argument"),
        (["--seed", "1", "2"], "command line: '2' belongs to no key"),
        (["seed=1"], "command line: 'seed=1' belongs to no key. Write --seed 1."),
        (["--env", '{"A": "1"}'], "env: it is a key of a recipe only. Write it there"),
    ],
)
def test_mistakes_on_the_command_line(write, args, start):
    (found,) = problems([*write(), *args])
    assert found.startswith(start)


def test_config_without_a_value():
    assert problems(["--config"])[0].startswith("--config: no value")


def test_env_is_applied(write, monkeypatch):
    monkeypatch.delenv("GRPO_EXT_TEST", raising=False)
    load_recipe(write(env={"GRPO_EXT_TEST": 3}))
    assert os.environ.pop("GRPO_EXT_TEST") == "3"


def test_never_and_last_are_not_paths_of_checkpoints(write, tmp_path):
    for value in ("never", "last", "true", True, str(tmp_path)):
        assert load_recipe(write(resume_from_checkpoint=value)).training.resume_from_checkpoint == value


def test_false_and_never_in_any_case_start_a_new_run(write, tmp_path):
    checkpoint(tmp_path / "out", 1)
    argv = write(output_dir=str(tmp_path / "out"))
    assert resumed(argv) == str(tmp_path / "out" / "checkpoint-1")
    for word in ("never", "NEVER", "false", "False"):
        assert resumed([*argv, "--resume_from_checkpoint", word]) is None
    assert resumed(write(output_dir=str(tmp_path), resume_from_checkpoint=False)) is None


def test_a_false_on_the_command_line_is_yamls(write):
    for word in ("False", "false"):
        recipe = load_recipe([*write(), "--scale_rewards", word, "--shared_prefix", word])
        assert recipe.training.objective.advantage == "none"
        assert recipe.training.prefix_setting == "false"
    assert load_recipe([*write(), "--no_log_multimodal"]).training.log_multimodal is False
    recipe = load_recipe([*write(), "--use_liger_kernel", "false", "--liger_kernel_config", '{"rope": true}'])
    assert recipe.training.liger_kernel_config == {"rope": True}


def test_a_recipe_in_latin_1_is_refused(tmp_path):
    (tmp_path / "r.yaml").write_bytes("system_prompt: für\n".encode("latin-1"))
    (found,) = problems(["--config", str(tmp_path / "r.yaml")])
    assert ": not UTF-8" in found


def test_env_may_repeat_an_exported_variable(write, monkeypatch):
    monkeypatch.setenv("HF_HOME", "here")
    load_recipe(write(env={"HF_HOME": "here"}))
    assert os.environ["HF_HOME"] == "here"
    [problem] = problems(write(env={"HF_HOME": "there"}))
    assert "HF_HOME has been read before" in problem


# grpo-ext check.


def words(text: str) -> str:
    return " ".join(text.split())


def test_check_prints_the_plan(capsys):
    assert run("check", "--config", "quickstart/beta_bnpo", "--num_generations", "16") == 0
    out = words(capsys.readouterr().out)
    assert "beta_bnpo: clip(epsilon_low=0.2, epsilon_high=0.28, delta=10.0) at token level" in out
    assert "64 completions = 4 prompts x 16" in out
    assert "accuracy x 1, format x 0.5, tags x 0.5" in out


def test_check_plans_for_another_number_of_processes(capsys):
    assert run("check", "--config", "quickstart/grpo", "--num_processes", "2") == 0
    assert "128 completions = 16 prompts x 8" in words(capsys.readouterr().out)
    assert run("check", "--config", "quickstart/grpo", "--per_device_train_batch_size", "4") == 2
    assert "4 x 1 x 1 = 4 completions" in words(capsys.readouterr().err)
    assert run("check", "--config", "quickstart/grpo", "--per_device_train_batch_size", "4", "--num_processes=2") == 0


def test_check_takes_the_launch_configuration_as_train_does(capsys):
    argv = ["check", "--config", "quickstart/grpo", "--accelerate_config", "cpu_ddp"]
    assert run(*argv) == 0
    assert "128 completions" in words(capsys.readouterr().out)
    assert run(*argv, "--num_processes", "4") == 0
    assert "256 completions" in words(capsys.readouterr().out)
    assert run("check", "--config", "quickstart/grpo", "--accelerate_config", "cpu_dpp") == 2
    assert "accelerate_config='cpu_dpp'" in capsys.readouterr().err
    assert run("check", "--config", "quickstart/grpo", "--accelerate_config", "fsdp2") == 2
    assert "accelerate has FSDP on GPUs only" in capsys.readouterr().err


def test_check_warns_once(capsys, caplog):
    assert run("check", "--config", "quickstart/bnpo", "--lora_r", "32", "--use_peft", "false") == 0
    out = words(capsys.readouterr().out)
    assert out.count("TRL's token mean over each micro-batch") == 1
    assert out.count("lora_r: without use_peft: true this has no effect.") == 1
    assert not [r for r in caplog.records if r.name.startswith("grpo_ext")]


@pytest.mark.parametrize(
    "args", [["--epsilon", "-1"], ["--config", "no/such"], ["--num_processes", "0"], ["--num_processes", "two"]]
)
def test_check_ends_with_2_on_problems(capsys, args):
    config = [] if "--config" in args else ["--config", "quickstart/grpo"]
    assert run("check", *config, *args) == 2
    captured = capsys.readouterr()
    assert args[-1].lstrip("-") in captured.err
    assert not captured.out


def test_train_ends_with_2_on_problems(capsys):
    assert run("train", "--config", "quickstart/grpo", "--temperature", "0") == 2
    assert "temperature=0.0: must be above 0" in capsys.readouterr().err


# Launching.


@pytest.mark.parametrize("name", ["single", "ddp", "cpu_ddp", "fsdp2", "zero2", "zero3"])
def test_a_launch_configuration_is_accelerates(name):
    from accelerate.commands.config.config_args import load_config_from_file

    path = accelerate_config(name)
    assert path.parent == recipes_folder() / "accelerate_configs"
    config = load_config_from_file(str(path))
    assert config.num_processes == {"single": 1, "cpu_ddp": 2}.get(name, 8)
    assert config.use_cpu == (name == "cpu_ddp")


def test_other_launch_configurations_are_trls():
    assert accelerate_config("fsdp1").name == "fsdp1.yaml"
    with pytest.raises(ConfigError, match=r"Did you mean .*'zero2'"):
        accelerate_config("zerro2")
