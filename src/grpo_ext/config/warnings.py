"""Settings that are allowed but probably not meant."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.batches import prompts_of_one_generation
from grpo_ext.config.dry_run import dry_run_warnings
from grpo_ext.config.precision import coarse_warnings
from grpo_ext.config.process_engine import same_device
from grpo_ext.config.rules import Conflict, Rule, is_set, plain
from grpo_ext.config.truncation import reshaped_sampling
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.options import option_defaults
from grpo_ext.versions import untested

_CORRECTION = "vllm_importance_sampling_"
_OF_VLLM = [f.name for f in dataclasses.fields(GRPOExtArguments) if f.name.startswith("vllm_")]

_SWITCHES: dict[str, tuple[str, ...]] = {
    "use_vllm: true": (
        *(name for name in _OF_VLLM if not name.startswith(_CORRECTION)),
        *("rollout_drift", "rollout_drift_action"),
    ),
    "use_vllm: true or rollout_ahead": (_CORRECTION, "sampler_correction", "old_logps"),
    "vllm_mode: server": ("vllm_weight_transfer",),
    "vllm_importance_sampling_correction: true": (
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    ),
    "use_vllm: false": ("rollout_engine",),
    "use_transformers_continuous_batching: false": ("rollout_engine",),
    "rollout_engine: process": ("rollout_device",),
    "dynamic_sampling: a reward's name": ("dynamic_sampling_max_rounds",),
    "use_adaptive_entropy: true": ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    "sync_ref_model: true": ("ref_model_",),
    "log_completions: true": ("num_completions_to_print",),
    "rollout_drift above 0 (0 means not checked)": ("rollout_drift_action",),
}
"""Settings without which others have no effect; a name that ends in _ means all names that begin with it."""
_ON: dict[str, Callable[[GRPOExtArguments], object]] = {
    "use_vllm: true or": lambda c: c.samples_otherwise,
    "dynamic_sampling": lambda c: c.dynamic_sampling is not None,
    "rollout_drift": lambda c: c.rollout_drift != 0,
}
"""When those are on that are not one value of a setting, by the beginnings of their names."""


def _is_on(config: GRPOExtArguments, needed: str) -> bool:
    for beginning, is_on in _ON.items():
        if needed.startswith(beginning):
            return bool(is_on(config))
    name, _, value = needed.partition(": ")
    return str(plain(getattr(config, name))).lower() == value


def warnings(config: GRPOExtArguments) -> list[Problem]:
    """Return what is allowed but probably not meant; the config must be free of problems."""
    rules: tuple[Rule, ...] = (_without_effect, reshaped_sampling, *_UNUSUAL, dry_run_warnings)
    return [*untested(), *(problem for rule in rules for problem in rule(config))]


def _without_effect(config: GRPOExtArguments) -> Iterator[Problem]:
    left = [f.name for f in dataclasses.fields(config) if is_set(config, f.name)]
    for needed, names in _SWITCHES.items():
        prefixes = tuple(name for name in names if name.endswith("_"))
        idle = [name for name in left if name in names or name.startswith(prefixes)]
        if idle and not _is_on(config, needed):
            left = [name for name in left if name not in idle]  # the first reason is enough
            yield no_effect(idle, needed)


def no_effect(names: list[str], needed: str) -> Problem:
    """Return the warning of settings that wait for a switch."""
    return Problem(", ".join(names), ABSENT, f"without {needed} this has no effect", "")


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
