"""The rules of settings for vLLM."""

from collections.abc import Iterator

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.engine_options import ENGINE_OPTION_RULES
from grpo_ext.config.launch import world_size
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.errors import Problem


def quantized_problem(setting: str, value: object) -> Problem:
    """Return the problem of a setting that quantizes weights, which vLLM then cannot sample from."""
    return Problem(
        setting,
        value,
        "vLLM would get the packed weights of the quantized layers instead of their values, and sample from another "
        "model",
        "Set use_vllm: false, or train without quantization.",
        {"use_vllm": True},
    )


def leaves_packed(quantization: object) -> bool:
    """Return whether a quantization config, a mapping or an object, leaves the weights of a loaded model packed."""
    if quantization is None:
        return False
    options = as_mapping(quantization) or getattr(quantization, "__dict__", {})
    return not options.get("dequantize")


def _quantized(config: GRPOExtArguments) -> Iterator[Problem]:
    if not config.use_vllm:
        return
    given = as_mapping(config.model_init_kwargs)
    for name in ("load_in_4bit", "load_in_8bit"):
        if given.get(name):
            yield quantized_problem(f"model_init_kwargs.{name}", given[name])
    if leaves_packed(given.get("quantization_config")):
        yield quantized_problem("model_init_kwargs.quantization_config", f"{given['quantization_config']!r:.80}")


def _server(config: GRPOExtArguments) -> bool:
    return bool(config.use_vllm) and config.vllm_mode == "server"


def _colocated(config: GRPOExtArguments) -> bool:
    return bool(config.use_vllm) and config.vllm_mode == "colocate"


def _context(config: GRPOExtArguments) -> Iterator[Problem]:
    longest, completion = config.vllm_max_model_length, config.max_completion_length
    if _colocated(config) and longest is not None and completion is not None and longest <= completion:
        yield Problem(
            "vllm_max_model_length",
            longest,
            f"it is the length of prompt and completion together, and max_completion_length={completion} fills it",
            f"Set it above {completion}, by the length of the longest prompt.",
        )


VLLM_RULES: tuple[Rule, ...] = (
    *(_quantized, _context, *ENGINE_OPTION_RULES),
    Conflict(
        "vllm_weight_transfer use_cpu",
        lambda c: c.use_cpu and c.vllm_weight_transfer == "nccl" and _server(c),
        "NCCL needs a GPU on the trainer's side too",
        "Set 'auto' or 'gloo'.",
    ),
    Conflict(
        "vllm_server_timeout ddp_timeout",
        lambda c: _server(c) and world_size() > 1 and c.vllm_server_timeout >= c.ddp_timeout,
        "the other processes wait for the one that waits for the server, and give up after ddp_timeout",
        "Set it below {c.ddp_timeout}.",
    ),
    Conflict(
        "vllm_enable_sleep_mode use_cpu",
        lambda c: c.use_cpu and c.vllm_enable_sleep_mode and _colocated(c),
        "vLLM cannot put its engine to sleep on a CPU",
        "Remove it.",
    ),
    Conflict(
        "vllm_tensor_parallel_size",
        lambda c: _colocated(c) and world_size() % c.vllm_tensor_parallel_size,
        "it does not divide the {c.world_size} processes, which colocated engines share",
        "Set it to a divisor, or vllm_mode: server.",
    ),
)
"""Settings of colocated engines and of a server."""
