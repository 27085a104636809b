"""Settings that are allowed but probably not meant."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.batches import prompts_of_one_generation
from grpo_ext.config.dry_run import dry_run_warnings
from grpo_ext.config.precision import coarse_warnings
from grpo_ext.config.process_engine import same_device
from grpo_ext.config.rules import Conflict, Rule, is_set, plain
from grpo_ext.config.settings import row_of
from grpo_ext.config.truncation import reshaped_sampling
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.options import option_defaults
from grpo_ext.versions import unlisted, untested


def is_on(switch: str, values: Any) -> bool:
    """Return whether "use_vllm: true", "test_size", "rollout_drift above 0", or one "or" the other is so in `values`.

    A name that `values` lack counts as so: another object has it.
    """
    if " or " in switch:
        return any(is_on(part, values) for part in switch.split(" or "))
    name, *words = switch.replace(":", "").split()
    value = plain(getattr(values, name, True))
    if len(words) == 1:
        return str(value).lower() == words[0]
    return value != 0 if words[:2] == ["above", "0"] else bool(value)  # None is a default above 0


def warnings(config: GRPOExtArguments) -> list[Problem]:
    """Return what is allowed but probably not meant; the config must be free of problems."""
    rules: tuple[Rule, ...] = (reshaped_sampling, *_UNUSUAL, dry_run_warnings)
    releases = *untested(), *(unlisted() if config.use_vllm else ())
    return [*releases, *without_effect(config, config), *(problem for rule in rules for problem in rule(config))]


def without_effect(part: Any, values: Any) -> Iterator[Problem]:
    """Yield the settings of a dataclass that wait for a switch which is off in `values`, by the first such switch."""
    idle: dict[str, list[str]] = {}
    for f in dataclasses.fields(part):
        missing = next((needed for needed in row_of(f).needs if not is_on(needed, values)), "")
        if missing and is_set(part, f.name):
            idle.setdefault(missing, []).append(f.name)
    for needed, names in idle.items():
        yield Problem(", ".join(names), ABSENT, f"without {needed} this has no effect", "")


def _clip_is(config: GRPOExtArguments, name: str, option: str) -> bool:
    """Return whether a clip bound is as wide as the ratio itself, for a loss that usually clips closer."""
    options, value = config.objective.options, getattr(config, name)
    clips = options.get("epsilon_low") is not None and options.get("epsilon_high") is not None
    return clips and value is not None and value >= 1 > config.objective.row.options.get(option, 0)


def _reversed_clip(config: GRPOExtArguments) -> bool:
    low, high = config.objective.options.get("epsilon_low"), config.objective.options.get("epsilon_high")
    return low is not None and high is not None and config.epsilon_high is not None and high < low


def _off_policy(config: GRPOExtArguments) -> Iterator[Problem]:
    """Warn of further updates on a rollout by a loss without an importance ratio."""
    several = {
        "num_iterations": config.num_iterations > 1,
        "steps_per_generation": (config.steps_per_generation or 1) > config.gradient_accumulation_steps,
    }
    used = {name: getattr(config, name) for name, more in several.items() if more}
    if used and not config.objective.row.off_policy:
        (first, value), *others = used.items()
        yield Problem(
            first,
            value,
            f"{config.loss_type!r} has no importance ratio, so every update after the first of a rollout is "
            "off-policy and uncorrected",
            "Set num_iterations: 1, and leave steps_per_generation unset.",
            dict(others),
        )


def _large_k(config: GRPOExtArguments) -> Iterator[Problem]:
    """Warn of a k of `pass_at_k` with which a group of easy prompts has no advantage."""
    objective, size = config.objective, config.num_generations
    if objective.advantage != "pass_at_k" or size is None:
        return
    k = (option_defaults(estimators[objective.advantage]) | dict(objective.advantage_kwargs))["k"]
    if 2 * k > size:
        half, more = (share_of_groups(size, k, rate) for rate in (0.5, 0.75))
        yield Problem(
            "advantage_kwargs.k",
            k,
            f"a group has advantages only if at least k completions are wrong, and one is right: {half:.0%} of the "
            f"groups of a prompt that is solved half of the time, {more:.0%} at three quarters",
            f"Set k <= {size // 2}, or raise num_generations.",
            {"num_generations": size},
        )


def share_of_groups(size: int, k: int, rate: float) -> float:
    """Return the share of groups with an advantage under `pass_at_k`, at a prompt's pass rate."""
    right, wrong = Fraction(rate), 1 - Fraction(rate)  # binomials of large groups are beyond float
    return float(sum(math.comb(size, c) * right**c * wrong ** (size - c) for c in range(1, size - k + 1)))


_WIDE_CLIP = "a clip this wide never acts", "Papers have 0.0003 to 0.4; lower it."
_UNUSUAL: tuple[Rule, ...] = (
    Conflict(
        "temperature",
        lambda c: c.temperature > 2.0,
        "completions become random text far below this; 0.6 to 1.2 is usual",
        "Lower it.",
    ),
    Conflict("epsilon", lambda c: _clip_is(c, "epsilon", "epsilon_low"), *_WIDE_CLIP),
    Conflict("epsilon_high", lambda c: _clip_is(c, "epsilon_high", "epsilon_high"), *_WIDE_CLIP),
    Conflict(
        "epsilon_high",
        _reversed_clip,
        "it is below epsilon={c.objective.options[epsilon_low]:g}, so raising a probability is clipped earlier than "
        "lowering it, the reverse of DAPO's clip-higher",
        "Swap them, or leave epsilon_high unset.",
    ),
    Conflict(
        "loss_type",
        lambda c: aggregations.traits(c.objective.aggregation).local,
        "loss_aggregation={c.objective.aggregation!r} is TRL's token mean over each micro-batch: its gradient depends "
        "on per_device_train_batch_size",
        "'dapo' does not depend on it; the BNPO paper is 'beta_bnpo'.",
    ),
    Conflict(
        "loss_type",
        lambda c: c.objective.ratio != "token" and aggregations.traits(c.objective.aggregation).token_mean,
        "importance_sampling_level={c.objective.ratio!r} with loss_aggregation={c.objective.aggregation!r} weighs "
        "each completion by its length",
        "GSPO uses seq-mean-token-mean.",
    ),
    Conflict(
        "beta",
        lambda c: c.objective.kl_in_loss and not kl_estimators.traits(c.objective.kl).in_loss,
        "the gradient of kl_estimator={c.objective.kl!r} in the loss averages to 0",
        "Use k3+, or kl_placement: reward.",
    ),
    Conflict(
        "use_bias_correction_kl",
        lambda c: c.objective.kl_in_loss and c.objective.ratio not in kl_estimators.traits(c.objective.kl).levels,
        "with importance_sampling_level={c.objective.ratio!r} it is biased, as in stock TRL",
        "Set use_bias_correction_kl: false.",
    ),
    Conflict(
        "multi_objective_aggregation",
        lambda c: c.objective.combination == "normalize_then_sum" and prompts_of_one_generation(c)[0] == 1,
        "it divides by the std of the generation batch, which has one prompt, so combinations of rewards that it "
        "keeps apart get one advantage again",
        "Raise generation_batch_size or gradient_accumulation_steps.",
    ),
    _off_policy,
    _large_k,
    same_device,
    coarse_warnings,
    Conflict.of("use_bias_correction_kl !beta", "beta=0 means no KL term", "Set beta > 0 or remove it."),
)
