"""The quickstart's game before and after GRPO, for each seed: `make bench-game`.

Every run starts from the warm model of its seed and trains the packaged recipe `quickstart/guess` on one thread; TRL's
own evaluation plays every number eight times, sampled as in training, at its beginning, on its way and at its end.
Writes results/game.json, game.md and game.png.
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

from grpo_ext.quickstart.game import GUESSES, HIGH
from grpo_ext.quickstart.model import LESSONS, warm_up
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "game.json"
NAME = "quickstart/guess"
FOUND = "rewards/environment/mean"


def run(seed: int) -> dict:
    """Train once; return success of evaluation and of training by step, turns, and seconds."""
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
        [(entry["step"], entry[key]) for entry in log if key in entry] for key in (f"eval_{FOUND}", FOUND)
    )
    turns = [entry["eval_environments/guess/turns"] for entry in log if "eval_environments/guess/turns" in entry]
    print(f"seed {seed}: {evaluated[0][1]:.3f} -> {evaluated[-1][1]:.3f}  ({seconds['cpu']:.0f} s)", flush=True)
    return {"seed": seed, "evaluated": evaluated, "sampled": sampled, "turns": turns, "seconds": seconds}


def table(results: list[dict]) -> str:
    """Markdown: a row for each seed."""
    lines = [
        "# Guess the number",
        "",
        f"`grpo-ext train --config quickstart/guess`: the share of games that find the number in {GUESSES} guesses",
        f"(every number from 1 to {HIGH} eight times, sampled), before and after training, and turns of a game. Time",
        "is that of one thread, the warm-up with it. `make bench-game` rewrites this file.",
        "",
        "| seed | before | after | turns before | after | seconds of CPU |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        (_, before), (_, after) = r["evaluated"][0], r["evaluated"][-1]
        lines.append(
            f"| {r['seed']} | {before:.1%} | {after:.1%} | {r['turns'][0]:.2f} | {r['turns'][-1]:.2f} "
            f"| {r['seconds']['cpu']:.0f} |"
        )
    return "\n".join([*lines, "", "![games that find the number, over training](game.png)", ""])


def picture(results: list[dict]) -> None:
    """Success over steps, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4))
    for r in results:
        (line,) = axis.plot(*zip(*r["sampled"], strict=True), linewidth=1.4, label=f"seed {r['seed']}")
        axis.plot(*zip(*r["evaluated"], strict=True), "o", color=line.get_color(), markersize=5)
    axis.set(xlabel="optimizer step", ylabel="games that find the number", ylim=(0, 1.03))
    axis.set_title(f"{GUESSES} guesses for {HIGH} numbers: while training (lines), evaluated (dots)", fontsize=10)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(FOLDER / "game.png", dpi=110)


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
        (FOLDER / "game.md").write_text(table(results))
        picture(results)
    print(table(results))


if __name__ == "__main__":
    main()
