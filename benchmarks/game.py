"""The quickstart's game before and after GRPO, as an environment and as an agent, for each seed: `make bench-game`.

Every run starts from the warm model of its seed and trains `quickstart/guess` or `quickstart/agent` on one thread.
TRL's own evaluation plays every number eight times, sampled as in training, before, on the way and after.
Writes results/game.json, game.md and game.png.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import itertools
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
RECIPES = {"quickstart/guess": "an environment", "quickstart/agent": "an agent"}
MODEL = "quickstart/guess"
FOUND = "rewards/environment/mean"


def seconds_of_cpu() -> float:
    """Return the time of this process, and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run(recipe: str, seed: int) -> dict:
    """Train once; return success of evaluation and of training by step, turns, and seconds."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        start, busy = time.perf_counter(), seconds_of_cpu()
        warm = warm_up(Path(folder) / "warm", seed, lesson=LESSONS[MODEL])
        warmed = time.perf_counter()
        settings = {"model_name_or_path": warm, "seed": seed, "output_dir": f"{folder}/run", "save_strategy": "no"}
        settings |= {"disable_tqdm": "true"}
        options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        trainer = train(load_recipe(["--config", recipe, *options]))
        trainer.acting.close()  # so that the agents' processes count
        log = trainer.state.log_history
        seconds = {"warm_up": warmed - start, "all": time.perf_counter() - start, "cpu": seconds_of_cpu() - busy}
    evaluated, sampled = (
        [(entry["step"], entry[key]) for entry in log if key in entry] for key in (f"eval_{FOUND}", FOUND)
    )
    name = f"eval_environments/{recipe.removeprefix('quickstart/')}/turns"
    turns = [entry[name] for entry in log if name in entry]
    print(f"{recipe} {seed}: {evaluated[0][1]:.3f} -> {evaluated[-1][1]:.3f}  ({seconds['cpu']:.0f} s)", flush=True)
    return {
        "recipe": recipe,
        "seed": seed,
        "evaluated": evaluated,
        "sampled": sampled,
        "turns": turns,
        "seconds": seconds,
    }


def table(results: list[dict]) -> str:
    """Markdown: a row for each seed."""
    lines = [
        "# Guess the number",
        "",
        "`quickstart/guess` plays it as an environment of messages, `quickstart/agent` as a function that calls the",
        "model through the endpoint: the share of games that find the number, before and after training, and turns of",
        f"a game. Each number from 1 to {HIGH} is played eight times, sampled, with {GUESSES} guesses. Time is that",
        "of one thread, with the warm-up and the agents' processes. `make bench-game` rewrites this file.",
        "",
        "| played as | steps | seed | before | after | turns before | after | seconds of CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        (_, before), (steps, after) = r["evaluated"][0], r["evaluated"][-1]
        lines.append(
            f"| {RECIPES[r['recipe']]} | {steps} | {r['seed']} | {before:.1%} | {after:.1%} | {r['turns'][0]:.2f} "
            f"| {r['turns'][-1]:.2f} | {r['seconds']['cpu']:.0f} |"
        )
    return "\n".join([*lines, "", "![games that find the number, over training](game.png)", ""])


def picture(results: list[dict]) -> None:
    """Success over steps, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4))
    for r in results:
        style = {"linestyle": "-" if r["recipe"] == MODEL else "--", "color": f"C{r['seed']}"}
        label = f"{RECIPES[r['recipe']]}, seed {r['seed']}"
        (line,) = axis.plot(*zip(*r["sampled"], strict=True), linewidth=1.4, label=label, **style)
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
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    results = {(r["recipe"], r["seed"]): r for r in json.loads(RESULT.read_text())} if RESULT.exists() else {}
    for recipe, seed in itertools.product(args.recipes, args.seeds):
        results[recipe, seed] = run(recipe, seed)
        every = list(results.values())
        RESULT.write_text(json.dumps(every) + "\n")
        (FOLDER / "game.md").write_text(table(every))
        picture(every)
    print(table(every))


if __name__ == "__main__":
    main()
