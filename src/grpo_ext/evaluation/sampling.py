"""Sampling for an evaluation by the engine that trains: its own temperature and seed, and nothing left behind."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from grpo_ext.config.temporary import temporarily
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.rollout.random_streams import random_streams_kept
from grpo_ext.rollout.seeds import AttemptId, Purpose, derived


@contextmanager
def evaluating(trainer: Any, chosen: EvalSet) -> Iterator[None]:
    """While it lasts the trainer's model evaluates and samples as `chosen` says; afterwards all is as it was."""
    training, model = trainer.model.training, trainer.model_wrapped
    metrics, group = dict(trainer._metrics["eval"]), trainer.num_generations_eval
    model.eval()
    trainer.num_generations_eval = chosen.samples
    try:
        with random_streams_kept(), _vllm(trainer, chosen) if trainer.use_vllm else _transformers(trainer, chosen):
            yield
    finally:
        model.train(training)
        trainer.num_generations_eval = group
        trainer._metrics["eval"].clear()
        trainer._metrics["eval"].update(metrics)


@contextmanager
def seeded(trainer: Any, chunk: int, attempts: Sequence[AttemptId]) -> Iterator[None]:
    """Sample one chunk of prompts alike on whichever process: `attempts` are its rows, all of one evaluation set."""
    drawn = derived(Purpose.CHUNK, attempts[0].seed, chunk)
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)
    each = [int(attempt.stream().integers(2**31)) for attempt in attempts]
    with trainer.vllm_generation.seeded(each) if trainer.use_vllm else nullcontext():
        yield


@contextmanager
def _transformers(trainer: Any, chosen: EvalSet) -> Iterator[None]:
    config, given = trainer.generation_config, trainer.generation_kwargs
    kwargs = {**given, "do_sample": chosen.temperature > 0, "max_new_tokens": _length(trainer, chosen)}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        kwargs[name] = getattr(chosen, name) if kwargs["do_sample"] else None
    trainer.generation_config, trainer.generation_kwargs = GenerationConfig(**kwargs, disable_compile=True), kwargs
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = config, given


@contextmanager
def _vllm(trainer: Any, chosen: EvalSet) -> Iterator[None]:
    settings = {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k or -1,
        "min_p": chosen.min_p,
        "max_completion_length": _length(trainer, chosen),
    }
    with temporarily(trainer.vllm_generation, **settings):
        yield


def _length(trainer: Any, chosen: EvalSet) -> int:
    return chosen.max_completion_length or trainer.args.max_completion_length
