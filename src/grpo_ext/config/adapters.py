"""An adapter named as the model: what it says of its base, and what goes with it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import ADAPTER_CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_ext.errors import ConfigError


class Base(NamedTuple):
    """What an adapter sits on."""

    model: str
    revision: str | None


def base_of(model: str, revision: str | None = None) -> Base | None:
    """The base model of an adapter, which is a folder or a repository of the hub; None for a model that is none.

    Raises:
        ConfigError: the adapter does not say its base, or names a folder that is not there.
    """
    file = find_adapter_config_file(model, revision=revision)
    if file is None:
        return None
    said = json.loads(Path(file).read_text())
    base = said.get("base_model_name_or_path")
    if not base:
        raise ConfigError([f"{model}: an adapter whose {ADAPTER_CONFIG_NAME} names no base model. Write it there."])
    found = located(base, Path(model))
    if found.startswith((".", "/", "~")) and not Path(found).is_dir():
        raise ConfigError(
            [
                f"{model}: an adapter of {base!r}, which is no folder here. Correct base_model_name_or_path in "
                f"{Path(model) / ADAPTER_CONFIG_NAME}."
            ]
        )
    return Base(found, said.get("revision"))


def is_adapter(model: Any) -> bool:
    """Whether a folder holds an adapter; of a hub's repository it takes the hub to know."""
    return isinstance(model, str) and (Path(model).expanduser() / ADAPTER_CONFIG_NAME).is_file()


def located(model: str, beside: Path) -> str:
    """A model's folder from any working directory: a relative path may count from one of the folders above `beside`.

    What is no folder from there either is left as it is: an id of the hub, or a mistake.
    """
    path = Path(model).expanduser()
    places = [path] if path.is_absolute() else [path, *(parent / path for parent in beside.absolute().parents)]
    return next((str(place.resolve()) for place in places if (place / "config.json").is_file()), model)


def make_portable(model: Any) -> None:
    """Let the adapters of a model name a base in a folder by its whole path, so that they load from any directory."""
    for config in getattr(model, "peft_config", {}).values():
        base = config.base_model_name_or_path
        if base and Path(base).is_dir():
            config.base_model_name_or_path = str(Path(base).resolve())


def adapter_problems(model: Any) -> Iterator[str]:
    """What does not go with an adapter as `model_name_or_path`."""
    name = model.model_name_or_path
    if not is_adapter(name):
        return
    try:
        base_of(str(Path(name).expanduser()))
    except ConfigError as error:
        yield from error.problems
    if model.use_peft:
        yield (
            f"use_peft=True with model_name_or_path={name!r}, an adapter: is it to be trained, or a new one on "
            "top? Remove use_peft and the lora_ settings to train it further, in its own shape; for a new one, "
            f"`grpo-ext merge {name} --output MERGED` and set model_name_or_path: MERGED."
        )
