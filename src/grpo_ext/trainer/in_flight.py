"""Generations that were sampled ahead when a checkpoint was written; one file for each process.

It holds their completions and scores, and, for those that had none, the weights that are to sample them. Only the
classes of `SAFE` are read back.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from grpo_ext.environments.loop import AttemptFigures
from grpo_ext.objective.trajectory import Trajectory, Tree, Turn
from grpo_ext.rewards.containment import Scored
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rollout.collected import Finished

SAFE = (Finished, Scored, Scores, Trajectory, Turn, Tree, AttemptFigures)

Weights: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class InFlight:
    """Generations in the order in which they train.

    Attributes:
        windows: of each the version of the weights that sample it, and its completions, if it has them.
        weights: weights by version.
    """

    windows: Sequence[tuple[int, Finished | None]] = ()
    weights: dict[int, Weights] = field(default_factory=dict)


def write(folder: Path, rank: int, in_flight: InFlight) -> None:
    """Write this process's part."""
    torch.save({"windows": list(in_flight.windows), "weights": in_flight.weights}, _file(folder, rank))


def read(folder: Path, rank: int) -> InFlight:
    """Return this process's part; weights that it did not need to keep are the first process's."""
    own, first = _load(_file(folder, rank)), _load(_file(folder, 0))
    return InFlight(own["windows"], {**first["weights"], **own["weights"]})


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rollout_ahead_{rank}.pt"


def _load(file: Path | io.BytesIO) -> dict:
    if isinstance(file, Path) and not file.exists():
        return {"windows": [], "weights": {}}
    with torch.serialization.safe_globals(list(SAFE)):
        return torch.load(file, map_location="cpu", weights_only=True)


def can_be_read(finished: Finished) -> bool:
    """Return whether completions hold only what `read` accepts; rewards may log any object."""
    buffer = io.BytesIO()
    try:
        torch.save({"windows": [(0, finished)], "weights": {}}, buffer)
        buffer.seek(0)
        _load(buffer)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):
        return False
    return True
