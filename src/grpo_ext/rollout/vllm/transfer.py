"""A client that sends weights to its server, by NCCL or by gloo, and opens the transfer group again after a death."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore

from grpo_ext.config.temporary import temporarily
from grpo_ext.rollout.vllm.client import PUSH, Client
from grpo_ext.rollout.vllm.gloo import BACKEND, TAKEN, TRAINER_RANK, mark, open_group, open_store, send, specs_of
from grpo_ext.rollout.vllm.server import ServerTrouble
from grpo_ext.waiting import in_thread

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
RETRY_SECONDS = 0.1
WATCH_SECONDS = 1.0


def address_seen_by(host: str | None) -> str:
    """Return the address at which `host` reaches this machine."""
    if host in LOOPBACK:
        return "127.0.0.1"
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


class WeightClient(Client):
    """The client of the process that sends weights.

    Args:
        base_url, timeout: as of `Client`.
        group_port: port at which this process waits for the server's workers.
        transfer: 'auto', 'nccl' or 'gloo'.

    Raises:
        ServerTrouble: the server was not up within `timeout`.
    """

    joined: str | None = None
    """Identity of the server in the transfer group, which may not have all weights yet."""

    def __init__(self, base_url: str, timeout: float, group_port: int, transfer: str) -> None:
        self.group_port, self.transfer = group_port, transfer
        self.owner = f"{socket.gethostname()}:{os.getpid()}@{time.time_ns()}"
        self.bytes_sent = self._groups_opened = self._pushes = 0
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self._updating = False
        self._held = set[str]()
        super().__init__(base_url, timeout)

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
        if identity != self.joined:  # a restarted server has no unfinished push and no adapter
            self._updating, self._held = False, set()
        self.joined = identity
        if self.serving is None:  # nothing was pushed: a request then finds the weights of another run
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
        """Broadcast all weights; NCCL waits without end for a server that has died, so a thread aborts it."""
        communicator: Any = self.communicator
        failures, patience, over, aborted = self._failures, self.patience, threading.Event(), threading.Event()

        def watch() -> None:
            sent, since = self._sent, time.monotonic()
            while not over.wait(min(WATCH_SECONDS, patience / 4)):
                if self._sent != sent:
                    sent, since = self._sent, time.monotonic()
                if self._failures != failures or time.monotonic() - since >= patience:
                    aborted.set()
                    communicator.destroy()
                    return

        threading.Thread(target=watch, daemon=True).start()
        try:
            super().update_named_params(metadata, self._counted(named_params))
        except ServerTrouble:
            raise
        except Exception:
            if not aborted.is_set():
                raise
        finally:
            over.set()
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
        """Label the weights, so that those of another run are recognised; vLLM before 0.31 ignores a label."""
        self._pushes += 1
        label = {"weight_version": f"{self.owner}{PUSH}{self._pushes}"}
        self._post(f"{self.base_url}/finish_weight_update", json=label)
        self._updating = False
        self._pages.clear()
        self.joined = self.identity() or self.joined

    def arrived(self) -> None:
        """Let requests begin: the server has all weights of the push."""
        self.serving = self.joined

    def _counted(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in tensors:
            self._sent += 1
            yield named

    def update_named_params(
        self,
        metadata: list[tuple[str, str, list[int]]],
        named_params: Iterator[tuple[str, Tensor]],
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        """Send all weights, or by gloo those of an adapter; `adapter` is then what the server writes beside them.

        Raises:
            ServerTrouble: they did not arrive.
            RuntimeError: another run trains with the server.
        """
        self._check_identity(self.joined)
        specs = specs_of(metadata)
        self.bytes_sent = sum(spec.nbytes for spec in specs)
        if self.engine == "nccl":
            self._send_by_nccl(metadata, named_params)
            return
        if self._group is None or self._store is None:
            raise ServerTrouble(f"{self.base_url}: no transfer group is open")
        mark(self._store, self.owner)
        names, dtypes, shapes = (list(column) for column in zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes, "adapter": adapter}
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

    def hold(self, adapters: Mapping[str, Mapping[str, Tensor]], config: Mapping[str, Any]) -> None:
        """Make the server hold these adapters and no others; those that go stay until all others have arrived.

        Args:
            adapters: tensors by the adapter's name, which is also its folder on the server's machine.
            config: of all of them, as in `adapter_config.json`.

        Raises:
            ServerTrouble: they did not arrive.
            RuntimeError: the server cannot hold them.
        """
        for name in adapters.keys() - self._held:
            self._send_adapter(adapters[name], {"folder": name, "config": config, "keep": [*self._held, *adapters]})
            self._held.add(name)
        for name in self._held - adapters.keys():
            with suppress(RuntimeError):  # it is not there
                self._post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": name})
            self._held.remove(name)
        self.arrived()

    def _send_adapter(self, tensors: Mapping[str, Tensor], adapter: Mapping[str, Any]) -> None:
        metadata = [(key, str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in tensors.items()]
        request = {"lora_name": adapter["folder"], "lora_path": adapter["folder"]}
        try:
            self.update_named_params(metadata, iter(tensors.items()), adapter)
            self._post(f"{self.base_url}/v1/load_lora_adapter", json=request)
        except (ServerTrouble, RuntimeError) as error:
            if "has already been loaded" in str(error):  # by an attempt whose answer was lost
                return
            if "/v1/load_lora_adapter answered" not in str(error) or not self.healthy():
                raise
            cure = "Start it again by grpo-ext serve, or set vllm_push: merged."
            raise RuntimeError(f"{self.base_url} does not take the adapter: {error}. {cure}") from error

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
