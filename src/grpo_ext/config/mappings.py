"""The rules of fields that hold a mapping: it is one, and no key in it undoes what the loss counts on."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import Rule
from grpo_ext.config.spec import holds
from grpo_ext.errors import Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.safe_reading import parse_json, read_json

_FILES = ("accelerator_config", "fsdp_config", "deepspeed")
"""Fields whose text may also be the path of a JSON file, which its owner reads."""


def mapping_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield the texts that are not a mapping in JSON: TRL ignores other text, or fails on it late."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        text, hint = getattr(config, f.name), hints[f.name]
        if not isinstance(text, str) or not holds(dict, hint):
            continue
        cure = (
            f"Write {f.name}: {{option: value}} in a recipe, --{f.name} '{{\"option\": value}}' on the command line."
        )
        if text.startswith("{"):
            try:
                parse_json(text)
            except ValueError as error:
                yield Problem(f.name, text, f"not JSON ({error})", cure)
        elif f.name not in _FILES:
            yield Problem(f.name, text, "not a mapping", cure)


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a dict field's value, which comes from the command line as JSON text."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = parse_json(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


# Keys.

_UNDOES = {
    "gradient_accumulation_kwargs": (
        "it would go past gradient_accumulation_steps, by which the loss is divided",
        "Set the field gradient_accumulation_steps instead.",
    ),
    "split_batches": (
        "per_device_train_batch_size would no longer be the batch of one process, and groups would be split",
        "Remove it.",
    ),
}


def _accelerator(config: GRPOExtArguments) -> Iterator[Problem]:
    value: Any = config.accelerator_config
    if isinstance(value, str) and Path(value).is_file():
        try:
            value = read_json(Path(value))
        except (OSError, ValueError):  # accelerate says so
            return
    options = vars(value) if dataclasses.is_dataclass(value) else as_mapping(value)  # the former in a copy of a config
    for key in (key for key in _UNDOES if options.get(key)):
        yield Problem(f"accelerator_config.{key}", options[key], *_UNDOES[key])


_NOT_OPTIONS = ("transformers_version", "is_assistant", "disable_compile")
"""Attributes of a GenerationConfig that are not options here; TRL sets disable_compile itself."""


def generation_options() -> tuple[str, ...]:
    """Return the keys that `generation_kwargs` may hold where transformers samples."""
    return tuple(name for name in vars(GenerationConfig()) if name[0] != "_" and name not in _NOT_OPTIONS)


_GENERATION_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
}


def _override_a_field(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield the options that override fields: the log-probabilities would not be those of the sampling."""
    options = as_mapping(config.generation_kwargs)
    for name in options:
        if (field := _GENERATION_FIELDS.get(name)) is not None:
            reason = f"it would go past {field}, which the loss reads too"
            yield Problem(f"generation_kwargs.{name}", options[name], reason, f"Set the field {field} instead.")
    if options.get("do_sample") is False:
        reason = "every completion of a group is the same then, and no advantage is left"
        yield Problem("generation_kwargs.do_sample", False, reason, "Remove it.")


_BESIDE_TRANSFORMERS = {
    "eos_token_id": (
        "completions would stop there, but are cut at the ends that the model has, so that padding would be trained",
        "Set it in the tokenizer or in the model's generation_config.json.",
    ),
}
"""Options of transformers that no recipe may pass, each with the reason and the cure."""
_BESIDE_VLLM = {
    "logprobs": (
        "TRL asks vLLM for the sampled token's log-probability and takes the first that it returns: of more, that is "
        "the likeliest token's",
        "Remove it.",
    ),
    "seed": (
        "each completion of a group would be drawn with this seed, so that all are the same",
        "Remove it; the field seed decides about the run.",
    ),
    "truncate_prompt_tokens": (
        "vLLM would read a part of a prompt that the policy reads whole",
        "Remove it; max_prompt_length leaves longer prompts out.",
    ),
}
"""Options of vLLM that no recipe may pass, each with the reason and the cure."""


def _go_wrong(config: GRPOExtArguments) -> Iterator[Problem]:
    options = as_mapping(config.generation_kwargs)
    table, beside = (_BESIDE_VLLM, {"use_vllm": True}) if config.use_vllm else (_BESIDE_TRANSFORMERS, {})
    for name in (name for name in table if name in options):
        if options[name] is not None or name == "logprobs":  # null: none are returned
            yield Problem(f"generation_kwargs.{name}", options[name], *table[name], beside)


def _ignored(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield options that transformers would take and ignore; vLLM refuses its own."""
    options = generation_options()
    for name, value in as_mapping(config.generation_kwargs).items() if not config.use_vllm else ():
        if name not in options and name not in _GENERATION_FIELDS:
            reason = "transformers has no such option and would ignore it"
            yield Problem(f"generation_kwargs.{name}", value, reason, did_you_mean(name, options))


KEYWORD_RULES: tuple[Rule, ...] = (_accelerator, _override_a_field, _go_wrong, _ignored)
"""Keys that would override another setting, or be ignored."""
