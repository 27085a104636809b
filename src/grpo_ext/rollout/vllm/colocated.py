"""The engine of `vllm_mode: colocate`: how TRL builds it, and how each row gets a seed."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from trl.generation import vllm_generation

from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.rollout.vllm.adapter_files import write_adapter
from grpo_ext.rollout.vllm.plugin import keep_expanded_prompts, keep_weights_in_place, whole_prompts
from grpo_ext.rollout.vllm.requester import Request

T = TypeVar("T")


@contextmanager
def engine_settings(dtype: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Let TRL build its engine with our dtype and options; on a CPU keep weights in place, threads and memory small.

    `options` replace those that TRL gives, such as `max_num_batched_tokens`.
    """
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {"dtype": dtype}
    keep_expanded_prompts()
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM must not bind the trainer's threads
        settings["enforce_eager"] = True
        keep_weights_in_place()
    threads, engine = torch.get_num_threads(), vllm_generation.LLM

    def build(**given: Any) -> Any:
        whole = whole_prompts(given.get("max_model_len"), options) if on_cpu else {}
        return engine(**{**given, **whole, **settings, **options})

    # TRL would quantize the engine as the policy is, and such an engine takes no weights that are pushed unpacked.
    with temporarily(vllm_generation, LLM=build, is_bitsandbytes_available=lambda: False):
        yield
    torch.set_num_threads(threads)


def each_seeded(
    generate: Callable[..., T], rows: list[Request], prompts: list[object], *, sampling_params: Any, **options: object
) -> T:
    """Generate by the engine's `generate` with the seed and the limit of each of the `rows`."""
    each = [sampling_params.clone() for _ in prompts]
    for params, row in zip(each, rows, strict=True):
        params.seed, params.max_tokens = row.seed, row.limit
    return generate(prompts, sampling_params=each, **options)


def expect_prompts(parts: T, prompts: list[list[int]]) -> T:
    """Return TRL's tuple of prompts, completions and more, whose prompts must be those that were given.

    Raises:
        ConfigError: vLLM has made other tokens of an image than the trainer's processor.
    """
    if cast(Any, parts)[0] != prompts:
        reason = "vLLM makes other tokens of an image than the processor, so it samples after another prompt"
        cure = "Save the processor as it is used beside the model, or set use_vllm: false."
        raise ConfigError([Problem("use_vllm", True, reason, cure)])
    return parts


def load_adapter(
    engine: Any, name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], before: Any = None
) -> object:
    """Load an adapter into an engine and return vLLM's request of it; the one `before` goes if this succeeds."""
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="grpo-ext-") as parent:
        write_adapter(folder := Path(parent, "adapter"), config, tensors)
        request = LoRARequest(name, before.lora_int_id + 1 if before else 1, str(folder))
        if not engine.add_lora(request):
            raise RuntimeError(f"vLLM has not loaded the adapter {name}")
    if before is not None:
        engine.remove_lora(before.lora_int_id)
    return request


def of_all_ranks(rows: list[Request], ranks: int, group: object) -> tuple[list[Request], int]:
    """Return all rows of an engine that `ranks` share, and the number of rows of each rank.

    They are the ranks', in order, filled up to as many as the largest has. Every rank must give a row the same seed,
    or the ranks sample different tokens for it.
    """
    if ranks == 1:
        return rows, len(rows)
    gathered: list[list[Request]] = [[]] * ranks
    torch.distributed.all_gather_object(gathered, rows, group=group)
    width = max(map(len, gathered))
    return [row for of_rank in gathered for row in of_rank + [Request([[0]], 1, 0)] * (width - len(of_rank))], width
