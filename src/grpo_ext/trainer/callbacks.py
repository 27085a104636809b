"""Callbacks of a training run: progress lines, `metrics.jsonl`, the times of each step."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from grpo_ext.safe_reading import appending, write_text
from grpo_ext.tables import Table
from grpo_ext.trainer.checkpoints.finish import METRICS_FILE
from grpo_ext.trainer.signals import signals

logger = logging.getLogger(__name__)

Logs = Mapping[str, Any]
Metrics = MutableMapping[str, list[float]]

# Progress lines.

_SHOWN = {"kl": "kl", "entropy": "entropy", "completions/mean_length": "length"}
"""Metrics that a line shows after the rewards, with their short names."""


_QUIET = 20.0
"""Seconds without a line after which the end of a rollout is printed too."""


class Progress(TrainerCallback):
    """Prints one line for each log, not a dict of all metrics; one for the first step and for slow rollouts."""

    _written = 0.0

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Start the clock for the estimate of the remaining time."""
        super().on_train_begin(args, state, control, **kwargs)
        self._began = (time.monotonic(), state.global_step)
        self._written = self._began[0]

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Print how long the first step took, unless it is logged anyway."""
        super().on_step_end(args, state, control, **kwargs)
        if state.is_world_process_zero and state.global_step == self._began[1] + 1 and not control.should_log:
            every = max(1, int(state.logging_steps))
            following = min((state.global_step // every + 1) * every, state.max_steps)
            more = f"; the next line follows at step {following}"
            more = more if args.logging_strategy == "steps" and state.global_step < state.max_steps else ""
            after = clock(time.monotonic() - self._began[0])
            self.write(f"step {state.global_step}/{state.max_steps}   done after {after}{more}")

    def sampled(self, seconds: float) -> None:
        """Print that a rollout is over, if the last line is some seconds old."""
        if time.monotonic() - self._written > _QUIET:
            self._written = time.monotonic()
            self.write(f"completions sampled in {clock(seconds)}; now the update")

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Logs | None = None, **_: object
    ) -> None:
        """Print a line."""
        if state.is_world_process_zero and logs:
            start, first = getattr(self, "_began", (0.0, state.global_step))
            done = state.global_step - first
            left = (time.monotonic() - start) / done * (state.max_steps - state.global_step) if done > 0 else 0.0
            self._written = time.monotonic()
            self.write(line(logs, state.global_step, state.max_steps, left))

    def write(self, text: str) -> None:
        """Print to stdout."""
        print(text, flush=True)


class ProgressBar(Progress, ProgressCallback):
    """transformers' progress bar, with the lines of `Progress` above it."""

    def write(self, text: str) -> None:
        """Print above the bar, which exists only during training."""
        print(text, flush=True) if self.training_bar is None else self.training_bar.write(text)


def install_progress(callbacks: list[TrainerCallback], *, disable_tqdm: bool | None) -> Progress | None:
    """Replace transformers' own printer or progress bar by `Progress`, and return it; keep one the user has chosen."""
    for i, callback in reversed(list(enumerate(callbacks))):
        if type(callback) in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            callbacks[i] = progress = ProgressBar() if sys.stderr.isatty() and not disable_tqdm else Progress()
            return progress
    return None


def line(logs: Logs, step: int, steps: int, seconds_left: float = 0.0) -> str:
    """Return one log as a line: step, reward and its parts, KL, entropy, length, tokens per second, time left."""
    place = f"step {step:{len(str(steps))}}/{steps}"
    over = "train_runtime" in logs  # the last log, with the metrics of the steps since the one before
    if over:
        place += f"   trained in {clock(logs['train_runtime'])}"
    total = next((name for name in logs if name == "reward" or name.endswith("_reward")), None)
    if total is None and over:
        return place
    if total is None and "loss" not in logs:
        return "   ".join([place, *_all(logs)])
    prefix = "" if total is None else total.removesuffix("reward")
    place += f"   {prefix.strip('_')}" if prefix else ""
    first = f"reward {short(logs[total])}" if total else f"loss {short(logs['loss'])}"  # a step without rollouts
    shown = {key: name for key, name in _SHOWN.items() if prefix + key in logs} | _turns(logs, prefix)
    metrics = [f"{name} {short(logs[prefix + key])}" for key, name in shown.items()]
    speed = [f"{logs[THROUGHPUT]:,.0f} tokens/s"] if THROUGHPUT in logs else []
    left = [f"{clock(seconds_left)} left"] if seconds_left and not prefix and not over else []
    return "   ".join([place, first, *_parts(logs, prefix), *metrics, *speed, *left])


def _between(logs: Logs, begin: str, end: str) -> list[str]:
    return [name[len(begin) : -len(end)] for name in logs if name.startswith(begin) and name.endswith(end)]


def _parts(logs: Logs, prefix: str) -> list[str]:
    """Return the mean of each reward, if there are several."""
    names = _between(logs, f"{prefix}rewards/", "/mean")
    parts = ", ".join(f"{name} {short(logs[f'{prefix}rewards/{name}/mean'])}" for name in names)
    return [f"({parts})"] if len(names) > 1 else []


def _turns(logs: Logs, prefix: str) -> dict[str, str]:
    """Return metrics of environments: turns of each, and the share of failed episodes where some failed."""
    names = _between(logs, f"{prefix}environments/", "/turns")
    labels = {}
    for name in names:
        label = f"{name} " if len(names) > 1 else ""
        labels[f"environments/{name}/turns"] = f"{label}turns"
        if logs.get(f"{prefix}environments/{name}/failed"):
            labels[f"environments/{name}/failed"] = f"{label}failed"
    return labels


def _all(logs: Logs) -> Iterator[str]:
    """Yield all metrics; of an evaluation set, which has a table of its own, only shares of correct answers."""
    in_tables = (name for name in logs if name.startswith("eval_") and "/" in name)
    left_out = {"epoch", "total_flos", *(name for name in in_tables if not name.partition("@")[2].isdecimal())}
    return (f"{name} {short(value)}" for name, value in logs.items() if name not in left_out)


def short(value: object) -> str:
    """Format a number in at most five places."""
    if not isinstance(value, int | float):
        return str(value)
    fixed = value == 0 or 0.01 <= abs(value) < 1000 or value != value
    return f"{value:.2f}" if fixed else f"{value:.1e}"


def clock(seconds: float) -> str:
    """Format a duration: 1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# Completions.


def completions_table(logs: Mapping[str, Any], step: int, most: int | None) -> Table:
    """Return a table of at most `most` completions, evenly chosen, with rewards, advantages and logged columns."""
    columns = {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"]}
    columns |= {"advantage": logs["advantages"], **logs["extra"]}
    count, most = len(logs["prompt"]), most or len(logs["prompt"])
    chosen = range(0, count, max(1, count // max(1, most)))[:most]
    title = f"step {step}: {len(chosen)} of {count} completions"
    table = Table(title=title, title_justify="left", show_header=False)
    for i in chosen:
        for name, values in columns.items():
            table.add_row(name, _cell(values[i]), end_section=name == list(columns)[-1])
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "\n".join(f"{m.get('role')}: {m.get('content') or m.get('tool_calls')}" for m in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


# metrics.jsonl.


class MetricsFile(TrainerCallback):
    """Writes `metrics.jsonl` in `output_dir`: the log history, one JSON object per line, while a run trains.

    A resumed run begins with its checkpoint's history, so that each log is in the file once. Only the main process
    writes. A full disk costs the file, not the run, for which the other processes would wait.
    """

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Write the log history of the checkpoint, replacing the file of an earlier run."""
        path = Path(args.output_dir or ".") / METRICS_FILE
        if state.log_history or path.exists():
            _write(path, state, state.log_history, "w")

    def on_log(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Append the last log."""
        _write(Path(args.output_dir or ".") / METRICS_FILE, state, state.log_history[-1:], "a")


def _write(path: Path, state: TrainerState, rows: Iterable[Logs], mode: str) -> None:
    if not state.is_world_process_zero:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({name: _value(value) for name, value in row.items()}) + "\n" for row in rows)
        if mode == "w":
            write_text(path, lines)
            return
        with appending(path) as file:
            file.write(lines)
    except OSError as error:
        logger.warning(f"{path} could not be written ({error}); training continues.")


def _value(value: Any) -> Any:
    """Return a value for JSON: a number, null for NaN and inf, text for everything else."""
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        return float(value) if math.isfinite(value) else None
    except (TypeError, ValueError, RuntimeError):  # not a number, or a tensor of several
        return str(value)


# Times.

TRAINING = "training"
"""The part of a step that is not measured by `during`: forward and backward passes, optimizer."""
THROUGHPUT = "tokens_per_second"


class StepTimes(TrainerCallback):
    """Logs the seconds of this process in each part of a step, which add up to the step, and the total throughput.

    Args:
        metrics: the trainer's metrics of training.
        device: synchronised where one part ends and another begins.
        parts: parts that each step has, also where they take 0 seconds.
    """

    def __init__(self, metrics: Metrics, device: torch.device, parts: Sequence[str]) -> None:
        self.metrics, self.device, self.parts = metrics, device, (*parts, TRAINING)
        self._seconds: dict[str, float] = {}
        self._within: list[str] = []
        self._turned = 0.0
        self._logged = (0, 0.0)
        self.sampled: Callable[[float], None] = lambda seconds: None

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the time of the block as this part, and not as the part around it."""
        if not self._within:
            yield
            return
        self._turn()
        self._within.append(part)
        try:
            yield
        finally:
            self._turn()
            self._within.pop()
            if part == "rollout":
                self.sampled(self._seconds[part])

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Leave out the tokens from before a resume."""
        self._logged = (state.num_input_tokens_seen, 0.0)

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Start the clock."""
        self._seconds, self._within = dict.fromkeys(self.parts, 0.0), [TRAINING]
        self._turned = self._now()

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop the clock. The throughput is that since it was last logged; a step without rollouts adds time only."""
        self._turn()
        self._within = []
        for part, seconds in self._seconds.items():
            self.metrics[f"time/{part}"].append(seconds)
        signals.step_seconds = sum(self._seconds.values())
        tokens, elapsed = self._logged
        self._logged = tokens, elapsed + signals.step_seconds
        if state.num_input_tokens_seen > tokens:
            self.metrics[THROUGHPUT] = [(state.num_input_tokens_seen - tokens) / self._logged[1]]

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Logs | None = None, **_: object
    ) -> None:
        """Restart the throughput."""
        if logs and THROUGHPUT in logs:
            self._logged = (state.num_input_tokens_seen, 0.0)

    def _turn(self) -> None:
        now = self._now()
        self._seconds[self._within[-1]] = self._seconds.get(self._within[-1], 0.0) + now - self._turned
        self._turned = now

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
