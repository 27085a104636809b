"""What `grpo-ext check --probe` foretells of a step, beside steps of a training: `python benchmarks/probe.py`.

Six recipes on a CPU, each probe and each training in a process of its own. The measured step is the median of the last
four of six, by metrics.jsonl. Each command adds a run to results/probe.json.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "probe.json"
STEPS, WARM = 6, 2
LONG = ("--gradient_checkpointing", "true", "--max_completion_length", "128")
ROWS = {
    "quickstart/grpo": ("quickstart/grpo",),
    "quickstart/dapo": ("quickstart/dapo",),
    "quickstart/grpo, LoRA": ("quickstart/grpo", "--use_peft", "true", "--learning_rate", "1e-3"),
    "quickstart/grpo, checkpointed, 128 tokens": ("quickstart/grpo", *LONG),
    "quickstart/ahead": ("quickstart/ahead",),
    "quickstart/grpo, two micro-batches, two updates a generation": (
        *("quickstart/grpo", "--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "2"),
        *("--num_iterations", "2"),
    ),
}


def command(*words: str) -> str:
    """Run `grpo-ext WORDS` and return what it prints."""
    environment = os.environ | {"COLUMNS": "250", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "grpo_ext", *words]
    return subprocess.run(argv, env=environment, check=True, capture_output=True, text=True).stdout


def foretold(recipe: str, *keys: str) -> float:
    """Return the seconds of a step by a probe."""
    out = command("check", "--config", recipe, "--probe", *keys)
    return float(re.search(r"^  a step +([\d.]+) s", out, re.M)[1])


def measured(recipe: str, *keys: str) -> float:
    """Return the median seconds of a step behind the first ones of a training."""
    with tempfile.TemporaryDirectory() as folder:
        once = ("--max_steps", str(STEPS), "--logging_steps", "1", "--save_strategy", "no", "--output_dir", folder)
        command("train", "--config", recipe, *once, "--eval_sets", "[]", *keys)
        lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        times = [{name: row[name] for name in row if name.startswith("time/")} for row in lines]
    steps = [sum(row.values()) for row in times if "time/training" in row]
    return statistics.median(steps[WARM:])


def main() -> None:
    """Probe and train each recipe once more, and write the results."""
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    for name, words in ROWS.items():
        runs = rows.setdefault(name, {"foretold": [], "measured": []})
        runs["foretold"].append(round(foretold(*words), 3))
        runs["measured"].append(round(measured(*words), 3))
        print(name, runs, flush=True)
        about = {"torch": version("torch"), "threads": 1, "steps": STEPS - WARM}
        RESULT.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
