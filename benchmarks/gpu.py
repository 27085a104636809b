"""Correctness, then speed and peak memory, on the GPU of this machine: `make bench-gpu`.

Each part is a process with a time limit, so that one that crashes or hangs costs only its own lines. Checks without
vLLM run together, the others in turn; all end within ten minutes. Results are written after each part, to
results/gpu.json. With `--device cpu` a small form of each part runs in a minute, and build/gpu_cpu.json gets its
results.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent
RESULTS = {"cuda": HERE / "results" / "gpu.json", "cpu": HERE.parent / "build" / "gpu_cpu.json"}
CPU_SECONDS = 120
"""Time limit of a part in its small form."""


class Part(NamedTuple):
    """A script, its argument, its time limit in seconds, and what it needs: packages, and GPUs in all forms."""

    script: str
    argument: str
    seconds: int
    packages: tuple[str, ...] = ()
    gpus: int = 0
    beside: bool = False
    """Runs at the same time as the others with this mark."""


PARTS = {
    "attention in bfloat16": Part("gpu_checks.py", "attention", 130, beside=True),
    "on-policy log-ratio": Part("gpu_checks.py", "on_policy", 130, beside=True),
    "sharing on and off": Part("gpu_checks.py", "sharing", 130, beside=True),
    "every loss, beside float64": Part("gpu_checks.py", "every_loss", 130, (), 1, beside=True),
    "killed and resumed": Part("gpu_checks.py", "resume", 130, beside=True),
    "rollouts": Part("gpu_checks.py", "rollouts", 130, beside=True),
    "adapters in fp16 and on 4 bits": Part("gpu_checks.py", "adapters", 130, ("bitsandbytes",), beside=True),
    "check's memory, 0.5 B": Part("gpu_checks.py", "memory", 130, (), 1, beside=True),
    "quickstart/grpo by accelerate launch": Part("gpu_checks.py", "recipe", 130, (), 1, beside=True),
    "vLLM, an adapter pushed alone": Part("gpu_checks.py", "adapter_alone", 130, ("vllm",), 1, beside=True),
    "vLLM, images": Part("gpu_checks.py", "images", 130, ("vllm",), 1, beside=True),
    "vLLM, routes of a mixture": Part("gpu_checks.py", "routes", 130, ("vllm",), 1, beside=True),
    "vLLM server, NCCL push": Part("gpu_checks.py", "server", 90, ("vllm",), 2),
    "vLLM colocated, sleep mode": Part("gpu_checks.py", "colocate", 80, ("vllm",), 1),
    "QLoRA with vLLM": Part("gpu_checks.py", "qlora", 80, ("vllm", "bitsandbytes"), 1),
    "speed, 0.5 B": Part("gpu_speed.py", "0.5 B", 90),
    "speed, 1.7 B": Part("gpu_speed.py", "1.7 B", 90, (), 1),
}
"""In this order; the limits of those in turn, and the longest of those together, add up to ten minutes."""


def missing(part: Part, device: str) -> str | None:
    """Return why a part cannot run here."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus < part.gpus:
        return f"needs {part.gpus} GPU{'s' if part.gpus > 1 else ''}, and has {gpus}"
    absent = [name for name in part.packages if find_spec(name) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def run(name: str, device: str) -> list[dict[str, Any]]:
    """Return the lines of JSON that a part has printed, and one that it failed or was skipped, if it was."""
    part = PARTS[name]
    if reason := missing(part, device):
        return [{"outcome": "skipped", "detail": reason}]
    seconds = CPU_SECONDS if device == "cpu" else part.seconds
    begin, reason = time.perf_counter(), None
    command = [sys.executable, str(HERE / part.script), part.argument, device]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
        if process.returncode:
            reason = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        printed, _ = process.communicate()
        reason = f"not done after {seconds} s"
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    rows += [{"outcome": "failed", "detail": reason}] if reason else []
    return [row | {"part_seconds": round(time.perf_counter() - begin, 1)} for row in rows]


def machine(device: str) -> dict[str, Any]:
    """Name the device and the versions."""
    found = {}
    for name in ("torch", "transformers", "trl", "vllm", "bitsandbytes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    card = torch.cuda.get_device_name(0) if device == "cuda" else platform.machine()
    return {"device": card, "devices": torch.cuda.device_count(), **found}


def outcomes(names: list[str], device: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the lines of each part: first of those that run together, then of the others."""
    together = [name for name in names if PARTS[name].beside]
    with ThreadPoolExecutor(len(PARTS) if device == "cuda" else 1) as pool:
        yield from zip(together, pool.map(run, together, repeat(device)), strict=True)
    yield from ((name, run(name, device)) for name in names if not PARTS[name].beside)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=RESULTS, default="cuda")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS], help="the others keep results")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench-gpu: torch sees no GPU here. DEVICE=cpu runs the small form.", file=sys.stderr)
        return 2
    path = RESULTS[options.device]
    path.parent.mkdir(exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results = {"parts": results.get("parts", {})} | machine(options.device)
    for name, rows in outcomes(options.parts, options.device):
        results["parts"][name] = rows
        path.write_text(json.dumps(results, indent=2) + "\n")
        for row in rows:
            print(f"{name}: {row.get('outcome', row.get('ratio'))} {row.get('detail', row.get('work'))}", flush=True)
    return int(any(row.get("outcome") == "failed" for name in options.parts for row in results["parts"][name]))


if __name__ == "__main__":
    sys.exit(main())
