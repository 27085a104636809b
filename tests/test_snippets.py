"""Examples in the documents work: Python runs, recipes load, commands have the options and keys that they show.

A block of another tool's is marked by a further word: "yaml elsewhere". Lines that train are not run here, but where a
Python block does.
"""

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from grpo_ext.commands.arguments import COMMANDS, OPTIONS
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.losses import losses
from grpo_ext.recipe.files import packaged_recipes, recipes_folder
from grpo_ext.recipe.parsing import all_keys, load_recipe
from grpo_ext.rewards.protocol import rewards
from support.extras import need

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [*sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]


def blocks(language: str) -> list:
    """Those of one language, each under the name of its document and its line."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for block in re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S):
            place = f"{path.relative_to(ROOT)}:{text[: block.start()].count(chr(10)) + 1}"
            found.append(pytest.param(block[1], id=place))
    return found


# Python.


@pytest.fixture
def registries():
    """As they were: what a snippet registers is no part of the package."""
    known = [(registry, dict(registry._entries), dict(registry._traits)) for registry in (losses, estimators, rewards)]
    yield
    for registry, entries, traits in known:
        registry._entries, registry._traits = entries, traits


PYTHON = [block for block in blocks("python") if not block.id.startswith("CONTRIBUTING")]  # test_package's


@pytest.mark.slow
@pytest.mark.parametrize("program", PYTHON)
def test_python_examples_run(program, registries, quickstart_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo_ext.trainer.setup.ensure_once", lambda _: quickstart_model)
    exec(compile(program, "snippet", "exec"), {"__name__": "__main__"})
    assert (tmp_path / "outputs").is_dir() == ("train()" in program)


# Recipes.

BASE = {
    "model_name_or_path": "quickstart",
    "dataset_name": "quickstart/addition",
    "reward_funcs": ["accuracy"],
    "report_to": "none",
}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_recipes_are_sound(text, tmp_path, monkeypatch):
    if "reasoning_gym/" in text:
        need("tasks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_PROJECT", "")  # a recipe sets it; this puts it back
    (tmp_path / "data").mkdir()
    for name in ("train", "sft"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n')
    shutil.copy(ROOT / "examples" / "project" / "data" / "questions.csv", tmp_path / "data")
    (tmp_path / "mine.py").write_text((ROOT / "examples" / "project" / "rewards.py").read_text())
    shown = yaml.safe_load(text)
    whole = "model_name_or_path" in shown and {"dataset_name", "datasets"} & set(shown)
    (tmp_path / "shown.yaml").write_text(text if whole else yaml.safe_dump({**BASE, **shown}))
    recipe = load_recipe(["--config", "shown.yaml", "--use_cpu", "true", "--bf16", "false"])
    assert recipe.rewards or recipe.environments
    assert recipe.training.objective.row.paper


# Commands.


def commands() -> list:
    """Lines of shell blocks, and what stands as inline code, that call grpo-ext or make."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        shell = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        lines = [*shell.splitlines(), *(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))]
        found += [
            (path.name, line) for line in lines if re.search(r"\bgrpo-ext [a-z-]|\bgrpo_ext\.train|^make ", line)
        ]
    return found


def problems(line: str) -> list[str]:
    """What is wrong with a command that a document shows."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split())
        return [word for word in words[1:] if "=" not in word and word not in targets]
    if "grpo_ext.train" in words:
        name, rest = "train", words[words.index("grpo_ext.train") + 1 :]
    elif "grpo-ext" in words and len(words) > words.index("grpo-ext") + 1:
        name, *rest = words[words.index("grpo-ext") + 1 :]
    else:
        return []
    if name == "--version":
        return []
    if name not in COMMANDS and name != "COMMAND":
        return [f"no command {name}"]
    asked = COMMANDS.get(name)
    rest = rest[: rest.index("--")] if "--" in rest else rest
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    known = {"--help", "-h", "--key", *(n for option in OPTIONS.get(name, ()) for n in option.names)}
    known |= {f"--{key}" for key in all_keys()} if asked is None or asked.keys else set()
    found = [f"no option {option}" for option in given if option not in known]
    configs = [value for option, value in pairwise(rest) if option == "--config"]
    named = [value for value in configs if "/" in value and not value.endswith(".yaml")]
    launched = [value for option, value in pairwise(rest) if option == "--accelerate_config"]
    files = {path.stem for path in (recipes_folder() / "accelerate_configs").glob("*.yaml")}
    found += [f"no recipe {value}" for value in named if value not in packaged_recipes()]
    return found + [f"no launch {value}" for value in launched if value.islower() and value not in files]


def test_commands_exist_with_their_options():
    shown = commands()
    assert len(shown) > 40
    wrong = {(document, line): found for document, line in shown if (found := problems(line))}
    assert wrong == {}


def test_wrong_commands_are_found():
    wrong = {
        "grpo-ext trian --config recipe.yaml": "no command trian",
        "grpo-ext train --config recipe.yaml --learning_rat 1  # faster": "no option --learning_rat",
        "grpo-ext score --config recipe.yaml --flie x": "no option --flie",
        "grpo-ext train --config quickstart/gropo": "no recipe quickstart/gropo",
        "accelerate launch -m grpo_ext.train --config x.yaml --betta 1": "no option --betta",
        "grpo-ext train --config x.yaml --accelerate_config zero9": "no launch zero9",
        "make tset": "tset",
    }
    assert {line: problems(line) for line in wrong} == {line: [problem] for line, problem in wrong.items()}
