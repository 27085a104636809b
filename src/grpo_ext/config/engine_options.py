"""Options of vLLM's engine that a recipe passes through, `vllm_engine_kwargs`: which keys it may have."""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import Rule
from grpo_ext.errors import Problem

SETTINGS_OF = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "hf_config_path"), "model_name_or_path"),
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), "model_revision"),
    "trust_remote_code": "trust_remote_code",
    "dtype": "vllm_dtype",
    "seed": "seed",
    "max_model_len": "vllm_max_model_length",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "model_impl": "vllm_model_impl",
    "weight_transfer_config": "vllm_weight_transfer",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"), "vllm_push"),
    **dict.fromkeys(("lora_dtype", "lora_target_modules", "lora_modules", "default_mm_loras"), "vllm_push"),
    **dict.fromkeys(("max_logprobs", "return_sampling_mask"), "top_k"),
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "replay_routes"),
    **dict.fromkeys(("generation_config", "override_generation_config", "logits_processors"), "generation_kwargs"),
}
"""Options of the engine that a setting controls."""
_OF_PROCESSES = ("distributed_executor_backend", "pipeline_parallel_size", "nnodes", "node_rank")
"""Options of the processes of an engine; a colocated one runs in the trainer's."""
QUANTIZES = ("quantization", "quantization_config")
"""Options that quantize the weights of the engine."""
SPECULATION = (
    "drafted tokens have been measured on vLLM's CPU build only, which draws them at a wrong temperature "
    "(vllm#55005); on a GPU it is not known whether their log-probabilities are right"
)
"""Why speculative decoding is refused."""
IN_PLACE = "writes weights in place, and quantized layers have others"
"""Why an engine that is pushed to in place cannot be quantized."""
WATERMARK = "a watermark chooses tokens by a key, so samples are not drawn from the policy"
"""Why a watermark is refused."""


KEPT_ELSEWHERE = (
    "keys and values that are kept outside of the engine's own cache stay those of earlier weights after a push"
)
"""Why an engine whose cache spills over is refused: a reset of the prefix cache leaves the other store as it is."""
_ANOTHER_MODEL = "the engine would build another model than the policy", "Change the model's own config.json instead."
_REFUSED = {
    "logprobs_mode": ("the correction needs log-probabilities after temperature and truncation", "Remove it."),
    "speculative_config": (SPECULATION, "Remove it."),
    "watermark_config": (WATERMARK, "Remove it."),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size"), (KEPT_ELSEWHERE, "Remove it.")),
    **dict.fromkeys(("hf_overrides", "model_class_overrides"), _ANOTHER_MODEL),
}
"""Options that no recipe may pass, each with the reason and the cure."""


def given_options(config: GRPOExtArguments) -> Mapping[str, Any]:
    """Return the options that a recipe passes to the engine."""
    return as_mapping(config.vllm_engine_kwargs)


def _options(config: GRPOExtArguments) -> Iterator[Problem]:
    for key, value in given_options(config).items():
        if found := _refused(key, value):
            yield Problem(f"vllm_engine_kwargs.{key}", value, *found)


def _refused(key: str, value: object) -> tuple[str, str] | None:
    """Return why no recipe may pass this option, and the cure."""
    if setting := SETTINGS_OF.get(key):
        return f"{setting} controls it", f"Set {setting} instead."
    if key == "hf_overrides" and isinstance(value, Mapping) and value.keys() <= {"architectures"}:
        return None  # the class of the same model in vLLM
    return _REFUSED.get("speculative_config" if key.startswith("spec_") else key)


def _options_of_a_mode(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse options that an engine in the trainer's processes cannot have."""
    for key, value in given_options(config).items():
        of_processes = key in _OF_PROCESSES or key.startswith("data_parallel_")
        if of_processes and config.vllm_mode == "colocate":
            reason = "a colocated engine runs in the trainer's processes"
            yield Problem(f"vllm_engine_kwargs.{key}", value, reason, "Remove it, or set vllm_mode: server.")
        if key in QUANTIZES and config.vllm_mode == "colocate":
            cure = "Remove it, or set vllm_mode: server: on GPUs a server quantizes each push again."
            yield Problem(f"vllm_engine_kwargs.{key}", value, f"a push to a colocated engine {IN_PLACE}", cure)


ENGINE_OPTION_RULES: tuple[Rule, ...] = (_options, _options_of_a_mode)
"""Options that a setting controls, or with which vLLM would sample from another model than the policy."""
