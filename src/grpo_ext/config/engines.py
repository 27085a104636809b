"""Ways of sharding a model under which a gradient has not been shown to be one process's."""

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.utils import parse_flag_from_env

from grpo_ext.errors import ABSENT, ConfigError, Problem

if TYPE_CHECKING:  # trl takes seconds to import
    from grpo_ext.config.arguments import GRPOExtArguments
    from grpo_ext.config.rules import Rule

_SPREAD = {
    "tp_size": "tensor parallelism",
    "cp_size": "context parallelism",
    "sp_size": "sequence parallelism (DeepSpeed Ulysses)",
}
"""Sizes of accelerate's `ParallelismConfig` beyond those of data parallelism."""
_CURE = "Shard weights by FSDP2 (--accelerate_config fsdp2) or DeepSpeed ZeRO (zero3), which are tested"


def _parallelism(config: "GRPOExtArguments") -> Iterator[Problem]:
    for name, size in _sizes(config).items():
        if size > 1:
            reason = f"{_SPREAD[name]} splits one row over several processes, and each would count it as its own"
            yield Problem(f"parallelism_config.{name}", size, reason, f"{_CURE}, and leave {name} at 1.")


def _launched(_: "GRPOExtArguments") -> Iterator[Problem]:
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and (version := os.environ.get("FSDP_VERSION", "1")) == "1":
        yield Problem("FSDP_VERSION", version, "gradients of FSDP 1 are untested", f"{_CURE}: fsdp_version: 2.")


def _tensor_parallel(config: "GRPOExtArguments") -> Iterator[Problem]:
    init_kwargs = config.model_init_kwargs
    if isinstance(init_kwargs, Mapping) and (plan := init_kwargs.get("tp_plan")) is not None:
        yield Problem(
            "model_init_kwargs.tp_plan", plan, "it splits each row over processes", f"{_CURE}, and remove it."
        )


ENGINE_RULES: "tuple[Rule, ...]" = (_parallelism, _launched, _tensor_parallel)
"""Refusals of engines that split one row over processes, where each would count it as its own."""


def check_started(distributed_type: str, reference: bool, model: Any = None) -> None:
    """Refuse an engine that was asked for and is not there, or that cannot train what it was given.

    Raises:
        ConfigError: accelerate sets up FSDP only beside GPUs, and on a CPU would silently train by plain DDP; or TRL
            has sharded a `reference` model whose weights only the first process has loaded; or FSDP cannot shard or
            save the adapter of `model`.
    """
    if reference and distributed_type == "FSDP" and parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        reason = (
            "only the first process loads weights, and TRL never gives those of the reference model (beta > 0) to the "
            "others, so that the KL is one to noise"
        )
        raise ConfigError([Problem("fsdp_cpu_ram_efficient_loading", True, reason, "Set it to false.")])
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and distributed_type != "FSDP":
        raise ConfigError([fsdp_on_cpu(f"the launch asks for FSDP, and accelerate has started {distributed_type}")])
    if distributed_type == "FSDP" and (problems := [*_unsharded(model)]):
        raise ConfigError(problems)


def _unsharded(model: Any) -> Iterator[Problem]:
    """Yield what FSDP2 cannot do with the adapters of a model."""
    cure = "Launch by DDP or DeepSpeed ZeRO (--accelerate_config ddp, zero2), or train another adapter."
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning:
            reason = "PEFT saves what it computes from the whole of its weights, which FSDP2 has split"
            yield Problem("peft_type", adapter.peft_type.value, reason, cure)
            continue
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        tied = model.config.get_text_config(decoder=True).tie_word_embeddings
        if tied and any(hasattr(embedding, "modules_to_save") for embedding in ends):
            reason = (
                "embedding and head are one weight (tie_word_embeddings), and FSDP2 cannot split a trained copy of it"
            )
            yield Problem("modules_to_save", adapter.modules_to_save, reason, cure)


def fsdp_on_cpu(setting: str) -> Problem:
    """Return the problem of FSDP without a GPU."""
    return Problem(
        setting, ABSENT, "accelerate has FSDP on GPUs only", "On a CPU launch by --accelerate_config cpu_ddp."
    )


def _sizes(config: "GRPOExtArguments") -> dict[str, int]:
    """Return the sizes in the config, else those that `accelerate launch` announces."""
    if config.parallelism_config is not None:
        return {name: getattr(config.parallelism_config, name, None) or 1 for name in _SPREAD}
    if not parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return {}
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in _SPREAD}
