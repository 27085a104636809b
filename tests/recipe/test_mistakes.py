"""Mistakes: `check` reports each as one problem that names its setting, before anything of the model is loaded."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import transformers
import yaml
from datasets import Dataset
from transformers import training_args

from grpo_ext.config import machine, vllm
from grpo_ext.config.batches import batch_problems
from grpo_ext.config.launch import planned_processes
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.recipe.files import read_yaml
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.rewards import columns
from grpo_ext.rewards.composition import parse_rewards
from support import mistaken
from support.commands import command

QUICKSTART = {
    "model_name_or_path": "quickstart",
    "dataset_name": "quickstart/addition",
    "loss_type": "grpo",
    "reward_funcs": ["accuracy"],
    "num_generations": 4,
    "max_completion_length": 64,
    "per_device_train_batch_size": 8,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}
SOUND = QUICKSTART | {
    "model_name_or_path": "./model",
    "dataset_name": "./questions.jsonl",
    "output_dir": "./out",
}


@dataclass(frozen=True)
class Mistake:
    """A case of mistakes.yaml, which says what each key means."""

    word: str
    key: str = ""
    warned: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    text: str = ""

    def written(self, sound: dict[str, Any]) -> str:
        return self.text or yaml.safe_dump(changed(sound, self.recipe, self.without), sort_keys=False)


CASES = read_yaml(Path(__file__).parent / "mistakes.yaml")
IN_SETTINGS, IN_FILES = (
    {name: Mistake(**case) for name, case in CASES[kind].items()} for kind in ("settings", "files")
)


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    mistaken.lay_out(folder)
    return folder


@pytest.fixture(autouse=True)
def here(laid_out, monkeypatch):
    """In the user's folder, on a machine without a GPU."""
    monkeypatch.chdir(laid_out)
    monkeypatch.setattr(machine, "is_torch_bf16_gpu_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Neither model, tokenizer nor dataset."""

    def load(*args, **kwargs):
        raise AssertionError(f"loaded {args}")

    for name in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", load)
    monkeypatch.setattr(datasets, "load_dataset", load)


def found(preflight: Preflight | None, *args: str, processes: int | None = None) -> list[Problem]:
    """Problems of recipe.yaml, as `check` finds them; without a look, as a run does before it loads anything."""
    with planned_processes(processes, here=processes is None) if preflight else nullcontext():
        try:
            load_recipe(["--config", "recipe.yaml", *args], preflight)
        except ConfigError as error:
            return error.problems
    return []


def checked(values: dict[str, Any], *args: str, processes: int | None = None) -> tuple[list[str], Preflight]:
    """Problems of a recipe as text, and what was seen of its files."""
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    preflight = Preflight()
    return list(map(str, found(preflight, *args, processes=processes))), preflight


def changed(values: dict[str, Any], changes: dict[str, Any], without: Any = ()) -> dict[str, Any]:
    return {key: value for key, value in (values | changes).items() if key not in without}


@pytest.mark.cases(120)
@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("name", IN_SETTINGS)
def test_a_mistake_in_a_setting_is_one_problem_with_its_key(name, caplog):
    mistake = IN_SETTINGS[name]
    Path("recipe.yaml").write_text(mistake.written(QUICKSTART))
    if not mistake.warned:
        (problem,) = found(None)
        assert (problem.field, mistake.word in str(problem)) == (mistake.key, True), str(problem)
        return
    load_recipe(["--config", "recipe.yaml"])
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("grpo_ext")]
    assert mistake.warned in line
    assert mistake.word in line


@pytest.mark.cases(25)
@pytest.mark.parametrize("name", IN_FILES)
def test_a_mistake_in_model_or_data_is_one_problem_with_its_key(name):
    mistake = IN_FILES[name]
    Path("recipe.yaml").write_text(mistake.written(SOUND))
    (problem,) = found(Preflight())
    assert (problem.field, mistake.word in str(problem)) == (mistake.key, True), str(problem)
    assert "\n" not in str(problem)


def test_a_sound_recipe_has_no_problems():
    problems, preflight = checked(SOUND)
    assert problems == preflight.notes == []


def test_what_transformers_refuses_is_reported_beside_all_else_with_its_key():
    values = {"num_generations": 3, "lr_scheduler_type": "cosin", "prompt_column": "questoin"}
    problems, _ = checked(SOUND | values)
    starts = ["num_generations=3: it does not", "lr_scheduler_type='cosin': cosin is not", "prompt_column='questoin'"]
    assert sorted(p[:20] for p in problems) == sorted(start[:20] for start in starts)
    # What may be a consequence is not told: of the sizes TRL reads the refused one, and would refuse another.
    for values in ({"per_device_train_batch_size": "eight", "num_generations": 6}, {"logging_steps": "often"}):
        problems, _ = checked(SOUND | values)
        assert [problem.partition("=")[0] for problem in problems] == [next(iter(values))]


# What the table does not hold: several at once, other machines, what is no fault.


def test_mistakes_of_all_kinds_are_reported_at_once():
    problems, _ = checked(
        changed(
            SOUND,
            {
                "num_generations": 3,
                "learning_rate": "fast",
                "lr_scheduler_type": "cosin",
                "output_dir": " ",
                "prompt_column": "questoin",
                "answer_column": "anser",
                "use_peft": True,
                "lora_target_modules": ["c_attn"],
                "eval_strategy": "steps",
                "reward_funcs": ["acuracy"],
            },
            [],
        )
    )
    starts = ["num_generations=3", "learning_rate='fast'", "lr_scheduler_type='cosin'", "output_dir=' '"]
    starts += ["prompt_column='questoin'", "answer_column='anser'", "lora_target_modules: no module"]
    starts += ["dataset_test_split='test'", "reward_funcs[0]='acuracy'", "per_device_eval_batch_size=8"]
    assert [start for start in starts if sum(p.startswith(start) for p in problems) != 1] == []
    assert len(problems) == len(starts)


def refused_by_train(recipe: str) -> None:
    assert command("train", "--config", recipe) == 2


def test_a_recipe_of_a_gpu_is_checked_for_it_and_refused_by_train(capsys, monkeypatch):
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: False)
    of_a_gpu = {**SOUND, "use_cpu": False, "bf16": True, "attn_implementation": "flash_attention_2"}
    assert checked(of_a_gpu)[0] == []
    refused_by_train("recipe.yaml")
    assert "bf16=True: Your setup doesn't support bf16/gpu" in capsys.readouterr().err


def test_a_run_with_vllm_is_refused_where_there_is_none(capsys, monkeypatch):
    monkeypatch.setattr(vllm, "find_spec", lambda package: None)
    assert checked(SOUND | {"use_vllm": True, "vllm_mode": "server"})[0] == []
    refused_by_train("recipe.yaml")
    assert "use_vllm=True: it needs vllm, which is not installed" in capsys.readouterr().err


def test_a_list_of_one_module_and_an_unreachable_hub_are_no_mistakes():
    problems, preflight = checked({**SOUND, "use_peft": True, "lora_r": 2, "lora_target_modules": ["q_proj"]})
    assert problems == []
    assert preflight.policy.trained == 2 * 2 * (32 + 32)  # two layers of two matrices between 32 and 2
    problems, preflight = checked({**SOUND, "model_name_or_path": "owner/model", "dataset_name": "owner/data"})
    assert problems == []
    assert "owner/model" in preflight.policy.unknown or "connect" in preflight.policy.unknown


def test_a_model_on_a_hub_that_cannot_be_reached_is_one_line_of_train(capsys):
    Path("recipe.yaml").write_text(yaml.safe_dump({**SOUND, "model_name_or_path": "owner/model"}))
    refused_by_train("recipe.yaml")
    assert "model_name_or_path='owner/model'" in capsys.readouterr().err


def test_train_looks_at_policy_and_data_before_it_loads_weights(capsys):
    Path("recipe.yaml").write_text(yaml.safe_dump({**SOUND, "model_name_or_path": "./t5", "prompt_column": "text"}))
    refused_by_train("recipe.yaml")
    assert capsys.readouterr().err.count("\n  - ") == 2
    Path("recipe.yaml").write_text(yaml.safe_dump({**SOUND, "prompt_column": "text", "answer_column": "label"}))
    refused_by_train("recipe.yaml")
    assert capsys.readouterr().err.startswith("2 problems in the configuration:\n  - prompt_column='text'")


def test_some_unreadable_references_are_counted_with_the_place_of_the_first():
    rows = [{"question": "?", "answer": None if i in (3, 5) else str(i)} for i in range(16)]
    mistaken.write(Path("some.jsonl"), rows)
    problems, preflight = checked({**SOUND, "dataset_name": "./some.jsonl"})
    assert problems == []
    (note,) = preflight.notes
    assert note.startswith("reward='accuracy': it cannot read 2 of 16 solutions: no score for those rows")
    assert "The first is row 3" in note


def test_of_many_references_a_sample_is_read(monkeypatch):
    monkeypatch.setattr(columns, "READ_AHEAD", 4)
    data = Dataset.from_dict({"solution": ["0", "1", "2", None, "4", "5", "6", "7", None]})
    (spec,), _ = parse_rewards(["accuracy"])
    ((sentence, of_all),) = columns.unreadable([spec], data)
    assert not of_all
    assert "cannot read 1 of 3 solutions (one row in 3 was read)" in str(sentence)
    assert "The first is row 3 (from 0): None" in str(sentence)


def test_a_note_where_prompts_and_completions_go_beyond_the_context():
    problems, preflight = checked({**SOUND, "dataset_name": "./long.jsonl", "max_completion_length": 512})
    assert problems == []
    (note,) = preflight.notes
    assert note.startswith("max_completion_length=512: the prompt of row 10")
    assert "Set max_prompt_length: 512" in note


def test_axes_that_are_not_the_papers_show_beside_formula_and_paper(capsys):
    Path("recipe.yaml").write_text(yaml.safe_dump(SOUND))
    axes = ["--loss_aggregation", "token-mean", "--advantage_estimator", "none"]
    assert command("check", "--config", "recipe.yaml", *axes) == 0
    out = " ".join(capsys.readouterr().out.split())
    but = "but for advantage_estimator 'none' in place of 'group', loss_aggregation 'token-mean' in place of"
    assert but in out
    assert "(modified)" in out.partition("formula")[2].partition("paper")[0]
    assert command("check", "--config", "recipe.yaml") == 0
    out = capsys.readouterr().out
    assert "but for" not in out
    assert "modified" not in out


SIZES = [(p, a, s, g) for p in (1, 3, 8) for a in (1, 2, 3) for s in (None, 1, 4) for g in (2, 5, 7)]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_size_that_a_batch_problem_names_works(processes):
    """Over a grid: each `name N or M` of each sentence, applied alone, leaves no problem."""

    def sentences(**sizes: Any) -> list[str]:
        with planned_processes(sizes.pop("processes", processes)):
            return list(map(str, batch_problems(SimpleNamespace(**sizes))))

    applied = 0
    for p, a, s, g in SIZES:
        sizes: dict[str, Any] = {
            "per_device_train_batch_size": p,
            "gradient_accumulation_steps": a,
            "steps_per_generation": s,
            "num_generations": g,
            "generation_batch_size": None,
            "loss_defaults": "paper",
            "eval_strategy": "no",
        }
        for sentence in sentences(**sizes):
            cures = str(sentence).partition("Nearest that work: ")[2].rstrip(".").split("; or ")
            for name, *values in (cure.replace(" or ", " ").split() for cure in cures):
                key = "processes" if name == "--num_processes" else name
                for value in values:
                    assert sentences(**sizes | {key: int(value)}) == [], (sentence, name, value)
                    applied += 1
    assert applied > 100
