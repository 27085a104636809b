"""Refusals of a loaded model whose loss this trainer would not compute right."""

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.routes import replay_problems
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.packing.obstacles import Policy, adds_tokens, causal_lm
from grpo_ext.packing.routes import replay_obstacle


def check_pieces(args: GRPOExtConfig, *, aux_loss: bool) -> None:
    """Refuse to cut the micro-batches of a model whose loss has a term of all their rows.

    Raises:
        ConfigError: it has, and `micro_batch_tokens` is set.
    """
    if args.micro_batch_tokens is not None and aux_loss:
        reason = "the router's auxiliary loss depends on the rows that a forward computes"
        cure = "Set router_aux_loss_coef: 0, or unset micro_batch_tokens."
        raise ConfigError([Problem("micro_batch_tokens", args.micro_batch_tokens, reason, cure)])


def check_routes(args: GRPOExtConfig, model: Policy, *, sharded: bool) -> None:
    """Refuse `router_replay` where it is not exact; it runs a few tokens through the model.

    Args:
        args: the trainer's settings.
        model: the policy, unwrapped.
        sharded: whether the weights may be spread over processes.

    Raises:
        ConfigError: it is set, and not exact.
    """
    if args.router_replay is None:
        return
    if sharded:
        obstacle: str | None = "the weights may be spread over processes"
    elif adds_tokens(model):
        obstacle = "the adapter adds tokens before the prompt"
    else:
        obstacle = replay_obstacle(causal_lm(model))
    if found := [*replay_problems(args, obstacle)]:
        raise ConfigError(found)
