"""A run that records and one that trains on the recordings, by accelerate: `replay_rank.py MODEL OUTPUT`."""

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from accelerate import PartialState

from grpo_ext.train import leave_process_group
from support.trainers import build, scripted_rollout, weights

SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_steps": 2,
    "learning_rate": 0.02,
    "save_strategy": "steps",
    "save_only_model": True,
    "save_steps": 1,
    "loss_type": "dapo",
    "beta": 0.1,
}

if __name__ == "__main__":
    model, output = sys.argv[1], Path(sys.argv[2])
    ends = {}
    for name, own in {
        "run": {"record_batches": 1},
        "again": {"replay_batches": str(output / "run" / "batches")},
    }.items():
        trainer = build(model, output / name, rollout=scripted_rollout, rows=64, **SETTINGS, **own)
        trainer.train()
        ends[name] = weights(trainer.model), [row for row in trainer.state.log_history if "loss" in row]
    if PartialState().is_main_process:
        equal = torch.equal(ends["run"][0], ends["again"][0])
        (output / "found.json").write_text(json.dumps({"equal": equal, "log": ends["run"][1]}))
    leave_process_group()
