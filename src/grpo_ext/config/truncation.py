"""Settings that make the sampler draw from another distribution than the model's, and what becomes of the loss.

Where the sampler only leaves tokens out, the loss is normalised over the tokens that it kept
(`packing.sampling_support`). A run in which these are not known is refused. `loss_defaults: trl` reads the whole
vocabulary, as stock TRL does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.mappings import as_mapping, generation_options
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.config.settings import GREEDY
from grpo_ext.errors import Problem

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Fields, each with the value that leaves the distribution as it is."""
_LEAVES_OUT = {
    **dict.fromkeys(("typical_p",), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"), 0),
    **dict.fromkeys(("top_h", "bad_words_ids", "bad_words", "suppress_tokens", "begin_suppress_tokens"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "allowed_token_ids", "structured_outputs"), None),
}
"""Keys of `generation_kwargs` that remove tokens, each with the value that has no effect."""
_RESCALES = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "diversity_penalty", "penalty_alpha"), 0),
    **dict.fromkeys(("dola_layers", "watermarking_config"), None),
    **dict.fromkeys(("force_words_ids", "sequence_bias", "constraints", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("logit_bias", "thinking_token_budget"), None),
}
"""Keys of `generation_kwargs` that alter the distribution in another way, likewise."""
OF_THE_MODEL = ("min_p", *_LEAVES_OUT, *_RESCALES)
"""Options that transformers reads from the model's generation_config.json where a recipe leaves them unset."""


def truncations(config: GRPOExtArguments) -> dict[str, object]:
    """Return the settings that leave tokens out, by name."""
    fields = {name: getattr(config, name) for name in ("top_p", "top_k", "min_p")}
    settings = {name: value for name, value in fields.items() if value and value != NEUTRAL[name]}
    if config.use_vllm and config.vllm_structured_outputs_regex is not None:
        settings["vllm_structured_outputs_regex"] = config.vllm_structured_outputs_regex
    return settings | _acting_options(config, _LEAVES_OUT)


def rescalings(config: GRPOExtArguments) -> dict[str, object]:
    """Return the settings that alter the distribution in another way, by name."""
    penalty = config.repetition_penalty
    settings: dict[str, object] = {"repetition_penalty": penalty} if penalty != NEUTRAL["repetition_penalty"] else {}
    return settings | _acting_options(config, _RESCALES)


def _acting_options(config: GRPOExtArguments, effects: Mapping[str, object]) -> dict[str, object]:
    options = as_mapping(config.generation_kwargs)
    names = [name for name in options if name in effects and (config.use_vllm or name in generation_options())]
    off: tuple[object, ...] = (None, "", [], {}, ())  # not 0, which may be the id of a token, or a scale
    acts = (name for name in names if options[name] not in (*off, effects[name]) and options[name] is not False)
    return {f"generation_kwargs.{name}": options[name] for name in acts}


def scores_over_support(config: GRPOExtArguments) -> bool:
    """Return whether the loss is normalised over the tokens that the sampler kept."""
    return config.loss_defaults != "trl" and bool(truncations(config))


# Where the sets are not known.


WHOLE = 1024
"""Largest vocabulary whose log-probabilities vLLM is asked for at each token, where no top_k bounds the support."""


def unbounded_problems(top_k: int, vocabulary: int) -> Iterator[Problem]:
    """Yield the problem of a sampling support that vLLM cannot return; its own mask needs top_k too."""
    if not top_k and vocabulary > WHOLE:
        reason = (
            f"the sampler leaves tokens out, and without top_k vLLM returns which ones for a vocabulary of up to "
            f"{WHOLE} tokens; this one has {vocabulary}"
        )
        cure = "Set top_k: 50 too, use_vllm: false, or loss_defaults: trl, which trains with stock TRL's bias."
        yield Problem("top_k", top_k, reason, cure)


def needs_sets(config: GRPOExtArguments, reason: str, cure: str) -> Iterator[Problem]:
    """Yield the problem of a truncated sampler whose kept tokens the loss cannot take; `cure` is another way out."""
    if scores_over_support(config):
        name, value = next(iter(truncations(config).items()))
        reason = f"the loss needs the tokens that the sampler kept, and {reason}"
        yield Problem(name, value, reason, f"{cure} {_unset(name)}")


def _unset(name: str) -> str:
    option = name.rpartition(".")[2]
    return f"Leave {option} unset, or set loss_defaults: trl, which trains with stock TRL's bias."


def _altered(settings: Mapping[str, object]) -> Iterator[Problem]:
    for name, value in settings.items():
        reason = (
            "completions are drawn from an altered distribution, but their log-probabilities are the model's own, so "
            "the gradient is biased"
        )
        yield Problem(name, value, reason, _unset(name))


def _rescaled(config: GRPOExtArguments) -> Iterator[Problem]:
    if config.loss_defaults != "trl":
        yield from _altered(rescalings(config))


def _unknown_sets(config: GRPOExtArguments) -> Iterator[Problem]:
    if not config.use_vllm and config.use_transformers_continuous_batching:
        reason = "continuous batching does not return them"
        yield from needs_sets(config, reason, "Set use_transformers_continuous_batching: false.")
    if not config.use_vllm and as_mapping(config.generation_kwargs).get("remove_invalid_values"):
        reason = "generation_kwargs.remove_invalid_values gives those that were removed a finite score"
        yield from needs_sets(config, reason, "Remove it.")
    if config.torch_compile:
        yield from needs_sets(config, "a compiled forward cannot take them", "Set torch_compile: false.")


TRUNCATION_RULES: tuple[Rule, ...] = (
    Conflict("top_k", lambda c: c.top_k == 1, GREEDY, "Set a larger one, or 0, which switches it off."),
    *(_rescaled, _unknown_sets),
)
"""Exact, or refused."""


def rollout_problems(config: GRPOExtArguments, rollout_func: object) -> Iterator[Problem]:
    """Yield the problem of rollouts by a function, which does not carry the sampling support."""
    if rollout_func:
        yield from needs_sets(config, "rollout_func does not pass them on", "Remove rollout_func.")


def adapter_problems(config: GRPOExtArguments, virtual_tokens: bool) -> Iterator[Problem]:
    """Yield the problem of an adapter that adds `virtual_tokens` before the prompt."""
    if virtual_tokens:
        yield from needs_sets(config, "an adapter that adds tokens moves the positions", "Use LoRA.")


def reshaping(config: GRPOExtArguments) -> dict[str, object]:
    """Return the settings, by name, that make the sampler another distribution than the one that the loss scores."""
    return truncations(config) | rescalings(config) if config.loss_defaults == "trl" else {}


def reshaped_sampling(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield, as warnings, settings by which stock TRL's gradient is biased."""
    for problem in _altered(reshaping(config)):
        yield replace(problem, cure=f"Leave {problem.field.rpartition('.')[2]} unset for an unbiased one.")
