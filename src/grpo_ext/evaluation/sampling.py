"""Sample for an evaluation with the engine that trains, at another temperature and seed, and restore its state."""

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from transformers import GenerationConfig

from grpo_ext.config.temporary import temporarily
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.rollout.seeds import AttemptId, Purpose, derived
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer


def evaluating(trainer: GRPOExtTrainer, chosen: EvalSet) -> AbstractContextManager[None]:
    """Return a context that samples by the settings of a set, and restores the trainer's state after it."""
    settings = _vllm(trainer, chosen) if trainer.use_vllm else _transformers(trainer, chosen)
    return trainer.evaluating(chosen.samples, settings)


@contextmanager
def seeded(trainer: GRPOExtTrainer, chunk: int, attempts: Sequence[AttemptId]) -> Iterator[None]:
    """Sample one chunk of prompts identically on any process; `attempts` are its rows."""
    seed = derived(Purpose.CHUNK, attempts[0].seed, chunk)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    each = [int(attempt.stream().integers(2**31)) for attempt in attempts]
    with trainer.vllm_generation.seeded(each) if trainer.use_vllm else nullcontext():
        yield


def _transformers(trainer: GRPOExtTrainer, chosen: EvalSet) -> AbstractContextManager[None]:
    kwargs = {**trainer.generation_kwargs, "do_sample": chosen.temperature > 0}
    kwargs["max_new_tokens"] = length_of(trainer, chosen)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        kwargs[name] = getattr(chosen, name) if kwargs["do_sample"] else None
    config = GenerationConfig(**kwargs, disable_compile=True)
    return temporarily(trainer, generation_config=config, generation_kwargs=kwargs)


def _vllm(trainer: GRPOExtTrainer, chosen: EvalSet) -> AbstractContextManager[None]:
    return temporarily(
        trainer.vllm_generation,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k or -1,
        min_p=chosen.min_p,
        max_completion_length=length_of(trainer, chosen),
    )


def length_of(trainer: GRPOExtTrainer, chosen: EvalSet) -> int:
    """Return the most tokens of a completion."""
    return chosen.max_completion_length or int(trainer.args.max_completion_length or 0)
