"""The table of settings: what is declared about each, ours with its field, those of others here."""

from dataclasses import Field, fields

from grpo_ext.config.declarations import RecipeSettings, TrainingSettings
from grpo_ext.config.setting import APART, CORRECTED, COUNT, NOT_NEGATIVE, POSITIVE, VLLM, Change, Setting
from grpo_ext.objective.options import Within

GREEDY = "only the likeliest token is left, so that every completion of a group is the same"
ADAPTED = ("use_peft: true",)
_ADAPTIVE = ("use_adaptive_entropy: true",)
_SYNCED = ("sync_ref_model: true",)
_ONE_DATASET = ("dataset_name (a mixture has its own keys, inside datasets)",)
_UNIT = Within(least=0.0, most=1.0)

_OF_OTHERS = {
    # Numbers.
    "beta vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg router_aux_loss_coef weight_decay "
    "learning_rate max_grad_norm": Setting(NOT_NEGATIVE),
    "sapo_temperature_pos sapo_temperature_neg off_policy_mask_threshold repetition_penalty": Setting(POSITIVE),
    "adam_epsilon": Setting(POSITIVE),
    "max_completion_length max_tool_calling_iterations pad_to_multiple_of generation_batch_size "
    "num_iterations": Setting(COUNT),
    "num_generations_eval per_device_eval_batch_size save_total_limit": Setting(COUNT, change=Change.NOTHING),
    "top_entropy_quantile": Setting(_UNIT),
    "top_p": Setting(Within(above=0.0, most=1.0)),
    "top_k": Setting(Within(least=0.0, because="0 switches it off")),
    "min_p": Setting(Within(least=0.0, below=1.0, because=f"at 1 {GREEDY}")),
    "temperature": Setting(Within(above=0.0, because="at 0 every completion of a group is the same")),
    "num_generations": Setting(Within(least=2.0, because="a group baseline needs at least 2 completions per prompt")),
    "seed data_seed": Setting(Within(least=0.0, most=2.0**32 - 1, because="NumPy takes no other seeds")),
    # Waiting for another setting.
    "entropy_coef_delta entropy_target": Setting(NOT_NEGATIVE, needs=_ADAPTIVE),
    "entropy_coef_min entropy_coef_max": Setting(needs=_ADAPTIVE),
    "ref_model_sync_steps": Setting(COUNT, needs=_SYNCED),
    "ref_model_mixup_alpha": Setting(_UNIT, needs=_SYNCED),
    "vllm_importance_sampling_correction": Setting(needs=APART),
    "vllm_importance_sampling_cap": Setting(POSITIVE, needs=APART),
    "vllm_importance_sampling_clip_min": Setting(NOT_NEGATIVE, needs=CORRECTED),
    "vllm_mode": Setting(choices=("server", "colocate"), needs=VLLM),
    "vllm_max_model_length": Setting(COUNT, needs=VLLM),
    "vllm_structured_outputs_regex vllm_model_impl": Setting(needs=VLLM),
    "vllm_tensor_parallel_size": Setting(needs=VLLM, change=Change.ROUNDING),
    "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
    "vllm_enable_sleep_mode vllm_gpu_memory_utilization": Setting(needs=VLLM, change=Change.NOTHING),
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type "
    "use_rslora use_dora": Setting(needs=ADAPTED),
    "streaming test_split_size": Setting(needs=("datasets",)),
    "dataset_config dataset_train_split dataset_streaming": Setting(needs=_ONE_DATASET),
    "dataset_test_split": Setting(needs=_ONE_DATASET, change=Change.NOTHING),
    # Without a use in GRPO.
    "label_smoothing_factor": Setting(unused="GRPO has no labels to smooth"),
    "label_names": Setting(unused="GRPO has no labels"),
    "train_sampling_strategy length_column_name": Setting(
        unused="the sampler keeps the completions of a prompt together"
    ),
    "include_for_metrics batch_eval_metrics": Setting(unused="no compute_metrics is called", change=Change.NOTHING),
    # A change of these is no other run.
    "model_name_or_path model_revision": Setting(change=Change.MODEL),
    "max_steps": Setting(change=Change.LENGTH),
    "num_train_epochs": Setting(POSITIVE, change=Change.LENGTH),
    "world_size": Setting(change=Change.SPLIT),
    "per_device_train_batch_size gradient_accumulation_steps": Setting(COUNT, change=Change.SPLIT),
    "steps_per_generation": Setting(COUNT, change=Change.SPLIT),
    "gradient_checkpointing gradient_checkpointing_kwargs attn_implementation full_determinism use_cpu "
    "torch_compile torch_compile_backend torch_compile_mode "
    "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters "
    "ddp_static_graph": Setting(change=Change.ROUNDING),
    # of these, the machine's; then data, logs, evaluation, checkpoints and the hub
    "trust_remote_code ddp_timeout debug do_train local_rank skip_memory_metrics torch_empty_cache_steps "
    "dataloader_pin_memory dataloader_persistent_workers dataloader_num_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context "
    "disable_tqdm include_num_input_tokens_seen log_completions log_completions_hub_repo log_multimodal "
    "log_on_each_node log_unique_prompts logging_first_step project run_name log_level log_level_replica "
    "logging_strategy logging_steps report_to trackio_bucket_id trackio_space_id trackio_static_space_id "
    "do_eval do_predict eval_do_concat_batches eval_on_start eval_use_gather_object bf16_full_eval fp16_full_eval "
    "prediction_loss_only metric_for_best_model greater_is_better load_best_model_at_end eval_strategy eval_steps "
    "eval_delay eval_accumulation_steps "
    "enable_jit_checkpoint hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy push_to_hub "
    "output_dir resume_from_checkpoint save_on_each_node save_only_model save_strategy "
    "save_steps": Setting(change=Change.NOTHING),
}
"""Settings of TRL and transformers, and of a run's record, by their names; those with the default are left out."""

SETTINGS: dict[str, Setting] = {
    **{name: row for names, row in _OF_OTHERS.items() for name in names.split()},
    **{f.name: f.metadata["setting"] for part in (TrainingSettings, RecipeSettings) for f in fields(part)},
}
"""All declarations by the setting's name; one without a row has the default, `Setting()`."""
FUNCTIONS = ("loss_type", *(name for name, row in SETTINGS.items() if row.function))
"""Settings that may name a function of the user's."""
REWARD_OPERATION = (".timeout", ".retries", ".isolate", ".independent")
"""Ends of the names of a reward's settings that change how it is called, but no value."""


def row_of(f: Field) -> Setting:
    """Return what is declared about a field of one of a recipe's parts."""
    return f.metadata.get("setting") or SETTINGS.get(f.name, Setting())


def change_of(name: str) -> Change:
    """Return what a change of a key of a run's record does: a setting, `version.trl`, `rewards.accuracy.timeout`."""
    if name.startswith("version.") or name.endswith(REWARD_OPERATION):
        return Change.NOTHING
    return SETTINGS.get(name, Setting()).change


def settings_changed_by(*changes: Change) -> frozenset[str]:
    """Return the names of the settings with one of these kinds of change."""
    return frozenset(name for name, row in SETTINGS.items() if row.change in changes)
