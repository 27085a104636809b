"""One SGD step from scripted completions, run by accelerate: `one_step.py MODEL OUTPUT ROWS_PER_DEVICE LOSS...`."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


from grpo_ext.train import leave_process_group
from support import tiny
from support.float64 import FLOAT64, float64_throughout
from support.trainers import build, scripted_rollout, unit_interval, weights


@float64_throughout()
def main(model: str, output: str, rows: str, *names: str) -> None:
    for name in names:
        trainer = build(
            model,
            Path(output) / name,
            [unit_interval, tiny.length] if name == "grpo" else [unit_interval],
            rollout=scripted_rollout,
            loss_type=name,
            beta=0.05,
            entropy_coef=0.01,
            mask_truncated_completions=True,
            per_device_train_batch_size=int(rows),
            num_generations=8,
            optim="sgd",
            learning_rate=0.02,
            max_grad_norm=0.0,
            max_steps=2,
            **FLOAT64,
        )
        trainer.train()
        if trainer.accelerator.is_main_process:
            log = [entry for entry in trainer.state.log_history if "reward" in entry]
            torch.save({"weights": weights(trainer.model), "log": log}, Path(output) / f"{name}.pt")
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
