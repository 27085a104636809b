"""Trainers in float64 whose figures may be compared between splits, and what an evaluation of them logs."""

import torch

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from support import tiny
from support.trainers import unit_interval

EVALUATED = 6
"""Prompts of the evaluation set, of 4 completions each."""


def by_prompt(prompts, trainer):
    """Completions of any length that depend on the prompt and the place in its group, not on the batch."""
    completions = []
    for i, prompt in enumerate(prompts):
        g = torch.Generator().manual_seed(sum(map(ord, prompt)) + 1000 * (i % trainer.num_generations_eval))
        length = int(torch.randint(1, 8, (), generator=g))
        ids = torch.randint(3, len(tiny.WORDS), (length,), generator=g).tolist()
        completions.append(ids if sum(ids) % 3 == 0 else [*ids, trainer.processing_class.eos_token_id])
    tokenizer = trainer.processing_class
    return {"prompt_ids": tokenizer(list(prompts))["input_ids"], "completion_ids": completions, "logprobs": None}


def trainer(folder, rollout, **settings) -> GRPOExtTrainer:
    args = GRPOExtConfig(output_dir=str(folder), **(tiny.TRAINING | settings))
    return GRPOExtTrainer(
        model=tiny.model(dtype=torch.float64),
        reward_funcs=[unit_interval, tiny.length],
        args=args,
        train_dataset=tiny.prompts(8),
        eval_dataset=tiny.prompts(EVALUATED),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
    )


def evaluated(folder, batch: int, **settings) -> dict[str, float]:
    one = trainer(folder, by_prompt, per_device_eval_batch_size=batch, **settings)
    figures = one.evaluate()
    clocks = ("runtime", "per_second", "_time")
    return {name: value for name, value in figures.items() if not any(clock in name for clock in clocks)}


class Alone:
    """One process."""

    num_processes = 1

    def reduce(self, values, reduction):
        return values

    def gather(self, values):
        return values
