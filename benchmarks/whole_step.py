"""A whole GRPO step (rollout by transformers, rewards, update) side by side with stock TRL: `make bench`.

The quickstart's model with random weights, 4 prompts of 256 tokens, 8 completions each, of ragged lengths up to 128
(each token ends its completion with the probability that the model gives it, about 1 in 50). Both trainers take the
same prompts in turn, in one process and on one thread, at learning rate 0; the ratio of each pair is kept, the median
reported. Writes results/whole_step.json.
"""

import argparse
import json
import logging
import os
import platform
import random
import statistics
import string
import time
import warnings
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.quickstart.model import build_model, build_tokenizer

RESULT = Path(__file__).parent / "results" / "whole_step.json"
PROMPT, COMPLETION, GENERATIONS = 256, 128, 8


def quickstart() -> PreTrainedModel:
    model = build_model(build_tokenizer())
    model.config.max_position_embeddings = 2 * PROMPT  # rotary: longer than the quickstart's own needs no new weight
    return model


def eight_layers() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(build_tokenizer()), hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2 * PROMPT, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vowels(completions, **_):
    return [sum(c in "aeiou" for c in text) / 10 for text in completions]


def prompts(rows: int) -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list(
        [{"prompt": "".join(draw.choices(string.ascii_lowercase, k=PROMPT))} for _ in range(rows)]
    )


class Side:
    """A trainer that makes one step at a time, and measures the step and its rollout."""

    def __init__(self, cls, config_cls, model: PreTrainedModel, groups: int, **settings) -> None:
        args = config_cls(
            output_dir=f"/tmp/bench-{cls.__name__}", use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", save_strategy="no", disable_tqdm=True, per_device_train_batch_size=groups * GENERATIONS,
            num_generations=GENERATIONS, max_completion_length=COMPLETION, learning_rate=0.0, max_steps=10_000,
            **settings,
        )  # fmt: skip
        model.generation_config.eos_token_id = [1, 2]  # twice the chance to end
        self.trainer = cls(model, [vowels], args, prompts(200), processing_class=build_tokenizer())
        self.trainer.create_optimizer_and_scheduler(10_000)
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.batches = iter(self.trainer.get_train_dataloader())
        self.rollout, self.tokens = 0.0, 0

    def _timed(self, *args, **kwargs):
        start = time.perf_counter()
        output = type(self.trainer)._generate_single_turn(self.trainer, *args, **kwargs)
        self.rollout = time.perf_counter() - start
        self.tokens = sum(map(len, output[0]))
        return output

    def step(self, seed: int) -> tuple[float, float, int]:
        batch = next(self.batches)
        torch.manual_seed(seed)
        with patch.object(self.trainer, "_generate_single_turn", self._timed):
            start = time.perf_counter()
            self.trainer.training_step(self.trainer.model, batch, None)
            self.trainer.optimizer.step()
            self.trainer.model.zero_grad()
            return time.perf_counter() - start, self.rollout, self.tokens


def spread(ratios: list[float]) -> dict:
    ordered = sorted(ratios)
    return {
        "median": statistics.median(ordered),
        "quartiles": [ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]],
    }


def compare(name: str, build, groups: int, pairs: int) -> dict:
    stock = Side(GRPOTrainer, GRPOConfig, build(), groups)
    ours = Side(GRPOExtTrainer, GRPOExtConfig, build(), groups)
    stock.step(0), ours.step(0)
    laps = []
    for seed in range(1, pairs + 1):
        order = (stock, ours) if seed % 2 else (ours, stock)
        lap = {side: side.step(seed) for side in order}
        laps.append((lap[stock], lap[ours]))
    return {
        "model": name,
        "prompts": groups,
        "completions_per_prompt": GENERATIONS,
        "prompt_tokens": PROMPT,
        "most_completion_tokens": COMPLETION,
        "completion_tokens": [statistics.median(lap[i][2] for lap in laps) for i in (0, 1)],
        "pairs": pairs,
        "stock_seconds": statistics.median(theirs[0] for theirs, _ in laps),
        "ours_seconds": statistics.median(mine[0] for _, mine in laps),
        "stock_rollout_seconds": statistics.median(theirs[1] for theirs, _ in laps),
        "ours_rollout_seconds": statistics.median(mine[1] for _, mine in laps),
        "step_ratio": spread([theirs[0] / mine[0] for theirs, mine in laps]),
        "rollout_ratio": spread([theirs[1] / mine[1] for theirs, mine in laps]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--large_pairs", type=int, default=0, help="also an 8-layer model of hidden size 512: minutes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = [compare("quickstart", quickstart, 4, given.pairs)]
    if given.large_pairs:
        results.append(compare("8 x 512", eight_layers, 4, given.large_pairs))
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": platform.machine(), **versions, "results": results}, indent=2) + "\n")
    print(f"{'model':12}{'':>10}{'stock':>10}{'grpo-ext':>10}{'ratio':>8}  quartiles")
    for r in results:
        for part, stock, ours, ratio in (
            ("rollout", r["stock_rollout_seconds"], r["ours_rollout_seconds"], r["rollout_ratio"]),
            ("step", r["stock_seconds"], r["ours_seconds"], r["step_ratio"]),
        ):
            low, high = ratio["quartiles"]
            times = f"{stock:>8.2f} s{ours:>8.2f} s{ratio['median']:>8.2f}"
            print(f"{r['model']:12}{part:>10}{times}  {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
