"""`micro_batch_tokens`: what it excludes."""

from collections.abc import Iterator

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import Conflict, Rule, columns_of_images, plain
from grpo_ext.errors import Problem

PIECE_RULES: tuple[Rule, ...] = (
    Conflict(
        "micro_batch_tokens loss_aggregation",
        lambda c: c.micro_batch_tokens is not None and not c.objective.additive,
        "loss_aggregation {c.objective.aggregation!r} depends on which rows are in a micro-batch",
        "Set loss_aggregation: token-mean, or unset micro_batch_tokens.",
    ),
    Conflict(
        "micro_batch_tokens top_entropy_quantile",
        lambda c: c.micro_batch_tokens is not None and c.top_entropy_quantile < 1,
        "the quantile is over the tokens of a micro-batch",
        "Set top_entropy_quantile: 1.0, or unset micro_batch_tokens.",
    ),
    Conflict(
        "micro_batch_tokens loss_defaults",
        lambda c: c.micro_batch_tokens is not None and c.loss_defaults == "trl" and _has_bonus(c),
        "stock TRL's entropy bonus is a mean over a micro-batch",
        "Set loss_defaults: paper, or unset micro_batch_tokens.",
    ),
    Conflict(
        "micro_batch_tokens optim",
        lambda c: c.micro_batch_tokens is not None and plain(c.optim) in ("lomo", "adalomo"),
        "it updates the weights in its backward pass, before the last piece is computed",
        "Choose another optimizer, or unset micro_batch_tokens.",
    ),
)


def _has_bonus(config: GRPOExtArguments) -> bool:
    return bool(config.entropy_coef or config.use_adaptive_entropy)


def image_problems(config: GRPOExtArguments, columns: object) -> Iterator[Problem]:
    """Yield the problem of a dataset whose `columns` hold images."""
    if config.micro_batch_tokens is not None and columns_of_images(columns):
        reason = "rows with images are not cut by tokens yet"
        cure = "Unset it, and lower per_device_train_batch_size."
        yield Problem("micro_batch_tokens", config.micro_batch_tokens, reason, cure)
