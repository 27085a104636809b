"""TRL's vLLM client, with weight transfer without NCCL, and a limit to every wait."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

from grpo_ext.rollout.vllm.buckets import bucket_bytes
from grpo_ext.rollout.vllm.gloo import BACKEND, BUCKET_BYTES, TRAINER_RANK, open_group, open_store, send, specs_of
from grpo_ext.rollout.vllm.late import VLLMClient

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
POLL_SECONDS = 5.0
CONNECTIONS = 64
NOTHING: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
"""What `generate` answers when it failed; `Client.failure` says why."""


class ServerTrouble(ConnectionError):
    """The server did not do what it was asked, and may when asked again; `since` is its last sign of life."""

    def __init__(self, message: str, since: float | None = None) -> None:
        """`since` by the clock of `time.monotonic`; None is now."""
        super().__init__(message)
        self.since = time.monotonic() if since is None else since


@dataclass
class Attempt:
    """What became of a call that ran in a thread of its own."""

    value: Any = None
    error: Exception | None = None


def attempted(call: Callable[[], Any]) -> "queue.SimpleQueue[Attempt]":
    """Run `call` in a thread that nobody has to wait for; its outcome arrives in the queue."""
    outcome: queue.SimpleQueue[Attempt] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(Attempt(value=call()))
        except Exception as error:
            outcome.put(Attempt(error=error))

    threading.Thread(target=run, daemon=True).start()
    return outcome


class Client(VLLMClient):
    """`trl.generation.vllm_client.VLLMClient` that sends weights by gloo or NCCL and notices a server's death.

    Args:
        base_url: of the server.
        group_port: port at which this process waits for the server's workers.
        timeout: seconds without a sign of life after which a server counts as dead.
        transfer: 'auto', 'nccl' or 'gloo'.

    Raises:
        ServerTrouble: the server was not up within `timeout`.
    """

    def __init__(self, base_url: str, group_port: int, timeout: float, transfer: str) -> None:
        """Wait for the server."""
        self.timeout = self.patience = timeout
        self.transfer = transfer
        self.failure: Exception | None = None
        self.bytes_sent = 0
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._groups_opened = 0
        self._started: float | None = None
        self._updating = False
        self._sent = 0
        """Weights handed to the transfer, which is progress too."""
        super().__init__(base_url=base_url, group_port=group_port, connection_timeout=timeout)
        self.session.mount("http://", HTTPAdapter(pool_maxsize=CONNECTIONS))  # no retries: a push must not be repeated
        self.session.mount("https://", HTTPAdapter(pool_maxsize=CONNECTIONS))

    # Requests: each ends, with an answer or with ServerTrouble.

    def healthy(self) -> bool:
        """Whether the server says that it is well."""
        try:
            return requests.get(f"{self.base_url}/health", timeout=POLL_SECONDS).status_code == 200
        except requests.RequestException:
            return False

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is healthy.

        Raises:
            ServerTrouble: it was not within `total_timeout` seconds.
        """
        deadline = time.monotonic() + total_timeout
        while not self.healthy():
            if time.monotonic() + retry_interval > deadline:
                raise ServerTrouble(f"no vLLM server at {self.base_url} within {total_timeout:g} s")
            time.sleep(retry_interval)

    def get_server_info(self) -> Any:
        """Configuration of the server."""
        return self._get(f"{self.base_url}/server_info", params={"config_format": "json"})["vllm_config"]

    def _get(self, url: str, **kwargs: Any) -> Any:
        return self._ask(lambda: self.session.get(url, **kwargs))

    def _post(self, url: str, **kwargs: Any) -> Any:
        return self._ask(lambda: self.session.post(url, **kwargs))

    def _ask(self, request: Callable[[], requests.Response]) -> Any:
        """The answer to a request, however long it takes, as long as the server goes on working.

        Raises:
            ServerTrouble: broken connection, an error of the server's own, or no progress for `patience` seconds.
            RuntimeError: the server refuses the request; it would again.
        """
        outcome = attempted(request)
        since, tokens, sent = time.monotonic(), None, self._sent
        while (left := since + self.patience - time.monotonic()) > 0:
            try:
                attempt = outcome.get(timeout=min(POLL_SECONDS, left))
                break
            except queue.Empty:
                seen = self._tokens_processed(within=max(0.1, since + self.patience - time.monotonic()))
                if self._sent != sent or (None not in (seen, tokens) and seen != tokens):
                    since = time.monotonic()
                tokens, sent = tokens if seen is None else seen, self._sent
        else:
            raise ServerTrouble(f"{self.base_url} made no progress for {self.patience:g} s", since)
        if isinstance(attempt.error, requests.RequestException):
            raise ServerTrouble(f"{self.base_url}: {attempt.error}") from attempt.error
        if attempt.error is not None:
            raise attempt.error
        response: requests.Response = attempt.value
        if response.status_code >= 500:
            self.session.close()  # the server may be about to close the connection, too late for the next request
            raise ServerTrouble(f"{response.url} answered {response.status_code}: {response.text[:500]}")
        if response.status_code != 200:
            raise RuntimeError(f"{response.url} answered {response.status_code}: {response.text[:500]}")
        return response.json()

    def _metric(self, *names: str, within: float = POLL_SECONDS) -> float | None:
        """Sum of the server's metrics whose lines begin with `names`; None when it does not say `within` seconds."""
        try:
            lines = requests.get(f"{self.base_url}/metrics", timeout=min(within, POLL_SECONDS)).text.splitlines()
        except requests.RequestException:
            return None
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))

    def _tokens_processed(self, within: float) -> float | None:
        return self._metric("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{", within=within)

    def _start_time(self) -> float | None:
        return self._metric("process_start_time_seconds ")

    def asked(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's `generate`; from any thread.

        Raises:
            ServerTrouble: the server did not answer, or has lost our weights.
        """
        if self._start_time() not in (None, self._started):  # between two requests
            raise ServerTrouble(f"{self.base_url} has been restarted")
        return super().generate(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a failure is kept in `failure` and answered with NOTHING, since other processes wait for us."""
        self.failure = None
        try:
            return self.asked(*args, **kwargs)
        except Exception as error:
            self.failure = error
            return NOTHING

    # Weights.

    def init_communicator(self, device: Any = 0) -> None:
        """Open the transfer group that suits the server; again after the server has come back.

        Raises:
            RuntimeError: the server's engine is not the one that this side needs, or `vllm_group_port` is taken.
            ServerTrouble: the server did not join.
        """
        engine = (self.get_server_info()["weight_transfer_config"] or {}).get("backend")
        on_cuda = torch.device(device).type == "cuda"
        wanted = self.transfer if self.transfer != "auto" else engine if on_cuda and engine == "nccl" else BACKEND
        if engine != wanted:
            raise RuntimeError(
                f"the vLLM server at {self.base_url} receives weights by {engine or 'nothing'}, this side sends them "
                f"by {wanted}. Restart it by grpo-ext serve, or with --weight-transfer-config "
                f'\'{{"backend": "{wanted}"}}\'.'
            )
        self.engine = wanted
        started = self._start_time()
        self._updating &= started == self._started  # a new server knows of no push
        self._started = started
        if wanted == "nccl":
            super().init_communicator(device)
        else:
            self._open_gloo()

    def _open_gloo(self) -> None:
        address = "127.0.0.1"
        if urlparse(self.base_url).hostname not in LOOPBACK:
            from vllm.utils.network_utils import get_ip

            address = get_ip()
        if self._store is None:
            try:
                self._store = open_store(address, self.group_port, self.timeout, trainer=True)
            except RuntimeError as error:
                raise RuntimeError(
                    f"vllm_group_port={self.group_port} cannot be opened on this machine ({error}). Set another."
                ) from error
        # A connection of its own: one that still waits for an earlier server would lock this group out.
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
            "bucket_bytes": BUCKET_BYTES,
        }
        opened = attempted(lambda: open_group(store, name, TRAINER_RANK, size, self.timeout))
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
        try:
            attempt = opened.get(timeout=self.patience)
        except queue.Empty:
            attempt = Attempt(error=TimeoutError(f"nothing within {self.patience:g} s"))
        if attempt.error is not None:
            raise ServerTrouble(f"{self.base_url} did not join the transfer group: {attempt.error}")
        self._group = attempt.value

    def close_communicator(self) -> None:
        """Leave the transfer group."""
        self._group = None
        super().close_communicator()

    def reconnect(self, device: Any, patience: float) -> None:
        """Open everything again with a server that has come back, if no step of it takes `patience` seconds.

        Raises:
            ServerTrouble: it has not.
        """
        if not self.healthy():
            raise ServerTrouble(f"{self.base_url} is not up")
        self.patience = patience
        try:
            self.close_communicator()
            self.init_communicator(device)
            if self._updating:
                with suppress(ServerTrouble):  # it may have finished by itself
                    self._finish_weight_update()
        finally:
            self.patience = self.timeout

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
        self.bytes_sent = bucket_bytes(specs)
        if self.engine == "nccl":
            super().update_named_params(metadata, named_params)
            return
        if self._group is None:
            raise ServerTrouble(f"{self.base_url}: no transfer group is open")
        names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        self._start_weight_update()
        received = attempted(
            lambda: self._post(f"{self.base_url}/update_weights", json={"update_info": info})
        )  # the workers wait for us while they handle it
        broken: RuntimeError | None = None
        try:
            send(self._group, specs, self._counted(named_params), BUCKET_BYTES)
        except RuntimeError as error:
            broken = error
        attempt = received.get()
        if attempt.error is not None:
            raise attempt.error
        if broken is not None:
            raise ServerTrouble(f"{self.base_url}: weights did not arrive: {broken}") from broken
        self._finish_weight_update()
