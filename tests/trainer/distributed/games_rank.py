"""Games of training and evaluation, and evaluation sets: `games_rank.py MODEL OUTPUT`; the same on any processes."""

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.evaluation.evaluate import evaluate
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.train import leave_process_group
from support import tiny, trainers
from support.dealt import AT_A_TIME, LIMITS, SAMPLES, dealing, rows

SET = EvalSet("held_out", rewards=(RewardSpec("length", "support.tiny:length"),), samples=SAMPLES, threshold=0.4)
PLAYED = replace(SET, name="played", rewards=(), plays=True)


def main(model: str, output: str) -> None:
    world, rank, folder = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0"), Path(output)
    settings = {"per_device_train_batch_size": 16 // world, "per_device_eval_batch_size": 8 // world}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "max_completion_length": 24}
    settings |= {"dynamic_sampling": "environment", "dynamic_sampling_max_rounds": 2}
    one = dealing(folder / "run", 7, 64, tiny.load(model, torch.float64), **settings)
    one.train()
    torch.save(one.dealt, folder / f"dealt_{rank}.pt")

    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": SAMPLES * AT_A_TIME}
    plain = trainers.build(tiny.load(model, torch.float64), folder / "plain", **sizes)
    plays = dealing(folder / "plays", model=tiny.load(model, torch.float64), **sizes)
    for limit in LIMITS:
        for trainer, chosen, data in ((plain, SET, list(tiny.prompts(limit))), (plays, PLAYED, rows(limit))):
            kept = folder / f"{chosen.name}_{limit}.jsonl"
            evaluate(trainer, chosen, data, kept=kept, identity={}, workers=0)
    plays.close_rewards()
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
