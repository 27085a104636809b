"""What a person reads of a run while it trains: a line for each log, and a progress bar where there is a terminal."""

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from grpo_ext.trainer.times import THROUGHPUT

Logs = Mapping[str, Any]
SHOWN = {"kl": "kl", "entropy": "entropy", "completions/mean_length": "length"}
"""Figures of a line after the rewards, and what it calls them; all others stand in the file."""


class Progress(ProgressCallback):
    """transformers' progress bar, with lines in place of the dict of all figures; without `bar` the lines alone."""

    def __init__(self, bar: bool) -> None:
        """Nothing has begun."""
        super().__init__()
        self.bar = bar
        self._began = (0.0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock by which the rest is estimated."""
        self._began = (time.monotonic(), state.global_step)
        if self.bar:
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the bar of an evaluation."""
        if self.bar:
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line."""
        if not state.is_world_process_zero or not logs:
            return
        start, first = self._began
        done = state.global_step - first
        left = (time.monotonic() - start) / done * (state.max_steps - state.global_step) if done > 0 else 0.0
        text = line(logs, state.global_step, state.max_steps, left)
        if self.training_bar is None:
            print(text, flush=True)
        else:
            self.training_bar.write(text)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)


def install(trainer: Any) -> None:
    """Exchange transformers' own printer or progress bar for `Progress`; one that the user has chosen stays."""
    callbacks = trainer.callback_handler.callbacks
    for i, callback in reversed(list(enumerate(callbacks))):
        if type(callback) in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
            callbacks[i] = Progress(bar=not trainer.args.disable_tqdm and sys.stderr.isatty())
            return


def line(logs: Logs, step: int, steps: int, seconds_left: float = 0.0) -> str:
    """One log in words: how far, the reward with its parts, KL, entropy, length, tokens a second, the time left."""
    place = f"step {step:{len(str(steps))}}/{steps}"
    over = "train_runtime" in logs  # the last log, with the figures of those steps that came after the one before
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
    shown = {key: name for key, name in SHOWN.items() if prefix + key in logs} | _turns(logs, prefix)
    figures = [f"{name} {short(logs[prefix + key])}" for key, name in shown.items()]
    speed = [f"{logs[THROUGHPUT]:,.0f} tokens/s"] if THROUGHPUT in logs else []
    left = [f"{clock(seconds_left)} left"] if seconds_left and not prefix and not over else []
    return "   ".join([place, first, *_parts(logs, prefix), *figures, *speed, *left])


def _parts(logs: Logs, prefix: str) -> list[str]:
    """The rewards, if there are several."""
    begin, end = f"{prefix}rewards/", "/mean"
    names = [name[len(begin) : -len(end)] for name in logs if name.startswith(begin) and name.endswith(end)]
    told = ", ".join(f"{name} {short(logs[f'{begin}{name}{end}'])}" for name in names)
    return [f"({told})"] if len(names) > 1 else []


def _turns(logs: Logs, prefix: str) -> dict[str, str]:
    """Figures of environments: turns of each, and the share of attempts that failed where some did."""
    begin = f"{prefix}environments/"
    names = [name[len(begin) : -len("/turns")] for name in logs if name.startswith(begin) and name.endswith("/turns")]
    found = {}
    for name in names:
        of = f"{name} " if len(names) > 1 else ""
        found[f"environments/{name}/turns"] = f"{of}turns"
        if logs.get(f"{begin}{name}/failed"):
            found[f"environments/{name}/failed"] = f"{of}failed"
    return found


def _all(logs: Logs) -> Iterator[str]:
    """All figures; of an evaluation set, whose table stands above, shares of right answers alone."""
    of_sets = (name for name in logs if name.startswith("eval_") and "/" in name)
    left_out = {"epoch", "total_flos", *(name for name in of_sets if not name.partition("@")[2].isdecimal())}
    return (f"{name} {short(value)}" for name, value in logs.items() if name not in left_out)


def short(value: Any) -> str:
    """A figure in five places at most; what is none as it is."""
    if not isinstance(value, int | float):
        return str(value)
    plain = value == 0 or 0.01 <= abs(value) < 1000 or value != value
    return f"{value:.2f}" if plain else f"{value:.1e}"


def clock(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
