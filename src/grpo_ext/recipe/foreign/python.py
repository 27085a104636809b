"""The two names to exchange in a Python script or notebook that calls TRL's GRPO."""

import re
from collections.abc import Iterator
from pathlib import Path

from grpo_ext.bounded import read_text
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.foreign.trl import OLDER

PYTHON_SUFFIXES = (".py", ".ipynb")
_EXCHANGE = """{path} is Python: exchange two names in it, a recipe is not needed.

    from trl import GRPOConfig, GRPOTrainer             # before
    from grpo_ext import GRPOExtConfig, GRPOExtTrainer  # after

    GRPOConfig(...)   ->  GRPOExtConfig(..., loss_defaults="trl")
    GRPOTrainer(...)  ->  GRPOExtTrainer(...)

Every argument keeps its meaning or is refused with a reason. loss_defaults="trl" keeps stock TRL's values where the
script sets none; without it they are the paper's (docs/differences.md)."""
_COMMAND_LINE = """

It reads its settings from the command line (TrlParser). To make a recipe of them instead, save the command that
starts it as run.sh, and write: grpo-ext migrate run.sh"""
_UNSLOTH = """

It imports unsloth, which replaces TRL's classes when it is imported:
  - Remove that import, PatchFastRL and FastLanguageModel. Load the model by transformers, and hand LoRA to
    GRPOExtTrainer(peft_config=LoraConfig(...)); its fused kernels and its 4-bit vLLM are not supported.
  - fast_inference=True is use_vllm=True, vllm_mode="colocate"; vllm_sampling_params are fields of the configuration.
  - Write unsloth's own defaults where the script sets no value: loss_type="bnpo", beta=0.001, learning_rate=5e-5,
    warmup_steps=0.1, weight_decay=0.001, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    vllm_importance_sampling_correction=False. It raises the rows per device to num_generations if need be."""


def _dropped(text: str) -> Iterator[str]:
    """Yield a paragraph about arguments that TRL has renamed or dropped, if the script has some."""
    notes = {key: f"leave it out: {rule.note}" for key, rule in OLDER.items() if not rule.to}
    for key, rule in OLDER.items():
        if rule.to:
            name = rule.to.removeprefix("env.")
            write = f"write {name}" if name == rule.to else f"set the environment variable {name}"
            notes[key] = f"{write} ({rule.note})" if rule.note else write
    notes["max_prompt_length"] = "leave it out, and longer prompts out of the dataset (a recipe has the key)"
    if found := [key for key in notes if re.search(rf"\b{key}\s*=[^=]", text)]:
        yield "\n\nArguments that TRL 1.16 has no more:" + "".join(f"\n  - {key}: {notes[key]}" for key in found)


def exchange(path: Path) -> str:
    """Return what to exchange in a script or notebook.

    Raises:
        ConfigError: it cannot be read, or does not call TRL's GRPO.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), ABSENT, f"cannot be read ({error})", "Correct the path.")]) from error
    if not re.search(r"\bGRPO(Config|Trainer)\b", text):
        reason = "it does not call GRPOConfig or GRPOTrainer"
        raise ConfigError([Problem(str(path), ABSENT, reason, "Name a script or notebook that trains by TRL's GRPO.")])
    parts = [_EXCHANGE.format(path=path), *_dropped(text)]
    if "TrlParser" in text or "parse_args_and_config" in text:
        parts.append(_COMMAND_LINE)
    if re.search(r'^\s*"?(from|import) unsloth', text, re.M):  # a notebook has its lines in quotes
        parts.append(_UNSLOTH)
    return "".join(parts)
