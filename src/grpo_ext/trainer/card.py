"""The section of a model card with the loss and figures of the run, which TRL's card does not have."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ext.objective.objective import Objective

_SHOWN = re.compile(r"(eval_)?(reward|rewards/.*/mean|completions/(mean_length|clipped_ratio)|kl)")
"""Logged metrics that a card shows."""


def results(objective: Objective, steps: tuple[int, int], log: Sequence[Mapping[str, Any]]) -> str:
    """Return the section.

    Args:
        objective: the loss.
        steps: completed and planned.
        log: of the trainer's state.
    """
    measured = []
    for name in dict.fromkeys(name for row in log for name in row if _SHOWN.fullmatch(name)):
        if rows := [row for row in log if isinstance(row.get(name), int | float)]:
            measured.append(f"| `{name}` | {rows[0][name]:.4g} | {rows[-1][name]:.4g} | {rows[-1]['step']} |")
    lines = [
        "\n## Results\n",
        f"{steps[0]} of {steps[1]} steps. Loss ({objective.source or 'custom'}): `{objective.describe()}`.\n",
    ]
    if measured:
        lines += ["| metric | first | last | step |", "| --- | --- | --- | --- |", *measured]
    return "\n".join([*lines, ""])
