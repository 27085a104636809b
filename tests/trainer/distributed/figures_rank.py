"""What a step and an evaluation log, run by accelerate: `figures_rank.py OUTPUT ROWS`, of a process."""

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
from support.figures import evaluated, trainer
from support.trainers import scripted_rollout

if __name__ == "__main__":
    output, rows = Path(sys.argv[1]), int(sys.argv[2])
    settings = {"loss_type": "dapo", "beta": 0.1}
    one = trainer(
        output,
        scripted_rollout,
        **settings | {"num_iterations": 2, "learning_rate": 0.3, "optim": "sgd", "entropy_coef": 0.01},
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
    )
    one.train()
    figures = {"steps": [row for row in one.state.log_history if "loss" in row]}
    figures["evaluation"] = evaluated(output, rows, **settings)
    if PartialState().is_main_process:
        (output / "figures.json").write_text(json.dumps(figures))
    leave_process_group()
