"""What samples the turns of attempts: a trainer's own engine in waves, or a vLLM server, a request for each turn."""

import copy
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig

from grpo_ext.environments.loop import Sample
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.rollout.vllm.server import CONNECTIONS


def engine_of(trainer: Any, attempts: Sequence[AttemptId]) -> "WaveEngine":
    """Return the engine that suits the trainer, for one generation of `attempts`."""
    args = trainer.args
    server = trainer.use_vllm and args.vllm_mode == "server" and trainer.accelerator.num_processes == 1
    kind = ServerEngine if server and args.environment_waves == "ready" else WaveEngine
    return kind(trainer, attempts)


def positions_of(trainer: Any) -> int | None:
    """That policy and sampler have."""
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    known = [getattr(config, "max_position_embeddings", None)]
    known += [trainer.args.vllm_max_model_length] if trainer.use_vllm else []
    return min((int(positions) for positions in known if positions), default=None)


class WaveEngine:
    """A trainer's own engine, a wave at a time; a stream of random numbers for each attempt.

    With transformers an attempt's tokens depend on its own stream and on the logits, so that whoever shares its wave
    can change no more than their rounding. Where the engine cannot take streams (`generate`), and with
    `environment_waves: turn`, a wave waits for all environments, so that a run is a function of its recipe and seed.
    """

    pending = 0
    descriptor: int | None = None

    def __init__(self, trainer: Any, attempts: Sequence[AttemptId]) -> None:
        """Begin the random streams of a generation's attempts."""
        self.trainer, self.version = trainer, int(trainer.state.global_step)
        self._streams = [attempt.stream() for attempt in attempts]
        self._positions = positions_of(trainer)
        args, sharded = trainer.args, trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        server = trainer.use_vllm and (args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1)
        self._together = trainer.accelerator.num_processes > 1 and (sharded or server)

    @property
    def waits(self) -> bool:
        """Whether a wave waits until all environments have answered."""
        colocated = self.trainer.use_vllm and self.trainer.args.vllm_mode == "colocate"
        takes = colocated or (self.trainer._engine is not None and not self.trainer._engine.refusal)
        return self.trainer.args.environment_waves == "turn" or self._together or not takes

    def close(self) -> None:
        """Nothing of it goes on after a generation."""

    def anyone(self, here: bool) -> bool:
        """Whether any process that generates together with this one still has an attempt."""
        return any(gather_object([here])) if self._together else here

    def generate(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int]
    ) -> list[tuple[int, Sample]]:  # fmt: skip
        """A turn behind each context."""
        return list(zip(attempts, self._wave(contexts, limits, attempts), strict=True))

    def _wave(self, contexts: list[list[int]], limits: list[int], attempts: list[int]) -> list[Sample]:
        rows, most = len(contexts), max(limits, default=1)
        beyond = [len(ids) + most > (self._positions or math.inf) for ids in contexts]
        if any(beyond) and not all(beyond) and not self._together:  # those are not to run out of positions
            return self._in_two(contexts, limits, attempts, beyond)
        if self._together:  # collective: the same number of rows and tokens on every process
            told = gather_object([(rows, most)])
            rows, most = max(row for row, _ in told), max(length for _, length in told)
        if not rows:
            return []
        asked = contexts + [[self.trainer.eos_token_ids[0]]] * (rows - len(contexts))
        streams = [self._streams[number] for number in attempts]
        with _of_length(self.trainer, most), self._seeded(streams, limits, rows, most):
            ids, logprobs = self.trainer._generate_single_turn(asked, None, {}, 1)
        known = [None] * rows if logprobs is None else logprobs
        return [
            Sample(said[:limit], None if its is None else its[:limit])
            for said, its, limit in zip(ids, known, limits, strict=False)
        ]

    def _in_two(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int], beyond: list[bool]
    ) -> list[Sample]:
        found: dict[int, Sample] = {}
        for part in (False, True):
            places = [i for i, late in enumerate(beyond) if late is part]
            chosen = ([values[i] for i in places] for values in (contexts, limits, attempts))
            found |= dict(zip(places, self._wave(*chosen), strict=True))  # type: ignore[arg-type]
        return [found[i] for i in range(len(contexts))]

    @contextmanager
    def _seeded(
        self, streams: Sequence[np.random.Generator], limits: Sequence[int], rows: int, width: int
    ) -> Iterator[None]:  # fmt: skip
        """While it lasts every row draws from its own stream, of which a turn takes as much as it may sample."""
        trainer = self.trainer
        server = trainer.use_vllm and trainer.args.vllm_mode == "server"
        if server and trainer.model.training and trainer.accelerator.num_processes > 1:
            yield  # all rows in one request, which can have only one seed
            return
        if trainer.use_vllm:
            seeds = [int(stream.integers(2**31)) for stream in streams]
            with trainer.vllm_generation.seeded(seeds):
                yield
            return
        if trainer._engine is None:
            yield
            return
        drawn = np.zeros((rows, width))
        for i, (stream, limit) in enumerate(zip(streams, limits, strict=True)):
            drawn[i, :limit] = stream.random(limit)
        trainer._engine.uniforms = torch.from_numpy(drawn)
        try:
            yield
        finally:
            trainer._engine.uniforms = None


@contextmanager
def _of_length(trainer: Any, most: int) -> Iterator[None]:
    """While it lasts a completion has at most so many tokens."""
    if trainer.use_vllm:
        before = trainer.vllm_generation.max_completion_length
        trainer.vllm_generation.max_completion_length = most
        try:
            yield
        finally:
            trainer.vllm_generation.max_completion_length = before
        return
    config, given = trainer.generation_config, trainer.generation_kwargs
    shorter: GenerationConfig = copy.deepcopy(config)
    shorter.max_new_tokens = most
    trainer.generation_config, trainer.generation_kwargs = shorter, {**given, "max_new_tokens": most}
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = config, given


class ServerEngine(WaveEngine):
    """A vLLM server that one process trains with: each turn is a request of its own, sent when it is ready.

    It waits for nothing but the requests, whose ends a pipe tells the loop; should the server die, those that failed
    are asked again once it is back and has the weights.
    """

    waits = False

    def __init__(self, trainer: Any, attempts: Sequence[AttemptId]) -> None:
        """Begin the random streams of a generation's attempts."""
        super().__init__(trainer, attempts)
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="turn")
        self._asked: dict[Future[Sample], tuple[list[int], int, int]] = {}
        self._tells, self._told = os.pipe()
        os.set_blocking(self._tells, False)
        self.descriptor = self._tells

    @property
    def pending(self) -> int:  # type: ignore[override]
        """Turns that it samples while the loop goes on."""
        return len(self._asked)

    def generate(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int]
    ) -> list[tuple[int, Sample]]:  # fmt: skip
        """Send a request for each; what has come back."""
        for turn in zip(contexts, limits, attempts, strict=True):
            self._ask(*turn)
        done = [future for future in self._asked if future.done()]
        with suppress(BlockingIOError):  # a request may be done a moment before the pipe tells
            os.read(self._tells, max(1, len(done)))
        found, troubles = [], []
        for future in done:
            turn = self._asked.pop(future)
            if (error := future.exception()) is None:
                found.append((turn[2], future.result()))
            else:
                troubles.append((error, turn))
        if troubles:
            server = self.trainer.vllm_generation
            server.wait_for_server([error for error, _ in troubles])
            server.sync_weights()
            for _, turn in troubles:
                self._ask(*turn)
        return found

    def _ask(self, context: list[int], limit: int, attempt: int) -> None:
        seed = int(self._streams[attempt].integers(2**31))
        future = self._threads.submit(self._sampled, context, limit, seed)
        self._asked[future] = (context, limit, attempt)
        future.add_done_callback(lambda _: os.write(self._told, b"."))

    def _sampled(self, context: list[int], limit: int, seed: int) -> Sample:
        ids, logprobs = self.trainer.vllm_generation.completion_of(context, limit, seed)
        return Sample(ids, [known[0] for known in logprobs])

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown(cancel_futures=True)
        os.close(self._tells)
        os.close(self._told)
