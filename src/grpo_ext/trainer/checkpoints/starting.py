"""How a run starts: from the beginning, from a checkpoint, or not at all; decided once, for all processes."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.resuming import ASIDE, FRESH_START, REQUEST_FILE, Request, noted, relative_to, requested
from grpo_ext.errors import ConfigError
from grpo_ext.trainer.checkpoints.agreement import agreed, check_seen_by_all
from grpo_ext.trainer.checkpoints.branches import Branch, branch_of, continued_by, last_order, new_branch
from grpo_ext.trainer.checkpoints.choice import Sound, named, newest_sound, numbered, recorded_step
from grpo_ext.trainer.checkpoints.finish import already_done, check_can_go_on, finished, move_aside
from grpo_ext.trainer.checkpoints.identity import changes_since
from grpo_ext.trainer.checkpoints.manifest import step_of, write_synced
from grpo_ext.trainer.checkpoints.writing import recover

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """Where a run starts, as all processes have decided."""

    checkpoint: Sound | None = None
    """The checkpoint that it resumes from; None: the beginning."""
    over: str | None = None
    """A message, where nothing is left to do."""
    request: Request | None = None
    """What is still to be carried out before the first step: see `make_room`."""
    repeated: str | None = None
    """A message, where the same command has been carried out before, so that the run continues what it began."""


def beginning(args: GRPOExtConfig, here: Mapping[str, Any]) -> Beginning:
    """Decide what a recipe's run starts from, before anything is loaded; nothing is moved yet.

    An explicit `resume_from_checkpoint` is carried out once: asked for again, the run continues what it began.

    Raises:
        ConfigError: on all processes: the checkpoint that was asked for is damaged, or all are; it is of another run;
            some processes do not see it.
    """
    found = agreed(lambda: _beginning(Path(args.output_dir or "."), args.resume_from_checkpoint, here))
    if found.checkpoint is not None:
        check_seen_by_all(Path(found.checkpoint), same=not args.save_on_each_node)
    return found


def _beginning(output_dir: Path, asked: Any, here: Mapping[str, Any]) -> Beginning:
    recover(output_dir)
    before, wanted = noted(output_dir), requested(asked)
    if wanted is None:
        return _continued(output_dir, before, here)
    if before is not None and before.asked == wanted:
        try:
            found = _continued(output_dir, before, here)
            return found if found.request else replace(found, repeated=_repeated(output_dir, asked))
        except ConfigError as error:  # a changed recipe, or nothing sound: what `never` is the cure of
            if not before.afresh:
                raise
            logger.warning(f"{error}\n--resume_from_checkpoint {FRESH_START} starts afresh.")
    checkpoint = None if wanted == FRESH_START else named(Path(str(asked)))
    return _checked(Beginning(checkpoint, request=_new_request(output_dir, wanted)), here)


def _continued(output_dir: Path, request: Request | None, here: Mapping[str, Any]) -> Beginning:
    """Continue what the last request began, or carry it out where no checkpoint has been written since."""
    since = request.order if request else 0
    if over := already_done(output_dir, here, request):
        return Beginning(over=over)
    if (checkpoint := _newest_begun(output_dir, request)) is not None:
        return _checked(Beginning(checkpoint), here)
    check_can_go_on(output_dir, since)
    if request is None or request.afresh:
        _check_empty(output_dir, request)
        return Beginning(request=request)
    return _checked(Beginning(named(Path(request.asked)), request=request), here)


def _check_empty(output_dir: Path, request: Request | None) -> None:
    """Raise where a fresh start has written no checkpoint and there are some all the same: somebody put them there."""
    if request is not None and request.moved and (there := numbered(output_dir)):
        raise ConfigError(
            [
                f"{output_dir} holds {', '.join(path.name for path in there)}, put there since "
                f"--resume_from_checkpoint {FRESH_START} moved everything aside. Delete {output_dir / REQUEST_FILE} "
                f"to resume from the newest sound one, or name one: --resume_from_checkpoint {there[0]}."
            ]
        )


def _newest_begun(output_dir: Path, request: Request | None) -> Sound | None:
    """The newest sound checkpoint that is not of a run, or a branch, that was to be left."""
    if request is None:
        return newest_sound(output_dir)
    beyond = -1 if request.afresh else step_of(Path(request.asked)) or -1
    return newest_sound(output_dir, request.order, beyond) if request.moved else None


def _checked(found: Beginning, here: Mapping[str, Any]) -> Beginning:
    """Raise where a run of these settings cannot start there."""
    if found.checkpoint is not None:
        changes_since(found.checkpoint, here)
        _check_length(Path(found.checkpoint), here["max_steps"])
    return found


def _check_length(checkpoint: Path, max_steps: int) -> None:
    step = step_of(checkpoint)
    if step is not None and 0 < max_steps < step:
        raise ConfigError(
            [
                f"max_steps={max_steps}: {checkpoint} is already beyond it. Raise max_steps, name an earlier "
                "checkpoint by resume_from_checkpoint, or start afresh by --resume_from_checkpoint never."
            ]
        )


def _repeated(output_dir: Path, asked: Any) -> str:
    return (
        f"--resume_from_checkpoint {asked} has been carried out before: the run continues what it began. To carry it "
        f"out again, delete {output_dir / REQUEST_FILE}."
    )


# Going back.


def _new_request(output_dir: Path, wanted: str) -> Request:
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    names = (f"{ASIDE}{stamp}{f'-{i}' if i else ''}" for i in range(1000))
    aside = next(name for name in names if not (output_dir / name).exists())
    return Request(wanted, _next_order(output_dir), aside)


def _next_order(output_dir: Path) -> int:
    """Larger than that of all that is in the folder."""
    before, ended = noted(output_dir), finished(output_dir) or {}
    return max(1 + last_order(numbered(output_dir)), 1 + ended.get("order", -1), before.order if before else 0)


def make_room(args: GRPOExtConfig, begin: Beginning) -> str | None:
    """Note what was asked for and move aside what does not lead to its checkpoint; in words, where to."""
    request = begin.request
    if request is None:
        return None
    return agreed(lambda: _carried_out(Path(args.output_dir or "."), request, begin.checkpoint))


def _carried_out(output_dir: Path, request: Request, checkpoint: str | None) -> str | None:
    """After a kill at any moment of this, each command finds the note, and has the rest done."""
    if request.moved:
        return None
    output_dir.mkdir(parents=True, exist_ok=True)
    _note(output_dir, request)
    kept = [] if checkpoint is None else _leading_to(Path(checkpoint), output_dir)
    moved = move_aside(output_dir, request.aside, kept, max((step_of(path) or 0 for path in kept), default=-1))
    _note(output_dir, replace(request, moved=True))
    if not moved:
        return None
    what = f"What did not lead to {checkpoint}" if kept else f"The run that was in {output_dir}"
    return f"{what} is now in {output_dir / request.aside}."


def _note(output_dir: Path, request: Request) -> None:
    write_synced(output_dir / REQUEST_FILE, json.dumps(asdict(request) | {"asked": relative_to(request, output_dir)}))


def _leading_to(checkpoint: Path, output_dir: Path) -> list[Path]:
    """The checkpoint, if it is in the folder, and those in the folder that it continues."""
    inside = checkpoint.absolute().parent == output_dir.absolute()
    if not inside and not (branch_of(checkpoint) or Branch()).id:
        return []  # of another folder, and without a record of its branch
    step = recorded_step(checkpoint) or 0
    return [path for path in numbered(output_dir) if continued_by(path, checkpoint, step)]


# Each start of the trainer.


def start(args: GRPOExtConfig, asked: Any, here: Mapping[str, Any]) -> tuple[str | None, Branch]:
    """What `trainer.train(resume_from_checkpoint=...)` resumes from, and the branch that it begins.

    As transformers has it, True is the newest checkpoint, and a path is gone back to each time.

    Raises:
        ConfigError: as `beginning`; also if True finds nothing.
    """
    found, branch = agreed(lambda: _start(Path(args.output_dir or "."), asked, here))
    if found is not None:
        check_seen_by_all(Path(found), same=not args.save_on_each_node)
    return found, branch


def _start(output_dir: Path, asked: Any, here: Mapping[str, Any]) -> tuple[str | None, Branch]:
    if asked is None or requested(asked) == FRESH_START:
        recover(output_dir)
        return None, new_branch(_next_order(output_dir))
    begin = Beginning(asked) if isinstance(asked, Sound) else _asked_by_a_script(output_dir, asked)
    if begin.checkpoint is None:
        raise ConfigError(
            [f"resume_from_checkpoint=True: no checkpoint in {output_dir}. Leave it out to start afresh."]
        )
    since = changes_since(begin.checkpoint, here)
    for sentence in since.sentences() if since is not None else ():
        logger.warning(sentence)
    if begin.request is not None and (moved := _carried_out(output_dir, begin.request, begin.checkpoint)):
        logger.warning(moved)
    checkpoint = Path(begin.checkpoint)
    return str(checkpoint), new_branch(_next_order(output_dir), checkpoint, recorded_step(checkpoint))


def _asked_by_a_script(output_dir: Path, asked: Any) -> Beginning:
    recover(output_dir)
    wanted, before = requested(asked), noted(output_dir)
    if wanted is not None:
        return Beginning(named(Path(str(asked))), request=_new_request(output_dir, wanted))
    found = _newest_begun(output_dir, before)
    if found is not None or before is None or before.afresh:
        return Beginning(found)
    return Beginning(named(Path(before.asked)), request=before)
