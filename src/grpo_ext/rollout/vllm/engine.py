"""Receiving end inside a vLLM worker: the weight-transfer engine `gloo`."""

import atexit
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from grpo_ext.rollout.vllm.adapter_files import OWNER, remove_abandoned, write_adapter
from grpo_ext.rollout.vllm.gloo import TAKEN, join, receive, specs_of, trains


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Address of the trainer, and how it sends."""

    master_address: str
    master_port: int
    group_name: str
    world_size: int
    timeout: float
    owner: str


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Contents of the next push, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    adapter: dict[str, Any] | None = None
    """Folder to write, its config, and the folders to keep; None: whole weights, which are loaded."""


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Loads what the trainer broadcasts: in place on a CPU, by vLLM's layerwise reload elsewhere.

    A server with room for adapters gets nothing else: each is written to a folder, which vLLM is then asked to load.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: ProcessGroupGloo | None = None
    store: TCPStore | None = None
    owner = ""
    folders: tuple[str, ...] = ()
    """Adapters that vLLM may load again."""

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, leaving the group of an earlier trainer.

        Raises:
            RuntimeError: the earlier one is another run, which still trains; or this one has ended.
        """
        if self.owner != init_info.owner and self.store is not None and trains(self.store, self.owner):
            raise RuntimeError(f"{TAKEN} by {self.owner}")
        self.shutdown()
        worker = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self.store, self.group = join(
            init_info.master_address,
            init_info.master_port,
            init_info.owner,
            init_info.group_name,
            1 + worker,
            init_info.world_size,
            init_info.timeout,
        )
        self.owner = init_info.owner

    def start_weight_update(self) -> None:
        """Restore the checkpoint's layout of weights that kernels keep in their own."""
        if not (current_platform.is_cpu() or self.vllm_config.lora_config):
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Restore the kernels' layout."""
        if not (current_platform.is_cpu() or self.vllm_config.lora_config):
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one push. vLLM's own method also synchronizes an accelerator, which fails without one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load tensor by tensor; after a failure leave the group, so that the trainer does not wait.

        Raises:
            RuntimeError: no trainer has opened a group, or the connection broke.
        """
        if self.group is None:
            raise RuntimeError("No trainer is connected. Call init_weight_transfer_engine before update_weights.")
        specs = specs_of(zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True))
        try:
            model, received = cast(Any, self.model), receive(self.group, specs)
            if update_info.adapter is None:
                model.load_weights((name, tensor.to(self.device)) for name, tensor in received)
            else:
                self._write(**update_info.adapter, tensors=dict(received))
        except BaseException:
            self.shutdown()
            raise

    def _write(self, folder: str, config: dict[str, Any], keep: Collection[str], tensors: dict[str, Tensor]) -> None:
        if not self.folders:
            remove_abandoned(Path(folder).parent)
            atexit.register(self._keep, ())
        self._keep(keep)
        self.folders = (*self.folders, folder)
        write_adapter(Path(folder), config, tensors)
        Path(folder, f"{OWNER}{os.getpid()}").touch()

    def _keep(self, folders: Collection[str]) -> None:
        """Remove all adapters but these."""
        for folder in {*self.folders} - {*folders}:
            shutil.rmtree(folder, ignore_errors=True)
        self.folders = tuple(folder for folder in self.folders if folder in folders)

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None
