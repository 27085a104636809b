"""Held-out accuracy of the quickstart before and after GRPO, for each loss and seed: `make bench-losses`.

Every run starts from the warm model of its seed, trains the packaged recipe `quickstart/<loss>` on one thread and is
scored greedily on problems that neither phase has seen. Writes results/losses.json, losses.md and losses.png.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "losses.json"
LOSSES = ["grpo", "deepseek_v3", "dr_grpo", "bnpo", "beta_bnpo", "minimind"]
SEEDS = [0, 1, 2]


def run(loss: str, seed: int) -> dict:
    """Train once; return accuracies, time, and the curve of the accuracy reward."""
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
        settings |= {"save_strategy": "no", "disable_tqdm": "true"}
        arguments = [piece for key, value in settings.items() for piece in (f"--{key}", str(value))]
        recipe = load_recipe(["--config", f"quickstart/{loss}", *arguments])
        held_out = EvalSet("held_out", rewards=recipe.rewards, temperature=0.0)
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            trainer = train(dataclasses.replace(recipe, eval_sets=[held_out]))
        last = trainer.state.global_step
        files = (Path(output) / EVALUATION / "held_out" / f"step_{step}.json" for step in (0, last))
        before, after = (Result.read(file).figures["avg@1"] for file in files)
    logs = trainer.state.log_history
    curve = [(entry["step"], entry["rewards/accuracy/mean"]) for entry in logs if "rewards/accuracy/mean" in entry]
    seconds = next(entry["train_runtime"] for entry in logs if "train_runtime" in entry)
    result = {"loss": loss, "seed": seed, "before": before.mean, "after": after.mean, "seconds": seconds}
    result |= {"problems": after.prompts, "objective": trainer.objective.describe(), "curve": curve}
    print(f"{loss:12} seed {seed}: {before.mean:.3f} -> {after.mean:.3f}  ({seconds:.0f} s)", flush=True)
    return result


def table(results: list[dict]) -> str:
    """Markdown: a row for each loss."""
    lines = [
        "# The same model, the same task, another loss",
        "",
        f"Greedy accuracy on {results[0]['problems']} held-out problems of the quickstart, seeds "
        f"{', '.join(map(str, sorted({r['seed'] for r in results})))}; `make bench-losses` rewrites this file.",
        "",
        "| loss | before | after (each seed) | gain, mean | gain, worst | seconds, median |",
        "|---|---|---|---|---|---|",
    ]
    for loss in dict.fromkeys(r["loss"] for r in results):
        rows = [r for r in results if r["loss"] == loss]
        gains = [r["after"] - r["before"] for r in rows]
        afters = ", ".join(f"{r['after']:.3f}" for r in rows)
        lines.append(
            f"| `{loss}` | {statistics.mean(r['before'] for r in rows):.3f} "
            f"| {afters} | {statistics.mean(gains):+.3f} | {min(gains):+.3f} "
            f"| {statistics.median(r['seconds'] for r in rows):.0f} |"
        )
    return "\n".join([*lines, "", "![accuracy reward over training](losses.png)", ""])


def picture(results: list[dict]) -> None:
    """Accuracy reward over steps, a panel for each loss, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r["loss"] for r in results))
    figure, axes = plt.subplots(2, -(-len(names) // 2), figsize=(13, 5.6), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        for r in (r for r in results if r["loss"] == name):
            (line,) = axis.plot(*zip(*r["curve"], strict=True), linewidth=1.4, label=f"seed {r['seed']}")
            last = r["curve"][-1][0]
            axis.plot([0, last], [r["before"], r["after"]], "o", color=line.get_color(), markersize=5)
        axis.set_title(name)
        axis.grid(alpha=0.25)
        axis.set_ylim(0, 1.03)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy")
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.suptitle("Accuracy of sampled completions (lines) and greedy held-out accuracy before and after (dots)")
    figure.tight_layout()
    figure.savefig(FOLDER / "losses.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", nargs="+", default=LOSSES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    args = parser.parse_args()
    jobs = [(loss, seed) for seed in args.seeds for loss in args.losses]
    with ProcessPoolExecutor(args.jobs) as pool:
        results = list(pool.map(run, *zip(*jobs, strict=True)))
    results.sort(key=lambda r: (args.losses.index(r["loss"]), r["seed"]))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "losses.md").write_text(table(results))
    picture(results)
    print(table(results))


if __name__ == "__main__":
    main()
