"""The model that `try`, `merge` and `sample` are given: a run, a checkpoint or any model, with its prompt format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.utils import cached_file

from grpo_ext.config.adapters import base_of, located
from grpo_ext.data.rows import with_system_prompt
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.quickstart.model import LESSONS, ensure_model
from grpo_ext.trainer.checkpoints.choice import newest_sound
from grpo_ext.trainer.checkpoints.finish import finished, holds_weights
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}


@dataclass(frozen=True)
class Trained:
    """A model or an adapter, and the settings of its training; no settings for a model of another origin."""

    model: str
    record: Mapping[str, Any]

    @property
    def before(self) -> str:
        """The model before training.

        Raises:
            ConfigError: it is not on record.
        """
        start = self.record.get("model_name_or_path")
        if start in LESSONS:
            return str(ensure_model(lesson=LESSONS[start]))
        if start:
            return located(start, Path(self.model))
        if base := base_of(self.model):
            return base.model
        raise ConfigError([Problem("--compare", self.model, "its base is not on record", "Name a run's folder.")])

    def sampling(self) -> dict[str, Any]:
        """Return options of `generate`: those of the training rollouts, or the model's own."""
        if not self.record:
            return {"max_new_tokens": 512}
        given = {name: self.record[name] for name in _SAMPLING if self.record.get(name) is not None}
        longest = {"do_sample": True, "max_new_tokens": self.record["max_completion_length"]}
        return longest | given | (self.record.get("generation_kwargs") or {})

    def encode(self, question: str, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
        """Tokenize a question as in training: as a chat with the recipe's system prompt, or as plain text."""
        chat = self.record.get("conversational")
        if not (tokenizer.chat_template if chat is None else chat):
            return tokenizer(question, return_tensors="pt")
        encoded: Any = tokenizer.apply_chat_template(
            with_system_prompt(question, self.record.get("system_prompt")),
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            **(self.record.get("chat_template_kwargs") or {}),
        )
        return encoded

    @property
    def loading(self) -> dict[str, Any]:
        """Options of `from_pretrained`."""
        return {"trust_remote_code": bool(self.record.get("trust_remote_code"))}

    @property
    def device(self) -> torch.device:
        """The accelerator, or the CPU where the recipe asks for it."""
        found = None if self.record.get("use_cpu") else torch.accelerator.current_accelerator(check_available=True)
        return found or torch.device("cpu")


def _on_the_hub(name: str, file: str) -> bool:
    """Return whether a model has a file, on the hub or in its cache."""
    quiet = ("gated_repo", "missing_entries", "connection_errors")
    try:
        return cached_file(name, file, **{f"_raise_exceptions_for_{kind}": False for kind in quiet}) is not None
    except OSError:  # transformers raises it for some names anyway
        return False


def find_trained(name: str) -> Trained:
    """Return the model of an output_dir (else its newest sound checkpoint), a checkpoint, a model or a hub id.

    Raises:
        ConfigError: the folder does not exist, or holds no model.
    """
    folder = Path(name).expanduser()
    if name in LESSONS:
        return Trained(str(ensure_model(lesson=LESSONS[name])), {})
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")):
            cure = "Name an output_dir, a checkpoint, a model, or a hub id."
            raise ConfigError([Problem("RUN", name, "no such folder", cure)])
        files = "config.json", "adapter_config.json"
        if "/" not in name and not any(_on_the_hub(name, file) for file in files):  # it may be a mistyped folder
            reason = "no such folder here, and no such model on the hub, or none that can be reached"
            raise ConfigError(
                [Problem("RUN", name, reason, "Name an output_dir, a checkpoint, a model, or a hub id.")]
            )
        return Trained(name, {})
    if (content := finished(folder)) is not None and holds_weights(folder):
        return Trained(str(folder), content["recipe"])
    if not (folder / RECIPE_FILE).is_file() and (newest := newest_sound(folder)):
        folder = Path(newest)
    if not holds_weights(folder):
        reason = "the folder holds neither a model nor a checkpoint"
        raise ConfigError([Problem("RUN", name, reason, "Name a run's output_dir or a model.")])
    file = folder / RECIPE_FILE
    return Trained(str(folder), json.loads(file.read_text()) if file.is_file() else {})
