"""The rules of fields that hold a mapping: that it is one, and that every key in it means something."""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_ext.config.broken import Rule
from grpo_ext.registry import did_you_mean

# Whether it is a mapping.

_FILES = ("accelerator_config", "fsdp_config", "deepspeed")
"""Fields whose text may also be the path of a JSON file."""


def mapping_problems(config: Any) -> Iterator[str]:
    """Text in a field that holds a mapping must be one in JSON: TRL passes other text over, or fails on it late."""
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
                json.loads(text)
            except ValueError as error:
                yield f"{f.name}={text!r} is not JSON ({error}). {cure}"
        elif f.name not in _FILES:
            yield f"{f.name}={text!r} is no mapping. {cure}"
        elif not Path(text).is_file() and (f.name != "deepspeed" or text.endswith(".json")):  # which may be base64
            yield f"{f.name}={text!r}: no such file. Correct the path, or give the mapping itself. {cure}"


def holds(kind: type, hint: Any) -> bool:
    """Whether a field of this type may hold a `kind`, dict or list."""
    return any(kind in (part, typing.get_origin(part)) for part in (hint, *typing.get_args(hint)))


def as_mapping(value: Any) -> Mapping[str, Any]:
    """A dict field's value; from the command line it comes as JSON text."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


# What its keys are.


def _liger(config: Any) -> Iterator[str]:
    if as_mapping(config.liger_kernel_config).get("fused_linear_cross_entropy"):
        yield (
            "liger_kernel_config.fused_linear_cross_entropy=True: it would replace the forward that TRL has put its "
            "own LM head into. Set it to false."
        )


_UNDOES = {
    "gradient_accumulation_kwargs": "it would go past gradient_accumulation_steps, by which the loss is divided. "
    "Set the field gradient_accumulation_steps instead",
    "dispatch_batches": "the first process cannot hand out the rows, which are no tensors. Remove it",
    "split_batches": "per_device_train_batch_size would no longer be the batch of one process, and groups would be "
    "torn. Remove it",
}


def _accelerator(config: Any) -> Iterator[str]:
    value = config.accelerator_config
    known = [f.name for f in dataclasses.fields(AcceleratorConfig)]
    if isinstance(value, AcceleratorConfig):  # in a copy of a config
        value = {name: getattr(value, name) for name in known}
    if isinstance(value, str) and Path(value).is_file():
        try:
            value = json.loads(Path(value).read_text())
        except ValueError as error:
            yield f"accelerator_config={value!r} is not JSON ({error}). Correct the file."
    for key, setting in as_mapping(value).items():
        if key not in known:
            yield f"accelerator_config.{key}={setting!r}: no such key. {did_you_mean(str(key), known)}"
        elif key in _UNDOES and setting:
            yield f"accelerator_config.{key}={setting!r}: {_UNDOES[key]}."


_VLLM = (  # of SamplingParams in vLLM 0.22 to 0.31, which is not imported for a check: that takes seconds
    *("allowed_token_ids", "bad_words", "detokenize", "extra_args", "flat_logprobs", "frequency_penalty"),
    *("ignore_eos", "include_stop_str_in_output", "logit_bias", "logprobs", "max_tokens", "min_p", "min_tokens", "n"),
    *("presence_penalty", "prompt_logprobs", "repetition_detection", "repetition_penalty", "seed", "temperature"),
    *("skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids"),
    *("structured_outputs", "thinking_token_budget", "top_k", "top_p", "truncate_prompt_tokens", "watermarking"),
)
_ASIDE = ("transformers_version", "is_assistant", "disable_compile")
"""Attributes of a GenerationConfig that are no options here; TRL sets disable_compile itself."""


def generation_options(*, vllm: bool) -> tuple[str, ...]:
    """The keys that `generation_kwargs` may hold."""
    if vllm:
        return _VLLM
    return tuple(name for name in vars(GenerationConfig()) if name[0] != "_" and name not in _ASIDE)


_GENERATION_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
}


def _past_a_field(config: Any) -> Iterator[str]:
    """Options that go past the fields: completions would be drawn otherwise than their log-probabilities say."""
    given = as_mapping(config.generation_kwargs)
    for name in given:
        field = _GENERATION_FIELDS.get(name)
        if field is not None:
            yield (
                f"generation_kwargs.{name}={given[name]!r} would go past {field}, which the loss reads too. "
                f"Set the field {field} instead."
            )
    if given.get("do_sample") is False:
        yield (
            "generation_kwargs.do_sample=False: every completion of a group is the same then, and no advantage is "
            "left. Remove it."
        )
    if config.use_vllm and given.get("seed") is not None:
        yield (
            f"generation_kwargs.seed={given['seed']!r} with use_vllm: each completion of a group would be drawn with "
            "this seed, so that all are the same. Remove it; the field seed decides about the run."
        )


def _generation(config: Any) -> Iterator[str]:
    known = generation_options(vllm=config.use_vllm)
    sampler = "vLLM" if config.use_vllm else "transformers"
    for name, value in as_mapping(config.generation_kwargs).items():
        if name in known or name in _GENERATION_FIELDS:
            continue
        other = generation_options(vllm=not config.use_vllm)
        hint = did_you_mean(str(name), known)
        cure = f"use_vllm is {config.use_vllm} here; remove it." if name in other else hint
        yield f"generation_kwargs.{name}={value!r}: {sampler} has no such option and would ignore it. {cure}"


KEYWORD_RULES: tuple[Rule, ...] = (_accelerator, _past_a_field, _generation, _liger)
"""Keys that are unknown, or that would undo another setting behind its back."""

# Warned of.

_RESHAPES = {
    **dict.fromkeys(("typical_p", "num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "dola_layers", "top_h", "watermarking_config"), None),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "sequence_bias", "suppress_tokens", "bad_words"), None),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "constraints"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "logit_bias", "allowed_token_ids"), None),
    **dict.fromkeys(("structured_outputs", "thinking_token_budget", "ignore_eos"), None),
}
"""Options of a sampler that alter the distribution it draws from, each with the value that leaves it alone."""


def reshaped_sampling(config: Any) -> Iterator[str]:
    """Options by which the sampler draws otherwise than the log-probabilities say."""
    for name, value in as_mapping(config.generation_kwargs).items():
        if name in _RESHAPES and value and value != _RESHAPES[name]:
            yield (
                f"generation_kwargs.{name}={value!r}: completions are drawn from an altered distribution, but their "
                f"log-probabilities are the model's own, so the gradient is biased. Leave {name} out for an unbiased "
                "one."
            )
