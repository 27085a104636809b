"""Cost and gain of isolated rewards: `make bench` writes results/reward_isolation.json.

Cost: a batch of 64 completions through a worker against the same function called in this process, in turn, medians.
Gain: math-verify over 512 completions with two workers against this process.
"""

import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.runtime import Runtime

RESULT = Path(__file__).parent / "results" / "reward_isolation.json"


def seconds(runtime: Runtime, **columns) -> float:
    columns["completions"] = list(columns["completions"])  # a new list is a new batch
    start = time.perf_counter()
    runtime.functions[0](**columns)
    return time.perf_counter() - start


def compare(spec: RewardSpec, workers: int, repeats: int, **columns) -> dict:
    inside, isolated = Runtime([spec], workers=0), Runtime([spec], workers=workers)
    for runtime in (inside, isolated):
        seconds(runtime, **columns)
    pairs = [(seconds(inside, **columns), seconds(isolated, **columns)) for _ in range(repeats)]
    isolated.close()
    return {
        "reward": spec.function,
        "completions": len(columns["completions"]),
        "workers": workers,
        "repeats": repeats,
        "inside_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "isolated_ms": 1e3 * statistics.median(b for _, b in pairs),
        "difference_ms": 1e3 * statistics.median(b - a for a, b in pairs),
        "speed_up": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    text = "<think>\n" + "3 + 4 = 7, no carry. " * 40 + "\n</think>\n<answer>\n{}\n</answer>"
    chat = [[{"role": "assistant", "content": text.format(i)}] for i in range(512)]
    prompts = [[{"role": "user", "content": f"{i} + 0 = ?"}] for i in range(512)]
    formulas = [f"\\frac{{{2 * i + 1}}}{{{i + 2}}} + \\sqrt{{{i + 2}}}" for i in range(512)]
    answers = [[{"role": "assistant", "content": f"so we get \\boxed{{{f}}}"}] for f in formulas]
    results = {
        "cost": compare(RewardSpec("tags", "tags"), 1, 200, completions=chat[:64], prompts=prompts[:64]),
        "gain": compare(
            RewardSpec("accuracy", "accuracy"), 2, 5, completions=answers, prompts=prompts, solution=formulas
        ),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
