"""A reward that notes what it scores, and in which thread, in a file of its process: runs are told apart by NOTED."""

import json
import os
import threading
from pathlib import Path

from support.tiny import spread as spread_of


def spread(completions, prompts, trainer_state, **_):
    """Scores as `tiny.spread`; appends a line to NOTED-rank-process.jsonl."""
    rank, line = os.environ.get("RANK", "0"), [threading.current_thread().name, trainer_state.global_step, prompts]
    with Path(f"{os.environ['NOTED']}-{rank}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return spread_of(completions)


def windows_scored(path: Path) -> list[tuple[int, str]]:
    """Windows that the background of a process has scored: the step in which each was asked for, and its prompts."""
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]  # the last may be cut
    notes = [json.loads(line) for line in lines]
    return [(step, json.dumps(prompts)) for thread, step, prompts in notes if thread == "grpo_ext background"]
