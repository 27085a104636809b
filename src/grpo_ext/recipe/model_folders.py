"""Check the folder of a model by its files only."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from grpo_ext.bounded import read_json
from grpo_ext.config.adapters import is_adapter
from grpo_ext.errors import Problem
from grpo_ext.quickstart.model import LESSONS


def folder_problems(name: str) -> Iterator[Problem]:
    """Yield the first thing that is missing in a local folder."""
    path, problem = Path(name).expanduser(), partial(Problem, "model_name_or_path", name)
    if path.is_file():
        yield problem("this is a file", "Name the folder that holds config.json and the weights.")
    if name in LESSONS or not path.is_dir():
        return
    files = [file.name for file in path.iterdir()]
    if is_adapter(name):
        if not any(file.startswith("adapter_model.") for file in files):
            cure = "Name a folder that has both, or its base model and use_peft: true for a new adapter."
            yield problem("adapter_config.json, but no adapter_model.safetensors", cure)
        return
    if "config.json" not in files:
        yield problem("no config.json in it", _alternative(path, files))
        return
    try:
        read_json(path / "config.json")
    except (OSError, ValueError) as error:
        yield problem(f"config.json is not JSON ({error})", "Copy it again from the source of the model.")
        return
    indexes = [file for file in files if file.endswith((".safetensors.index.json", ".bin.index.json"))]
    for index in indexes:
        shards = set(read_json(path / index).get("weight_map", {}).values())
        if missing := sorted(shards - set(files)):
            reason = f"{index} names {missing[0]}, which is not there"
            yield problem(reason, f"Copy all {len(shards)} files of weights.")
            return
    if not indexes and not any(file.endswith((".safetensors", ".bin")) for file in files):
        yield problem("config.json, but no weights in it (model.safetensors)", "Name a folder that has both.")


def _alternative(path: Path, files: list[str]) -> str:
    """Return what to name in place of a folder without a model."""
    inside = sorted(str(folder.parent) for folder in path.glob("*/config.json"))
    if inside:
        return f"Set model_name_or_path: {inside[-1]}."
    if any(file.endswith(".gguf") for file in files):
        return "GGUF files are for inference. Name the model from which they were converted."
    return "Name a folder that save_pretrained has written, or a hub id."
