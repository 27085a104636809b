"""Refusals of a loaded model whose loss this trainer would not compute right."""

from transformers import PreTrainedModel

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.packing.obstacles import scale_of_trl_only


def check_scale(base: PreTrainedModel) -> None:
    """Refuse a model whose logits TRL's LM head scales and the model itself does not.

    Raises:
        ConfigError: it is one.
    """
    if (scale := scale_of_trl_only(base)) is not None:
        reason = f"TRL's LM head multiplies logits by text_config.logit_scale={scale:g}, which this model does not"
        cure = "Set text_config.logit_scale to 1.0 in its config, which changes nothing else."
        raise ConfigError([Problem("model", type(base).__name__, reason, cure)])


def check_pieces(args: GRPOExtConfig, *, aux_loss: bool) -> None:
    """Refuse to cut the micro-batches of a model whose loss has a term of all their rows.

    Raises:
        ConfigError: it has, and `micro_batch_tokens` is set.
    """
    if args.micro_batch_tokens is not None and aux_loss:
        reason = "the router's auxiliary loss depends on the rows that a forward computes"
        cure = "Set router_aux_loss_coef: 0, or unset micro_batch_tokens."
        raise ConfigError([Problem("micro_batch_tokens", args.micro_batch_tokens, reason, cure)])
