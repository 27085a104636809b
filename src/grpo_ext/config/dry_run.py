"""Call the user's functions once on a few tokens: what would fail after the first rollouts fails at once."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.errors import Problem
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations, step_totals
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.estimate import BrokenRule
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.objective import ESTIMATOR_INPUTS, FORWARD_INPUTS, KL_INPUTS, MARK_INPUTS, TENSORS, Objective
from grpo_ext.objective.options import asked_for, bind
from grpo_ext.registry import did_you_mean

T = TypeVar("T")
ROWS, TIME = 2, 3
PER_TOKEN = ((ROWS, TIME), (ROWS, 1))


class _Refused(Exception):
    """Carries a problem out of the dry run."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def dry_run_problems(config: GRPOExtArguments) -> list[Problem]:
    """Return what is wrong with the functions that a sound config names: their arguments, shapes, gradients."""
    objective = config.objective
    own = _has_own(objective)
    if not own and not objective.sees_tokens:
        return []
    if problems := list(_arguments(objective)):
        return problems
    try:
        advantages = _advantages(objective, config.num_generations or 2)
        if own:
            _loss(objective, config)
        if advantages is not None and advantages.dim() == 3:
            _token_credit(objective, config)
    except _Refused as refused:
        return [refused.problem]
    return []


def dry_run_warnings(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield whether one reward of None would end the run."""
    try:
        if _has_own(config.objective):
            _advantages(config.objective, config.num_generations or 2, unscored=True)
    except _Refused as refused:
        p = refused.problem
        yield Problem(p.field, p.value, p.reason, f"{p.cure} One reward of None would end the run.".lstrip(), p.beside)


def _has_own(objective: Objective) -> bool:
    """Return whether any of the functions is a user's; the package's own are tested."""
    own = (estimators[objective.advantage], kl_estimators[objective.kl], aggregations[objective.aggregation])
    return any(not f.__module__.startswith("grpo_ext.") for f in (objective.row.function, *own))


class _Function(NamedTuple):
    """A function that a setting names, or a part of it."""

    setting: str
    value: str
    part: str = "it"

    def refused(self, reason: str, cure: str) -> Problem:
        return Problem(self.setting, self.value, f"{self.part} {reason}", cure)


def _arguments(objective: Objective) -> Iterator[Problem]:
    """Yield unknown names before the star; the first of an estimator are the rewards."""
    row, loss = objective.row, _Function("loss_type", objective.loss_type)
    estimator = _Function("advantage_estimator", objective.advantage)
    for name, function, offered, skipped in (
        (loss, row.function, TENSORS, 0),
        (loss._replace(part="clip_regions"), row.clip_regions, TENSORS, 0),
        (loss._replace(part="metrics"), row.metrics, TENSORS, 0),
        (loss._replace(part="marks"), row.marks, MARK_INPUTS, 0),
        (_Function("kl_estimator", objective.kl), kl_estimators[objective.kl], KL_INPUTS, 0),
        (estimator, estimators[objective.advantage], ESTIMATOR_INPUTS, 1),
    ):
        for argument in asked_for(function)[skipped:] if function is not None else ():
            if argument not in offered:
                cure = f"{did_you_mean(argument, offered)} Write an option after the star."
                yield name.refused(f"asks for {argument!r}, which is not one of its inputs", cure)


def _called(name: _Function, function: Callable[[], T]) -> T:
    try:
        return function()
    except _Refused:
        raise
    except Exception as error:  # a user's function may raise anything
        reason = f"raised {type(error).__name__}: {str(error).rstrip('.')}"
        raise _Refused(name.refused(reason, "Correct the function.")) from error


def _pure(name: _Function, tensors: Mapping[str, Any], function: Callable[[], T]) -> T:
    """Return what the function returns, which may not change its inputs: other parts of the loss read them."""
    versions = {key: tensor._version for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    result = _called(name, function)
    for key, version in versions.items():
        if tensors[key]._version != version:
            cure = f"Write {key} = {key} + ... instead of {key} += ..., and no method that ends in _."
            reason = f"changes its input {key!r} in place, which other parts of the loss read"
            raise _Refused(name.refused(reason, cure))
    return result


def _shaped(name: _Function, result: object, *shapes: tuple[int, ...]) -> Tensor:
    """Return a tensor that has one of these shapes."""
    if isinstance(result, Tensor) and tuple(result.shape) in shapes:
        return result
    what = list(result.shape) if isinstance(result, Tensor) else f"a {type(result).__name__}"
    expected = " or ".join(str(list(shape)) for shape in shapes)
    reason = f"returned {what} for {ROWS} completions of {TIME} tokens"
    raise _Refused(name.refused(reason, f"Return a tensor {expected}."))


def _advantages(objective: Objective, group: int, *, unscored: bool = False) -> Tensor | None:
    """Return the estimator's advantages, or None where it is not defined for rewards of 0 and 1."""
    rewards = torch.zeros(2, group, 1, dtype=torch.float64)
    rewards[0, 0] = rewards[1, 1:] = 1.0
    if unscored:
        rewards[:, -1] = torch.nan
    if "columns" in objective.estimator_inputs:  # the rows are not known here
        return None
    tokens = _token_inputs(objective, group) if objective.sees_tokens else {}
    if objective.sees_turns:
        tokens |= {name: torch.zeros(2, group, n, dtype=torch.long) for name, n in (("turns", TIME), ("states", 1))}
        tokens["turn_rewards"] = torch.zeros(2, group, 1, 1, dtype=torch.float64)
    if objective.kl_in_reward:
        tokens["kl"] = torch.zeros(2, group, TIME, dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)

    def estimated() -> Tensor | None:
        try:
            return objective.advantages(rewards, weights, None, lambda *_: None, **tokens)
        except BrokenRule as error:
            raise _Refused(error.problem) from error
        except ValueError:
            return None

    return _called(_Function("advantage_estimator", objective.advantage), estimated)


def _token_inputs(objective: Objective, group: int) -> dict[str, Tensor]:
    """Return what the estimator sees of tokens, for two groups."""
    shape = (2, group, TIME)
    tokens = {"mask": torch.ones(shape, dtype=torch.long), "completion_ids": torch.arange(TIME).expand(shape)}
    named = (*FORWARD_INPUTS, "sampling_per_token_logps")
    tokens |= {name: torch.full(shape, 0.5 if name == "entropies" else -1.0, dtype=torch.float64) for name in named}
    return {name: values for name, values in tokens.items() if name in {"mask", *objective.generation_inputs}}


def _loss(objective: Objective, config: GRPOExtArguments) -> None:
    """Compute surrogate, KL, aggregation and metrics, in the order of the trainer's loss."""
    logps = torch.full((ROWS, TIME), -1.0).requires_grad_()
    inputs = {
        "advantages": torch.tensor([1.0, -1.0]),
        "old_per_token_logps": torch.full((ROWS, TIME), -1.1),
        "ref_per_token_logps": torch.full((ROWS, TIME), -1.2),
    }
    if (sampler := _sampler(config)) is not None:
        inputs["importance_sampling_ratio"] = sampler
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    tensors = objective.tensors(logps, inputs, mask)
    row = _Function("loss_type", objective.loss_type)
    surrogate = bind(objective.row.function, tensors)
    loss = _shaped(row, _pure(row, tensors, lambda: surrogate(**objective.options)), *PER_TOKEN)
    if not loss.requires_grad:
        cure = "Compute it from them, without detach() or no_grad()."
        raise _Refused(row.refused("has no gradient in per_token_logps", cure))
    kl, estimator = _Function("kl_estimator", objective.kl), kl_estimators[objective.kl]
    if objective.kl_in_loss:
        loss = loss + _shaped(kl, _pure(kl, tensors, bind(estimator, tensors)), *PER_TOKEN)
    elif objective.kl_in_reward:
        kl_inputs = {"log_ref_ratio": torch.full((ROWS, TIME), -0.1), "mask": mask}
        _shaped(kl, _called(kl, bind(estimator, kl_inputs)), PER_TOKEN[0])
    loss_inputs = (loss, mask, step_totals([mask]))
    aggregate = partial(aggregations[objective.aggregation], *loss_inputs, **objective.aggregation_kwargs)
    aggregation = _Function("loss_aggregation", objective.aggregation)
    _shaped(aggregation, _called(aggregation, aggregate), ())
    regions, metrics = row._replace(part="clip_regions"), row._replace(part="metrics")
    for region in _pure(regions, tensors, lambda: objective.clip_regions(tensors)) or ():
        _shaped(regions, region, *PER_TOKEN)
    for metric, values in _pure(metrics, tensors, lambda: objective.metrics(tensors)).items():
        _shaped(metrics._replace(part=f"metrics, {metric!r},"), values, *PER_TOKEN)


def _sampler(config: GRPOExtArguments) -> Tensor | None:
    """Return the sampler's importance ratio, where the run will have one."""
    rules = config.sampler_rules if config.samples_otherwise else ()
    return torch.ones(ROWS, TIME if any(rule.by_token for rule in rules) else 1) if rules else None


def _token_credit(objective: Objective, config: GRPOExtArguments) -> None:
    """Refuse advantages that differ by token where a token's gradient does not carry its own."""
    if _called(_Function("loss_type", objective.loss_type), lambda: mixes_tokens(objective, _sampler(config))):
        raise _Refused(
            Problem(
                "advantage_estimator",
                objective.advantage,
                f"it gives each token an advantage, but with loss_type={objective.loss_type!r} a token's gradient "
                "also depends on the advantages of the completion's other tokens (one term for the whole completion)",
                "Set a loss with a term for each token, such as loss_type: grpo or gspo, or an estimator with one "
                "advantage for a completion, such as advantage_estimator: group.",
            )
        )
