"""Checkpoints: which one a run goes on from, and what ours hold beside TRL's."""

import json
import logging
import re
from functools import cache
from pathlib import Path

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_ext.config.run import AFRESH, FRESH_START, LAST
from grpo_ext.errors import ConfigError
from grpo_ext.objective.objective import Objective

logger = logging.getLogger(__name__)

OBJECTIVE_FILE = "objective.json"


@cache
def accept_numbered_cpu() -> None:
    """Let a checkpoint be loaded to `cpu:0`, as transformers before 5.23 asks for on several CPU processes."""
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, location: storage if re.fullmatch(r"cpu:\d+", location) else None
    )


def checkpoint_to_resume(output_dir: Path, asked: str | None) -> str | None:
    """The checkpoint to go on from: the one `asked` for, else the last complete one in `output_dir`."""
    if str(asked).lower() in AFRESH:
        return None
    if asked and str(asked).lower() not in LAST:
        return asked
    complete = sorted(complete_checkpoints(output_dir), key=_step)
    return str(complete[-1]) if complete else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were written to the end; what a killed process left half done is passed over."""
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            json.loads((path / "trainer_state.json").read_text())
            found.append(path)
        except (OSError, ValueError):
            logger.warning(f"{path} is incomplete and is passed over.")
    return found


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def check_same_objective(checkpoint: str, objective: Objective) -> None:
    """A run must not change its objective half way unnoticed.

    Raises:
        ConfigError: the checkpoint was trained by another objective; the message names the axes that differ.
    """
    path = Path(checkpoint) / OBJECTIVE_FILE
    if not path.exists():
        return
    old, new = json.loads(path.read_text()), json.loads(json.dumps(objective.to_dict()))
    differing = [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} here" for key in new if old.get(key) != new.get(key)
    ]
    if differing:
        cure = f"Set another output_dir, or --resume_from_checkpoint {FRESH_START}."
        raise ConfigError([f"{checkpoint} was trained by another objective ({'; '.join(differing)}). {cure}"])
