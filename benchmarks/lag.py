"""Held-out accuracy of the quickstart, trained on completions of older weights (`rollout_ahead: K`): `make bench-lag`.

Every run starts from the warm model of its seed and trains `quickstart/dr_grpo` with the transformers engine in a
process of its own. Rules for completions that are K generations old: the default, token ratios to the sampler that are
cut at 2 and a clip around the weights that begin to train; the same with tokens outside of .5 to 2 left out; and
`old_logps: sampler`, a plain clip around the weights that sampled. Hard cases have a larger lag, a larger learning
rate and several passes over each generation. Writes results/lag.json, lag.md and lag.png; runs that are in the file
already are kept unless `--again` is set.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "lag.json"
SEEDS = [0, 1, 2]
STEPS = 60
USUAL = {"max_steps": STEPS, "learning_rate": 1e-4}
HARD = {"max_steps": STEPS, "learning_rate": 3e-4, "num_iterations": 2}
LAGS = {"usual": (USUAL, (0, 1, 4)), "hard": (HARD, (0, 8))}
"""Settings and lags of each case."""
MASK = {"level": "token", "lower": 0.5, "upper": 2.0, "action": "mask"}
RULES = {
    "corrected": {"old_logps": "recomputed"},
    "masked": {"sampler_correction": json.dumps(MASK)},
    "plain clip": {"old_logps": "sampler"},
}
"""Settings of each rule."""
Run = dict[str, Any]


def train_once(case: str, lag: int, rule: str, seed: int) -> Run:
    """Train; return accuracies, time, and the curve of the accuracy reward."""
    import torch
    from datasets.utils.logging import disable_progress_bar

    from grpo_ext.data.eval_sets import EvalSet
    from grpo_ext.evaluation.results import EVALUATION, Result
    from grpo_ext.quickstart.model import ensure_model
    from grpo_ext.recipe.parsing import load_recipe
    from grpo_ext.train import train

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as output:
        settings = {"model_name_or_path": ensure_model(seed), "seed": seed, "output_dir": output}
        settings |= {"save_strategy": "no", "disable_tqdm": "true", "rollout_engine": "process"}
        settings |= LAGS[case][0] | {"logging_steps": 2}
        if lag:
            settings |= {"rollout_ahead": lag} | RULES[rule]
        arguments = [piece for key, value in settings.items() for piece in (f"--{key}", str(value))]
        recipe = load_recipe(["--config", "quickstart/dr_grpo", *arguments])
        held_out = EvalSet("held_out", rewards=recipe.rewards, temperature=0.0)
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            trainer = train(dataclasses.replace(recipe, eval_sets=[held_out]))
        last = trainer.state.global_step
        files = (Path(output) / EVALUATION / "held_out" / f"step_{step}.json" for step in (0, last))
        before, after = (Result.read(file).figures["avg@1"] for file in files)
    logs = trainer.state.log_history
    curve = [(entry["step"], entry["rewards/accuracy/mean"]) for entry in logs if "rewards/accuracy/mean" in entry]
    seconds = next(entry["train_runtime"] for entry in logs if "train_runtime" in entry)
    result = {"case": case, "lag": lag, "rule": rule, "seed": seed, "before": before.mean, "after": after.mean}
    return result | {"seconds": seconds, "problems": after.prompts, "curve": curve}


def in_process(*key: Any) -> Run:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "run.json"
        done = subprocess.run(
            [sys.executable, __file__, "--run", json.dumps(key), str(written)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-5000:])
        found: Run = json.loads(written.read_text())
        return found


def keys(cases: list[str], seeds: list[int]) -> list[tuple[str, int, str, int]]:
    """Return case, lag, rule and seed of each run; without a lag all rules are the same."""
    return [
        (case, lag, rule, seed)
        for case in cases
        for seed in seeds
        for lag in LAGS[case][1]
        for rule in RULES
        if (lag or rule == "corrected") and (case == "hard" or rule != "masked")
    ]


def key_of(run: Run) -> tuple[str, int, str, int]:
    return run["case"], run["lag"], run["rule"], run["seed"]


def table(runs: list[Run]) -> str:
    """Return Markdown: a row for each case, lag and rule."""
    settings = {
        case: ", ".join(f"`{k}: {v:g}`" for k, v in LAGS[case][0].items())
        for case in dict.fromkeys(r["case"] for r in runs)
    }
    lines = [
        "# Training on completions of older weights",
        "",
        f"Greedy accuracy on {runs[0]['problems']} held-out problems of the quickstart, `loss_type: dr_grpo`, seeds "
        f"{', '.join(map(str, sorted({r['seed'] for r in runs})))}; `make bench-lag` rewrites this file. "
        + " ".join(f"{case.capitalize()}: {text}." for case, text in settings.items()),
        "",
        "| case | `rollout_ahead` | rule | before | after (each seed) | after, mean |",
        "|---|---|---|---|---|---|",
    ]
    for case, lag, rule in dict.fromkeys(key_of(r)[:3] for r in runs):
        rows = [r for r in runs if key_of(r)[:3] == (case, lag, rule)]
        afters = ", ".join(f"{r['after']:.3f}" for r in rows)
        before, after = (statistics.mean(r[name] for r in rows) for name in ("before", "after"))
        lines.append(f"| {case} | {lag} | {rule if lag else 'no lag'} | {before:.3f} | {afters} | {after:.3f} |")
    return "\n".join([*lines, "", "![accuracy reward over training](lag.png)", ""])


def picture(runs: list[Run]) -> None:
    """Draw the accuracy reward over steps: a panel for each case, lag and rule, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(key_of(r)[:3] for r in runs))
    figure, axes = plt.subplots(2, -(-len(names) // 2), figsize=(13, 5.6), sharey=True, squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names, strict=False):
        for r in (r for r in runs if key_of(r)[:3] == name):
            (line,) = axis.plot(*zip(*r["curve"], strict=True), linewidth=1.4, label=f"seed {r['seed']}")
            axis.plot([0, r["curve"][-1][0]], [r["before"], r["after"]], "o", color=line.get_color(), markersize=5)
        axis.set_title(f"{name[0]}, K = {name[1]}" + (f", {name[2]}" if name[1] else ""), fontsize=10)
        axis.grid(alpha=0.25)
        axis.set_ylim(0, 1.03)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy")
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.suptitle("Accuracy of sampled completions (lines) and greedy held-out accuracy before and after (dots)")
    figure.tight_layout()
    figure.savefig(FOLDER / "lag.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(LAGS), default=list(LAGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--again", action="store_true", help="also run what results/lag.json has")
    parser.add_argument("--run", nargs=2, metavar=("KEY", "FILE"), help="one run; what this script calls itself by")
    given = parser.parse_args()
    if given.run:
        Path(given.run[1]).write_text(json.dumps(train_once(*json.loads(given.run[0]))))
        return
    known = {key_of(run): run for run in (json.loads(RESULT.read_text()) if RESULT.exists() else [])}
    for key in keys(given.cases, given.seeds):
        if given.again or key not in known:
            known[key] = in_process(*key)
            print(
                *key,
                f"{known[key]['before']:.3f} -> {known[key]['after']:.3f}  ({known[key]['seconds']:.0f} s)",
                flush=True,
            )
            RESULT.write_text(json.dumps([known[k] for k in keys(list(LAGS), SEEDS) if k in known], indent=1) + "\n")
    runs = [known[key] for key in keys(list(LAGS), SEEDS) if key in known]
    (FOLDER / "lag.md").write_text(table(runs))
    picture(runs)
    print(table(runs))


if __name__ == "__main__":
    main()
