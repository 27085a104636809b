"""Held-out accuracy of the quickstart before and after GRPO, for each loss and seed: `make bench-losses`.

Every run starts from the warm model of its seed, trains the packaged recipe `quickstart/<loss>` on one thread and is
scored greedily on problems that neither phase has seen. Writes results/losses.json, losses.md and losses.png.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
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
    """One run: accuracies, time, and the curve of the accuracy reward."""
    import torch
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_ext.quickstart.evaluate import greedy_accuracy
    from grpo_ext.quickstart.model import ensure_model
    from grpo_ext.quickstart.task import load
    from grpo_ext.recipe.parsing import load_recipe
    from grpo_ext.train import train

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    warm = ensure_model(seed)
    tokenizer = AutoTokenizer.from_pretrained(warm)
    _, held_out = load()
    before = greedy_accuracy(AutoModelForCausalLM.from_pretrained(warm), tokenizer, held_out)
    with tempfile.TemporaryDirectory() as output, open(os.devnull, "w") as sink:
        settings = {"model_name_or_path": warm, "seed": seed, "output_dir": output, "save_strategy": "no"}
        settings |= {"disable_tqdm": "true"}
        arguments = [piece for key, value in settings.items() for piece in (f"--{key}", str(value))]
        stdout, sys.stdout = sys.stdout, sink
        start = time.perf_counter()
        trainer = train(load_recipe(["--config", f"quickstart/{loss}", *arguments]))
        seconds = time.perf_counter() - start
        sys.stdout = stdout
    after = greedy_accuracy(trainer.model, tokenizer, held_out)
    curve = [
        (entry["step"], entry["rewards/accuracy/mean"])
        for entry in trainer.state.log_history
        if "rewards/accuracy/mean" in entry
    ]
    result = {"loss": loss, "seed": seed, "before": before.accuracy, "after": after.accuracy, "seconds": seconds}
    result |= {"problems": len(held_out), "objective": trainer.objective.describe(), "curve": curve}
    print(f"{loss:12} seed {seed}: {before.accuracy:.3f} -> {after.accuracy:.3f}  ({seconds:.0f} s)", flush=True)
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
