"""Steps of a real model on GSM8K: stock TRL beside grpo-ext, each in a process of its own, in turn.

    make bench-real MODEL=FOLDER DATA=FOLDER BEFORE=FOLDER DEVICE=cpu

MODEL is a folder or the hub's name of a chat model, DATA a folder with GSM8K's `train.jsonl` (`question`, `answer`),
BEFORE one with an older checkout of this project, to compare with; without it that side is left out.
Each run makes two steps from the same weights, seed and prompts, and adds a line to results/real_model.jsonl; a second
command goes on where the first was stopped. benchmarks/real_model.md has the medians.
"""

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "real_model.jsonl", HERE / "real_model.md"
SIDES = {
    "stock TRL": "stock TRL",
    "off": "grpo-ext, features off",
    "before": "grpo-ext before",
    "grpo-ext": "grpo-ext",
    "vllm": "grpo-ext, rollouts by vLLM (colocated)",
}
SETTINGS = {
    "off": {
        "loss_defaults": "trl",
        "rollout_engine": "generate",
        "shared_prefix": "false",
        "skip_zero_advantages": False,
    },
    "vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_dtype": "bfloat16"},
}
"""Settings of a side; with "off" the steps are stock's, to the bit."""
STEPS, GROUP, ROWS = 2, 8, 16
PARTS = ("rollout", "forward", "backward", "optimizer")
LOGGED = ("loss", "grad_norm", "reward", "completions/mean_length", "completions/max_length")
KIND = ("device", "precision", "lora", "threads", "tokens")
COLUMNS = (
    *("", "steps", *(f"{part} s" for part in (*PARTS, "whole"))),
    *("stock's whole / this", "a decoded token, in copies of the 16-bit weights", "its products alone", "peak GiB"),
)


def number(text: str) -> str | None:
    """The last number of a text."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return found[-1].rstrip(".") if found else None


def right(completions, answer, **_):
    """1 where the last number of a completion is the answer's, and a little for its digits.

    So completions of a group differ also where all are cut off: without an advantage ours would leave them out.
    """
    texts = [said[0]["content"] for said in completions]
    digits = [sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts]
    pairs = zip(texts, answer, digits, strict=True)
    return [float(number(text) == number(known)) + 0.1 * share for text, known, share in pairs]


class Clock:
    """Seconds of the parts of each step of a trainer, stock's or ours."""

    def __init__(self, trainer, now):
        self.seconds, self.steps, self.now = defaultdict(float), [], now
        self.watch(trainer, "_generate", "rollout")
        self.watch(trainer, "_compute_loss", "forward")
        self.watch(trainer.accelerator, "backward", "backward")

    def watch(self, owner, name, part):
        stock = getattr(owner, name)

        def timed(*args, **kwargs):
            began = self.now()
            try:
                return stock(*args, **kwargs)
            finally:
                self.seconds[part] += self.now() - began

        setattr(owner, name, timed)

    def callback(self):
        from transformers import TrainerCallback

        clock = self

        class Steps(TrainerCallback):
            def on_step_begin(self, *args, **kwargs):
                clock.seconds.clear()
                clock.began = clock.now()

            def on_pre_optimizer_step(self, *args, **kwargs):
                clock.seconds["optimizer"] -= clock.now()

            def on_optimizer_step(self, *args, **kwargs):
                clock.seconds["optimizer"] += clock.now()

            def on_step_end(self, *args, **kwargs):
                clock.steps.append(dict(clock.seconds) | {"whole": clock.now() - clock.began})

        return Steps()


def run(options) -> dict:
    """Train some steps and return what they took, and what they logged."""
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from grpo_ext import GRPOExtConfig, GRPOExtTrainer

    torch.set_num_threads(options.threads)
    lines = (Path(options.data) / "train.jsonl").read_text().splitlines()[: STEPS * ROWS // GROUP * 4]
    rows = [json.loads(line) for line in lines]
    ask = "Solve the problem step by step. End with the answer as a number.\n\n"
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": ask + row["question"]}], "answer": row["answer"]} for row in rows]
    )
    kind, config = (GRPOTrainer, GRPOConfig) if options.side == "stock TRL" else (GRPOExtTrainer, GRPOExtConfig)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if options.lora else None
    trainer = kind(
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        right,
        config(
            output_dir=tempfile.mkdtemp(),
            use_cpu=options.device == "cpu",
            bf16=options.precision == "bf16",
            gradient_checkpointing=False,
            per_device_train_batch_size=ROWS // 2,
            gradient_accumulation_steps=2,
            num_generations=GROUP,
            max_completion_length=options.tokens,
            max_steps=STEPS,
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=options.seed,
            **SETTINGS.get(options.side, {}),
        ),
        data,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=adapter,
    )
    now = time.perf_counter if options.device == "cpu" else synchronized
    copy = copying(sum(p.numel() for p in trainer.model.parameters()), options.device, now)
    clock = Clock(trainer, now)
    trainer.add_callback(clock.callback())
    trainer.train()
    log = [row for row in trainer.state.log_history if "loss" in row]
    logged = [{name: row[name] for name in LOGGED} for row in log]
    found = {"steps": clock.steps, "logged": logged, "gib": peak(options.device) / 2**30, "copy": copy}
    if options.side == "grpo-ext" and (options.device, options.precision) == ("cpu", "bf16"):
        found["products"] = multiplying(trainer.model)
    return found


def synchronized() -> float:
    """Seconds, once the GPU has done what it was given."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: str) -> int:
    """Most bytes that the process held: of its memory on a CPU, of torch's allocator on a GPU."""
    import torch

    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device == "cpu"
        else torch.cuda.max_memory_allocated()
    )


def copying(numbers: int, device: str, now) -> float:
    """Median seconds in which as many numbers of 16 bits are copied."""
    import torch

    source = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    target, seconds = torch.zeros_like(source), []
    for _ in range(5):
        began = now()
        target.copy_(source)
        seconds.append(now() - began)
    return statistics.median(seconds)


def multiplying(model) -> float:
    """Median seconds of the products with weights that decode a token of each row, and of nothing else."""
    import torch

    from grpo_ext.rollout.blocked_weights import WORTH, blocked

    layers, seconds = [module for module in model.modules() if type(module) is torch.nn.Linear], []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), blocked(model, ROWS, WORTH):
        states = [torch.randn(ROWS, 1, layer.in_features, dtype=torch.bfloat16) for layer in layers]
        for _ in range(6):
            began = time.perf_counter()
            for layer, state in zip(layers, states, strict=True):
                layer(state)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first makes the blocks


def page(lines: list[dict]) -> str:
    """The medians of all runs as a page, side by side."""
    setting = f"{ROWS} completions a step in groups of {GROUP}, prompts of GSM8K, float32 weights."
    text = [
        "# Steps of a real model",
        "",
        f"{setting} Medians over steps; each ratio compares steps of the same seed. 'Before' is a "
        "checkout of this project from before the work on real models.",
        "",
    ]
    for kind in sorted({tuple(line[name] for name in KIND) for line in lines}, key=str):
        mine = [line for line in lines if tuple(line[name] for name in KIND) == kind]
        device, precision, lora, threads, tokens = kind
        text += [f"## {device}, {precision}, {'LoRA' if lora else 'full'}, {threads} threads, {tokens} tokens", ""]
        text += ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
        text += [row for side in SIDES if (row := row_of(side, mine))]
        text += ["", *equal_steps(mine)]
    return "\n".join(text)


def equal_steps(lines: list[dict]) -> list[str]:
    """A sentence on the steps that log with all features off what stock TRL logs."""
    logged = {(line["side"], line["seed"]): line["logged"] for line in lines}
    pairs = [
        pair
        for (side, seed), own in logged.items()
        if side == "off" and ("stock TRL", seed) in logged
        for pair in zip(own, logged["stock TRL", seed], strict=True)
    ]
    if not pairs:
        return []
    equal = sum(ours == theirs for ours, theirs in pairs)
    return [
        f"With all features off, {equal} of {len(pairs)} steps log stock's {', '.join(LOGGED)}, to the last digit.",
        "",
    ]


def row_of(side: str, lines: list[dict]) -> str:
    """A row of the table; empty where the side has no runs."""
    own = [line for line in lines if line["side"] == side]
    steps = [step for line in own for step in line["steps"]]
    if not steps:
        return ""
    stock = {line["seed"]: line["steps"] for line in lines if line["side"] == "stock TRL"}
    pairs = [pair for line in own for pair in zip(stock.get(line["seed"], []), line["steps"], strict=False)]
    ratios = [theirs["whole"] / ours["whole"] for theirs, ours in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
    parts = [f"{statistics.median(step.get(part, 0.0) for step in steps):.1f}" for part in (*PARTS, "whole")]
    tokens = [(line, row["completions/max_length"]) for line in own for row in line["logged"]]
    rollouts = [step["rollout"] for line in own for step in line["steps"]]
    each = [took / longest / line["copy"] for took, (line, longest) in zip(rollouts, tokens, strict=True)]
    token = f"{statistics.median(each):.2f}"
    products = [line["products"] / line["copy"] for line in own if "products" in line]
    alone = f"{statistics.median(products):.2f}" if products else ""
    gib = f"{statistics.median(line['gib'] for line in own):.1f}"
    return "| " + " | ".join((SIDES[side], str(len(steps)), *parts, spread, token, alone, gib)) + " |"


def measured(options, side: str, seed: int) -> dict:
    """A run of a side in a process of its own."""
    names = ("model", "data", "device", "precision", "threads", "tokens")
    given = [f"--{name}={getattr(options, name)}" for name in names]
    argv = [sys.executable, __file__, *given, f"--side={side}", f"--seed={seed}", *["--lora"] * options.lora]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if side == "before":
        environment["PYTHONPATH"] = str(Path(options.before) / "src")
    done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run what is not there yet, and rewrite the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--before", default="")
    parser.add_argument("--sides", nargs="+", default=[side for side in SIDES if side != "vllm"], choices=SIDES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="bf16", choices=("bf16", "float32"))
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    kind = {name: getattr(options, name) for name in KIND}
    if options.side:
        print(json.dumps({"side": options.side, "seed": options.seed} | kind | run(options)))
        return
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    sides = [side for side in options.sides if side != "before" or options.before]
    for seed, side in itertools.product(range(options.seeds), sides):
        if any((kind | {"side": side, "seed": seed}).items() <= line.items() for line in lines):
            continue
        lines.append(measured(options, side, seed))
        with RESULTS.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(side, seed, [round(step["whole"], 1) for step in lines[-1]["steps"]], flush=True)
    PAGE.write_text(page(lines))


if __name__ == "__main__":
    main()
