"""TRL's vLLM client with a limit on every wait: requests, and the server's identity."""

import base64
import io
import json
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any
from urllib.parse import urlparse

import numpy as np
import requests
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient, parse_logprobs

from grpo_ext.rollout.vllm.server import CONNECTIONS, ServerTrouble
from grpo_ext.waiting import Wait, WaitedInVain, in_thread

POLL_SECONDS = 5.0
TOO_MANY_REQUESTS = 429
FRESH_SECONDS = 1.0
"""Age up to which metrics of the server are read again; a server takes longer to restart."""
UNLABELLED = "default"
"""vLLM's label of weights that were not pushed."""
IMAGES_NEED = "Prompts with images need vLLM 0.31 or newer, started by grpo-ext serve."
WEIGHTS = ", weights "
"""Precedes the label in an identity."""
PUSH = ", push "
"""Precedes the number of the push in a label, after the run."""


class Client(VLLMClient):
    """`trl.generation.vllm_client.VLLMClient` each of whose requests ends, with an answer or with `ServerTrouble`.

    Args:
        base_url: address of the server.
        timeout: seconds without a sign of life after which a server counts as dead.

    Raises:
        ServerTrouble: the server was not up within `timeout`.
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        self.timeout = self.patience = timeout
        self.serving: str | None = None
        """Identity of the server that has all weights of the last push; a restarted one has another."""
        self._reading = threading.Lock()
        self._pages: dict[str, tuple[float, str | None]] = {}
        """Time and text of pages of the server."""
        self._sent = 0
        """Weights handed to the transfer, which count as progress."""
        self._failures = 0
        """Requests that failed: what NCCL then waits for does not come."""
        self._last = threading.local()
        """Each thread's last answer, of which TRL's `generate` returns a part."""
        # what TRL's own sets, which needs vLLM where only HTTP is used, and repeats requests: a push must not be
        url, self.session = urlparse(base_url), requests.Session()
        self.base_url, self.host = f"{url.scheme or 'http'}://{url.netloc}{url.path}", url.hostname
        self.communicator, self._updating_weights = None, False
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
        self.check_server(timeout)
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]

    def healthy(self) -> bool:
        """Return whether the server reports that it is healthy."""
        try:
            return requests.get(f"{self.base_url}/health", timeout=POLL_SECONDS).status_code == 200
        except requests.RequestException:
            return False

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is healthy.

        Raises:
            ServerTrouble: it was not within `total_timeout` seconds.
        """
        waiting = self._waiting(total_timeout)
        try:
            while not self.healthy():
                time.sleep(min(retry_interval, waiting.seconds()))
            waiting.progressed()
        except WaitedInVain as error:
            seconds = f"within {total_timeout:g} s: `grpo-ext serve` starts one"
            raise ServerTrouble(f"no vLLM server at {self.base_url} {seconds}") from error

    def _waiting(self, seconds: float) -> Wait:
        return Wait(f"vLLM server at {self.base_url}", seconds, "vllm_server_timeout")

    def get_server_info(self) -> dict[str, Any]:
        """Return the configuration of the server."""
        return self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request(lambda: self.session.get(url, **kwargs))

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        try:
            self._last.answer = self._request(lambda: self.session.post(url, **kwargs))
            return self._last.answer
        except Exception:
            self._failures += 1
            raise

    def _request(self, send_request: Callable[[], requests.Response]) -> dict[str, Any]:
        """Return the answer to a request, however long it takes while the server makes progress.

        Raises:
            ServerTrouble: broken connection, a server error, or no progress for `patience` seconds.
            RuntimeError: the server refuses the request, and would refuse it again.
        """
        future, waiting = in_thread(send_request), self._waiting(self.patience)
        looked, tokens, sent = time.monotonic(), None, self._sent
        try:
            while not wait([future], timeout=waiting.seconds()).done:
                if time.monotonic() - looked < POLL_SECONDS:
                    continue
                processed = self._tokens_processed(within=max(0.1, waiting.left))
                if self._sent != sent or (None not in (processed, tokens) and processed != tokens):
                    waiting.progressed()
                looked, tokens, sent = time.monotonic(), tokens if processed is None else processed, self._sent
        except WaitedInVain as error:
            raise ServerTrouble(f"{self.base_url}: {error}", error.since) from error
        try:
            response = future.result()
            waiting.progressed()
            if response.status_code == 200:
                says_more = response.content and not response.content.startswith(b"Success")  # text, about an adapter
                answer: dict[str, Any] = response.json() if says_more else {}
                return answer
        except requests.RequestException as error:
            raise ServerTrouble(f"{self.base_url}: {error}") from error
        problem = f"{response.url} answered {response.status_code}: {response.text[:500]}"
        if response.status_code < 500 and response.status_code != TOO_MANY_REQUESTS:
            raise RuntimeError(problem)
        self.session.close()  # the server may be about to close the connection, too late for the next request
        raise ServerTrouble(problem)

    def _metric(self, *names: str, within: float = POLL_SECONDS) -> float | None:
        """Return the sum of the server's metrics whose lines begin with `names`, or None without an answer in time."""
        if (text := self._page("/metrics", within)) is None:
            return None
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names))

    def _page(self, path: str, within: float = POLL_SECONDS) -> str | None:
        """Return the text of a page, which the threads of many requests share, or None without an answer in time."""
        with self._reading:
            at, text = self._pages.get(path, (-math.inf, None))
            if time.monotonic() - at > FRESH_SECONDS:
                try:
                    text = requests.get(f"{self.base_url}{path}", timeout=min(within, POLL_SECONDS)).text
                except requests.RequestException:
                    text = None
                self._pages[path] = time.monotonic(), text
        return text

    def _tokens_processed(self, within: float) -> float | None:
        return self._metric("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{", within=within)

    def identity(self) -> str | None:
        """Return the server's identity, which changes with a restart, and its weights' label; None without an answer.

        Without a start time, as where several processes take its requests, it is the identifier of its configuration.
        Releases of vLLM before 0.31 have no label.
        """
        start, page = self._metric("process_start_time_seconds "), self._page("/weight_info")
        if start is None or page is None:
            return None
        server = f"started at {start}" if start else str(self.get_server_info()["instance_id"])
        try:
            label = json.loads(page).get("weight_version") or UNLABELLED
        except ValueError:
            label = UNLABELLED
        return server if label == UNLABELLED else f"{server}{WEIGHTS}{label}"

    def reset_encoder_cache(self) -> None:
        """Remove what the server keeps of images by the weights before.

        Raises:
            ServerTrouble: the server does not answer.
        """
        self._post(f"{self.base_url}/reset_encoder_cache")

    def check_serving(self) -> None:
        """Check that the server still has the weights of the last push, or those of one that is not noted here yet.

        Raises:
            ServerTrouble: it has been restarted.
            RuntimeError: another run has pushed its weights since.
        """
        self._check_identity(self.serving)

    def _check_identity(self, wanted: str | None) -> None:
        if self.identity() in (None, wanted):
            return
        self._pages.clear()  # of before the last push
        if (identity := self.identity()) in (None, wanted):
            return
        server, _, label = identity.partition(WEIGHTS)
        before, _, ours = str(wanted).partition(WEIGHTS)
        if label and server == before:
            if label.partition(PUSH)[0] == ours.partition(PUSH)[0]:  # an adapter's push, beside requests
                return
            raise RuntimeError(
                f"the vLLM server at {self.base_url} has the weights of another run ({label}). End it, or start a "
                "server for this one."
            )
        raise ServerTrouble(f"{self.base_url} has been restarted")

    def generate(self, prompts: list[list[int]], **settings: Any) -> dict[str, Any]:  # type: ignore[override]
        """Generate as TRL's does, from any thread; `features` are the images of a single prompt, as content parts.

        The experts that vLLM chose come too, if the server returns them.

        Raises:
            ServerTrouble: the server did not answer, or has lost the weights that were pushed.
            RuntimeError: it refuses the request, or has the weights of another run.
        """
        self.check_serving()
        try:
            self._last.answer = {}
            answer: dict[str, Any] = super().generate(prompts, **settings)
            rows, choices = answer["completion_ids"], self._last.answer.get("choices", ())
            answer["routes"] = [_array(choice.get("routed_experts")) for choice in choices]
            scored = all(
                len(ids) == len(of_row) and all(of_row) for ids, of_row in zip(rows, answer["logprobs"], strict=False)
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"answered something else than completions ({type(error).__name__}: {error})"
            raise ServerTrouble(f"{self.base_url} {reason}") from error
        if not scored or len(rows) != len(prompts) * settings.get("n", 1):
            raise ServerTrouble(f"{self.base_url} answered with fewer completions or log-probabilities than asked for")
        return answer

    def _generate_from_features(  # type: ignore[override]
        self,
        prompts: list[list[int]],
        features: list[list[dict[str, str]]],
        sampling_params: dict[str, Any],
        max_concurrent_requests: int = 1,
    ) -> dict[str, Any]:
        """Generate after a prompt with images, which TRL would have processed by a request of their own.

        Raises:
            RuntimeError: the server does not take images beside tokens, or samples after other tokens.
        """
        [ids], [parts] = prompts, features
        request = {"model": self.model, "token_ids": ids, "content_parts": parts, "sampling_params": sampling_params}
        try:
            answer = self._post(f"{self.base_url}/inference/v1/generate", json={**request, "return_token_ids": True})
        except RuntimeError as error:
            raise RuntimeError(f"{error}. {IMAGES_NEED}") from error
        seen = (answer["mm_placeholders"] or {}).get("image", [])
        if answer["prompt_token_ids"] != ids or len(seen) != len(parts):
            raise RuntimeError(f"{self.base_url} samples after other tokens than the prompt's. {IMAGES_NEED}")
        choices = answer["choices"]
        logprobs, tokens = parse_logprobs([choice["logprobs"] for choice in choices])
        completions = [choice["token_ids"] for choice in choices]
        return {"completion_ids": completions, "logprobs": logprobs, "logprob_token_ids": tokens}


def _array(encoded: str | None) -> np.ndarray | None:
    """Return an array that vLLM encoded as base64 of NumPy's file format."""
    return None if encoded is None else np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
