"""Settings that would be accepted and ignored, or that defeat each other: refused, or warned of where rarely meant."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from grpo_ext.config.broken import Rule
from grpo_ext.config.settings import SETTINGS

# Refused.


def _unused(name: str, config: Any) -> Iterator[str]:
    if is_set(config, name):
        yield f"{name}={getattr(config, name)!r} has no meaning in GRPO: {SETTINGS[name].unused}. Remove it."


def _evaluation(config: Any) -> Iterator[str]:
    if config.do_eval and config.eval_strategy == "no":
        yield "do_eval=True with eval_strategy='no': it evaluates nothing. Remove it, or set eval_strategy: steps."


def _prediction(config: Any) -> Iterator[str]:
    if config.do_predict:
        yield "do_predict=True: there is no prediction after GRPO. Remove it."


def _reference(config: Any) -> Iterator[str]:
    if config.sync_ref_model and config.beta == 0.0:
        yield "sync_ref_model=True: with beta=0.0 there is no reference model. Set beta > 0 or remove it."


def _columns(config: Any) -> Iterator[str]:
    if config.remove_unused_columns:
        yield (
            "remove_unused_columns=True would take away the columns that rewards read, such as solution. "
            "Set remove_unused_columns: false."
        )


def _batch_size(config: Any) -> Iterator[str]:
    if config.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True: the generation batch must hold whole groups, which a batch size halved on "
            "the way would break. Remove it, and lower per_device_train_batch_size by hand."
        )


def _completions_to_the_hub(config: Any) -> Iterator[str]:
    if config.log_completions_hub_repo is not None and not config.log_completions:
        yield (
            f"log_completions_hub_repo={config.log_completions_hub_repo!r}: without completions in the log there is "
            "nothing to upload. Set log_completions: true, or remove it."
        )


def _completions_of_a_replay(config: Any) -> Iterator[str]:
    if config.replay_batches is not None and config.log_completions:
        yield "log_completions=True: with replay_batches nothing is generated. Set log_completions: false."


IDLE_RULES: tuple[Rule, ...] = (
    *(partial(_unused, name) for name, row in SETTINGS.items() if row.unused),
    *(_evaluation, _prediction, _reference, _columns, _batch_size),
    *(_completions_to_the_hub, _completions_of_a_replay),
)
"""Settings without a meaning here, and settings that another one rules out."""


def is_set(config: Any, name: str) -> bool:
    """Whether a field differs from its default."""
    field = next(f for f in dataclasses.fields(config) if f.name == name)
    make: Any = field.default_factory
    default = make() if field.default is dataclasses.MISSING else field.default
    return bool(getattr(config, name) != default)
