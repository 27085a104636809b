"""Expand `$VAR`, `${VAR}` and `~` in the settings that name files and folders."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_ext.errors import Problem

_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "reward_funcs": ("name", "func", "kwargs"),
    "environments": ("name", "path", "tools", "kwargs"),
    "eval_sets": ("dataset_name", "chat_template", "reward_funcs"),
    "datasets": ("path", "data_dir", "data_files"),
    "kwargs": ("corpus", "model", "scorer"),
}
"""Settings that hold mappings, with the keys that are paths or hold some."""
OF_THE_RUN = (
    *("output_dir", "resume_from_checkpoint", "deepspeed", "fsdp_config", "accelerator_config"),
    *("loss_type", "kl_estimator", "advantage_estimator", "loss_aggregation"),
)
"""Fields of `GRPOExtConfig` that are, or may be, a path."""
PATHS = frozenset(
    (
        *OF_THE_RUN,
        *("model_name_or_path", "reward_model_name_or_path", "dataset_name", "chat_template"),
        *("reward_funcs", "environments", "eval_sets", "datasets"),
        *("accelerate_config", "deepspeed_config_file"),
    )
)
"""Keys of a recipe that are, may be, or hold paths."""
_VARIABLE = re.compile(r"\$(?:\{([^{}]*)\}|([A-Za-z_]\w*)|\([^()]*\))")
"""`${NAME}`, `$NAME`, and `$(command)`, which is refused."""


def expand(key: str, value: Any) -> Any:
    """Return the value of the setting `key` with known variables and home folders expanded."""
    if isinstance(value, str):
        if _is_no_path(value):
            return value
        expanded = _VARIABLE.sub(lambda match: os.environ.get(match[1] or match[2] or "") or match[0], value)
        return os.path.expanduser(expanded)
    if isinstance(value, list):
        return [expand(key, entry) for entry in value]
    if isinstance(value, Mapping):
        inside = _inside(key, value)
        return {name: expand(name, part) if name in inside else part for name, part in value.items()}
    return value


def unknown(key: str, value: object, place: str = "") -> Iterator[Problem]:
    """Yield the problem of each text in which something cannot be expanded."""
    place = place or key
    if isinstance(value, str) and not _is_no_path(value):
        fault = next(filter(None, map(_missing, _VARIABLE.finditer(value))), None) or _missing_home(value)
        if fault:
            yield Problem(place, value, *fault)
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from unknown(key, entry, f"{place}[{i}]")
    elif isinstance(value, Mapping):
        for name in _inside(key, value):
            yield from unknown(name, value[name], f"{place}.{name}")


def _inside(key: str, value: Mapping[str, Any]) -> list[str]:
    """Return the keys of a mapping that are paths, or hold some."""
    return [name for name in value if name in _ENTRIES.get(key, ()) or key == "data_files"]


def _is_no_path(text: str) -> bool:
    """Return whether this is a mapping as JSON, or Jinja."""
    return text.startswith("{") or "{{" in text or "{%" in text


def _missing(match: re.Match[str]) -> tuple[str, str] | None:
    """Return why a variable cannot be expanded, and the cure."""
    name = match[1] or match[2] or ""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return f"{match[0]} is not the name of an environment variable", "Write $NAME or ${NAME}, or the path itself."
    if os.environ.get(name):
        return None
    cure = "Export it before the start, set it under env: in the recipe, or write the path itself."
    return f"the environment variable {name} is not set", cure


def _missing_home(text: str) -> tuple[str, str] | None:
    if not text.startswith("~") or os.path.expanduser(text) != text:
        return None
    cure = "Write ~/ for your own home folder, or the path itself."
    return f"there is no user {Path(text).parts[0][1:]!r}", cure
