"""An adapter as the folder from which vLLM loads it; also written inside vLLM's processes, which have no PEFT."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a whole folder at once; one that is there holds the same adapter, and stays."""
    written = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    (written / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), written / "adapter_model.safetensors")
    try:
        written.rename(folder)
    except OSError:  # another worker of this machine, or an earlier attempt, was first
        shutil.rmtree(written, ignore_errors=True)
        if not folder.is_dir():
            raise
