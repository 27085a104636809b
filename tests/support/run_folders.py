"""Folders as runs leave them, without a run."""

import json
from pathlib import Path

import pandas

from grpo_ext.trainer.checkpoints.manifest import seal

RECORD = {
    "of_recipe": True,
    "model_name_or_path": "/data/someone/models/tiny",
    "dataset_name": "quickstart/addition",
    "data": "7979 rows, b2748e93ed6a5e11",
    "objective.loss_type": "dapo",
    "objective.formula": "-(1/N) sum_t min(r A, clip(r) A) where a < b",
    "objective.paper": "DAPO, arXiv:2503.14476",
    "rewards.accuracy.weight": 1.0,
    "rewards.format.weight": 0.5,
    "learning_rate": 1e-5,
    "logging_steps": 1,
    "max_steps": 20,
    "world_size": 2,
    "version.trl": "1.16.0",
}

HOSTILE = [
    "<script>document.title='taken'</script>",
    "</script><script>document.title='taken'</script>",
    "<!-- <script>",
    "x" * 1_000_000,
    "\u202eright to left\u202c \u0634\u0643\u0631\u0627",
    "\U0001f469\u200d\U0001f52c \U0001f3f4",
    "NUL \x00 and bell \x07",
]


def logged(steps: int) -> list[dict]:
    return [{"reward": 0.1 * s, "rewards/accuracy/mean": 0.05 * s, "kl": 0.01, "step": s} for s in range(1, steps + 1)]


def run_folder(folder: Path, *, steps: int = 4, log: list[dict] | None = None, **changed) -> Path:
    folder.mkdir(parents=True)
    rows = logged(steps) if log is None else log
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "finished.json").write_text(
        json.dumps({"step": steps, "max_steps": 20, "files": {}, "recipe": RECORD | changed})
    )
    return folder


def with_completions(folder: Path, step: int, groups: list[tuple[str, list[str]]], **columns) -> Path:
    """As TRL's `log_completions` writes them; the accuracy of a group's nth completion is n, its format 1 - n."""
    rows = [
        {"step": step, "prompt": prompt, "completion": text, "accuracy": float(n), "format": 1.0 - n, "advantage": -n}
        | columns
        for prompt, texts in groups
        for n, text in enumerate(texts)
    ]
    (folder / "completions").mkdir(exist_ok=True)
    pandas.DataFrame(rows).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


def with_evaluation(folder: Path, step: int, mean: float, **changed) -> Path:
    figures = {"avg@4": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "prompts": 50}}
    path = folder / "evaluation" / "held_out" / f"step_{step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"set": "held_out", "model": "m", "step": step, "figures": figures} | changed))
    return folder


def checkpoint(folder: Path, step: int, sealed: bool = True, name: str | None = None) -> Path:
    """A checkpoint of a few small files, one of them in a folder of its own."""
    path = folder / (name or f"checkpoint-{step}")
    (path / "shards").mkdir(parents=True)
    for file in ("model.safetensors", "optimizer.pt", "rng_state.pth", "shards/0.distcp"):
        (path / file).write_text(f"{file} of step {step}" * 9)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (path / "recipe.json").write_text("{}")
    if sealed:
        seal(path, step=step)
    return path
