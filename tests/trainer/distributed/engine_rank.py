"""Train, save, resume and save again by the engine of the launch: `engine_rank.py MODEL OUTPUT`."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from grpo_ext.train import leave_process_group
from grpo_ext.trainer.verification.watched import trained_weights
from support.fsdp_on_cpu import is_sharded, make_fsdp_real
from support.trainers import build, scripted_rollout, unit_interval


def main(model: str, output: str) -> None:
    make_fsdp_real()
    folder, facts = Path(output), {}
    for name, checkpoint in {"whole": None, "resumed": str(folder / "run" / "checkpoint-1")}.items():
        trainer = build(
            model,
            folder / "run",
            [unit_interval],
            rows=64,
            rollout=scripted_rollout,
            loss_type="grpo",
            beta=0.05,
            num_generations=8,
            max_steps=3,
            save_strategy="steps",
            save_steps=1,
            lr_scheduler_type="constant",
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(folder / name))
        plain = trainer.accelerator.unwrap_model(trainer.model)
        facts[name] = {
            "engine": str(trainer.accelerator.distributed_type),
            "sharded": is_sharded(plain) or all(hasattr(p, "ds_id") for p in plain.parameters()),
            "weights": trained_weights(plain),
            "log": [entry for entry in trainer.state.log_history if "reward" in entry],
        }
    if trainer.accelerator.is_main_process:
        torch.save(facts, folder / "facts.pt")
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
