"""The model that `try`, `merge` and `sample` are given: a run, a checkpoint or any model, with its prompt format.

The folder may be a stranger's. Its files are data: whether its code may run is decided on the command line.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from grpo_ext.config.adapters import base_of, located
from grpo_ext.config.mappings import as_mapping, generation_options
from grpo_ext.config.spec import fits
from grpo_ext.data.rows import with_system_prompt
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.quickstart.model import LESSONS, ensure_model
from grpo_ext.recipe.loading import has_file
from grpo_ext.safe_reading import read_json
from grpo_ext.trainer.checkpoints.choice import newest_sound
from grpo_ext.trainer.checkpoints.finish import finished, holds_weights
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_READ: dict[str, Any] = {
    **dict.fromkeys(_SAMPLING, float | None),
    **dict.fromkeys(("generation_kwargs", "chat_template_kwargs"), dict | str | None),
    **dict.fromkeys(("model_name_or_path", "system_prompt"), str | None),
    "max_completion_length": int,
    "dtype": Literal["auto", "bfloat16", "float16", "float32"] | None,
}
"""Settings that are read from a run's record, and their types."""
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}


@dataclass(frozen=True)
class Trained:
    """A model or an adapter, and the settings of its training; no settings for a model of another origin.

    `trust_remote_code` is the word of whoever typed the command, not the folder's.
    """

    model: str
    record: Mapping[str, Any]
    trust_remote_code: bool = False

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
        settings = {name: self.record[name] for name in _SAMPLING if self.record.get(name) is not None}
        longest = {"do_sample": True, "max_new_tokens": self.record.get("max_completion_length", 512)}
        options = as_mapping(self.record.get("generation_kwargs"))
        allowed = generation_options()  # others, such as custom_generate, could name code
        return longest | settings | {name: value for name, value in options.items() if name in allowed}

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
            **as_mapping(self.record.get("chat_template_kwargs")),
        )
        return encoded

    @property
    def loading(self) -> dict[str, Any]:
        """Options of `from_pretrained`."""
        return {"trust_remote_code": self.trust_remote_code}

    @property
    def device(self) -> torch.device:
        """The accelerator, or the CPU where the recipe asks for it."""
        device = None if self.record.get("use_cpu") else torch.accelerator.current_accelerator(check_available=True)
        return device or torch.device("cpu")


@contextmanager
def loading(model: str, *, only_code: bool = False) -> Iterator[None]:
    """Name the model in an error of its files; with `only_code`, only in the error about code of its own.

    Raises:
        ConfigError: the model cannot be loaded, or has code without the user's consent.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # its files may hold anything
        reason = f"it cannot be loaded ({(str(error).strip() or repr(error)).splitlines()[0]:.300})"
        cure = "Name a run, a checkpoint or a model."
        if "trust_remote_code" in str(error):
            base = base_of(model) if Path(model).is_dir() else None
            code = [str(file) for place in (model, *(base or ())[:1]) for file in sorted(Path(place).glob("*.py"))]
            reason = f"it asks to run code of its own ({', '.join(code[:5]) or 'of the hub'})"
            cure = "Read that code, and add --trust_remote_code to the command if you trust it."
        elif only_code:
            raise
        raise ConfigError([Problem(model, ABSENT, reason, cure)]) from error


def find_trained(name: str, *, trust_remote_code: bool = False) -> Trained:
    """Return the model of an output_dir (else its newest sound checkpoint), a checkpoint, a model or a hub id.

    Raises:
        ConfigError: the folder does not exist, holds no model, or its record is malformed.
    """
    model, record = _model_and_record(name)
    if not isinstance(record, dict) or (wrong := [k for k in _READ if k in record and not fits(record[k], _READ[k])]):
        what = f"its record of {wrong[0]} is of the wrong type" if isinstance(record, dict) else "it is not a mapping"
        raise ConfigError([Problem(str(Path(model) / RECIPE_FILE), ABSENT, what, "Name another folder.")])
    return Trained(model, record, trust_remote_code)


def _model_and_record(name: str) -> tuple[str, Any]:
    """Return the model's path or hub id, and the record of its training."""
    folder = Path(name).expanduser()
    if name in LESSONS:
        return str(ensure_model(lesson=LESSONS[name])), {}
    if not folder.is_dir():
        cure = "Name an output_dir, a checkpoint, a model, or a hub id."
        if folder.exists() or name.startswith((".", "/", "~")):
            raise ConfigError([Problem("RUN", name, "no such folder", cure)])
        files = "config.json", "adapter_config.json"
        if not any(has_file(name, file) for file in files):  # it may be a mistyped folder
            reason = "no such folder here, and no such model on the hub, or none that can be reached"
            raise ConfigError([Problem("RUN", name, reason, cure)])
        return name, {}
    if (content := finished(folder)) is not None and holds_weights(folder):
        return str(folder), content["recipe"]
    if not (folder / RECIPE_FILE).is_file() and (newest := newest_sound(folder)):
        folder = Path(newest)
    if not holds_weights(folder):
        reason = "the folder holds neither a model nor a checkpoint"
        raise ConfigError([Problem("RUN", name, reason, "Name a run's output_dir or a model.")])
    file = folder / RECIPE_FILE
    with loading(str(folder)):
        return str(folder), read_json(file) if file.is_file() else {}
