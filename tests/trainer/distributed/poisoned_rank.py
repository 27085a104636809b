"""Two ranks, NaN or inf on rank 1 alone: `poisoned_rank.py MODEL OUTPUT`; the outcome of each case as JSON by rank."""

import json
import math
import os
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from grpo_ext.errors import NonFiniteError
from grpo_ext.train import leave_process_group
from support import poisoned, tiny
from support.trainers import weights

CASES = [(place, action, step) for place in poisoned.PLACES for action in ("stop", "skip") for step in (2, 4)]


def run(model: str, folder: Path, place: str, action: str, step: int) -> dict:
    value = math.nan if action == "stop" and place != "rewards" else math.inf  # a reward of NaN is not scored
    at = step - 1  # a generation is made every second step: for 1 and for 3
    rewards = [poisoned.bad_reward(value, rank=1, at=at)] if place == "rewards" else [tiny.count_a]
    trainer = poisoned.build(model, folder, rewards, on_nonfinite=action)
    if place != "rewards":
        trainer.arm(place, value=value, rank=1, step=step, micro_batch=2)
    error = ""
    try:
        trainer.train()
    except NonFiniteError as stopped:
        error = str(stopped)
    final = weights(trainer.model).double()
    return {
        "error": error,
        "step": trainer.state.global_step,
        "finite": bool(final.isfinite().all()),
        "weights": final.sum().item(),
        "log": [entry.get("nonfinite/skipped_steps") for entry in trainer.state.log_history if "loss" in entry],
    }


if __name__ == "__main__":
    output, outcomes = Path(sys.argv[2]), {}
    for case in CASES:
        name = "-".join(map(str, case))
        outcomes[name] = run(sys.argv[1], output / name, *case)
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
    leave_process_group()
