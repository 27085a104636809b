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
from grpo_ext.trainer.checkpoints.finish import already_done, check_can_start, finished, move_aside
from grpo_ext.trainer.checkpoints.identity import changes_since
from grpo_ext.trainer.checkpoints.manifest import (
    Branch,
    branch_of,
    continued_by,
    last_order,
    new_branch,
    step_of,
    write_synced,
)
from grpo_ext.trainer.checkpoints.processes import agreed, check_seen_by_all
from grpo_ext.trainer.checkpoints.writing import recover

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
    found = agreed(lambda: _beginning(Path(args.output_dir or "."), args.resume_from_checkpoint, here))
    if found.checkpoint is not None:
        check_seen_by_all(Path(found.checkpoint), same=not args.save_on_each_node)
    return found


def _beginning(output_dir: Path, asked: object, here: Mapping[str, Any]) -> Beginning:
    recover(output_dir)
    before, wanted = noted(output_dir), requested(asked)
    if wanted is None:
        return _continued(output_dir, before, here)
    if before is not None and before.asked == wanted:
        try:
            found = _continued(output_dir, before, here)
            return found if found.request else replace(found, repeated=_repeated(output_dir, asked))
        except ConfigError as error:  # a changed recipe or damaged checkpoints, which `never` cures
            if not before.afresh:
                raise
            logger.warning(f"{error}\n--resume_from_checkpoint {FRESH_START} starts from the beginning.")
    checkpoint = None if wanted == FRESH_START else named(Path(str(asked)))
    return _checked(Beginning(checkpoint, request=_new_request(output_dir, wanted)), here)


def _continued(output_dir: Path, request: Request | None, here: Mapping[str, Any]) -> Beginning:
    """Resume the run of the last request; carry the request out if no checkpoint has been written since."""
    since = request.order if request else 0
    if over := already_done(output_dir, here, request):
        return Beginning(over=over)
    if (checkpoint := _newest_begun(output_dir, request)) is not None:
        return _checked(Beginning(checkpoint), here)
    check_can_start(output_dir, since)
    if request is None or request.afresh:
        _check_empty(output_dir, request)
        return Beginning(request=request)
    return _checked(Beginning(named(Path(request.asked)), request=request), here)


def _check_empty(output_dir: Path, request: Request | None) -> None:
    """Raise if there are checkpoints although a fresh start has written none: somebody has put them there."""
    if request is not None and request.moved and (there := numbered(output_dir)):
        names = ", ".join(path.name for path in there)
        reason = f"{names} appeared there after --resume_from_checkpoint {FRESH_START} had moved everything aside"
        cure = (
            f"Delete {output_dir / REQUEST_FILE} to resume from the newest sound one, or name one: "
            f"--resume_from_checkpoint {there[0]}."
        )
        raise ConfigError([Problem("output_dir", str(output_dir), reason, cure)])


def _newest_begun(output_dir: Path, request: Request | None) -> Sound | None:
    """Return the newest sound checkpoint that is not of an abandoned run or branch."""
    if request is None:
        return newest_sound(output_dir)
    beyond = -1 if request.afresh else step_of(Path(request.asked)) or -1
    return newest_sound(output_dir, request.order, beyond) if request.moved else None


def _checked(found: Beginning, here: Mapping[str, Any]) -> Beginning:
    """Raise if a run with these settings cannot start there."""
    if found.checkpoint is not None:
        changes_since(found.checkpoint, here)
        _check_length(Path(found.checkpoint), here["max_steps"])
    return found


def _check_length(checkpoint: Path, max_steps: int) -> None:
    step = step_of(checkpoint)
    if step is not None and 0 < max_steps < step:
        cure = (
            "Raise max_steps, name an earlier checkpoint by resume_from_checkpoint, or start from the beginning by "
            "--resume_from_checkpoint never."
        )
        raise ConfigError([Problem("max_steps", max_steps, f"{checkpoint} is already beyond it", cure)])


def _repeated(output_dir: Path, asked: object) -> str:
    return (
        f"--resume_from_checkpoint {asked} was carried out by an earlier command: the run resumes. To carry it out "
        f"again, delete {output_dir / REQUEST_FILE}."
    )


# Going back.


def _new_request(output_dir: Path, wanted: str) -> Request:
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    names = (f"{ASIDE}{stamp}{f'-{i}' if i else ''}" for i in range(1000))
    aside = next(name for name in names if not (output_dir / name).exists())
    return Request(wanted, _next_order(output_dir), aside)


def _next_order(output_dir: Path) -> int:
    """Return an order larger than any in the folder."""
    before, ended = noted(output_dir), finished(output_dir) or {}
    return max(1 + last_order(numbered(output_dir)), 1 + ended.get("order", -1), before.order if before else 0)


def make_room(args: GRPOExtConfig, begin: Beginning) -> str | None:
    """Record the request and move aside all files that do not lead to its checkpoint; return a message about them."""
    request = begin.request
    if request is None:
        return None
    return agreed(lambda: _carried_out(Path(args.output_dir or "."), request, begin.checkpoint))


def _carried_out(output_dir: Path, request: Request, checkpoint: str | None) -> str | None:
    """Carry out a request; after a kill at any moment, the next command finds the record and does the rest."""
    if request.moved:
        return None
    output_dir.mkdir(parents=True, exist_ok=True)
    _note(output_dir, request)
    kept = [] if checkpoint is None else _leading_to(Path(checkpoint), output_dir)
    moved = move_aside(output_dir, request.aside, kept, max((step_of(path) or 0 for path in kept), default=-1))
    _note(output_dir, replace(request, moved=True))
    if not moved:
        return None
    what = f"Everything that did not lead to {checkpoint}" if kept else f"The run that was in {output_dir}"
    return f"{what} is now in {output_dir / request.aside}."


def _note(output_dir: Path, request: Request) -> None:
    write_synced(output_dir / REQUEST_FILE, json.dumps(asdict(request) | {"asked": relative_to(request, output_dir)}))


def _leading_to(checkpoint: Path, output_dir: Path) -> list[Path]:
    """Return the checkpoints of the folder that lead to this one, itself included."""
    inside = checkpoint.absolute().parent == output_dir.absolute()
    if not inside and not (branch_of(checkpoint) or Branch()).id:
        return []  # of another folder, and without a record of its branch
    step = recorded_step(checkpoint) or 0
    return [path for path in numbered(output_dir) if continued_by(path, checkpoint, step)]


# Each start of the trainer.


def start(args: GRPOExtConfig, asked: object, here: Mapping[str, Any]) -> tuple[str | None, Branch]:
    """Return the checkpoint that `trainer.train(resume_from_checkpoint=...)` resumes from, and its new branch.

    True means the newest checkpoint; a path is resumed from at each call, as in transformers.

    Raises:
        ConfigError: like `beginning`; also if True finds a folder without checkpoints.
    """
    found, branch = agreed(lambda: _start(Path(args.output_dir or "."), asked, here))
    if found is not None:
        check_seen_by_all(Path(found), same=not args.save_on_each_node)
    return found, branch


def _start(output_dir: Path, asked: object, here: Mapping[str, Any]) -> tuple[str | None, Branch]:
    if asked is None or requested(asked) == FRESH_START:
        recover(output_dir)
        return None, new_branch(_next_order(output_dir))
    begin = Beginning(asked) if isinstance(asked, Sound) else _asked_by_a_script(output_dir, asked)
    if begin.checkpoint is None:
        cure = "Leave it out to start from the beginning."
        raise ConfigError([Problem("resume_from_checkpoint", True, f"no checkpoint in {output_dir}", cure)])
    since = changes_since(begin.checkpoint, here)
    for sentence in since.sentences() if since is not None else ():
        logger.warning(sentence)
    if begin.request is not None and (moved := _carried_out(output_dir, begin.request, begin.checkpoint)):
        logger.warning(moved)
    checkpoint = Path(begin.checkpoint)
    return str(checkpoint), new_branch(_next_order(output_dir), checkpoint, recorded_step(checkpoint))


def _asked_by_a_script(output_dir: Path, asked: object) -> Beginning:
    recover(output_dir)
    wanted, before = requested(asked), noted(output_dir)
    if wanted is not None:
        return Beginning(named(Path(str(asked))), request=_new_request(output_dir, wanted))
    found = _newest_begun(output_dir, before)
    if found is not None or before is None or before.afresh:
        return Beginning(found)
    return Beginning(named(Path(before.asked)), request=before)
