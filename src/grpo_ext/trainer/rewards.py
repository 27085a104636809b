"""`reward_funcs` as a trainer is handed it: names, paths, mappings and functions, checked as a recipe's are."""

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.composition import parse
from grpo_ext.rewards.runtime import Component, Runtime
from grpo_ext.rewards.signatures import callable_name

logger = logging.getLogger(__name__)


def ready(
    reward_funcs: Any,
    args: GRPOExtConfig,
    workers: int | None,
    train_dataset: Any,
    earned: list[Any],
    problems: list[str],
) -> tuple[list[Any], GRPOExtConfig]:
    """TRL's `reward_funcs`: functions and models as they are, all else scored as a recipe has it; and their weights.

    `earned`, what environments pay, is one more. What is wrong with them is added to `problems`.
    """
    if earned and not reward_funcs:
        return earned, args
    if isinstance(reward_funcs, str | Mapping) or callable(reward_funcs):
        reward_funcs = [reward_funcs]
    entries = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else reward_funcs
    specs, wrong = parse(entries, args.reward_weights)
    found = [str(problem) for problem in wrong]
    if isinstance(entries, list):
        found += [f"reward_funcs[{i}]={_shown(f)}: {p}" for i, f in enumerate(entries) for p in _calls(f)]
    if found:
        problems += found
        return [], args
    own = [spec for entry, spec in zip(entries, specs, strict=True) if not callable(entry)]
    columns = getattr(train_dataset, "column_names", None)  # a stream may not say
    for problem in absences(own, columns) if columns else ():
        logger.warning(str(problem))
    failures = Path(args.output_dir or ".") / "reward_failures"
    runtime = Runtime(own, workers=workers, failures=failures, seed=args.seed)
    functions = iter(runtime.functions)
    weights = [spec.weight for spec in specs]
    if args.reward_weights is None and any(weight != 1.0 for weight in weights):
        args = copy.copy(args)  # the caller's may be used again, with other rewards
        args.reward_weights = weights
    if earned and args.reward_weights is not None:
        args = copy.copy(args)
        args.reward_weights = [*args.reward_weights, 1.0]  # type: ignore[misc]
    return [*(entry if callable(entry) else next(functions) for entry in entries), *earned], args


def _shown(entry: Any) -> str:
    return callable_name(entry) if callable(entry) else f"{entry!r}"


def _calls(function: Any) -> Iterator[str]:
    """Why TRL could not call a function of the user's own."""
    if isinstance(function, Mapping) and isinstance(function.get("func"), nn.Module):
        yield "a loaded model is scored by TRL. Let it stand alone in the list; its weight goes into reward_weights."
    if not callable(function) or isinstance(function, nn.Module | Component):
        return
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        yield "it does not take **kwargs, but TRL passes it every dataset column. Add **kwargs."
