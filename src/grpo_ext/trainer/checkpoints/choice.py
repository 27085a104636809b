"""Which checkpoint a run goes on from: the newest that is sound, or the one that was asked for, if it is."""

import json
import logging
from pathlib import Path

from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from grpo_ext.config.run import AFRESH, FRESH_START, LAST
from grpo_ext.errors import ConfigError
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


def asks_afresh(asked: object) -> bool:
    """Whether `resume_from_checkpoint` says to ignore the checkpoints in output_dir."""
    return str(asked).lower() in AFRESH


def checkpoint_to_resume(output_dir: Path, asked: object) -> Sound | None:
    """The checkpoint to go on from: the one `asked` for, else the newest sound one in `output_dir`.

    Raises:
        ConfigError: the one that was asked for is damaged, or all are.
    """
    if asks_afresh(asked):
        return None
    if asked and str(asked).lower() not in LAST:
        return named(Path(str(asked)))
    return newest_sound(output_dir)


def numbered(output_dir: Path) -> list[Path]:
    """Everything in the folder that is called `checkpoint-N`, newest first."""
    found = [path for path in output_dir.iterdir() if step_of(path) is not None] if output_dir.is_dir() else []
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def newest_sound(output_dir: Path) -> Sound | None:
    """The newest sound checkpoint in the folder, and a warning for each newer one; None if there are none at all.

    Raises:
        ConfigError: there are some, and all are damaged.
    """
    damaged: list[str] = []
    for path in numbered(output_dir):
        if not (found := damage(path)):
            for message in damaged:
                logger.warning(f"{message} It is passed over.")
            _mention_strangers(path)
            return Sound(path)
        damaged.append(f"{path} is damaged: {_listed(found)}.")
    if not damaged:
        return None
    whole = [f"--resume_from_checkpoint {path} takes it as it is." for path in numbered(output_dir) if unsealed(path)]
    cure = f"--resume_from_checkpoint {FRESH_START} moves the old run aside and starts afresh."
    raise ConfigError([*damaged, " ".join([f"No sound checkpoint in {output_dir}.", *whole[:1], cure])])


def named(checkpoint: Path) -> Sound:
    """A checkpoint that was asked for by its path; one without a manifest, such as plain TRL's, with a warning.

    Raises:
        ConfigError: it cannot be gone on from.
    """
    found = damage(checkpoint)
    if found == [UNSEALED] and not (found := _gaps(checkpoint)):
        logger.warning(f"{checkpoint} has no {MANIFEST}, so that nobody can tell whether its files are sound.")
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


def _gaps(checkpoint: Path) -> list[str]:
    """What a checkpoint without a manifest lacks of what plain transformers writes."""
    try:
        step = json.loads((checkpoint / STATE).read_text())["global_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return [f"its {STATE} is missing or cannot be read"]
    found = [] if step_of(checkpoint) in (None, step) else [f"its {STATE} is that of step {step}"]
    if any(path.is_dir() for path in checkpoint.iterdir()):  # sharded, in the engine's own way
        return found
    patterns = {
        "weights": WEIGHTS,
        "optimizer": ("optimizer.*",),
        "scheduler": ("scheduler.pt",),
        "random state": ("rng_*",),
    }
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
