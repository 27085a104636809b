"""Seconds and peak memory of a step beside stock TRL, for `make bench-gpu`: `gpu_speed.py MODEL DEVICE`."""

import gc
import json
import statistics
import sys
from dataclasses import replace

import torch

import shared_prefix
from shared_prefix import RAGGED, SIDES, Side, Work, alternate

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


def works(model: str, device: str) -> list[Work]:
    """Ragged completions of 16 to 512 tokens after one prompt."""
    if device == "cpu":
        return [Work("prompt 48, G 4", 48, (3, 9, 6, 12), 1.0, vocabulary=500)]
    lengths = {8: RAGGED, 16: tuple(n for n in RAGGED for _ in range(2))}
    return [Work(f"prompt {p}, G {g}", p, lengths[g], 1.0, vocabulary=VOCABULARY) for p, g in SIZES[model]]


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
    shared_prefix.CPU_MODEL, shared_prefix.CUDA_MODEL = TINY, MODELS[model]
    torch.set_num_threads(1)
    for work in works(model, device):
        print(json.dumps(measure(replace(work, name=f"{model}, {work.name}"), device)), flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
