"""`grpo-ext check --probe`: some real steps of a recipe, their seconds by part, and what would make them faster."""

import dataclasses
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from grpo_ext.commands.advice import Measured, helpful
from grpo_ext.commands.memory import device_memory, gib
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.launch import world_size
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.launching import Launch
from grpo_ext.recipe.parts import Recipe
from grpo_ext.train import build_trainer
from grpo_ext.trainer.callbacks import TRAINING, MetricsFile, Progress, StepTimes, clock
from grpo_ext.trainer.diagnosis.overlap import BESIDE, WAITED, advice
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer
from grpo_ext.trainer.signals import SIGNALS

FORWARD, SCORES, OPTIMIZER = "forward_backward", "logps", "optimizer"
NAMES = {
    "rollout": "rollout",
    "rewards": "rewards",
    "environments": "environments",
    "weight_push": "copying weights to the sampler",
    SCORES: "old and reference log-probabilities",
    FORWARD: "forward and backward",
    OPTIMIZER: "optimizer",
    TRAINING: "the rest",
}
"""Parts of a step and their names on the terminal, in the order of a step."""
_STARTED = "Start the run: metrics.jsonl has the seconds of its first steps (time/rollout, time/training)."


class Windows(NamedTuple):
    """Optimizer steps of a probe: `warm` that are left out, then `measured`."""

    warm: int
    measured: int

    @classmethod
    def of(cls, training: GRPOExtConfig) -> "Windows":
        """Measure the steps of one generation, behind one that pays for imports, allocations and the first products.

        Ahead of training, K generations are sampled before the first step, so K generations are left out.
        """
        assert training.steps_per_generation
        uses = training.steps_per_generation * training.num_iterations / training.gradient_accumulation_steps
        measured = max(1, math.ceil(uses))
        return cls(measured * max(1, training.rollout_ahead), measured)


class Stopping(TrainerCallback):
    """Times the optimizer, and ends training after the steps of a probe, without evaluations and checkpoints."""

    def __init__(self, times: StepTimes, windows: Windows) -> None:
        self.times, self.windows, self._optimizer = times, windows, ExitStack()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Start the clock of the optimizer."""
        self._optimizer.enter_context(self.times.during(OPTIMIZER))

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop the clock of the optimizer."""
        self._optimizer.close()

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """End training after the last step."""
        last = min(sum(self.windows), state.max_steps)
        control.should_evaluate = control.should_save = False
        control.should_training_stop = control.should_training_stop or state.global_step >= last
        print(f"probe: step {state.global_step} of {last} is done", flush=True)

    def on_epoch_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Leave out what a recipe does between epochs."""
        control.should_evaluate = control.should_save = False


def check_possible(launch: Launch, recipe: Recipe | None = None) -> None:
    """Refuse a probe of several processes, and of a recipe whose server another run may use.

    Raises:
        ConfigError: it is one.
    """
    processes = launch.planned or world_size()
    if processes > 1 or launch.config or launch.options:
        reason = f"a probe runs in this process, and the launch has {processes} by accelerate"
        raise ConfigError(
            [Problem("--probe", ABSENT, reason, f"Leave out the launch to probe one process. {_STARTED}")]
        )
    if recipe is not None and recipe.training.use_vllm and recipe.training.vllm_mode == "server":
        reason = "a probe would push its weights to the server, which a run may be using"
        raise ConfigError([Problem("--probe", ABSENT, reason, _STARTED, {"vllm_mode": "server"})])


def probe(recipe: Recipe, estimate: int | None) -> list[tuple[str, str]]:
    """Train some steps of a recipe in a temporary folder, and return rows of what they took.

    Args:
        recipe: checked, for this machine.
        estimate: bytes of a training process by the estimate; None if it is not known.
    """
    before = psutil.Process().memory_info().rss
    with temporary_folder() as folder, ended_by_signals():
        training = recipe.training.changed(output_dir=folder, **_QUIET)
        trainer = build_trainer(dataclasses.replace(recipe, training=training))
        windows = Windows.of(training)
        steps = trained(trainer, windows)
    kept = steps[-windows.measured :]
    found = Measured(seconds_of(kept), peak_memory(trainer.accelerator.device), before, **figures(kept))
    over = trainer.accelerator.device.type == "cpu"
    device = device_memory(recipe.training)
    return [
        *shown(found, recipe.training, trainer.state.max_steps, len(steps) - len(kept)),
        ("memory", memory_row(found, estimate, process=over)),
        ("rollouts beside training", beside(kept, found, recipe.training)),
        *(("what would help", line) for line in helpful(found, recipe.training, device)),
    ]


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Return a folder for a `with` statement, which stays if an error names a file in it."""
    folder, kept = tempfile.mkdtemp(prefix="grpo_ext_probe_"), False
    try:
        yield folder
    except Exception as error:
        kept = folder in str(error)
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let signals interrupt a probe for a `with` statement, where a run would save a checkpoint."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    kept = [(number, signal.signal(number, interrupt)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


_QUIET: Mapping[str, Any] = {
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "log_completions": False,
    "logging_steps": 1,
    "logging_strategy": IntervalStrategy.STEPS,
    "push_to_hub": False,
    "report_to": [],
    "resume_from_checkpoint": None,
    "save_strategy": SaveStrategy.NO,
}
"""Settings of a training that only logs the times of each step."""


def trained(trainer: GRPOExtTrainer, windows: Windows) -> list[dict[str, Any]]:
    """Train the steps of a probe and return their logs."""
    trainer.recipe_record = None  # no trial save
    times = trainer._times
    times.parts += (SCORES, FORWARD, OPTIMIZER)
    times.sampled = lambda seconds: None
    timed(trainer, "_logps", SCORES, times)
    timed(trainer, "_add_old_logps", SCORES, times)
    timed(trainer, "compute_loss", FORWARD, times)
    timed(trainer.accelerator, "backward", FORWARD, times)
    timed(trainer, "_clip_grad_norm", OPTIMIZER, times)
    for kind in (Progress, MetricsFile):
        trainer.remove_callback(kind)
    trainer.add_callback(Stopping(times, windows))
    trainer.train()
    return [row for row in trainer.state.log_history if f"time/{TRAINING}" in row]


def timed(owner: Any, name: str, part: str, times: StepTimes) -> None:
    """Count the seconds of a method of one object as a part of the step."""
    stock: Callable[..., Any] = getattr(owner, name)

    def within(*args: Any, **kwargs: Any) -> Any:
        with times.during(part):
            return stock(*args, **kwargs)

    setattr(owner, name, within)


def seconds_of(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds a step of each part."""
    return {part: fmean(row.get(f"time/{part}") or 0.0 for row in steps) for part in NAMES}


def figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean figures of the completions that some steps sampled."""

    def mean(name: str) -> float:
        known = [float(row[name]) for row in steps if row.get(name) is not None]
        return fmean(known) if known else math.nan

    return {
        "throughput": mean("tokens_per_second"),
        "length": mean("completions/mean_length"),
        "cut": mean("completions/clipped_ratio"),
        "silent": mean("advantages/zero_variance_groups"),
    }


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were allocated on a GPU, or that this process had, by now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "linux":  # where ru_maxrss is also that of the process which started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    try:
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    except ImportError:
        return int(psutil.Process().memory_info().peak_wset)


def shown(found: Measured, training: GRPOExtConfig, steps: int, warm: int) -> list[tuple[str, str]]:
    """Return rows of the seconds of a step, of its tokens and of the whole run."""
    whole = sum(found.seconds.values())
    note = f"without the first {warm}, which warm up" if warm else "with the warm-up of the process"
    rows = [("a step", f"{whole:.2f} s, the mean of one generation's steps, {note}")]
    for part, seconds in found.seconds.items():
        if seconds:
            waits = part == "rollout" and training.rollout_ahead
            name = "waiting for rollouts" if waits else NAMES[part]
            rows.append((f"  {name}", f"{seconds:.2f} s, {seconds / whole:.0%}"))
    tokens = f"{found.throughput:,.0f} a second, prompts and completions; {found.length:.0f} a completion"
    run = f"{steps} steps x {whole:.2f} s = {clock(steps * whole)}, without evaluations and saving, if completions "
    return [*rows, ("tokens", tokens), ("the whole run", f"{run}stay as long as those of the probe")]


def memory_row(found: Measured, estimate: int | None, *, process: bool) -> str:
    """Return the peak beside the estimate; on a CPU (`process`) without what the process had before the model."""
    expected = "not estimated" if estimate is None else f"estimated {gib(estimate)}"
    if not process:
        return f"peak {gib(found.peak)} allocated, {expected}"
    rest = f"{gib(found.peak - found.before)} beyond what Python and its libraries had before the model"
    return f"peak {gib(found.peak)} of the process, {rest}; {expected}"


def beside(steps: Sequence[Mapping[str, Any]], found: Measured, training: GRPOExtConfig) -> str:
    """Return what overlapping rollouts and training brings or would bring."""
    before = ("rollout", "rewards", "environments", "weight_push")
    log = {f"time/{part}": found.seconds[part] for part in before}
    log[f"time/{TRAINING}"] = sum(seconds for part, seconds in found.seconds.items() if part not in before)
    log |= {name: steps[-1][name] for name in (WAITED, BESIDE) if name in steps[-1]}
    return advice([log], vars(training)) or ""
