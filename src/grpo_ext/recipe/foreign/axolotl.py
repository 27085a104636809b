"""axolotl's YAML with `rl: grpo`: TRL's GRPO keys in the block `trl`, the training's under names of its own."""

import dataclasses
from typing import Any

from trl import GRPOConfig

from grpo_ext.recipe.foreign import trl_family
from grpo_ext.recipe.foreign.draft import Draft, Rule, Translation, defaults_at, rules

_ASYNC = "- | rollouts are of the current weights here"
_DATA = "- | of axolotl's tokenised datasets; GRPO's are prompts"
TABLE: dict[str, Rule] = rules(**{
    "base_model": "model_name_or_path",
    "base_model_config": "- | the model's folder has its configuration and tokenizer",
    "tokenizer_config": "- | the model's folder has its configuration and tokenizer",
    "revision_of_model": "model_revision",
    "model_type": "- | the model's own configuration says it",
    "tokenizer_type": "- | the model's own configuration says it",
    "trust_remote_code": "trust_remote_code",
    "rl": "* multi_objective_aggregation | gdpo is normalize_then_sum",
    "rl_beta": "beta",
    "chat_template": "* chat_template | tokenizer_default is none; axolotl's own by name are Jinja here",
    "chat_template_jinja": "chat_template",
    "adapter": "* use_peft | lora and qlora",
    "lora_r": "* lora_r | with an adapter",
    "lora_alpha": "* lora_alpha | with an adapter",
    "lora_dropout": "* lora_dropout | with an adapter",
    "lora_target_modules": "* lora_target_modules | with an adapter",
    "lora_target_linear": "* lora_target_modules | true: all-linear",
    "lora_modules_to_save": "lora_modules_to_save",
    "lora_model_dir": "? | merge the adapter into the model first, or name its folder as the model",
    "lora_*_kernel": "- | axolotl's own kernels",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "load_in_4bit": "* load_in_4bit | only with LoRA, as in qlora",
    "load_in_8bit": "* load_in_8bit | only with LoRA",
    "datasets": "* dataset_name | path, name and split of the first; a type that transforms rows is not here",
    "test_datasets": "? | evaluation is on a split of the same dataset here: dataset_test_split, or test_size",
    "val_set_size": "* test_size | 0 is none",
    "dataset_prepared_path": _DATA,
    "dataset_processes": _DATA,
    "skip_prepare_dataset": _DATA,
    "remove_unused_columns": _DATA,
    "shuffle_merged_datasets": _DATA,
    "sequence_len": "* vllm_max_model_length | where vLLM samples: prompt and completion together",
    "sample_packing": "- | rows are packed by shared_prefix, where it is exact",
    "pad_to_sequence_len": "- | of supervised training",
    "train_on_inputs": "- | of supervised training",
    "group_by_length": "- | the sampler keeps the completions of a prompt together",
    "excess_length_strategy": "- | max_prompt_length drops, and cuts nothing",
    "special_tokens.*": "- | the tokenizer has its own; change it in the model's folder",
    "tokens": "- | the tokenizer has its own; change it in the model's folder",
    "micro_batch_size": "per_device_train_batch_size | completions in both",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps | a value below 1 is a ratio",
    "bf16": "* bf16 | auto is true",
    "fp16": "fp16",
    "tf32": "tf32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "flash_attention": "* attn_implementation | flash_attention_2",
    "sdp_attention": "* attn_implementation | sdpa",
    "eager_attention": "* attn_implementation | eager",
    "xformers_attention": "- | not here",
    "saves_per_epoch": "? | it depends on the number of rows; write a number of steps, save_steps",
    "evals_per_epoch": "? | it depends on the number of rows; write a number of steps, eval_steps",
    "save_safetensors": "- | transformers 5 always does",
    "auto_resume_from_checkpoints": "- | a run always resumes from its last sound checkpoint",
    "wandb_project": "* env | WANDB_PROJECT, and report_to: wandb",
    "wandb_entity": "* env | WANDB_ENTITY",
    "wandb_name": "run_name",
    "wandb_run_id": "* env | WANDB_RUN_ID",
    "wandb_watch": "* env | WANDB_WATCH",
    "wandb_log_model": "* env | WANDB_LOG_MODEL",
    "use_wandb": "* report_to | wandb",
    "use_tensorboard": "* report_to | tensorboard",
    "use_mlflow": "* report_to | mlflow",
    "deepspeed": "* accelerate_config | zero1, zero2, zero3 by the name of the file",
    "fsdp": "* accelerate_config | fsdp2",
    "fsdp_version": "* accelerate_config | fsdp2",
    "fsdp_config.*": "- | the launch configuration says it",
    "plugins": "? | axolotl's plug-ins are not here; environments are written as classes (docs/environments.md)",
    "nemo_gym_*": "- | environments of NeMo Gym are not in a recipe",
    "context_parallel_size": "- | a row is the work of one process",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.max_model_len": "vllm_max_model_length",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.dtype": "vllm_dtype",
    "vllm.host": "* vllm_server_host | 0.0.0.0 is where a server listens; localhost here",
    "vllm.port": "vllm_server_port",
    "vllm.*": "- | of axolotl's vllm-serve; `grpo-ext serve` takes vLLM's flags behind --",
    "trl.beta": "beta",
    "trl.reward_funcs": "* reward_funcs | the same paths",
    "trl.reward_weights": "* reward_funcs | weight of each entry",
    "trl.vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "trl.vllm_server_host": "* vllm_server_host | 0.0.0.0 is where a server listens; localhost here",
    "trl.use_liger_loss": "- | log-probabilities are always computed without full logits",
    "trl.rollout_func": "? | write it as a class, and list it under environments",
    "trl.use_data_producer": _ASYNC,
    "trl.async_prefetch": _ASYNC,
    "trl.prefetch_depth": _ASYNC,
    "trl.vllm_sync_interval": _ASYNC,
    "trl.streaming_*": _ASYNC,
    "trl.vllm_lora_sync": "- | vLLM gets the merged weights",
    "trl.reward_num_workers": "reward_workers",
    "trl.replay_*": "- | rollouts are used once",
    "trl.reroll_*": "- | dynamic_sampling draws groups without a signal again",
    "trl.skip_zero_advantage_batches": "skip_zero_advantages",
    "trl.vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "strict": "- | unknown keys are always refused",
    "ddp": "- | the launcher decides",
})  # fmt: skip
_IN_TRL = (
    *("max_completion_length", "num_generations", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("num_iterations", "epsilon", "epsilon_high", "loss_type", "importance_sampling_level", "scale_rewards"),
    *("multi_objective_aggregation", "log_completions", "num_completions_to_print", "mask_truncated_completions"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "generation_batch_size", "use_vllm"),
    *("generation_kwargs", "chat_template_kwargs", "vllm_mode", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_enable_sleep_mode", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("off_policy_mask_threshold", "use_bias_correction_kl"),
)
TABLE |= {f"trl.{name}": Rule(name) for name in _IN_TRL}
_OF_TRL = {f.name for f in dataclasses.fields(GRPOConfig)}
_SAME = frozenset(_OF_TRL | {"attn_implementation", "lora_target_parameters", "dtype"})


def _rl(d: Draft) -> None:
    if d.get("rl") == "gdpo" and "trl.multi_objective_aggregation" not in d.given:
        d.set("multi_objective_aggregation", "normalize_then_sum", of="rl")
    else:
        d.leave("rl", "a recipe is GRPO's")


def _model(d: Draft) -> None:
    adapter = d.get("adapter")
    if adapter:
        d.set("use_peft", True, of="adapter")
        for key in ("lora_r", "lora_alpha", "lora_dropout"):
            d.copy(key, key)
        if d.get("lora_target_linear"):
            d.set("lora_target_modules", "all-linear", of="lora_target_linear")
        else:
            d.copy("lora_target_modules", "lora_target_modules")
        if d.get("lora_dropout"):
            d.set("disable_dropout", False, "lora_dropout has an effect in axolotl; 0.0 and true here are exact")
    for key in ("load_in_4bit", "load_in_8bit"):
        if adapter and d.get(key, adapter == "qlora" and key == "load_in_4bit"):
            d.set(key, True, of=(key, "adapter"))
        elif d.get(key):
            sentence = f"{key} without an adapter: quantized weights cannot be trained. Set adapter, or leave it out."
            d.decide(sentence, of=key)
    for key, name in (("flash", "flash_attention_2"), ("sdp", "sdpa"), ("eager", "eager")):
        if d.get(f"{key}_attention"):
            d.set("attn_implementation", name, of=f"{key}_attention")
    template = str(d.get("chat_template", "tokenizer_default"))
    if "{" in template or template.endswith((".jinja", ".j2")):
        d.set("chat_template", template, of="chat_template")
    elif template == "jinja" or template.startswith("tokenizer_default"):
        d.leave("chat_template", "the tokenizer's own, or that of chat_template_jinja")
    else:
        d.decide(
            f"chat_template: {template!r} is one of axolotl's own. The tokenizer's is used; if it has none, write "
            "Jinja text or the path of a .jinja file.",
            of="chat_template",
        )
    if (precision := d.get("bf16")) is not None:
        d.set("bf16", True if precision == "auto" else precision, of="bf16")


def _data(d: Draft) -> None:
    entries = d.get("datasets") or []
    entries = entries if isinstance(entries, list) else [entries]
    if entries and isinstance(entries[0], dict):
        first = dict(entries[0])
        d.set("dataset_name", first.pop("path", None), of="datasets")
        for key, name in (("name", "dataset_config"), ("split", "dataset_train_split")):
            if first.get(key):
                d.set(name, first.pop(key), of="datasets")
        if transform := first.pop("type", None):
            d.decide(
                f"datasets.type {transform!r}: a transform of rows is not here. prompt_column, answer_column, "
                "answer_format and system_prompt do the usual; for more, write a file of rows with prompt and "
                "solution."
            )
        if first:
            d.decide(f"datasets: {', '.join(first)} of the first entry have no key here.")
    if len(entries) > 1:
        d.decide(f"datasets: of {len(entries)} the first is written. Mix them by datasets (docs/recipes.md).")
    if not entries:
        d.decide("dataset_name: none is given. Name one, or a file.")
    if held_out := d.get("val_set_size", 0):
        d.set("test_size", held_out, of="val_set_size")
        d.copy("eval_strategy", "eval_strategy", default="steps")


def _rewards(d: Draft) -> None:
    names, weights = d.get("trl.reward_funcs") or [], d.get("trl.reward_weights")
    entries: list[Any] = []
    for index, name in enumerate(names):
        weight = weights[index] if weights and len(weights) == len(names) else 1.0
        path = str(name) if "/" in str(name) else ":".join(str(name).rsplit(".", 1))
        if "/" in path:
            entries.append({"name": path, "weight": weight})
        else:
            key = {"func": path} if ":" not in path else {"name": path.partition(":")[2], "func": path}
            entries.append({**key, "weight": weight})
    if entries:
        note = "axolotl's paths; the modules must be importable, and take **kwargs"
        d.set("reward_funcs", entries, note, of=("trl.reward_funcs", "trl.reward_weights"))
    else:
        d.decide("reward_funcs: none is given. Name rewards (`docs/rewards.md`) or functions of yours.")


def _launch(d: Draft) -> None:
    if engine := d.get("deepspeed"):
        stage = next((f"zero{n}" for n in "123" if f"zero{n}" in str(engine)), None)
        if stage:
            d.set("accelerate_config", stage, f"{engine} there", of="deepspeed")
        else:
            sentence = f"deepspeed: {engine!r}: name a launch configuration of accelerate: accelerate_config."
            d.decide(sentence, of="deepspeed")
    if d.get("fsdp") or d.get("fsdp_version") or any(key.startswith("fsdp_config") for key in d.given):
        d.set("accelerate_config", "fsdp2", of=("fsdp", "fsdp_version"))
    for key in ("project", "entity", "run_id", "watch", "log_model"):
        d.environment(f"WANDB_{key.upper()}", f"wandb_{key}")
    trackers = [name for name in ("wandb", "tensorboard", "mlflow") if d.get(f"use_{name}")]
    if "WANDB_PROJECT" in d.values.get("env", {}) and "wandb" not in trackers:
        trackers.append("wandb")
    d.set("report_to", trackers or "none", of=("use_wandb", "use_tensorboard", "use_mlflow"))


def _sampler(d: Draft) -> None:
    if not d.get("trl.use_vllm"):
        for key in [k for k in d.given if k.startswith("vllm.") or k.startswith("trl.vllm_")]:
            d.leave(key, "use_vllm is false")
        return
    mode = d.get("trl.vllm_mode", "server")
    d.set(
        "vllm_mode",
        mode,
        "" if "trl.vllm_mode" in d.given else "axolotl starts one; here `grpo-ext serve`",
        "trl.vllm_mode",
    )
    names = ("trl.vllm_server_host", "vllm.host")
    host = next((d.given[name] for name in names if d.get(name)), None)
    if host and mode == "server":
        d.set("vllm_server_host", "localhost" if host == "0.0.0.0" else host, of=names)
    length = d.get("sequence_len")
    if length and "vllm.max_model_len" not in d.given:
        longest = d.get("trl.max_completion_length") or 256
        if longest < length:
            d.set("vllm_max_model_length", length, "sequence_len", of="sequence_len")
        else:
            d.decide(
                f"sequence_len={length} leaves no room for a prompt beside max_completion_length={longest}.",
                of="sequence_len",
            )


def _finish(d: Draft) -> None:
    trl_family.stock(d)


_PINS = {"0.12": "0.21", "0.13": "0.25", "0.14": "0.27", "0.15": "0.29", "0.17": "1.5", "0.18": "1.8"}
"""Version of axolotl -> the TRL that it pins."""
_PER_VERSION = {axolotl: defaults_at(trl_family.DEFAULTS, trl) for axolotl, trl in _PINS.items()}
AXOLOTL = Translation(
    "axolotl",
    TABLE,
    (_rl, _model, _data, _rewards, _launch, _sampler),
    {
        "lr_scheduler_type": {"0.12": "cosine"},
        **{
            key: {axolotl: values[key] for axolotl, values in _PER_VERSION.items() if key in values}
            for key in trl_family.DEFAULTS
            if key not in ("bf16", "gradient_checkpointing", "max_prompt_length")
        },
    },
    versions=tuple(_PINS),
    nested=True,
    same=_SAME,
    finish=_finish,
)
