"""The rules of settings for vLLM."""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.config.broken import Rule
from grpo_ext.config.launch import world_size
from grpo_ext.config.mappings import as_mapping
from grpo_ext.objective.losses import find


def quantized_problem(setting: str) -> str:
    """Return why weights that `setting` quantizes cannot be sampled from by vLLM, and the cure."""
    return (
        f"{setting} with use_vllm: vLLM would be sent the packed weights of the quantized layers instead of their "
        "values, and sample from another model. Set use_vllm: false, or train without quantization."
    )


def leaves_packed(quantization: Any) -> bool:
    """Whether a quantization config, a mapping or an object, leaves weights packed that a model has loaded."""
    if quantization is None:
        return False
    options = as_mapping(quantization) or getattr(quantization, "__dict__", {})
    return not options.get("dequantize")


def _quantized(given: Mapping[str, Any]) -> Iterator[str]:
    """Model arguments that quantize what they load."""
    for name in ("load_in_4bit", "load_in_8bit"):
        if given.get(name):
            yield quantized_problem(f"model_init_kwargs.{name}={given[name]!r}")
    if leaves_packed(config := given.get("quantization_config")):
        yield quantized_problem(f"model_init_kwargs.quantization_config={config!r:.80}")


def _quantized_arguments(config: Any) -> Iterator[str]:
    if config.use_vllm:
        yield from _quantized(as_mapping(config.model_init_kwargs))


def _clip_bounds(config: Any) -> Iterator[str]:
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        yield (
            f"vllm_importance_sampling_clip_min={low} is not below "
            f"vllm_importance_sampling_clip_max={high}. Swap them."
        )


def _no_bounds(config: Any) -> Iterator[str]:
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    mode, bounds = config.vllm_importance_sampling_mode, (low, high, config.vllm_importance_sampling_cap)
    if config.vllm_importance_sampling_correction and all(bound is None for bound in bounds):
        yield (
            f"vllm_importance_sampling_mode={mode!r} {mode.rpartition('_')[2]}s what lies outside of its bounds, but "
            "neither vllm_importance_sampling_clip_min nor vllm_importance_sampling_clip_max is set. Set one."
        )


def _sampler_level(config: Any) -> Iterator[str]:
    mode = config.vllm_importance_sampling_mode
    corrected = config.use_vllm and config.vllm_importance_sampling_correction
    level = mode.partition("_")[0]
    if corrected and level not in (levels := find(config.loss_type).sampler_levels):
        yield (
            f"vllm_importance_sampling_mode={mode!r}: {config.loss_type} takes the correction per {levels[0]}. "
            f"Set '{levels[0]}_truncate' or '{levels[0]}_mask'."
        )


def _is(config: Any, mode: str) -> bool:
    return bool(config.use_vllm) and config.vllm_mode == mode


def _transfer(config: Any) -> Iterator[str]:
    if config.use_cpu and config.vllm_weight_transfer == "nccl" and _is(config, "server"):
        yield "vllm_weight_transfer='nccl' needs a GPU on this side too, and use_cpu is set. Set 'auto' or 'gloo'."


def _patience(config: Any) -> Iterator[str]:
    if _is(config, "server") and world_size() > 1 and config.vllm_server_timeout >= config.ddp_timeout:
        yield (
            f"vllm_server_timeout={config.vllm_server_timeout:g}: the other processes wait for the one that waits for "
            f"the server, and give up after ddp_timeout={config.ddp_timeout} s. Set it below that."
        )


def _sleep(config: Any) -> Iterator[str]:
    if config.use_cpu and config.vllm_enable_sleep_mode and _is(config, "colocate"):
        yield "vllm_enable_sleep_mode=True: vLLM cannot put its engine to sleep on a CPU. Remove it."


def _tensor_parallel(config: Any) -> Iterator[str]:
    parallel, processes = config.vllm_tensor_parallel_size, world_size()
    if _is(config, "colocate") and processes % parallel:
        yield (
            f"vllm_tensor_parallel_size={parallel} does not divide the number of processes, {processes}: colocated "
            "engines share the training processes. Set it to a divisor, or vllm_mode: server."
        )


def _context(config: Any) -> Iterator[str]:
    longest = config.vllm_max_model_length
    if _is(config, "colocate") and longest is not None and longest <= config.max_completion_length:
        yield (
            f"vllm_max_model_length={longest} holds prompt and completion, but max_completion_length="
            f"{config.max_completion_length} alone fills it. Set it above {config.max_completion_length}, by the "
            "length of the longest prompt."
        )


VLLM_RULES: tuple[Rule, ...] = (
    *(_quantized_arguments, _transfer, _patience, _sleep, _tensor_parallel, _context),
    *(_clip_bounds, _no_bounds, _sampler_level),
)
"""Settings of colocated engines, of a server, and of the correction of the sampler."""
