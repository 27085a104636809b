"""Train with a fault injected on rank 1 of two, in mid run: `faults.py MODEL OUTPUT ON_ERROR:FAULT...`."""

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["FAULT_RANK"] = "1"
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.train import leave_process_group
from support import tiny


def rollout(prompts, trainer):
    """Ordinary completions, and at the second step one "bad" one on each rank."""
    tokenizer = trainer.processing_class
    texts = ["a7 " * (1 + i % 4) for i in range(len(prompts))]
    if trainer.state.global_step == 1:
        texts[1] = "bad"
        (Path(trainer.args.output_dir) / "fault_began").write_text(str(time.time()))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    return {"prompt_ids": tokenizer(list(prompts))["input_ids"], "completion_ids": ids, "logprobs": None}


def run(model: str, output: Path, on_error: str, fault: str) -> None:
    timeout = 8.0 if fault in ("loop", "sleep", "hang") else 60.0
    specs = [
        RewardSpec("letters", "support.faulty:letters"),
        RewardSpec(fault, f"support.faulty:{fault}", on_error=on_error, timeout=timeout, independent=True),
    ]
    runtime = Runtime(specs, workers=1, failures=output / "failures")
    args = GRPOExtConfig(str(output), **(tiny.TRAINING | {"max_steps": 3, "num_generations": 8, "loss_type": "grpo"}))
    trainer = GRPOExtTrainer(
        model, runtime.functions, args, tiny.prompts(), processing_class=tiny.tokenizer(), rollout_func=rollout
    )
    try:
        trainer.train()
    finally:
        (output / f"ended_{trainer.accelerator.process_index}").write_text(str(time.time()))
    runtime.close()
    if trainer.accelerator.is_main_process:
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        (output / f"{fault}.json").write_text(json.dumps(log))


if __name__ == "__main__":
    for pair in sys.argv[3:]:
        run(sys.argv[1], Path(sys.argv[2]), *pair.split(":"))
    leave_process_group()
