"""Choose the checkpoint to resume from: the newest sound one, or the one that was asked for, if it is sound."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from grpo_ext.config.resuming import FRESH_START, requested
from grpo_ext.errors import ConfigError
from grpo_ext.trainer.checkpoints.branches import branch_of, newest_first
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, STATE, UNSEALED, damage, read, step_of, strangers

logger = logging.getLogger(__name__)

OBJECTIVE_FILE = "objective.json"
WEIGHTS = (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
"""Files one of which is there where a model was saved whole."""


class Sound(str):
    """Path of a checkpoint whose files have been read and found sound; reading them again would take minutes."""

    __slots__ = ()


def checkpoint_to_resume(output_dir: Path, asked: object) -> Sound | None:
    """The checkpoint to resume from: the one `asked` for, else the newest sound one in `output_dir`.

    Raises:
        ConfigError: the one that was asked for is damaged, or all are.
    """
    request = requested(asked)
    if request is None:
        return newest_sound(output_dir)
    return None if request == FRESH_START else named(Path(str(asked)))


def numbered(output_dir: Path, since: int = 0) -> list[Path]:
    """Everything in the folder that is called `checkpoint-N`, newest first, from the branch of order `since` on."""
    found = [path for path in output_dir.iterdir() if step_of(path) is not None] if output_dir.is_dir() else []
    return newest_first(found, since)


def newest_sound(output_dir: Path, since: int = 0, beyond: int = -1) -> Sound | None:
    """The newest sound checkpoint in the folder, and a warning for each newer one; None if there are none at all.

    Those of branches before the order `since` do not count, nor those without a readable manifest up to step `beyond`.

    Raises:
        ConfigError: there are some, and all are damaged.
    """
    damaged: list[str] = []
    candidates = [path for path in numbered(output_dir, since) if (step_of(path) or 0) > beyond or branch_of(path)]
    for path in candidates:
        if not (found := faults(path)):
            for message in damaged:
                logger.warning(f"{message} It is passed over.")
            _mention_strangers(path)
            return Sound(path)
        damaged.append(f"{path} is damaged: {_listed(found)}.")
    if not damaged:
        return None
    whole = [f"--resume_from_checkpoint {path} takes it as it is." for path in candidates if unsealed(path)]
    cure = f"--resume_from_checkpoint {FRESH_START} moves the old run aside and starts afresh."
    raise ConfigError([*damaged, " ".join([f"No sound checkpoint in {output_dir}.", *whole[:1], cure])])


def named(checkpoint: Path) -> Sound:
    """A checkpoint that was asked for by its path; one without a manifest, such as plain TRL's, with a warning.

    Raises:
        ConfigError: no run can be resumed from it.
    """
    found = faults(checkpoint)
    if found == [UNSEALED] and not (found := _gaps(checkpoint)):
        logger.warning(f"{checkpoint} has no {MANIFEST}: whether its files are sound is unknown.")
    if found:
        inside = [path.name for path in numbered(checkpoint)]
        cure = f"It holds {', '.join(inside)}: name one of them." if inside else "Name another checkpoint, or 'last'."
        raise ConfigError(
            [f"resume_from_checkpoint={str(checkpoint)!r} is no sound checkpoint: {_listed(found)}. {cure}"]
        )
    _mention_strangers(checkpoint)
    return Sound(checkpoint)


def unsealed(checkpoint: Path) -> bool:
    """Whether it is whole, as far as can be told without a manifest."""
    return damage(checkpoint, hashes=False) == [UNSEALED] and not _gaps(checkpoint)


def faults(checkpoint: Path) -> list[str]:
    """What keeps a run from resuming from a sealed checkpoint, in words; [] if nothing does."""
    return damage(checkpoint) or _gaps(checkpoint, {"record of its run": (RECIPE_FILE,)})


def recorded_step(checkpoint: Path) -> int | None:
    """The step that a checkpoint's trainer state names."""
    try:
        step = json.loads((checkpoint / STATE).read_text())["global_step"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def _gaps(checkpoint: Path, further: Mapping[str, Sequence[str]] = MappingProxyType({})) -> list[str]:
    """What a checkpoint lacks of what transformers writes, and of `further` patterns of files."""
    step = recorded_step(checkpoint)
    if step is None:
        return [f"its {STATE} is missing or cannot be read"]
    found = [] if step_of(checkpoint) in (None, step) else [f"its {STATE} is that of step {step}"]
    patterns = {"random state": ("rng_*",), **further}
    if not any(path.is_dir() for path in checkpoint.iterdir()):  # else sharded, in the engine's own way
        patterns |= {"weights": WEIGHTS, "optimizer": ("optimizer.*",), "scheduler": ("scheduler.pt",)}
    for what, names in patterns.items():
        if not any(path.stat().st_size for name in names for path in checkpoint.glob(name)):
            found.append(f"it has no {what}")
    return found


def _mention_strangers(checkpoint: Path) -> None:
    content = read(checkpoint / MANIFEST)
    if isinstance(content, dict) and (extra := strangers(checkpoint, content["files"])):
        logger.warning(f"{checkpoint} holds files that are not of it, and that are not read: {', '.join(extra)}.")


def _listed(found: list[str]) -> str:
    rest = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + rest
