"""The `env` of a recipe: environment variables that it can still set when it is read."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from grpo_ext.config.paths import expand, unknown
from grpo_ext.config.spec import kind
from grpo_ext.errors import Problem

_READ_AT_START = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "PYTHON", "LD_", "OMP_", "MKL_", "XDG_CACHE_HOME")
"""Python, the loader, OpenMP and the Hugging Face libraries read these before any recipe is read."""
_READ_LATER = ("HF_TOKEN",)
_PATHS = ("_DIR", "_HOME", "_PATH", "_FILE", "_CACHE", "_ROOT")
"""Endings of variables that hold a path."""


def take_env(values: dict[str, Any], problems: list[Problem]) -> dict[str, str]:
    """Remove `env` from `values` and return its variables; add what is wrong with it to `problems`."""
    env = values.pop("env", None) or {}
    if not isinstance(env, Mapping):
        problems.append(Problem("env", env, "not a mapping", "Write env: {NAME: value}."))
        return {}
    found = [problem for name, value in env.items() for problem in _problems(name, value)]
    problems += found
    return {} if found else {name: str(_expanded(name, value)) for name, value in env.items()}


def _expanded(name: str, value: object) -> object:
    """Return the value of a variable that is a path by its name, such as TENSORBOARD_LOGGING_DIR, expanded."""
    return expand(name, value) if name.endswith(_PATHS) else value


def _problems(name: object, value: object) -> Iterator[Problem]:
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        yield Problem(f"env.{name!r}", value, "not the name of a variable", "Write env: {NAME: value}.")
    elif not isinstance(value, str | int | float) or "\0" in str(value):
        reason = f"{kind(value)} where text or a number is expected"
        cure = "Write it in quotes; to unset a variable, do so before the start."
        yield Problem(f"env.{name}", value, reason, cure)
    elif name.endswith(_PATHS) and (missing := list(unknown(name, value, f"env.{name}"))):
        yield from missing
    elif os.environ.get(name) != str(_expanded(name, value)) and _is_too_late(name):
        reason = f"{name} has been read before the recipe is, so that this would be ignored"
        cure = f"Export it before the start: {name}={value} grpo-ext train ..."
        yield Problem(f"env.{name}", value, reason, cure)


def _is_too_late(name: str) -> bool:
    if name == "CUDA_VISIBLE_DEVICES":
        return torch.cuda.is_initialized()
    return name.startswith(_READ_AT_START) and name not in _READ_LATER
