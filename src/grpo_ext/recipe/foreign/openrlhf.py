"""OpenRLHF's flags, with dots since 0.10 and without before: rollouts in prompts, optimizer steps in completions."""

from typing import Any

from grpo_ext.recipe.foreign.draft import Draft, rules, set_batch

_ENGINE = "- | OpenRLHF's engine; here --accelerate_config (zero2, zero3, fsdp2) says how weights are spread"
_PLACES = "- | where OpenRLHF's models are placed; num_processes counts the actor's GPUs"
TABLE = rules(
    **{
        "actor.model_name_or_path": "model_name_or_path",
        "actor.num_nodes": "* num_processes | times num_gpus_per_node",
        "actor.num_gpus_per_node": "* num_processes | times num_nodes",
        "actor.adam.lr": "learning_rate",
        "actor.adam.betas": "* adam_beta1, adam_beta2 | 0.9 and 0.95 where OpenRLHF is told nothing",
        "actor.adam.eps": "adam_epsilon",
        "actor.adam.weight_decay": "weight_decay",
        "actor.optim": "* optim | adam; muon is not here",
        "actor.muon.*": "- | muon is not here",
        "actor.lr_scheduler": "lr_scheduler_type",
        "actor.lr_warmup_ratio": "warmup_steps | a value below 1 is a ratio",
        "actor.min_lr_ratio": "* lr_scheduler_kwargs | min_lr_rate, of cosine_with_min_lr",
        "actor.max_norm": "max_grad_norm",
        "actor.eps_clip": "* epsilon | both bounds, unless eps_clip_low_high is given",
        "actor.eps_clip_low_high": "* epsilon, epsilon_high | a pair there",
        "actor.dual_clip": "delta",
        "actor.policy_loss_type": "* loss_type | gspo, or ppo: bnpo, a mean over the tokens of a micro-batch",
        "actor.aux_loss_coef": "router_aux_loss_coef",
        "actor.entropy_coef": "entropy_coef",
        "actor.gradient_checkpointing_enable": "gradient_checkpointing",
        "actor.gradient_checkpointing_reentrant": "* gradient_checkpointing_kwargs | use_reentrant",
        "actor.freeze_visual_encoder": "- | not here; name what LoRA trains by lora_target_modules",
        "ref.*": _PLACES,
        "critic.*": "- | no critic here: the group is the baseline",
        "reward.model_name_or_path": "* reward_funcs | an entry of the list",
        "reward.remote_url": "* reward_funcs | a .py file: a function, whose arguments differ; an http address: "
        "remote, of another protocol",
        "reward.overlong_buffer_len": "* reward_funcs | soft_overlong",
        "reward.overlong_penalty_factor": "* reward_funcs | weight of soft_overlong",
        "reward.stop_properly_penalty_coef": "* - | rewards of truncated completions are not scaled here; "
        "mask_truncated_completions leaves them out of the loss",
        "reward.normalize_enable": "- | the advantage normalises",
        "reward.clip_range": "* reward_funcs | clip of an entry",
        "reward.*": _PLACES,
        "algo.advantage.estimator": "* advantage_estimator | group_norm is group, dr_grpo is none, rloo is loo, "
        "reinforce is "
        "reinforce_pp, reinforce_baseline is reinforce_pp_baseline; gae has a critic and is not here",
        "algo.advantage.no_std_norm": "* advantage_estimator | of reinforce_baseline: none",
        "algo.advantage.is_correction_enable": "vllm_importance_sampling_correction",
        "algo.advantage.is_correction_type": "* vllm_importance_sampling_mode | tis is token_truncate, icepop is "
        "token_mask, "
        "seq-mask-tis is sequence_mask",
        "algo.advantage.is_correction_threshold": "* vllm_importance_sampling_clip_min, "
        "vllm_importance_sampling_clip_max | "
        "a pair there",
        "algo.advantage.*": "- | of GAE; a completion has one reward",
        "algo.kl.init_coef": "* beta | 0.01 where OpenRLHF is told nothing",
        "algo.kl.use_loss": "* kl_placement | loss; else reward",
        "algo.kl.estimator": "* kl_estimator | the same names",
        "algo.kl.*": "- | the coefficient is fixed",
        "algo.dynamic_filtering_enable": "* dynamic_sampling",
        "algo.dynamic_filtering_range": "* dynamic_sampling | groups whose mean is outside are dropped there; here "
        "those "
        "whose rewards are all the same",
        "train.batch_size": "* gradient_accumulation_steps | completions of an optimizer step, of all GPUs",
        "train.micro_batch_size": "* per_device_train_batch_size | completions in both",
        "train.dynamic_batch_enable": "* per_device_train_batch_size | OpenRLHF fills micro-batches by tokens; here "
        "they "
        "have a number of rows",
        "train.max_tokens_per_gpu": "- | micro-batches have a number of rows here",
        "train.max_epochs": "num_iterations",
        "train.num_episodes": "num_train_epochs",
        "train.seed": "seed",
        "train.full_determinism_enable": "full_determinism",
        "train.colocate_all": "* vllm_mode | colocate; without it vLLM has GPUs of its own: server",
        "train.async_enable": "* - | rollouts are of the current weights here",
        "train.agent_func_path": "* - | write it as a class, and list it under environments",
        "train.*": _PLACES,
        "rollout.batch_size": "* generation_batch_size | prompts there; completions here: times n_samples_per_prompt",
        "rollout.n_samples_per_prompt": "* num_generations",
        "rollout.max_new_tokens": "* max_completion_length",
        "rollout.temperature": "temperature",
        "rollout.top_p": "top_p",
        "rollout.*": "- | how OpenRLHF splits its rollouts; changes no result",
        "data.prompt_dataset": "* dataset_name",
        "data.prompt_split": "dataset_train_split",
        "data.prompt_probs": "* datasets | fraction of an entry",
        "data.input_key": "prompt_column",
        "data.label_key": "answer_column",
        "data.input_template": "* system_prompt | a template around the prompt is not here; write it into the data",
        "data.apply_chat_template": "* - | always, for prompts that are lists of messages; text stays as it is",
        "data.max_len": "* vllm_max_model_length | prompt and completion together; without max_new_tokens it bounds "
        "both",
        "data.max_samples": "max_samples",
        "data.dataloader_num_workers": "dataloader_num_workers",
        "data.*": "- | not here",
        "eval.dataset": "* - | evaluation is on a split of the same dataset: dataset_test_split or test_size",
        "eval.steps": "* eval_steps | rollouts there, optimizer steps here; -1 is never",
        "eval.n_samples_per_prompt": "* num_generations_eval | where eval.steps is not -1",
        "eval.*": "- | evaluation draws as training does",
        "ckpt.output_dir": "output_dir",
        "ckpt.save_steps": "* save_steps | rollouts there, optimizer steps here; -1 is never",
        "ckpt.max_num": "save_total_limit",
        "ckpt.load_enable": "- | a run always goes on from its last sound checkpoint",
        "ckpt.*": "- | checkpoints are under output_dir, and the model is always saved in Hugging Face's form",
        "logger.logging_steps": "logging_steps",
        "logger.wandb.key": "* report_to | wandb; export WANDB_API_KEY, a key belongs in no recipe",
        "logger.wandb.org": "* env | WANDB_ENTITY",
        "logger.wandb.group": "* env | WANDB_RUN_GROUP",
        "logger.wandb.project": "* env | WANDB_PROJECT",
        "logger.wandb.run_name": "run_name",
        "logger.tensorboard_dir": "* env | TENSORBOARD_LOGGING_DIR, and report_to: tensorboard",
        "vllm.num_engines": "* use_vllm | 0 is without",
        "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
        "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "vllm.enable_sleep": "vllm_enable_sleep_mode",
        "vllm.*": "- | of OpenRLHF's sampler",
        "ds.zero_stage": "* accelerate_config | zero1, zero2, zero3",
        "ds.param_dtype": "* bf16 | or fp16",
        "ds.attn_implementation": "attn_implementation",
        "ds.use_liger_kernel": "use_liger_kernel",
        "ds.load_in_4bit": "load_in_4bit",
        "ds.lora.rank": "* lora_r | 0 is no LoRA; use_peft switches it on here",
        "ds.lora.alpha": "* lora_alpha | where the rank is not 0",
        "ds.lora.dropout": "* lora_dropout | where the rank is not 0",
        "ds.lora.target_modules": "* lora_target_modules | where the rank is not 0",
        "ds.*": _ENGINE,
        "CUDA_VISIBLE_DEVICES": "- | export it before the start",
        "MASTER_PORT": "- | export it before the start",
        "local_rank": "- | the launcher's",
        "use_ms": "- | models come from the Hugging Face hub, or a folder",
        "perf": _ENGINE,
        "ptx_coef": "- | no supervised loss beside the policy's",
        "actor_init_on_gpu": _ENGINE,
    }
)
OLD = {
    "pretrain": "actor.model_name_or_path", "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path", "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path", "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs", "prompt_split": "data.prompt_split", "input_key": "data.input_key",
    "label_key": "data.label_key", "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template", "max_len": "data.max_len", "max_samples": "data.max_samples",
    "prompt_max_len": "data.prompt_max_len", "generate_max_len": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens", "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "rollout_batch_size": "rollout.batch_size", "micro_rollout_batch_size": "rollout.micro_batch_size",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size", "top_p": "rollout.top_p",
    "temperature": "rollout.temperature", "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "train_batch_size": "train.batch_size", "micro_train_batch_size": "train.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable", "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "max_epochs": "train.max_epochs", "num_episodes": "train.num_episodes", "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable", "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref", "colocate_critic_reward": "train.colocate_critic_reward",
    "async_train": "train.async_enable", "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable", "enable_ema": "train.enable_ema", "ema_beta": "train.ema_beta",
    "actor_learning_rate": "actor.adam.lr", "critic_learning_rate": "critic.adam.lr", "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay", "max_norm": "actor.max_norm", "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio", "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high", "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type", "aux_loss_coef": "actor.aux_loss_coef",
    "entropy_loss_coef": "actor.entropy_coef", "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "freeze_visual_encoder": "actor.freeze_visual_encoder", "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node", "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps", "save_value_network": "critic.save_value_network",
    "lambd": "algo.advantage.lambd", "gamma": "algo.advantage.gamma",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type", "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target", "kl_horizon": "algo.kl.horizon", "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss", "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range", "reward_clip_range": "reward.clip_range",
    "normalize_reward": "reward.normalize_enable", "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef", "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node", "ref_reward_offload": "ref.offload",
    "ref_num_nodes": "ref.num_nodes", "ref_num_gpus_per_node": "ref.num_gpus_per_node",
    "critic_num_nodes": "critic.num_nodes", "critic_num_gpus_per_node": "critic.num_gpus_per_node",
    "eval_dataset": "eval.dataset", "eval_split": "eval.split", "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt", "eval_steps": "eval.steps",
    "save_steps": "ckpt.save_steps", "save_path": "ckpt.output_dir", "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf", "disable_ds_ckpt": "ckpt.disable_ds", "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem", "load_checkpoint": "ckpt.load_enable", "best_metric_key": "ckpt.best_metric_key",
    "logging_steps": "logger.logging_steps", "use_wandb": "logger.wandb.key", "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group", "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name", "use_tensorboard": "logger.tensorboard_dir",
    "vllm_num_engines": "vllm.num_engines", "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_sync_backend": "vllm.sync_backend", "vllm_sync_with_ray": "vllm.sync_with_ray",
    "vllm_enable_sleep": "vllm.enable_sleep", "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "enable_prefix_caching": "vllm.enable_prefix_caching", "enforce_eager": "vllm.enforce_eager",
    "zero_stage": "ds.zero_stage", "param_dtype": "ds.param_dtype", "bf16": "ds.bf16", "flash_attn": "ds.flash_attn",
    "attn_implementation": "ds.attn_implementation", "use_liger_kernel": "ds.use_liger_kernel",
    "load_in_4bit": "ds.load_in_4bit", "lora_rank": "ds.lora.rank", "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout", "target_modules": "ds.lora.target_modules", "adam_offload": "ds.adam_offload",
    "packing_samples": "ds.packing_samples", "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size", "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride", "grad_accum_dtype": "ds.grad_accum_dtype",
    "overlap_comm": "ds.overlap_comm", "deepcompile": "ds.deepcompile", "zpg": "ds.zpg",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt", "value_head_prefix": "ds.value_head_prefix",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer", "dataloader_num_workers": "data.dataloader_num_workers",
    "image_key": "data.image_key", "max_images_per_prompt": "data.max_images_per_prompt",
}  # fmt: skip
"""Flags of OpenRLHF before 0.10, each with its name since."""
_ESTIMATORS = {
    "group_norm": "group",
    "dr_grpo": "none",
    "rloo": "loo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
}
_CORRECTIONS = {"tis": "token_truncate", "icepop": "token_mask", "seq-mask-tis": "sequence_mask"}


def translate(d: Draft) -> None:
    """All flags; where a flag is not given, OpenRLHF's default."""
    d.given = {OLD.get(key, key): value for key, value in d.given.items()}
    updates = _batch(d)
    _length(d, updates)
    _loss(d)
    _rewards(d)
    _model_and_data(d)
    _sampler(d)
    d.apply_table()
    said = "OpenRLHF's default"
    for key, value in (
        ("learning_rate", 1e-6),
        ("lr_scheduler_type", "cosine_with_min_lr"),
        ("warmup_steps", 0.03),
        ("num_train_epochs", 1),
        ("attn_implementation", "flash_attention_2"),
    ):
        if key not in d.values:
            d.set(key, value, said)
    if d.values["lr_scheduler_type"] == "cosine_with_min_lr" and "lr_scheduler_kwargs" not in d.values:
        d.set("lr_scheduler_kwargs", {"min_lr_rate": 0.1}, said)


def _batch(d: Draft) -> int:
    prompts, group = d.take("rollout.batch_size", 1024), d.take("rollout.n_samples_per_prompt", 1)
    step, rows = d.take("train.batch_size", 128), d.take("train.micro_batch_size", 1)
    processes = d.take("actor.num_nodes", 1) * d.take("actor.num_gpus_per_node", 8)
    d.set("num_generations", group)
    if group < 2:
        d.decide(
            f"num_generations: n_samples_per_prompt is {group}, and a group has 2 completions at least. Set it, and "
            "the "
            "batch with it."
        )
    sources = (f"{prompts} prompts (rollout.batch_size) x {group}", f"an optimizer step has {step} completions")
    set_batch(d, generated=prompts * group, step=step, processes=processes, rows=rows, sources=sources, group=group)
    if d.take("train.dynamic_batch_enable", False):
        d.decide(
            "per_device_train_batch_size: OpenRLHF fills micro-batches by tokens (max_tokens_per_gpu), here they "
            "have a "
            f"number of rows. {d.values['per_device_train_batch_size']} is a guess; what fits changes no result."
        )
    return max(1, prompts * group // step) * int(d.given.get("train.max_epochs") or 1)


def _length(d: Draft, updates: int) -> None:
    each = "rollouts there" + (f", of {updates} optimizer steps each" if updates > 1 else "")
    for key, name in (("ckpt.save_steps", "save"), ("eval.steps", "eval")):
        every = d.take(key, -1)
        if every > 0:
            d.set(f"{name}_strategy", "steps")
            d.set(f"{name}_steps", every * updates, each)
            if name == "eval":
                d.set("per_device_eval_batch_size", d.values["per_device_train_batch_size"])
                d.set("num_generations_eval", d.take("eval.n_samples_per_prompt", 4))
        else:
            d.set(f"{name}_strategy", "no")
    if d.take("eval.dataset") is not None:
        d.decide(
            f"Evaluation: OpenRLHF evaluates on {d.given['eval.dataset']}; here on a split of the same dataset. Set "
            "dataset_test_split or test_size, or eval_strategy: no."
        )
    betas = d.take("actor.adam.betas", [0.9, 0.95])
    d.set("adam_beta1", betas[0])
    d.set("adam_beta2", betas[1], "" if "actor.adam.betas" in d.given else "OpenRLHF's default")
    if (lowest := d.take("actor.min_lr_ratio")) is not None:
        d.set("lr_scheduler_kwargs", {"min_lr_rate": lowest})
    if d.take("actor.optim", "adam") != "adam":
        d.decide(f"optim: OpenRLHF's {d.given['actor.optim']!r} is not here; AdamW is what it stays.")


def _loss(d: Draft) -> None:
    if d.take("actor.policy_loss_type", "ppo") == "gspo":
        d.set("loss_type", "gspo")
    else:
        d.set("loss_type", "bnpo", "a mean over the tokens of a micro-batch; dapo: over those of the optimizer step")
    low, high = d.take("actor.eps_clip_low_high", [d.take("actor.eps_clip", 0.2)] * 2)
    d.take("actor.eps_clip")
    d.set("epsilon", low)
    d.set("epsilon_high", high)
    estimator, no_std = d.take("algo.advantage.estimator", "gae"), d.take("algo.advantage.no_std_norm", False)
    if estimator in _ESTIMATORS:
        named = _ESTIMATORS[estimator]
        d.set("advantage_estimator", "none" if no_std and named in ("group", "reinforce_pp_baseline") else named)
    else:
        d.set("advantage_estimator", "group")
        d.decide(f"advantage_estimator: OpenRLHF's {estimator!r} needs a critic, which is not here; group is written.")
    coefficient, in_loss = d.take("algo.kl.init_coef", 0.01), d.take("algo.kl.use_loss", False)
    kind = d.take("algo.kl.estimator", "k1")
    d.set("beta", coefficient, "" if "algo.kl.init_coef" in d.given else "OpenRLHF's default")
    if not coefficient:
        return
    if in_loss and kind == "k1":
        d.decide("kl_estimator: k1 has no useful gradient in the loss; k2, the right one, is written.")
        kind = "k2"
    d.set("kl_estimator", kind)
    d.set("kl_placement", "loss" if in_loss else "reward")


def _rewards(d: Draft) -> None:
    entries: list[Any] = []
    model, url = d.take("reward.model_name_or_path"), d.take("reward.remote_url")
    clip = d.take("reward.clip_range")
    if model:
        entries += [name.strip() for name in str(model).split(",")]
    for place in str(url).split(",") if url else []:
        if place.startswith("http"):
            d.decide(
                f"reward_funcs: {place} speaks OpenRLHF's protocol. The reward remote speaks others "
                "(docs/rewards.md); serve "
                "the model by vLLM, or write a function that asks it: {func: 'module:function'}."
            )
        else:
            d.decide(
                f"reward_funcs: {place} has reward_func(queries, prompts, labels), where queries are prompt and "
                "completion "
                "together; a reward here takes completions and columns, and returns a list. Write one around it: "
                "{func: 'module:function'}."
            )
    if d.take("train.agent_func_path"):
        d.decide(
            f"environments: {d.given['train.agent_func_path']} is an agent, whose environment scores; write it as a "
            "class with reset and step (docs/environments.md), {path: './file.py:Class'}, and leave out reward_funcs."
        )
    buffer, factor = d.take("reward.overlong_buffer_len"), d.take("reward.overlong_penalty_factor", 1.0)
    if buffer is not None:
        longest = d.given.get("rollout.max_new_tokens") or d.given.get("data.max_len") or 2048
        kwargs = {"max_length": int(longest), "buffer": int(buffer)}
        entries.append({"name": "soft_overlong", "weight": factor, "kwargs": kwargs})
    if entries:
        d.set("reward_funcs", entries)
    if clip is not None:
        d.decide(f"reward.clip_range {clip}: clip of an entry of reward_funcs, {{..., clip: {clip}}}.")
    if d.take("reward.stop_properly_penalty_coef") is not None:
        d.decide(
            "Truncated completions: OpenRLHF scales their reward by "
            f"{d.given['reward.stop_properly_penalty_coef']:g}; here mask_truncated_completions: true leaves them "
            "out of "
            "the loss, and a reward of yours may give them less."
        )
    span = d.take("algo.dynamic_filtering_range", [0, 1])
    if d.take("algo.dynamic_filtering_enable", False):
        note = f"groups without spread are drawn anew; OpenRLHF drops those whose mean is not inside {list(span)}"
        d.set("dynamic_sampling", "reward", note)


def _model_and_data(d: Draft) -> None:
    rank, alpha = d.take("ds.lora.rank", 0), d.take("ds.lora.alpha", 16)
    modules, dropout = d.take("ds.lora.target_modules", "all-linear"), d.take("ds.lora.dropout", 0.0)
    if rank:
        for key, value in (("use_peft", True), ("lora_r", rank), ("lora_alpha", alpha), ("lora_dropout", dropout)):
            d.set(key, value)
        d.set("lora_target_modules", modules)
    names = str(d.take("data.prompt_dataset", "")).split(",")
    d.set("dataset_name", names[0].partition("@")[0])
    if len(names) > 1 or d.take("data.prompt_probs") is not None:
        d.decide(
            f"dataset_name: of {len(names)} datasets the first is written. Mix them by datasets (docs/recipes.md)."
        )
    if d.take("data.input_template") is not None:
        d.decide(
            f"data.input_template {d.given['data.input_template']!r}: write it into the prompts, or as system_prompt."
        )
    templated = d.take("data.apply_chat_template", False)
    if not templated:
        d.notes["dataset_name"] = "prompts that are lists of messages get the chat template, text does not"
    longest, new = d.take("data.max_len", 2048), d.take("rollout.max_new_tokens")
    prompt = d.take("data.prompt_max_len")
    d.set("vllm_max_model_length", longest)
    if new is None:
        d.set("max_completion_length", longest // 2, f"half of max_len={longest}")
        d.set("max_prompt_length", longest // 2, f"half of max_len={longest}")
        d.decide(
            f"max_completion_length: OpenRLHF bounds prompt and completion together, by max_len={longest}; here each "
            "has "
            "its own bound. Halves are written."
        )
    else:
        d.set("max_completion_length", new)
        d.set("max_prompt_length", prompt or max(1, longest - new), f"max_len={longest} less max_new_tokens={new}")
    d.set("fp16" if d.take("ds.param_dtype", "bf16") == "fp16" else "bf16", True)
    if d.values.get("fp16"):
        d.set("bf16", False)
    stage = d.take("ds.zero_stage", 2)
    if stage:
        d.set("accelerate_config", f"zero{stage}")
    if d.take("actor.gradient_checkpointing_reentrant", False):
        d.set("gradient_checkpointing_kwargs", {"use_reentrant": True})
    for key, name in (("org", "WANDB_ENTITY"), ("group", "WANDB_RUN_GROUP"), ("project", "WANDB_PROJECT")):
        if (value := d.take(f"logger.wandb.{key}")) is not None:
            d.environment(name, value)
    trackers = []
    if d.take("logger.wandb.key") is not None:
        trackers.append("wandb")
        d.notes["report_to"] = "export WANDB_API_KEY; a key belongs in no recipe"
    if (folder := d.take("logger.tensorboard_dir")) is not None:
        trackers.append("tensorboard")
        d.environment("TENSORBOARD_LOGGING_DIR", folder)
    d.set("report_to", trackers or "none", d.notes.get("report_to", ""))


def _sampler(d: Draft) -> None:
    engines, together = d.take("vllm.num_engines", 0), d.take("train.colocate_all", False)
    if d.take("train.async_enable", False):
        d.decide("train.async_enable: rollouts are of the current weights here, and training waits for them.")
    d.set("use_vllm", bool(engines))
    if engines:
        d.set("vllm_mode", "colocate" if together else "server", "" if together else "start it by `grpo-ext serve`")
    kind, span = d.take("algo.advantage.is_correction_type", "tis"), d.take("algo.advantage.is_correction_threshold")
    if d.given.get("algo.advantage.is_correction_enable"):
        d.set("vllm_importance_sampling_mode", _CORRECTIONS.get(kind, "token_truncate"))
        low, high = span or (0.5, 5.0)
        d.set("vllm_importance_sampling_clip_min", low)
        d.set("vllm_importance_sampling_clip_max", high)
    elif engines:
        d.set("vllm_importance_sampling_correction", False, "OpenRLHF's default")
