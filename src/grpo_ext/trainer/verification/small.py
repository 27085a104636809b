"""A model of the same architecture, small enough to compute row by row, and fixed rows to train it on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
)

from grpo_ext.errors import ConfigError, Problem

VOCABULARY = 48
LAYERS = 2
SIZES: tuple[tuple[int | float, str], ...] = (
    (32, "hidden_size d_model n_embd"),
    (48, "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim n_inner"),
    (LAYERS, "num_hidden_layers n_layer max_window_layers"),
    (4, "num_attention_heads n_head num_experts num_local_experts n_routed_experts"),
    (2, "num_key_value_heads num_experts_per_tok"),
    (8, "head_dim"),
    (512, "max_position_embeddings n_positions"),
    (VOCABULARY, "vocab_size"),
    (0.0, "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop"),
)
"""Sizes, under the names that architectures give them."""
_SPREAD = 0.3
"""Initial spread of the weights, at which probabilities and gradients differ between tokens."""


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration with small sizes."""
    settings = config.get_text_config().to_dict()
    small: dict[str, Any] = {
        name: size for size, names in SIZES for name in names.split() if settings.get(name) is not None
    }
    small |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": _SPREAD}
    if settings.get("layer_types"):
        small["layer_types"] = settings["layer_types"][:LAYERS]
    if settings.get("num_attention_heads") == settings.get("num_key_value_heads"):
        small["num_key_value_heads"] = small.get("num_attention_heads")
    kept = {
        k: v for k, v in settings.items() if k not in ("quantization_config", "torch_dtype", "dtype", "_name_or_path")
    }
    return type(config.get_text_config())(**kept | small)


def save_small(source: str, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Write a small random model of the class of `source`, and a tokenizer for it, to `folder`.

    Raises:
        ConfigError: the class is unknown, or a small model cannot be built.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        cure = "Name a local folder, or let this machine reach the hub once."
        reason = f"its config.json cannot be read ({error})"
        raise ConfigError([Problem("model_name_or_path", source, reason, cure)]) from error
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(config), trust_remote_code=trust_remote_code)
    except Exception as error:  # an architecture may raise anything for sizes that it does not expect
        reason = f"a small {config.model_type} cannot be built ({error}), so this architecture is not verified"
        cure = "Verify the recipe with --model_name_or_path of another."
        raise ConfigError([Problem("model_name_or_path", source, reason, cure)]) from error
    model.float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer with placeholder words."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, VOCABULARY))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **names)


def load_small(folder: Path, dtype: torch.dtype, adapter: PeftConfig | None = None) -> PreTrainedModel | PeftModel:
    """Load the model of `folder` in one process, with a new adapter where the trainer has one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model if adapter is None else get_peft_model(model, adapter)


# Prompts, completions and rewards that depend only on their place in the global batch.

PAD, EOS, SILENT = 0, 1, 2
"""Special tokens; a group whose completions begin with `SILENT` has equal rewards."""
ORDINARY = 3


@dataclass(frozen=True)
class Rows:
    """The rows of every generation of a run.

    Args:
        vocabulary: number of the model's tokens.
        group: completions of a prompt.
        longest: maximum tokens of a completion, below the recipe's limit.
        rewards: number of reward functions.
    """

    vocabulary: int
    group: int
    longest: int = 7
    rewards: int = 1

    def prompt(self, generation: int, group: int) -> list[int]:
        """Return the token ids of a prompt; the length depends on the group."""
        return self._drawn(7_000_000 + 1000 * generation + group, 2, 6)

    def completion(self, generation: int, row: int) -> list[int]:
        """Return the token ids of a row of the global batch; every fifth is truncated, the others end."""
        ids = self._drawn(1000 * generation + row, 1, self.longest)
        if (generation + row // self.group) % 3 == 2:
            ids[0] = SILENT
        return ids if self.is_cut(row) else [*ids, EOS]

    @staticmethod
    def is_cut(row: int) -> bool:
        """Return whether a completion has no end token."""
        return row % 5 == 0

    def _drawn(self, seed: int, shortest: int, longest: int) -> list[int]:
        g = torch.Generator().manual_seed(seed)
        length = int(torch.randint(shortest, longest, (), generator=g))
        return torch.randint(ORDINARY, self.vocabulary, (length,), generator=g).tolist()

    def rollout(self, prompts: list, trainer: Trainer) -> dict[str, Any]:
        """Return this process's part of the current generation; a `rollout_func` of TRL."""
        first = trainer.accelerator.process_index * len(prompts)
        mine, generation = range(first, first + len(prompts)), trainer.state.global_step
        return {
            "prompt_ids": [self.prompt(generation, row // self.group) for row in mine],
            "completion_ids": [self.completion(generation, row) for row in mine],
            "logprobs": None,
        }

    def reward_functions(self) -> list[Callable[..., list[float]]]:
        """Return the reward functions."""
        return [_scorer(k) for k in range(self.rewards)]


def row_score(ids: list[int], function: int = 0) -> float:
    """Return a reward in [0, 1], with ties."""
    return 0.5 if ids[0] == SILENT else sum((t * (7 + function)) % 13 for t in ids) % 8 / 7


def _scorer(function: int) -> Callable[..., list[float]]:
    def scored(completion_ids: list[list[int]], **_: object) -> list[float]:
        return [row_score(ids, function) for ids in completion_ids]

    scored.__name__ = f"fixed_{function}"
    return scored
