"""The `env` of a recipe: which variables it may still set when it is read."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from grpo_ext.config.paths import expand, unknown
from grpo_ext.config.spec import kind

_READ_AT_START = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "PYTHON", "LD_", "OMP_", "MKL_", "XDG_CACHE_HOME")
"""Python, the loader, OpenMP and the Hugging Face libraries read these before any recipe is read."""
_READ_LATER = ("HF_TOKEN",)
_PATHS = ("_DIR", "_HOME", "_PATH", "_FILE", "_CACHE", "_ROOT")
"""How variables that hold a path end."""


def take_env(values: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """The variables of `env`, which is removed from `values`; what is wrong with it is added to `problems`."""
    env = values.pop("env", None) or {}
    if not isinstance(env, Mapping):
        problems.append(f"env={env!r} is no mapping. Write env: {{NAME: value}}.")
        return {}
    found = list(_env_problems(env))
    problems += found
    return {} if found else {name: str(_expanded(name, value)) for name, value in env.items()}


def _expanded(name: str, value: Any) -> Any:
    """Return the value of a variable that is a path by its name, such as TENSORBOARD_LOGGING_DIR, expanded."""
    return expand(name, value) if name.endswith(_PATHS) else value


def _env_problems(env: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            yield f"env: {name!r} is no name of a variable. Write env: {{NAME: value}}."
        elif not isinstance(value, (str, int, float)) or "\0" in str(value):
            cure = "Write it in quotes; to unset a variable, do so before the start."
            yield f"env.{name}={value!r}: {kind(value)} where text or a number is expected. {cure}"
        elif name.endswith(_PATHS) and (missing := list(unknown(name, value, f"env.{name}"))):
            yield from map(str, missing)
        elif os.environ.get(name) != str(_expanded(name, value)) and _is_too_late(name):
            yield (
                f"env.{name}={value!r}: {name} has been read before the recipe is, so that this would be ignored. "
                f"Export it before the start: {name}={value} grpo-ext train ..."
            )


def _is_too_late(name: str) -> bool:
    if name == "CUDA_VISIBLE_DEVICES":
        return torch.cuda.is_initialized()
    return name.startswith(_READ_AT_START) and name not in _READ_LATER
