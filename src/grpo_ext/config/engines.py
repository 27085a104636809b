"""Ways of spreading a model over processes under which a gradient has not been shown to be one process's."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.utils import parse_flag_from_env

from grpo_ext.config.broken import Rule
from grpo_ext.errors import ConfigError

SPREAD = {
    "tp_size": "tensor parallelism",
    "cp_size": "context parallelism",
    "sp_size": "sequence parallelism (DeepSpeed Ulysses)",
}
"""Sizes of accelerate's `ParallelismConfig` beyond those of data parallelism."""
CURE = "Spread weights by FSDP2 (--accelerate_config fsdp2) or DeepSpeed ZeRO (zero3), which are tested"


def engine_problems(config: Any) -> Iterator[str]:
    """Engines that make one row the work of several processes, by the recipe or by `accelerate launch`.

    Batches, denominators and metrics count each process's rows as its own.
    """
    for rule in ENGINE_RULES:
        yield from rule(config)


def _parallelism(config: Any) -> Iterator[str]:
    for name, size in _sizes(config).items():
        if size > 1:
            yield (
                f"parallelism_config={name} {size}: {SPREAD[name]} makes one row the work of several processes, each "
                f"of which would be counted with rows of its own. {CURE}, and leave {name} at 1."
            )


def _launched(config: Any) -> Iterator[str]:
    if parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        yield f"the launch asks for Megatron-LM (tensor and pipeline parallelism), which TRL cannot train by. {CURE}."
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") == "1":
        yield f"the launch asks for FSDP 1, of which no gradient has been shown equal. {CURE}: fsdp_version: 2."


def _tensor_parallel(config: Any) -> Iterator[str]:
    given = config.model_init_kwargs
    if isinstance(given, Mapping) and given.get("tp_plan") is not None:
        yield f"model_init_kwargs.tp_plan={given['tp_plan']!r} spreads each row over processes. {CURE}, and remove it."


ENGINE_RULES: tuple[Rule, ...] = (_parallelism, _launched, _tensor_parallel)


def check_started(distributed_type: str, reference: bool) -> None:
    """Refuse an engine that was asked for and is not there.

    Raises:
        ConfigError: accelerate sets FSDP beside GPUs only, and on a CPU would train by plain DDP in silence; or TRL
            has shared out a `reference` model whose weights only the first process has loaded.
    """
    if reference and distributed_type == "FSDP" and parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ConfigError(
            [
                "fsdp_cpu_ram_efficient_loading=true: only the first process loads weights, and TRL never gives those "
                "of the reference model (beta > 0) to the others, so that the KL is one to noise. Set it to false."
            ]
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and distributed_type != "FSDP":
        raise ConfigError([fsdp_on_cpu(f"the launch asks for FSDP, and accelerate has started {distributed_type}")])


def fsdp_on_cpu(found: str) -> str:
    """Return the sentence for FSDP where there is no GPU."""
    return f"{found}: accelerate has FSDP on GPUs only. On a CPU launch by --accelerate_config cpu_ddp."


def _sizes(config: Any) -> dict[str, int]:
    """As the config has them, else as `accelerate launch` announces them."""
    if config.parallelism_config is not None:
        return {name: getattr(config.parallelism_config, name, None) or 1 for name in SPREAD}
    if not parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return {}
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in SPREAD}
