"""`grpo-ext verify`: on this machine and by this launcher, is the gradient the paper's under every split?"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.commands.console import take_option, take_processes
from grpo_ext.errors import ConfigError, DataError

FOLDER = "GRPO_EXT_VERIFY_FOLDER"
"""Environment variable by which the processes are told where the plan is, and where to leave what was watched."""
TOLERANCES = {"float32": 2e-4, "bfloat16": 0.1, "float64": 1e-9}
"""Relative difference of a gradient; float32's has room for the rounding of an update by learning rate `RATE`."""
MOST_ROWS = 64
RATE = 0.05
LEFT_OUT: dict[str, Any] = {
    "use_vllm": False,
    "vllm_mode": "colocate",
    "dynamic_sampling": None,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_adaptive_entropy": False,
    "sync_ref_model": False,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "neftune_noise_alpha": None,
    "push_to_hub": False,
}
"""Settings that are set aside: what they do to a gradient is not in the computation row by row."""
FIXED: dict[str, Any] = {
    "optim": "sgd",
    "optim_args": None,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "report_to": "none",
    "logging_strategy": "no",
    "log_completions": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "generation_batch_size": None,
    "resume_from_checkpoint": None,
}


@dataclass(frozen=True)
class Split:
    """How the rows of an optimizer step are divided."""

    name: str
    processes: int
    rows: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.rows} x {self.accumulation}"


def splits(processes: int, rows: int, accumulation: int, group: int) -> Iterator[Split]:
    """The recipe's own, made small, and others of the same rows."""
    accumulation = max(1, min(accumulation, MOST_ROWS // (processes * rows) or 1))
    rows = max(1, min(rows, MOST_ROWS // processes))
    while processes * rows * accumulation % group:
        accumulation += 1
    each = rows * accumulation
    smallest = next(size for size in range(1, each + 1) if each % size == 0)
    found = {(rows, accumulation): "the recipe's"}
    found.setdefault((each, 1), "one micro-batch")
    halves = next((size for size in range(each // 2, 0, -1) if each % size == 0), each)
    found.setdefault((halves, each // halves), "fewer, larger")
    found.setdefault((smallest, each), "row by row")
    return (Split(name, processes, *sizes) for sizes, name in found.items())


def run(argv: list[str]) -> int:
    """Print the tables; 1 when a gradient, or a resumed run, is off, 2 when the recipe has problems."""
    try:
        name, processes = take_option(argv, "--accelerate_config"), take_processes(argv)
        precision = take_option(argv, "--precision") or "float32"
        if precision not in ("float32", "bfloat16"):
            raise ConfigError([f"--precision {precision}: not one that is verified. Give float32 or bfloat16."])
        return _verify(argv, name, processes, precision)
    except (ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        return 2


def _verify(argv: list[str], name: str | None, processes: int | None, precision: str) -> int:
    from grpo_ext.config.launch import planned_processes
    from grpo_ext.recipe.parsing import load_recipe

    several, command = launcher(argv, name, processes)
    with planned_processes(several):
        recipe = load_recipe(argv)
    with tempfile.TemporaryDirectory(prefix="grpo-ext-verify-") as folder:
        plan = Plan.of(recipe, argv, several, precision)
        plan.write(Path(folder))
        plan.build(recipe, Path(folder))
        if len(command) > 1:
            command += ["--mixed_precision", "bf16" if precision == "bfloat16" else "no"]
        _launch(command, Path(folder))
        return plan.judge(recipe, Path(folder))


def launcher(argv: list[str], name: str | None, processes: int | None) -> tuple[int, list[str]]:
    """How many processes `grpo-ext train` would start, and by what command: accelerate's, or Python alone."""
    from grpo_ext.commands.train import accelerate_command, default_config
    from grpo_ext.recipe.files import read_yaml
    from grpo_ext.recipe.launching import accelerate_config, launch_of

    said = launch_of(argv)
    processes = processes or said.processes
    config = accelerate_config(name) if name else said.config or default_config(processes or 1, argv)
    several = processes or (int(read_yaml(config).get("num_processes", 1)) if config else 1)
    if name is None and processes is None and not said:
        return several, [sys.executable]
    return several, [*accelerate_command(config, processes), *said.options]


@dataclass(frozen=True)
class Plan:
    """What the processes are to do."""

    argv: list[str]
    precision: str
    splits: list[Split]

    @classmethod
    def of(cls, recipe: Any, argv: list[str], processes: int, precision: str) -> "Plan":
        """For a recipe, in `processes`."""
        c = recipe.training
        found = splits(processes, c.per_device_train_batch_size, c.gradient_accumulation_steps, c.num_generations)
        return cls(list(argv), precision, list(found))

    def write(self, folder: Path) -> None:
        """For the processes."""
        (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """What `write` wrote."""
        saved = json.loads((folder / "plan.json").read_text())
        return cls(saved["argv"], saved["precision"], [Split(**s) for s in saved["splits"]])

    def build(self, recipe: Any, folder: Path) -> None:
        """The small model."""
        from grpo_ext.recipe.loading import base_path
        from grpo_ext.trainer.verification.small import save_small

        save_small(base_path(recipe), folder / "model", trust_remote_code=recipe.training.trust_remote_code)

    def training(self, recipe: Any, split: Split, folder: Path, **changes: Any) -> Any:
        """The recipe's settings with another split, plain SGD, and nothing of `LEFT_OUT`."""
        c = recipe.training
        windows = max(1, int(c.steps_per_generation or 1) // c.gradient_accumulation_steps)
        steps = min(8, 2 * windows * c.num_iterations)
        own = {
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": split.rows,
            "gradient_accumulation_steps": split.accumulation,
            "steps_per_generation": windows * split.accumulation,
            "max_steps": steps,
            "max_completion_length": max(8, c.max_completion_length or 8),
            "reward_weights": [spec.weight for spec in recipe.rewards],
            "bf16": self.precision == "bfloat16",
            "fp16": False,
            "model_init_kwargs": {"dtype": "float32"},
        }
        return dataclasses.replace(c, **LEFT_OUT | FIXED | own | changes)

    def rows(self, recipe: Any) -> Any:
        """The fixed rows of a recipe."""
        from grpo_ext.trainer.verification.rows import Rows
        from grpo_ext.trainer.verification.small import VOCABULARY

        return Rows(VOCABULARY, recipe.training.num_generations, rewards=len(recipe.rewards))

    def judge(self, recipe: Any, folder: Path) -> int:
        """Compare what was watched with the computation row by row, and say it."""
        from grpo_ext.config.launch import planned_processes

        allowed = TOLERANCES[self.precision]
        lines: list[tuple[str, ...]] = []
        sound = True
        with planned_processes(self.splits[0].processes):
            for split in self.splits:
                worst = self._difference(recipe, split, folder)
                sound = sound and worst <= allowed
                lines.append((split.name, str(split), f"{worst:.1e}", _verdict(worst, allowed)))
        resumed = _resumed(folder)
        sound = sound and resumed <= 0
        _print(recipe, self, lines, (f"{resumed:.1e}", _verdict(resumed, 0.0)))
        return 0 if sound else 1

    def _difference(self, recipe: Any, split: Split, folder: Path) -> float:
        import torch
        from trl import get_peft_config

        from grpo_ext.trainer.verification.row_by_row import RowByRow, Terms, differences
        from grpo_ext.trainer.verification.small import load_small

        training = self.training(recipe, split, folder)
        watched = torch.load(folder / f"{split.rows}x{split.accumulation}.pt")
        terms = Terms(
            training.temperature,
            training.entropy_coef,
            training.mask_truncated_completions,
            tuple(training.reward_weights),
        )
        model = load_small(folder / "model", torch.float32, get_peft_config(recipe.model))
        gradients = RowByRow(model, training.objective, self.rows(recipe), terms, watched).gradients()
        return max(differences(watched, gradients, RATE))


def _verdict(found: float, allowed: float) -> str:
    return "equal" if found <= allowed else "DIFFERS"


def _resumed(folder: Path) -> float:
    """How far the weights of the interrupted run are off those of the uninterrupted one."""
    import torch

    whole, resumed = (torch.load(folder / f"{name}.pt") for name in ("whole", "resumed"))
    return max((whole[name].double() - resumed[name].double()).abs().max().item() for name in whole)


def _launch(command: list[str], folder: Path) -> None:
    """Run this module's `main` by the user's launcher."""
    from grpo_ext.config.launch import ASKED

    environment = {k: v for k, v in os.environ.items() if k != ASKED} | {FOLDER: str(folder)}
    done = subprocess.run(
        [*command, "-m", "grpo_ext.commands.verify"], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise ConfigError([f"the launch ended with exit code {done.returncode}:\n{done.stderr[-4000:]}"])


def _print(recipe: Any, plan: Plan, lines: list[tuple[str, ...]], resumed: tuple[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "split", "processes x rows x accumulation", "relative difference of the gradient", "verdict", box=None
    )
    for line in lines:
        table.add_row(*line)
    table.add_row("resumed", "after the first step", f"{resumed[0]} (of weights)", resumed[1])
    console.print(recipe.training.objective.describe(), markup=False)
    console.print(f"in {plan.precision}, beside one row at a time; allowed: {TOLERANCES[plan.precision]:g}")
    console.print(table)
    aside = [name for name, value in LEFT_OUT.items() if getattr(recipe.training, name) != value]
    if aside:
        console.print(f"set aside: {', '.join(sorted(aside))}")


def main() -> None:
    """In each process: train every split, then a run that is interrupted and resumed."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    from grpo_ext.recipe.parsing import load_recipe
    from grpo_ext.train import leave_process_group

    logging.getLogger("grpo_ext").setLevel("ERROR")
    folder = Path(os.environ[FOLDER])
    plan = Plan.read(folder)
    recipe = load_recipe(plan.argv)
    for split in plan.splits:
        trainer = _trainer(plan, recipe, plan.training(recipe, split, folder), folder)
        trainer.train()
        trainer.save(folder / f"{split.rows}x{split.accumulation}.pt")
    _interrupted(plan, recipe, folder)
    leave_process_group()


def _trainer(plan: Plan, recipe: Any, training: Any, folder: Path) -> Any:
    from datasets import Dataset
    from trl import get_peft_config

    from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer
    from grpo_ext.trainer.verification.small import tokenizer
    from grpo_ext.trainer.verification.watched import Watched

    class WatchedTrainer(Watched, GRPOExtTrainer):
        pass

    rows = plan.rows(recipe)
    return WatchedTrainer(
        str(folder / "model"),
        rows.reward_functions(),
        training,
        Dataset.from_list([{"prompt": f"w{3 + i % 40}"} for i in range(16 * MOST_ROWS)]),
        processing_class=tokenizer(),
        peft_config=get_peft_config(recipe.model),
        rollout_func=rows.rollout,
    )


def _interrupted(plan: Plan, recipe: Any, folder: Path) -> None:
    """A run in windows of two steps, whole, and again from its first checkpoint."""
    import torch

    split = plan.splits[0]
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
        trainer = _trainer(plan, recipe, plan.training(recipe, split, folder, **changes), folder)
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.accelerator.is_main_process:
            torch.save(trainer.weights[-1], folder / f"{name}.pt")


if __name__ == "__main__":
    main()
