"""Runs whose completions come from a sampler that is not the policy, without vLLM."""

import math

import torch

from support import tiny
from support.trainers import Recorder, build

NOISY, ROWS = 3, 16


def rollout(prompts, trainer):
    """Completions by place in the generation; the sampler is sure of every third one beyond reason, and of its end."""
    tokenizer, rank, local = trainer.processing_class, trainer.accelerator.process_index, len(prompts)
    ids, logprobs = [], []
    for i in range(rank * local, (rank + 1) * local):
        g = torch.Generator().manual_seed(100 + i)
        length = int(torch.randint(2, 12, (), generator=g))
        row = torch.randint(3, len(tiny.WORDS), (length,), generator=g).tolist()
        ids.append([*row, tokenizer.eos_token_id])
        noise = 0.3 * torch.randn(length + 1, generator=g)
        logprobs.append((noise - (0.1 if i % NOISY == 0 else 4.0)).tolist())
    if rank == 0:
        logprobs[0][0] = math.nan
    return {"prompt_ids": tokenizer(list(prompts))["input_ids"], "completion_ids": ids, "logprobs": logprobs}


class NoServer:
    """In the place of vLLM's engine, which the rollout function replaces."""

    sync_seconds = sync_bytes = 0

    def sync_weights(self):
        """Weights go nowhere."""


def trained(tmp_path, made_by=rollout, model=None, **settings):
    """A recorder after its run, in which `made_by` is vLLM."""
    settings = {"max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, **settings}
    trainer = build(model or tiny.model(), tmp_path, rows=ROWS, rollout=made_by, kind=Recorder, **settings)
    trainer.use_vllm = trainer.args.use_vllm = True
    trainer.vllm_generation, trainer._last_loaded_step = NoServer(), -1
    trainer.train()
    return trainer


RULES = {
    "the default": None,
    "normalised": {"upper": 2.0, "normalize": True},
    "the second moment": {"statistic": "m2", "upper": 1.0, "action": "mask"},
    "rejected completions": {"level": "geometric", "statistic": "k1", "upper": 1.0, "action": "reject"},
    "rejected tokens": {"statistic": "k2", "upper": 0.5, "action": "reject"},
}
