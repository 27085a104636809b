"""Recognise whose configuration a file is, and answer what another project's key or a script's name is called here."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_ext.bounded import read_text
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.foreign import trl

PROJECTS = {"trl": trl.TRL, "open-r1": trl.OPEN_R1}
_BY_HAND = 'docs/migrating.md, "Their key, our key", says what its keys are called here.'
_BEGIN = "Begin with a packaged recipe: `grpo-ext recipes`."
NO_RECIPES = {
    "accelerate": (
        "a launch configuration of accelerate",
        "Keep it in its own file, and name that: accelerate_config: FILE.",
    ),
    "deepspeed": ("a configuration of DeepSpeed", "Write deepspeed: FILE into a recipe, or accelerate_config: zero2."),
    "sft": ("an SFT recipe (supervised fine-tuning)", "Train it by `trl sft`, then its result by a recipe."),
    "dpo": ("a DPO recipe (pairs of preferences)", "Train it by `trl dpo`, then its result by a recipe."),
    "verl": ("a verl configuration, which is not converted", _BY_HAND),
    "swift": ("an ms-swift configuration, which is not converted", _BY_HAND),
    "axolotl": ("an axolotl configuration, which is not converted", _BY_HAND),
    "llama-factory": ("a LLaMA-Factory configuration (SFT, DPO, PPO, reward models)", _BEGIN),
    "openrlhf": ("an OpenRLHF configuration, which is not converted", _BEGIN),
    "unsloth-studio": ("a configuration of unsloth's SFT", "Train it there, then its result by a recipe."),
}
"""Kinds of files that are not converted, each with what to do."""

Config = Mapping[str, Any]
_SIGNS: tuple[tuple[str, Callable[[Config], bool]], ...] = (
    ("accelerate", lambda c: "distributed_type" in c or "compute_environment" in c),
    ("deepspeed", lambda c: "zero_optimization" in c or "train_micro_batch_size_per_gpu" in c),
    ("verl", lambda c: any(key.split(".")[0] == "actor_rollout_ref" for key in c)),
    ("llama-factory", lambda c: "finetuning_type" in c),
    ("axolotl", lambda c: "base_model" in c or c.get("rl") in ("grpo", "gdpo")),
    ("swift", lambda c: "rlhf_type" in c or ("model" in c and ("tuner_type" in c or "train_type" in c))),
    ("openrlhf", lambda c: "pretrain" in c or "actor.model_name_or_path" in c or _has_actor(c)),
    ("unsloth-studio", lambda c: isinstance(c.get("training"), Mapping) and "model" in c),
    ("open-r1", lambda c: bool(trl.ONLY_OPEN_R1 & c.keys()) or trl.names_open_r1_rewards(c)),
)
_OWN_MODEL_KEY = ("axolotl", "swift", "openrlhf", "unsloth-studio")
"""Projects without `model_name_or_path`, which therefore shows a recipe with a stray key of theirs."""
_ANSWERED_TOGETHER = 3
"""From so many unknown keys of Open-R1 on, a recipe is taken for one of Open-R1."""


def _has_actor(config: Config) -> bool:
    return isinstance(config.get("actor"), Mapping) and "model_name_or_path" in config["actor"]


def kind_of(config: Config) -> str | None:
    """Return the project, or the kind of other file; None for a recipe of ours or TRL's."""
    keys = {str(key): value for key, value in config.items()}
    signs = (name for name, sign in _SIGNS if sign(keys))
    kind = next((name for name in signs if "model_name_or_path" not in keys or name not in _OWN_MODEL_KEY), None)
    if kind in ("axolotl", "swift"):
        algorithm = keys.get("rl" if kind == "axolotl" else "rlhf_type")
        if algorithm != "grpo" and (kind, algorithm) != ("axolotl", "gdpo"):
            return "dpo" if algorithm else "sft"
    return kind


def foreign_file(config: Config, name: str, known: frozenset[str]) -> Problem | None:
    """Return the one problem of a file that is not a recipe; None for a recipe, also with a few keys of Open-R1.

    `known` holds the keys of a recipe.
    """
    kind = kind_of(config)
    if kind is None or (kind == "open-r1" and len(config.keys() - known) < _ANSWERED_TOGETHER):
        return None
    return not_a_recipe(kind, name)


def not_a_recipe(kind: str, name: str) -> Problem:
    """Return the one problem of a file that is not a recipe."""
    if kind in NO_RECIPES:
        what, cure = NO_RECIPES[kind]
        return Problem(name, ABSENT, f"the file is {what}", cure)
    cure = f"`grpo-ext migrate {name}` converts it to a recipe."
    return Problem(name, ABSENT, f"the file is an {PROJECTS[kind].title} configuration", cure)


def answer(key: str) -> str | None:
    """Return what to write here instead of a key of Open-R1, or of an older TRL."""
    for project in PROJECTS.values():
        rule = project.table.get(key)
        if rule is None:
            continue
        title = f"An older {project.title} had" if key in trl.OLDER else f"{project.title} has"
        if not rule.to:
            return f"{title} this key. It is not converted: {rule.note}. Remove it."
        ours = rule.to if not rule.to.startswith("env.") else f"env: {{{rule.to.removeprefix('env.')}: ...}}"
        note = f" What differs: {rule.note}." if rule.note else ""
        return f"{title} this key. Write {ours} here.{note}"
    return None


# A Python script or notebook that calls TRL's GRPO needs no recipe, but two other names.

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
    notes = {key: f"leave it out: {rule.note}" for key, rule in trl.OLDER.items() if not rule.to}
    for key, rule in trl.OLDER.items():
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
