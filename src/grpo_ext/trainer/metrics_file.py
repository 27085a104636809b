"""`metrics.jsonl` in `output_dir`: the log history of a run, one JSON object a line, while it trains."""

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """Appends what is logged; a resumed run begins with its checkpoint's history, so that each log stands once.

    The main process alone writes, and a disk that is full costs the file, not the run: the others would wait for it.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was logged up to the checkpoint, or nothing, over what an elder run may have left."""
        if state.log_history or _path(args).exists():
            _write(_path(args), state, state.log_history, "w")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what was logged last."""
        _write(_path(args), state, state.log_history[-1:], "a")


def _path(args: Any) -> Path:
    return Path(args.output_dir or ".") / METRICS_FILE


def _write(path: Path, state: Any, rows: Iterable[dict[str, Any]], mode: str) -> None:
    if not state.is_world_process_zero:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode, encoding="utf-8") as file:
            file.writelines(json.dumps(plain(row)) + "\n" for row in rows)
    except OSError as error:
        logger.warning(f"{path} could not be written ({error}); the run goes on.")


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """`row` as JSON has it: numbers, or null for NaN and inf, and text for all else."""
    return {name: _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        return float(value) if math.isfinite(value) else None
    except (TypeError, ValueError, RuntimeError):  # no number, or a tensor of several
        return str(value)
