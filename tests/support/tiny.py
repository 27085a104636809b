"""A real language model small enough to train in a test: Llama architecture, byte-sized vocabulary, no download."""

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=.:?\n"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '<eos>' }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    return fast


def model(
    seed: int = 0, dtype: torch.dtype = torch.float32, *, kind: type[PreTrainedConfig] = LlamaConfig, **overrides
) -> PreTrainedModel:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    return AutoModelForCausalLM.from_config(kind(**(settings | overrides))).to(dtype)


def save(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> str:
    """Write model and tokenizer to `folder`, the way a user has them on disk."""
    model(seed, dtype, **overrides).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def load(folder: str, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def prompts(n: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": f"{'abcdefgh'[i % 8]}{i}:", "solution": str(i)} for i in range(n)])


def count_a(completions, **_):
    """A reward with ties and spread: how many of the completion's characters are an 'a' or a digit."""
    return [float(sum(c in "a0123456789" for c in completion)) for completion in completions]


def length(completions, **_):
    return [len(completion) / 10 for completion in completions]


def spread(completions, **_):
    """Different for almost any two conversational completions."""
    return [sum(map(ord, completion[0]["content"])) % 97 / 97 for completion in completions]


FEW = ("--per_device_train_batch_size", "8", "--reward_workers", "1")
FEW += ("--eval_sets", '[{"name": "held_out", "limit": 4}]')
"""Options that let a packaged recipe train and evaluate few rows."""
TRAINING = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "max_steps": 2,
    "seed": 7,
}
MOVING_REFERENCE = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
