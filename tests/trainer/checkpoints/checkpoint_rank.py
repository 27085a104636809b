"""What each rank sees of checkpoints: `checkpoint_rank.py MODEL OUT CASE`; says one line a rank, in OUT/rank-N.txt."""

import os
import resource
import sys
import warnings
from pathlib import Path

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from accelerate import PartialState

from grpo_ext import ConfigError
from grpo_ext.errors import SaveError
from grpo_ext.train import leave_process_group
from support.trainers import build


class FullDisk(TrainerCallback):
    """From the second step on, no file of one process may grow beyond some bytes."""

    def __init__(self, rank: int, limit: int) -> None:
        self.rank, self.limit = rank, limit

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == self.rank and state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def main(model: str, folder: str, case: str) -> None:
    out, rank = Path(folder) / "out", PartialState(cpu=True).process_index
    if case == "own folders":  # one path that is two places, as on machines that share no disk
        here = Path(folder) if rank == 0 else Path(folder) / "elsewhere"
        here.mkdir(exist_ok=True)
        os.chdir(here)
        out = Path("out")
    resumes = case in ("one random state lost", "own folders", "go on")
    trainer = build(
        model, out, max_steps=3, per_device_train_batch_size=4, save_strategy="steps", save_steps=1, rows=16
    )
    if case == "one random state lost" and rank == 0:
        (out / "checkpoint-3" / "rng_state_1.pth").unlink()
    if case.startswith("full disk"):
        trainer.add_callback(FullDisk(int(case[-1]), 20_000 if case.endswith("0") else 4_000))
    PartialState().wait_for_everyone()
    try:
        trainer.train(resume_from_checkpoint=True if resumes else None)
        said = f"step {trainer.state.global_step}"
    except (ConfigError, SaveError) as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    (Path(folder) / f"rank-{rank}.txt").write_text(said)
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
