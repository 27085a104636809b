"""What is allowed but probably not meant."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from grpo_ext.config.idle import is_set
from grpo_ext.config.mappings import reshaped_sampling
from grpo_ext.config.rehearsal import rehearsal_warnings
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators


class _Idle(NamedTuple):
    """Fields that do nothing until a switch is on."""

    cure: str
    is_on: Callable[[Any], bool]
    fields: Callable[[str], bool]


def _names(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _prefix(*prefixes: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefixes)


_SERVER = ("vllm_server_", "vllm_group_port", "vllm_weight_transfer")
_ONLY_WITH = (
    _Idle("use_vllm: true", lambda c: c.use_vllm, _prefix("vllm_", "rollout_drift")),
    _Idle("vllm_mode: server", lambda c: not c.use_vllm or c.vllm_mode == "server", _prefix(*_SERVER)),
    _Idle(
        "vllm_mode: colocate", lambda c: not c.use_vllm or c.vllm_mode == "colocate", _names("vllm_enable_sleep_mode")
    ),
    _Idle(
        "vllm_importance_sampling_correction: true",
        lambda c: not c.use_vllm or c.vllm_importance_sampling_correction,
        _names(
            "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
        ),
    ),
    _Idle(
        "use_vllm: false",
        lambda c: not c.use_vllm,
        _names("cache_implementation", "use_transformers_continuous_batching", "rollout_engine"),
    ),
    _Idle(
        "use_transformers_continuous_batching: false",
        lambda c: not c.use_transformers_continuous_batching,
        _names("rollout_engine"),
    ),
    _Idle(
        "dynamic_sampling: a reward's name",
        lambda c: c.dynamic_sampling is not None,
        _names("dynamic_sampling_max_rounds"),
    ),
    _Idle(
        "use_transformers_continuous_batching: true",
        lambda c: c.use_transformers_continuous_batching,
        _names("transformers_continuous_batching_config"),
    ),
    _Idle(
        "use_adaptive_entropy: true",
        lambda c: c.use_adaptive_entropy,
        _names("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    ),
    _Idle("sync_ref_model: true", lambda c: c.sync_ref_model, _prefix("ref_model_")),
    _Idle(
        "log_completions: true", lambda c: c.log_completions, _names("num_completions_to_print", "log_unique_prompts")
    ),
    _Idle("use_liger_kernel: true", lambda c: c.use_liger_kernel, _names("liger_kernel_config")),
    _Idle("gradient_checkpointing: true", lambda c: c.gradient_checkpointing, _names("gradient_checkpointing_kwargs")),
    _Idle("logging_strategy: steps", lambda c: c.logging_strategy == "steps", _names("logging_steps")),
    _Idle("save_strategy: steps", lambda c: c.save_strategy == "steps", _names("save_steps")),
    _Idle("eval_strategy: steps", lambda c: c.eval_strategy in ("steps", "no"), _names("eval_steps")),
    _Idle(
        "an lr_scheduler_type that warms up (constant_with_warmup, linear, cosine, ...)",
        lambda c: c.lr_scheduler_type not in ("constant", "reduce_lr_on_plateau"),
        _names("warmup_steps"),
    ),
    _Idle(
        "rollout_drift above 0 (0 means not checked)",
        lambda c: c.rollout_drift != 0 or not c.use_vllm,
        _names("rollout_drift_action"),
    ),
    _Idle(
        "vllm_server_base_url left out, which names the server by itself,",
        lambda c: c.vllm_server_base_url is None,
        _names("vllm_server_host", "vllm_server_port"),
    ),
    _Idle("push_to_hub: true", lambda c: c.push_to_hub, _prefix("hub_", "push_to_hub_")),
)


def warnings(config: Any) -> list[str]:
    """What is allowed but probably not meant; the config must be free of problems."""
    return [
        *_idle(config),
        *_schedule(config),
        *_learning_rate(config),
        *_truncated_sampling(config),
        *_extremes(config),
        *reshaped_sampling(config),
        *_loss(config),
        *rehearsal_warnings(config),
    ]


def _idle(config: Any) -> Iterator[str]:
    told: set[str] = set()
    for switch in _ONLY_WITH:
        if switch.is_on(config):
            continue
        names = [f.name for f in dataclasses.fields(config) if switch.fields(f.name) and is_set(config, f.name)]
        if new := [name for name in names if name not in told]:
            told.update(new)
            yield no_effect(new, switch.cure)


def no_effect(names: list[str], cure: str) -> str:
    """The sentence for settings that wait for a switch."""
    return f"{', '.join(names)}: without {cure} this has no effect."


def _schedule(config: Any) -> Iterator[str]:
    if config.max_steps > 0 and is_set(config, "num_train_epochs"):
        yield (
            f"num_train_epochs={config.num_train_epochs:g} has no effect beside max_steps={config.max_steps}, which "
            "ends the run. Remove one of them."
        )


_LARGE = 0.1


def _learning_rate(config: Any) -> Iterator[str]:
    if config.learning_rate > _LARGE:
        yield (
            f"learning_rate={config.learning_rate:g}: GRPO trains at 1e-7 to 1e-4 and falls apart far below this. Is "
            "a minus missing, as in 1e-6?"
        )
    if config.warmup_steps >= config.max_steps > 0:
        yield (
            f"warmup_steps={config.warmup_steps:g}: the run ends at max_steps={config.max_steps}, before the learning "
            "rate has risen. Lower warmup_steps."
        )


def _truncated_sampling(config: Any) -> Iterator[str]:
    for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
        value = getattr(config, name)
        if value != whole and value:
            yield (
                f"{name}={value}: completions are drawn from an altered distribution, but their log-probabilities "
                f"are the model's own, so the gradient is biased. Leave {name} unset for an unbiased one."
            )


_HOT = 2.0


def _extremes(config: Any) -> Iterator[str]:
    """Values far outside of any paper's."""
    if config.temperature > _HOT:
        yield (
            f"temperature={config.temperature:g}: completions become random text far below this; 0.6 to 1.2 is usual. "
            "Lower it."
        )
    objective = config.objective
    low, high = objective.options.get("epsilon_low"), objective.options.get("epsilon_high")
    if low is None or high is None:  # no clip, or a bound of the ratio itself
        return
    for name, usual in (("epsilon", "epsilon_low"), ("epsilon_high", "epsilon_high")):
        value = getattr(config, name)
        if value is not None and value >= 1 > objective.row.options.get(usual, 0):
            yield f"{name}={value:g}: a clip this wide never acts. Papers have 0.0003 to 0.4; lower it."
    if config.epsilon_high is not None and high < low:
        yield (
            f"epsilon_high={high:g} is below epsilon={low:g}, so that raising a probability is clipped earlier than "
            "lowering it, the reverse of DAPO's clip-higher. Swap them, or leave epsilon_high unset."
        )


def _loss(config: Any) -> Iterator[str]:
    objective = config.objective
    aggregation, kl = aggregations.traits(objective.aggregation), kl_estimators.traits(objective.kl)
    if aggregation.local:
        yield (
            f"loss_type={config.loss_type!r} with loss_aggregation={objective.aggregation!r}, TRL's token mean over "
            "each micro-batch: its gradient depends on per_device_train_batch_size. 'dapo' does not; the BNPO paper "
            "is 'beta_bnpo'."
        )
    if objective.ratio != "token" and aggregation.token_mean:
        yield (
            f"importance_sampling_level={objective.ratio!r} with loss_aggregation={objective.aggregation!r} weighs "
            "each completion by its length. GSPO uses seq-mean-token-mean."
        )
    if objective.kl_in_loss and not kl.in_loss:
        cure = "Use k3+, or kl_placement: reward"
        yield f"kl_estimator={objective.kl!r} in the loss: its gradient averages to 0. {cure}."
    if objective.kl_in_loss and objective.ratio not in kl.levels:
        yield (
            f"use_bias_correction_kl with importance_sampling_level={objective.ratio!r} is biased, as in stock TRL. "
            "Set use_bias_correction_kl: false."
        )
    updates = _updates_of_a_rollout(config)
    if not objective.row.off_policy and updates:
        yield (
            f"{updates}: {config.loss_type!r} has no importance ratio, so every update after the first of a rollout "
            "is off-policy and uncorrected. Set num_iterations: 1, and leave steps_per_generation unset."
        )
    if config.use_bias_correction_kl and config.beta == 0.0:
        yield "use_bias_correction_kl=True: with beta=0.0 there is no KL term. Set beta > 0 or remove it."


def _updates_of_a_rollout(config: Any) -> str:
    """The settings by which a rollout is used for more than one optimizer step."""
    several = {
        "num_iterations": config.num_iterations > 1,
        "steps_per_generation": config.steps_per_generation > config.gradient_accumulation_steps,
    }
    return ", ".join(f"{name}={getattr(config, name)}" for name, used in several.items() if used)
