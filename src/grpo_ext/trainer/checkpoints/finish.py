"""The end of a run: its model beside `finished.json`, and how a run that is over makes room for another."""

import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE, WEIGHTS, numbered
from grpo_ext.trainer.checkpoints.identity import changes
from grpo_ext.trainer.checkpoints.manifest import changes as changed_files
from grpo_ext.trainer.checkpoints.manifest import entries, files_in, sync, write_synced
from grpo_ext.trainer.metrics_file import METRICS_FILE

logger = logging.getLogger(__name__)

FINISHED_FILE = "finished.json"
CARD = "README.md"
"""The model card, which a person may go on to write."""
ASIDE = "_before-"
"""Folders of elder runs begin with it; what begins with `_` transformers never pushes to the hub."""

_KINDS = {"step": int, "files": dict, "recipe": dict}


def finished(output_dir: Path) -> dict[str, Any] | None:
    """What `finished.json` says, if it is there and can be read."""
    path = output_dir / FINISHED_FILE
    try:
        content = json.loads(path.read_text())
        if all(isinstance(content[key], kind) for key, kind in _KINDS.items()):
            return dict(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        pass
    logger.warning(f"{path} cannot be read: the run counts as not finished.")
    return None


def already_done(output_dir: Path, here: Mapping[str, Any]) -> str | None:
    """In words, that this run is over and its model sound; None if there is something left to do.

    Raises:
        ConfigError: another run than this one has finished here.
    """
    content = finished(output_dir)
    if content is None:
        return None
    since = changes(content["recipe"], here)
    if since.harmful:
        raise since.refusal(output_dir)
    if _goes_further(content, here) or changed_files(output_dir, content["files"]):
        return None
    return "\n".join([*since.sentences(), _over(output_dir, content)])


def _over(output_dir: Path, content: Mapping[str, Any]) -> str:
    return (
        f"This run is finished: {content['step']} steps, model in {output_dir}. Nothing is trained. To go on, raise "
        "max_steps (or num_train_epochs); to start afresh, --resume_from_checkpoint never, or another output_dir."
    )


def _goes_further(content: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    there = content["recipe"]
    if here["max_steps"] > 0:
        return bool(here["max_steps"] > content["step"])
    return bool(there["max_steps"] > 0 or here["num_train_epochs"] > there["num_train_epochs"])


def check_can_go_on(output_dir: Path, here: Mapping[str, Any]) -> None:
    """A run that is finished, has no checkpoint, and is asked for more or has had its model changed by hand.

    Raises:
        ConfigError: it would begin again, over its own model.
    """
    content = finished(output_dir)
    if content is not None and (_goes_further(content, here) or holds_weights(output_dir)):
        raise ConfigError(
            [
                f"output_dir={str(output_dir)!r} holds a run that finished at step {content['step']} and left no "
                "checkpoint to go on from. Set another output_dir (with model_name_or_path: "
                f"{output_dir} there, training begins from its weights), or --resume_from_checkpoint never, which "
                "moves the old run aside and starts afresh."
            ]
        )


def holds_weights(folder: Path) -> bool:
    """Whether a model was saved whole there."""
    return any((folder / name).is_file() and (folder / name).stat().st_size for name in WEIGHTS)


def publish(folder: Path, output_dir: Path) -> list[str]:
    """Move a model, file by file, to where the run's user looks for it; returns the names of its files."""
    names = files_in(folder)
    before = finished(output_dir) or {"files": {}}
    (output_dir / FINISHED_FILE).unlink(missing_ok=True)
    for name in names:
        target = output_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        sync(folder / name)
        (folder / name).replace(target)
    for name in set(before["files"]) - set(names):
        (output_dir / name).unlink(missing_ok=True)
    sync(output_dir)
    return names


def write_finished(output_dir: Path, names: list[str], recipe: Mapping[str, Any], **facts: Any) -> None:
    """Say, last of all, that the run is over, and which files are its model."""
    model = [name for name in names if name != CARD]
    content = {**facts, "files": entries(output_dir, model), "recipe": dict(recipe)}
    write_synced(output_dir / FINISHED_FILE, json.dumps(content, indent=1))


def move_aside(output_dir: Path) -> str | None:
    """Put what an elder run left (checkpoints, model, `finished.json`) into a folder of its own; in words, where."""
    content = finished(output_dir) or {"files": {}}
    own = [*content["files"], OBJECTIVE_FILE, METRICS_FILE, FINISHED_FILE, CARD]
    found = [*numbered(output_dir), *(p for name in dict.fromkeys(own) if (p := output_dir / name).exists())]
    if not found:
        return None
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    target = next(t for i in range(1000) if not (t := output_dir / f"{ASIDE}{stamp}{f'-{i}' if i else ''}").exists())
    for path in found:
        place = target / path.relative_to(output_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)
    sync(output_dir)
    return f"The run that was in {output_dir} is now in {target}."
