"""Engines that sample turns of conversations: any sampler, in waves, or a vLLM server, turn by turn."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from accelerate.utils import gather_object

from grpo_ext.errors import SamplerLost
from grpo_ext.objective.trajectory import Sample, TurnRequest
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.vllm.requester import Request, seed_of
from grpo_ext.rollout.vllm.server import CONNECTIONS
from grpo_ext.waiting import SIGNALLED

if TYPE_CHECKING:
    from grpo_ext.rollout.vllm.generation import Generation

Images: TypeAlias = list[list[Any] | None] | None
"""Of each context, or None where no context has any."""
Waves: TypeAlias = Callable[[list[list[int]], list[int], Sequence[np.random.Generator], Images], list[Sampled]]
"""Samples a completion after each context, of at most so many tokens, each by its own stream of random numbers."""


class WaveEngine:
    """Any sampler, a wave at a time, with a stream of random numbers for each episode; for any thread.

    With transformers the tokens of an episode depend on its own stream and on the logits, so that the episodes in its
    wave can change no more than their rounding.

    Args:
        sample: samples a wave, by weights that do not change.
        version: optimizer steps that made the weights.
        attempts: of one generation.
        waits: whether a wave waits until all environments have answered, so that a run is a function of its recipe
            and seed where a row does not depend on its own stream alone.
        collective: whether all processes take part in each wave.
    """

    pending = 0
    descriptor: int | None = None

    def __init__(
        self, sample: Waves, version: int, attempts: Sequence[AttemptId], *, waits: bool, collective: bool = False
    ) -> None:
        self._sample, self.version, self.waits, self._collective = sample, version, waits, collective
        self._streams = [attempt.stream() for attempt in attempts]

    def generate(self, turns: list[TurnRequest]) -> list[tuple[TurnRequest, Sample]]:
        """Sample all turns."""
        if not (turns or self._collective):
            return []
        streams = [self._streams[turn.episode] for turn in turns]
        images = [turn.images or None for turn in turns] if any(turn.images for turn in turns) else None
        sampled = self._sample([turn.context for turn in turns], [turn.limit for turn in turns], streams, images)
        return [(turn, Sample(one.ids, one.logps, one.support)) for turn, one in zip(turns, sampled, strict=True)]

    def anyone(self, here: bool, leaves: bool) -> bool:
        """Return whether an episode is left, as `TurnEngine` does."""
        return _going_on(gather_object([(here, leaves)]) if self._collective else [(here, leaves)])

    def close(self) -> None:
        """End the engine after a generation; the sampler stays."""


class ServerEngine:
    """A vLLM server that one process trains with: each turn is a request of its own, sent when it is ready.

    A request that is done writes a byte to a pipe, which wakes the loop. Should the server die, failed requests are
    sent again, as they were, once it is back and has the weights.

    Args:
        server: the trainer's `vllm_generation`.
        version: optimizer steps that made the weights.
        attempts: of one generation.
    """

    waits = False

    def __init__(self, server: "Generation", version: int, attempts: Sequence[AttemptId]) -> None:
        self._server, self.version = server, version
        bound = server.support_bound if server.model.training else None
        self._requester = server.requester(bound)
        self._streams = [attempt.stream() for attempt in attempts]
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="turn")
        self._sent: dict[Future[list[Sampled]], tuple[TurnRequest, Request]] = {}
        self._pipe_read, self._pipe_write = os.pipe()
        os.set_blocking(self._pipe_read, False)
        self.descriptor: int | None = self._pipe_read

    def anyone(self, here: bool, leaves: bool) -> bool:
        """Return whether an episode is left, as `TurnEngine` does."""
        return _going_on([(here, leaves)])

    @property
    def pending(self) -> int:
        """Turns that are being sampled."""
        return len(self._sent)

    def generate(self, turns: list[TurnRequest]) -> list[tuple[TurnRequest, Sample]]:
        """Send a request for each turn; return the turns that have come back."""
        for turn in turns:
            seed = seed_of(self._streams[turn.episode])
            self._send(turn, Request([turn.context], turn.limit, seed, 1, self._server.adapter, turn.images))
        done = [future for future in self._sent if future.done()]
        with suppress(BlockingIOError):  # a request may be done a moment before its byte is in the pipe
            os.read(self._pipe_read, max(1, len(done)))
        turns_done, failed, troubles = [], [], list[Exception]()
        for future in done:
            turn, request = self._sent.pop(future)
            try:
                [sampled] = future.result()
                turns_done.append((turn, Sample(sampled.ids, sampled.logps, sampled.support)))
            except Exception as trouble:
                failed.append((turn, request))
                troubles.append(trouble)
        if failed:
            self._server.recover(troubles)
            for turn, request in failed:
                self._send(turn, request)
        return turns_done

    def _send(self, turn: TurnRequest, request: Request) -> None:
        future = self._threads.submit(self._requester.ask, request)
        self._sent[future] = turn, request
        future.add_done_callback(lambda _: os.write(self._pipe_write, b"."))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)
        os.close(self._pipe_read)
        os.close(self._pipe_write)


def _going_on(processes: Sequence[tuple[bool, bool]]) -> bool:
    """Return whether any process has an episode, given whether it has one, and whether it leaves."""
    if not any(here for here, _ in processes):
        return False
    if any(leaves for _, leaves in processes):
        raise SamplerLost(f"conversations with environments: {SIGNALLED}")
    return True
