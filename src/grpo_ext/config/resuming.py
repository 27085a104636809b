"""The values of `resume_from_checkpoint`, and the note in `output_dir` of the last request that was carried out."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ext.safe_reading import read_json

FRESH_START = "never"
"""`--resume_from_checkpoint never` ignores the checkpoints in `output_dir`."""
AFRESH = (FRESH_START, "false")
"""Values of `resume_from_checkpoint`, in any case, that ignore the checkpoints in `output_dir`."""
LAST = ("true", "last")
"""Values of `resume_from_checkpoint` that, like none, mean the last checkpoint in `output_dir`."""
REQUEST_FILE = "_request.json"
"""The note; transformers does not push files whose names begin with `_` to the hub."""
ASIDE = "_before-"
"""Prefix of the names of folders for what was newer than the checkpoint that a run went back to."""


@dataclass(frozen=True)
class Request:
    """A checkpoint, or the beginning, from which a command asked to train."""

    asked: str
    """`never`, or the absolute path of a checkpoint."""
    step: int
    """What `output_dir` holds up to this step stays, the rest is moved aside; -1: all is moved."""

    @property
    def afresh(self) -> bool:
        """True if training starts again from the beginning."""
        return self.asked == FRESH_START


def requested(value: object) -> str | None:
    """Return `never`, the absolute path of a checkpoint, or None for the newest."""
    word = str(value).lower()
    if word in AFRESH:
        return FRESH_START
    return None if not value or word in LAST else os.path.abspath(str(value))


def relative_to(request: Request, output_dir: Path) -> str:
    """Return the request relative to a folder that holds the checkpoint, so that the folder may be moved."""
    inside = Path(request.asked).is_relative_to(os.path.abspath(output_dir))
    return os.path.join(".", os.path.relpath(request.asked, output_dir)) if inside else request.asked


def noted(output_dir: Path) -> Request | None:
    """Return the last request carried out in a folder; None if there is none, or its note is damaged."""
    try:
        request: Any = Request(**read_json(output_dir / REQUEST_FILE))
        if not request.afresh:
            request = replace(request, asked=os.path.join(os.path.abspath(output_dir), request.asked))
            request = replace(request, asked=os.path.normpath(request.asked))
    except (OSError, ValueError, TypeError):
        return None
    return request if isinstance(request.asked, str) and type(request.step) is int else None
