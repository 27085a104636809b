"""The columns of a batch: those of some rows, those that can travel to a worker."""

import pickle
from collections.abc import Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.signatures import asks, needs, options

CALLBACKS = ("log_extra", "log_metric")
PLURALS = {"prompts": "prompt", "completions": "completion"}
"""What TRL calls the columns that a row of a file has in the singular."""


def check_clash(spec: RewardSpec, columns: Mapping[str, Any]) -> None:
    """A dataset column that would silently become an option which the recipe leaves unset.

    Raises:
        ValueError: there is one.
    """
    known = options(spec.callable) or {}
    clash = sorted(known.keys() & columns.keys() - spec.kwargs.keys())
    if clash:
        name = clash[0]
        raise ValueError(
            f"dataset column {name!r} has the name of an option of reward {spec.name!r}. Rename the column, set the "
            f"option in the recipe (kwargs: {{{name}: {known[name].default}}}), or, if the function needs the column, "
            "take it before the star in its signature."
        )


def absences(specs: list[RewardSpec], columns: Collection[str], source: str = "the training data") -> Iterator[str]:
    """A sentence for each reward that cannot score any row of a dataset with these columns."""
    for spec in specs:
        wanted = [] if spec.is_model else needs(spec.callable)
        wanted += [spec.when] if spec.when is not None else []
        for name in (n for n in wanted if n not in columns and n not in spec.kwargs):
            hint = did_you_mean(name, columns)
            if name == "solution":  # which any column may become
                others = [column for column in columns if column != "prompt"]
                hint = f"Set answer_column to one of its columns: {', '.join(others)}." if others else "Add answers."
            yield f"reward {spec.name!r} scores nothing: {source} has no column {name!r}. {hint}"


def scorable_rows(spec: RewardSpec, columns: Mapping[str, Any]) -> list[int]:
    """Rows in which the column named by `when` holds something; all rows without `when`."""
    total = range(len(columns["completions"]))
    if spec.when is None:
        return list(total)
    present = columns.get(spec.when)
    return [] if present is None else [i for i in total if not _is_empty(present[i])]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)  # an array is never asked whether it equals ""


def take(columns: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """The columns of some rows; what is no column (state, callbacks) as it is."""
    total = len(columns["completions"])
    return {
        name: [value[i] for i in rows] if isinstance(value, list) and len(value) == total else value
        for name, value in columns.items()
    }


def asked(spec: RewardSpec, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the function may look at, without callbacks: a worker has its own."""
    return {name: v for name, v in columns.items() if name not in CALLBACKS and asks(spec.callable, name)}


def with_plain_state(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns whose `trainer_state` holds only what can be sent to a worker, and of the log, which grows, its end."""
    if columns.get("trainer_state") is None:
        return dict(columns)
    state = dict(vars(columns["trainer_state"]))
    if isinstance(state.get("log_history"), list):
        state["log_history"] = state["log_history"][-1:]
    plain = {name: value for name, value in state.items() if _can_be_sent(value)}
    return {**columns, "trainer_state": SimpleNamespace(**plain)}


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # pickle calls the value's own methods, which raise what they like
        return False
    return True


def singular(column: str) -> str:
    """A column's name in a row of a file."""
    return PLURALS.get(column, column)
