"""An adapter as the folder from which vLLM loads it; also written inside vLLM's processes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from grpo_ext.safe_reading import replacing, write_text


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter; several workers of a machine may write the same one, all before it is loaded."""
    folder.mkdir(mode=0o700, exist_ok=True)
    write_text(folder / "adapter_config.json", json.dumps(config))
    with replacing(folder / "adapter_model.safetensors") as aside:
        save_file(dict(tensors), aside)
