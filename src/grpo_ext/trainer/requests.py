"""Requests of a trainer to the threads that complete and score rows beside its training."""

import copy
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from grpo_ext.errors import SamplerLost
from grpo_ext.rollout.background import Background
from grpo_ext.rollout.collected import Finished
from grpo_ext.rollout.samplers import Sampler, failing_together
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.trainer.acting import limits_of, positions_of
from grpo_ext.trainer.leaves import Completed, Leaves, Play, Request
from grpo_ext.waiting import POLL_SECONDS, SIGNALLED, leaving

T = TypeVar("T")


def leaves_of(trainer: Any, sampler: Sampler) -> Leaves:
    """Return what completes and scores rows for a trainer."""
    args, play = trainer.args, None
    if trainer.acting is not None:
        positions = positions_of(trainer.accelerator.unwrap_model(trainer.model), args)
        limits = limits_of(args, positions, frozenset(trainer.eos_token_ids))
        waits = args.environment_waves == "turn"
        play = Play(trainer.acting, limits, waits, trainer.chat_template_kwargs)
    return Leaves(
        sampler,
        trainer._rewards.scorers,
        trainer.processing_class,
        limit=args.max_completion_length,
        ends={*trainer.eos_token_ids, trainer._tokenizer.pad_token_id},
        eos_token_id=trainer._tokenizer.eos_token_id,
        play=play,
        loop=getattr(trainer, "async_loop", None),
    )


def request_of(
    trainer: Any, rows: Sequence[dict[str, Any]], attempts: Sequence[AttemptId], version: int, step: int | None = None
) -> Request:
    """Return the request for a trainer's rows.

    Args:
        trainer: the trainer.
        rows: of the dataset.
        attempts: identity of each row's attempt.
        version: number of the weights that sample, as published to the sampler.
        step: optimizer steps that made these weights; by default all that have been made.
    """
    step = trainer.state.global_step if step is None else step
    prompts = [] if trainer.acting is not None else copy.deepcopy([row["prompt"] for row in rows])
    ids = trainer._tokenize_prompts(prompts)[0] if prompts else []
    known = [row for row in trainer.state.log_history if row.get("step", 0) <= step]
    return Request(rows, ids, attempts, version, step, replace(trainer.state, global_step=step, log_history=known))


def taken(future: Future[Finished]) -> Finished:
    """Wait for a result; a sampler that is lost on one process is so on all.

    Raises:
        SamplerLost: the sampler is lost, or a signal ends the run.
    """
    with failing_together():
        while not wait([future], POLL_SECONDS).done:
            if leaving.is_set():
                raise SamplerLost(f"completions that are sampled beside the training: {SIGNALLED}")
        return future.result()


class ChunksInBackground:
    """Two threads: one completes a generation as one batch, the other scores its chunks, in their order.

    A chunk is complete when the last of its rows has ended, if the sampler tells of rows that end, else when all rows
    have. The second thread waits for the first, which waits for the sampler and for environments, and neither waits
    for the main thread. Chunks do not wait for the async rewards of those before them.
    """

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._completing, self._scoring = Background(self._complete), Background(self._score)

    def submit(self, chunks: Sequence[Request]) -> list[Future[Finished]]:
        """Complete and score the chunks of a generation; their `seconds` count from now."""
        began = time.monotonic()
        completed: list[Future[Completed]] = [Future() for _ in chunks]
        finished: list[Future[Finished]] = [Future() for _ in chunks]
        self._completing.submit((chunks, completed)).add_done_callback(partial(_fail, completed))
        for one in zip(chunks, completed, finished, strict=True):
            self._scoring.submit((*one, began)).add_done_callback(partial(_fail, one[2:]))
        return finished

    def stop(self) -> None:
        """Begin no further request; see `close`."""
        self._completing.stop()
        self._scoring.stop()

    def close(self) -> None:
        """End both threads."""
        self._completing.close()
        self._scoring.close()

    def _complete(self, asked: tuple[Sequence[Request], list[Future[Completed]]]) -> None:
        chunks, futures = asked
        self._leaves.complete_chunks(chunks, lambda i, made: futures[i].set_result(made))

    def _score(self, asked: tuple[Request, Future[Completed], Future[Finished], float]) -> None:
        chunk, completed, finished, began = asked
        made = completed.result()

        def end(scoring: Future[Finished]) -> None:
            if (error := scoring.exception()) is not None:
                finished.set_exception(error)
            else:
                finished.set_result(replace(scoring.result(), seconds=time.monotonic() - began))

        self._leaves.scoring(chunk, made).add_done_callback(end)


def _fail(futures: Sequence[Future[Any]], ended: Future[None]) -> None:
    """Let those of `futures` that are not done fail by the error of a request, if it had one."""
    if (error := ended.exception()) is not None:
        for future in (one for one in futures if not one.done()):
            future.set_exception(error)
