"""What `try`, `merge` and `sample` are pointed at: a run, a checkpoint, or any model; and how it is prompted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_ext.config.adapters import base_of, located
from grpo_ext.data.rows import with_system_prompt
from grpo_ext.errors import ConfigError
from grpo_ext.quickstart.model import LESSONS, ensure_model
from grpo_ext.trainer.checkpoints.choice import newest_sound
from grpo_ext.trainer.checkpoints.finish import finished, holds_weights
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}


@dataclass(frozen=True)
class Trained:
    """A model or an adapter, and the settings that it was trained by: none, where no run of ours has left it."""

    model: str
    record: Mapping[str, Any]

    @property
    def before(self) -> str:
        """What it was before training.

        Raises:
            ConfigError: nobody says.
        """
        start = self.record.get("model_name_or_path")
        if start in LESSONS:
            return str(ensure_model(lesson=LESSONS[start]))
        if start:
            return located(start, Path(self.model))
        if base := base_of(self.model):
            return base.model
        raise ConfigError([f"--compare: {self.model} does not say what it was trained from. Name a run's folder."])

    def sampling(self) -> dict[str, Any]:
        """Options of `generate`: as the rollouts of training had them, or the model's own."""
        if not self.record:
            return {"max_new_tokens": 512}
        given = {name: self.record[name] for name in SAMPLING if self.record.get(name) is not None}
        longest = {"do_sample": True, "max_new_tokens": self.record["max_completion_length"]}
        return longest | given | (self.record.get("generation_kwargs") or {})

    def encode(self, question: str, tokenizer: Any) -> Any:
        """A question as training would have put it: as a chat with the recipe's system prompt, or as plain text."""
        chat = self.record.get("conversational")
        if not (tokenizer.chat_template if chat is None else chat):
            return tokenizer(question, return_tensors="pt")
        return tokenizer.apply_chat_template(
            with_system_prompt(question, self.record.get("system_prompt")),
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            **(self.record.get("chat_template_kwargs") or {}),
        )

    @property
    def loading(self) -> dict[str, Any]:
        """Options of `from_pretrained`."""
        return {"trust_remote_code": bool(self.record.get("trust_remote_code"))}

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        found = None if self.record.get("use_cpu") else torch.accelerator.current_accelerator(check_available=True)
        return found or torch.device("cpu")


def find(name: str) -> Trained:
    """The finished model of an output_dir, else its newest sound checkpoint; a checkpoint, a model; a hub id.

    Raises:
        ConfigError: a folder that is not there, or has no model in it.
    """
    folder = Path(name).expanduser()
    if name in LESSONS:
        return Trained(str(ensure_model(lesson=LESSONS[name])), {})
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")):
            raise ConfigError([f"{name}: no such folder. Name an output_dir, a checkpoint, a model, or a hub id."])
        return Trained(name, {})
    if (content := finished(folder)) is not None and holds_weights(folder):
        return Trained(str(folder), content["recipe"])
    if not (folder / RECIPE_FILE).is_file() and (newest := newest_sound(folder)):
        folder = Path(newest)
    if not holds_weights(folder):
        raise ConfigError([f"{name}: no model in this folder, nor a checkpoint. Name a run's output_dir or a model."])
    file = folder / RECIPE_FILE
    return Trained(str(folder), json.loads(file.read_text()) if file.is_file() else {})
