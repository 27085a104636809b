"""1,000 injected faults of ten kinds: lost episodes, effects on the others, processes left behind.

A tiny model in float64 talks to 40 environments at a time; 20 of them fail, two of each kind. It is compared with the
same generation without faults. `python benchmarks/environment_faults.py` writes results/environment_faults.json.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.child_processes import FOLDER_PREFIX
from grpo_ext.rollout.seeds import Source, numbered
from support import tiny, worlds

KINDS = {
    "raises": ("raises in reset", "raises in step"),
    "leaves the process": ("leaves", "exits"),
    "hangs": ("hangs",),
    "is killed": ("is killed", "segfaults", "is killed by a signal without a name"),
    "answers garbage": ("says nothing known", "says what is no text"),
    "pays no number": ("pays no number", "pays beyond all bounds"),
    "answers too much": ("says too much",),
    "runs out of memory": ("eats memory",),
    "spoils its line": ("writes over its line", "closes its line"),
    "leaves processes": ("leaves processes behind", "forks itself"),
}
BATCH, FAULTS = 40, int(os.environ.get("FAULTS", "1000"))
HANGING = "Hanging"
"""The environment of those that hang, whose time is soon up."""


def rows(generation: int, faults: bool) -> list[dict]:
    prompt = [{"role": "user", "content": f"go {generation}"}]
    made = []
    for place in range(BATCH):
        kind = list(KINDS)[place // 2 % 10] if place % 2 else None
        ways = KINDS[kind] if kind else (None,)
        way = ways[(generation + place // 20) % len(ways)]
        environment = HANGING if kind == "hangs" else "Faulty"
        made.append({"prompt": prompt, "environment": environment, "fault": way if faults else None, "kind": kind})
    return made


def run(trainer: GRPOExtTrainer, generation: int, faults: bool) -> list:
    attempts = numbered(generation, Source.TRAINING, range(BATCH), 4)
    made, _ = trainer.collector.rollouts(rows(generation, faults), attempts)
    return [row["trajectory"] for row in made]


def said(trajectory) -> list:
    """Return all tokens and rewards; log-probabilities depend on the batch by rounding."""
    return [(turn.context, turn.sampled, turn.reward) for turn in trajectory.turns]


def left() -> dict:
    """Return threads and open files of this process, once only the two fork servers remain."""
    me, end = psutil.Process(), time.monotonic() + 20
    while len(me.children(recursive=True)) > 2 and time.monotonic() < end:
        time.sleep(0.1)
    mine = Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*_{me.pid}_*")
    return {
        "processes": len(me.children(recursive=True)),
        "descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "temporary_files": sum(1 for folder in mine for _ in folder.rglob("*")),
        "mib": round(me.memory_info().rss / 2**20),
    }


def main() -> None:
    settings = {"max_completion_length": 400, "per_device_train_batch_size": BATCH, "num_generations": 4}
    path = f"{worlds.__file__}:Faulty"
    injected, lost, told = Counter(), Counter(), {kind: Counter() for kind in KINDS}
    others = equal = wrongly = generation = 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOExtTrainer(
            tiny.model(dtype=torch.float64, max_position_embeddings=1024),
            None,
            GRPOExtConfig(folder, **(tiny.TRAINING | settings)),
            rows(0, False),
            processing_class=tiny.tokenizer(),
            environments=[
                {"path": path, "turn_timeout": 120.0, "max_turns": 4},
                {"path": path, "name": HANGING, "turn_timeout": 3.0, "max_turns": 4},
            ],
            reward_memory_gib=1.0,
        )
        for warming in range(3):
            run(trainer, warming, True)
        before, start = left(), time.monotonic()
        while sum(injected.values()) < FAULTS:
            expected, found = run(trainer, generation, False), run(trainer, generation, True)
            for row, one, other in zip(rows(generation, True), expected, found, strict=True):
                answered = sum(turn.reward is not None for turn in one.turns)
                kind = row["kind"] if row["fault"] == "raises in reset" or answered > 1 else None
                if kind is None:
                    others, equal = others + 1, equal + (said(one) == said(other))
                    wrongly += other.failure is not None
                else:
                    injected[kind] += 1
                    lost[kind] += other.failure is not None
                    told[kind][(other.failure or "none").partition(":")[0]] += 1
            generation += 1
        after = left()
        trainer.close_rewards()
    found = {
        "faults": sum(injected.values()),
        "lost": sum(lost.values()),
        "kinds": {kind: {"injected": injected[kind], "lost": lost[kind], "told_as": told[kind]} for kind in KINDS},
        "others": others,
        "others_lost": wrongly,
        "others_equal": equal,
        "before": before,
        "after": after,
        "processes_after_close": len(psutil.Process().children(recursive=True)),
        "seconds": round(time.monotonic() - start, 1),
    }
    if FAULTS >= 1000:
        (ROOT / "benchmarks" / "results" / "environment_faults.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
