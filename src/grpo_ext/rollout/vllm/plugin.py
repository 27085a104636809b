"""Entry point that vLLM calls in each of its processes once grpo-ext is installed."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ext.rollout.vllm.gloo import BACKEND

CPU_TOKENS = 16384
"""Tokens of a step of vLLM on a CPU."""


def register() -> None:
    """Offer the weight-transfer engine `gloo`; let a server that takes weights keep them in place, and prompts."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # vLLM may load its plugins more than once
        WeightTransferEngineFactory.register_engine(
            BACKEND, "grpo_ext.rollout.vllm.engine", "GlooWeightTransferEngine"
        )
    takes_weights = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    by_file = any(argument.partition("=")[0] == "--config" for argument in sys.argv)  # the file may name the engine
    if takes_weights:
        keep_expanded_prompts()
    if takes_weights and (by_file or any(BACKEND in argument for argument in sys.argv)):  # --weight-transfer-config
        keep_weights_in_place()


def whole_prompts(longest: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an engine on a CPU beside `options`: it cuts no prompt of at most `longest` tokens in two.

    It fails where such a prompt has a seed: it takes back what the first part has drawn, which torch cannot on a CPU.
    """
    if "max_num_batched_tokens" in options:
        return {}
    whole = longest is not None and longest <= CPU_TOKENS
    return {"max_num_batched_tokens": CPU_TOKENS} | ({"enable_chunked_prefill": False} if whole else {})


def keep_weights_in_place() -> None:
    """On a CPU, let linear layers compute with the weights that a push writes.

    By default vLLM copies them into a kernel's own layout after loading and drops the originals. A push then fails
    (colocate) or leaves the tied head stale (reload). Without the copies the layers run by torch's own `linear`.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    os.environ["VLLM_ZENTORCH_WEIGHT_PREPACK"] = "0"


def keep_expanded_prompts() -> None:
    """Leave prompts as they are whose images have all their tokens already, as those of a trainer's processor have.

    By default vLLM takes the first of an image's tokens for the mark of the whole image, and samples after a prompt
    that has all its tokens once more.
    """
    from vllm.multimodal.processing import BaseMultiModalProcessor

    processors: Any = BaseMultiModalProcessor
    expanded = processors._apply_prompt_updates
    if expanded.__name__ == "_kept":  # vLLM may load its plugins more than once
        return

    def _kept(processor: Any, token_ids: list[int], updates: Mapping[str, Sequence[Any]]) -> Any:
        found = processor._find_mm_placeholders(token_ids, updates)
        if all(len(found.get(modality, ())) == len(of_items) for modality, of_items in updates.items()):
            return token_ids, found
        return expanded(processor, token_ids, updates)

    processors._apply_prompt_updates = _kept
