"""Keys of a recipe that say how it is launched: TRL's `num_processes` and `accelerate_config`, accelerate's own."""

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from grpo_ext.commands import serve
from grpo_ext.commands.arguments import parse_command_line
from grpo_ext.commands.train import accelerate_command, wanted_launch
from grpo_ext.config.launch import ASKED, EXIT_CODE_FILE
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.files import recipes_folder
from grpo_ext.recipe.launching import FLAGS, VALUES, Launch, check_launched, launch_of
from grpo_ext.recipe.parsing import all_keys, load_recipe
from support.commands import command

ZERO2 = recipes_folder() / "accelerate_configs" / "zero2.yaml"
ANNOUNCED = ("RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED", ASKED, EXIT_CODE_FILE)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ANNOUNCED:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recipe(tmp_path):
    def write(**keys) -> list[str]:
        sound = {
            "model_name_or_path": "quickstart",
            "dataset_name": "quickstart/addition",
            "reward_funcs": ["accuracy"],
        }
        sound |= {"use_cpu": True, "bf16": False, "report_to": "none", "max_completion_length": 16}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sound | keys))
        return ["--config", str(tmp_path / "recipe.yaml")]

    return write


def test_every_launch_key_is_accelerates_and_none_of_ours():
    options = {action.dest: action for action in launch_command_parser()._actions if action.option_strings}
    assert not {*VALUES, *FLAGS, "num_processes", "accelerate_config"} & set(all_keys())
    assert {options[key].nargs for key in FLAGS} == {0}
    assert {options[key].nargs for key in (*VALUES, "num_processes")} == {None}


def test_env_may_set_a_variable_of_the_launch(recipe, monkeypatch):
    monkeypatch.setenv("CONFIGS_DIR", "/gone")
    folder = str(ZERO2.parent)
    assert launch_of(recipe(env={"CONFIGS_DIR": folder}, accelerate_config="$CONFIGS_DIR/zero2.yaml")).config == ZERO2


@pytest.mark.parametrize("launch", [{"num_processes": "two"}, {"accelerate_config": "zero22"}], ids=str)
def test_a_mistake_in_the_launch_hides_no_other(launch, recipe, capsys):
    assert command("check", *recipe(learning_rate="fast", **launch)) == 2
    told = capsys.readouterr().err
    assert "2 problems" in told
    assert all(word in told for word in ("learning_rate='fast'", *launch))


def test_what_a_recipe_says_of_its_launch(recipe):
    keys = {"machine_rank": 1, "multi_gpu": True, "use_fsdp": False, "zero3_init_flag": False, "mixed_precision": None}
    launch = launch_of(recipe(accelerate_config="zero2", num_processes=4, **keys))
    assert launch == Launch(ZERO2, 4, ("--machine_rank", "1", "--multi_gpu", "--zero3_init_flag", "false"))
    assert launch.planned == 4
    assert launch_of(recipe(accelerate_config="zero2")).planned == 8  # as the file says
    assert launch_of(recipe(accelerate_config=str(ZERO2))).config == ZERO2
    assert not launch_of(recipe())
    assert not launch_of([])


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({"num_processes": 0}, "num_processes=0: not a number of processes"),
        ({"num_processes": "two"}, "num_processes='two': not a number of processes"),
        ({"num_processes": True}, "num_processes=True: not a number"),
        (
            {"accelerate_config": "zerro2"},
            "accelerate_config='zerro2': neither a file nor a shipped configuration. Did",
        ),
        ({"multi_gpu": "many"}, "multi_gpu='many': true or false"),
        ({"zero_stage": [2]}, "zero_stage=[2]: text or a number"),
    ],
)
def test_mistakes_in_launch_keys(recipe, keys, start):
    for read in (launch_of, load_recipe):
        with pytest.raises(ConfigError) as error:
            read(recipe(**keys))
        (problem,) = error.value.problems
        assert str(problem).startswith(start)


def test_a_plan_asks_for_no_process_group(recipe, capsys):
    assert command("check", *recipe(num_processes=2, ddp_backend="gloo")) == 0
    capsys.readouterr()


def test_check_plans_for_the_recipes_processes(recipe, capsys):
    """Groups of 8 with one row a process: whole with 8 processes, and with 4 a mistake."""
    rows = {"per_device_train_batch_size": 1, "num_generations": 8, "accelerate_config": "zero2"}
    assert command("check", *recipe(**rows)) == 0
    assert "8 completions of 1 prompts" in " ".join(capsys.readouterr().out.split())
    assert command("check", *recipe(**rows, num_processes=4)) == 2
    assert "1 x 4 x 1 = 4" in capsys.readouterr().err
    assert command("check", *recipe(**rows, num_processes=4), "--num_processes", "16") == 0


def test_a_launch_that_is_not_the_recipes_is_refused(recipe, monkeypatch):
    launch = launch_of(recipe(accelerate_config="zero2", num_processes=4, machine_rank=0))
    with pytest.raises(ConfigError) as error:
        check_launched(launch)
    starts = [
        "num_processes=4: the recipe asks for these, and this launch has 1",
        f"accelerate_config='{ZERO2}': the recipe asks for DEEPSPEED",
        "--machine",
    ]
    assert all(str(problem).startswith(start) for problem, start in zip(error.value.problems, starts, strict=True))

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    check_launched(launch_of(recipe(accelerate_config="zero2", num_processes=4)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="this launch has 2"):
        check_launched(launch)
    monkeypatch.setenv(EXIT_CODE_FILE, "written by grpo-ext train")  # which has read the recipe, and its command line
    check_launched(launch)


ON_TWO = {"num_processes": 2, "per_device_train_batch_size": 2, "num_generations": 4}
"""A recipe that no single process can train."""


def test_a_run_is_launched_as_the_recipe_says(recipe):
    def wanted(*argv):
        return wanted_launch(parse_command_line(["train", *argv]))

    launch = wanted(*recipe(**ON_TWO, machine_rank=0))
    line = accelerate_command(launch)
    assert (launch.planned, line[-2:]) == (2, ["--machine_rank", "0"])
    assert line[line.index("--num_processes") + 1] == "2"
    assert wanted(*recipe(accelerate_config="zero2")).planned == 8
    assert wanted(*recipe(**ON_TWO), "--num_processes", "3").planned == 3
    assert wanted(*recipe()) is None


def test_the_server_of_several_processes_is_started_by_one(recipe, monkeypatch, capsys):
    monkeypatch.setattr(serve, "find_spec", lambda package: None)
    assert command("serve", *recipe(**ON_TWO)) == 2
    err = capsys.readouterr().err
    assert "pip install 'grpo-ext[vllm]'" in err
    assert "num_generations" not in err


def test_a_plan_for_a_server_needs_no_hub(recipe, capsys):
    """Neither of the two can be reached."""
    keys = {"model_name_or_path": "owner/model", "use_vllm": True, "vllm_mode": "server", "vllm_server_port": 1}
    assert command("check", *recipe(**keys), "--num_processes", "2") == 0
    assert "vLLM server: " in capsys.readouterr().out
