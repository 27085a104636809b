"""The tiny models of the claims: a Llama of 30 thousand parameters on characters; warm-up, training, sampling."""

import contextlib
import hashlib
import json
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainerCallback

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.quickstart.model import build_tokenizer, cache_directory

torch.set_num_threads(1)
TOKENIZER = build_tokenizer([])
Demonstrate = Callable[[random.Random], tuple[str, str]]
"""Draws a prompt and its completion; the end-of-text token is added."""
Reward = Callable[..., list[float]]


def untrained(seed: int, hidden: int = 32, layers: int = 2) -> LlamaForCausalLM:
    """Return a Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    return LlamaForCausalLM(config)


def warm(name: str, seed: int, demonstrate: Demonstrate, steps: int = 400, **sizes: int) -> str:
    """Return the folder of a model that was trained on demonstrations, kept in the quickstart's cache."""
    code = [Path(__file__).read_text(), demonstrate.__code__.co_code.hex(), name, seed, steps, sizes]
    target = cache_directory() / f"claims-{name}-{hashlib.sha256(json.dumps(code).encode()).hexdigest()[:12]}"
    if target.is_dir():
        return str(target)
    model, draw = untrained(seed, **sizes), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 10) * (1 - step / steps)
        model(**_batch([demonstrate(draw) for _ in range(32)])).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    cache_directory().mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache_directory()))
    model.save_pretrained(building)
    TOKENIZER.save_pretrained(building)
    with contextlib.suppress(OSError):  # another process was first
        building.rename(target)
    return str(target)


def _batch(rows: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Return ids, mask and labels of completions, padded on the right."""
    pairs = [(TOKENIZER(p)["input_ids"], [*TOKENIZER(c)["input_ids"], TOKENIZER.eos_token_id]) for p, c in rows]
    longest = max(len(p) + len(c) for p, c in pairs)
    ids, mask, labels = (torch.full((len(pairs), longest), fill) for fill in (TOKENIZER.pad_token_id, 0, -100))
    for i, (p, c) in enumerate(pairs):
        ids[i, : len(p) + len(c)] = torch.tensor(p + c)
        mask[i, : len(p) + len(c)] = 1
        labels[i, len(p) : len(p) + len(c)] = torch.tensor(c)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def quiet() -> None:
    """Show neither warnings nor progress of what trains here."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()


def train(
    folder: str,
    rows: Sequence[dict[str, Any]],
    rewards: Sequence[Reward],
    settings: dict[str, Any],
    callbacks: Sequence[TrainerCallback] = (),
    **more: Any,
) -> GRPOExtTrainer:
    """Train by `GRPOExtTrainer`, quietly; return the trainer: its `state.log_history` has the figures of each step."""
    quiet()
    usual = {
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 16,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as output, open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        args = GRPOExtConfig(**{"output_dir": output} | usual | settings)
        data = Dataset.from_list(list(rows))
        trainer = GRPOExtTrainer(folder, list(rewards) or None, args, data, callbacks=list(callbacks), **more)
        trainer.train()
    return trainer


def curve(trainer: GRPOExtTrainer, metric: str, digits: int = 5) -> list[float]:
    """Return a metric of each logged step."""
    return [round(entry[metric], digits) for entry in trainer.state.log_history if metric in entry]


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Sequence[str], attempts: int, seed: int, limit: int = 16
) -> list[list[str]]:
    """Return `attempts` completions of each prompt at temperature 1; prompts have one length."""
    ids = torch.tensor(TOKENIZER(list(prompts))["input_ids"]).repeat_interleave(attempts, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=limit, pad_token_id=TOKENIZER.pad_token_id)
    texts = TOKENIZER.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    return [texts[i : i + attempts] for i in range(0, len(texts), attempts)]


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, prompt: str, completions: Sequence[str]) -> list[float]:
    """Return the log-probability of each whole completion, its end included."""
    batch = _batch([(prompt, text) for text in completions])
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    lost = functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return (-lost.sum(1)).tolist()
