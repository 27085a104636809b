"""The optimizer step's forward and backward, side by side with stock TRL: `make bench`.

Two trainers with the same weights compute the loss and the gradient of the same completions in turn, in one process
and (on a CPU) on one thread; times are CPU seconds there, which other work on the machine disturbs least, and medians
of pairs are reported with their range. Peak memory is each side's in a process of its own. Writes
results/shared_prefix.json and shared_prefix.png. `--device cuda` runs a 0.5 B model in bfloat16.
"""

import argparse
import json
import logging
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.packing.micro_batches import regroup
from grpo_ext.packing.policy import PrefixSharing, Size
from step_overhead import tokenizer

HERE = Path(__file__).parent
RESULT = HERE / "results" / "shared_prefix.json"
SIDES = {"stock": (GRPOTrainer, GRPOConfig), "grpo-ext": (GRPOExtTrainer, GRPOExtConfig)}

CPU_MODEL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
CUDA_MODEL = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of a 0.5 B Qwen2.5."""
HYBRID = {
    "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
"""Sizes of the gated delta rule beside those of a model."""

EYE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
"""The part of a model that sees, which rows of text do not run."""

PROCESSES = 5
RATIOS = ("auto_over_false", "false_over_false")


@dataclass(frozen=True)
class Work:
    """Sizes of one optimizer step, and the required ratio."""

    name: str
    prompt: int
    completions: tuple[int, ...]
    """Lengths in a group."""
    at_least: float
    groups: int = 1
    silent: int = 0
    """Groups without an advantage."""
    vocabulary: int = 6400
    hidden: int | None = None
    """Another width than the device's model has, and another depth."""
    layers: int | None = None
    window: int | None = None
    """Sliding window of each layer."""
    hybrid: bool = False
    """Three of four layers with the gated delta rule, as in Qwen3.5."""
    wrapped: bool = False
    """The model is a part of one that also takes images, of which there are none."""


RAGGED = tuple(round(math.exp(math.log(16) + (i + 0.5) / 8 * math.log(512 / 16))) for i in range(8))
WORKS = (
    Work("prompt 64, completion 512, G 8", 64, (512,) * 8, 1.1),
    Work("prompt 256, completion 128, G 8", 256, (128,) * 8, 3.0),
    Work("prompt 1024, completion 128, G 8", 1024, (128,) * 8, 5.0),
    Work("prompt 1024, completion 128, G 16", 1024, (128,) * 16, 7.0),
    Work("prompt 256, completions 16 to 512, G 8", 256, RAGGED, 3.0),
    Work("the same, 2 groups", 256, RAGGED, 3.0, groups=2),
    Work("the same, 2 groups, one of zero variance", 256, RAGGED, 5.1, groups=2, silent=1),
    Work("prompt 1024, completion 128, G 8, Qwen3.5", 1024, (128,) * 8, 3.0, hybrid=True),
    Work("prompt 1024, completion 128, G 8, Llava on text", 1024, (128,) * 8, 3.0, wrapped=True),
    Work("prompt 256, completion 32, G 4, vocabulary 152 k", 256, (32,) * 4, 20.0, vocabulary=151_936),
    Work("prompt 1024, completion 128, G 8, sliding windows of 512", 1024, (128,) * 8, 3.0, window=512),
)
MEMORY = WORKS[2]


def policy(work: Work, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = CPU_MODEL if device == "cpu" else CUDA_MODEL
    if work.hidden is not None:
        shape = shape | {"hidden_size": work.hidden, "intermediate_size": 2 * work.hidden}
        shape |= {"num_hidden_layers": work.layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"vocab_size": work.vocabulary, "max_position_embeddings": 4096}
    shape |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if work.hybrid:
        config = Qwen3_5TextConfig(**shape, **HYBRID)
    elif work.window is not None:
        config = MistralConfig(**shape, sliding_window=work.window)
    else:
        config = LlamaConfig(**shape)
    kind = AutoModelForImageTextToText if work.wrapped else AutoModelForCausalLM
    config = LlavaConfig(text_config=config, vision_config=CLIPVisionConfig(**EYE)) if work.wrapped else config
    return kind.from_config(config).to(torch.float32 if device == "cpu" else torch.bfloat16)


def completions_of(work: Work, device: str) -> dict:
    """A generation batch as TRL lays it out: padded to its longest prompt and completion, rows shuffled."""
    g = torch.Generator().manual_seed(0)
    rows, longest = work.groups * len(work.completions), max(work.completions)
    lengths = torch.tensor(work.completions).repeat(work.groups)
    prompts = torch.randint(3, work.vocabulary, (work.groups, work.prompt), generator=g)
    group = torch.arange(rows) // len(work.completions)
    advantages = torch.randn(rows, generator=g).masked_fill(group < work.silent, 0.0)
    order = torch.randperm(rows, generator=g)
    batch = {
        "prompt_ids": prompts[group],
        "prompt_mask": torch.ones(rows, work.prompt, dtype=torch.long),
        "completion_ids": torch.randint(3, work.vocabulary, (rows, longest), generator=g),
        "completion_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "advantages": advantages,
    }
    batch = {name: value[order].to(device) for name, value in batch.items()}
    return batch | {"num_items_in_batch": lengths.sum().to(device)}


class Side:
    """A trainer that computes the gradient of one step at a time."""

    def __init__(self, side: str, work: Work, device: str, **settings) -> None:
        cls, config_cls = SIDES[side]
        self.device = device
        args = config_cls(
            output_dir=tempfile.mkdtemp(), use_cpu=device == "cpu", bf16=device != "cpu", gradient_checkpointing=False,
            report_to="none", per_device_train_batch_size=len(work.completions), num_generations=len(work.completions),
            max_completion_length=max(work.completions), loss_type="grpo", beta=0.0, **settings,
        )  # fmt: skip
        rows = Dataset.from_list([{"prompt": "a question:"}] * 64)
        with redirect_stdout(StringIO()):
            reward = [lambda completions, **_: [0.0]]
            self.trainer = cls(policy(work, device), reward, args, rows, processing_class=tokenizer())
        self.trainer.model.to(device).train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.inputs = self.arranged(completions_of(work, device))

    def arranged(self, batch: dict) -> dict:
        """Return the batch as the trainer's `_prepare_inputs` does."""
        if isinstance(self.trainer, GRPOExtTrainer) and self.trainer.sharing.possible:
            return regroup([batch], 1, skip_silent=True)[0]
        return batch

    def __call__(self) -> float:
        start = clock(self.device)
        self.trainer._compute_loss(self.trainer.model, self.inputs).backward()
        seconds = clock(self.device) - start
        self.trainer.model.zero_grad()
        return seconds


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def summary(values: list[float]) -> dict:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "range": [ordered[0], ordered[-1]], "pairs": len(ordered)}


def alternate(sides: list, seconds: float, least: int = 1, most: int = 15) -> list[tuple[float, ...]]:
    """Return times of the sides in turn, in a random order for every lap, until `seconds` have passed."""
    laps: list[tuple[float, ...]] = []
    draw = random.Random(0)
    start = time.perf_counter()
    while len(laps) < least or (time.perf_counter() - start < seconds and len(laps) < most):
        order = draw.sample(list(enumerate(sides)), len(sides))
        found = {i: side() for i, side in order}
        laps.append(tuple(found[i] for i in range(len(sides))))
    return laps


def compare(work: Work, device: str, seconds: float, pairs: int) -> dict:
    ours, stock = Side("grpo-ext", work, device), Side("stock", work, device)
    ours()
    if device != "cpu":
        stock()
    laps = alternate([stock, ours], seconds, least=pairs)
    return {
        "work": work.name,
        "at_least": work.at_least,
        "stock_seconds": statistics.median(t for t, _ in laps),
        "ours_seconds": statistics.median(t for _, t in laps),
        "ratio": summary([theirs / mine for theirs, mine in laps]),
        "less_arithmetic": less_arithmetic(work, Size.of(ours.trainer.model)) if device == "cpu" else None,
    }


def less_arithmetic(work: Work, size: Size) -> float:
    """Stock's multiplications over ours, in products with the model's weights: where both run as fast as the processor
    multiplies, the ratio of their times. On a CPU stock's LM head takes every position, and its logits twice.
    """
    padded = work.groups * len(work.completions) * (work.prompt + max(work.completions))
    computed = work.groups - work.silent
    labels = computed * sum(work.completions)
    tokens = computed * (work.prompt - 1) + labels
    return padded * (3 * size.body + 4 * size.head) / (3 * (tokens * size.body + labels * size.head))


def against_plain(work: Work, device: str, seconds: float) -> dict:
    """Our step over a causal forward and backward of one row with as many tokens as ours computes."""
    ours = Side("grpo-ext", work, device)
    tokens = work.prompt - 1 + sum(work.completions)
    row = torch.randint(3, work.vocabulary, (1, tokens), device=device)
    model = ours.trainer.model

    def plain() -> float:
        start = clock(device)
        model(input_ids=row, labels=row).loss.backward()
        elapsed = clock(device) - start
        model.zero_grad()
        return elapsed

    ours()
    laps = alternate([ours, plain], seconds, least=2)
    return {"work": f"{work.name}: over plain", "at_most": 1.25, "ratio": summary([a / b for a, b in laps])}


def growth(device: str, seconds: float) -> dict:
    small, large = (Side("grpo-ext", Work("", 1024, (64,) * g, 0.0), device) for g in (8, 32))
    small()
    laps = alternate([small, large], seconds, least=2)
    return {"work": "growth: G 32 / G 8", "at_most": 2.5, "ratio": summary([b / a for a, b in laps])}


def never_slower(device: str, seconds: float) -> dict:
    """The default over `shared_prefix: false`, over a grid of small steps, where overhead would show.

    Medians over processes, since the memory layout of a process changes a ratio by more than the effect.
    """
    command = [sys.executable, __file__, "--device", device, "--seconds", str(seconds / PROCESSES), "--grid"]
    runs = [json.loads(subprocess.check_output(command).splitlines()[-1]) for _ in range(PROCESSES)]
    found = [
        points[0] | {name: statistics.median(point[name] for point in points) for name in RATIOS}
        for points in zip(*runs, strict=True)
    ]
    return {"worst": {name: max(point[name] for point in found) for name in RATIOS}, "at_most": 1.02, "grid": found}


def grid(device: str, seconds: float) -> list[dict]:
    """One process's part: a trainer takes turns, since two with the same weights differ by more than that too.

    False is measured twice, which shows the noise of a ratio.
    """
    found = []
    for hidden, layers in ((32, 2), (128, 4), (512, 8)):
        for prompt, completion, g in ((8, 8, 4), (16, 16, 8), (64, 16, 2), (32, 128, 4), (256, 32, 8)):
            work = Work("", prompt, (completion,) * g, 0.0, vocabulary=1000, hidden=hidden, layers=layers)
            side = Side("grpo-ext", work, device)
            settings = [side.trainer.sharing, *(PrefixSharing("false", side.trainer.model) for _ in range(2))]
            turns = [partial(turn, side, sharing) for sharing in settings]
            for lap in (*turns, *turns):
                lap()
            laps = alternate(turns, seconds, least=5, most=500)
            work_shape = {"hidden": hidden, "prompt": prompt, "completion": completion, "G": g, "laps": len(laps)}
            ratios = [statistics.median(lap[i] / lap[1] for lap in laps) for i in (0, 2)]
            found.append(work_shape | dict(zip(RATIOS, ratios, strict=True)))
    return found


def turn(side: Side, sharing: PrefixSharing) -> float:
    side.trainer.sharing = sharing
    return side()


# Memory: each side in a process of its own.


def peak(side: str, device: str) -> dict:
    """MiB that a step adds to the process (or to the GPU), and the whole."""
    lap = Side(side, MEMORY, device)
    if device != "cpu":
        lap()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        lap()
        whole = torch.cuda.max_memory_allocated()
        return {"step_mib": (whole - before) / 2**20, "whole_mib": whole / 2**20}
    before = resident("VmRSS")
    lap()
    whole = resident("VmHWM")
    return {"step_mib": whole - before, "whole_mib": whole}


def resident(name: str) -> float:
    """MiB; not getrusage's, which starts from the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def memory(device: str) -> dict:
    command = [sys.executable, __file__, "--device", device, "--peak"]
    found = {s: json.loads(subprocess.check_output([*command, s]).splitlines()[-1]) for s in SIDES}
    ratio = found["stock"]["step_mib"] / found["grpo-ext"]["step_mib"]
    return {"work": f"peak memory, {MEMORY.name}", "at_least": 2.5, **found, "ratio": ratio}


# The picture.


def picture(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = results["steps"][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(steps) + 1.2))
    medians = [s["ratio"]["median"] for s in steps]
    axes.barh([s["work"] for s in steps], medians, color="#3b6ea5")
    for i, value in enumerate(medians):
        axes.text(value, i, f" {value:.1f}", va="center")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times faster than stock TRL: forward and backward of one optimizer step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each line of the table")
    parser.add_argument("--pairs", type=int, default=1, help="at least, for each line")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="the others keep their results")
    names = [work.name for work in WORKS]
    parser.add_argument("--works", nargs="*", choices=names, help="lines of the steps; the others keep their results")
    parser.add_argument("--peak", choices=SIDES, help="print one side's peak memory and end")
    parser.add_argument("--grid", action="store_true", help="print one process's part of never_slower and end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    device = options.device
    if options.peak:
        print(json.dumps(peak(options.peak, device)))
        return
    if options.grid:
        print(json.dumps(grid(device, options.seconds)))
        return
    path = RESULT.with_stem("shared_prefix" if device == "cpu" else f"shared_prefix_{device}")
    results: dict = json.loads(path.read_text()) if path.exists() else {}
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    shape = {"model": CPU_MODEL if device == "cpu" else CUDA_MODEL, "device": device, "machine": platform.machine()}
    results |= shape | versions
    for name in options.parts:
        known = (results.get(name, []),) if name == "steps" else ()
        results[name] = PARTS[name](options, *known)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
        path.write_text(json.dumps(results, indent=2) + "\n")
    if "steps" in options.parts:
        picture(results, HERE / f"{path.stem}.png")


def steps(options: argparse.Namespace, known: list[dict]) -> list[dict]:
    """The lines of the table; those that `--works` does not name keep their results."""
    lines = {line["work"]: line for line in known}
    for work in WORKS:
        if options.works is None or work.name in options.works:
            lines[work.name] = compare(work, options.device, options.seconds, options.pairs)
    return [lines[work.name] for work in WORKS if work.name in lines]


PARTS = {
    "steps": steps,
    "memory": lambda options: memory(options.device),
    "over_plain": lambda options: [against_plain(work, options.device, options.seconds) for work in WORKS[1:3]],
    "growth": lambda options: growth(options.device, options.seconds),
    "never_slower": lambda options: never_slower(options.device, options.seconds),
}


if __name__ == "__main__":
    main()
