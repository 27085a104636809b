"""The loss of a micro-batch in parts, each with a forward and backward of its own (`micro_batch_tokens`)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError, Problem

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Engines whose processes exchange weights in each forward, so that all need as many."""


@contextmanager
def more_to_come(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Compute a part as transformers computes a micro-batch before the last of a step: gradients are only added up."""
    if not accelerator.sync_gradients:
        yield
        return
    each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    engine = accelerator.distributed_type == DistributedType.DEEPSPEED
    alone = nullcontext() if each or engine else accelerator.no_sync(model=model)
    with temporarily(accelerator.gradient_state, sync_gradients=False), alone:
        yield


def check_token_budget(args: GRPOExtConfig, *, aux_loss: bool) -> None:
    """Refuse to cut the micro-batches of a model whose loss has a term of all their rows.

    Raises:
        ConfigError: it has, and `micro_batch_tokens` is set.
    """
    if args.micro_batch_tokens is not None and aux_loss:
        reason = "the router's auxiliary loss depends on the rows that a forward computes"
        cure = "Set router_aux_loss_coef: 0, or unset micro_batch_tokens."
        raise ConfigError([Problem("micro_batch_tokens", args.micro_batch_tokens, reason, cure)])
