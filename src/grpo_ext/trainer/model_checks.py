"""Refusals of a loaded model whose loss this trainer would not compute right."""

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, Problem


def check_pieces(args: GRPOExtConfig, *, aux_loss: bool) -> None:
    """Refuse to cut the micro-batches of a model whose loss has a term of all their rows.

    Raises:
        ConfigError: it has, and `micro_batch_tokens` is set.
    """
    if args.micro_batch_tokens is not None and aux_loss:
        reason = "the router's auxiliary loss depends on the rows that a forward computes"
        cure = "Set router_aux_loss_coef: 0, or unset micro_batch_tokens."
        raise ConfigError([Problem("micro_batch_tokens", args.micro_batch_tokens, reason, cure)])
