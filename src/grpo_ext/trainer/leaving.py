"""How a run ends before its end: after a step of all processes, with a checkpoint; or for want of a process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistBackendError, DistError

from grpo_ext.config.launch import rank
from grpo_ext.errors import RankLost, RunInterrupted
from grpo_ext.trainer.signals import name, say

_OF_A_LOST_RANK = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "broken pipe",
    "connection refused",
)

_IN_A_SCRIPT = "Call train(resume_from_checkpoint=True) to resume."


def leave_after_this_step(trainer: Any) -> None:
    """Have transformers' loop save and stop, once; an evaluation that is due would outlast a grace period."""
    control, step = trainer.control, trainer.state.global_step
    control.should_save = trainer._left_at != step  # the end of an epoch comes here a second time
    control.should_evaluate = False
    control.should_training_stop = True
    trainer._left_at = step


def interrupted(trainer: Any) -> RunInterrupted:
    """What ends the run, after the line that says what was saved."""
    state = trainer.state
    again = "Run the same command to resume." if trainer.recipe_record else _IN_A_SCRIPT
    line = (
        f"{name(trainer._guard.requested)}: saved checkpoint-{state.global_step} of {state.max_steps} steps. {again}"
    )
    if trainer.accelerator.is_main_process:
        say(line)
    return RunInterrupted(line)


@contextmanager
def told_of_lost_ranks(args: Any) -> Iterator[None]:
    """Name the cause where a collective fails because another process is gone or does not come.

    Raises:
        RankLost: it is, or did not.
    """
    try:
        yield
    except (DistError, RuntimeError) as error:
        text = str(error)
        of_gloo = "gloo" in text.lower() or isinstance(error, DistError | DistBackendError)
        if args.world_size == 1 or not of_gloo or not any(words in text.lower() for words in _OF_A_LOST_RANK):
            raise
        raise RankLost(
            f"Rank {rank()} has lost another process: one was killed or stopped, hangs, or its machine is gone, and "
            f"ddp_timeout={args.ddp_timeout} s have passed or its connection closed ({text.splitlines()[0][:200]}). "
            "The run goes on from its last checkpoint by the same command; raise ddp_timeout where a step may really "
            "wait that long."
        ) from error
