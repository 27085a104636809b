"""Cost of a training step with every feature off, side by side with stock TRL: `make bench`.

Two trainers with the same weights take the same steps (rollout, rewards, loss, update) from the same seeds in turn, in
one process and on one thread; the ratio of each pair is kept, the median reported. Writes results/step_overhead.json.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer

RESULT = Path(__file__).parent / "results" / "step_overhead.json"
CHARACTERS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=.:?"]


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def policy(hidden: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vowels(completions, **_):
    return [sum(c in "aeiou" for c in text) / 10 for text in completions]


class Lap:
    """A trainer that makes one training step at a time."""

    def __init__(self, cls, config_cls, loss_type: str, hidden: int, layers: int, **settings) -> None:
        args = config_cls(
            output_dir=f"/tmp/bench-{cls.__name__}", use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", save_strategy="no", disable_tqdm=True, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=32, learning_rate=0.0, max_steps=10_000, loss_type=loss_type, **settings,
        )  # fmt: skip
        rows = Dataset.from_list([{"prompt": f"question {i % 89}:"} for i in range(1000)])
        self.trainer = cls(policy(hidden, layers), [vowels], args, rows, processing_class=tokenizer())
        self.trainer.create_optimizer_and_scheduler(10_000)
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.batches = iter(self.trainer.get_train_dataloader())

    def __call__(self, seed: int) -> float:
        batch = next(self.batches)
        torch.manual_seed(seed)
        start = time.perf_counter()
        self.trainer.training_step(self.trainer.model, batch, None)
        self.trainer.optimizer.step()
        self.trainer.model.zero_grad()
        return time.perf_counter() - start


def paired(theirs: Lap, ours: Lap, pairs: int) -> tuple[list[tuple[float, float]], dict[str, object]]:
    """Return seconds of both sides' steps in turn, and the ratios' median and quartiles."""
    times = []
    for seed in range(pairs):
        order = (theirs, ours) if seed % 2 else (ours, theirs)
        lap = {id(side): side(seed) for side in order}
        times.append((lap[id(theirs)], lap[id(ours)]))
    ratios = sorted(b / a for a, b in times)
    quartiles = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
    return times, {"ratio_median": statistics.median(ratios), "ratio_quartiles": quartiles}


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Wrap `method` so that the CPU seconds of each call go into a list."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - start)

    return call


def write(result: Path, results: list[dict]) -> None:
    """Write the results with the versions of the libraries."""
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    result.parent.mkdir(exist_ok=True)
    result.write_text(json.dumps({"machine": platform.machine(), **versions, "results": results}, indent=2) + "\n")


def compared(without: Lap, ours: Lap, pairs: int, name: str, own: list[float]) -> dict:
    """Compare paired steps; `own` collects the seconds that are ours, and `name` is the key of our steps' seconds."""
    times, ratios = paired(without, ours, pairs)
    seconds = {f"{key}_seconds": statistics.median(lap[i] for lap in times) for i, key in enumerate(("without", name))}
    return {**seconds, "share": sum(own) / sum(t for _, t in times), **ratios}


def share_of_a_step(compare: Callable[[int, int, int], dict], result: Path, description: str) -> None:
    """Compare a step with something and without it on three sizes of model, print and write."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=int, default=60)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = [
        {"hidden": hidden, "layers": layers, "pairs": pairs} | compare(hidden, layers, pairs)
        for hidden, layers in ((64, 2), (128, 4), (256, 4))
    ]
    write(result, results)
    for r in results:
        model = f"{r['layers']} x {r['hidden']}"
        print(f"{model}: {r['without_seconds']:.4f} s, ratio {r['ratio_median']:.4f}, own lines {r['share']:.4%}")


def compare(loss_type: str, hidden: int, layers: int, pairs: int) -> dict:
    stock = Lap(GRPOTrainer, GRPOConfig, loss_type, hidden, layers)
    ours = Lap(GRPOExtTrainer, GRPOExtConfig, loss_type, hidden, layers, loss_defaults="trl", shared_prefix="false")
    for seed in range(3):
        stock(seed), ours(seed)
    times, ratios = paired(stock, ours, pairs)
    return {
        "loss_type": loss_type,
        "hidden": hidden,
        "layers": layers,
        "pairs": pairs,
        "stock_seconds": statistics.median(t for t, _ in times),
        "ours_seconds": statistics.median(t for _, t in times),
        **ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = [
        compare(loss_type, hidden, layers, pairs)
        for hidden, layers in ((64, 2), (128, 4))
        for loss_type in ("grpo", "dapo")
    ]
    write(RESULT, results)
    print(f"{'loss':8}{'model':>14}{'stock':>12}{'grpo-ext':>12}{'ratio':>8}")
    for r in results:
        model = f"{r['layers']} x {r['hidden']}"
        print(
            f"{r['loss_type']:8}{model:>14}{r['stock_seconds'] * 1e3:>9.1f} ms{r['ours_seconds'] * 1e3:>9.1f} ms"
            f"{r['ratio_median']:>8.3f}"
        )


if __name__ == "__main__":
    main()
