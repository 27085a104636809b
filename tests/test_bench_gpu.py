"""`make bench-gpu DEVICE=cpu`: the small form of the checks and timings for a GPU runs to its end."""

import importlib.util
import json
from pathlib import Path

import pytest

from support.processes import run_forked

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_small_form_runs_and_no_check_fails():
    run_forked(ROOT / "benchmarks" / "gpu.py", "--device", "cpu")
    path = ROOT / "build" / "gpu_cpu.json"
    parts = json.loads(path.read_text())["parts"]
    outcomes = {name: row.get("outcome", "timed") for name, rows in parts.items() for row in rows}
    assert outcomes == {
        "attention in bfloat16": "passed",
        "on-policy log-ratio": "passed",
        "sharing on and off": "passed",
        "every loss, beside float64": "skipped",
        "killed and resumed": "passed",
        "rollouts": "passed",
        "adapters in fp16 and on 4 bits": "passed",
        "check's memory, 0.5 B": "skipped",
        "quickstart/grpo by accelerate launch": "skipped",
        "vLLM, an adapter pushed alone": "skipped",
        "vLLM, images": "skipped",
        "vLLM, routes of a mixture": "skipped",
        "vLLM server, NCCL push": "skipped",
        "vLLM colocated, sleep mode": "skipped",
        "QLoRA with vLLM": "skipped",
        "speed, 0.5 B": "timed",
        "speed, 1.7 B": "skipped",
    }
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    shown = tables.gpu_table(path)
    assert len(shown.splitlines()) == 2 + len(outcomes)
    assert "not run yet" in tables.gpu_table(path.with_name("absent.json"))
