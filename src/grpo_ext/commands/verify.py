"""`grpo-ext verify`: compare this machine's gradients under every batch split with a computation row by row."""

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import get_peft_config

from grpo_ext.commands.launching import accelerate_command, wanted_launch
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.launch import ASKED, planned_processes
from grpo_ext.config.settings import values_for
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.loading import base_path
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.parts import Recipe
from grpo_ext.tables import Table, show
from grpo_ext.train import leave_process_group
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer
from grpo_ext.trainer.verification.overlapped import FixedCompletions, Overlapped, largest_difference, save_model
from grpo_ext.trainer.verification.row_by_row import RowByRow, Terms, differences
from grpo_ext.trainer.verification.small import VOCABULARY, Rows, load_small, save_small, tokenizer
from grpo_ext.trainer.verification.watched import Watched

_FOLDER = "GRPO_EXT_VERIFY_FOLDER"
"""Environment variable with the folder of the plan and of the recorded steps."""
_TOLERANCES = {"float32": 2e-4, "bfloat16": 0.1}
"""Allowed relative difference of a gradient; float32 has room for the rounding of an update with rate `RATE`."""
MAX_ROWS = 64
LEFT_OUT: dict[str, Any] = values_for("verify_without")
"""Settings switched off, because the computation row by row lacks them."""
FIXED: dict[str, Any] = values_for("verify")
RATE: float = FIXED["learning_rate"]


@dataclass(frozen=True)
class BatchSplit:
    """A division of the rows of an optimizer step."""

    name: str
    processes: int
    rows: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.rows} x {self.accumulation}"

    @property
    def file(self) -> str:
        """Name of the file of recorded steps."""
        return f"{self.rows}x{self.accumulation}.pt"


def splits(processes: int, rows: int, accumulation: int, group: int) -> Iterator[BatchSplit]:
    """Yield the recipe's split, made small, and others of the same rows."""
    accumulation = max(1, min(accumulation, MAX_ROWS // (processes * rows) or 1))
    rows = max(1, min(rows, MAX_ROWS // processes))
    while processes * rows * accumulation % group:
        accumulation += 1
    each = rows * accumulation
    smallest = next(size for size in range(1, each + 1) if each % size == 0)
    found = {(rows, accumulation): "the recipe's"}
    found.setdefault((each, 1), "one micro-batch")
    halves = next((size for size in range(each // 2, 0, -1) if each % size == 0), each)
    found.setdefault((halves, each // halves), "fewer, larger")
    found.setdefault((smallest, each), "row by row")
    return (BatchSplit(name, processes, *sizes) for sizes, name in found.items())


def run(options: argparse.Namespace) -> int:
    """Print the table; return 1 if a gradient differs, or a resumed run, or one that overlaps."""
    processes, line = launcher(options)
    with planned_processes(processes):
        recipe = load_recipe(options.keys)
    c, half = recipe.training, options.precision == "bfloat16"
    sizes = (c.per_device_train_batch_size, c.gradient_accumulation_steps, int(c.num_generations or 1))
    chosen = list(splits(processes, *sizes))
    with tempfile.TemporaryDirectory(prefix="grpo-ext-verify-") as name:
        folder = Path(name)
        plan = {"keys": options.keys, "half": half, "splits": [dataclasses.asdict(split) for split in chosen]}
        (folder / "plan.json").write_text(json.dumps(plan))
        save_small(base_path(recipe), folder / "model", trust_remote_code=c.trust_remote_code)
        if c.overlap and not half:
            save_model(folder / "overlap")
        if len(line) > 1:
            line += ["--mixed_precision", "bf16" if half else "no"]
        _launch(line, folder)
        with planned_processes(processes):
            found = {split: _difference(recipe, split, half, folder) for split in chosen}
        whole, resumed = (torch.load(folder / f"{name}.pt") for name in ("whole", "resumed"))
        overlap = Overlapped.read(folder)
    return _print(recipe, options.precision, found, largest_difference(whole, resumed), overlap)


def launcher(options: argparse.Namespace) -> tuple[int, list[str]]:
    """Return the processes that `grpo-ext train` would start, and its launcher: accelerate, or plain Python."""
    wanted = wanted_launch(options)
    if wanted is None:
        return 1, [sys.executable]
    return wanted.planned or 1, accelerate_command(wanted)


def _print(
    recipe: Recipe, precision: str, found: Mapping[BatchSplit, float], off: float, overlap: Overlapped | None
) -> int:
    """Print the comparison and return the exit code."""
    allowed = _TOLERANCES[precision]
    wrong = [off > 0, overlap is not None and overlap.differs, *(worst > allowed for worst in found.values())]
    heads = ("split", "processes x rows x accumulation", "relative difference of the gradient", "verdict")
    table = Table(*heads, box=None)
    for split, worst in found.items():
        table.add_row(split.name, str(split), f"{worst:.1e}", "equal" if worst <= allowed else "DIFFERS")
    table.add_row("resumed", "after the first step", f"{off:.1e} (weights)", "DIFFERS" if off else "equal")
    if overlap is not None:
        table.add_row("overlap: step", *overlap.columns())
    show(recipe.training.objective.describe())
    show(f"in {precision}, compared with one row at a time; allowed: {allowed:g}")
    show(table)
    left_out = sorted(name for name, value in LEFT_OUT.items() if getattr(recipe.training, name) != value)
    if left_out:
        show(f"left out: {', '.join(left_out)}")
    return int(any(wrong))


def _training(recipe: Recipe, split: BatchSplit, half: bool, folder: Path, **changes: Any) -> GRPOExtConfig:
    """Return the recipe's settings with another split and plain SGD, without those of `LEFT_OUT`."""
    c = recipe.training
    windows = max(1, int(c.steps_per_generation or 1) // c.gradient_accumulation_steps)
    own = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": split.rows,
        "gradient_accumulation_steps": split.accumulation,
        "steps_per_generation": windows * split.accumulation,
        "max_steps": min(8, 2 * windows * c.num_iterations),
        "max_completion_length": max(8, c.max_completion_length or 8),
        "reward_weights": [spec.weight for spec in recipe.rewards],
        "bf16": half,
        "fp16": False,
        "model_init_kwargs": {"dtype": "float32"},
    }
    return dataclasses.replace(c, **LEFT_OUT | FIXED | own | changes)


def _difference(recipe: Recipe, split: BatchSplit, half: bool, folder: Path) -> float:
    """Return the largest relative difference of a step's gradient from that of one row at a time."""
    training = _training(recipe, split, half, folder)
    recorded = torch.load(folder / split.file)
    weights = tuple(training.reward_weights or ())
    terms = Terms(training.temperature, training.entropy_coef, training.mask_truncated_completions, weights)
    model = load_small(folder / "model", torch.float32, get_peft_config(recipe.model))
    gradients = RowByRow(model, training.objective, _rows(recipe), terms, recorded).gradients()
    return max(differences(recorded, gradients, RATE))


def _rows(recipe: Recipe) -> Rows:
    return Rows(VOCABULARY, int(recipe.training.num_generations or 1), rewards=len(recipe.rewards))


def _launch(command: list[str], folder: Path) -> None:
    """Run `main` of this module by the user's launcher."""
    environment = {k: v for k, v in os.environ.items() if k != ASKED} | {_FOLDER: str(folder)}
    command = [*command, "-m", "grpo_ext.commands.verify"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = f"the launch ended with exit code {done.returncode}"
        raise ConfigError([Problem("verify", ABSENT, reason, f"Its last output:\n{done.stderr[-4000:]}")])


def main() -> None:
    """Train every split in one process of the launch, then a run that is interrupted and resumed."""
    warnings.filterwarnings("ignore")
    logging.getLogger("grpo_ext").setLevel("ERROR")
    folder = Path(os.environ[_FOLDER])
    plan = json.loads((folder / "plan.json").read_text())
    recipe, chosen = load_recipe(plan["keys"]), [BatchSplit(**split) for split in plan["splits"]]
    for split in chosen:
        trainer = _trainer(recipe, _training(recipe, split, plan["half"], folder), folder)
        trainer.train()
        trainer.save(folder / split.file)
    _interrupted(recipe, chosen[0], plan["half"], folder)
    if recipe.training.overlap and not plan["half"]:
        _overlapped(recipe, chosen[0], folder)
    leave_process_group()


class WatchedTrainer(Watched, GRPOExtTrainer):  # type: ignore[misc]
    """The trainer, which records the inputs and weights of each step."""


class FixedTrainer(FixedCompletions, GRPOExtTrainer):
    """The trainer, with fixed completions in place of a sampler's."""


def _trainer(recipe: Recipe, training: GRPOExtConfig, folder: Path) -> WatchedTrainer:
    return WatchedTrainer(**_arguments(recipe, training, folder / "model"), rollout_func=_rows(recipe).rollout)


def _arguments(recipe: Recipe, training: GRPOExtConfig, model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "reward_funcs": _rows(recipe).reward_functions(),
        "args": training,
        "train_dataset": Dataset.from_list([{"prompt": f"w{3 + i % 40}"} for i in range(16 * MAX_ROWS)]),
        "processing_class": tokenizer(),
        "peft_config": get_peft_config(recipe.model),
    }


def _interrupted(recipe: Recipe, split: BatchSplit, half: bool, folder: Path) -> None:
    """Train a run in windows of two steps, and again from its first checkpoint."""
    changes = {
        "steps_per_generation": 2 * split.accumulation,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": None,
        "save_only_model": False,
        "output_dir": str(folder / "interrupted"),
    }
    for name, checkpoint in {"whole": None, "resumed": str(folder / "interrupted" / "checkpoint-1")}.items():
        trainer = _trainer(recipe, _training(recipe, split, half, folder, **changes), folder)
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.accelerator.is_main_process:
            torch.save(trainer.weights[-1], folder / f"{name}.pt")


def _overlapped(recipe: Recipe, split: BatchSplit, folder: Path) -> None:
    """Train a run with and without overlap, and compare their weights."""

    def trainer(overlap: str | None, **changes: Any) -> FixedTrainer:
        training = _training(recipe, split, False, folder, **changes, overlap=overlap)
        arguments = _arguments(recipe, training, folder / "overlap")
        if (adapter := arguments["peft_config"]) is not None:
            adapter.target_modules = "all-linear"  # the recipe's names are those of its own model
        return FixedTrainer(**arguments)

    Overlapped.of(recipe.training, trainer).write(folder)


if __name__ == "__main__":
    main()
