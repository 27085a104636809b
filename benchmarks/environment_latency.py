"""Time of a generation with slow environments: TRL's tool loop beside ours, with the same sampler.

64 attempts of 5 turns. Every answer takes a log-normal time (median 0.2 s, sigma 1, at most 5 s), the same in both; a
wave of the sampler takes 20 ms and 1 ms for each row. The critical path is that of the longest attempt: the time of
its environment and one wave per turn. Ours is the fastest of five generations, since other work on the machine only
adds time. Agents are 64 processes that think for the same times between their requests, once with OpenAI's client and
once with one that computes next to nothing. `python benchmarks/environment_latency.py` writes
results/environment_latency.json.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from trl import GRPOConfig

from grpo_ext import GRPOExtConfig
from support import agents, speakers, tiny, worlds

ATTEMPTS, TURNS, GROUP = 64, 5, 8
WAVE, ROW = 0.02, 0.001
SECONDS = np.minimum(5.0, np.random.default_rng(0).lognormal(np.log(0.2), 1.0, (ATTEMPTS, TURNS))).round(3)


class Timed:
    """A sampler of a given speed."""

    def said(self, prompt_ids):
        time.sleep(WAVE + ROW * len(prompt_ids))
        return super().said(prompt_ids)


class Stock(Timed, speakers.Stock):
    pass


class Ours(Timed, speakers.Ours):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.collector.own.takes_streams = True  # a sampler whose turns do not depend on their wave


def think(place):
    return speakers.called("think")


def done(place):
    return "done<|im_end|>"


def seconds(kind, config, times, **environments):
    """Return wall times of generations, after a warm-up."""
    made = speakers.tokenizer()
    data = speakers.rows(ATTEMPTS, seconds=SECONDS.tolist())
    sizes = {"max_completion_length": 2000, "per_device_train_batch_size": ATTEMPTS, "num_generations": GROUP}
    with tempfile.TemporaryDirectory() as folder:
        args = config(folder, **(tiny.TRAINING | sizes))
        trainer = kind(speakers.model(made), [], args, data, processing_class=made, **environments)
        trainer.script = [done] * (TURNS + 1)
        trainer._generate_and_score_completions([dict(row) for row in data])
        trainer.script = [*[think] * TURNS, done]
        walls = []
        for _ in range(times):
            start = time.monotonic()
            trainer._generate_and_score_completions([dict(row) for row in data])
            walls.append(round(time.monotonic() - start, 3))
        if hasattr(trainer, "close_rewards"):
            trainer.close_rewards()
    return walls


def main():
    alone = WAVE + ROW
    critical = float((SECONDS.sum(axis=1) + (TURNS + 1) * alone).max())
    ours = seconds(Ours, GRPOExtConfig, 5, environments=[{"path": f"{worlds.__file__}:Thinker", "turn_timeout": 60}])
    asked, plainly = (
        seconds(Ours, GRPOExtConfig, 5, environments=[{"path": f"{agents.__file__}:{name}", "max_turns": TURNS + 1}])
        for name in ("thinks", "thinks_plainly")
    )
    [stock] = seconds(Stock, GRPOConfig, 1, environment_factory=worlds.Thinker)
    found = {
        "attempts": ATTEMPTS,
        "turns": TURNS,
        "critical_path_seconds": round(critical, 3),
        "cores": os.cpu_count(),
        "ours_seconds": ours,
        "agents_seconds": asked,
        "agents_with_a_plain_client_seconds": plainly,
        "stock_seconds": stock,
        "ours_over_critical_path": round(min(ours) / critical, 3),
        "agents_over_critical_path": round(min(asked) / critical, 3),
        "agents_with_a_plain_client_over_critical_path": round(min(plainly) / critical, 3),
        "stock_over_critical_path": round(stock / critical, 3),
    }
    (ROOT / "benchmarks" / "results" / "environment_latency.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
