"""The quickstart's pictures before and after GRPO, for each seed: `make bench-colours`.

Every run starts from the warm model of its seed and trains the packaged recipe `quickstart/colours` on one thread;
TRL's own evaluation names the colours of 120 other pictures, sampled as in training, before, during and after it.
Writes results/colours.json and colours.md.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import json
import logging
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import disable_progress_bars

from grpo_ext.quickstart.model import LESSONS, warm_up
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "colours.json"
NAME = "quickstart/colours"
RIGHT = "rewards/accuracy/mean"


def run(seed: int) -> dict:
    """Train once; return accuracy of evaluation and of training by step, and seconds."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        start, busy = time.perf_counter(), time.process_time()
        warm = warm_up(Path(folder) / "warm", seed, lesson=LESSONS[NAME])
        warmed = time.perf_counter()
        settings = {"model_name_or_path": warm, "seed": seed, "output_dir": f"{folder}/run", "save_strategy": "no"}
        settings |= {"disable_tqdm": "true"}
        options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        log = train(load_recipe(["--config", NAME, *options])).state.log_history
        seconds = {"warm_up": warmed - start, "all": time.perf_counter() - start, "cpu": time.process_time() - busy}
    evaluated, sampled = (
        [(entry["step"], entry[key]) for entry in log if key in entry] for key in (f"eval_{RIGHT}", RIGHT)
    )
    print(f"seed {seed}: {evaluated[0][1]:.3f} -> {evaluated[-1][1]:.3f}  ({seconds['cpu']:.0f} s)", flush=True)
    return {"seed": seed, "evaluated": evaluated, "sampled": sampled, "seconds": seconds}


def table(results: list[dict]) -> str:
    """Markdown: a row for each seed."""
    lines = [
        "# Name the colour",
        "",
        "`grpo-ext train --config quickstart/colours`: the share of 120 pictures, none of them trained on, whose",
        "colour a tiny Llava names (sampled, six colours), before and after training. Time is that of one thread,",
        "the warm-up with it. `make bench-colours` rewrites this file.",
        "",
        "| seed | before | after | seconds of CPU |",
        "|---|---|---|---|",
    ]
    for r in results:
        (_, before), (_, after) = r["evaluated"][0], r["evaluated"][-1]
        lines.append(f"| {r['seed']} | {before:.1%} | {after:.1%} | {r['seconds']['cpu']:.0f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    results = []
    for seed in args.seeds:
        results.append(run(seed))
        RESULT.write_text(json.dumps(results) + "\n")
        (FOLDER / "colours.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
