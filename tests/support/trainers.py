"""Trainers of a tiny model, with rollouts and rewards that are the same on every split and every processor."""

import random

import torch

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from support import rewritten, tiny


def scripted_rollout(prompts, trainer):
    """Completions that depend on nothing but the row's place in the global batch, some cut, some ended."""
    rank, local = trainer.accelerator.process_index, len(prompts)
    tokenizer = trainer._tokenizer
    marks = len(tokenizer) - len(tiny.WORDS)  # those of images come before the letters
    completions = []
    for i in range(rank * local, (rank + 1) * local):
        g = torch.Generator().manual_seed(100 + i + 1000 * trainer.state.global_step)
        length = int(torch.randint(1, 8, (), generator=g))
        ids = (torch.randint(3, len(tiny.WORDS), (length,), generator=g) + marks).tolist()
        completions.append(ids if i % 5 == 0 else [*ids, tokenizer.eos_token_id])
    return {"prompt_ids": tokenizer(list(prompts))["input_ids"], "completion_ids": completions, "logprobs": None}


def scripted_trajectories(prompts, trainer):
    """The same of trajectories whose contexts are rewritten."""
    rank, local = trainer.accelerator.process_index, len(prompts)
    made = []
    for i, prompt in enumerate(trainer.processing_class(list(prompts))["input_ids"], rank * local):
        r = random.Random(100 + i + 1000 * trainer.state.global_step)
        made.append(rewritten.trajectory(r, prompt, r.randint(1, 4), truncated=i % 5 == 0))
    return {"trajectories": made}


def build(
    model,
    tmp_path,
    rewards=(tiny.count_a, tiny.length),
    rows=16,
    peft_config=None,
    rollout=None,
    evaluated=None,
    kind=GRPOExtTrainer,
    **settings,
):
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | settings))
    return kind(
        model=model,
        reward_funcs=list(rewards),
        args=args,
        train_dataset=tiny.prompts(rows),
        eval_dataset=evaluated,
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        rollout_func=rollout,
    )


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def unit_interval(completions, **_):
    return [min(1.0, sum(c in "aeiou0123456789" for c in completion) / 4) for completion in completions]


def binary(completions, **_):
    return [float("a" in completion or "7" in completion) for completion in completions]


def number(prompt: str) -> int:
    return int("".join(c for c in prompt if c.isdigit()))


class Recorder(GRPOExtTrainer):
    """Keeps what TRL was given and what it made of it."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.outputs = [*getattr(self, "outputs", []), output]
        return output


def record(model, tmp_path, rewards, rows=64, **settings):
    return build(model, tmp_path, rewards, rows, kind=Recorder, **settings)
