"""How a run starts: afresh, from a checkpoint, or not at all; decided once, for all processes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError
from grpo_ext.trainer.checkpoints.agreement import agreed, check_seen_by_all
from grpo_ext.trainer.checkpoints.choice import Sound, asks_afresh, checkpoint_to_resume
from grpo_ext.trainer.checkpoints.finish import already_done, check_can_go_on, move_aside
from grpo_ext.trainer.checkpoints.identity import changes_since
from grpo_ext.trainer.checkpoints.manifest import step_of
from grpo_ext.trainer.checkpoints.writing import recover

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """What was decided."""

    checkpoint: Sound | None = None
    """Where the run goes on from; None: from the beginning."""
    over: str | None = None
    """In words, that nothing is left to do."""


def beginning(args: GRPOExtConfig, here: Mapping[str, Any]) -> Beginning:
    """What a recipe's run starts from, before anything is loaded; nothing is moved yet.

    Raises:
        ConfigError: on all processes: the checkpoint that was asked for is damaged, or all are; it is of another run;
            some processes do not see it.
    """
    found = agreed(lambda: _beginning(Path(args.output_dir or "."), args.resume_from_checkpoint, here))
    if found.checkpoint is not None:
        check_seen_by_all(Path(found.checkpoint), same=not args.save_on_each_node)
    return found


def _beginning(output_dir: Path, asked: Any, here: Mapping[str, Any]) -> Beginning:
    if asks_afresh(asked):
        return Beginning()
    recover(output_dir)
    in_output_dir = not asked or not Path(str(asked)).is_dir()
    if in_output_dir and (over := already_done(output_dir, here)):
        return Beginning(over=over)
    checkpoint = checkpoint_to_resume(output_dir, asked)
    if checkpoint is None:
        check_can_go_on(output_dir, here)
        return Beginning()
    changes_since(checkpoint, here)
    _check_length(Path(checkpoint), here["max_steps"])
    return Beginning(checkpoint)


def _check_length(checkpoint: Path, max_steps: int) -> None:
    step = step_of(checkpoint)
    if step is not None and 0 < max_steps < step:
        raise ConfigError(
            [
                f"max_steps={max_steps}: {checkpoint} is already beyond it. Raise max_steps, name an earlier "
                "checkpoint by resume_from_checkpoint, or start afresh by --resume_from_checkpoint never."
            ]
        )


def make_room(args: GRPOExtConfig) -> str | None:
    """Before a fresh start that was asked for: the old run goes aside; in words, where."""
    return agreed(lambda: move_aside(Path(args.output_dir or ".")))


def start(args: GRPOExtConfig, asked: Any, here: Mapping[str, Any]) -> str | None:
    """What `trainer.train(resume_from_checkpoint=...)` goes on from; as transformers has it, True is the newest.

    Raises:
        ConfigError: as `beginning`; also if True finds nothing.
    """
    found = agreed(lambda: _start(Path(args.output_dir or "."), asked, here))
    if found is not None:
        check_seen_by_all(Path(found), same=not args.save_on_each_node)
    return found


def _start(output_dir: Path, asked: Any, here: Mapping[str, Any]) -> str | None:
    if asked is None or asked is False:
        recover(output_dir)
        return None
    found = asked
    if not isinstance(asked, Sound):
        recover(output_dir)
        found = checkpoint_to_resume(output_dir, None if asked is True else asked)
    if found is None:
        raise ConfigError(
            [f"resume_from_checkpoint=True: no checkpoint in {output_dir}. Leave it out to start afresh."]
        )
    since = changes_since(found, here)
    for sentence in since.sentences() if since is not None else ():
        logger.warning(sentence)
    return str(found)
