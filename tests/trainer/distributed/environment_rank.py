"""Two steps with environments, run by accelerate: `environment_rank.py MODEL OUTPUT`; those of the second fail."""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.train import leave_process_group
from support import tiny, worlds

FAULTS = ["raises in reset", "is killed", "hangs", "exits"]


class Recorder(GRPOExtTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.failed = [*getattr(self, "failed", []), [row["trajectory"].failure for row in inputs]]
        return output


def main(model: str, output: str) -> None:
    settings = tiny.TRAINING | {"per_device_train_batch_size": 4, "max_completion_length": 40}
    args = GRPOExtConfig(str(Path(output) / "run"), **settings)
    rows = [{"prompt": [{"role": "user", "content": f"go {i}"}], "fault": FAULTS[i % 4]} for i in range(16)]
    faulty = {"path": f"{worlds.__file__}:FaultyOnTheSecond", "turn_timeout": 5.0}
    trainer = Recorder(model, None, args, rows, processing_class=tiny.tokenizer(), environments=[faulty])
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen = {"failed": trainer.failed, "weights": weights, "log": log}
    torch.save(seen, Path(output) / f"rank{args.process_index}.pt")
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
