"""1,000 injected faults of ten kinds: what is lost, what the others said, what is left behind.

A tiny model in float64 speaks to 40 environments at a time, of which 20 fail in their second turn; the same generation
without faults is its own comparison. `python benchmarks/environment_faults.py` writes results/environment_faults.json.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "builders"))

import tiny
import worlds
from grpo_ext import GRPOExtConfig, GRPOExtTrainer

KINDS = [kind for kind in worlds.FAULTS if kind not in ("hangs", "writes over its line", "eats memory")]
KINDS = [*KINDS[:9], "hangs"]
BATCH, FAULTY, GENERATIONS = 40, 20, int(os.environ.get("GENERATIONS", "50"))


def rows(generation: int, faults: bool) -> list[dict]:
    prompt = [{"role": "user", "content": f"go {generation}"}]
    kinds = [KINDS[(generation + i // 2) % 10] if faults and i % 2 else None for i in range(BATCH)]
    return [{"prompt": prompt, "fault": kind} for kind in kinds]


def run(trainer: GRPOExtTrainer, generation: int, faults: bool) -> list:
    torch.manual_seed(generation)
    made, _ = trainer.rollouts(rows(generation, faults))
    return [row["trajectory"] for row in made]


def left() -> dict:
    me = psutil.Process()
    children = me.children(recursive=True)
    return {"processes": len(children), "descriptors": me.num_fds(), "mib": round(me.memory_info().rss / 2**20)}


def main() -> None:
    settings = {"max_completion_length": 400, "per_device_train_batch_size": BATCH, "num_generations": 4}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOExtTrainer(
            tiny.model(dtype=torch.float64, max_position_embeddings=1024),
            None,
            GRPOExtConfig(folder, **(tiny.TRAINING | settings)),
            rows(0, False),
            processing_class=tiny.tokenizer(),
            environments=[{"path": f"{worlds.__file__}:Faulty", "turn_timeout": 3.0, "max_turns": 4}],
            reward_memory_gib=1.0,
        )
        run(trainer, 0, True)
        before, start = left(), time.monotonic()
        lost = injected = sound = equal = wrongly = 0
        kinds: dict[str, int] = {}
        for generation in range(GENERATIONS):
            expected, found = run(trainer, generation, False), run(trainer, generation, True)
            for row, one, other in zip(rows(generation, True), expected, found, strict=True):
                answered = sum(turn.reward is not None for turn in one.turns)
                reaches = row["fault"] == "raises in reset" or answered > 1
                if row["fault"] is None or not reaches:
                    sound, equal, wrongly = sound + 1, equal + (one == other), wrongly + (other.failure is not None)
                else:
                    injected, lost = injected + 1, lost + (other.failure is not None)
                    kind = (other.failure or "none").partition(":")[0]
                    kinds[kind] = kinds.get(kind, 0) + 1
        after = left()
        trainer.close_rewards()
    found = {
        "faults": injected,
        "lost": lost,
        "told_as": kinds,
        "others": sound,
        "others_lost": wrongly,
        "others_equal": equal,
        "before": before,
        "after": after,
        "processes_after_close": len(psutil.Process().children(recursive=True)),
        "seconds": round(time.monotonic() - start, 1),
    }
    (ROOT / "benchmarks" / "results" / "environment_faults.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
