"""The number formats of the policy and its sampler, and what is expected to differ between them."""

from collections.abc import Iterator

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.engine_options import QUANTIZES, given_options
from grpo_ext.config.process_engine import samples_in_process
from grpo_ext.errors import Problem
from grpo_ext.objective.sampler_correction import DEFAULT

NATS = {"float32": "0.001", "float16": "0.005", "bfloat16": "0.03"}
"""Mean difference of log-probabilities, in nats per token, that a working pair of engines stays below: see
docs/troubleshooting.md."""


def computed_in(config: GRPOExtArguments, weights: str) -> str:
    """Return the dtype that the policy computes in, from that of its weights."""
    return "bfloat16" if config.bf16 else "float16" if config.fp16 else weights


def precision(config: GRPOExtArguments, weights: str) -> str:
    """Return the line of a run that names the formats of trainer and sampler."""
    computes = computed_in(config, weights)
    trainer = f"{weights} weights" + (f", computed in {computes}" if computes != weights else "")
    head = ", float32 LM head" if config.cast_lm_head_to_fp32 and computes != "float32" else ""
    return f"trainer: {trainer}{head} | sampler: {_sampler(config, computes)}"


def _sampler(config: GRPOExtArguments, computes: str) -> str:
    if not config.use_vllm:
        where = "in a process of its own, the trainer's" if samples_in_process(config) else "the trainer's own"
        return f"transformers, {where} weights, {computes}"
    options = (f"{key} {value}" for key, value in coarse_options(config).items())
    return ", ".join([f"vLLM {config.vllm_mode}", _sampler_dtype(config, computes), *options])


def _sampler_dtype(config: GRPOExtArguments, computes: str) -> str:
    return computes if config.sampler_dtype == "auto" else config.sampler_dtype


def coarse_options(config: GRPOExtArguments) -> dict[str, object]:
    """Return the options of the engine that make the sampler coarser than the policy."""
    wide = ("auto", "float32", "float16", "bfloat16")  # of keys and values
    options = given_options(config).items()
    return {key: v for key, v in options if key in QUANTIZES or (key == "kv_cache_dtype" and v not in wide)}


def expected_differences(config: GRPOExtArguments, weights: str) -> Iterator[tuple[str, str]]:
    """Yield each source of a difference between the sampler's and the policy's log-probabilities, and its size."""
    if ahead := config.rollout_ahead:
        yield "age", f"the sampler's weights are {ahead} generation{'s' if ahead > 1 else ''} older (rollout_ahead)"
    if not config.use_vllm:
        yield "kernels", "rounding only: transformers samples with the trainer's own weights and modules"
        if ahead:
            yield "correction", _correction(config)
        return
    computes = computed_in(config, weights)
    dtype = _sampler_dtype(config, computes)
    coarser = max(computes, dtype, key=lambda name: float(NATS.get(name, "1")))
    size = f"below {NATS[coarser]} nats per token in {coarser}" if coarser in NATS else f"of {coarser}"
    yield "kernels", f"vLLM rounds otherwise than the trainer: {size}"
    if weights == "float32" != dtype:
        yield "weights", f"each push rounds {weights} weights to {dtype}"
    if dtype != computes:
        yield "dtype", f"the trainer computes in {computes}, the sampler in {dtype}"
    if config.cast_lm_head_to_fp32 and dtype != "float32":
        yield "LM head", f"float32 in the trainer, {dtype} in the sampler"
    for key, value in coarse_options(config).items():
        yield key, f"{value}: the sampler is another distribution, which the correction must account for"
    yield "correction", _correction(config)


def _correction(config: GRPOExtArguments) -> str:
    if config.old_logps == "sampler":
        return "none: the loss takes its ratio to the sampler (old_logps)"
    if config.old_logps == "interpolated":
        return f"{DEFAULT[0].describe()}, by interpolated log-probabilities (old_logps)"
    if not (rules := config.sampler_rules):
        return "off: these differences bias the gradient"
    long = any(rule.level == "sequence" and (rule.lower, rule.upper) != (None, None) for rule in rules)
    cost = "; a bound on a sum or product over tokens takes the gradient of long completions" if long else ""
    return "; ".join(rule.describe() for rule in rules) + cost


def coarse_warnings(config: GRPOExtArguments) -> Iterator[Problem]:
    """Warn of a sampler that is coarser than the policy by choice, and is not corrected for."""
    if config.use_vllm and not config.vllm_importance_sampling_correction and config.old_logps == "recomputed":
        for key, value in coarse_options(config).items():
            reason = "the sampler is another distribution than the policy, and nothing corrects for it"
            yield Problem(f"vllm_engine_kwargs.{key}", value, reason, "Set vllm_importance_sampling_correction: true.")
