"""How a trainer's rows are scored: the forward of its settings, and the gradient of a micro-batch in parts."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.routes import route_problem
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.packing.dropout import active_dropout, switch_dropout_off
from grpo_ext.packing.forward_mode import count_positions
from grpo_ext.packing.lm_head import gather_trained_head
from grpo_ext.packing.obstacles import adds_tokens, causal_lm, forward_obstacle, name_body, takes_positions
from grpo_ext.packing.policy import PrefixSharing, Scores
from grpo_ext.packing.routes import replay_obstacle
from grpo_ext.packing.scorer import Scorer
from grpo_ext.packing.token_budget import TokenBudget
from grpo_ext.trainer.batches import forward_only

logger = logging.getLogger(__name__)

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


def scorer_of(
    model: Any,
    reference: Any,
    args: GRPOExtConfig,
    accelerator: Accelerator,
    stock: Callable[..., Scores],
    *,
    aux_loss: bool,
    uneven: bool,
) -> Scorer:
    """Return what scores the tokens of completions; switch dropout off, if configured.

    `uneven`: processes may have rows that cannot be packed alike.

    Raises:
        ConfigError: the settings ask for a forward that the model or its loss does not allow.
    """
    for one in (model, reference):
        if one is not None:
            name_body(causal_lm(accelerator.unwrap_model(one)))
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        gather_trained_head(causal_lm(model))
    if args.dropout_disabled:
        switch_dropout_off(model)
    elif dropout := active_dropout(model):
        logger.warning(f"dropout is active in {', '.join(dropout)}: rollouts and the loss see different networks.")
    if adds_tokens(model) and takes_positions(causal_lm(model)):
        count_positions(causal_lm(model))  # in rollouts too, where PEFT counts padding behind its tokens
    if args.replay_routes and (obstacle := replay_obstacle(causal_lm(model))):
        raise ConfigError([route_problem(obstacle)])
    sharing = PrefixSharing(args.prefix_setting, model, further=forward_obstacle(args))
    if args.prefix_setting == "true" and not sharing.possible:
        raise ConfigError([sharing.problem()])

    def largest(number: Any) -> Any:
        return accelerator.gather(torch.tensor([number], device=accelerator.device)).max().item()

    several, sharded = accelerator.num_processes > 1, accelerator.distributed_type in SHARDED
    if several and uneven:
        sharing.agreed = largest
    if args.micro_batch_tokens is not None and aux_loss:
        reason = "the router's auxiliary loss depends on the rows that a forward computes"
        cure = "Set router_aux_loss_coef: 0, or unset micro_batch_tokens."
        raise ConfigError([Problem("micro_batch_tokens", args.micro_batch_tokens, reason, cure)])
    agreed = largest if several and (sharded or uneven) else None
    limit = None if (most := args.micro_batch_tokens) is None else TokenBudget(most, sharing, agreed)
    return Scorer(stock, sharing, accelerator, partial(forward_only, model, args), limit, args.temperature)
