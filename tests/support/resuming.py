"""The checkpoint that a value of `resume_from_checkpoint` chooses."""

from pathlib import Path

from grpo_ext.config.resuming import FRESH_START, requested
from grpo_ext.trainer.checkpoints.choice import Sound, named, newest_sound


def checkpoint_to_resume(output_dir: Path, asked: object) -> Sound | None:
    request = requested(asked)
    if request is None:
        return newest_sound(output_dir)
    return None if request == FRESH_START else named(Path(str(asked)))
