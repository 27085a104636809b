"""axolotl's YAML with `rl: grpo`: TRL's GRPO keys in the block `trl`, the training's under names of its own."""

import dataclasses
from typing import Any

from trl import GRPOConfig

from grpo_ext.recipe.foreign import shared, trl
from grpo_ext.recipe.foreign.engine import Draft, Translation, defaults_at, rules

_ASYNC = "- | rollouts are of the current weights here"
_DATA = "- | of axolotl's tokenised datasets; GRPO's are prompts"
_TABLE = rules(
    {
        "=": "base_model=model_name_or_path revision_of_model=model_revision trust_remote_code rl_beta=beta "
        "chat_template_jinja=chat_template lora_modules_to_save peft_use_rslora=use_rslora peft_use_dora=use_dora "
        "eval_batch_size=per_device_eval_batch_size num_epochs=num_train_epochs optimizer=optim fp16 tf32 "
        "lr_scheduler=lr_scheduler_type float16=fp16 bfloat16=bf16 wandb_name=run_name "
        "wandb_project=env.WANDB_PROJECT wandb_entity=env.WANDB_ENTITY wandb_run_id=env.WANDB_RUN_ID "
        "wandb_watch=env.WANDB_WATCH wandb_log_model=env.WANDB_LOG_MODEL",
        "base_model_config tokenizer_config model_type tokenizer_type": "- | the model's folder has them",
        "rl": "* multi_objective_aggregation | gdpo is normalize_then_sum",
        "chat_template": "* chat_template | tokenizer_default is none; axolotl's own by name are Jinja here",
        "adapter": "* use_peft | lora and qlora",
        "lora_r": "* lora_r | with an adapter",
        "lora_alpha": "* lora_alpha | with an adapter",
        "lora_dropout": "* lora_dropout | with an adapter",
        "lora_target_modules": "* lora_target_modules | with an adapter",
        "lora_target_linear": "* lora_target_modules | true: all-linear",
        "lora_model_dir": "? | merge the adapter into the model first, or name its folder as the model",
        "lora_*_kernel": "- | axolotl's own kernels",
        "load_in_4bit": "* load_in_4bit | only with LoRA, as in qlora",
        "load_in_8bit": "* load_in_8bit | only with LoRA",
        "datasets": "* dataset_name | path, name and split of the first; a type that transforms rows is not supported",
        "test_datasets": "? | evaluation is on a split of the same dataset here: dataset_test_split, or test_size",
        "val_set_size": "* test_size | 0 is none",
        "dataset_prepared_path dataset_processes skip_prepare_dataset remove_unused_columns": _DATA,
        "shuffle_merged_datasets": _DATA,
        "sequence_len": "* vllm_max_model_length | where vLLM samples: prompt and completion together",
        "sample_packing": "- | rows are packed by shared_prefix, where it is exact",
        "pad_to_sequence_len train_on_inputs": "- | of supervised training",
        "group_by_length": "- | the sampler keeps the completions of a prompt together",
        "excess_length_strategy": "- | max_prompt_length drops longer prompts",
        "special_tokens.* tokens": "- | the tokenizer has its own; change it in the model's folder",
        "micro_batch_size": "per_device_train_batch_size | completions in both",
        "warmup_ratio": "warmup_steps | a value below 1 is a ratio",
        "bf16": "bf16 | auto is true",
        "flash_attention": "* attn_implementation | flash_attention_2",
        "sdp_attention": "* attn_implementation | sdpa",
        "eager_attention": "* attn_implementation | eager",
        "xformers_attention": "- | not supported",
        "saves_per_epoch": "? | it depends on the number of rows; write a number of steps, save_steps",
        "evals_per_epoch": "? | it depends on the number of rows; write a number of steps, eval_steps",
        "save_safetensors": "- | transformers 5 always does",
        "auto_resume_from_checkpoints": "- | a run always resumes from its last sound checkpoint",
        "use_wandb use_tensorboard use_mlflow": "* report_to | wandb, tensorboard, mlflow",
        "deepspeed": "* accelerate_config | zero1, zero2, zero3 by the name of the file",
        "fsdp fsdp_version": "* accelerate_config | fsdp2",
        "fsdp_config.*": "- | the launch configuration has it",
        "plugins": "? | axolotl's plug-ins are not supported; an environment is a class (docs/environments.md)",
        "nemo_gym_*": "- | environments of NeMo Gym are not supported in a recipe",
        "context_parallel_size": "- | a row is the work of one process",
        "vllm": {
            "=": "gpu_memory_utilization=vllm_gpu_memory_utilization max_model_len=vllm_max_model_length "
            "tensor_parallel_size=vllm_tensor_parallel_size dtype=vllm_dtype port=vllm_server_port",
            "host": "* vllm_server_host | 0.0.0.0 is where a server listens; localhost here",
            "*": "- | of axolotl's vllm-serve; `grpo-ext serve` takes vLLM's flags behind --",
        },
        "trl": {
            "=": "beta max_completion_length num_generations temperature top_p top_k min_p repetition_penalty "
            "num_iterations epsilon epsilon_high loss_type importance_sampling_level scale_rewards "
            "multi_objective_aggregation log_completions num_completions_to_print mask_truncated_completions "
            "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps generation_batch_size use_vllm "
            "generation_kwargs chat_template_kwargs vllm_server_port vllm_server_timeout vllm_enable_sleep_mode "
            "vllm_importance_sampling_correction vllm_importance_sampling_mode off_policy_mask_threshold "
            "use_bias_correction_kl vllm_guided_decoding_regex=vllm_structured_outputs_regex "
            "reward_num_workers=reward_workers skip_zero_advantage_batches=skip_zero_advantages "
            "vllm_importance_sampling_cap=vllm_importance_sampling_clip_max",
            "vllm_mode": "* vllm_mode | server by default",
            "reward_funcs": "* reward_funcs | the same paths",
            "reward_weights": "* reward_funcs | weight of each entry",
            "vllm_server_host": "* vllm_server_host | 0.0.0.0 is where a server listens; localhost here",
            "use_liger_loss": "- | log-probabilities are always computed without full logits",
            "rollout_func": "? | write it as a class, and list it under environments",
            "use_data_producer async_prefetch prefetch_depth vllm_sync_interval streaming_*": _ASYNC,
            "vllm_lora_sync": "- | vLLM gets the merged weights",
            "replay_*": "- | rollouts are used once",
            "reroll_*": "- | dynamic_sampling draws groups without a signal again",
        },
        "strict": "- | unknown keys are always refused",
        "ddp": "- | the launcher decides",
    }
)
_SAME = {f.name for f in dataclasses.fields(GRPOConfig)} | {"attn_implementation", "lora_target_parameters", "dtype"}


def _model(d: Draft) -> None:
    if d.get("rl") == "gdpo" and "trl.multi_objective_aggregation" not in d.given:
        d.set("multi_objective_aggregation", "normalize_then_sum")
    adapter = d.get("adapter")
    if adapter:
        keys = {name: [f"lora_{name}"] for name in ("alpha", "dropout", "target_modules")}
        shared.set_lora(d, rank=["lora_r"], **keys)
        d.set("use_peft", True, of="adapter")
        if d.get("lora_target_linear"):
            d.set("lora_target_modules", "all-linear", of="lora_target_linear")
    for key in ("load_in_4bit", "load_in_8bit"):
        if adapter and d.get(key, adapter == "qlora" and key == "load_in_4bit"):
            d.set(key, True, of=(key, "adapter"))
        elif d.get(key):
            sentence = "without an adapter: quantized weights cannot be trained. Set adapter, or leave it out"
            d.decide(f"{key} {sentence}.", key)
    for key, name in (("flash", "flash_attention_2"), ("sdp", "sdpa"), ("eager", "eager")):
        if d.get(f"{key}_attention"):
            d.set("attn_implementation", name, of=f"{key}_attention")
    template = str(d.get("chat_template", "tokenizer_default"))
    if "{" in template or template.endswith((".jinja", ".j2")):
        d.set("chat_template", template)
    elif template == "jinja" or template.startswith("tokenizer_default"):
        d.leave("chat_template", "the tokenizer's own, or that of chat_template_jinja")
    else:
        d.decide(
            f"chat_template: {template!r} is one of axolotl's own. The tokenizer's is used; if it has none, write "
            "Jinja text or the path of a .jinja file.",
            "chat_template",
        )


def _data(d: Draft) -> None:
    entries = shared.to_list(d.get("datasets"))
    if entries and isinstance(entries[0], dict):
        first = dict(entries[0])
        d.set("dataset_name", first.pop("path", None))
        for key, name in (("name", "dataset_config"), ("split", "dataset_train_split")):
            if first.get(key):
                d.set(name, first.pop(key), of="datasets")
        if transform := first.pop("type", None):
            d.decide(
                f"datasets.type {transform!r}: a transform of rows is not supported. prompt_column, answer_column, "
                "answer_format and system_prompt do the usual; for more, write a file with prompt and solution."
            )
        if first:
            d.decide(f"datasets: {', '.join(first)} of the first entry has no counterpart in a recipe.")
    shared.decide_first_of(d, entries, "datasets")
    if not entries:
        d.decide("dataset_name: the file names no dataset. Name one, or a file.")
    shared.set_held_out(d, "val_set_size")


def _rewards(d: Draft) -> None:
    names, weights = d.get("trl.reward_funcs") or [], d.get("trl.reward_weights")
    entries: list[Any] = []
    for index, name in enumerate(names):
        module, _, function = str(name).rpartition(".")
        if "/" in str(name) or not module:
            entry = {"name" if "/" in str(name) else "func": str(name)}
        else:
            entry = {"name": function, "func": f"{module}:{function}"}
        entries.append({**entry, "weight": weights[index] if weights and len(weights) == len(names) else 1.0})
    if entries:
        d.set("reward_funcs", entries, "axolotl's paths; the modules must be importable, and take **kwargs")


def _run(d: Draft) -> None:
    shared.set_zero_stage(d, exact=False)
    if d.get("fsdp") or d.get("fsdp_version") or any(name.startswith("fsdp_config") for name in d.given):
        d.set("accelerate_config", "fsdp2", of=("fsdp", "fsdp_version"))
    trackers = [name for name in ("wandb", "tensorboard", "mlflow") if d.get(f"use_{name}")]
    if d.get("wandb_project") and "wandb" not in trackers:
        trackers.append("wandb")
    d.set("report_to", trackers or "none")


def _sampler(d: Draft) -> None:
    if not d.get("trl.use_vllm"):
        for key in d.given:
            if key.startswith(("vllm.", "trl.vllm_")):
                d.leave(key, "use_vllm is false")
        return
    d.set("vllm_mode", d.get("trl.vllm_mode", "server"))
    host = d.get("trl.vllm_server_host") or d.get("vllm.host")
    if host and d.values["vllm_mode"] == "server":
        d.set("vllm_server_host", "localhost" if host == "0.0.0.0" else host)
    length, longest = d.get("sequence_len"), d.get("trl.max_completion_length") or 256
    if length and "vllm.max_model_len" not in d.given:
        if longest < length:
            d.set("vllm_max_model_length", length, "sequence_len")
        else:
            sentence = f"leaves no room for a prompt beside max_completion_length={longest}"
            d.decide(f"sequence_len={length} {sentence}.", "sequence_len")


_PINS = {"0.12": "0.21", "0.13": "0.25", "0.14": "0.27", "0.15": "0.29", "0.17": "1.5", "0.18": "1.8"}
"""Version of axolotl -> the TRL that it pins."""
_PER_VERSION = {axolotl: defaults_at(trl.DEFAULTS, pinned) for axolotl, pinned in _PINS.items()}
AXOLOTL = Translation(
    "axolotl",
    _TABLE,
    (_model, _data, _rewards, _run, _sampler),
    versions=tuple(_PINS),
    defaults={
        "lr_scheduler_type": "cosine",
        **{
            key: {axolotl: values[key] for axolotl, values in _PER_VERSION.items() if key in values}
            for key in trl.DEFAULTS.keys() - {"bf16", "gradient_checkpointing", "max_prompt_length"}
        },
    },
    converters={"bf16": lambda value: True if value == "auto" else value},
    nested=True,
    same=frozenset(_SAME),
    finish=trl.set_stock,
)
