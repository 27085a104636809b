"""`grpo-ext eval`: avg@k, pass@k, maj@k with intervals, of a recipe's model or of several models side by side."""

import argparse
import dataclasses
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_ext.commands.arguments import parse_command_line
from grpo_ext.commands.runs import find_trained
from grpo_ext.commands.sample import sampler, with_model
from grpo_ext.commands.train import call, launch, wanted_launch
from grpo_ext.config.launch import check_announced, rank, write_exit_code
from grpo_ext.data.eval_sets import EvalSet, problems_of
from grpo_ext.data.rows import Row
from grpo_ext.environments.composition import any_pays
from grpo_ext.errors import FAILURES, NOT_FINISHED, ConfigError, RunInterrupted, ServerLost
from grpo_ext.evaluation.evaluate import evaluate
from grpo_ext.evaluation.results import EVALUATION, Result, differences, result, table
from grpo_ext.recipe.loading import load_tokenizer, rows_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.tables import show
from grpo_ext.terminal import safe_output
from grpo_ext.train import leave_process_group
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer
from grpo_ext.trainer.signals import SIGNALS

SAMPLES = 4
"""Completions per prompt of the test split, for a recipe without `eval_sets`."""
_SAMPLING = ("samples", "limit", "temperature")
MODULE = "grpo_ext.commands.eval"


def run(options: argparse.Namespace) -> int:
    """Evaluate each model, by accelerate if asked for, and show the results side by side.

    Several models are evaluated in one process each, because an engine does not free its memory.
    """
    models: list[str | None] = options.model or [None]
    wanted = wanted_launch(options)
    if len(models) == 1 and wanted is None:
        _evaluate_one(options)
        return 0
    recipe = load_recipe(with_model(options.keys, models[0]))  # all mistakes, before any process starts
    for other in filter(None, models[1:]):
        find_trained(other)
    sets = _sets(recipe, options)
    for model in models:
        arguments = list(_arguments(options, model))
        code = (
            call([sys.executable, "-m", MODULE, *arguments], os.environ)
            if wanted is None
            else launch(wanted, arguments, MODULE)
        )
        if code:
            return code
    for chosen in sets if len(models) > 1 else ():
        results = [Result.read(_file(recipe, options, chosen, model)) for model in models]
        show(table(results))
        print(*differences(results), "", sep="\n")
    return 0


def _arguments(options: argparse.Namespace, model: str | None) -> Iterator[str]:
    """Yield the command line of one model's evaluation."""
    yield from options.keys
    for name in ("output", *_SAMPLING):
        if (value := getattr(options, name)) is not None:
            yield from (f"--{name}", str(value))
    if model is not None:
        yield from ("--model", model)
    if len(options.model or ()) > 1:
        yield "--one_of_several"


def _sets(recipe: Recipe, options: argparse.Namespace) -> list[EvalSet]:
    """Return the recipe's sets, or its test split as one, with the sampling of the command line."""
    changes = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    temperature, plays = recipe.training.temperature, any_pays(recipe.environments)
    test_split = EvalSet("test", rewards=recipe.rewards, samples=SAMPLES, temperature=temperature, plays=plays)
    sets = [dataclasses.replace(chosen, **changes) for chosen in recipe.eval_sets or [test_split]]
    if problems := [
        dataclasses.replace(problem, field=f"{chosen.name}.{problem.field}")
        for chosen in sets
        for problem in problems_of(chosen)
    ]:
        raise ConfigError(problems)
    return sets


@contextmanager
def _left_on_a_signal() -> Iterator[None]:
    """Let any signal end an evaluation as Ctrl-C does.

    Raises:
        RunInterrupted: one has come; the same command continues after the chunks of prompts that are finished.
    """
    ours = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        line = "A signal ended the evaluation. Run the same command to continue it: finished prompts are kept."
        if rank() == 0:
            print(line, file=sys.stderr)
        write_exit_code(NOT_FINISHED)
        raise RunInterrupted(line) from None
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@_left_on_a_signal()
def _evaluate_one(options: argparse.Namespace) -> None:
    """Evaluate one model, by all processes of this launch."""
    model = options.model[0] if options.model else None
    recipe = load_recipe(with_model(options.keys, model))
    sets = _sets(recipe, options)
    tokenizer = load_tokenizer(recipe)
    rows = [rows_of(chosen, recipe, tokenizer) for chosen in sets]  # a split may be missing: before weights are loaded
    with tempfile.TemporaryDirectory() as folder:
        c, most = recipe.training, max(chosen.samples for chosen in sets)
        batch = max(c.per_device_eval_batch_size, c.per_device_train_batch_size)
        trainer = sampler(recipe, most, folder, batch)
    try:
        for chosen, its_rows in zip(sets, rows, strict=True):
            file = _file(recipe, options, chosen, model)
            evaluation = _evaluate_set(trainer, chosen, its_rows, recipe, model, file)
            if trainer.accelerator.is_main_process and not options.one_of_several:
                show(table([evaluation]))
    finally:
        trainer.close_rewards()


def _evaluate_set(
    trainer: GRPOExtTrainer, chosen: EvalSet, rows: list[Row], recipe: Recipe, model: str | None, file: Path
) -> Result:
    path = str(recipe.model.model_name_or_path)
    identity = {"model": path, "weights": _weights(path), "set": chosen}
    kept = file.with_name(f"{file.stem}_samples.jsonl")
    samples = evaluate(trainer, chosen, rows, kept=kept, identity=identity, workers=recipe.script.reward_workers)
    evaluation = result(chosen, samples, model=model or path)
    if trainer.accelerator.is_main_process:
        evaluation.write(file)
        print(f"{file}: figures; {kept.name}: samples.")
    return evaluation


def _weights(model: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of a local model's weight files, which identify its state."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _file(recipe: Recipe, options: argparse.Namespace, chosen: EvalSet, model: str | None) -> Path:
    folder = options.output or Path(recipe.training.output_dir or ".") / EVALUATION
    name = re.sub(r"[^\w.-]+", "_", str(model or recipe.model.model_name_or_path)).strip("_.")
    return folder / chosen.name / f"{name[-100:]}.json"


@safe_output()
def _main(argv: Sequence[str]) -> int:
    """Evaluate in one process of a launch; FSDP needs the weights in every process, as each loads them."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        check_announced()
        _evaluate_one(parse_command_line(["eval", *argv]))
    except (*FAILURES, ServerLost) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        leave_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
