"""What the time of a step goes to, and how many tokens a second come of it."""

import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

TRAINING = "training"
"""All of a step that is not `during` something else: forwards, backward, optimizer."""
THROUGHPUT = "tokens_per_second"


class StepTimes(TrainerCallback):
    """Logs this process's seconds of each part of a step, which add up to the step, and the throughput of all.

    Args:
        metrics: the trainer's, of training.
        device: whose work is waited for where one part ends and another begins.
        parts: that each step has, if only for 0 seconds.
    """

    def __init__(self, metrics: MutableMapping[str, list[float]], device: torch.device, parts: Sequence[str]) -> None:
        """No step goes on."""
        self.metrics, self.device, self.parts = metrics, device, (*parts, TRAINING)
        self._seconds: dict[str, float] = {}
        self._within: list[str] = []
        self._turned = 0.0
        self._logged = (0, 0.0)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """What takes place now is this part of the step, and not of the part that it is inside of."""
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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tokens of a run that is resumed are not of this one's time."""
        self._logged = (state.num_input_tokens_seen, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._seconds, self._within = dict.fromkeys(self.parts, 0.0), [TRAINING]
        self._turned = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop it; the throughput is that since it was last logged, a step without rollouts being part of the next."""
        self._turn()
        self._within = []
        for part, seconds in self._seconds.items():
            self.metrics[f"time/{part}"].append(seconds)
        tokens, elapsed = self._logged
        self._logged = tokens, elapsed + sum(self._seconds.values())
        if state.num_input_tokens_seen > tokens:
            self.metrics[THROUGHPUT] = [(state.num_input_tokens_seen - tokens) / self._logged[1]]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Begin the throughput anew."""
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
