"""Completions by vLLM: by the engine in this process, or by a server that may die and come back."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from accelerate.utils import gather_object
from trl.extras.profiling import ProfilingContext

from grpo_ext.config.temporary import temporarily
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.vllm.colocated import each_seeded, expect_prompts, of_all_ranks
from grpo_ext.rollout.vllm.pushed import PushedEngine, broadcast
from grpo_ext.rollout.vllm.requester import Request, Requester, read, seed_of, with_routes
from grpo_ext.rollout.vllm.weights import HostCopy

Completions: TypeAlias = tuple[Any, ...]
"""Prompt ids, completion ids, log-probabilities and their token ids, as TRL's `generate` returns them."""

SETTINGS = (
    *("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "logprobs"),
    *("structured_outputs_regex", "generation_kwargs"),
)


class Generation(PushedEngine):
    """Samples by the weights of the last push: a `PolicySampler`, and TRL's `VLLMGeneration` for its callers."""

    _seeds: list[int] | None = None

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

    @property
    def support_bound(self) -> int | None:
        """Bound of supports, as `returned_supports` takes it; None: they are not wanted."""
        if not self.with_support:
            return None
        return 0 if self.likeliest == self._vocabulary else self.likeliest

    def settings(self) -> dict[str, Any]:
        """Return the settings of a request, as they are at the moment."""
        return {name: getattr(self, name) for name in SETTINGS} | {"min_p": self.min_p or 0.0}

    def sample(
        self,
        contexts: list[list[int]],
        limits: Sequence[int],
        streams: Sequence[np.random.Generator] | None = None,
        *,
        fields: Mapping[str, Any] = MappingProxyType({}),
        images: Sequence[Any] | None = None,
        group: int = 1,
    ) -> list[Sampled]:
        """Sample a completion after each context, as `PolicySampler` does, by the weights of the last push.

        Raises:
            RuntimeError: vLLM kept more tokens than it could return.
            ServerLost: the server died and did not come back; on all processes.
        """
        bound = self.support_bound if self.model.training else None
        requests = self._requests(contexts, limits, streams, images)
        if self.mode == "server":
            return self._by_server(requests, group, bound) or []
        routes: list[np.ndarray | None] = []
        _, *rows = self._by_engine(requests, group, routes=routes)
        return with_routes([read(*row, bound=bound) for row in zip(*rows, strict=True)], contexts, routes)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[object] | None] | None,
        num_generations: int,
        profiler: ProfilingContext | None = None,
    ) -> Completions:
        """Generate as TRL's does, for a rollout function; arguments and result are TRL's.

        Raises:
            ServerLost: the server died and did not come back; on all processes.
        """
        requests = self._requests(prompts, [self.limit] * len(prompts), images=images)
        if self.mode == "colocate":
            return self._by_engine(requests, num_generations, profiler)
        with profiler or nullcontext():
            rows = self._by_server(requests, num_generations) or []
        ids = [row.ids for row in rows]
        logprobs = [[[logp] for logp in row.logps or ()] for row in rows]
        return prompts, ids, logprobs, [[[token] for token in its] for its in ids]

    def _requests(
        self,
        contexts: list[list[int]],
        limits: Sequence[int],
        streams: Sequence[np.random.Generator] | None = None,
        images: Sequence[Any] | None = None,
    ) -> list[Request]:
        """Return a request for each row, by its stream or the evaluation's seeds; without either it has no seed."""
        seeds: Sequence[int | None] = [None] * len(contexts)
        if streams is not None:
            seeds = [seed_of(stream) for stream in streams]
        elif self._seeds is not None:
            seeds = [*self._seeds, *[0] * len(contexts)][: len(contexts)]
        rows = zip(contexts, limits, seeds, images or [None] * len(contexts), strict=True)
        return [Request([context], limit, seed, 1, self.adapter, seen) for context, limit, seed, seen in rows]

    def _by_engine(
        self,
        requests: list[Request],
        group: int,
        profiler: ProfilingContext | None = None,
        routes: list[np.ndarray | None] | None = None,
    ) -> Completions:
        """Generate by the engine in this process; ranks that share one may have different numbers of seeded rows.

        `routes` gets the experts that vLLM chose in each row, if it returns them.

        Raises:
            ConfigError: vLLM samples after other tokens, those that it makes of the images.
        """
        prompts = [context for request in requests for context in request.contexts]
        images = [request.images for request in requests] if any(request.images for request in requests) else None
        adapter: dict[str, Any] = {"lora_request": self._loaded} if self.adapts else {}
        own = partial(self.llm.generate, **adapter)
        generate = own if routes is None or not self.with_routes else partial(_noting_routes, own, routes)
        if requests and requests[0].seed is None:
            with temporarily(self.llm, generate=generate):
                parts = super().generate(prompts, images, group, profiler)
            return expect_prompts(parts, prompts)
        rows, width = of_all_ranks(requests, self.tensor_parallel_size, self.tp_group)
        filled = prompts + [[0]] * (width - len(prompts))  # TRL's takes as many rows of each rank
        with temporarily(self.llm, generate=partial(each_seeded, generate, rows)):
            parts = super().generate(filled, images and images + [None] * (width - len(prompts)), 1, profiler)
        return expect_prompts(tuple(part and part[: len(prompts)] for part in parts), prompts)

    def join(self) -> None:
        """Take part in what other processes still sample by the server, until none does; collective."""
        bound = self.support_bound if self.model.training else None
        while self.collective and self.mode == "server" and self._by_server(None, 1, bound) is not None:
            pass

    def _by_server(self, requests: list[Request] | None, group: int, bound: int | None = None) -> list[Sampled] | None:
        """Sample by the server: the main process sends the requests of all, again after each recovery; collective.

        A process that has no more rows passes None, and gets None once no process has any.

        Each row with a seed is a request of its own, since the rows of one request would share its seed; processes may
        have different numbers of them. Rows without seeds are sent as one, with `group` completions for each context,
        or as one for each context where some have images.
        """
        of_processes = gather_object([requests])
        if all(rows is None for rows in of_processes):
            return None
        of_processes = [rows or [] for rows in of_processes]
        all_rows = [row for rows in of_processes for row in rows]
        if all_rows and all_rows[0].seed is None:
            all_rows = [row._replace(n=group) for row in all_rows[::group]]
            if not any(row.images for row in all_rows):
                all_rows = [all_rows[0]._replace(contexts=[context for row in all_rows for context in row.contexts])]
        sampled: list[Sampled] | None = None
        troubles: list[Exception] = []
        while True:
            if self.accelerator.is_main_process:
                try:
                    sampled = self.requester(bound).ask_all(all_rows)
                except Exception as error:
                    troubles.append(error)
            sampled = broadcast(sampled)
            if sampled is not None:
                start = sum(map(len, of_processes[: self.accelerator.process_index]))
                return sampled[start : start + len(requests or ())]
            self.recover(troubles)

    def requester(self, bound: int | None = None) -> Requester:
        """Return what asks the server by the settings of the moment; main process."""
        return Requester(self.vllm_client, self.settings(), bound)

    def recover(self, troubles: Sequence[Exception]) -> None:
        """Wait until the server is back after these failures of requests, and push the weights again; collective.

        Raises:
            ServerLost: it did not come back, or refuses a request; on all processes.
        """
        if self.adapts:
            return self.on_main(partial(self.push_again, HostCopy(), troubles))
        self.on_main(partial(self.reopen, troubles))
        self.sync_weights()


def _noting_routes(
    generate: Callable[..., list[Any]], routes: list[np.ndarray | None], *args: Any, **options: Any
) -> list[Any]:
    outputs = generate(*args, **options)
    routes += [output.outputs[0].routed_experts for output in outputs]
    return outputs
