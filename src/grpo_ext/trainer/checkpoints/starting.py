"""Decide, once for all processes, how a run starts: at the beginning, from a checkpoint, or not at all."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.resuming import ASIDE, FRESH_START, REQUEST_FILE, Request, noted, relative_to, requested
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.trainer.checkpoints.choice import Sound, named, newest_sound, numbered, recorded_step
from grpo_ext.trainer.checkpoints.finish import already_done, check_can_start, move_aside
from grpo_ext.trainer.checkpoints.identity import changes_since
from grpo_ext.trainer.checkpoints.manifest import step_of, write_synced
from grpo_ext.trainer.checkpoints.processes import agreed, check_seen_by_all
from grpo_ext.trainer.checkpoints.writing import recover, unused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """Where a run starts.

    Attributes:
        checkpoint: the one that it resumes from; None: the beginning.
        over: a message if the run is complete.
        request: a request that `make_room` has to carry out before the first step.
        repeated: a message if the request was carried out by an earlier command, so that the run resumes.
    """

    checkpoint: Sound | None = None
    over: str | None = None
    request: Request | None = None
    repeated: str | None = None


def beginning(args: GRPOExtConfig, here: Mapping[str, Any]) -> Beginning:
    """Decide where a recipe's run starts, before anything is loaded or moved.

    An explicit `resume_from_checkpoint` is carried out once; with the same command again, the run resumes.

    Raises:
        ConfigError: the chosen checkpoint is damaged, or all are; it is of another run; some processes do not see it.
            Raised on all processes.
    """
    begin = agreed(lambda: _beginning(Path(args.output_dir or "."), args.resume_from_checkpoint, here))
    if begin.checkpoint is not None:
        check_seen_by_all(Path(begin.checkpoint), same=not args.save_on_each_node)
    return begin


def _beginning(output_dir: Path, resume_from: object, here: Mapping[str, Any]) -> Beginning:
    recover(output_dir)
    before, wanted = noted(output_dir), requested(resume_from)
    if wanted is None:
        return _continued(output_dir, here)
    if before is not None and before.asked == wanted:
        try:
            repeated = (
                f"--resume_from_checkpoint {resume_from} was carried out by an earlier command: the run resumes. To "
                f"carry it out again, delete {output_dir / REQUEST_FILE}."
            )
            return replace(_continued(output_dir, here), repeated=repeated)
        except ConfigError as error:  # a changed recipe or damaged checkpoints, which `never` cures
            if not before.afresh:
                raise
            logger.warning(f"{error}\n--resume_from_checkpoint {FRESH_START} starts from the beginning.")
    return _checked(_going_back(output_dir, wanted), here)


def _continued(output_dir: Path, here: Mapping[str, Any]) -> Beginning:
    """Resume the run that is in the folder, or begin it."""
    if over := already_done(output_dir, here):
        return Beginning(over=over)
    check_can_start(output_dir)
    return _checked(Beginning(_newest(output_dir)), here)


def _newest(output_dir: Path) -> Sound | None:
    """Return the newest sound checkpoint, or the one that the run went back to if none was written since."""
    before = noted(output_dir)
    if before is None or before.afresh or numbered(output_dir, before.step):
        return newest_sound(output_dir)
    return named(Path(before.asked))


def _checked(begin: Beginning, here: Mapping[str, Any]) -> Beginning:
    """Raise if a run with these settings cannot start there."""
    if begin.checkpoint is None:
        return begin
    changes_since(begin.checkpoint, here)
    step, max_steps = step_of(Path(begin.checkpoint)), here["max_steps"]
    if step is not None and 0 < max_steps < step:
        cure = (
            "Raise max_steps, name an earlier checkpoint by resume_from_checkpoint, or start from the beginning by "
            "--resume_from_checkpoint never."
        )
        raise ConfigError([Problem("max_steps", max_steps, f"{begin.checkpoint} is already beyond it", cure)])
    return begin


# Going back.


def _going_back(output_dir: Path, wanted: str) -> Beginning:
    """Return a beginning at `wanted`, with the request to move aside what is newer."""
    checkpoint, step = None if wanted == FRESH_START else named(Path(wanted)), -1
    if checkpoint is not None:
        folder = Path(checkpoint)
        if output_dir.resolve() in (
            folder.parent.resolve(),
            folder.resolve().parent,
        ):  # of this folder, also by a link
            step = recorded_step(folder) or -1
    return Beginning(checkpoint, request=Request(wanted, step))


def make_room(args: GRPOExtConfig, begin: Beginning) -> str | None:
    """Record the request and move aside what is newer than its checkpoint; return a message about it."""
    request = begin.request
    return None if request is None else agreed(lambda: _carried_out(Path(args.output_dir or "."), request))


def _carried_out(output_dir: Path, request: Request) -> str | None:
    """Carry out a request, then record it: after a kill, the same command moves the rest."""
    output_dir.mkdir(parents=True, exist_ok=True)
    aside = unused(output_dir / f"{ASIDE}{time.strftime('%Y-%m-%dT%H-%M-%SZ', time.gmtime())}").name
    moved = move_aside(output_dir, aside, request.step)
    write_synced(output_dir / REQUEST_FILE, json.dumps(asdict(request) | {"asked": relative_to(request, output_dir)}))
    what = f"What is newer than {request.asked}" if request.step >= 0 else f"The run that was in {output_dir}"
    return f"{what} is now in {output_dir / aside}." if moved else None


# Each start of the trainer.


def start(args: GRPOExtConfig, resume_from: object, here: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that `trainer.train(resume_from_checkpoint=...)` resumes from.

    True means the newest checkpoint. A path, or None for the beginning, is gone back to at each call.

    Raises:
        ConfigError: like `beginning`; also if True finds a folder without checkpoints.
    """
    checkpoint = agreed(lambda: _start(Path(args.output_dir or "."), resume_from, here))
    if checkpoint is not None:
        check_seen_by_all(Path(checkpoint), same=not args.save_on_each_node)
    return checkpoint


def _start(output_dir: Path, resume_from: object, here: Mapping[str, Any]) -> str | None:
    begin = Beginning(resume_from) if isinstance(resume_from, Sound) else _begin_for_script(output_dir, resume_from)
    since = None if begin.checkpoint is None else changes_since(begin.checkpoint, here)
    for sentence in since.sentences() if since is not None else ():
        logger.warning(sentence)
    if begin.request is not None and (moved := _carried_out(output_dir, begin.request)):
        logger.warning(moved)
    return None if begin.checkpoint is None else str(begin.checkpoint)


def _begin_for_script(output_dir: Path, resume_from: object) -> Beginning:
    recover(output_dir)
    wanted = requested(resume_from)
    if resume_from is None or wanted == FRESH_START:
        return _going_back(output_dir, FRESH_START) if numbered(output_dir) else Beginning()
    begin = Beginning(_newest(output_dir)) if wanted is None else _going_back(output_dir, wanted)
    if begin.checkpoint is None:
        cure = "Leave it out to start from the beginning."
        raise ConfigError([Problem("resume_from_checkpoint", True, f"no checkpoint in {output_dir}", cure)])
    return begin
