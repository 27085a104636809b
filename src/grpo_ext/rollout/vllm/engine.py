"""Receiving end inside a vLLM worker: the weight-transfer engine `gloo`."""

import atexit
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from grpo_ext.rollout.vllm.adapter_files import write_adapter
from grpo_ext.rollout.vllm.gloo import OVERWRITTEN, TAKEN, join, receive, specs_of, trains


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
    """Folder to write, its config, and the folders of others to keep; None: whole weights, which are loaded."""


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Loads whole weights that the trainer broadcasts: in place on a CPU, by vLLM's layerwise reload elsewhere.

    An adapter is written to a folder, from which vLLM loads it by a request of its own.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: ProcessGroupGloo | None = None
    store: TCPStore | None = None
    owner = ""
    overwritten = reloading = False
    """Whether the base is that of a push, and whether one is under way."""
    folders: tuple[Path, ...] = ()
    """Adapters that vLLM may load again."""

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, leaving the group of an earlier trainer.

        Raises:
            RuntimeError: the earlier one is another run, which still trains; or this one has ended.
        """
        if self.owner != init_info.owner and self.store is not None and trains(self.store, self.owner):
            raise RuntimeError(f"{TAKEN} by {self.owner}")
        self.shutdown()
        atexit.unregister(self._keep)
        atexit.register(self._keep, ())
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
        """Do nothing yet: an adapter leaves the weights as they are."""

    def _reload(self) -> None:
        """Restore the checkpoint's layout of weights that kernels keep in their own."""
        if not current_platform.is_cpu() and not self.reloading:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)
        self.overwritten = self.reloading = True

    def finish_weight_update(self) -> None:
        """Restore the kernels' layout."""
        if not current_platform.is_cpu() and self.reloading:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
        self.reloading = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one push. vLLM's own method also synchronizes an accelerator, which fails without one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load tensor by tensor; after a failure leave the group, so that the trainer does not wait.

        Raises:
            RuntimeError: no trainer has opened a group, or the connection broke; or an adapter comes to a base that
                an earlier push has replaced.
        """
        if self.group is None:
            raise RuntimeError("No trainer is connected. Call init_weight_transfer_engine before update_weights.")
        specs = specs_of(zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True))
        try:
            if update_info.adapter is not None:
                if self.overwritten:
                    raise RuntimeError(OVERWRITTEN)
                self._write(update_info.adapter, dict(receive(self.group, specs)))
                return
            self._reload()
            model: Any = self.model
            model.load_weights((name, tensor.to(self.device)) for name, tensor in receive(self.group, specs))
        except BaseException:
            self.shutdown()
            raise

    def _write(self, adapter: dict[str, Any], tensors: dict[str, Any]) -> None:
        self._keep(adapter["keep"])
        write_adapter(folder := Path(adapter["folder"]), adapter["config"], tensors)
        self.folders = (*self.folders, folder)

    def _keep(self, folders: Collection[str]) -> None:
        """Remove all adapters but these."""
        for folder in self.folders:
            if str(folder) not in folders:
                shutil.rmtree(folder, ignore_errors=True)
        self.folders = tuple(folder for folder in self.folders if str(folder) in folders)

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None
