"""The columns of a batch: those of some rows, those that can travel to a worker."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from .composite import RewardSpec

CALLBACKS = ("log_extra", "log_metric")
PLURALS = {"prompts": "prompt", "completions": "completion"}
"""What TRL calls the columns that a row of a file has in the singular."""


def scorable_rows(spec: RewardSpec, columns: Mapping[str, Any]) -> list[int]:
    """Rows in which the column named by `when` holds something; all rows without `when`."""
    total = range(len(columns["completions"]))
    if spec.when is None:
        return list(total)
    present = columns.get(spec.when)
    return [] if present is None else [i for i in total if present[i] not in (None, "")]


def take(columns: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """The columns of some rows; what is no column (state, callbacks) as it is."""
    total = len(columns["completions"])
    return {
        name: [value[i] for i in rows] if isinstance(value, list) and len(value) == total else value
        for name, value in columns.items()
    }


def portable(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns that can be sent to a worker: no callbacks (it has its own), the trainer's state as plain values."""
    sent = {name: value for name, value in columns.items() if name not in CALLBACKS}
    state = sent.get("trainer_state")
    if state is not None:
        plain = {k: v for k, v in vars(state).items() if isinstance(v, int | float | str | bool | type(None))}
        sent["trainer_state"] = SimpleNamespace(**plain)
    return sent


def singular(column: str) -> str:
    """A column's name in a row of a file."""
    return PLURALS.get(column, column)
