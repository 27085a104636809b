"""The rules of `sampler_correction`, `old_logps`, and TRL's names for a correction of the sampler."""

from collections.abc import Iterator
from typing import Any

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import Rule, is_set
from grpo_ext.config.spec import Spec
from grpo_ext.errors import Problem
from grpo_ext.objective.losses import find
from grpo_ext.objective.sampler_correction import SamplerRule

FIELD = "sampler_correction"
EXAMPLE = "{level: token, upper: 2.0, action: truncate}"
TRL_NAMES = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max", "cap"))
RULE = Spec.of(SamplerRule, example=EXAMPLE)


MULTIPLIED = "this loss multiplies the weights of a completion's tokens, so a token's 0 would leave it out whole"


def _blocks(config: GRPOExtArguments) -> Iterator[Problem]:
    correction: Any = config.sampler_correction
    if correction is None or isinstance(correction, str):  # text is another rule's: not a mapping
        return
    several = isinstance(correction, list | tuple)
    blocks = correction if several else [correction]
    if not blocks:
        cure = "Write a block, or vllm_importance_sampling_correction: false for no correction."
        yield Problem(FIELD, correction, "a list without a block", cure)
    sound = []
    for i, block in enumerate(blocks):
        place = f"{FIELD}[{i}]" if several else FIELD
        problems = list(RULE.problems(place, block))
        yield from problems
        if not problems:
            sound.append((place, SamplerRule(**{k: v for k, v in block.items() if v is not None})))
    for place, rule in sound:
        yield from _impossible(place, rule)
        yield from _with_the_loss(place, rule, config)
    ratios = [place for place, rule in sound if rule.statistic == "ratio"]
    for place in ratios[1:]:
        reason = f"{ratios[0]} already weighs the loss by a ratio, and the two would be multiplied"
        yield Problem(f"{place}.statistic", "ratio", reason, "Select by k1, k2 or k3 there, which does not weigh.")


def _impossible(place: str, rule: SamplerRule) -> Iterator[Problem]:
    """Yield what contradicts itself in one block."""
    weighs, bounds = rule.statistic == "ratio", (rule.lower, rule.upper)
    if rule.action == "truncate" and not weighs:
        reason = f"only a ratio can be cut, and the statistic is {rule.statistic!r}"
        yield Problem(f"{place}.action", "truncate", reason, "Set action: mask or action: reject.")
    if rule.level == "max" and weighs:
        reason = "a completion's largest ratio is not a weight of the completion"
        yield Problem(f"{place}.level", "max", reason, "Set statistic: k2 or k3, or another level.")
    if rule.statistic == "m2" and rule.level != "token":
        yield Problem(f"{place}.level", rule.level, "m2 leaves out single tokens", "Set level: token.")
    if rule.normalize and not weighs:
        yield Problem(f"{place}.normalize", True, f"{rule.statistic!r} gives no weights", "Remove it.")
    if rule.action != "truncate" and bounds == (None, None):
        yield Problem(f"{place}.action", rule.action, "nothing is outside of no bounds", "Set upper, lower or both.")
    yield from _bounds(place, rule)


def _bounds(place: str, rule: SamplerRule) -> Iterator[Problem]:
    """Yield bounds that leave out a token or completion at which sampler and policy agree."""
    agreed, what = (1.0, "a ratio is 1") if rule.statistic == "ratio" else (0.0, f"{rule.statistic!r} is 0")
    lower, upper = rule.lower, rule.upper
    if lower is not None and rule.statistic not in ("ratio", "k1"):
        reason = f"{what} where sampler and policy agree, and never below"
        yield Problem(f"{place}.lower", lower, reason, "Remove it.")
    elif lower is not None and upper is not None and upper <= agreed <= lower:
        yield Problem(f"{place}.lower", lower, f"not below upper={upper}", "Swap them.")
        return
    elif lower is not None and rule.statistic == "ratio" and lower < 0:
        yield Problem(f"{place}.lower", lower, "a ratio is never below 0", "Correct it.")
    elif lower is not None and lower > agreed:
        reason = f"{what} where sampler and policy agree, and this bound is above"
        yield Problem(f"{place}.lower", lower, reason, f"Set it below {agreed:g}.")
    alone = upper == agreed and rule.statistic not in ("ratio", "k1")  # rounding leaves all tokens above it
    if upper is not None and (upper < agreed or alone):
        reason = f"{what} where sampler and policy agree, and this bound is {'no higher' if alone else 'below'}"
        yield Problem(f"{place}.upper", upper, reason, f"Set it above {agreed:g}.")


def _with_the_loss(place: str, rule: SamplerRule, config: GRPOExtArguments) -> Iterator[Problem]:
    if rule.action == "mask" and rule.by_token and config.objective.corrects_sampler:
        cure = "Set action: reject." if config.loss_defaults == "paper" else "Set action: truncate."
        yield Problem(f"{place}.action", "mask", MULTIPLIED, cure, {"loss_type": config.loss_type})
    if rule.action != "reject":
        return
    if config.loss_defaults == "trl":
        reason = "stock TRL's denominators count completions that are left out"
        yield Problem(f"{place}.action", "reject", reason, "Set action: mask.", {"loss_defaults": "trl"})
    if rule.by_token and config.objective.one_term:
        reason = "this loss has one term for a whole completion, so single tokens cannot be left out"
        beside = {"loss_type": config.loss_type}
        cure = "Set action: mask." if rule.statistic == "m2" else "Set level: geometric."
        yield Problem(f"{place}.action", "reject", reason, cure, beside)


def _levels(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse a level at which the loss cannot take the correction."""
    levels = find(config.loss_type).sampler_levels
    if not config.samples_otherwise or next(_blocks(config), None) is not None:
        return
    mode = config.trl_sampler_mode
    multiplies = config.objective.corrects_sampler and config.loss_defaults == "paper"
    if all(("token" if rule.by_token else "sequence") in levels for rule in config.sampler_rules):
        if mode == "token_mask" and multiplies:
            yield Problem("vllm_importance_sampling_mode", mode, MULTIPLIED, "Set 'token_truncate'.")
        return
    reason = f"{config.loss_type} takes the correction per {levels[0]}"
    if mode:
        cure = f"Set '{levels[0]}_truncate'" + ("." if multiplies else f" or '{levels[0]}_mask'.")
        yield Problem("vllm_importance_sampling_mode", mode, reason, cure)
    else:
        yield Problem(FIELD, config.sampler_correction, reason, f"Set level: {levels[0]}.")


def _once(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse two settings for one matter."""
    correction, old = config.sampler_correction, config.old_logps
    of_trl = {name: getattr(config, name) for name in TRL_NAMES if is_set(config, name)}
    if correction is not None and of_trl:
        yield Problem(FIELD, correction, "TRL's names set a correction too", "Keep one of them.", of_trl)
    if correction is not None and not config.vllm_importance_sampling_correction:
        switch: dict[str, object] = {"vllm_importance_sampling_correction": False}
        yield Problem(FIELD, correction, "the correction is switched off", "Remove one of them.", switch)
    if old != "recomputed" and (correction is not None or of_trl):
        beside = {FIELD: correction} if correction is not None else of_trl
        own = "ratio is then the one" if old == "sampler" else "weights are then those of the ratio"
        reason = f"the loss's own {own} to the sampler, and a correction would count it twice"
        yield Problem("old_logps", old, reason, "Keep one of them.", beside)
    if old != "recomputed" and not find(config.loss_type).off_policy:
        reason = "this loss has no ratio to old log-probabilities, so the sampler's would not enter it"
        yield Problem("old_logps", old, reason, "Set old_logps: recomputed.", {"loss_type": config.loss_type})


def _lower_only(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse a lower bound without an upper one, which in stock TRL is 3 if left out, and none if null."""
    low = config.vllm_importance_sampling_clip_min if config.vllm_importance_sampling_correction else None
    if low is not None and config.vllm_importance_sampling_clip_max is config.vllm_importance_sampling_cap is None:
        level, _, action = str(config.trl_sampler_mode).partition("_")
        block = f"{{level: {level}, lower: {low}, action: {action}}}"
        cure = f"Set that to 3.0, stock TRL's default; for no upper bound write {FIELD}: {block} instead."
        reason = "vllm_importance_sampling_clip_max is not set"
        yield Problem("vllm_importance_sampling_clip_min", low, reason, cure)


def _bounds_of_trl(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse TRL's bounds if they are reversed, or if a sampler that agrees with the policy is outside of them."""
    names = [f"vllm_importance_sampling_{name}" for name in ("clip_min", "cap", "clip_max")]
    low, *uppers = ((name, getattr(config, name)) for name in names)
    name, high = next((upper for upper in uppers if upper[1] is not None), uppers[-1])
    if low[1] is not None and high is not None and low[1] >= high:
        yield Problem(*low, "the lower bound is not below the upper one", "Swap them.", {name: high})
    elif config.trl_sampler_mode and config.vllm_importance_sampling_correction:
        reason = "a ratio is 1 where sampler and policy agree, and would be outside of the bounds"
        if low[1] is not None and low[1] > 1:
            yield Problem(*low, reason, "Set it below 1.")
        if high is not None and high < 1:
            yield Problem(name, high, reason, "Set it above 1.")


SAMPLER_RULES: tuple[Rule, ...] = (_blocks, _once, _lower_only, _bounds_of_trl, _levels)
"""Settings of the correction of the sampler."""
