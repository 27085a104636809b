"""Gradients of every loss under every split, beside a computation row by row: `make bench-splits`.

Each case trains a tiny float64 Llama for a few steps of SGD, in one process, in two by DDP, in two by FSDP2, or (in
float32) by DeepSpeed's ZeRO. The figure is |update / learning rate + gradient| / |gradient|, the largest of its steps,
where the gradient is computed one row at a time from the papers' formulas (tests/support/formulas.py).
"""

import argparse
import gc
import json
import logging as python_logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
warnings.filterwarnings("ignore")

import torch
from datasets import disable_progress_bars
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.objective.losses import losses
from grpo_ext.train import leave_process_group
from support import formulas, tiny
from support.fixed_rows import Rows
from support.float64 import float64_throughout
from support.fsdp_on_cpu import is_sharded, make_fsdp_real
from support.processes import has_deepspeed, on_cpu, run_forked
from support.row_by_row import RowByRow, Terms, differences
from support.watched import Watched

RESULTS = Path(__file__).parent / "results" / "splits.json"
GROUP, ROWS, RATE = 8, 16, 0.02
FEATURES = {
    "plain": {},
    "windows of 2 steps": {"windows": 2},
    "num_iterations: 2": {"num_iterations": 2},
    "truncation": {"mask_truncated_completions": True},
    "KL": {"beta": 0.05},
    "entropy": {"entropy_coef": 0.01},
    "all of these": {
        "windows": 2,
        "num_iterations": 2,
        "mask_truncated_completions": True,
        "beta": 0.05,
        "entropy_coef": 0.01,
        "max_steps": 4,
    },
    "pieces of 24 tokens": {"micro_batch_tokens": 24},
}
SPLITS = {1: ((16, 1), (4, 4), (1, 16)), 2: ((8, 1), (4, 2), (2, 4))}
"""Rows of a micro-batch and accumulation, by processes."""
ZERO_SPLITS, ZERO_FEATURES = ((8, 1), (2, 4)), ("plain", "all of these", "pieces of 24 tokens")
LAUNCHES = ("one", "ddp", "fsdp2", "zero1", "zero2", "zero3")
NAMES = [name for i, name in enumerate(losses) if losses[name] not in list(losses.values())[:i]]


@dataclass(frozen=True)
class Case:
    """A loss, a feature, a split."""

    loss: str
    feature: str
    processes: int
    rows: int
    accumulation: int
    stock: bool = False

    def key(self) -> str:
        trainer = "stock-" if self.stock else ""
        return f"{trainer}{self.loss}-{self.feature}-{self.processes}x{self.rows}x{self.accumulation}".replace(
            " ", "_"
        )

    def settings(self) -> dict:
        """Of either trainer's config."""
        feature = dict(FEATURES[self.feature])
        windows = feature.pop("windows", 1)
        row = losses[self.loss]
        named = {"loss_type": self.loss}
        if row.advantage == "gtpo":  # an untrained model's entropy is above its limit
            named["advantage_kwargs"] = {"entropy_limit": None}
        if self.stock:
            named = {"loss_type": "grpo", "importance_sampling_level": "sequence"} if row.trl_name else named
        if self.stock and self.loss == "cispo":
            named["epsilon_high"] = 5.0
        if self.stock and self.loss == "luspo":
            named["importance_sampling_level"] = "sequence"
        return (
            tiny.TRAINING
            | {
                "per_device_train_batch_size": self.rows,
                "gradient_accumulation_steps": self.accumulation,
                "steps_per_generation": windows * self.accumulation,
                "num_generations": GROUP,
                "max_completion_length": 8,
                "optim": "sgd",
                "learning_rate": RATE,
                "lr_scheduler_type": "constant",
                "max_grad_norm": 0.0,
                "max_steps": 2,
                "temperature": 0.9,
            }
            | named
            | feature
        )


def cases(launch: str, names: list[str], stock: bool) -> Iterator[Case]:
    """Those of a launch."""
    processes = 1 if launch == "one" else 2
    zero = launch.startswith("zero")
    for name in names:
        for feature in ZERO_FEATURES if zero else FEATURES:
            within_budget = "micro_batch_tokens" in FEATURES[feature]
            if within_budget and losses[name].aggregation == "micro-batch-token-mean":
                continue
            for rows, accumulation in ZERO_SPLITS if zero else SPLITS[processes]:
                yield Case(name, feature, processes, rows, accumulation)
                row = losses[name]
                if stock and not within_budget and (row.trl or row.trl_name) and not zero and launch != "fsdp2":
                    yield Case(name, feature, processes, rows, accumulation, stock=True)


def watched_by(case: Case, rows: Rows, model: str, output: Path, dtype: torch.dtype) -> Watched:
    """The trainer of a case."""
    kind, config = (GRPOTrainer, GRPOConfig) if case.stock else (GRPOExtTrainer, GRPOExtConfig)
    args = config(str(output), model_init_kwargs={"dtype": dtype}, **case.settings())
    return type("WatchedTrainer", (Watched, kind), {})(
        model,
        rows.reward_functions(),
        args,
        tiny.prompts(64),
        processing_class=tiny.tokenizer(),
        rollout_func=rows.rollout,
    )


def fixed_rows() -> Rows:
    return Rows(vocabulary=len(tiny.WORDS), group=GROUP, longest=7)


def run_cases(folder: Path, dtype: torch.dtype) -> None:
    """Train all cases of `folder` in each process, and save the recorded steps."""
    torch.set_num_threads(1)
    make_fsdp_real()
    gc.collect()
    gc.freeze()  # transformers collects garbage after each run, which takes most of its time
    disable_progress_bars()
    logging.disable_progress_bar()
    with float64_throughout() if dtype == torch.float64 else nullcontext():
        for entry in json.loads((folder / "cases.json").read_text()):
            case = Case(**entry)
            trainer = watched_by(case, fixed_rows(), str(folder / "model"), folder / "out", dtype)
            trainer.train()
            if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
                assert is_sharded(trainer.model)
            trainer.save(folder / f"{case.key()}.pt")
    leave_process_group()


def trained(launch: str, chosen: list[Case], folder: Path, dtype: torch.dtype) -> None:
    """Train all cases in one launch."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny.save(folder / "model")
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in chosen]))
    line = __file__, "--folder", folder, "--dtype", str(dtype).removeprefix("torch.")
    run_forked(*line, config=None if launch == "one" else on_cpu(launch, folder))


def judged(case: Case, folder: Path, dtype: torch.dtype) -> float:
    """The largest relative difference of a case's steps."""
    watched = torch.load(folder / f"{case.key()}.pt")
    settings = case.settings()
    config = GRPOExtConfig(str(folder), **settings, **({"loss_defaults": "trl"} if case.stock else {}))
    objective = config.objective
    terms = Terms(
        temperature=settings["temperature"],
        entropy_coef=settings.get("entropy_coef", 0.0),
        cut_masked=settings.get("mask_truncated_completions", False),
    )
    with float64_throughout() if dtype == torch.float64 else nullcontext():
        model = tiny.load(str(folder / "model"), dtype)
        gradients = RowByRow(model, objective, fixed_rows(), terms, watched, formulas.loss_of_row).gradients()
    return max(differences(watched, gradients, RATE))


def measured(launch: str, chosen: list[Case], folder: Path) -> list[dict]:
    """Train cases in a launch, and judge them."""
    dtype = torch.float32 if launch.startswith("zero") else torch.float64
    begin = time.monotonic()
    trained(launch, chosen, folder, dtype)
    middle = time.monotonic()
    found = [asdict(case) | {"launch": launch, "difference": judged(case, folder, dtype)} for case in chosen]
    print(f"{launch}: {len(found)} cases, {middle - begin:.0f} s + {time.monotonic() - middle:.0f} s", flush=True)
    return found


def write(path: Path, found: list[dict]) -> None:
    """One line a case."""
    lines = [json.dumps(case | {"difference": float(f"{case['difference']:.2g}")}) for case in found]
    software = {name: version(name) for name in ("torch", "trl", "transformers", "accelerate")}
    path.write_text(f'{{"software": {json.dumps(software)}, "cases": [\n' + ",\n".join(lines) + "\n]}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="of a rank: where its cases are")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--launches", nargs="*", default=None)
    parser.add_argument("--losses", nargs="*", default=NAMES)
    parser.add_argument("--features", nargs="*", default=list(FEATURES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.folder is not None:
        run_cases(options.folder, getattr(torch, options.dtype))
        return
    launches = options.launches or [n for n in LAUNCHES if not n.startswith("zero") or has_deepspeed()]
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    python_logging.getLogger("grpo_ext").setLevel(
        "ERROR"
    )  # that a loss without a ratio is used off-policy is meant here
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for launch in launches:
            chosen = [c for c in cases(launch, options.losses, stock=True) if c.feature in options.features]
            found += measured(launch, chosen, Path(folder) / launch)
            write(options.output, found)
    for launch in launches:
        ours = [c for c in found if c["launch"] == launch and not c["stock"]]
        worst = max(ours, key=lambda c: c["difference"])
        print(f"{launch:6} {len(ours)} cases, at most {worst['difference']:.1e} ({worst['loss']}, {worst['feature']})")


if __name__ == "__main__":
    main()
