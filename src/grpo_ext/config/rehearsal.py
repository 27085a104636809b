"""Functions called once on a few tokens: what would fail after the first rollouts, or mislead, fails at once."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations, step_totals
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.estimate import BrokenRule
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.objective import ESTIMATOR_INPUTS, KL_INPUTS, TENSORS, Objective
from grpo_ext.objective.options import asked_for, bind
from grpo_ext.registry import did_you_mean

ROWS, TIME = 2, 3
PER_TOKEN = ((ROWS, TIME), (ROWS, 1))


def rehearsal_problems(config: Any) -> list[str]:
    """What is wrong with the functions that a config without problems names: their arguments, shapes, gradients."""
    objective = config.objective
    own = _has_own(objective)
    if not own and not objective.sees_tokens:
        return []
    if problems := list(_arguments(objective)):
        return problems
    try:
        advantages = _advantages(objective, config.num_generations)
        if own:
            _loss(objective, config)
        if advantages is not None and advantages.dim() == 3:
            _token_credit(objective, config)
    except _Told as told:
        return [str(told)]
    return []


def rehearsal_warnings(config: Any) -> Iterator[str]:
    """Whether one reward of None would end the run."""
    objective = config.objective
    try:
        if _has_own(objective):
            _advantages(objective, config.num_generations, unscored=True)
    except _Told as told:
        yield f"{told} One reward of None would end the run."


def _has_own(objective: Objective) -> bool:
    """Whether any of the functions is not the package's own, which the tests call."""
    own = (estimators[objective.advantage], kl_estimators[objective.kl], aggregations[objective.aggregation])
    return any(not f.__module__.startswith("grpo_ext.") for f in (objective.row.function, *own))


class _Told(Exception):
    """A problem, with its cure."""


def _arguments(objective: Objective) -> Iterator[str]:
    """Names before the star that nothing is offered under; the first of an estimator are the rewards."""
    row, kl, estimator = objective.row, kl_estimators[objective.kl], estimators[objective.advantage]
    for setting, function, offered, skipped in (
        (f"loss_type={objective.loss_type!r}", row.function, TENSORS, 0),
        (f"loss_type={objective.loss_type!r}, clip_regions", row.clip_regions, TENSORS, 0),
        (f"loss_type={objective.loss_type!r}, metrics", row.metrics, TENSORS, 0),
        (f"kl_estimator={objective.kl!r}", kl, KL_INPUTS, 0),
        (f"advantage_estimator={objective.advantage!r}", estimator, ESTIMATOR_INPUTS, 1),
    ):
        for name in asked_for(function)[skipped:] if function is not None else ():
            if name not in offered:
                yield (
                    f"{setting} asks for {name!r}, which is not on offer. {did_you_mean(name, offered)} An option "
                    "stands after the star."
                )


def _called(setting: str, function: Callable[[], Any]) -> Any:
    """What the function returns."""
    try:
        return function()
    except _Told:
        raise
    except Exception as error:  # whatever a function of the user's raises is the news
        raise _Told(f"{setting} raised {type(error).__name__}: {error} Correct the function.") from error


def _pure(setting: str, tensors: Mapping[str, Any], function: Callable[[], Any]) -> Any:
    """Return what the function returns, which may not have changed its inputs: other parts of the loss read them."""
    versions = {name: value._version for name, value in tensors.items() if isinstance(value, Tensor)}
    found = _called(setting, function)
    for name, version in versions.items():
        if tensors[name]._version != version:
            raise _Told(
                f"{setting} changes its input {name!r} in place, which other parts of the loss read. Write {name} = "
                f"{name} + ... in place of {name} += ..., and no method that ends in _."
            )
    return found


def _shaped(setting: str, found: Any, *shapes: tuple[int, ...]) -> Tensor:
    """A tensor of one of these shapes."""
    if isinstance(found, Tensor) and tuple(found.shape) in shapes:
        return found
    what = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
    expected = " or ".join(str(list(shape)) for shape in shapes)
    raise _Told(f"{setting} returned {what} for {ROWS} completions of {TIME} tokens. Return a tensor {expected}.")


def _advantages(objective: Objective, group: int, *, unscored: bool = False) -> Tensor | None:
    """The estimator's advantages, or None where it is not defined for rewards of 0 and 1."""
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
    weights, log_metric = torch.ones(1, dtype=torch.float64), lambda *_: None

    def estimated() -> Tensor | None:
        try:
            return objective.advantages(rewards, weights, None, log_metric, **tokens)
        except BrokenRule as error:
            raise _Told(str(error)) from error
        except ValueError:
            return None

    return _called(f"advantage_estimator={objective.advantage!r}", estimated)


def _loss(objective: Objective, config: Any) -> None:
    """Surrogate, KL, aggregation and figures, in the order of the trainer's loss."""
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
    name = f"loss_type={objective.loss_type!r}"
    loss = _shaped(
        name, _pure(name, tensors, lambda: bind(objective.row.function, tensors)(**objective.options)), *PER_TOKEN
    )
    if not loss.requires_grad:
        raise _Told(f"{name} has no gradient in per_token_logps. Compute it from them, without detach() or no_grad().")
    kl = f"kl_estimator={objective.kl!r}"
    if objective.kl_in_loss:
        loss = loss + _shaped(kl, _pure(kl, tensors, bind(kl_estimators[objective.kl], tensors)), *PER_TOKEN)
    elif objective.kl_in_reward:
        known = {"log_ref_ratio": torch.full((ROWS, TIME), -0.1), "mask": mask}
        _shaped(kl, _called(kl, bind(kl_estimators[objective.kl], known)), PER_TOKEN[0])
    given = (loss, mask, step_totals([mask]))
    aggregate = partial(aggregations[objective.aggregation], *given, **objective.aggregation_kwargs)
    aggregation = f"loss_aggregation={objective.aggregation!r}"
    _shaped(aggregation, _called(aggregation, aggregate), ())
    for region in _pure(f"{name}, clip_regions", tensors, lambda: objective.clip_regions(tensors)) or ():
        _shaped(f"{name}, clip_regions", region, *PER_TOKEN)
    for figure, values in _pure(f"{name}, metrics", tensors, lambda: objective.metrics(tensors)).items():
        _shaped(f"{name}, metrics, {figure!r}", values, *PER_TOKEN)


def _sampler(config: Any) -> Tensor | None:
    """The sampler's importance ratio, where the run will have one."""
    if not (config.use_vllm and config.vllm_importance_sampling_correction):
        return None
    return torch.ones(ROWS, 1 if config.vllm_importance_sampling_mode.startswith("sequence") else TIME)


def _token_credit(objective: Objective, config: Any) -> None:
    """Advantages that differ by token need a loss in which a token's gradient carries its own."""
    name = f"loss_type={objective.loss_type!r}"
    if _called(f"{name} with advantages [{ROWS}, {TIME}]", lambda: mixes_tokens(objective, _sampler(config))):
        raise _Told(
            f"advantage_estimator={objective.advantage!r} gives each token its own advantage, but with {name} a "
            "token's gradient also depends on the advantages of the completion's other tokens (one term for the whole "
            "completion). Set a loss with a term for each token, such as loss_type: grpo or gspo, or an estimator "
            "with one advantage for a completion, such as advantage_estimator: group."
        )
