"""The rules of fields that hold a mapping: that it is one, and that each of its keys has an effect."""

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_ext.bounded import parse_json, read_json
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.config.spec import Spec, holds
from grpo_ext.errors import Problem
from grpo_ext.registry import did_you_mean

_FILES = ("accelerator_config", "fsdp_config", "deepspeed")
"""Fields whose text may also be the path of a JSON file."""


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
        elif not Path(text).is_file() and (f.name != "deepspeed" or text.endswith(".json")):  # it may be base64
            yield Problem(f.name, text, "no such file", f"Correct the path, or give the mapping itself. {cure}")


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
    "dispatch_batches": ("the first process cannot send out the rows, which are not tensors", "Remove it."),
    "split_batches": (
        "per_device_train_batch_size would no longer be the batch of one process, and groups would be split",
        "Remove it.",
    ),
}
_ACCELERATOR = Spec.of(AcceleratorConfig)


def _accelerator(config: GRPOExtArguments) -> Iterator[Problem]:
    value = config.accelerator_config
    if isinstance(value, AcceleratorConfig):  # in a copy of a config
        value = dataclasses.asdict(value)
    if isinstance(value, str) and Path(value).is_file():
        try:
            value = read_json(Path(value))
        except (OSError, ValueError) as error:
            yield Problem("accelerator_config", value, f"not JSON ({error})", "Correct the file.")
    for key, setting in as_mapping(value).items():
        if key in _UNDOES and setting:
            yield Problem(f"accelerator_config.{key}", setting, *_UNDOES[key])
        else:
            yield from _ACCELERATOR.value_problems(f"accelerator_config.{key}", str(key), setting)


_VLLM = (  # of SamplingParams in vLLM 0.22 to 0.31, which is not imported for a check: that takes seconds
    *("allowed_token_ids", "bad_words", "detokenize", "extra_args", "flat_logprobs", "frequency_penalty"),
    *("ignore_eos", "include_stop_str_in_output", "logit_bias", "logprobs", "max_tokens", "min_p", "min_tokens", "n"),
    *("presence_penalty", "prompt_logprobs", "repetition_detection", "repetition_penalty", "seed", "temperature"),
    *("skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids"),
    *("structured_outputs", "thinking_token_budget", "top_k", "top_p", "truncate_prompt_tokens", "watermarking"),
)
_NOT_OPTIONS = ("transformers_version", "is_assistant", "disable_compile")
"""Attributes of a GenerationConfig that are not options here; TRL sets disable_compile itself."""


def generation_options(*, vllm: bool) -> tuple[str, ...]:
    """Return the keys that `generation_kwargs` may hold."""
    if vllm:
        return _VLLM
    return tuple(name for name in vars(GenerationConfig()) if name[0] != "_" and name not in _NOT_OPTIONS)


_GENERATION_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
}


def _override_a_field(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield the options that override fields: the log-probabilities would not be those of the sampling."""
    given = as_mapping(config.generation_kwargs)
    for name in given:
        if (field := _GENERATION_FIELDS.get(name)) is not None:
            reason = f"it would go past {field}, which the loss reads too"
            yield Problem(f"generation_kwargs.{name}", given[name], reason, f"Set the field {field} instead.")
    if given.get("do_sample") is False:
        reason = "every completion of a group is the same then, and no advantage is left"
        yield Problem("generation_kwargs.do_sample", False, reason, "Remove it.")


_UNREAD = ("nothing reads it here", "Remove it.")
_BESIDE_TRANSFORMERS = {
    "eos_token_id": (
        "completions would stop there, but are cut at the ends that the model has, so that padding would be trained",
        "Set it in the tokenizer or in the model's generation_config.json.",
    ),
    **dict.fromkeys(
        ("stop_strings", "token_healing"),
        ("it needs the tokenizer, which TRL does not hand to generate", "Remove it."),
    ),
    "return_dict_in_generate": ("TRL takes the tokens alone", "Remove it."),
    "compile_config": ("TRL switches compilation off", "Remove it."),
    **dict.fromkeys(
        ("force_words_ids", "constraints", "dola_layers"),
        ("transformers runs code of the hub for it, which TRL does not allow", "Remove it."),
    ),
    **dict.fromkeys(
        (
            *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens", "use_mtp"),
            *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"),
            *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
        ),
        ("transformers drafts tokens for one row at a time only", "Remove it."),
    ),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), _UNREAD),
    **dict.fromkeys(("decoder_start_token_id", "forced_bos_token_id", "low_memory"), _UNREAD),
}
"""Options of transformers that no recipe may pass, each with the reason and the cure."""
_OF_BEAMS = dict.fromkeys(("length_penalty", "early_stopping"), ("it has no effect without beams", "Remove it."))
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
    given = as_mapping(config.generation_kwargs)
    beams = {} if (given.get("num_beams") or 1) > 1 else _OF_BEAMS
    table, beside = (_BESIDE_VLLM, {"use_vllm": True}) if config.use_vllm else (_BESIDE_TRANSFORMERS | beams, {})
    for name in (name for name in table if name in given):
        value, default = given[name], getattr(GenerationConfig(), name, None)
        if not (value is None or value is False or value == default) or name == "logprobs":  # null: none are returned
            yield Problem(f"generation_kwargs.{name}", value, *table[name], beside)


def _generation(config: GRPOExtArguments) -> Iterator[Problem]:
    known, other = generation_options(vllm=config.use_vllm), generation_options(vllm=not config.use_vllm)
    sampler = "vLLM" if config.use_vllm else "transformers"
    for name, value in as_mapping(config.generation_kwargs).items():
        if name not in known and name not in _GENERATION_FIELDS:
            cure = f"use_vllm is {config.use_vllm} here; remove it." if name in other else did_you_mean(name, known)
            reason = f"{sampler} has no such option and would ignore it"
            yield Problem(f"generation_kwargs.{name}", value, reason, cure)


def _unreadable_generation(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield what transformers would refuse once the model is loaded: an unknown cache, a value of a wrong kind."""
    if config.use_vllm:
        return
    known, given = generation_options(vllm=False), as_mapping(config.generation_kwargs)
    for setting, key, value in (
        ("cache_implementation", "cache_implementation", config.cache_implementation),
        *((f"generation_kwargs.{key}", key, value) for key, value in given.items() if key in known),
    ):
        try:
            GenerationConfig(**{"do_sample": True, key: value})
        except (TypeError, ValueError) as error:
            yield Problem(setting, value, str(error).splitlines()[0].rstrip("."), "Correct it, or leave it out.")


def _continuous_batching(config: GRPOExtArguments) -> Iterator[Problem]:
    if config.use_transformers_continuous_batching and not config.use_vllm:
        from transformers.generation import ContinuousBatchingConfig  # which takes a second

        known = inspect.signature(ContinuousBatchingConfig).parameters
        for key, value in as_mapping(config.transformers_continuous_batching_config).items():
            if key not in known:
                place = f"transformers_continuous_batching_config.{key}"
                yield Problem(place, value, "transformers has no such option", did_you_mean(str(key), known))


KEYWORD_RULES: tuple[Rule, ...] = (
    *(_continuous_batching, _accelerator, _override_a_field, _go_wrong, _generation, _unreadable_generation),
    Conflict(
        "liger_kernel_config",
        lambda c: as_mapping(c.liger_kernel_config).get("fused_linear_cross_entropy"),
        "fused_linear_cross_entropy would replace the forward that has TRL's own LM head",
        "Set it to false.",
    ),
)
"""Keys that are unknown, or that would override another setting."""
