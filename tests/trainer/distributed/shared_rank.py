"""Steps with shared prompts, run by accelerate: `shared_rank.py MODEL OUTPUT ROWS_PER_DEVICE SHARED_PREFIX`."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from grpo_ext.train import leave_process_group
from support.float64 import FLOAT64, float64_throughout
from support.fsdp_on_cpu import is_sharded, make_fsdp_real
from support.trainers import build, scripted_rollout, scripted_trajectories, unit_interval

CASES = {
    "whole groups": {"beta": 0.05, "entropy_coef": 0.01},
    "silent groups": {"beta": 0.0},
    "groups over two micro-batches": {"beta": 0.05, "gradient_accumulation_steps": 2},
    "trajectories": {"beta": 0.05, "advantage_estimator": "gigpo", "mask_truncated_completions": True},
    "trajectories as rows": {"beta": 0.05, "shared_prefix": "false", "gradient_accumulation_steps": 4},
}


def half_silent(prompts, completions, **_):
    """No signal for every other prompt."""
    scores = unit_interval(completions)
    return [score * (int(prompt.rstrip(":")[1:]) % 2) for prompt, score in zip(prompts, scores, strict=True)]


def by_turn(trajectory, **_):
    return [[turn.reward for turn in made.turns] for made in trajectory]


def counted(sharing):
    """Numbers of forwards for a micro-batch: this process's own, and the largest of all."""
    forwards, agreed = [], sharing.agreed
    if agreed is not None:
        sharing.agreed = lambda count: forwards.append((count, agreed(count))) or forwards[-1][1]
    return forwards


@float64_throughout()
def main(model: str, output: str, rows: str, shared: str) -> None:
    make_fsdp_real()
    for name, settings in CASES.items():
        parts = settings.get("gradient_accumulation_steps", 1)
        fixed = {
            "per_device_train_batch_size": int(rows) // parts,
            "num_generations": 8,
            "loss_type": "grpo",
            "shared_prefix": shared,
            "optim": "sgd",
            "learning_rate": 0.02,
            "max_grad_norm": 0.0,
            "max_steps": 2,
            **FLOAT64,
        }
        rollout, rewards = scripted_rollout, [half_silent]
        if name.startswith("trajectories"):
            rollout, rewards = scripted_trajectories, [half_silent, by_turn]
        trainer = build(model, Path(output) / name, rewards, rollout=rollout, **(fixed | settings))
        forwards = counted(trainer.sharing)
        trainer.train()
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.accelerator.is_main_process:
            log = [entry for entry in trainer.state.log_history if "reward" in entry]
            facts = {"shared": trainer.sharing.possible, "sharded": is_sharded(trainer.model), "forwards": forwards}
            torch.save({"weights": weights, "log": log, **facts}, f"{output}/{name}.pt")
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
