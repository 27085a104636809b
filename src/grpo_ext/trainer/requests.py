"""Requests of a trainer to the threads that complete and score rows beside its training."""

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from grpo_ext.rollout.collected import Finished
from grpo_ext.rollout.samplers import Sampler, failing_together
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.turn_engines import SamplerEngine
from grpo_ext.trainer.acting import limits_of, positions_of
from grpo_ext.trainer.leaves import Leaves, LeavesInBackground, Play, Request


def leaves_of(trainer: Any, sampler: Sampler) -> LeavesInBackground:
    """Start the threads that complete and score rows for a trainer."""
    args, ends = trainer.args, {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    play = None
    if trainer.acting is not None:
        positions = positions_of(trainer.accelerator.unwrap_model(trainer.model), args)
        limits = limits_of(args, positions, frozenset(trainer.eos_token_ids))
        waits = args.environment_waves == "turn"

        def engine(request: Request) -> SamplerEngine:
            return SamplerEngine(sampler, request.version, request.step, request.attempts, waits=waits)

        play = Play(trainer.acting, limits, engine, trainer.chat_template_kwargs)
    leaves = Leaves(
        sampler,
        trainer._rewards.scorers,
        trainer.processing_class,
        limit=args.max_completion_length,
        ends=ends,
        eos_token_id=trainer._tokenizer.eos_token_id,
        play=play,
        loop=getattr(trainer, "async_loop", None),
    )
    return LeavesInBackground(leaves)


def request_of(trainer: Any, rows: Sequence[dict[str, Any]], attempts: Sequence[AttemptId], version: int) -> Request:
    """Return the request for a trainer's rows, sampled by its present weights, published as `version`."""
    prompts = [] if trainer.acting is not None else copy.deepcopy([row["prompt"] for row in rows])
    ids = trainer._tokenize_prompts(prompts)[0] if prompts else []
    state = replace(trainer.state, log_history=[*trainer.state.log_history])
    return Request(rows, ids, attempts, version, trainer.state.global_step, state)


def taken(future: Future[Finished]) -> Finished:
    """Wait for a result; a sampler that is lost on one process is so on all."""
    with failing_together():
        return future.result()
