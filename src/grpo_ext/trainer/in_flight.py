"""Generations that were sampled ahead when a checkpoint was written; one file for each process.

It holds their completions and scores, and, for those that had none, the weights that are to sample them. Scores that
failed, or cannot be read back, are left out: a run that resumes scores those completions again. Only the classes of
`SAFE` and NumPy's scalars are read back.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from grpo_ext.environments.episode import EpisodeFigures
from grpo_ext.objective.trajectory import Trajectory, Tree, Turn
from grpo_ext.rewards.outcomes import Scores
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch

SAFE = (RolloutBatch, Generated, Scores, Trajectory, Turn, Tree, EpisodeFigures)
_OF_NUMPY: tuple[Any, ...] = (
    np.float64(0).__reduce__()[0],
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
)
"""NumPy's constructor of a scalar; rewards often log one."""

Weights: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class InFlight:
    """Generations in the order in which they train.

    Attributes:
        generations: of each the version of the weights that sample it, and its completions, if it has them.
        weights: weights by version.
        first: number of the first generation.
    """

    generations: Sequence[tuple[int, RolloutBatch | None]] = ()
    weights: dict[int, Weights] = field(default_factory=dict)
    first: int = 0


def write(folder: Path, rank: int, in_flight: InFlight) -> None:
    """Write this process's part."""
    content = {"windows": list(in_flight.generations), "weights": in_flight.weights, "first": in_flight.first}
    torch.save(content, _file(folder, rank))


def read(folder: Path, rank: int, saver: int = 0) -> InFlight:
    """Return this process's part; weights that it did not need to keep are those of the process that saves here."""
    own, first = _load(_file(folder, rank)), _load(_file(folder, saver))
    return InFlight(own["windows"], {**first["weights"], **own["weights"]}, own["first"])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rollout_ahead_{rank}.pt"


def _load(file: Path | io.BytesIO) -> dict:
    if isinstance(file, Path) and not file.exists():
        return {"windows": [], "weights": {}, "first": 0}
    with torch.serialization.safe_globals([*SAFE, *_OF_NUMPY]):
        return torch.load(file, map_location="cpu", weights_only=True)


def to_be_kept(finished: RolloutBatch) -> RolloutBatch | None:
    """Return what a checkpoint keeps of completions: not the scores if one of them failed, or cannot be read back.

    None if it cannot keep them: rewards may log any object, and environments return any.
    """
    failed = any(scores.error for scores in finished.scored.values())
    generated = finished.generated and finished.generated._replace(images=None)  # only shown; `images` stay
    finished = replace(finished, rows=[], attempts=(), prompts=[], generated=generated)  # rows are drawn again
    without = replace(finished, scored={})
    return next((part for part in (without if failed else finished, without) if _can_be_read(part)), None)


def _can_be_read(finished: RolloutBatch) -> bool:
    """Return whether completions hold only what `read` accepts."""
    buffer = io.BytesIO()
    try:
        torch.save({"windows": [(0, finished)], "weights": {}}, buffer)
        buffer.seek(0)
        _load(buffer)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return True
