"""Mistakes of new users: `check` reports each in one line before training, with a cure that works."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from datasets import Dataset

from grpo_ext.config import machine
from grpo_ext.config.batches import batch_problems
from grpo_ext.config.launch import planned_processes
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.files import read_yaml
from grpo_ext.recipe.look import Look
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rewards import columns
from grpo_ext.rewards.composition import parse_rewards
from support import mistaken
from support.commands import command

SOUND = {
    "model_name_or_path": "./model",
    "dataset_name": "./questions.jsonl",
    "loss_type": "grpo",
    "reward_funcs": ["accuracy"],
    "num_generations": 4,
    "max_completion_length": 64,
    "per_device_train_batch_size": 8,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "output_dir": "./out",
}


@dataclass(frozen=True)
class Mistake:
    """A case of mistakes.yaml, which says what each key means."""

    told: list[str]
    recipe: dict[str, Any] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    lines: int = 1
    cure: dict[str, Any] = field(default_factory=dict)
    cure_without: list[str] = field(default_factory=list)


MISTAKES = {name: Mistake(**case) for name, case in read_yaml(Path(__file__).parent / "mistakes.yaml").items()}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    mistaken.lay_out(folder)
    return folder


@pytest.fixture(autouse=True)
def here(laid_out, monkeypatch):
    """On a machine without a GPU, a token or any optional package."""
    monkeypatch.chdir(laid_out)
    monkeypatch.setattr(machine, "is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr(machine, "is_installed", lambda package: False)
    monkeypatch.setattr(machine, "get_token", lambda: None)
    monkeypatch.setattr(machine, "get_available_reporting_integrations", list)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def checked(values: dict[str, Any], *args: str, processes: int | None = None) -> tuple[list[str], Look]:
    """Problems of a recipe, as `check` finds them, and what it saw."""
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    look = Look()
    with planned_processes(processes, here=processes is None):
        try:
            load_recipe(["--config", "recipe.yaml", *args], look)
        except ConfigError as error:
            return list(map(str, error.problems)), look
    return [], look


def changed(values: dict[str, Any], changes: dict[str, Any], without: list[str]) -> dict[str, Any]:
    return {key: value for key, value in (values | changes).items() if key not in without}


@pytest.mark.cases(45)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_with_a_cure_that_works(name):
    mistake = MISTAKES[name]
    recipe = changed(SOUND, mistake.recipe, mistake.without)
    problems, _ = checked(recipe)
    assert len(problems) == mistake.lines, problems
    assert not [problem for problem in problems if "\n" in problem or "Error" in problem]
    (sentence,) = [problem for problem in problems if all(words in problem for words in mistake.told)] or problems[:1]
    assert not [words for words in mistake.told if words not in sentence], sentence
    given = {*named(mistake.recipe), *mistake.recipe}
    for value in mistake.cure.values():
        assert not [part for part in named(value) if part not in given and part not in " ".join(problems)], problems
    if mistake.cure_without:
        assert re.search("remove|unset|leave out|write|did you mean", sentence.lower()), sentence
    cured, _ = checked(changed(recipe, mistake.cure, mistake.cure_without))
    assert cured == []


def named(value: Any) -> list[str]:
    """The words that a sentence must have said for its cure to be this value; a path is the user's own."""
    if isinstance(value, (list, dict)):
        values = value if isinstance(value, list) else [*value, *value.values()]
        return [part for item in values for part in named(item)]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return [] if "/" in text and "eval_" not in text else [text]


def test_a_sound_recipe_has_no_problems():
    assert len(MISTAKES) > 100
    problems, look = checked(SOUND)
    assert problems == look.notes == []


# What the table does not hold: several at once, other machines, what is no fault.


def test_mistakes_of_all_kinds_are_reported_at_once():
    problems, _ = checked(
        changed(
            SOUND,
            {
                "num_generations": 3,
                "learning_rate": "fast",
                "report_to": "wandb",
                "output_dir": "./a-file",
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
    starts = ["num_generations=3", "learning_rate='fast'", "report_to='wandb'", "output_dir='./a-file'"]
    starts += ["prompt_column='questoin'", "answer_column='anser'", "lora_target_modules: no module"]
    starts += ["dataset_test_split='test'", "reward_funcs[0]='acuracy'", "per_device_eval_batch_size=8"]
    assert [start for start in starts if sum(p.startswith(start) for p in problems) != 1] == []
    assert len(problems) == len(starts)


def refused_by_train(recipe: str) -> None:
    assert command("train", "--config", recipe) == 2


OF_A_GPU = {"use_vllm": True, "report_to": "wandb", "attn_implementation": "flash_attention_2"}


def test_check_only_notes_what_this_machine_lacks(capsys):
    here = {**SOUND, **OF_A_GPU, "use_cpu": False}  # without bf16 any machine will do
    assert [p.partition(":")[0].partition(" needs")[0] for p in checked(here)[0]] == [
        "report_to='wandb'",
        "use_vllm=True",
        "attn_implementation='flash_attention_2'",
    ]
    assert checked(here, processes=8)[0] == []
    assert checked({**here, "bf16": True})[0] == []
    Path("recipe.yaml").write_text(yaml.safe_dump({**here, "bf16": True}))
    assert command("check", "--config", "recipe.yaml") == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "Not on this machine",
        "bf16=True: this machine has no GPU",
        "pip install vllm",
        "pip install wandb",
    ):
        assert words in out
    refused_by_train("recipe.yaml")
    assert "bf16=True: this machine has no GPU" in capsys.readouterr().err


def test_a_list_of_one_module_and_an_unreachable_hub_are_no_mistakes():
    problems, look = checked({**SOUND, "use_peft": True, "lora_r": 2, "lora_target_modules": ["q_proj"]})
    assert problems == []
    assert look.policy.trained == 2 * 2 * (32 + 32)  # two layers of two matrices between 32 and 2
    problems, look = checked({**SOUND, "model_name_or_path": "owner/model", "dataset_name": "owner/data"})
    assert problems == []
    assert "owner/model" in look.policy.unknown or "connect" in look.policy.unknown


def test_train_looks_at_policy_and_data_before_it_loads_weights(capsys):
    Path("recipe.yaml").write_text(yaml.safe_dump({**SOUND, "model_name_or_path": "./bert", "prompt_column": "text"}))
    refused_by_train("recipe.yaml")
    assert capsys.readouterr().err.count("\n  - ") == 2
    Path("recipe.yaml").write_text(yaml.safe_dump({**SOUND, "prompt_column": "text", "answer_column": "label"}))
    refused_by_train("recipe.yaml")
    assert capsys.readouterr().err.startswith("2 problems in the configuration:\n  - prompt_column='text'")


def test_some_unreadable_references_are_counted_with_the_place_of_the_first():
    rows = [{"question": "?", "answer": None if i in (3, 5) else str(i)} for i in range(16)]
    mistaken.write(Path("some.jsonl"), rows)
    problems, look = checked({**SOUND, "dataset_name": "./some.jsonl"})
    assert problems == []
    (note,) = look.notes
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
    problems, look = checked({**SOUND, "dataset_name": "./long.jsonl", "max_completion_length": 512})
    assert problems == []
    (note,) = look.notes
    assert note.startswith("max_completion_length=512: the prompt of row 10")
    assert "Set max_prompt_length: 512" in note


def test_axes_that_are_not_the_papers_show_beside_formula_and_paper(capsys):
    Path("recipe.yaml").write_text(yaml.safe_dump(SOUND))
    axes = ["--loss_aggregation", "token-mean", "--advantage_estimator", "none"]
    assert command("check", "--config", "recipe.yaml", *axes) == 0
    out = " ".join(capsys.readouterr().out.split())
    but = "but for the advantage_estimator 'none' in place of 'group', loss_aggregation 'token-mean' in place of"
    assert but in out.partition("formula")[2].partition("paper")[0]
    assert "arXiv:2402.03300 (modified)" in out
    assert command("check", "--config", "recipe.yaml") == 0
    out = capsys.readouterr().out
    assert "but for the" not in out
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
