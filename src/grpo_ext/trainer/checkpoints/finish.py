"""The end of a run: its model beside `finished.json`, and how a run that is left makes room for another."""

import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from grpo_ext.config.resuming import FRESH_START, REQUEST_FILE, Request
from grpo_ext.errors import ConfigError
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE, WEIGHTS, numbered
from grpo_ext.trainer.checkpoints.identity import changes
from grpo_ext.trainer.checkpoints.manifest import changes as changed_files
from grpo_ext.trainer.checkpoints.manifest import entries, files_in, sync, write_synced, wrong_entry

logger = logging.getLogger(__name__)

FINISHED_FILE = "finished.json"
METRICS_FILE = "metrics.jsonl"
CARD = "README.md"
"""The model card, which a person may go on to write."""
RECORDS = ("evaluation", "completions", "batches", "failures", "reward_failures")
"""Folders in output_dir with files, or folders, of a step."""
_OF_A_STEP = re.compile(r"(?:step_?|completions_)(\d+)")

_KINDS = {"step": int, "files": dict, "recipe": dict}


def finished(output_dir: Path, since: int = 0) -> dict[str, Any] | None:
    """What `finished.json` records, if it is there, can be read, and is of a branch of the order `since` or later."""
    path = output_dir / FINISHED_FILE
    try:
        content = json.loads(path.read_text())
        reason = _malformed(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = f"cannot be read ({error})"
    if reason is not None:
        logger.warning(f"{path} {reason}. The run counts as not finished.")
        return None
    return dict(content) if since <= content.get("order", 0) else None


def _malformed(content: Any) -> str | None:
    known = isinstance(content, dict) and all(isinstance(content.get(key), kind) for key, kind in _KINDS.items())
    lengths = [content["recipe"].get(key) for key in ("max_steps", "num_train_epochs")] if known else []
    if not known or not all(isinstance(number, int | float) for number in (content.get("order", 0), *lengths)):
        return "is not the record of a run"
    return wrong_entry(content["files"])


def already_done(output_dir: Path, here: Mapping[str, Any], request: Request | None = None) -> str | None:
    """A message if this run is over and its model sound; None if there is something left to do.

    Args:
        output_dir: of the run.
        here: the run's record.
        request: what was asked for last; an end from before it does not count.

    Raises:
        ConfigError: another run than this one has finished here.
    """
    content = finished(output_dir, request.order if request else 0)
    if content is None:
        return None
    since = changes(content["recipe"], here)
    if since.harmful:
        raise since.refusal(output_dir)
    if _goes_further(content, here) or changed_files(output_dir, content["files"]):
        return None
    return "\n".join([*since.sentences(), _over(output_dir, content, request)])


def _over(output_dir: Path, content: Mapping[str, Any], request: Request | None) -> str:
    again = f"--resume_from_checkpoint {FRESH_START}"
    if request is not None and request.afresh:
        again = f"delete {output_dir / REQUEST_FILE} and use {again}"
    return (
        f"This run is finished: {content['step']} steps, model in {output_dir}. Nothing is trained. To continue it, "
        f"raise max_steps (or num_train_epochs); to start afresh, {again}, or set another output_dir."
    )


def _goes_further(content: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    there = content["recipe"]
    if here["max_steps"] > 0:
        return bool(here["max_steps"] > content["step"])
    return bool(there["max_steps"] > 0 or here["num_train_epochs"] > there["num_train_epochs"])


def check_can_go_on(output_dir: Path, since: int = 0) -> None:
    """Refuse to begin again where a run of the order `since` or later finished and no checkpoint is left.

    Raises:
        ConfigError: it would begin again, over its own model or after the model was lost.
    """
    content = finished(output_dir, since)
    if content is None:
        return
    ways = [
        f"--resume_from_checkpoint {FRESH_START}, which moves the old run aside and starts afresh",
        "or set another output_dir",
    ]
    if holds_weights(output_dir):
        ways[1] += f" (with model_name_or_path: {output_dir} there, training begins from its weights)"
        left = "left no checkpoint to go on from"
    else:
        left = "whose model and checkpoints are gone"
    raise ConfigError(
        [
            f"output_dir={str(output_dir)!r} holds a run that finished at step {content['step']} and {left}. "
            f"Use {', '.join(ways)}."
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
        if _lies_in(output_dir, name):
            (output_dir / name).unlink(missing_ok=True)
    sync(output_dir)
    return names


def _lies_in(output_dir: Path, name: str) -> bool:
    """Whether a file lies in the folder, also where one of the folders between is a link."""
    return (output_dir / name).parent.resolve().is_relative_to(output_dir.resolve())


def write_finished(output_dir: Path, names: list[str], recipe: Mapping[str, Any], **facts: Any) -> None:
    """Say, last of all, that the run is over, and which files are its model."""
    model = [name for name in names if name != CARD]
    content = {**facts, "files": entries(output_dir, model), "recipe": dict(recipe)}
    write_synced(output_dir / FINISHED_FILE, json.dumps(content, indent=1))


def move_aside(output_dir: Path, aside: str, kept: Collection[Path] = (), step: int = -1) -> bool:
    """Move a run's checkpoints but those `kept`, its model, its log and what it recorded after `step`.

    After a kill in its midst, a second call moves the rest. `finished.json`, which names the model's files, is last.

    Returns:
        whether there was anything to move.
    """
    checkpoints = [path for path in numbered(output_dir) if path not in kept]
    content = finished(output_dir) or {"files": {}}
    ended = [path for path in (output_dir / FINISHED_FILE,) if os.path.lexists(path)]
    if kept and not checkpoints and not ended:
        return False
    names = dict.fromkeys([*content["files"], OBJECTIVE_FILE, METRICS_FILE, CARD])
    beside = [output_dir / name for name in names if (output_dir / name).exists() and _lies_in(output_dir, name)]
    found = (*beside, *_recorded_after(step, output_dir), *checkpoints, *ended)
    moved = [path for path in found if _moved(path, output_dir / aside, output_dir)]
    if moved:
        sync(output_dir / aside)
        sync(output_dir)
    return bool(moved)


def _recorded_after(step: int, output_dir: Path) -> list[Path]:
    """Evaluations, completions and batches of later steps: a run that reaches these steps again has others."""
    found = [path for folder in RECORDS for path in (output_dir / folder).rglob("*")]
    steps = {path: _OF_A_STEP.match(path.name) for path in found}
    return sorted(path for path, match in steps.items() if match and int(match[1]) > step)


def _moved(path: Path, aside: Path, output_dir: Path) -> bool:
    place = aside / path.relative_to(output_dir)
    if os.path.lexists(place):  # moved before a kill; what is here now was written since
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    path.rename(place)
    return True
