"""Rewards by length, and the fewest processes that make whole groups."""

from collections.abc import Iterable
from typing import Any

from grpo_ext.recipe.foreign.engine import Draft


def to_list(value: Any) -> list[Any]:
    """Return a list: of one value, or of none."""
    return value if isinstance(value, list) else [value] if value else []


def overlong_entry(max_length: object, buffer: object) -> dict[str, Any]:
    """Return the entry of the reward `soft_overlong`."""
    return {"name": "soft_overlong", "kwargs": {"max_length": max_length, "buffer": buffer}}


def cosine_entry(d: Draft, max_length: object, keys: Iterable[str]) -> dict[str, Any]:
    """Return the entry of `cosine_length`; `keys` are those of correct answers, short and long, then of wrong ones."""
    short, long, short_wrong, long_wrong = map(d.get, keys)
    if short < long or short_wrong > long_wrong:
        d.decide(
            f"reward cosine: correct answers go from {short:g} (short) to {long:g} (long), wrong ones from "
            f"{short_wrong:g} to {long_wrong:g}. cosine_length takes length from correct ones and gives it to wrong "
            "ones: the values that do the opposite are exchanged.",
            *keys,
        )
    values = {
        "min_value_correct": min(short, long),
        "max_value_correct": max(short, long),
        "min_value_wrong": min(short_wrong, long_wrong),
        "max_value_wrong": max(short_wrong, long_wrong),
    }
    return {"name": "cosine_length", "kwargs": {"max_length": max_length, **values}}


def whole_groups(d: Draft, processes_at_most: int = 64) -> None:
    """Where only several processes make whole groups of rows and accumulation, write the fewest that do."""
    rows, group = d.values.get("per_device_train_batch_size", 8), d.values.get("num_generations", 8)
    steps = d.values.get("steps_per_generation") or d.values.get("gradient_accumulation_steps", 1)
    evaluated = d.values.get("eval_strategy", "no") != "no"
    of_eval = d.values.get("per_device_eval_batch_size", 8), d.values.get("num_generations_eval") or group
    if {"num_processes", "generation_batch_size"} & d.values.keys():
        return

    def fit(processes: int) -> bool:
        whole = rows * steps * processes % group == 0
        return whole and not (evaluated and of_eval[0] * processes % of_eval[1])

    if not all(isinstance(value, int) for value in (rows, group, steps, *of_eval)) or fit(1):
        return
    processes = next((n for n in range(2, processes_at_most + 1) if fit(n)), None)
    if processes is not None:
        d.set("num_processes", processes, of=())
        d.decide(
            f"num_processes: the file does not give it. {processes} is the fewest with which {rows} x {steps} "
            f"completions of each process are whole groups of {group}."
        )
