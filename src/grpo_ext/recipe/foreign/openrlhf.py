"""OpenRLHF's flags, with dots since 0.10 and without before: rollouts in prompts, optimizer steps in completions."""

from collections.abc import Mapping
from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.recipe.foreign.counting import set_batch, set_intervals, set_kl, set_machines
from grpo_ext.recipe.foreign.draft import Draft, Translation, number, rules

_ENGINE = "- | OpenRLHF's engine; here --accelerate_config (zero2, zero3, fsdp2) says how weights are spread"
_PLACES = "- | where OpenRLHF's models are placed; num_processes counts the actor's GPUs"
TABLE = rules(
    **{
        "actor.model_name_or_path": "model_name_or_path",
        "actor.num_nodes": "* num_processes | times num_gpus_per_node",
        "actor.num_gpus_per_node": "* num_processes | times num_nodes",
        "actor.adam.lr": "learning_rate",
        "actor.adam.betas": "* adam_beta1, adam_beta2 | 0.9 and 0.95 by default",
        "actor.adam.eps": "adam_epsilon",
        "actor.adam.weight_decay": "weight_decay",
        "actor.optim": "* - | adam; muon is not here",
        "actor.muon.*": "- | muon is not here",
        "actor.lr_scheduler": "* lr_scheduler_type",
        "actor.lr_warmup_ratio": "warmup_steps | a value below 1 is a ratio",
        "actor.min_lr_ratio": "* lr_scheduler_kwargs | min_lr_rate, of cosine_with_min_lr",
        "actor.max_norm": "max_grad_norm",
        "actor.eps_clip": "* epsilon | both bounds, unless eps_clip_low_high is given",
        "actor.eps_clip_low_high": "* epsilon, epsilon_high | a pair there",
        "actor.dual_clip": "delta",
        "actor.policy_loss_type": "* loss_type | gspo; ppo: dapo, until 0.10.1 bnpo, whose mean is over a micro-batch",
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
        "reward.stop_properly_penalty_coef": "? | OpenRLHF scales the reward of truncated completions by it, or "
        "gives it if negative; mask_truncated_completions leaves them out of the loss",
        "reward.normalize_enable": "- | the advantage normalises",
        "reward.clip_range": "* reward_funcs | clip of an entry",
        "reward.*": _PLACES,
        "algo.advantage.estimator": "* advantage_estimator | group_norm is group, dr_grpo is none, rloo is loo, "
        "reinforce is reinforce_pp, reinforce_baseline is reinforce_pp_baseline; gae has a critic and is not here",
        "algo.advantage.no_std_norm": "* advantage_estimator | of reinforce_baseline: none",
        "algo.advantage.is_correction_enable": "* vllm_importance_sampling_correction | not with gspo",
        "algo.advantage.is_correction_type": "* vllm_importance_sampling_mode | tis is token_truncate, icepop is "
        "token_mask; seq-mask-tis, a mask by the geometric mean of a completion, is not here",
        "algo.advantage.is_correction_threshold": "* vllm_importance_sampling_clip_min, "
        "vllm_importance_sampling_clip_max | a pair there",
        "algo.advantage.use_icepop": "* vllm_importance_sampling_mode | true: token_mask",
        "algo.advantage.*": "- | of GAE; a completion has one reward",
        "algo.kl.init_coef": "* beta | 0.01 by default",
        "algo.kl.use_loss": "* kl_placement | loss; else reward",
        "algo.kl.estimator": "* kl_estimator | the same names",
        "algo.kl.*": "- | the coefficient is fixed",
        "algo.dynamic_filtering_enable": "* dynamic_sampling",
        "algo.dynamic_filtering_range": "? | groups whose mean is outside are dropped there, here those whose "
        "rewards are all the same",
        "train.batch_size": "* gradient_accumulation_steps | completions of an optimizer step, of all GPUs",
        "train.micro_batch_size": "* per_device_train_batch_size | completions in both",
        "train.dynamic_batch_enable": "* per_device_train_batch_size | OpenRLHF fills micro-batches by tokens; here "
        "they have a number of rows",
        "train.max_tokens_per_gpu": "- | micro-batches have a number of rows here",
        "train.max_epochs": "num_iterations",
        "train.num_episodes": "num_train_epochs",
        "train.seed": "seed",
        "train.full_determinism_enable": "full_determinism",
        "train.colocate_all": "* vllm_mode | colocate; without it vLLM has GPUs of its own: server",
        "train.async_enable": "? | rollouts are of the current weights here; rollout_ahead: 1 is nearest",
        "train.agent_func_path": "? | an agent, whose environment scores: write it as a class with reset and step "
        "(docs/environments.md), environments: [{path: ./file.py:Class}], and leave out reward_funcs",
        "train.*": _PLACES,
        "rollout.batch_size": "* generation_batch_size | prompts there; completions here: times n_samples_per_prompt",
        "rollout.n_samples_per_prompt": "* num_generations",
        "rollout.max_new_tokens": "* max_completion_length",
        "rollout.temperature": "temperature",
        "rollout.top_p": "top_p",
        "rollout.*": "- | how OpenRLHF splits its rollouts; changes no result",
        "data.prompt_dataset": "* dataset_name",
        "data.prompt_split": "dataset_train_split",
        "data.prompt_probs": "? | the first dataset is written; mix them by datasets, with a fraction each",
        "data.input_key": "prompt_column",
        "data.label_key": "answer_column",
        "data.input_template": "? | write it into the prompts, or as system_prompt",
        "data.apply_chat_template": "* - | always, for prompts that are lists of messages; text stays as it is",
        "data.prompt_max_len": "* max_prompt_length",
        "data.max_len": "* vllm_max_model_length | prompt and completion together; without max_new_tokens it bounds "
        "both",
        "data.max_samples": "max_samples",
        "data.dataloader_num_workers": "dataloader_num_workers",
        "data.*": "- | not here",
        "eval.dataset": "? | evaluation is on a split of the same dataset here: set dataset_test_split, test_size, "
        "or eval_strategy: no",
        "eval.steps": "* eval_steps | rollouts there, optimizer steps here; -1 is never",
        "eval.n_samples_per_prompt": "* num_generations_eval | where eval.steps is not -1",
        "eval.*": "- | evaluation draws as training does",
        "ckpt.output_dir": "* output_dir",
        "ckpt.save_steps": "* save_steps | rollouts there, optimizer steps here; -1 is never",
        "ckpt.max_num": "save_total_limit",
        "ckpt.load_enable": "- | a run always resumes from its last sound checkpoint",
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
_SAME_NAME = {
    "train": "agent_func_path max_epochs num_episodes seed colocate_actor_ref colocate_critic_reward "
    "async_queue_size enable_ema ema_beta",
    "data": "prompt_split input_key label_key input_template apply_chat_template max_len max_samples prompt_max_len "
    "disable_fast_tokenizer dataloader_num_workers image_key max_images_per_prompt",
    "rollout": "max_new_tokens n_samples_per_prompt vllm_generate_batch_size top_p temperature",
    "actor": "max_norm lr_scheduler lr_warmup_ratio eps_clip eps_clip_low_high dual_clip policy_loss_type "
    "aux_loss_coef freeze_visual_encoder",
    "critic": "value_clip save_value_network",
    "algo.advantage": "lambd gamma use_icepop",
    "reward": "overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef",
    "ckpt": "save_steps best_metric_key",
    "logger": "logging_steps",
    "vllm": "enable_prefix_caching enforce_eager",
    "ds": "zero_stage param_dtype bf16 flash_attn attn_implementation use_liger_kernel load_in_4bit adam_offload "
    "packing_samples ring_attn_size grad_accum_dtype overlap_comm deepcompile zpg value_head_prefix",
    "ds.lora": "target_modules",
}  # fmt: skip
OLD = {old: f"{section}.{old}" for section, names in _SAME_NAME.items() for old in names.split()} | {
    "pretrain": "actor.model_name_or_path", "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path", "remote_rm_url": "reward.remote_url",
    "prompt_data": "data.prompt_dataset", "prompt_data_probs": "data.prompt_probs",
    "generate_max_len": "rollout.max_new_tokens", "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu", "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size", "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu", "full_determinism": "train.full_determinism_enable",
    "colocate_all_models": "train.colocate_all", "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable", "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr", "adam_betas": "actor.adam.betas", "l2": "actor.adam.weight_decay",
    "entropy_loss_coef": "actor.entropy_coef", "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "actor_num_nodes": "actor.num_nodes", "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "freezing_actor_steps": "critic.freezing_steps", "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type", "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target", "kl_horizon": "algo.kl.horizon", "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss", "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range", "reward_clip_range": "reward.clip_range",
    "normalize_reward": "reward.normalize_enable", "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node", "ref_reward_offload": "ref.offload",
    "ref_num_nodes": "ref.num_nodes", "ref_num_gpus_per_node": "ref.num_gpus_per_node",
    "critic_num_nodes": "critic.num_nodes", "critic_num_gpus_per_node": "critic.num_gpus_per_node",
    "eval_dataset": "eval.dataset", "eval_split": "eval.split", "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt", "eval_steps": "eval.steps",
    "save_path": "ckpt.output_dir", "ckpt_path": "ckpt.path", "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds", "max_ckpt_num": "ckpt.max_num", "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable", "use_wandb": "logger.wandb.key", "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group", "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name", "use_tensorboard": "logger.tensorboard_dir",
    "vllm_num_engines": "vllm.num_engines", "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_sync_backend": "vllm.sync_backend", "vllm_sync_with_ray": "vllm.sync_with_ray",
    "vllm_enable_sleep": "vllm.enable_sleep", "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "lora_rank": "ds.lora.rank", "lora_alpha": "ds.lora.alpha", "lora_dropout": "ds.lora.dropout",
    "deepspeed_enable_sleep": "ds.enable_sleep", "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "ring_head_stride": "ds.ring_attn_head_stride", "use_ds_universal_ckpt": "ds.use_universal_ckpt",
}  # fmt: skip
"""Flags of OpenRLHF before 0.10, each with its name since."""
_ESTIMATORS = {
    "group_norm": "group",
    "dr_grpo": "none",
    "rloo": "loo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
}
_MODES = {"tis": "token_truncate", "icepop": "token_mask"}


def _group(d: Draft) -> None:
    group, estimator = d.get("rollout.n_samples_per_prompt", 1), d.get("algo.advantage.estimator", "gae")
    if estimator == "gae":
        raise ConfigError(
            [
                "PPO with a critic (algo.advantage.estimator gae, OpenRLHF's default): there is no critic here. Set "
                "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 there, and migrate that."
            ]
        )
    d.set("num_generations", group, of="rollout.n_samples_per_prompt")
    if group < 2:
        d.decide(
            f"num_generations: n_samples_per_prompt is {group}, and a group has at least 2 completions. Set it, and "
            "the batch with it."
        )
    named, unscaled = _ESTIMATORS.get(estimator, "group"), d.get("algo.advantage.no_std_norm", False)
    if unscaled and named == "reinforce_pp_baseline":
        d.set("advantage_estimator", "none", of=("algo.advantage.estimator", "algo.advantage.no_std_norm"))
    else:
        d.set("advantage_estimator", named, of="algo.advantage.estimator")
    if estimator not in _ESTIMATORS:
        d.decide(f"advantage_estimator: OpenRLHF's {estimator!r} is not here; group, GRPO's, is written.")
    if unscaled and named == "reinforce_pp":
        d.decide("advantage_estimator: reinforce_pp always divides by std.", of="algo.advantage.no_std_norm")


def _batch(d: Draft) -> None:
    prompts, group, step = (
        d.get("rollout.batch_size", 1024),
        d.values["num_generations"],
        d.get("train.batch_size", 128),
    )
    rows, nodes = d.get("train.micro_batch_size", 4 if _before(d, "0.10") else 1), d.get("actor.num_nodes", 1)
    drawn = f"{prompts} prompts (rollout.batch_size) x {group}"
    set_batch(
        d,
        (prompts * group, drawn, ("rollout.batch_size", "rollout.n_samples_per_prompt")),
        (step, f"an optimizer step has {step} completions", ("train.batch_size",)),
        (rows, "train.micro_batch_size"),
        (nodes * d.get("actor.num_gpus_per_node", 8), ("actor.num_nodes", "actor.num_gpus_per_node")),
        "train.dynamic_batch_enable" if d.get("train.dynamic_batch_enable") else "",
    )
    set_machines(d, nodes, of="actor.num_nodes")


def _before(d: Draft, version: str) -> bool:
    return number(d.version) < number(version)


def _length(d: Draft) -> None:
    generated = d.get("rollout.batch_size", 1024) * d.values["num_generations"]
    updates = max(1, generated // d.get("train.batch_size", 128)) * int(d.get("train.max_epochs", 1))
    of_eval = ("eval.n_samples_per_prompt", 4)
    set_intervals(d, "ckpt.save_steps", "eval.steps", of_eval, updates, "rollouts")
    betas = d.get("actor.adam.betas", [0.9, 0.95])
    d.set("adam_beta1", betas[0], of="actor.adam.betas")
    d.set("adam_beta2", betas[1], of="actor.adam.betas")
    schedule = d.copy("lr_scheduler_type", "actor.lr_scheduler", default="cosine_with_min_lr")
    if schedule == "cosine_with_min_lr":
        d.set("lr_scheduler_kwargs", {"min_lr_rate": d.get("actor.min_lr_ratio", 0.1)}, of="actor.min_lr_ratio")
    if d.get("actor.optim", "adam") != "adam":
        d.decide(f"optim: OpenRLHF's {d.given['actor.optim']!r} is not here; AdamW is written.", of="actor.optim")


def _loss(d: Draft) -> None:
    kind = d.get("actor.policy_loss_type", "ppo")
    if kind == "gspo":
        d.set("loss_type", "gspo", of="actor.policy_loss_type")
    elif _before(d, "0.10.4"):
        d.set("loss_type", "bnpo", "a mean over the tokens of a micro-batch", of="actor.policy_loss_type")
    else:
        d.set("loss_type", "dapo", "a mean over the tokens of an optimizer step", of="actor.policy_loss_type")
    one = d.get("actor.eps_clip", 0.2)
    low, high = d.get("actor.eps_clip_low_high", [one, one])
    d.set("epsilon", low, of=_first(d, "actor.eps_clip_low_high", "actor.eps_clip"))
    d.set("epsilon_high", high, of=_first(d, "actor.eps_clip_low_high", "actor.eps_clip"))
    kind = d.get("algo.kl.estimator", "k1")
    in_reward = not d.get("algo.kl.use_loss", False)
    coefficient = d.get("algo.kl.init_coef", 0.01)
    of = "algo.kl.init_coef"
    set_kl(d, coefficient, of, (kind, f"OpenRLHF's {kind}", "algo.kl.estimator"), in_reward, ("algo.kl.use_loss",))


def _first(d: Draft, *keys: str) -> str:
    return next((key for key in keys if key in d.given), keys[0])


def _rewards(d: Draft) -> None:
    entries: list[Any] = []
    of = ["reward.model_name_or_path", "reward.overlong_buffer_len", "reward.overlong_penalty_factor"]
    model, clip = d.get("reward.model_name_or_path"), d.get("reward.clip_range")
    if model:
        bounds = list(clip or (-10, 10))
        models = [name.strip() for name in str(model).split(",")]
        entries += [{"name": "reward_model", "kwargs": {"model": name}, "clip": bounds} for name in models]
        of.append("reward.clip_range")
    for place in str(d.get("reward.remote_url", "")).split(","):
        _remote(d, place)
    if (buffer := d.get("reward.overlong_buffer_len")) is not None:
        longest = d.get("rollout.max_new_tokens") or d.get("data.max_len") or 2048
        kwargs = {"max_length": int(longest), "buffer": int(buffer)}
        weight = d.get("reward.overlong_penalty_factor", 1.0)
        entries.append({"name": "soft_overlong", "weight": weight, "kwargs": kwargs})
    if entries:
        d.set("reward_funcs", entries, "clip is OpenRLHF's default" if model and not clip else "", of=of)
    if clip is not None and not model:
        d.decide(
            f"reward.clip_range {clip}: clip of an entry of reward_funcs, {{..., clip: {clip}}}.", "reward.clip_range"
        )
    if d.get("algo.dynamic_filtering_enable", False):
        span = d.get("algo.dynamic_filtering_range", [0, 1])
        note = f"groups without spread are drawn again; OpenRLHF drops those whose mean is not inside {list(span)}"
        d.set("dynamic_sampling", "reward", note, of="algo.dynamic_filtering_enable")


def _remote(d: Draft, place: str) -> None:
    if place.startswith("http"):
        d.decide(
            f"reward_funcs: {place} speaks OpenRLHF's protocol. The reward remote speaks others (docs/rewards.md); "
            "serve the model by vLLM, or write a function that asks it: {func: 'module:function'}.",
            of="reward.remote_url",
        )
    elif place:
        d.decide(
            f"reward_funcs: {place} has reward_func(queries, prompts, labels), where queries are prompt and "
            "completion together; a reward here takes completions and columns, and returns a list. Write one around "
            "it: {func: 'module:function'}.",
            of="reward.remote_url",
        )


def _model_and_data(d: Draft) -> None:
    if d.get("ds.lora.rank", 0):
        d.set("use_peft", True, of="ds.lora.rank")
        for name, default in (("rank", None), ("alpha", 16), ("dropout", 0.0), ("target_modules", "all-linear")):
            d.copy({"rank": "lora_r"}.get(name, f"lora_{name}"), f"ds.lora.{name}", default=default)
        if d.get("ds.lora.dropout"):
            d.set("disable_dropout", False, "lora_dropout has an effect there; 0.0 and true here are exact")
    names = str(d.get("data.prompt_dataset", "")).split(",")
    note = (
        ""
        if d.get("data.apply_chat_template")
        else "prompts that are lists of messages get the chat template, text not"
    )
    d.set("dataset_name", names[0].partition("@")[0], note, of="data.prompt_dataset")
    if len(names) > 1 and "data.prompt_probs" not in d.given:
        d.decide(f"dataset_name: of {len(names)} datasets the first is written. Mix them by datasets.")
    _lengths(d)
    half = d.get("ds.param_dtype", "bf16") == "fp16"
    d.set("fp16" if half else "bf16", True, of="ds.param_dtype")
    if half:
        d.set("bf16", False, of="ds.param_dtype")
    if stage := d.get("ds.zero_stage", 2):
        d.set("accelerate_config", f"zero{stage}", of="ds.zero_stage")
    if d.get("actor.gradient_checkpointing_reentrant", False):
        kwargs = {"use_reentrant": True}
        d.set("gradient_checkpointing_kwargs", kwargs, of="actor.gradient_checkpointing_reentrant")
    d.copy("output_dir", "ckpt.output_dir", default="ckpt")
    for key, name in (("org", "WANDB_ENTITY"), ("group", "WANDB_RUN_GROUP"), ("project", "WANDB_PROJECT")):
        d.environment(name, f"logger.wandb.{key}")
    d.environment("TENSORBOARD_LOGGING_DIR", "logger.tensorboard_dir")
    keys = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
    trackers = [name for name, key in keys.items() if d.get(key) is not None]
    note = "export WANDB_API_KEY; a key belongs in no recipe" if "wandb" in trackers else ""
    d.set("report_to", trackers or "none", note, of=keys.values())


def _lengths(d: Draft) -> None:
    new, longest = d.get("rollout.max_new_tokens"), d.get("data.max_len")
    if _before(d, "0.10"):
        d.copy("max_completion_length", "rollout.max_new_tokens", default=1024)
        d.copy("max_prompt_length", "data.prompt_max_len", default=1024)
        d.copy("vllm_max_model_length", "data.max_len")
        return
    longest = d.copy("vllm_max_model_length", "data.max_len", default=2048)
    if new is None:
        for key in ("max_completion_length", "max_prompt_length"):
            d.set(key, longest // 2, f"half of max_len={longest}", of="data.max_len")
        d.decide(
            f"max_completion_length: OpenRLHF bounds prompt and completion together, by max_len={longest}; here each "
            "has its own bound. Halves are written."
        )
        return
    d.copy("max_completion_length", "rollout.max_new_tokens")
    note = f"max_len={longest} less max_new_tokens={new}"
    prompt = d.get("data.prompt_max_len")
    d.set("max_prompt_length", prompt or max(1, longest - new), "" if prompt else note, of="data.prompt_max_len")
    if not prompt:
        d.sources["max_prompt_length"] = {"data.max_len"} & d.given.keys()


def _sampler(d: Draft) -> None:
    engines, together = d.get("vllm.num_engines", 0), d.get("train.colocate_all", False)
    d.set("use_vllm", bool(engines), of="vllm.num_engines")
    if not engines:
        return
    note = "" if together else "start it by `grpo-ext serve`"
    d.set("vllm_mode", "colocate" if together else "server", note, of="train.colocate_all")
    prefix = "algo.advantage.is_correction_"
    on, gspo = d.get(f"{prefix}enable", False), d.values["loss_type"] == "gspo"
    d.set("vllm_importance_sampling_correction", on and not gspo, of=f"{prefix}enable")
    if on and gspo:
        d.decide(
            "vllm_importance_sampling_correction: OpenRLHF's gspo takes its ratio to the sampler itself; here to the "
            "policy, without a correction.",
            of=f"{prefix}enable",
        )
    elif on:
        kind = d.get(f"{prefix}type", "icepop" if d.get("algo.advantage.use_icepop") else "tis")
        of_kind = (f"{prefix}type", "algo.advantage.use_icepop")
        d.set("vllm_importance_sampling_mode", _MODES.get(kind, "token_truncate"), of=of_kind)
        for name, bound in zip(("min", "max"), d.get(f"{prefix}threshold") or (0.5, 5.0), strict=True):
            d.set(f"vllm_importance_sampling_clip_{name}", bound, of=f"{prefix}threshold")
        if kind not in _MODES:
            d.decide(
                f"vllm_importance_sampling_mode: {kind} leaves out completions by the geometric mean of their "
                "ratios, which is not here; token_truncate is written.",
                of=f"{prefix}type",
            )


def _version_of(given: Mapping[str, Any]) -> str:
    """Return 0.9 for flags without dots, of which 0.10.1 was the last version."""
    return "" if any("." in key or isinstance(value, Mapping) for key, value in given.items()) else "0.9"


OPENRLHF = Translation(
    "OpenRLHF",
    TABLE,
    (_group, _batch, _length, _loss, _rewards, _model_and_data, _sampler),
    {
        "learning_rate": {"0.9": 1e-6},
        "warmup_steps": {"0.9": 0.03},
        "num_train_epochs": {"0.9": 1},
        "attn_implementation": {"0.9": "flash_attention_2"},
        "weight_decay": {"0.9": 0.0},
        "max_grad_norm": {"0.9": 1.0},
        "prompt_column": {"0.9": "input"},
        "gradient_checkpointing": {"0.9": False},
    },
    versions=("0.9", "0.10", "0.10.4", "0.11"),
    nested=True,
    aliases=OLD,
    version_of=_version_of,
)
