"""Write a draft as a commented recipe: three sections, then what was left out, each with its reason."""

import dataclasses
import textwrap
from typing import Any

import yaml
from transformers import TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.data.config import DataConfig
from grpo_ext.recipe.foreign.engine import Draft
from grpo_ext.recipe.parts import RecipeArguments

_WIDTH = 119
_OF_THE_TRAINING = {f.name for f in dataclasses.fields(TrainingArguments)}
_FIRST = ("model_name_or_path", "dataset_name", "loss_type", "reward_funcs", "output_dir")


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, lists inside of lists on one line."""


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value.strip() else None)


_Dumper.add_representer(str, _text)


def section_of(key: str) -> str:
    """Return the section of a recipe that a key belongs to."""
    names = {f.name for part in (ModelConfig, DataConfig, DatasetMixtureConfig) for f in dataclasses.fields(part)}
    script = {f.name for f in dataclasses.fields(RecipeArguments) if not f.name.startswith("reward")}
    if key in names | script:
        return "Model and data"
    of_grpo = {f.name for f in dataclasses.fields(GRPOExtConfig)} - _OF_THE_TRAINING
    own = key.startswith("reward") or (key in of_grpo and not key.startswith("vllm_") and key != "use_vllm")
    return "Loss and rewards" if own and key not in ("steps_per_generation", "generation_batch_size") else "Training"


def recipe_text(draft: Draft, source: str, output: str) -> str:
    """Return the recipe as text."""
    lines = [f"# GRPO, from the {draft.title} configuration {source}, by `grpo-ext migrate`.", "#"]
    lines.append(f"# Run:     grpo-ext train --config {output}")
    lines += _numbered("Decide:", draft.decisions)
    for section in ("Model and data", "Loss and rewards", "Training"):
        keys = [key for key in draft.values if section_of(key) == section]
        keys.sort(key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))
        lines += ["", f"# {section}"]
        for key in keys:
            lines += _entry(key, draft.values[key], draft.notes.get(key, ""))
    if draft.left:
        lines += ["", f"# Left out of {source}:"]
        for key, reason in sorted(draft.left.items()):
            lines += _comment(f"{key}: {_short(draft.given[key])}: {reason}", "#   ")
    return "\n".join(lines) + "\n"


def _numbered(label: str, sentences: list[str]) -> list[str]:
    lines = []
    for number, sentence in enumerate(sentences, 1):
        first = f"# {label:8} " if number == 1 else "#          "
        wrapped = textwrap.wrap(f"{number}. {sentence}", _WIDTH - len(first), break_long_words=False)
        lines += [(first if i == 0 else "#             ") + line for i, line in enumerate(wrapped)]
    return lines


def _comment(text: str, lead: str = "# ") -> list[str]:
    wrapped = textwrap.wrap(text, _WIDTH - len(lead) - 2, break_long_words=False, break_on_hyphens=False)
    return [lead + ("" if i == 0 else "  ") + line for i, line in enumerate(wrapped)]


def _entry(key: str, value: Any, note: str) -> list[str]:
    flow = isinstance(value, list | dict) and key not in ("reward_funcs", "datasets", "env")
    dumped = yaml.dump(
        {key: value},
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**6,
        default_flow_style=None if flow else False,
    ).rstrip("\n")
    if key in ("reward_funcs", "datasets") and isinstance(value, list):
        options: Any = {"default_flow_style": True, "width": 10**6, "sort_keys": False, "allow_unicode": True}
        lines = (yaml.safe_dump(entry, **options).split("\n")[0] for entry in value)
        dumped = "\n".join([f"{key}:", *(f"  - {line}" for line in lines)])
    if not note:
        return dumped.split("\n")
    if "\n" not in dumped and len(dumped) + len(note) + 4 <= _WIDTH:
        return [f"{dumped}  # {note}"]
    return [*_comment(f"{key}: {note}"), *dumped.split("\n")]


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
