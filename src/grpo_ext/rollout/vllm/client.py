"""TRL's vLLM client with weight transfer without NCCL, and a limit on every wait."""

import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlparse

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore
from trl.generation.vllm_client import VLLMClient

from grpo_ext.config.temporary import temporarily
from grpo_ext.rollout.vllm.gloo import BACKEND, TAKEN, TRAINER_RANK, mark, open_group, open_store, send, specs_of
from grpo_ext.rollout.vllm.server import CONNECTIONS
from grpo_ext.rollout.vllm.watchdog import abort_when_stalled
from grpo_ext.waiting import Wait, WaitedInVain

T = TypeVar("T")
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
POLL_SECONDS = 5.0
RETRY_SECONDS = 0.1
TOO_MANY_REQUESTS = 429
FRESH_SECONDS = 1.0
"""Age up to which metrics of the server are read again; a server takes longer to restart."""
EMPTY_ANSWER: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
"""Result of a failed `generate`; `Client.failure` has the reason."""


class ServerTrouble(ConnectionError):
    """A request failed, but may succeed when repeated.

    Attributes:
        since: time of the server's last sign of life, by `time.monotonic`; by default now.
    """

    def __init__(self, message: str, since: float | None = None) -> None:
        super().__init__(message)
        self.since = time.monotonic() if since is None else since


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a daemon thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def address_seen_by(host: str | None) -> str:
    """Return the address at which `host` reaches this machine."""
    if host in LOOPBACK:
        return "127.0.0.1"
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


class Client(VLLMClient):
    """`trl.generation.vllm_client.VLLMClient` that sends weights by gloo or NCCL and notices a server's death.

    Args:
        base_url: address of the server.
        group_port: port at which this process waits for the server's workers.
        timeout: seconds without a sign of life after which a server counts as dead.
        transfer: 'auto', 'nccl' or 'gloo'.

    Raises:
        ServerTrouble: the server was not up within `timeout`.
    """

    def __init__(self, base_url: str, group_port: int, timeout: float, transfer: str) -> None:
        self.timeout = self.patience = timeout
        self.transfer, self.owner = transfer, f"{socket.gethostname()}:{os.getpid()}@{time.time_ns()}"
        self.failure: Exception | None = None
        self.bytes_sent = 0
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._groups_opened = 0
        self.serving: str | None = None
        """Identity of the server that has the weights; a restarted one has another."""
        self._metrics = threading.Lock()
        self._metrics_read: tuple[float, str | None] = (-math.inf, None)
        self._updating = False
        self._sent = 0
        """Weights handed to the transfer, which count as progress."""
        self._failures = 0
        """Requests that failed: what NCCL then waits for does not come."""
        # what TRL's own sets, which needs vLLM where only HTTP is used, and repeats requests: a push must not be
        url, self.session = urlparse(base_url), requests.Session()
        self.base_url, self.host = f"{url.scheme or 'http'}://{url.netloc}{url.path}", url.hostname
        self.group_port, self.communicator, self._updating_weights = group_port, None, False
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
        self.check_server(timeout)
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]

    # Requests. Each ends, with an answer or with ServerTrouble.

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
            raise ServerTrouble(f"no vLLM server at {self.base_url} within {total_timeout:g} s") from error

    def _waiting(self, seconds: float) -> Wait:
        return Wait(f"vLLM server at {self.base_url}", seconds, "vllm_server_timeout")

    def get_server_info(self) -> dict[str, Any]:
        """Return the configuration of the server."""
        return self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request(lambda: self.session.get(url, **kwargs))

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        try:
            return self._request(lambda: self.session.post(url, **kwargs))
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
        asked, tokens, sent = time.monotonic(), None, self._sent
        try:
            while not wait([future], timeout=waiting.seconds()).done:
                if time.monotonic() - asked < POLL_SECONDS:
                    continue
                seen = self._tokens_processed(within=max(0.1, waiting.left))
                if self._sent != sent or (None not in (seen, tokens) and seen != tokens):
                    waiting.progressed()
                asked, tokens, sent = time.monotonic(), tokens if seen is None else seen, self._sent
        except WaitedInVain as error:
            raise ServerTrouble(f"{self.base_url}: {error}", error.since) from error
        try:
            response = future.result()
            waiting.progressed()
            if response.status_code == 200:
                answer: dict[str, Any] = response.json() if response.content else {}
                return answer
        except requests.RequestException as error:
            raise ServerTrouble(f"{self.base_url}: {error}") from error
        problem = f"{response.url} answered {response.status_code}: {response.text[:500]}"
        if response.status_code < 500 and response.status_code != TOO_MANY_REQUESTS:
            raise RuntimeError(problem)
        self.session.close()  # the server may be about to close the connection, too late for the next request
        raise ServerTrouble(problem)

    def _metric(self, *names: str, within: float = POLL_SECONDS) -> float | None:
        """Return the sum of the server's metrics whose lines begin with `names`, or None without an answer in time.

        The threads of many requests share what one of them has read.
        """
        with self._metrics:
            at, text = self._metrics_read
            if time.monotonic() - at > FRESH_SECONDS:
                try:
                    text = requests.get(f"{self.base_url}/metrics", timeout=min(within, POLL_SECONDS)).text
                except requests.RequestException:
                    text = None
                self._metrics_read = time.monotonic(), text
        if text is None:
            return None
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names))

    def _tokens_processed(self, within: float) -> float | None:
        return self._metric("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{", within=within)

    def identity(self) -> str | None:
        """Return what tells the server from a restarted one, or None if it does not answer.

        Without a start time, as where several processes take its requests, it is the identifier of its configuration.
        """
        if (start := self._metric("process_start_time_seconds ")) is None:
            return None
        return f"started at {start}" if start else str(self.get_server_info()["instance_id"])

    def complete(self, prompts: list[list[int]], **settings: Any) -> dict[str, Any]:
        """Generate as TRL's `generate`, from any thread.

        Raises:
            ServerTrouble: the server did not answer, or has lost the weights that were pushed.
        """
        if self.identity() not in (None, self.serving):  # restarted between two requests
            raise ServerTrouble(f"{self.base_url} has been restarted")
        try:
            answer: dict[str, Any] = super().generate(prompts, **settings)
            rows, logprobs = answer["completion_ids"], answer["logprobs"]
            known = settings.get("logprobs", 0) is None or all(map(_is_sampled, rows, logprobs))
            whole = known and len(rows) == len(prompts) * settings.get("n", 1)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"answered something else than completions ({type(error).__name__}: {error})"
            raise ServerTrouble(f"{self.base_url} {reason}") from error
        if not whole:
            raise ServerTrouble(f"{self.base_url} answered with fewer completions or log-probabilities than asked for")
        return answer

    def generate(self, prompts: list[list[int]], **settings: Any) -> dict[str, Any]:  # type: ignore[override]
        """Generate as TRL's does, but return `EMPTY_ANSWER` after a failure: other processes wait for an answer."""
        self.failure = None
        try:
            return self.complete(prompts, **settings)
        except Exception as error:
            self.failure = error
            return EMPTY_ANSWER

    # Weights.

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Open the transfer group that the server's engine needs; also after the server has restarted.

        Raises:
            RuntimeError: the server has another engine than this side needs, or `vllm_group_port` is taken.
            ServerTrouble: the server did not join.
        """
        engine = (self.get_server_info()["weight_transfer_config"] or {}).get("backend")
        on_cuda = torch.device(device).type == "cuda"
        wanted = self.transfer if self.transfer != "auto" else engine if on_cuda and engine == "nccl" else BACKEND
        if engine != wanted:
            raise RuntimeError(
                f"the vLLM server at {self.base_url} receives weights by {engine or 'no engine'}, this side sends "
                f"them by {wanted}. Restart it by grpo-ext serve, or with --weight-transfer-config "
                f'\'{{"backend": "{wanted}"}}\'.'
            )
        self.engine = wanted
        identity = self.identity()
        self._updating &= identity == self.serving  # a restarted server has no unfinished push
        self.serving = identity
        if wanted == "nccl":
            self._open_nccl(torch.device(device))
        else:
            self._open_gloo()

    def _open_nccl(self, device: torch.device) -> None:
        """Join NCCL's group in another thread: the rendezvous waits for a dead server without end."""
        if device.index is None:  # another thread has another current device
            device = torch.device("cuda", torch.cuda.current_device())
        joined = in_thread(partial(super().init_communicator, device))
        try:
            joined.result(timeout=self.patience)
        except FutureTimeout as error:
            raise ServerTrouble(
                f"{self.base_url} did not join the NCCL transfer group within {self.patience:g} s"
            ) from error

    def _send_by_nccl(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Broadcast all weights; NCCL itself waits without end for a server that has died."""
        communicator: Any = self.communicator
        failures = self._failures
        send = super().update_named_params
        with abort_when_stalled(
            lambda: communicator.destroy(), lambda: self._sent, lambda: self._failures != failures, self.patience
        ) as aborted:
            try:
                send(metadata, self._counted(named_params))
            except ServerTrouble:
                raise
            except Exception:
                if not aborted.is_set():
                    raise
        if aborted.is_set():
            raise ServerTrouble(f"{self.base_url}: weights did not arrive: NCCL was aborted after no progress")

    def _open_gloo(self) -> None:
        address = address_seen_by(urlparse(self.base_url).hostname)
        if self._store is None:
            try:
                self._store = open_store(address, self.group_port, self.timeout, trainer=True)
            except RuntimeError as error:
                raise RuntimeError(
                    f"vllm_group_port={self.group_port} cannot be opened on this machine ({error}). Set another."
                ) from error
        # A second connection: one that still waits for an earlier server would lock this group out.
        store = open_store(address, self._store.port, self.timeout, trainer=False)
        size = self.get_world_size() + 1
        self._groups_opened += 1
        name = f"{time.time_ns()}-{self._groups_opened}"
        info = {
            "master_address": address,
            "master_port": self._store.port,
            "group_name": name,
            "world_size": size,
            "timeout": self.timeout,
            "owner": self.owner,
        }
        opened = in_thread(lambda: open_group(store, name, TRAINER_RANK, size, self.timeout))
        mark(self._store, self.owner)
        try:
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
        except ServerTrouble as error:
            if TAKEN not in str(error):
                raise
            owner = re.findall(rf"{TAKEN} by (\S+?:\d+)", str(error))
            raise RuntimeError(
                f"another run ({', '.join(owner)}) trains with the vLLM server at {self.base_url}. End it, or start a "
                "server for this one."
            ) from error
        try:
            self._group = opened.result(timeout=self.patience)
        except Exception as error:
            reason = str(error) or f"timeout after {self.patience:g} s"
            raise ServerTrouble(f"{self.base_url} did not join the transfer group: {reason}") from error

    def release(self) -> None:
        """Let other runs have the server: this one does not train any more, or not yet again."""
        if self._store is not None:
            mark(self._store, None)

    def close_communicator(self) -> None:
        """Leave the transfer group."""
        self._group = None
        super().close_communicator()

    def reconnect(self, device: torch.device | str | int, patience: float) -> None:
        """Open a new transfer group with a server that is back, waiting at most `patience` seconds in each step.

        Raises:
            ServerTrouble: it is not back.
        """
        if not self.healthy():
            raise ServerTrouble(f"{self.base_url} is not up")
        with temporarily(self, patience=patience):
            self.close_communicator()
            self.init_communicator(device)
            if self._updating:
                with suppress(ServerTrouble):  # it may have finished by itself
                    self._finish_weight_update()

    def _start_weight_update(self) -> None:
        self._updating = True
        super()._start_weight_update()

    def _finish_weight_update(self) -> None:
        super()._finish_weight_update()
        self._updating = False

    def _counted(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in tensors:
            self._sent += 1
            yield named

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Send all weights.

        Raises:
            ServerTrouble: they did not arrive.
        """
        specs = specs_of(metadata)
        self.bytes_sent = sum(spec.nbytes for spec in specs)
        if self.engine == "nccl":
            self._send_by_nccl(metadata, named_params)
            return
        if self._group is None or self._store is None:
            raise ServerTrouble(f"{self.base_url}: no transfer group is open")
        mark(self._store, self.owner)
        names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        self._start_weight_update()
        received = in_thread(  # its workers receive while the server handles the request
            lambda: self._post(f"{self.base_url}/update_weights", json={"update_info": info})
        )
        broken: RuntimeError | None = None
        try:
            send(self._group, specs, self._counted(named_params), lambda: received.done() and received.exception())
        except RuntimeError as error:
            broken = error
        received.result()
        if broken is not None:
            raise ServerTrouble(f"{self.base_url}: weights did not arrive: {broken}") from broken
        self._finish_weight_update()

    def reset_prefix_cache(self) -> None:
        """Remove what the server has cached by the weights before, as soon as it computes no request by them.

        Raises:
            ServerTrouble: the server does not answer.
            RuntimeError: it computes requests that this run does not wait for.
        """
        deadline = time.monotonic() + self.patience
        while self._post(f"{self.base_url}/reset_prefix_cache").get("success") is False:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the vLLM server at {self.base_url} has computed requests of others for {self.patience:g} s, so "
                    "that its prefix cache keeps the weights before. A server serves one run: give this run its own."
                )
            time.sleep(RETRY_SECONDS)


def _is_sampled(ids: list[int], logprobs: list[list[float | None]]) -> bool:
    """Return whether a completion has a log-probability for each token."""
    return len(ids) == len(logprobs) and all(logprobs)
