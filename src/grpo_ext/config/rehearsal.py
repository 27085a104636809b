"""Call the user's functions once on a few tokens: what would fail after the first rollouts fails at once."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.errors import Problem
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations, step_totals
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.estimate import BrokenRule
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.objective import ESTIMATOR_INPUTS, KL_INPUTS, TENSORS, Objective
from grpo_ext.objective.options import asked_for, bind
from grpo_ext.registry import did_you_mean

T = TypeVar("T")
ROWS, TIME = 2, 3
PER_TOKEN = ((ROWS, TIME), (ROWS, 1))


class _Refused(Exception):
    """Carries a problem out of a rehearsal."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def rehearsal_problems(config: GRPOExtArguments) -> list[Problem]:
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


def rehearsal_warnings(config: GRPOExtArguments) -> Iterator[Problem]:
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


def _arguments(objective: Objective) -> Iterator[Problem]:
    """Yield unknown names before the star; the first of an estimator are the rewards."""
    row, kl, estimator = objective.row, kl_estimators[objective.kl], estimators[objective.advantage]
    for setting, value, function, offered, skipped in (
        ("loss_type", objective.loss_type, row.function, TENSORS, 0),
        ("loss_type", objective.loss_type, row.clip_regions, TENSORS, 0),
        ("loss_type", objective.loss_type, row.metrics, TENSORS, 0),
        ("kl_estimator", objective.kl, kl, KL_INPUTS, 0),
        ("advantage_estimator", objective.advantage, estimator, ESTIMATOR_INPUTS, 1),
    ):
        for name in asked_for(function)[skipped:] if function is not None else ():
            if name not in offered:
                reason = f"{getattr(function, '__name__', 'it')} takes {name!r}, which is not one of its inputs"
                cure = f"{did_you_mean(name, offered)} Write an option after the star."
                yield Problem(setting, value, reason, cure)


def _called(setting: str, value: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except _Refused:
        raise
    except Exception as error:  # a user's function may raise anything
        reason = f"it raised {type(error).__name__}: {str(error).rstrip('.')}"
        raise _Refused(Problem(setting, value, reason, "Correct the function.")) from error


def _pure(setting: str, value: str, tensors: Mapping[str, Any], function: Callable[[], T]) -> T:
    """Return what the function returns, which may not change its inputs: other parts of the loss read them."""
    versions = {name: tensor._version for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    found = _called(setting, value, function)
    for name, version in versions.items():
        if tensors[name]._version != version:
            reason = f"it changes its input {name!r} in place, which other parts of the loss read"
            cure = f"Write {name} = {name} + ... instead of {name} += ..., and no method that ends in _."
            raise _Refused(Problem(setting, value, reason, cure))
    return found


def _shaped(setting: str, value: str, found: object, *shapes: tuple[int, ...], part: str = "it") -> Tensor:
    """Return a tensor that has one of these shapes."""
    if isinstance(found, Tensor) and tuple(found.shape) in shapes:
        return found
    what = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
    expected = " or ".join(str(list(shape)) for shape in shapes)
    reason = f"{part} returned {what} for {ROWS} completions of {TIME} tokens"
    raise _Refused(Problem(setting, value, reason, f"Return a tensor {expected}."))


def _advantages(objective: Objective, group: int, *, unscored: bool = False) -> Tensor | None:
    """Return the estimator's advantages, or None where it is not defined for rewards of 0 and 1."""
    rewards = torch.zeros(2, group, 1, dtype=torch.float64)
    rewards[0, 0] = rewards[1, 1:] = 1.0
    if unscored:
        rewards[:, -1] = torch.nan
    tokens = {"mask": torch.ones(2, group, TIME, dtype=torch.long)} if objective.sees_tokens else {}
    if objective.sees_turns:
        tokens |= {name: torch.zeros(2, group, n, dtype=torch.long) for name, n in (("turns", TIME), ("states", 1))}
        tokens["turn_rewards"] = torch.zeros(2, group, 1, 1, dtype=torch.float64)
    if objective.kl_in_reward:
        tokens["kl"] = torch.zeros(2, group, TIME, dtype=torch.float64)
    weights, name = torch.ones(1, dtype=torch.float64), objective.advantage

    def estimated() -> Tensor | None:
        try:
            return objective.advantages(rewards, weights, None, lambda *_: None, **tokens)
        except BrokenRule as error:
            raise _Refused(error.problem) from error
        except ValueError:
            return None

    return _called("advantage_estimator", name, estimated)


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
    row = ("loss_type", objective.loss_type)
    surrogate = bind(objective.row.function, tensors)
    loss = _shaped(*row, _pure(*row, tensors, lambda: surrogate(**objective.options)), *PER_TOKEN)
    if not loss.requires_grad:
        cure = "Compute it from them, without detach() or no_grad()."
        raise _Refused(Problem(*row, "it has no gradient in per_token_logps", cure))
    kl, estimator = ("kl_estimator", objective.kl), kl_estimators[objective.kl]
    if objective.kl_in_loss:
        loss = loss + _shaped(*kl, _pure(*kl, tensors, bind(estimator, tensors)), *PER_TOKEN)
    elif objective.kl_in_reward:
        known = {"log_ref_ratio": torch.full((ROWS, TIME), -0.1), "mask": mask}
        _shaped(*kl, _called(*kl, bind(estimator, known)), PER_TOKEN[0])
    given = (loss, mask, step_totals([mask]))
    aggregate = partial(aggregations[objective.aggregation], *given, **objective.aggregation_kwargs)
    aggregation = ("loss_aggregation", objective.aggregation)
    _shaped(*aggregation, _called(*aggregation, aggregate), ())
    for region in _pure(*row, tensors, lambda: objective.clip_regions(tensors)) or ():
        _shaped(*row, region, *PER_TOKEN, part="clip_regions")
    for metric, values in _pure(*row, tensors, lambda: objective.metrics(tensors)).items():
        _shaped(*row, values, *PER_TOKEN, part=f"metrics, {metric!r},")


def _sampler(config: GRPOExtArguments) -> Tensor | None:
    """Return the sampler's importance ratio, where the run will have one."""
    if not (config.use_vllm and config.vllm_importance_sampling_correction):
        return None
    return torch.ones(ROWS, 1 if config.vllm_importance_sampling_mode.startswith("sequence") else TIME)


def _token_credit(objective: Objective, config: GRPOExtArguments) -> None:
    """Refuse advantages that differ by token where a token's gradient does not carry its own."""
    if _called("loss_type", objective.loss_type, lambda: mixes_tokens(objective, _sampler(config))):
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
