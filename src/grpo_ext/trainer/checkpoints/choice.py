"""Choose the checkpoint to resume from: the newest sound one, or the one that was asked for, if it is sound."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from transformers import TrainerState

from grpo_ext.config.resuming import FRESH_START
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.safe_reading import read_json
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, STATE, UNSEALED, damage, step_of

logger = logging.getLogger(__name__)

OBJECTIVE_FILE = "objective.json"
_LARGEST_STATE = 2**30
"""Most bytes of a trainer state, which holds the whole log."""
WEIGHTS = (
    *("adapter_model.safetensors", "adapter_model.bin", "model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""File names of saved models: a complete model has at least one of these files."""


class Sound(str):
    """Path of a checkpoint whose files have been verified, which takes minutes for large ones."""

    __slots__ = ()


def numbered(output_dir: Path, beyond: int = -1) -> list[Path]:
    """Return all `checkpoint-N` of a folder with N > `beyond`, newest first."""
    all_steps = {path: step_of(path) for path in output_dir.iterdir()} if output_dir.is_dir() else {}
    steps = {path: step for path, step in all_steps.items() if step is not None and step > beyond}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def newest_sound(output_dir: Path) -> Sound | None:
    """Return the newest sound checkpoint of a folder, and warn of each newer one; None if there are none at all.

    Raises:
        ConfigError: there are some, and all are damaged.
    """
    damaged: list[str] = []
    candidates = numbered(output_dir)
    for path in candidates:
        if not (damage := faults(path)):
            for message in damaged:
                logger.warning(f"{message} It is not used.")
            return Sound(path)
        damaged.append(f"{path} is damaged: {_listed(damage)}.")
    if not damaged:
        return None
    whole = [f"--resume_from_checkpoint {path} uses it without verification." for path in candidates if unsealed(path)]
    cure = f"--resume_from_checkpoint {FRESH_START} moves the old run aside and starts from the beginning."
    reason = f"it has no sound checkpoint. {' '.join(damaged)}".rstrip(".")
    raise ConfigError([Problem("output_dir", str(output_dir), reason, " ".join([*whole[:1], cure]))])


def named(checkpoint: Path) -> Sound:
    """Return a checkpoint by its path; warn of one without a manifest, such as plain TRL's.

    Raises:
        ConfigError: no run can be resumed from it.
    """
    damage = faults(checkpoint)
    if damage == [UNSEALED] and not (damage := _gaps(checkpoint)):
        logger.warning(f"{checkpoint} has no {MANIFEST}: whether its files are sound is unknown.")
    if damage:
        inside = [path.name for path in numbered(checkpoint)]
        cure = f"It holds {', '.join(inside)}: name one of them." if inside else "Name another checkpoint, or 'last'."
        reason = f"it is not a sound checkpoint: {_listed(damage)}"
        raise ConfigError([Problem("resume_from_checkpoint", str(checkpoint), reason, cure)])
    return Sound(checkpoint)


def unsealed(checkpoint: Path) -> bool:
    """Return whether a checkpoint without a manifest seems complete."""
    return damage(checkpoint, hashes=False) == [UNSEALED] and not _gaps(checkpoint)


def faults(checkpoint: Path) -> list[str]:
    """Return messages about what prevents a resume from a sealed checkpoint."""
    return damage(checkpoint) or _gaps(checkpoint, {"record of its run": (RECIPE_FILE,)})


def recorded_step(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's trainer state; None if the state is missing or malformed."""
    try:
        state = TrainerState(**read_json(checkpoint / STATE, _LARGEST_STATE))
        rows = all(isinstance(row["step"], int | float) for row in state.log_history)
        counts = (state.epoch or 0, state.max_steps, state.total_flos)
        sound = rows and all(isinstance(count, int | float) and count == count for count in counts)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return state.global_step if sound and type(state.global_step) is int else None


def _gaps(checkpoint: Path, further: Mapping[str, Sequence[str]] = MappingProxyType({})) -> list[str]:
    """Return messages about missing files of transformers, and of `further` patterns."""
    step = recorded_step(checkpoint)
    if step is None:
        return [f"its {STATE} is missing or cannot be read"]
    gaps = [] if step_of(checkpoint) in (None, step) else [f"its {STATE} is that of step {step}"]
    patterns = {"random state": ("rng_*",), **further}
    if not any(path.is_dir() for path in checkpoint.iterdir()):  # else sharded by an engine
        patterns |= {"weights": WEIGHTS, "optimizer": ("optimizer.*",), "scheduler": ("scheduler.pt",)}
    for what, names in patterns.items():
        if not any(path.stat().st_size for name in names for path in checkpoint.glob(name)):
            gaps.append(f"it has no {what}")
    return gaps


def _listed(messages: list[str]) -> str:
    rest = f" and {len(messages) - 5} more" if len(messages) > 5 else ""
    return "; ".join(messages[:5]) + rest
