"""Seconds and peak memory of a step beside stock TRL, for `make bench-gpu`: `gpu_speed.py MODEL DEVICE`."""

import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.packing.micro_batches import regroup
from step_overhead import tokenizer

SIDES = {"stock": (GRPOTrainer, GRPOConfig), "grpo-ext": (GRPOExtTrainer, GRPOExtConfig)}
LLAMA = {"tie_word_embeddings": True}
MODELS = {
    "0.5 B": LLAMA | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "1.7 B": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8,
    },
}  # fmt: skip
"""Random weights in the shapes of Qwen2.5-0.5B and Qwen3-1.7B."""
TINY = LLAMA | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
VOCABULARY = 151_936
SIZES = {
    "0.5 B": ((256, 8), (1024, 8), (1024, 16), (4096, 8), (8192, 8), (8192, 16)),
    "1.7 B": ((256, 8), (1024, 8), (4096, 8)),
}
"""Tokens of the prompt, and completions."""
SECONDS, LAPS = 3.0, 5


RAGGED = tuple(round(math.exp(math.log(16) + (i + 0.5) / 8 * math.log(512 / 16))) for i in range(8))


@dataclass(frozen=True)
class Work:
    """Sizes of one optimizer step: tokens of the prompt, lengths of the completions of its group."""

    name: str
    prompt: int
    completions: tuple[int, ...]
    vocabulary: int
    shape: dict

    def model(self, device: str) -> LlamaForCausalLM:
        torch.manual_seed(0)
        words = {"vocab_size": self.vocabulary, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(**self.shape, **words, max_position_embeddings=16_384))
        return model.to(torch.float32 if device == "cpu" else torch.bfloat16)

    def batch(self, device: str) -> dict:
        """A generation batch as TRL lays it out: padded to its longest completion, rows shuffled."""
        g = torch.Generator().manual_seed(0)
        rows, longest, lengths = len(self.completions), max(self.completions), torch.tensor(self.completions)
        order = torch.randperm(rows, generator=g)
        batch = {
            "prompt_ids": torch.randint(3, self.vocabulary, (1, self.prompt), generator=g).expand(rows, -1),
            "prompt_mask": torch.ones(rows, self.prompt, dtype=torch.long),
            "completion_ids": torch.randint(3, self.vocabulary, (rows, longest), generator=g),
            "completion_mask": (torch.arange(longest) < lengths[:, None]).long(),
            "advantages": torch.randn(rows, generator=g),
        }
        batch = {name: value[order].to(device) for name, value in batch.items()}
        return batch | {"num_items_in_batch": lengths.sum().to(device)}


class Side:
    """A trainer that computes the gradient of one step at a time, and returns its seconds."""

    def __init__(self, side: str, work: Work, device: str) -> None:
        cls, config_cls = SIDES[side]
        self.device = device
        args = config_cls(
            output_dir=tempfile.mkdtemp(), use_cpu=device == "cpu", bf16=device != "cpu", gradient_checkpointing=False,
            report_to="none", per_device_train_batch_size=len(work.completions), num_generations=len(work.completions),
            max_completion_length=max(work.completions), loss_type="grpo", beta=0.0,
        )  # fmt: skip
        rows = Dataset.from_list([{"prompt": "a question:"}] * 64)
        with redirect_stdout(StringIO()):
            reward = [lambda completions, **_: [0.0]]
            self.trainer = cls(work.model(device), reward, args, rows, processing_class=tokenizer())
        self.trainer.model.to(device).train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.inputs = work.batch(device)
        if isinstance(self.trainer, GRPOExtTrainer) and self.trainer.sharing.possible:
            self.inputs = regroup([self.inputs], 1, skip_zero_advantages=True)[0]  # as `_prepare_inputs` does

    def __call__(self) -> float:
        start = self.clock()
        self.trainer._compute_loss(self.trainer.model, self.inputs).backward()
        seconds = self.clock() - start
        self.trainer.model.zero_grad()
        return seconds

    def clock(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def alternate(sides: list[Side], seconds: float, least: int, most: int = 15) -> list[tuple[float, ...]]:
    """Return times of the sides in turn, in a random order for every lap, until `seconds` have passed."""
    laps: list[tuple[float, ...]] = []
    draw, start = random.Random(0), time.perf_counter()
    while len(laps) < least or (time.perf_counter() - start < seconds and len(laps) < most):
        found = {i: side() for i, side in draw.sample(list(enumerate(sides)), len(sides))}
        laps.append(tuple(found[i] for i in range(len(sides))))
    return laps


def works(model: str, device: str) -> list[Work]:
    """Ragged completions of 16 to 512 tokens after one prompt."""
    if device == "cpu":
        return [Work(f"{model}, prompt 48, G 4", 48, (3, 9, 6, 12), 500, TINY)]
    lengths, shape = {8: RAGGED, 16: tuple(n for n in RAGGED for _ in range(2))}, MODELS[model]
    return [Work(f"{model}, prompt {p}, G {g}", p, lengths[g], VOCABULARY, shape) for p, g in SIZES[model]]


def peak(lap: Side, device: str) -> float | None:
    """MiB that a step adds to what torch has allocated on the GPU."""
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lap()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def side(name: str, work: Work, device: str) -> Side | None:
    """A trainer that has made a step; None: the GPU's memory is too small for it."""
    try:
        made = Side(name, work, device)
        made()
        return made
    except torch.OutOfMemoryError:
        return None


def measure(work: Work, device: str) -> dict:
    """Medians of both sides in turn; of a side that does not fit, None."""
    sides = {name: side(name, work, device) for name in SIDES}
    gc.collect()
    fitting = {name: made for name, made in sides.items() if made is not None}
    peaks = {name: peak(made, device) for name, made in fitting.items()}
    laps = alternate(
        list(fitting.values()), SECONDS if device == "cuda" else 0.0, least=LAPS if device == "cuda" else 1
    )
    seconds = dict(zip(fitting, map(statistics.median, zip(*laps, strict=True)), strict=True))
    return {
        "work": work.name,
        "seconds_of": {name: seconds.get(name) for name in SIDES},
        "mib": {name: peaks.get(name) for name in SIDES},
        "ratio": seconds["stock"] / seconds["grpo-ext"] if len(seconds) == len(SIDES) else None,
    }


def main() -> None:
    model, device = sys.argv[1:]
    torch.set_num_threads(1)
    for work in works(model, device):
        print(json.dumps(measure(work, device)), flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
