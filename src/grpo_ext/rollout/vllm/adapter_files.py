"""An adapter as the folder from which vLLM loads it; also written inside vLLM's processes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import save_file
from torch import Tensor

from grpo_ext.safe_reading import replacing, write_text

OWNER = "pid-"
"""Begins the name of an empty file in a folder, by a process that removes the folder when it ends."""


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter; several workers of a machine may write the same one, all before it is loaded."""
    folder.mkdir(mode=0o700, exist_ok=True)
    write_text(folder / "adapter_config.json", json.dumps(config))
    with replacing(folder / "adapter_model.safetensors") as aside:
        save_file(dict(tensors), aside)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of adapters whose owners are gone: they were killed."""
    alive = {f"{OWNER}{pid}" for pid in psutil.pids()}
    for folder in parent.glob("grpo-ext-*"):
        owners = {file.name for file in folder.glob(f"{OWNER}*")}
        if owners and owners.isdisjoint(alive):
            shutil.rmtree(folder, ignore_errors=True)
