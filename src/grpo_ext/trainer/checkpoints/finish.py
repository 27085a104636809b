"""The end of a run: its model and `finished.json`; and moving aside what is newer than a step."""

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_ext.config.resuming import FRESH_START, REQUEST_FILE, noted
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.safe_reading import read_json
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE, WEIGHTS, numbered
from grpo_ext.trainer.checkpoints.identity import changes
from grpo_ext.trainer.checkpoints.manifest import changes as changed_files
from grpo_ext.trainer.checkpoints.manifest import entries, files_in, share, sync, write_synced, wrong_entry

logger = logging.getLogger(__name__)

FINISHED_FILE = "finished.json"
METRICS_FILE = "metrics.jsonl"
CARD = "README.md"
"""The model card, which a person may edit later."""
RECORDS = ("evaluation", "completions", "failures", "reward_failures")
"""Folders in output_dir that hold files or folders for each step."""
_OF_A_STEP = re.compile(r"(?:step_?|completions_)(\d+)")

_KINDS = {"step": int, "files": dict, "recipe": dict}


def finished(output_dir: Path) -> dict[str, Any] | None:
    """Return the content of `finished.json`, if it is readable."""
    path = output_dir / FINISHED_FILE
    try:
        content = read_json(path)
        reason = _malformed(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({error})"
    if reason is not None:
        logger.warning(f"{path} {reason}. The run counts as not finished.")
        return None
    return dict(content)


def _malformed(content: Any) -> str | None:
    is_record = isinstance(content, dict) and all(isinstance(content.get(key), kind) for key, kind in _KINDS.items())
    lengths = [content["recipe"].get(key) for key in ("max_steps", "num_train_epochs")] if is_record else []
    if not is_record or not all(isinstance(number, int | float) for number in lengths):
        return "is not the record of a run"
    return wrong_entry(content["files"])


def already_done(output_dir: Path, here: Mapping[str, Any]) -> str | None:
    """Return a message if this run is complete and its model sound; None if there is something left to do.

    Raises:
        ConfigError: another run has finished here.
    """
    content = finished(output_dir)
    if content is None:
        return None
    since = changes(content["recipe"], here)
    if since.refused:
        raise since.refusal(output_dir)
    if _goes_further(content, here) or changed_files(output_dir, content["files"]):
        return None
    return "\n".join([*since.sentences(), _over(output_dir, content)])


def _over(output_dir: Path, content: Mapping[str, Any]) -> str:
    again, request = f"--resume_from_checkpoint {FRESH_START}", noted(output_dir)
    if request is not None and request.afresh:
        again = f"delete {output_dir / REQUEST_FILE} and use {again}"
    return (
        f"This run is finished: {content['step']} steps, model in {output_dir}. All steps are done. To continue, "
        f"raise max_steps (or num_train_epochs); to start from the beginning, {again}, or set another output_dir."
    )


def _goes_further(content: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    there = content["recipe"]
    if here["max_steps"] > 0:
        return bool(here["max_steps"] > content["step"])
    return bool(there["max_steps"] > 0 or here["num_train_epochs"] > there["num_train_epochs"])


def check_can_start(output_dir: Path) -> None:
    """Refuse to start over where a run has finished and left no checkpoint.

    Raises:
        ConfigError: it would overwrite its own model, or the model was lost.
    """
    content = finished(output_dir)
    if content is None or numbered(output_dir):
        return
    start, left = "", "its model and checkpoints are gone"
    if holds_weights(output_dir):
        start = f" (with model_name_or_path: {output_dir} there, training begins from its weights)"
        left = "it left no checkpoint to resume from"
    reason = f"a run finished there at step {content['step']}, and {left}"
    cure = (
        f"Use --resume_from_checkpoint {FRESH_START}, which moves the old run aside and starts from the beginning, or "
        f"set another output_dir{start}."
    )
    raise ConfigError([Problem("output_dir", str(output_dir), reason, cure)])


def holds_weights(folder: Path) -> bool:
    """Return whether a folder has a complete model."""
    return any((folder / name).is_file() and (folder / name).stat().st_size for name in WEIGHTS)


def publish(folder: Path, output_dir: Path) -> list[str]:
    """Move a model, file by file, from `folder` to `output_dir`; return the names of its files."""
    names = files_in(folder)
    share(folder / name for name in names)
    before = finished(output_dir) or {"files": {}}
    (output_dir / FINISHED_FILE).unlink(missing_ok=True)
    for name in names:
        target = output_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        sync(folder / name)
        (folder / name).replace(target)
    for name in set(before["files"]) - set(names):
        if _lies_in(output_dir, name):
            (output_dir / name).unlink(missing_ok=True)
    sync(output_dir)
    return names


def _lies_in(output_dir: Path, name: str) -> bool:
    """Return whether a file is inside the folder, with links resolved."""
    return (output_dir / name).parent.resolve().is_relative_to(output_dir.resolve())


def write_finished(output_dir: Path, names: list[str], recipe: Mapping[str, object], **facts: int) -> None:
    """Record that the run is complete, with the files of its model."""
    model = [name for name in names if name != CARD]
    content = {**facts, "files": entries(output_dir, model), "recipe": dict(recipe)}
    write_synced(output_dir / FINISHED_FILE, json.dumps(content, indent=1))


def move_aside(output_dir: Path, aside: str, step: int = -1) -> bool:
    """Move a run's checkpoints and records after `step`, its model and its log.

    If this is killed, a second call moves the rest: `finished.json`, which lists the model's files, is moved last.

    Returns:
        True if there was anything to move.
    """
    checkpoints = numbered(output_dir, step)
    content = finished(output_dir) or {"files": {}}
    ended = [path for path in (output_dir / FINISHED_FILE,) if os.path.lexists(path)]
    if step >= 0 and not checkpoints and not ended:
        return False
    names = dict.fromkeys([*content["files"], OBJECTIVE_FILE, METRICS_FILE, CARD])
    beside = [output_dir / name for name in names if (output_dir / name).exists() and _lies_in(output_dir, name)]
    paths = (*beside, *_recorded_after(step, output_dir), *checkpoints, *ended)
    for path in paths:
        place = output_dir / aside / path.relative_to(output_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    if paths:
        sync(output_dir / aside)
        sync(output_dir)
    return bool(paths)


def _recorded_after(step: int, output_dir: Path) -> list[Path]:
    """Return evaluations, completions and failures of later steps, which the run will write again."""
    paths = [path for folder in RECORDS for path in (output_dir / folder).rglob("*")]
    steps = {path: _OF_A_STEP.match(path.name) for path in paths}
    return sorted(path for path, match in steps.items() if match and int(match[1]) > step)
