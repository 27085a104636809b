"""Held-out accuracy of the quickstart, distilled and beside GRPO, for each seed: `make bench-distillation`.

The teacher is the seed's warm model after the packaged recipe `quickstart/grpo`. Every other run starts from the same
warm model. Writes results/distillation.json and distillation.md.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "distillation.json"
SEEDS = [0, 1, 2]
HINT = {"type": "jsd", "teacher": "initial", "teacher_prompt": "{prompt}{solution}", "beta": 0.5, "clip": 0.05}
ARMS: dict[str, tuple[str, list[dict], float, int]] = {
    "GRPO, the teacher": ("grpo", [], 1.0, 120),
    "JSD to the teacher": ("distill", [{"type": "jsd", "teacher": "TEACHER"}], 0.0, 24),
    "reverse KL to the teacher, sampled tokens": ("distill", [{"type": "reverse_kl", "teacher": "TEACHER"}], 0.0, 24),
    "GRPO, as many steps": ("grpo", [], 1.0, 24),
    "OPSD": ("opsd", [HINT], 0.0, 120),
    "Dr. GRPO": ("opsd", [], 1.0, 120),
    "Dr. GRPO and OPSD": ("opsd", [HINT], 1.0, 120),
}
"""Recipe, losses, weight of the accuracy reward, steps."""


def run(seed: int) -> list[dict]:
    """Train every arm of a seed; return the accuracies."""
    from datasets.utils.logging import disable_progress_bar

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        return [trained(arm, seed, Path(folder)) for arm in ARMS]


def trained(arm: str, seed: int, folder: Path) -> dict:
    """Train one arm; return its accuracies with their intervals."""
    import torch

    from grpo_ext.data.eval_sets import EvalSet
    from grpo_ext.evaluation.results import EVALUATION, Result
    from grpo_ext.quickstart.model import ensure_model
    from grpo_ext.recipe.parsing import load_recipe
    from grpo_ext.train import train

    torch.set_num_threads(1)
    name, losses, weight, steps = ARMS[arm]
    output, teacher = folder / arm, str(folder / "GRPO, the teacher")
    losses = [{**loss, "teacher": teacher} if loss["teacher"] == "TEACHER" else loss for loss in losses]
    settings = {"model_name_or_path": ensure_model(seed), "seed": seed, "output_dir": output, "max_steps": steps}
    settings |= {"losses": json.dumps(losses) if losses else "null", "disable_tqdm": "true", "save_strategy": "no"}
    if name != "grpo":
        settings["reward_funcs"] = json.dumps([{"name": "accuracy", "weight": weight}])
    arguments = [piece for key, value in settings.items() for piece in (f"--{key}", str(value))]
    recipe = load_recipe(["--config", f"quickstart/{name}", *arguments])
    held_out = EvalSet("held_out", rewards=recipe.rewards, temperature=0.0)
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        trainer = train(dataclasses.replace(recipe, eval_sets=[held_out]))
    trainer.save_model(str(output))
    files = (output / EVALUATION / "held_out" / f"step_{step}.json" for step in (0, trainer.state.global_step))
    before, after = (Result.read(file).figures["avg@1"] for file in files)
    logs = trainer.state.log_history
    seconds = next(entry["train_runtime"] for entry in logs if "train_runtime" in entry)
    result = {"arm": arm, "seed": seed, "steps": steps, "seconds": seconds, "before": before.mean, "after": after.mean}
    result |= {"low": after.low, "high": after.high, "problems": after.prompts}
    print(f"{arm:42} seed {seed}: {before.mean:.3f} -> {after.mean:.3f}  ({seconds:.0f} s)", flush=True)
    return result


def table(results: list[dict]) -> str:
    """Markdown: a row for each arm."""
    seeds = sorted({r["seed"] for r in results})
    before = ", ".join(f"{next(r['before'] for r in results if r['seed'] == seed):.3f}" for seed in seeds)
    lines = [
        "# The quickstart's model, taught",
        "",
        f"Greedy accuracy on {results[0]['problems']} held-out problems with 95 % intervals over problems, seeds "
        f"{', '.join(map(str, seeds))}; before training {before}. `make bench-distillation` rewrites this file.",
        "",
        "| what trains | steps | " + " | ".join(f"seed {seed}" for seed in seeds) + " | seconds, mean |",
        "|---|---|" + "---|" * len(seeds) + "---|",
    ]
    for arm in ARMS:
        rows = sorted((r for r in results if r["arm"] == arm), key=lambda r: r["seed"])
        cells = [f"{r['after']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in rows]
        seconds = sum(r["seconds"] for r in rows) / len(rows)
        lines.append(f"| {arm} | {rows[0]['steps']} | {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time, one thread each")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs) as pool:
        results = [result for found in pool.map(run, args.seeds) for result in found]
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "distillation.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
