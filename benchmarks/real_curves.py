"""Does a real model learn on a laptop's CPU? Three seeds, a control and stock TRL, with what tells learning from luck.

    make bench-curves MODEL=FOLDER

MODEL is the folder of the recipe's model, or its name on the hub. Trains `laptop/qwen2.5-coder-0.5b-dr_grpo-sums` from
three seeds, once by a random reward, and by stock TRL for the seconds that the first seed took; evaluates each by the
recipe's sets. A second call goes on where the first was stopped. Writes results/real_curves.json, real_curves.png, and
the report of the three seeds to docs/example_report.html; docs/tables.py writes the tables of real_curves.md. The runs
on GSM8K of the same page were made by the commands of their recipes.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
RESULT, REPORT = FOLDER / "results" / "real_curves.json", FOLDER.parent / "docs" / "example_report.html"
RUNS = FOLDER.parent / "outputs" / "curves"
RECIPE, HUB_NAME = "laptop/qwen2.5-coder-0.5b-dr_grpo-sums", "Qwen/Qwen2.5-Coder-0.5B-Instruct"
RATE = 0.35
"""Share that the random reward pays: near the first step's reward of the untrained model."""
RANDOM = json.dumps([{"name": "random", "kwargs": {"rate": RATE}}, {"name": "reasoning_gym", "weight": 0}])
UNTRAINED, STOCK, CONTROL = "untrained", "stock TRL, same seconds", "random reward"
SEEDS = ("seed 0", "seed 1", "seed 2")
ARMS = {name: ("--seed", name[-1]) for name in SEEDS} | {CONTROL: ("--seed", "0", "--reward_funcs", RANDOM)}
STRICT, LENIENT = "accuracy", "last_number"
PAID = "rewards/reasoning_gym/mean"
SMOOTH = 5
"""Steps whose mean the picture shows."""


class Figure(NamedTuple):
    """A figure of the page: a set, its name there, and what it is."""

    set: str
    name: str
    title: str


FIGURES = (
    Figure("test", "avg@1", "greedy, strict"),
    Figure("test", f"{LENIENT}/avg@1", "greedy, lenient"),
    Figure("sampled", f"{LENIENT}/avg@16", "pass@1, lenient"),
    Figure("sampled", f"{LENIENT}/pass@8", "pass@8, lenient"),
    Figure("three_digits", f"{LENIENT}/avg@1", "three digits, lenient"),
    Figure("three_numbers", f"{LENIENT}/avg@1", "three numbers, lenient"),
)


def run(*arguments: str) -> None:
    """Run a command of this Python."""
    subprocess.run([sys.executable, *arguments], check=True)


def folder(name: str) -> Path:
    """The folder of an arm."""
    return RUNS / name.partition(",")[0].replace(" ", "_")


def trained(name: str, model: str, further: tuple[str, ...]) -> Path:
    """Train an arm, or the rest of it, and return its folder."""
    output = folder(name)
    if not (output / "finished.json").exists():
        places = ("--model_name_or_path", model, "--output_dir", str(output))
        run("-m", "grpo_ext", "train", "--config", RECIPE, *places, "--eval_sets", "null", *further)
    return output


def trained_by_stock(model: str, seconds: float) -> Path:
    """Train by stock TRL for some seconds."""
    output = folder(STOCK)
    if not (output / "config.json").exists():
        (output / "metrics.jsonl").unlink(missing_ok=True)
        options = ("--seconds", str(seconds), "--model_name_or_path", model, "--seed", "0")
        run(str(FOLDER / "stock_trl.py"), RECIPE, str(output), *options)
    return output


def evaluated(name: str, model: str, base: str) -> dict[str, "Any"]:
    """Evaluate a model by the recipe's sets, and return the result of each."""
    from grpo_ext.evaluation.results import EVALUATION, Result

    output = folder(name) / EVALUATION
    places = ("--model_name_or_path", base, "--model", model, "--output", str(output))
    run("-m", "grpo_ext", "eval", "--config", RECIPE, *places)
    return {path.parent.name: Result.read(path) for path in sorted(output.glob("*/*.json")) if _is_of(path, model)}


def _is_of(path: Path, model: str) -> bool:
    return json.loads(path.read_text())["model"] == model


def steps(output: Path) -> list[dict[str, float]]:
    """Hours, paid share, tokens of each step of a run."""
    hours, found = 0.0, []
    for line in (output / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if PAID in row:
            hours += row["step_time"] / 3600
            kept = {"step": row["step"], "hours": hours, "paid": row[PAID], "tokens": row["completions/mean_length"]}
            found.append(kept)
    return found


def account(results: dict[str, Any], before: dict[str, Any], curve: list[dict[str, float]]) -> dict[str, Any]:
    """What is kept of an arm: its curve, its figures by set, and its gains by set and judge."""
    from grpo_ext.evaluation.results import gain

    figures = {name: {k: v._asdict() for k, v in found.figures.items()} for name, found in results.items()}
    gains = {
        name: {judge: gain(before[name].right[judge], shares)._asdict() for judge, shares in found.right.items()}
        for name, found in results.items()
    }
    return {"steps": curve, "figures": figures, "gains": gains}


def report(runs: list[Path], model: str, untrained: Path) -> None:
    """Write the report of runs, each with the results of the untrained model, under the hub's name."""
    for output in runs:
        shutil.copytree(untrained, output / "evaluation", dirs_exist_ok=True)
    run("-m", "grpo_ext", "report", *map(str, runs), "--output", str(REPORT))
    text = REPORT.read_text().replace(model, HUB_NAME).replace(f"{RUNS}/", "outputs/curves/")
    REPORT.write_text(text)


def picture(arms: dict[str, Any]) -> None:
    """Paid share over hours; then each figure of each arm with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(arms, ("black", "tab:blue", "tab:cyan", "tab:purple", "tab:red", "tab:orange"), strict=False))
    figure, (curves, points) = plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=(2, 3))
    for name, arm in arms.items():
        if arm["steps"]:
            hours, paid = ([step[key] for step in arm["steps"]] for key in ("hours", "paid"))
            curves.plot(hours, smoothed(paid), color=colours[name], label=name)
    for i, (name, arm) in enumerate(arms.items()):
        found = [arm["figures"][figure.set][figure.name] for figure in FIGURES]
        means = [each["mean"] for each in found]
        ends = [[each["mean"] - each["low"] for each in found], [each["high"] - each["mean"] for each in found]]
        at = [n + 0.12 * (i - len(arms) / 2) for n in range(len(FIGURES))]
        points.errorbar(at, means, yerr=ends, fmt="o", markersize=4, capsize=2, color=colours[name], label=name)
    curves.set_title(f"right in training, sampled, mean of {SMOOTH} steps", fontsize=9)
    curves.set_xlabel("hours of steps")
    points.set_title("held out: right, with intervals at 95 %", fontsize=9)
    points.set_xticks(range(len(FIGURES)), [figure.title.replace(", ", "\n") for figure in FIGURES], fontsize=8)
    for axis in (curves, points):
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.25)
    points.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(FOLDER / "real_curves.png", dpi=110)


def smoothed(values: list[float]) -> list[float]:
    """Means over the last `SMOOTH` values."""
    windows = (values[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def main() -> None:
    """Train and evaluate what is not finished, and rewrite results, page, picture and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    model = parser.parse_args().model
    kept = json.loads(RESULT.read_text())
    before = evaluated(UNTRAINED, model, model)
    kept["shown"] = [figure._asdict() for figure in FIGURES]
    kept["sums"] = {UNTRAINED: account(before, before, [])}
    for name, further in ARMS.items():
        output = trained(name, model, further)
        kept["sums"][name] = account(evaluated(name, str(output), model), before, steps(output))
    output = trained_by_stock(model, kept["sums"][SEEDS[0]]["steps"][-1]["hours"] * 3600)
    kept["sums"][STOCK] = account(evaluated(STOCK, str(output), model), before, steps(output))
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    picture(kept["sums"])
    report([folder(name) for name in SEEDS], model, folder(UNTRAINED) / "evaluation")


if __name__ == "__main__":
    main()
