"""`grpo-ext eval`: avg@k, pass@k, maj@k with intervals, of a recipe's model or of others, side by side."""

import argparse
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_ext.commands.console import take_option, take_processes
from grpo_ext.commands.runs import find
from grpo_ext.commands.sample import model_keys, sampler
from grpo_ext.commands.train import call, default_config, launch
from grpo_ext.config.launch import check_announced
from grpo_ext.data.eval_sets import EvalSet, problems_of
from grpo_ext.environments.composition import any_pays
from grpo_ext.errors import ConfigError, DataError, NonFiniteError, RewardError, ServerLost
from grpo_ext.evaluation.evaluate import evaluate
from grpo_ext.evaluation.results import FOLDER, Result, difference, result, table
from grpo_ext.recipe.launching import accelerate_config, launch_of
from grpo_ext.recipe.loading import rows_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.train import leave_process_group

SAMPLES = 4
"""Of the set that is evaluated where a recipe has no `eval_sets`."""


def run(argv: list[str]) -> int:
    """Evaluate each model, by accelerate where it is asked for, and show them side by side; 2 when something is wrong.

    Several models are evaluated by a process each: an engine does not give its memory back.
    """
    try:
        name, processes, said = take_option(argv, "--accelerate_config"), take_processes(argv), launch_of(argv)
        options, keys = _options(argv)
        models = options.model or [None]
        launched = name is not None or processes is not None or said
        if len(models) == 1 and not launched:
            return _evaluate_one(argv)
        recipe = _sound(options, keys, models)
        config = accelerate_config(name) if name else said.config or default_config(processes or 1, argv)
        for model in models:
            mine = [*_without_models(argv), *([] if model is None else ["--model", model])]
            module = "grpo_ext.commands.eval"
            if launched:
                code = launch(config, processes or said.processes, mine, said.options, module=module)
            else:
                code = call([sys.executable, "-m", module, *mine], os.environ)
            if code:
                return code
        if len(models) > 1:
            _show(recipe, options, models)
    except (ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="grpo-ext eval", allow_abbrev=False, add_help=False)
    parser.add_argument("--model", action="append")
    parser.add_argument("--output", type=Path)
    for name, kind in (("samples", int), ("limit", int), ("temperature", float)):
        parser.add_argument(f"--{name}", type=kind)
    return parser.parse_known_args(argv)


def _without_models(argv: Sequence[str]) -> list[str]:
    words = list(argv)
    while take_option(words, "--model") is not None:
        pass
    return words


def _sound(options: argparse.Namespace, keys: Sequence[str], models: Sequence[str | None]) -> Recipe:
    """The recipe, all models and sets being such that they can be evaluated."""
    recipe = load_recipe([*keys, *model_keys(models[0])])
    for model in models[1:]:
        find(model)  # type: ignore[arg-type]
    _sets(recipe, options)
    return recipe


def _sets(recipe: Recipe, options: argparse.Namespace) -> list[EvalSet]:
    """The recipe's sets, or its test split as one, with what the command line says of their sampling."""
    changes = {
        name: value for name in ("samples", "limit", "temperature") if (value := getattr(options, name)) is not None
    }
    plays = any_pays(recipe.environments)
    temperature = recipe.training.temperature
    of_training = EvalSet("test", rewards=recipe.rewards, samples=SAMPLES, temperature=temperature, plays=plays)
    sets = [dataclasses.replace(chosen, **changes) for chosen in recipe.eval_sets or [of_training]]
    if found := [
        dataclasses.replace(problem, field=f"{chosen.name}.{problem.field}")
        for chosen in sets
        for problem in problems_of(chosen)
    ]:
        raise ConfigError(found)
    return sets


def _evaluate_one(argv: Sequence[str]) -> int:
    """One model, by all processes of this launch."""
    options, keys = _options(argv)
    model = options.model[0] if options.model else None
    try:
        recipe = load_recipe([*keys, *model_keys(model)])
        sets = _sets(recipe, options)
        with tempfile.TemporaryDirectory() as folder:
            c, most = recipe.training, max(chosen.samples for chosen in sets)
            rows = max(c.per_device_eval_batch_size, c.per_device_train_batch_size)
            trainer = sampler(recipe, most, folder, rows)
        try:
            for chosen in sets:
                _evaluate_set(trainer, chosen, recipe, model, _file(recipe, options, chosen, model))
        finally:
            trainer.close_rewards()
    except (ConfigError, DataError, NonFiniteError, RewardError, ServerLost) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _evaluate_set(trainer: Any, chosen: EvalSet, recipe: Recipe, model: str | None, file: Path) -> None:
    path = str(recipe.model.model_name_or_path)
    identity = {"model": path, "weights": _weights(path), "set": chosen}
    kept = file.with_name(f"{file.stem}_samples.jsonl")
    rows = rows_of(chosen, recipe, trainer.processing_class)
    samples = evaluate(trainer, chosen, rows, kept=kept, identity=identity, workers=recipe.script.reward_workers)
    found = result(chosen, samples, model=model or path)
    if trainer.accelerator.is_main_process:
        found.write(file)
        Console().print(table([found]))
        print(f"{file}: figures; {kept.name}: samples.")


def _weights(model: str) -> list[tuple[str, int, int]]:
    """What tells one state of a model's folder from another; nothing of a hub id, which has revisions."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _file(recipe: Recipe, options: argparse.Namespace, chosen: EvalSet, model: str | None) -> Path:
    folder = options.output or Path(recipe.training.output_dir or ".") / FOLDER
    name = re.sub(r"[^\w.-]+", "_", str(model or recipe.model.model_name_or_path)).strip("_.")
    return folder / chosen.name / f"{name[-100:]}.json"


def _show(recipe: Recipe, options: argparse.Namespace, models: Sequence[str | None]) -> None:
    for chosen in _sets(recipe, options):
        results = [Result.read(_file(recipe, options, chosen, model)) for model in models]
        Console().print(table(results))
        if len(results) == 2:
            print(f"{difference(*results)}\n")


def _launched(argv: Sequence[str]) -> int:
    """One process of those that were started; FSDP never gives it the weights that only the first has loaded."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        check_announced()
        return _evaluate_one(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        leave_process_group()


if __name__ == "__main__":
    sys.exit(_launched(sys.argv[1:]))
