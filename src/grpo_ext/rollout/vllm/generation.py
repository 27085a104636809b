"""TRL's VLLMGeneration on any device, with servers that may die and come back."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from accelerate.utils.other import get_free_port
from torch import Tensor
from trl.extras.profiling import ProfilingContext
from trl.generation import vllm_generation

from grpo_ext.config.temporary import temporarily
from grpo_ext.config.vllm import sharded_problem
from grpo_ext.errors import ABSENT, ConfigError, ServerLost
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.vllm.client import Client, ServerTrouble
from grpo_ext.rollout.vllm.colocated import each_seeded, engine_settings
from grpo_ext.rollout.vllm.server import (
    CONNECTIONS,
    PROBE,
    ServerUnreachable,
    Wanted,
    engine_mismatches,
    mismatches,
    server_facts,
    unsuited,
)
from grpo_ext.rollout.vllm.support import TIES, Values, read
from grpo_ext.rollout.vllm.unpushable import unpushable
from grpo_ext.rollout.vllm.weights import HostCopy, Rounding, effective_weights, is_quantised, policy_dtype
from grpo_ext.waiting import SIGNALLED, shutdown

logger = logging.getLogger(__name__)

T = TypeVar("T")
Completions: TypeAlias = tuple[Any, ...]
"""Prompt ids, completion ids, log-probabilities and their token ids, as TRL's `generate` returns them."""
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to reach a lost server."""


class Generation(vllm_generation.VLLMGeneration):
    """`trl.generation.vllm_generation.VLLMGeneration` that times its pushes and survives its server.

    Args:
        weight_transfer: 'auto', 'nccl' or 'gloo'.
        dtype: of the sampler's weights in colocate mode.
        engine_kwargs: further options of the engine, `vllm_engine_kwargs`.
        keeps: whether the sampler returns the tokens that it kept; `top_k` bounds their number.

    Raises:
        ServerLost: no server within `vllm_server_timeout`; on all processes.
    """

    vllm_client: Client
    _weight_metadata: Any
    server_base_url: str | None
    _served_dtype: str | None = None
    """dtype of the first server of the run; its sampled probabilities are rounded so."""

    def __init__(
        self,
        *args: Any,
        weight_transfer: str = "auto",
        dtype: str = "auto",
        engine_kwargs: Mapping[str, Any] = MappingProxyType({}),
        keeps: bool = False,
        **kwargs: Any,
    ) -> None:
        self.weight_transfer = weight_transfer
        self.dtype = dtype
        self.engine_kwargs = engine_kwargs
        self.keeps = keeps
        self.sync_seconds = 0.0
        self.sync_bytes = 0
        self.pushing: Callable[[], AbstractContextManager[None]] = nullcontext  # the trainer's timer
        self._seeds: list[int] | None = None
        self._rounding: Rounding | None = None
        super().__init__(*args, **kwargs)
        if keeps:
            self.logprobs = self.asked

    @property
    def policy_dtype(self) -> torch.dtype:
        """Dtype of the trainer's weights."""
        return policy_dtype(self.model)

    @cached_property
    def sampler_dtype(self) -> torch.dtype:
        """Dtype in which the engine computes."""
        if self.mode == "colocate":
            engine: Any = self.llm.llm_engine
            return cast(torch.dtype, engine.model_config.dtype)
        name = None
        if self.accelerator.is_main_process:
            name = self.vllm_client.get_server_info()["model_config"]["dtype"]
        return cast(torch.dtype, getattr(torch, str(broadcast(name)).removeprefix("torch.")))

    def _init_vllm(self) -> None:
        self._check_policy()
        if self.mode == "server":
            self.on_main(self._connect)
            _ = self.sampler_dtype  # its first read is collective
            return
        dtype = str(self.policy_dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        # TRL takes 29500 if it is free at that moment, as does every other run that starts then.
        os.environ.setdefault("MASTER_PORT", str(get_free_port()))
        needed = {"max_logprobs": self.top_k + TIES} if self.keeps else {}
        with engine_settings(dtype, {**self.engine_kwargs, **needed}):
            super()._init_vllm()

    def _check_policy(self) -> None:
        """Check that the engine can be given this policy."""
        problems = [*unpushable(self.model, on_cpu=self.accelerator.device.type == "cpu")]
        if is_quantised(self.model) and (self._dist.is_fsdp or self._dist.is_zero3):
            problems.append(sharded_problem("quantization_config", ABSENT))
        if problems:
            raise ConfigError(problems)

    def _connect(self) -> None:
        """Connect to the server, which may need `vllm_server_timeout` seconds until it answers all requests."""
        deadline = time.monotonic() + self.server_timeout
        while True:
            try:
                self.vllm_client = self.new_client()
                self._check_server(self.vllm_client.base_url)
                return self.vllm_client.init_communicator(self.accelerator.device)
            except (ServerTrouble, ServerUnreachable):
                if shutdown().wait(1.0) or time.monotonic() > deadline:
                    raise

    def new_client(self) -> Client:
        """Return a client of the server that has no transfer group: it can only send requests.

        Raises:
            ServerTrouble: the server was not up within `vllm_server_timeout`.
        """
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        return Client(url, self.group_port, self.server_timeout, self.weight_transfer)

    def _check_server(self, url: str) -> None:
        """Compare the server with the policy, as `grpo-ext check` compares it with the recipe.

        Raises:
            RuntimeError: the server has another vocabulary, takes fewer tokens than a completion may have, does not
                sample from the policy, returns other log-probabilities than the sampler's, or computes in another
                dtype than the one that it replaces.
        """
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        probe = tuple(tokenizer.encode(PROBE, add_special_tokens=False))
        facts = server_facts(url)
        needed = Wanted(max_model_len=self.max_completion_length + 1, probe_ids=probe)
        if self.keeps:
            needed = replace(needed, logprobs_mode="processed_logprobs", max_logprobs=self.asked)
        elif facts.logprobs_mode != "raw_logprobs" or self.temperature != 1.0:  # at 1 they are the sampler's too
            needed = replace(needed, logprobs_mode="processed_logprobs")
        needed, self._served_dtype = replace(needed, dtype=self._served_dtype), self._served_dtype or facts.dtype
        dtype = str(self.policy_dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        better = Wanted(model=self.model.name_or_path, dtype=dtype)
        if broken := list(map(str, (*mismatches(needed, facts), *unsuited(facts.config)))):
            raise RuntimeError("\n".join([f"the one at {url} does not suit this run:", *broken]))
        for problem in (*mismatches(better, facts), *engine_mismatches(self.engine_kwargs, facts.config)):
            logger.warning(f"vLLM server at {url}: {problem}")

    # The main process talks to the server; every process gets the result.

    def on_main(self, action: Callable[[], object]) -> None:
        """Run `action` on the main process; collective.

        Raises:
            ServerLost: `action` raised; on every process.
        """
        error = None
        if self.accelerator.is_main_process:
            try:
                action()
            except Exception as raised:
                logger.debug("vLLM server", exc_info=True)
                error = f"vLLM server: {raised}"
        error = broadcast(error)
        if error is not None:
            raise ServerLost(error)

    def wait_for_server(self, troubles: Sequence[Exception]) -> None:
        """Wait until the server is back and has a transfer group; collective.

        Args:
            troubles: on the main process the failures of this push or these completions, attempt by attempt.

        Raises:
            ServerLost: `server_timeout` seconds have passed since the first, or the server refuses the request.
        """
        self.on_main(partial(self._reconnect, troubles))

    def _reconnect(self, troubles: Sequence[Exception]) -> None:
        first, last = troubles[0], troubles[-1]
        if not isinstance(last, ServerTrouble):
            raise last
        assert isinstance(first, ServerTrouble)
        deadline, pause = first.since + self.server_timeout, 0.5 * len(troubles)
        left, before = deadline - time.monotonic(), self.vllm_client.serving
        if not shutdown().is_set():
            logger.warning(f"vLLM server: {last}. Waiting up to {max(left, 0):.0f} s for it to come back.")
        while left > 0 and not shutdown().wait(min(pause, LONGEST_PAUSE, left)):
            try:
                self.vllm_client.reconnect(self.accelerator.device, patience=max(deadline - time.monotonic(), 1.0))
                if self.vllm_client.serving != before:
                    self._check_server(self.vllm_client.base_url)
                logger.warning("vLLM server: back. The weights are pushed again before it generates.")
                return
            except (ServerTrouble, ServerUnreachable) as error:
                logger.debug(f"vLLM server: {error}")
            pause, left = 2 * pause, deadline - time.monotonic()
        raise self.lost(last)

    def lost(self, trouble: Exception) -> ServerLost:
        """Return the error that ends a run whose server did not recover from `trouble`."""
        if shutdown().is_set():
            return ServerLost(f"{trouble}; {SIGNALLED}")
        return ServerLost(
            f"{trouble}; it did not recover within vllm_server_timeout={self.server_timeout:g} s. "
            "Start it again (grpo-ext serve --config RECIPE), then resume."
        )

    # Weights.

    def sync_weights(self, copy: HostCopy | None = None) -> None:
        """Push the policy's weights; to a server until they have arrived.

        Args:
            copy: gets them on the main process.

        Raises:
            ServerLost: it died and did not come back; on all processes.
        """
        start = time.monotonic()
        with self.pushing():
            if self.mode == "server":
                troubles: list[Exception] = []
                while (trouble := self._push(copy)) is not None:
                    troubles.append(trouble)
                    self.wait_for_server(troubles)
                self.sync_bytes = self.vllm_client.bytes_sent if self.accelerator.is_main_process else 0
            else:
                self.sync_bytes = 0
                super().sync_weights()
        self.sync_seconds = time.monotonic() - start

    def _push(self, copy: HostCopy | None) -> Exception | None:
        """Try once. Return the failure, which other processes than the main one know only as such."""
        trouble: Exception | None = None
        if self._weight_metadata is None:
            self._weight_metadata = [
                (name, str(param.dtype).removeprefix("torch."), list(param.shape))
                for name, param in self._iter_named_params()
            ]
        params = self._iter_named_params()
        if self.accelerator.is_main_process:
            params = params if copy is None else copy.taking(params)
            try:
                self._send(params)
            except Exception as error:
                trouble = error
        for _ in params:  # gathering a parameter is collective
            pass
        failed = broadcast(trouble is not None)
        return (trouble or ServerTrouble("")) if failed else None

    def _send(self, named: Iterator[tuple[str, Tensor]]) -> None:
        self.vllm_client.update_named_params(self._weight_metadata, named)
        self.vllm_client.reset_prefix_cache()

    def push_again(self, copy: HostCopy, troubles: Sequence[Exception] = ()) -> None:
        """Push weights that were copied, once the server is back; main process, any thread, no collective.

        Args:
            copy: the weights.
            troubles: failures of requests that the server did not answer, if it is known to be down.

        Raises:
            ServerLost: it did not come back within `vllm_server_timeout` seconds.
        """
        failures = [*troubles]
        while True:
            if failures:
                self._reconnect(failures)
            try:
                return self._send(copy.named(self.accelerator.device))
            except ServerTrouble as error:
                failures.append(error)

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        if is_peft_model(self.model) or is_quantised(self.model):
            self._rounding = Rounding()
            named = effective_weights(
                self.model, self.sampler_dtype, self._rounding, self._dist.gather_params, self.accelerator.device
            )
        else:
            named = super()._iter_named_params()
        for name, param in named:
            self.sync_bytes += param.nbytes
            yield self._fix_param_name_to_vllm(name), param

    @property
    def push_rounding(self) -> float | None:
        """Share of the adapters' update that the last push lost by rounding; None without adapters."""
        return None if self._rounding is None else self._rounding.share

    # Completions.

    def seeded(self, seeds: list[int]) -> AbstractContextManager[None]:
        """Let rows that have no stream of random numbers sample by these seeds: those of an evaluation."""
        return temporarily(self, _seeds=seeds)

    @property
    def collective(self) -> bool:
        """Whether processes generate together, by one call of each."""
        return self.accelerator.num_processes > 1 and (self.mode == "server" or self.tensor_parallel_size > 1)

    @property
    def takes_streams(self) -> bool:
        """Whether a row depends on its own stream of random numbers only."""
        return self.mode == "colocate"

    @property
    def limit(self) -> int:
        """Most tokens of a completion."""
        return int(self.max_completion_length)

    def sample(
        self,
        contexts: list[list[int]],
        limits: Sequence[int],
        streams: Sequence[np.random.Generator] | None = None,
        *,
        fields: Mapping[str, Any] = MappingProxyType({}),
        group: int = 1,
    ) -> list[Sampled]:
        """Sample a completion after each context, as `PolicySampler` does, by the weights of the last push.

        Raises:
            RuntimeError: vLLM kept more tokens than it could return.
            ServerLost: the server died and did not come back; on all processes.
        """
        assert not fields, "images are refused with vLLM"
        if streams is None:
            _, ids, values, tokens = self.generate(contexts, None, group)
        else:
            seeds = [int(stream.integers(2**31)) for stream in streams]
            _, ids, values, tokens = self._by_seeds(contexts, seeds, limits)
        bound = self.sets_bound if self.keeps and self.model.training else None
        rows = zip(ids, values or [], tokens or [None] * len(ids), strict=True)
        return [read(*row, bound=bound) for row in rows]

    @property
    def asked(self) -> int:
        """Number of likely tokens to ask vLLM for beside the sampled one, where the kept ones are wanted."""
        return min(self.top_k + TIES, self._vocabulary) if self.keeps else 0

    @property
    def sets_bound(self) -> int:
        """Number of tokens from which on a kept set may be larger than what vLLM returned; 0: it returns them all."""
        return 0 if self.asked == self._vocabulary else self.asked

    @property
    def _vocabulary(self) -> int:
        config: Any = self.model.config
        return int(config.get_text_config().vocab_size)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[object] | None] | None,
        num_generations: int,
        profiler: ProfilingContext | None = None,
    ) -> Completions:
        """Generate as TRL's does; arguments and result are TRL's.

        Raises:
            ServerLost: the server died and did not come back; on all processes.
        """
        if self._seeds is not None:
            seeds = [*self._seeds, *[0] * len(prompts)][: len(prompts)]
            return self._by_seeds(prompts, seeds, [self.limit] * len(prompts), images, profiler)
        stock = partial(super().generate, prompts, images, num_generations, profiler)
        if self.mode == "colocate":
            return stock()

        def asked() -> Completions | None:
            made: Completions = stock()
            return made if made[1] or not prompts else None

        return self._answered(asked)

    def _by_seeds(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        limits: Sequence[int],
        images: list[list[object] | None] | None = None,
        profiler: ProfilingContext | None = None,
    ) -> Completions:
        """Generate each row by its own seed and limit; processes may have different numbers of rows.

        A server gets a request for each row: the rows of one request would share their seed.
        """
        if self.mode == "server":
            return self._answered(partial(self._by_requests, prompts, seeds, limits))
        rows, width = self._of_engine(list(zip(seeds, limits, strict=True)))
        filled = prompts + [[0]] * (width - len(prompts))  # TRL's takes as many rows of each rank
        with temporarily(self.llm, generate=partial(each_seeded, self.llm.generate, rows)):
            made = super().generate(filled, images, 1, profiler)
        return tuple(part and part[: len(prompts)] for part in made)

    def _answered(self, ask: Callable[[], Completions | None]) -> Completions:
        """Return what `ask` returns; while the server does not answer, push the weights and ask again; collective."""
        troubles: list[Exception] = []
        while (answer := ask()) is None:
            if self.accelerator.is_main_process:
                troubles.append(self.vllm_client.failure or ServerTrouble("no completions"))
            self.wait_for_server(troubles)
            self.sync_weights()
        return answer

    def _of_engine(self, rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
        """Return seeds and limits of all rows of a colocated engine, and the number of rows of each rank.

        With tensor parallelism they are its ranks', in order, filled up to as many as the largest has. Every rank must
        give a row the same seed, or the ranks sample different tokens for it.
        """
        if self.tensor_parallel_size == 1:
            return rows, len(rows)
        gathered: list[list[tuple[int, int]]] = [[]] * self.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, rows, group=self.tp_group)
        width = max(map(len, gathered))
        return [row for of_rank in gathered for row in of_rank + [(0, 1)] * (width - len(of_rank))], width

    def _by_requests(self, prompts: list[list[int]], seeds: list[int], limits: Sequence[int]) -> Completions | None:
        """Generate by a server: the main process sends a request for each row of all processes."""
        every = gather_object([list(zip(prompts, limits, seeds, strict=True))])
        answers = None
        if self.accelerator.is_main_process:
            self.vllm_client.failure = None
            try:
                with ThreadPoolExecutor(CONNECTIONS) as threads:
                    rows = [row for of_process in every for row in of_process]
                    answers = list(threads.map(lambda row: self.completion_of(*row), rows))
            except Exception as error:
                self.vllm_client.failure = error
        answers = broadcast(answers)
        if answers is None:
            return None
        start = sum(len(rows) for rows in every[: self.accelerator.process_index])
        mine = answers[start : start + len(prompts)]
        return prompts, [row[0] for row in mine], [row[1] for row in mine], [row[2] for row in mine]

    def settings(self) -> dict[str, Any]:
        """Return the settings of a request, as they are at the moment."""
        return {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "logprobs": self.logprobs,
            "structured_outputs_regex": self.structured_outputs_regex,
            "generation_kwargs": self.generation_kwargs or {},
        }

    def completion_of(self, context: list[int], limit: int, seed: int) -> tuple[list[int], Values, Any]:
        """Request one completion; return its ids, and log-probabilities at each with their tokens.

        Raises:
            ServerTrouble: the server did not answer, or has lost the weights that were pushed.
        """
        return first(self.vllm_client.complete([context], **seeded_request(self.settings(), limit, seed)))


def first(answer: Mapping[str, Any]) -> tuple[list[int], Values, Any]:
    """Return ids, log-probabilities and their tokens of the first completion of a server's answer."""
    tokens = answer.get("logprob_token_ids")
    return answer["completion_ids"][0], answer["logprobs"][0], None if tokens is None else tokens[0]


def seeded_request(settings: Mapping[str, Any], limit: int, seed: int) -> dict[str, Any]:
    """Return the settings of a request for one completion with a limit and a seed of its own."""
    return {**settings, "max_tokens": limit, "generation_kwargs": {**settings["generation_kwargs"], "seed": seed}}


def broadcast(value: T) -> T:
    """Return the main process's `value` on every process."""
    box = [value]
    broadcast_object_list(box, from_process=0)
    return box[0]
