"""What is missing in the folder of a model, told by its files alone."""

import json
from collections.abc import Iterator
from pathlib import Path

from grpo_ext.config.adapters import is_adapter
from grpo_ext.quickstart.model import LESSONS


def folder_problems(name: str) -> Iterator[str]:
    """What is missing in a local folder, told by its files alone."""
    path, setting = Path(name).expanduser(), f"model_name_or_path={name!r}"
    if path.is_file():
        yield f"{setting}: this is a file. Name the folder that holds config.json and the weights."
        return
    if name in LESSONS or not path.is_dir():
        return
    files = [file.name for file in path.iterdir()]
    if is_adapter(name):
        if not any(file.startswith("adapter_model.") for file in files):
            yield (
                f"{setting}: adapter_config.json, but no adapter_model.safetensors. Name a folder that has both, or "
                "its base model and use_peft: true for a new adapter."
            )
        return
    if "config.json" not in files:
        yield f"{setting}: no config.json in it. {_instead(path, files)}"
        return
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"{setting}: config.json is not JSON ({error}). Copy it anew from where the model comes."
        return
    indexes = [file for file in files if file.endswith((".safetensors.index.json", ".bin.index.json"))]
    for index in indexes:
        shards = set(json.loads((path / index).read_text(encoding="utf-8")).get("weight_map", {}).values())
        if gone := sorted(shards - set(files)):
            yield f"{setting}: {index} names {gone[0]}, which is not there. Copy all {len(shards)} files of weights."
            return
    if not indexes and not any(file.endswith((".safetensors", ".bin")) for file in files):
        yield f"{setting}: config.json, but no weights in it (model.safetensors). Name a folder that has both."


def _instead(path: Path, files: list[str]) -> str:
    """What to name in place of a folder without a model."""
    inside = sorted(str(folder.parent) for folder in path.glob("*/config.json"))
    if inside:
        return f"Set model_name_or_path: {inside[-1]}."
    if any(file.endswith(".gguf") for file in files):
        return "GGUF files are for inference. Name the model that they were made of."
    return "Name a folder that save_pretrained has written, or a hub id."
