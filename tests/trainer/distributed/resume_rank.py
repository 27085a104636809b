"""Runs of two processes that are stopped and go on, by accelerate: `resume_rank.py FOLDER CASE...`."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from accelerate import PartialState

from grpo_ext.train import leave_process_group
from support.interrupted import check

if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    for case in cases:
        check(case, Path(folder) / case.replace(" ", "-"), (3, 5))
        print(f"{case}: equal on process {PartialState().process_index} of {PartialState().num_processes}", flush=True)
    leave_process_group()
