"""The table of settings: allowed values, what a change does to a run that resumes, and which settings one step reads.

`SETTINGS` has a row for each field of `GRPOExtConfig`, and for the settings of a recipe's other parts that differ from
the default row, `Setting()`: any value of its type, and a change makes it another run.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto

from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.options import Within
from grpo_ext.objective.ratios import ratios


class Change(Enum):
    """The effect of another value of a setting on a run that resumes."""

    NOTHING = auto()
    """No trained number changes. (With `loss_defaults: trl` an evaluation draws random numbers.)"""
    ROUNDING = auto()
    """The same numbers are computed in another way."""
    LENGTH = auto()
    """The run ends elsewhere, and the learning-rate schedule follows."""
    SPLIT = auto()
    """Nothing but random streams, if the rows of an optimizer step and of a generation stay the same together."""
    MODEL = auto()
    """Nothing, if the other name has the same weights."""
    ANOTHER_RUN = auto()
    """It cannot resume: it would be another run."""


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Args:
        within: bounds of a number.
        choices: the names that it may have; None where all are allowed.
        function: whether it may also name a function of the user's, `./file.py:name`.
        text: cure of a value that is not text, where that value as text would be wrong too.
        unused: why GRPO has no use for the setting; only its default is allowed.
        change: what a change does to a run that resumes.
    """

    within: Within | None = None
    choices: Collection[object] | None = None
    function: bool = False
    text: str = ""
    unused: str = ""
    change: Change = Change.ANOTHER_RUN


def _group(change: Change, *more: str | dict[str, Setting], **rows: Setting) -> dict[str, Setting]:
    """Return rows that share a kind of change; a name by itself is a setting that may have any value of its type."""
    every: dict[str, Setting] = {}
    for part in (*more, rows):
        every |= {part: Setting()} if isinstance(part, str) else part
    return {name: replace(row, change=change) for name, row in every.items()}


def _each(within: Within, *names: str) -> dict[str, Setting]:
    """Return rows of numbers that have the same bounds."""
    return dict.fromkeys(names, Setting(within))


FINITE = Within()
"""The bounds of a number that has no others."""
_POSITIVE = Within(above=0.0)
GREEDY = "only the likeliest token is left, so that every completion of a group is the same"
NOT_NEGATIVE = Within(least=0.0)
COUNT = Within(least=1.0)
_UNIT = Within(least=0.0, most=1.0)
_SHARE = Within(above=0.0, most=1.0)
BELOW_ONE = Within(least=0.0, below=1.0)
_SEED = Within(least=0.0, most=2.0**32 - 1, because="NumPy takes no other seeds")

SETTINGS: dict[str, Setting] = {
    # The loss.
    **_group(
        Change.ANOTHER_RUN,
        *("loss_type", "losses", "loss_kwargs", "advantage_kwargs", "loss_aggregation_kwargs", "use_adaptive_entropy"),
        *("use_bias_correction_kl", "mask_truncated_completions"),
        *("skip_zero_advantages", "vllm_importance_sampling_correction"),
        *("entropy_coef", "entropy_coef_min", "entropy_coef_max"),
        _each(
            NOT_NEGATIVE,
            *("beta", "epsilon", "epsilon_high", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos"),
            *("vespo_lambda_neg", "entropy_coef_delta", "entropy_target", "router_aux_loss_coef"),
        ),
        _each(_POSITIVE, "delta", "sapo_temperature_pos", "sapo_temperature_neg", "off_policy_mask_threshold"),
        loss_defaults=Setting(choices=("paper", "trl")),
        importance_sampling_level=Setting(choices=ratios),
        kl_estimator=Setting(choices=kl_estimators, function=True),
        kl_placement=Setting(choices=("loss", "reward")),
        advantage_estimator=Setting(choices=estimators, function=True),
        scale_rewards=Setting(choices=("group", "batch", "none", True, False)),
        multi_objective_aggregation=Setting(choices=combinations),
        missing_rewards=Setting(choices=("renormalize", "zero")),
        loss_aggregation=Setting(choices=aggregations, function=True),
        top_entropy_quantile=Setting(_UNIT),
        old_logps=Setting(choices=("recomputed", "sampler", "interpolated")),
    ),
    # The sampler's correction.
    **_group(
        Change.ANOTHER_RUN,
        "sampler_correction",
        _each(_POSITIVE, "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
        vllm_importance_sampling_mode=Setting(
            choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        ),
        vllm_importance_sampling_clip_min=Setting(NOT_NEGATIVE),
    ),
    # How the policy and its reference compute, which the loss of one step depends on too.
    **_group(
        Change.ANOTHER_RUN,
        *("bf16", "fp16", "use_liger_kernel", "model_init_kwargs", "disable_dropout", "cast_lm_head_to_fp32"),
        _each(COUNT, "max_completion_length", "ref_model_sync_steps"),
        temperature=Setting(Within(above=0.0, because="at 0 every completion of a group is the same")),
        num_generations=Setting(Within(least=2.0, because="a group baseline needs at least 2 completions per prompt")),
        pad_to_multiple_of=Setting(COUNT),
        ref_model_mixup_alpha=Setting(_UNIT),
    ),
    **_group(
        Change.ROUNDING,
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        micro_batch_tokens=Setting(COUNT),
        shared_prefix=Setting(choices=("auto", "true", "false", True, False)),
    ),
    **_group(Change.NOTHING, "trust_remote_code"),
    # Rollouts.
    **_group(
        Change.ANOTHER_RUN,
        "use_vllm",
        "generation_kwargs",
        *("ds3_gather_for_generation", "chat_template_kwargs", "cache_implementation", "use_transformers_paged"),
        *("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
        *("vllm_structured_outputs_regex", "vllm_engine_kwargs", "vllm_model_impl"),
        _each(COUNT, "dynamic_sampling_max_rounds", "max_tool_calling_iterations", "vllm_max_model_length"),
        top_p=Setting(_SHARE),
        top_k=Setting(Within(least=0.0, because="0 switches it off")),
        min_p=Setting(Within(least=0.0, below=1.0, because=f"at 1 {GREEDY}")),
        repetition_penalty=Setting(_POSITIVE),
        rollout_engine=Setting(choices=("auto", "grouped", "generate", "process")),
        rollout_ahead=Setting(NOT_NEGATIVE),
        dynamic_sampling=Setting(text="Write reward, or the name of one of the rewards, or leave it out."),
        completion_length_counts=Setting(choices=("all", "policy")),
        vllm_mode=Setting(choices=("server", "colocate")),
        vllm_dtype=Setting(choices=("auto", "float32", "bfloat16", "float16")),
    ),
    **_group(
        Change.ROUNDING,
        "vllm_tensor_parallel_size",
        vllm_push=Setting(choices=("auto", "adapter", "merged")),
        rollout_device=Setting(text="Write cpu, cuda or cuda:1, or leave it out."),
        environment_waves=Setting(choices=("ready", "turn")),
    ),
    **_group(
        Change.NOTHING,
        *("vllm_server_base_url", "vllm_server_host", "vllm_enable_sleep_mode", "vllm_server_port"),
        *("vllm_group_port", "vllm_server_timeout", "vllm_gpu_memory_utilization"),
        vllm_weight_transfer=Setting(choices=("auto", "nccl", "gloo")),
        rollout_drift=Setting(NOT_NEGATIVE),
        rollout_drift_action=Setting(choices=("warn", "stop")),
    ),
    # Batches, data and random numbers.
    **_group(
        Change.SPLIT,
        "world_size",
        _each(COUNT, "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    ),
    **_group(
        Change.ANOTHER_RUN,
        "reward_weights",
        *("shuffle_dataset", "dataloader_drop_last", "dataloader_in_order", "ignore_data_skip"),
        *("auto_find_batch_size", "remove_unused_columns"),
        _each(_SEED, "seed", "data_seed"),
        generation_batch_size=Setting(COUNT),
        num_iterations=Setting(COUNT),
        label_smoothing_factor=Setting(unused="GRPO has no labels to smooth"),
        label_names=Setting(unused="GRPO has no labels"),
        train_sampling_strategy=Setting(unused="the sampler keeps the completions of a prompt together"),
        length_column_name=Setting(unused="the sampler keeps the completions of a prompt together"),
    ),
    **_group(
        Change.NOTHING,
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_num_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        _each(NOT_NEGATIVE, "reward_workers", "reward_memory_gib"),
    ),
    # The optimizer and its schedule.
    **_group(Change.LENGTH, "max_steps", num_train_epochs=Setting(_POSITIVE)),
    **_group(
        Change.ANOTHER_RUN,
        "sync_ref_model",
        *("optim_target_modules", "optim_args", "lr_scheduler_kwargs", "average_tokens_across_devices"),
        *("adam_beta1", "adam_beta2", "learning_rate", "lr_scheduler_type", "neftune_noise_alpha", "optim"),
        "warmup_steps",
        _each(NOT_NEGATIVE, "weight_decay", "max_grad_norm"),
        adam_epsilon=Setting(_POSITIVE),
    ),
    **_group(Change.NOTHING, on_nonfinite=Setting(choices=("stop", "skip"))),
    # The model, its engines and the machine.
    **_group(Change.MODEL, "model_name_or_path", "model_revision"),
    **_group(
        Change.ANOTHER_RUN,
        *("tf32", "liger_kernel_config", "use_cache", "accelerator_config", "parallelism_config"),
        *("fsdp", "fsdp_config", "deepspeed", "lora_r", "lora_alpha", "lora_dropout"),
    ),
    **_group(
        Change.ROUNDING,
        *("attn_implementation", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "ddp_static_graph"),
        *("full_determinism", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cpu"),
        *("ddp_backend", "ddp_bucket_cap_mb"),
    ),
    **_group(
        Change.NOTHING,
        *("ddp_timeout", "debug", "do_train", "local_rank", "skip_memory_metrics", "torch_empty_cache_steps"),
    ),
    # Logging.
    **_group(
        Change.NOTHING,
        "disable_tqdm",
        *("include_num_input_tokens_seen", "log_completions", "log_completions_hub_repo", "log_multimodal"),
        *("log_on_each_node", "log_unique_prompts", "logging_first_step", "logging_nan_inf_filter"),
        *("project", "run_name", "log_level", "log_level_replica", "logging_strategy", "logging_steps", "report_to"),
        *("trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
        num_completions_to_print=Setting(NOT_NEGATIVE),  # at 0 only the files are written
    ),
    # Evaluation.
    **_group(
        Change.NOTHING,
        *("dataset_test_split", "do_eval", "do_predict", "eval_do_concat_batches", "eval_on_start", "eval_sets"),
        *("eval_use_gather_object", "bf16_full_eval", "fp16_full_eval", "prediction_loss_only"),
        *("metric_for_best_model", "greater_is_better", "load_best_model_at_end", "eval_strategy", "eval_steps"),
        *("eval_delay", "eval_accumulation_steps"),
        _each(COUNT, "num_generations_eval", "per_device_eval_batch_size"),
        include_for_metrics=Setting(unused="no compute_metrics is called"),
        batch_eval_metrics=Setting(unused="no compute_metrics is called"),
    ),
    # Checkpoints and the hub.
    **_group(Change.ANOTHER_RUN, "hub_token", "restore_callback_states_from_checkpoint"),
    **_group(
        Change.NOTHING,
        *("enable_jit_checkpoint", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision"),
        *("push_to_hub", "output_dir", "resume_from_checkpoint"),
        *("save_on_each_node", "save_only_model", "hub_strategy", "save_strategy", "save_steps"),
        save_total_limit=Setting(COUNT),
    ),
}

FUNCTIONS = frozenset(("loss_type", *(name for name, row in SETTINGS.items() if row.function)))
"""Settings that may name a function of the user's."""
REWARD_OPERATION = (".timeout", ".retries", ".isolate", ".independent")
"""Ends of the names of a reward's settings that change how it is called, but no value."""


def change_of(name: str) -> Change:
    """Return what a change of a key of a run's record does: a setting, `version.trl`, `rewards.accuracy.timeout`."""
    if name.startswith("version.") or name.endswith(REWARD_OPERATION):
        return Change.NOTHING
    return SETTINGS.get(name, Setting()).change


def settings_changed_by(*changes: Change) -> frozenset[str]:
    """Return the names of the settings with one of these kinds of change."""
    return frozenset(name for name, row in SETTINGS.items() if row.change in changes)
