"""TRL's GRPO trainer, imported without vLLM.

Where vLLM is installed TRL imports it together with its trainer: 4 s and 200 MB in every process, also in runs that
sample by transformers. Here TRL does not find vLLM while its trainer is imported. The TRL modules that use vLLM are
then removed from `sys.modules`, so their next import is complete.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

from grpo_ext.config.engine_options import given_options
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import scores_over_support
from grpo_ext.config.vllm import whole_weights

_VLLM_USERS = ("trl.generation", "trl.generation.vllm_client", "trl.generation.vllm_generation")
_hidden = not sys.modules.keys() & {"vllm", *_VLLM_USERS} and find_spec("vllm") is not None
if _hidden:
    sys.modules["vllm"] = None  # type: ignore[assignment]  # Python's way to make an import fail
try:
    from trl.trainer import grpo_trainer
finally:
    if _hidden:
        del sys.modules["vllm"]

GRPOTrainer = grpo_trainer.GRPOTrainer
__all__ = ["GRPOTrainer", "grpo_trainer", "with_our_generation"]


def _stock_generation(*args: Any, **kwargs: Any) -> object:
    """Make TRL's `VLLMGeneration` for a stock trainer in this process."""
    from trl.generation.vllm_generation import VLLMGeneration

    return VLLMGeneration(*args, **kwargs)


if _hidden:
    for _name in _VLLM_USERS:
        del sys.modules[_name]
    vars(grpo_trainer)["VLLMGeneration"] = _stock_generation


def with_our_generation(args: GRPOExtConfig) -> AbstractContextManager[None]:
    """Let a trainer that is built in this context sample by our `Generation` if `use_vllm` is set."""
    if not args.use_vllm:
        return nullcontext()
    from grpo_ext.rollout.vllm.generation import Generation

    ours = partial(
        Generation,
        weight_transfer=args.vllm_weight_transfer,
        dtype=args.sampler_dtype,
        engine_kwargs=given_options(args),
        with_support=scores_over_support(args),
        push=args.vllm_push,
        whole=whole_weights(args),
        ahead=args.rollout_ahead,
        with_routes=bool(args.replay_routes),
    )
    return temporarily(grpo_trainer, VLLMGeneration=ours)
