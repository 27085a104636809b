"""Requests to a vLLM server, and vLLM's answers: sampled tokens, log-probabilities and the sampling support."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from grpo_ext.config.truncation import WHOLE
from grpo_ext.errors import ServerLost
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.support_log import encoded_lists
from grpo_ext.rollout.vllm.server import CONNECTIONS
from grpo_ext.waiting import POLL_SECONDS, in_thread

if TYPE_CHECKING:
    from grpo_ext.rollout.vllm.client import Client

Call: TypeAlias = Callable[[], list[Sampled]]
TIES = 16
"""Tokens beyond top_k that vLLM is asked for: it may keep all that are as likely as the last one."""
MINUS_INFINITY = -9999.0
"""A server's way to write minus infinity."""

Values = Sequence[Sequence[float | None]]
"""Log-probabilities at each token of a completion; None for NaN."""


def most_logprobs(top_k: int) -> int:
    """Return the number of log-probabilities at a token that a sampling support is read from."""
    return top_k + TIES if top_k else WHOLE


def as_part(image: Any) -> dict[str, str]:
    """Return an image as a server takes it beside tokens."""
    from trl.generation.vllm_client import pil_to_base64  # which imports vLLM

    return {"type": "image_url", "url": f"data:image/png;base64,{pil_to_base64(image)}"}


def seed_of(stream: np.random.Generator) -> int:
    """Return the next seed of a row from its stream of random numbers."""
    return int(stream.integers(2**31))


class Request(NamedTuple):
    """The content of one request: one context with a seed, or contexts that share the server's random state."""

    contexts: list[list[int]]
    limit: int
    """Most tokens of a completion."""
    seed: int | None
    n: int = 1
    """Completions of each context."""
    model: str | None = None
    """Name of the adapter that samples; None: the server's weights."""
    images: list[Any] | None = None
    """Images of the context, of which there is one then."""


class Requester:
    """Asks a server for completions; a request is made here and nowhere else.

    Args:
        client: of this process.
        settings: of sampling, as `Generation.settings` returns them.
        bound: as in `read`.
        repeated: calls a request, again after a failure; by default a failure is raised.
        closed: ends all waits, once it is set; requests that are under way are not waited for.
    """

    def __init__(
        self,
        client: "Client",
        settings: Mapping[str, Any],
        bound: int | None = None,
        repeated: Callable[[Call], list[Sampled]] = lambda call: call(),
        closed: threading.Event | None = None,
    ) -> None:
        self._client, self._settings, self._bound, self._repeated = client, settings, bound, repeated
        self._connections, self._closed = threading.Semaphore(CONNECTIONS), closed or threading.Event()

    def ask(self, request: Request) -> list[Sampled]:
        """Return the completions of a request; any thread, blocks.

        Raises:
            ServerTrouble: the server did not answer, or has lost the weights that were pushed.
            RuntimeError: the server refuses the request, or kept more tokens than it could return.
        """
        return self._repeated(partial(self._ask, request))

    def _ask(self, request: Request) -> list[Sampled]:
        settings = {**self._settings, "n": request.n, "max_tokens": request.limit}
        own = {"seed": request.seed, "model": request.model}
        given = {name: value for name, value in own.items() if value is not None}
        settings["generation_kwargs"] = {**settings["generation_kwargs"], **given}
        if request.images:
            settings["features"] = [list(map(as_part, request.images))]
        answer = self._client.generate(request.contexts, **settings)
        ids, logprobs, tokens = (answer[key] for key in ("completion_ids", "logprobs", "logprob_token_ids"))
        found = [read(*row, bound=self._bound) for row in zip(ids, logprobs, tokens, strict=True)]
        contexts = [context for context in request.contexts for _ in range(request.n)]
        return with_routes(found, contexts, answer.get("routes", ()))

    def ask_all(self, requests: Sequence[Request]) -> list[Sampled]:
        """Return the completions of all requests, in order, or raise what one of them raised.

        Their threads do not keep a process from ending. After a failure no further request is sent.

        Raises:
            ServerLost: the requester was closed.
        """
        failed = threading.Event()

        def answer(request: Request) -> list[Sampled]:
            with self._connections:
                return [] if self._closed.is_set() or failed.is_set() else self.ask(request)

        answers = [in_thread(partial(answer, request)) for request in requests]
        waiting = set(answers)
        while waiting and not self._closed.is_set():
            ended, waiting = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            if any(future.exception() is not None for future in ended):
                failed.set()
        if self._closed.is_set():
            raise ServerLost("the run has ended")
        return [sampled for future in answers for sampled in future.result()]


def returned_supports(logprobs: Values, token_ids: Sequence[Sequence[int]], bound: int) -> list[list[int]]:
    """Return the support of each token of a completion: the tokens that top-p or top-k left.

    Args:
        logprobs: normalised over the support; a token outside of it has none.
        token_ids: their tokens.
        bound: number of tokens from which on a support may be larger than what vLLM returned; 0: it returned all
            there are.

    Raises:
        RuntimeError: a support may be larger than what vLLM returned.
    """
    supports = [
        [i for value, i in zip(values, tokens, strict=True) if value is None or value > MINUS_INFINITY]
        for values, tokens in zip(logprobs, token_ids, strict=True)
    ]
    if bound and (largest := max(map(len, supports), default=0)) >= bound:
        raise RuntimeError(
            f"vLLM kept {largest} tokens or more at one position, {TIES} beyond top_k: so many are as likely as the "
            "last one that the set is not known. Lower top_k, or leave top_k, top_p and min_p unset."
        )
    return supports


def read(ids: list[int], logprobs: Values, token_ids: Sequence[Sequence[int]], *, bound: int | None) -> Sampled:
    """Return a completion from vLLM's answer.

    Args:
        ids: the sampled tokens.
        logprobs, token_ids, bound: as in `returned_supports`, which may raise; no `bound`: supports are not wanted.
    """
    support = None if bound is None else encoded_lists(returned_supports(logprobs, token_ids, bound))
    rows = zip(ids, logprobs, token_ids, strict=True)
    sampled = [values[tokens.index(token)] for token, values, tokens in rows]
    return Sampled(ids, [math.nan if logp is None else logp for logp in sampled], support)


def with_routes(
    sampled: list[Sampled], contexts: Sequence[Sequence[int]], routes: Sequence[np.ndarray | None]
) -> list[Sampled]:
    """Add the experts that vLLM chose, [tokens, layers, experts] for each row, if it returned them.

    Raises:
        RuntimeError: vLLM returned fewer than one route for each token but the last.
    """
    if all(of_row is None for of_row in routes):
        return sampled
    found = []
    for one, context, of_row in zip(sampled, contexts, routes, strict=True):
        needed, count = len(context) + len(one.ids) - 1, 0 if of_row is None else len(of_row)
        if of_row is None or count < needed:
            raise RuntimeError(f"vLLM returned {count} routes for {needed} tokens; replay_routes needs vLLM 0.31")
        narrow = np.uint8 if of_row.dtype == np.uint8 else np.int16
        found.append(one._replace(routes=torch.from_numpy(of_row[:needed].astype(narrow))))
    return found
