"""OpenRLHF's flags, with dots since 0.10 and without before: rollouts in prompts, optimizer steps in completions."""

from collections.abc import Mapping
from typing import Any

from grpo_ext.recipe.foreign import shared
from grpo_ext.recipe.foreign.engine import Draft, Translation, number, rules

_ENGINE = "- | OpenRLHF's engine; accelerate_config (zero2, zero3, fsdp2) spreads the weights"
_PLACES = "- | where OpenRLHF's models are placed; num_processes counts the actor's GPUs"
_ACTOR = {
    "=": "model_name_or_path adam.eps=adam_epsilon max_norm=max_grad_norm dual_clip=delta entropy_coef "
    "aux_loss_coef=router_aux_loss_coef",
    "adam.lr": "learning_rate = 1e-6",
    "adam.weight_decay": "weight_decay = 0.0",
    "num_nodes": "* num_processes = 1 | times num_gpus_per_node",
    "num_gpus_per_node": "* num_processes = 8 | times num_nodes",
    "adam.betas": "* adam_beta1, adam_beta2 = [0.9, 0.95]",
    "optim": "? | only adam is supported; AdamW is written",
    "muon.*": "- | only adam is supported",
    "lr_scheduler": "lr_scheduler_type = cosine_with_min_lr",
    "lr_warmup_ratio": "warmup_steps = 0.03 | a value below 1 is a ratio",
    "min_lr_ratio": "* lr_scheduler_kwargs = 0.1 | min_lr_rate, of cosine_with_min_lr",
    "eps_clip": "* epsilon, epsilon_high = 0.2 | both bounds, unless eps_clip_low_high is given",
    "eps_clip_low_high": "* epsilon, epsilon_high | a pair there",
    "policy_loss_type": "* loss_type = ppo | gspo; ppo is dapo, until 0.10.1 bnpo, whose mean is over a micro-batch",
    "gradient_checkpointing_enable": "gradient_checkpointing = false",
    "gradient_checkpointing_reentrant": "gradient_checkpointing_kwargs | use_reentrant",
    "freeze_visual_encoder": "- | not supported; name what LoRA trains by lora_target_modules",
}
_ALGO = {
    "dynamic_filtering_enable": "* dynamic_sampling",
    "dynamic_filtering_range": "? | it drops groups by their mean; dynamic_sampling those with equal rewards",
    "kl.init_coef": "* beta = 0.01",
    "kl.use_loss": "* kl_placement | loss; else reward",
    "kl.estimator": "* kl_estimator = k1 | the same names",
    "kl.*": "- | the coefficient is fixed",
    "advantage": {
        "estimator": "* advantage_estimator = gae | group_norm is group, dr_grpo is none, reinforce is reinforce_pp",
        "no_std_norm": "* advantage_estimator | of reinforce_baseline: none",
        "is_correction_enable": "* vllm_importance_sampling_correction | not with gspo",
        "is_correction_type": "* vllm_importance_sampling_mode | tis is token_truncate, icepop is token_mask",
        "is_correction_threshold": "* vllm_importance_sampling_clip_min, vllm_importance_sampling_clip_max = "
        "[0.5, 5.0] | a pair there",
        "use_icepop": "* vllm_importance_sampling_mode | true: token_mask",
        "*": "- | of GAE; a completion has one reward",
    },
}
_TRAIN = {
    "=": "seed full_determinism_enable=full_determinism max_epochs=num_iterations",
    "num_episodes": "num_train_epochs = 1",
    "batch_size": "* gradient_accumulation_steps = 128 | completions of an optimizer step, of all GPUs",
    "micro_batch_size": "* per_device_train_batch_size | completions in both",
    "dynamic_batch_enable": "* per_device_train_batch_size | a number of rows, where OpenRLHF counts tokens",
    "max_tokens_per_gpu": "- | micro-batches have a number of rows here",
    "colocate_all": "* vllm_mode | colocate; without it vLLM has GPUs of its own: server",
    "async_enable": "? | rollouts are of the current weights here; rollout_ahead: 1 is nearest",
    "agent_func_path": "? | a class in environments (docs/environments.md) scores instead of reward_funcs",
    "*": _PLACES,
}
_DATA = {
    "=": "prompt_split=dataset_train_split label_key=answer_column max_samples dataloader_num_workers",
    "input_key": "prompt_column = input",
    "prompt_dataset": "* dataset_name",
    "prompt_probs": "? | the first dataset is written; mix them by datasets, with a fraction each",
    "input_template": "? | write it into the prompts, or as system_prompt",
    "apply_chat_template": "* - | always, for prompts that are lists of messages; text stays as it is",
    "prompt_max_len": "* max_prompt_length",
    "max_len": "* vllm_max_model_length | prompt and completion together; without max_new_tokens it bounds both",
    "*": "- | not supported",
}
TABLE = rules(
    {
        "actor": _ACTOR,
        "algo": _ALGO,
        "train": _TRAIN,
        "data": _DATA,
        "ref.*": _PLACES,
        "critic.*": "- | no critic here: the group is the baseline",
        "reward": {
            "model_name_or_path": "* reward_funcs | an entry of the list",
            "remote_url": "? | a .py file has reward_func(queries, prompts, labels); here a function takes lists of "
            "completions and columns: write one around it, {func: 'module:function'}. A server has a protocol of its "
            "own there; docs/rewards.md has those of the reward remote",
            "overlong_buffer_len": "* reward_funcs | soft_overlong",
            "overlong_penalty_factor": "* reward_funcs = 1.0 | weight of soft_overlong",
            "stop_properly_penalty_coef": "? | a reward of truncated completions; see mask_truncated_completions",
            "normalize_enable": "- | the advantage normalises",
            "clip_range": "* reward_funcs | clip of an entry",
            "*": _PLACES,
        },
        "rollout": {
            "=": "temperature top_p",
            "batch_size": "* generation_batch_size = 1024 | prompts there; completions here",
            "n_samples_per_prompt": "* num_generations, generation_batch_size = 1",
            "max_new_tokens": "* max_completion_length",
            "*": "- | how OpenRLHF splits its rollouts; changes no result",
        },
        "eval": {
            "dataset": "? | evaluation is on a split of the same dataset here: dataset_test_split, or test_size",
            "steps": "* eval_steps = -1 | rollouts there, optimizer steps here; -1 is never",
            "n_samples_per_prompt": "* num_generations_eval = 4 | where eval.steps is not -1",
            "*": "- | evaluation draws as training does",
        },
        "ckpt": {
            "output_dir": "output_dir = ckpt",
            "save_steps": "* save_steps = -1 | rollouts there, optimizer steps here; -1 is never",
            "max_num": "save_total_limit",
            "load_enable": "- | a run always resumes from its last sound checkpoint",
            "*": "- | checkpoints are under output_dir, and the model is always saved in Hugging Face's form",
        },
        "logger": {
            "=": "logging_steps wandb.org=env.WANDB_ENTITY wandb.group=env.WANDB_RUN_GROUP "
            "wandb.project=env.WANDB_PROJECT wandb.run_name=run_name",
            "wandb.key": "* report_to | wandb; export WANDB_API_KEY, a key belongs in no recipe",
            "tensorboard_dir": "* report_to | tensorboard, into env TENSORBOARD_LOGGING_DIR",
        },
        "vllm": {
            "=": "tensor_parallel_size=vllm_tensor_parallel_size enable_sleep=vllm_enable_sleep_mode "
            "gpu_memory_utilization=vllm_gpu_memory_utilization",
            "num_engines": "* use_vllm = 0 | 0 is without",
            "*": "- | of OpenRLHF's sampler",
        },
        "ds": {
            "=": "use_liger_kernel load_in_4bit",
            "attn_implementation": "attn_implementation = flash_attention_2",
            "zero_stage": "* accelerate_config = 2 | zero1, zero2, zero3",
            "param_dtype": "* bf16 = bf16 | or fp16",
            "lora.rank": "* lora_r | 0 is no LoRA; use_peft switches it on here",
            "lora.alpha": "* lora_alpha = 16 | where the rank is not 0",
            "lora.dropout": "* lora_dropout = 0.0 | where the rank is not 0",
            "lora.target_modules": "* lora_target_modules = all-linear | where the rank is not 0",
            "*": _ENGINE,
        },
        "perf actor_init_on_gpu": _ENGINE,
        "CUDA_VISIBLE_DEVICES MASTER_PORT": "- | export it before the start",
        "local_rank": "- | the launcher's",
        "use_ms": "- | models come from the Hugging Face hub, or a folder",
        "ptx_coef": "- | no supervised loss beside the policy's",
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
}
_RENAMED = """
    pretrain=actor.model_name_or_path actor_learning_rate=actor.adam.lr adam_betas=actor.adam.betas
    l2=actor.adam.weight_decay entropy_loss_coef=actor.entropy_coef actor_num_=actor.num_
    gradient_checkpointing=actor.gradient_checkpointing_enable
    gradient_checkpointing_use_reentrant=actor.gradient_checkpointing_reentrant
    critic_pretrain=critic.model_name_or_path freezing_actor_steps=critic.freezing_steps
    critic_learning_rate=critic.adam.lr critic_num_=critic.num_
    reward_pretrain=reward.model_name_or_path remote_rm_url=reward.remote_url normalize_reward=reward.normalize_enable
    reward_clip_range=reward.clip_range reward_num_=reward.num_ ref_reward_offload=ref.offload ref_num_=ref.num_
    prompt_data=data.prompt_dataset prompt_data_probs=data.prompt_probs
    generate_max_len=rollout.max_new_tokens rollout_batch_size=rollout.batch_size
    micro_rollout_batch_size=rollout.micro_batch_size rollout_max_tokens_per_gpu=rollout.max_tokens_per_gpu
    train_batch_size=train.batch_size micro_train_batch_size=train.micro_batch_size
    use_dynamic_batch=train.dynamic_batch_enable train_max_tokens_per_gpu=train.max_tokens_per_gpu
    full_determinism=train.full_determinism_enable colocate_all_models=train.colocate_all
    async_train=train.async_enable partial_rollout=train.partial_rollout_enable
    advantage_estimator=algo.advantage.estimator no_advantage_std_norm=algo.advantage.no_std_norm
    enable_vllm_is_correction=algo.advantage.is_correction_enable
    vllm_enable_is_correction=algo.advantage.is_correction_enable
    vllm_is_truncated_threshold=algo.advantage.is_correction_threshold
    vllm_is_correction_type=algo.advantage.is_correction_type
    init_kl_coef=algo.kl.init_coef kl_target=algo.kl.target kl_horizon=algo.kl.horizon
    kl_estimator=algo.kl.estimator use_kl_loss=algo.kl.use_loss
    dynamic_filtering=algo.dynamic_filtering_enable dynamic_filtering_reward_range=algo.dynamic_filtering_range
    eval_=eval. save_path=ckpt.output_dir ckpt_path=ckpt.path save_hf_ckpt=ckpt.save_hf
    disable_ds_ckpt=ckpt.disable_ds max_ckpt_=ckpt.max_ load_checkpoint=ckpt.load_enable
    use_wandb=logger.wandb.key wandb_=logger.wandb. use_tensorboard=logger.tensorboard_dir
    vllm_=vllm. lora_=ds.lora. deepspeed_enable_sleep=ds.enable_sleep ds_tensor_parallel_size=ds.tensor_parallel_size
    ring_head_stride=ds.ring_attn_head_stride use_ds_universal_ckpt=ds.use_universal_ckpt
"""
OLD = {name: f"{section}.{name}" for section, names in _SAME_NAME.items() for name in names.split()} | dict(
    pair.split("=") for pair in _RENAMED.split()
)
"""Flags of OpenRLHF before 0.10, or how they begin, each with its name since."""
_ESTIMATORS = {
    "group_norm": "group",
    "dr_grpo": "none",
    "rloo": "loo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
}
_CORRECTION = "algo.advantage.is_correction_"


def _group(d: Draft) -> None:
    group, estimator = "rollout.n_samples_per_prompt", "algo.advantage.estimator"
    unscaled = "algo.advantage.no_std_norm"
    cure = f"--{estimator} group_norm --{group} 8"
    named = shared.set_group(d, group, estimator, _ESTIMATORS, d.get(estimator) == "gae", cure)
    if d.get(unscaled) and named == "reinforce_pp_baseline":
        d.set("advantage_estimator", "none")
    elif d.get(unscaled) and named == "reinforce_pp":
        d.decide("advantage_estimator: reinforce_pp always divides by std.", unscaled)


def _batch(d: Draft) -> None:
    step, prompts, by_tokens = d.get("train.batch_size"), d.get("rollout.batch_size"), "train.dynamic_batch_enable"
    shared.set_processes(d, "actor.num_nodes", "actor.num_gpus_per_node")
    rows = d.get("train.micro_batch_size", 4 if _before(d, "0.10") else 1)
    shared.set_batch(d, prompts, step, rows, "train.micro_batch_size", by_tokens if d.get(by_tokens) else "")
    updates = max(1, prompts * d.values["num_generations"] // step) * int(d.get("train.max_epochs", 1))
    shared.set_intervals(d, "ckpt.save_steps", "eval.steps", "eval.n_samples_per_prompt", updates, "rollouts")
    shared.set_betas(d, "actor.adam.betas")
    if d.get("actor.lr_scheduler") == "cosine_with_min_lr":
        d.set("lr_scheduler_kwargs", {"min_lr_rate": d.get("actor.min_lr_ratio")})


def _before(d: Draft, version: str) -> bool:
    return number(d.version) < number(version)


def _loss(d: Draft) -> None:
    if d.get("actor.policy_loss_type") == "gspo":
        d.set("loss_type", "gspo")
    elif _before(d, "0.10.4"):
        d.set("loss_type", "bnpo", "a mean over the tokens of a micro-batch")
    else:
        d.set("loss_type", "dapo", "a mean over the tokens of an optimizer step")
    pair = d.get("actor.eps_clip_low_high") or [d.get("actor.eps_clip")] * 2
    for name, bound in zip(("epsilon", "epsilon_high"), pair, strict=True):
        d.set(name, bound, of=d.first("actor.eps_clip_low_high", "actor.eps_clip"))
    switch = "algo.kl.use_loss"
    shared.set_kl(d, "algo.kl.init_coef", "algo.kl.estimator", {}, not d.get(switch), [switch])


def _rewards(d: Draft) -> None:
    clip, buffer = d.get("reward.clip_range"), d.get("reward.overlong_buffer_len")
    models = [name.strip() for name in str(d.get("reward.model_name_or_path", "")).split(",") if name]
    bounds = list(clip or (-10, 10))
    entries: list[Any] = [{"name": "reward_model", "kwargs": {"model": name}, "clip": bounds} for name in models]
    if clip is not None and not models:
        d.decide(f"reward.clip_range={clip}: write clip: {clip} into an entry of reward_funcs.", "reward.clip_range")
    if buffer is not None:
        longest = int(d.get("rollout.max_new_tokens") or d.get("data.max_len") or 2048)
        entries.append(shared.soft_overlong(longest, int(buffer), d.get("reward.overlong_penalty_factor")))
    if entries:
        of = [name for name in d.computing("reward_funcs") if models or name != "reward.clip_range"]
        d.set("reward_funcs", entries, "clip is OpenRLHF's default" if models and not clip else "", of=of)
    if d.get("algo.dynamic_filtering_enable"):
        span = list(d.get("algo.dynamic_filtering_range", [0, 1]))
        note = f"groups without spread are drawn again; OpenRLHF drops those whose mean is not inside {span}"
        d.set("dynamic_sampling", "reward", note)


def _model_and_data(d: Draft) -> None:
    if d.get("ds.lora.rank"):
        shared.set_lora(d, **{name: [f"ds.lora.{name}"] for name in ("rank", "alpha", "dropout", "target_modules")})
    names = str(d.get("data.prompt_dataset", "")).split(",")
    text = "prompts that are lists of messages get the chat template, text not"
    note = "" if d.get("data.apply_chat_template") else text
    d.set("dataset_name", names[0].partition("@")[0], note)
    if "data.prompt_probs" not in d.given:
        shared.decide_first_of(d, names, "data.prompt_dataset")
    half = d.get("ds.param_dtype") == "fp16"
    d.set("bf16", not half)
    if half:
        d.set("fp16", True, of="ds.param_dtype")
    if stage := d.get("ds.zero_stage"):
        d.set("accelerate_config", f"zero{stage}")
    keys = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
    trackers = [name for name, key in keys.items() if d.get(key) is not None]
    note = "export WANDB_API_KEY; a key belongs in no recipe" if "wandb" in trackers else ""
    d.set("report_to", trackers or "none", note)
    if "tensorboard" in trackers:
        d.set_variable("TENSORBOARD_LOGGING_DIR", "logger.tensorboard_dir")


def _lengths(d: Draft) -> None:
    new, prompt, together = "rollout.max_new_tokens", "data.prompt_max_len", "data.max_len"
    if _before(d, "0.10"):
        d.copy("max_completion_length", new, default=1024)
        d.copy("max_prompt_length", prompt, default=1024)
        d.copy("vllm_max_model_length", together)
        return
    longest = d.copy("vllm_max_model_length", together, default=2048)
    if d.get(new) is None:
        for key in ("max_completion_length", "max_prompt_length"):
            d.set(key, longest // 2, f"half of max_len={longest}", of=together)
        d.decide(
            f"max_completion_length: OpenRLHF bounds prompt and completion together, by max_len={longest}; here each "
            "has its own bound. Halves are written."
        )
        return
    d.copy("max_completion_length", new)
    if not d.copy("max_prompt_length", prompt):
        rest, note = max(1, longest - d.get(new)), f"max_len={longest} less max_new_tokens={d.get(new)}"
        d.set("max_prompt_length", rest, note, of=together)


def _sampler(d: Draft) -> None:
    engines, together = d.get("vllm.num_engines"), d.get("train.colocate_all")
    d.set("use_vllm", bool(engines))
    if not engines:
        return
    d.set("vllm_mode", "colocate" if together else "server", "" if together else "start it by `grpo-ext serve`")
    on, gspo, of = d.get(f"{_CORRECTION}enable"), d.values["loss_type"] == "gspo", f"{_CORRECTION}enable"
    d.set("vllm_importance_sampling_correction", bool(on and not gspo))
    if on and gspo:
        sentence = "OpenRLHF's gspo takes its ratio to the sampler itself; here to the policy, without a correction"
        d.decide(f"vllm_importance_sampling_correction: {sentence}.", of)
    elif on:
        kind = d.get(f"{_CORRECTION}type", "icepop" if d.get("algo.advantage.use_icepop") else "tis")
        d.set("vllm_importance_sampling_mode", "token_mask" if kind == "icepop" else "token_truncate")
        for name, bound in zip(("min", "max"), d.get(f"{_CORRECTION}threshold"), strict=True):
            d.set(f"vllm_importance_sampling_clip_{name}", bound)
        if kind not in ("tis", "icepop"):
            sentence = "leaves out completions by the geometric mean of their ratios; token_truncate is written"
            d.decide(f"vllm_importance_sampling_mode: {kind} {sentence}.", f"{_CORRECTION}type")


def _version_of(given: Mapping[str, Any]) -> str:
    """Return 0.9 for flags without dots, which 0.10.1 was the last to have."""
    return "" if any("." in key or isinstance(value, Mapping) for key, value in given.items()) else "0.9"


OPENRLHF = Translation(
    "OpenRLHF",
    TABLE,
    (_group, _batch, _loss, _rewards, _model_and_data, _lengths, _sampler),
    versions=("0.9", "0.10", "0.10.4", "0.11"),
    defaults={"max_grad_norm": 1.0},
    converters={
        "actor.gradient_checkpointing_reentrant": lambda on: {"use_reentrant": True} if on else None,
        "actor.optim": lambda name: None if name == "adam" else name,
    },
    nested=True,
    aliases=OLD,
    version_of=_version_of,
)
