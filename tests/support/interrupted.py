"""Runs that are stopped after a step and go on in another trainer, on one process or several."""

import json
import os
import signal
from pathlib import Path

import torch
from datasets import IterableDataset
from peft import LoraConfig

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.config.launch import world_size
from support import experts as mixtures
from support import tiny
from support.agents import branches
from support.trainers import weights

CLOCKS = ("step_time", "time/", "overlap/waited", "runtime", "seconds", "per_second", "total_flos")
"""What a clock gives, or counts from the start of the process."""

WINDOWS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
CASES = {
    "plain": {},
    "window of 4": WINDOWS | {"steps_per_generation": 8},
    "two iterations": WINDOWS | {"num_iterations": 2},
    "both": WINDOWS | {"steps_per_generation": 4, "num_iterations": 2},
    "beta": WINDOWS | {"steps_per_generation": 4, "beta": 0.1},
    "sync_ref_model": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "steps_per_generation": 2},
    "dynamic sampling": WINDOWS | {"dynamic_sampling": "reward", "steps_per_generation": 4},
    "truncated sampling": WINDOWS | {"top_p": 0.7, "dynamic_sampling": "reward", "steps_per_generation": 4},
    "experts": WINDOWS | {"experts": True},
    "lora": WINDOWS | {"peft": True, "steps_per_generation": 4},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 3.0},
    "remembered batches": {
        "loss_type": "beta_bnpo",
        "advantage_kwargs": {"reward_range": [0.0, 9.0], "window": 3},
        "steps_per_generation": 2,
    },
    "logging every third": WINDOWS | {"logging_steps": 3, "steps_per_generation": 4},
    "stream": {"stream": True, "steps_per_generation": 2},
    "evaluation": WINDOWS | {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "evaluation of epochs": WINDOWS | {"eval_strategy": "epoch"},
    "sharing off": WINDOWS | {"shared_prefix": "false", "steps_per_generation": 4},
    "completions": WINDOWS | {"log_completions": True, "logging_steps": 2, "steps_per_generation": 4},
    "environments": WINDOWS | {"plays": True, "steps_per_generation": 4, "max_completion_length": 24},
    "agents": WINDOWS
    | {
        "asks": True,
        "environment_waves": "turn",
        "steps_per_generation": 4,
        "max_completion_length": 48,
        "top_p": 0.7,
    },
    "linear schedule, clip": {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 0.1},
}


def spread(completions, **_):
    """A reward that differs for almost any two texts."""
    return [sum(map(ord, str(completion))) % 97 / 97 for completion in completions]


def spread_until_told(completions, trainer_state, **_):
    """The same; it tells its own process to end in the steps that TOLD_IN_STEP lists."""
    if str(trainer_state.global_step + 1) in os.environ.get("TOLD_IN_STEP", "").split():
        os.kill(os.getpid(), signal.SIGTERM)
    return spread(completions)


def prompts(stream: bool):
    """Eight prompts: two epochs in eight steps of two; as a stream, one that ends."""
    data = tiny.prompts(8)
    return IterableDataset.from_generator(lambda: iter(data.to_list())) if stream else data


GUESS = {"name": "guess", "kwargs": {"high": 9, "guesses": 3, "cost": 0.1}}


def conversations(data):
    """The same prompts as messages."""
    return data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def trainer(
    folder: Path,
    *,
    peft: bool = False,
    stream: bool = False,
    plays: bool = False,
    asks: bool = False,
    experts: bool = False,
    **settings,
) -> GRPOExtTrainer:
    settings = tiny.TRAINING | {"max_steps": 8, "save_strategy": "steps", "save_steps": 1} | settings
    settings["per_device_train_batch_size"] //= world_size()
    settings["per_device_eval_batch_size"] = 8 // world_size()
    args = GRPOExtConfig(output_dir=str(folder), **settings)
    games = [GUESS] if plays else [branches] if asks else None
    return GRPOExtTrainer(
        model=mixtures.model() if experts else tiny.model(),
        reward_funcs=None if games else [tiny.count_a, tiny.length],
        args=args,
        train_dataset=conversations(prompts(stream)) if games else prompts(stream),
        eval_dataset=conversations(tiny.prompts(4)) if games else tiny.prompts(4),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1) if peft else None,
        environments=games,
    )


def without_clocks(rows: list[dict]) -> list[str]:
    """A log without what clocks say; as text, in which NaN is equal to NaN."""
    rows = [{k: v for k, v in row.items() if not any(clock in k for clock in CLOCKS)} for row in rows]
    return [json.dumps(row, sort_keys=True) for row in rows]


def logged(trainer: GRPOExtTrainer) -> list[str]:
    """All that was logged but what clocks say."""
    return without_clocks(trainer.state.log_history)


def check(case: str, tmp_path: Path, steps) -> None:
    """Stop after each of `steps`, go on in another trainer, and compare with the run that was never stopped."""
    settings = CASES[case]
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    assert torch.isfinite(weights(whole.model)).all()
    for step in steps:
        resumed = trainer(tmp_path / "resumed", **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert logged(resumed) == logged(whole), step
        assert torch.equal(weights(resumed.model), weights(whole.model)), step
