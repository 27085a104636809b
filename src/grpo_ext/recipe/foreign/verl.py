"""verl's hydra tree: batches are counted in prompts, steps in generations, and the loss is put together of parts."""

from typing import Any

from grpo_ext.recipe.foreign.draft import Draft, rules, set_batch

_ENGINE = "- | verl's own engine; here --accelerate_config (fsdp2, zero3) says how weights are spread"
_SPEED = "- | of verl's workers"
_SAME_LOSS = "- | computed here whenever it is needed"
TABLE = rules(
    **{
        "actor_rollout_ref.model.path": "model_name_or_path",
        "actor_rollout_ref.model.trust_remote_code": "trust_remote_code",
        "actor_rollout_ref.model.custom_chat_template": "chat_template",
        "actor_rollout_ref.model.lora_rank": "* lora_r | 0 is no LoRA; use_peft switches it on here",
        "actor_rollout_ref.model.lora_alpha": "* lora_alpha | where lora_rank is not 0",
        "actor_rollout_ref.model.lora.rank": "* lora_r | 0 is no LoRA; use_peft switches it on here",
        "actor_rollout_ref.model.lora.alpha": "* lora_alpha | where the rank is not 0",
        "actor_rollout_ref.model.target_modules": "* lora_target_modules | where lora_rank is not 0",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "gradient_checkpointing",
        "actor_rollout_ref.model.override_config.*": "- | change config.json in the model's folder",
        "actor_rollout_ref.model.*": _SPEED,
        "actor_rollout_ref.hybrid_engine": _SPEED,
        "actor_rollout_ref.nccl_timeout": "ddp_timeout",
        "actor_rollout_ref.actor.optim.lr": "learning_rate",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "* warmup_steps | times the optimizer steps of a generation",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "* warmup_steps | a value below 1 is a ratio",
        "actor_rollout_ref.actor.optim.weight_decay": "weight_decay",
        "actor_rollout_ref.actor.optim.clip_grad": "max_grad_norm",
        "actor_rollout_ref.actor.optim.betas": "* adam_beta1, adam_beta2 | a pair there",
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "lr_scheduler_type",
        "actor_rollout_ref.actor.optim.warmup_style": "lr_scheduler_type",
        "actor_rollout_ref.actor.optim.min_lr_ratio": "* lr_scheduler_kwargs | min_lr_rate, of cosine_with_min_lr",
        "actor_rollout_ref.actor.optim.*": _ENGINE,
        "actor_rollout_ref.actor.grad_clip": "max_grad_norm",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "* gradient_accumulation_steps | prompts of an optimizer step "
        "there, "
        "so completions / rollout.n; here rows per device x processes x accumulation",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "* per_device_train_batch_size | completions in both",
        "actor_rollout_ref.actor.ppo_micro_batch_size": "* per_device_train_batch_size | of all GPUs together there",
        "actor_rollout_ref.actor.use_dynamic_bsz": "* per_device_train_batch_size | verl fills micro-batches up to "
        "ppo_max_token_len_per_gpu tokens; here they have a number of rows",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "- | micro-batches have a number of rows here",
        "actor_rollout_ref.actor.ppo_epochs": "num_iterations",
        "actor_rollout_ref.actor.clip_ratio": "* epsilon | both bounds, unless clip_ratio_low and clip_ratio_high "
        "are given",
        "actor_rollout_ref.actor.clip_ratio_low": "* epsilon",
        "actor_rollout_ref.actor.clip_ratio_high": "* epsilon_high | for cispo 1 + it: the bound of the ratio itself",
        "actor_rollout_ref.actor.clip_ratio_c": "* delta | the dual clip, 3 where verl is told nothing",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "* loss_type | vanilla by loss_agg_mode, gspo, cispo, sapo, "
        "geo_mean "
        "(gmpo); clip_cov, kl_cov and gpg are not here",
        "actor_rollout_ref.actor.policy_loss.*": "- | options of clip_cov and kl_cov, which are not here",
        "actor_rollout_ref.actor.loss_agg_mode": "* loss_aggregation | the same names",
        "actor_rollout_ref.actor.loss_scale_factor": "- | seq-mean-token-sum-norm divides by max_completion_length",
        "actor_rollout_ref.actor.tau_pos": "sapo_temperature_pos",
        "actor_rollout_ref.actor.tau_neg": "sapo_temperature_neg",
        "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
        "actor_rollout_ref.actor.use_kl_loss": "* beta | false, and no KL in the reward: beta is 0",
        "actor_rollout_ref.actor.kl_loss_coef": "* beta | where use_kl_loss is true",
        "actor_rollout_ref.actor.kl_loss_type": "* kl_estimator | low_var_kl is k3, mse is k2, kl is k1, abs; a + "
        "adds k2's "
        "gradient. verl cuts k3 at 10",
        "actor_rollout_ref.actor.shuffle": "- | the completions of an optimizer step have no order",
        "actor_rollout_ref.actor.data_loader_seed": "- | seed is for all of it",
        "actor_rollout_ref.actor.checkpoint.*": "- | checkpoints hold model, optimizer and all that a run needs to "
        "go on",
        "actor_rollout_ref.actor.strategy": "* accelerate_config | fsdp and fsdp2 are fsdp2; megatron is not here",
        "actor_rollout_ref.actor.*": _ENGINE,
        "actor_rollout_ref.ref.*": "- | the reference model is computed in the policy's own micro-batches",
        "actor_rollout_ref.rollout.name": "* use_vllm | vllm; sglang and others are not here",
        "actor_rollout_ref.rollout.n": "num_generations",
        "actor_rollout_ref.rollout.temperature": "temperature",
        "actor_rollout_ref.rollout.top_p": "top_p",
        "actor_rollout_ref.rollout.top_k": "* top_k | off is -1 there, 0 here",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "vllm_tensor_parallel_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "actor_rollout_ref.rollout.max_model_len": "vllm_max_model_length",
        "actor_rollout_ref.rollout.free_cache_engine": "vllm_enable_sleep_mode",
        "actor_rollout_ref.rollout.dtype": "vllm_dtype",
        "actor_rollout_ref.rollout.val_kwargs.n": "num_generations_eval",
        "actor_rollout_ref.rollout.val_kwargs.*": "- | evaluation draws as training does",
        "actor_rollout_ref.rollout.multi_turn.enable": "* - | list its tools under environments",
        "actor_rollout_ref.rollout.multi_turn.*": "- | list its tools under environments",
        "actor_rollout_ref.rollout.*": "- | of verl's sampler",
        "data.train_files": "* dataset_name | parquet, with the reference in the nested column reward_model",
        "data.val_files": "* dataset_test_split | a folder with train and test files has both splits here",
        "data.prompt_key": "prompt_column",
        "data.train_batch_size": "* generation_batch_size | prompts there; completions here: times rollout.n",
        "data.gen_batch_size": "- | dynamic_sampling draws as many groups anew as are missing",
        "data.val_batch_size": "- | per_device_eval_batch_size is for each process",
        "data.max_prompt_length": "max_prompt_length | prompts beyond it are dropped, never cut",
        "data.max_response_length": "max_completion_length",
        "data.train_max_samples": "* max_samples | -1 is all",
        "data.shuffle": "shuffle_dataset",
        "data.seed": "data_seed",
        "data.filter_overlong_prompts": "- | max_prompt_length always does",
        "data.truncation": "- | max_prompt_length drops, and cuts nothing",
        "data.apply_chat_template_kwargs": "chat_template_kwargs",
        "data.apply_chat_template_kwargs.*": "* chat_template_kwargs | as a mapping",
        "data.image_key": "- | only images in the column images",
        "data.*": _SPEED,
        "critic.*": "- | no critic here: the group is the baseline",
        "reward_model.enable": "* reward_funcs | the model is an entry of the list",
        "reward_model.model.path": "* reward_funcs | where reward_model.enable is true",
        "reward_model.reward_manager": "* reward_funcs | naive, dapo and prime choose the function by data_source; "
        "here it is named",
        "reward_model.overlong_buffer.*": "* reward_funcs | soft_overlong",
        "reward_model.reward_kwargs.*": "* reward_funcs | soft_overlong",
        "reward_model.*": "- | reward_model has options of its own: docs/rewards.md",
        "reward_manager.*": "- | reward_funcs names the rewards",
        "custom_reward_function.path": "* reward_funcs | module:function; its arguments differ",
        "custom_reward_function.name": "* reward_funcs | module:function; its arguments differ",
        "algorithm.adv_estimator": "* advantage_estimator | grpo is group, rloo is loo, reinforce_plus_plus is "
        "reinforce_pp, "
        "reinforce_plus_plus_baseline is reinforce_pp_baseline; gae, remax, opo and others are not here",
        "algorithm.norm_adv_by_std_in_grpo": "* advantage_estimator | false: none",
        "algorithm.use_kl_in_reward": "* kl_placement | true: reward",
        "algorithm.kl_penalty": "* kl_estimator | where the KL is in the reward; names as kl_loss_type's",
        "algorithm.kl_ctrl.kl_coef": "* beta | where the KL is in the reward",
        "algorithm.kl_ctrl.*": "- | the coefficient is fixed",
        "algorithm.filter_groups.enable": "* dynamic_sampling",
        "algorithm.filter_groups.metric": "* dynamic_sampling | acc is accuracy; seq_reward, seq_final_reward and "
        "score are reward",
        "algorithm.filter_groups.max_num_gen_batches": "* dynamic_sampling_max_rounds | generations there, refills "
        "here: one less",
        "algorithm.rollout_correction.rollout_is": "* vllm_importance_sampling_mode | token: token_truncate, "
        "sequence: sequence_truncate",
        "algorithm.rollout_correction.rollout_is_threshold": "* vllm_importance_sampling_clip_max | where rollout_is "
        "is set",
        "algorithm.gamma": "- | of GAE; a completion has one reward",
        "algorithm.lam": "- | of GAE; a completion has one reward",
        "algorithm.*": "- | not here",
        "trainer.total_epochs": "num_train_epochs",
        "trainer.total_training_steps": "* max_steps | generations there, optimizer steps here",
        "trainer.n_gpus_per_node": "* num_processes | times nnodes",
        "trainer.nnodes": "* num_processes | times n_gpus_per_node",
        "trainer.save_freq": "* save_steps | generations there, optimizer steps here; -1 is never",
        "trainer.test_freq": "* eval_steps | generations there, optimizer steps here; -1 is never",
        "trainer.logger": "* report_to | without console, which is always there",
        "trainer.project_name": "* env | WANDB_PROJECT",
        "trainer.experiment_name": "run_name",
        "trainer.default_local_dir": "output_dir | checkpoints/PROJECT/EXPERIMENT where verl is told nothing",
        "trainer.max_actor_ckpt_to_keep": "save_total_limit",
        "trainer.resume_mode": "* resume_from_checkpoint | disable: never",
        "trainer.resume_from_path": "- | resume_from_checkpoint takes a folder of a run of grpo-ext",
        "trainer.val_before_train": "* eval_on_start | where test_freq is not -1",
        "config_path": "- | hydra's: which of verl's own files the keys stand on",
        "config_name": "- | hydra's: which of verl's own files the keys stand on",
        "CUDA_VISIBLE_DEVICES": "- | export it before the start",
        "PYTORCH_CUDA_ALLOC_CONF": "- | export it before the start",
        "MASTER_PORT": "- | export it before the start",
        "NNODES": "- | a variable of the script",
        "trainer.log_val_generations": "- | log_completions logs those of training",
        "trainer.*": _SPEED,
        "ray_kwargs.*": _SPEED,
        "ray_init.*": _SPEED,
        "global_profiler.*": _SPEED,
        "transfer_queue.*": _SPEED,
        "hydra.*": _SPEED,
    }
)
_ESTIMATORS = {
    "grpo": "group",
    "grpo_vectorized": "group",
    "rloo": "loo",
    "rloo_vectorized": "loo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
_BY_AGGREGATION = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}
_LOSSES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "gmpo": "gmpo"}


def translate(d: Draft) -> None:
    """The whole tree; what hydra would fill in is verl's default."""
    for key, value in list(d.given.items()):
        if (isinstance(value, str) and value.startswith("${")) or value == "???" or key.endswith("_target_"):
            d.leave(key, "verl's own default")
    updates = _batch(d)
    _length(d, updates)
    _loss(d)
    _kl(d)
    _rewards(d)
    _model_and_data(d)
    _sampler(d)
    d.set("bf16", True)
    d.apply_table()
    for key, value, note in (
        ("learning_rate", 1e-6, "verl's default"),
        ("weight_decay", 0.01, "verl's default"),
        ("lr_scheduler_type", "constant", "verl's default"),
        ("max_completion_length", 512, "verl's default"),
        ("max_prompt_length", 512, "verl's default"),
        ("num_train_epochs", 30, "verl's default"),
        ("gradient_checkpointing", True, "verl's default"),
    ):
        if key not in d.values:
            d.set(key, value, note)


def _actor(d: Draft, key: str, default: Any = None) -> Any:
    return d.take(f"actor_rollout_ref.actor.{key}", default)


def _batch(d: Draft) -> int:
    """Sets the batch; optimizer steps of a generation."""
    prompts, group = d.take("data.train_batch_size", 1024), d.take("actor_rollout_ref.rollout.n", 1)
    mini = _actor(d, "ppo_mini_batch_size", 256)
    processes = d.take("trainer.n_gpus_per_node", 8) * d.take("trainer.nnodes", 1)
    micro, of_all = _actor(d, "ppo_micro_batch_size_per_gpu"), _actor(d, "ppo_micro_batch_size")
    rows = micro or (max(1, of_all // processes) if of_all else 8)
    d.set("num_generations", group)
    if group < 2:
        d.decide(f"num_generations: rollout.n is {group}, and a group has 2 completions at least. Set it.")
    sources = (
        f"{prompts} prompts (data.train_batch_size) x {group}",
        f"an optimizer step has {mini} prompts (ppo_mini_batch_size) x {group}",
    )
    set_batch(
        d, generated=prompts * group, step=mini * group, processes=processes, rows=rows, sources=sources, group=group
    )
    if _actor(d, "use_dynamic_bsz") or not (micro or of_all):
        d.decide(
            "per_device_train_batch_size: verl fills micro-batches by tokens (ppo_max_token_len_per_gpu), here they "
            "have "
            f"a number of rows. {d.values['per_device_train_batch_size']} is a guess; what fits changes no result."
        )
    return max(1, prompts // mini) * _actor(d, "ppo_epochs", 1)


def _length(d: Draft, updates: int) -> None:
    each = "generations there" + (f", of {updates} optimizer steps each" if updates > 1 else "")
    if (steps := d.take("trainer.total_training_steps")) is not None:
        d.set("max_steps", steps * updates, each)
    for key, name in (("save_freq", "save"), ("test_freq", "eval")):
        every = d.take(f"trainer.{key}", -1)
        if every > 0:
            d.set(f"{name}_strategy", "steps")
            d.set(f"{name}_steps", every * updates, each)
            if name == "eval":
                d.set("per_device_eval_batch_size", d.values["per_device_train_batch_size"])
                d.set("num_generations_eval", d.take("actor_rollout_ref.rollout.val_kwargs.n", 1))
                d.set("eval_on_start", d.take("trainer.val_before_train", True))
        else:
            d.set(f"{name}_strategy", "no")
    d.take("trainer.val_before_train")
    d.take("actor_rollout_ref.rollout.val_kwargs.n")
    warmup, ratio = _actor(d, "optim.lr_warmup_steps", -1), _actor(d, "optim.lr_warmup_steps_ratio", 0.0)
    if warmup > 0 or ratio:
        d.set("warmup_steps", warmup * updates if warmup > 0 else ratio, each if warmup > 0 else "a ratio")
    if (engine := _actor(d, "strategy", "fsdp")) not in ("fsdp", "fsdp2"):
        d.decide(f"accelerate_config: verl's engine {engine!r} is not here; fsdp2 or zero3 spreads weights.")
    if d.values["num_processes"] > 1:
        d.set("accelerate_config", "fsdp2", f"verl's {engine}")
    if (betas := _actor(d, "optim.betas")) is not None:
        d.set("adam_beta1", betas[0])
        d.set("adam_beta2", betas[1])
    lowest = _actor(d, "optim.min_lr_ratio")
    style = d.given.get("actor_rollout_ref.actor.optim.lr_scheduler_type") or d.given.get(
        "actor_rollout_ref.actor.optim.warmup_style"
    )
    if style == "cosine" and lowest:
        d.take("actor_rollout_ref.actor.optim.lr_scheduler_type")
        d.take("actor_rollout_ref.actor.optim.warmup_style")
        d.set("lr_scheduler_type", "cosine_with_min_lr")
        d.set("lr_scheduler_kwargs", {"min_lr_rate": lowest})
    elif style == "constant" and "warmup_steps" in d.values:
        d.take("actor_rollout_ref.actor.optim.lr_scheduler_type")
        d.take("actor_rollout_ref.actor.optim.warmup_style")
        d.set("lr_scheduler_type", "constant_with_warmup", "constant after the warm-up")
    elif style is None and "warmup_steps" in d.values:
        d.set("lr_scheduler_type", "constant_with_warmup", "verl's default, after the warm-up")


def _loss(d: Draft) -> None:
    mode, aggregation = _actor(d, "policy_loss.loss_mode", "vanilla"), _actor(d, "loss_agg_mode", "token-mean")
    clip = _actor(d, "clip_ratio", 0.2)
    low, high = _actor(d, "clip_ratio_low", clip), _actor(d, "clip_ratio_high", clip)
    cap = _actor(d, "clip_ratio_c", 3.0)
    estimator, scaled = d.take("algorithm.adv_estimator", "gae"), d.take("algorithm.norm_adv_by_std_in_grpo", True)
    if mode in _LOSSES:
        d.set("loss_type", _LOSSES[mode])
    else:
        d.set("loss_type", _BY_AGGREGATION.get(aggregation, "grpo"))
        if mode != "vanilla":
            d.decide(f"loss_type: verl's policy_loss.loss_mode {mode!r} is not here; vanilla is written.")
    if (aggregation not in _BY_AGGREGATION and mode not in ("gspo", "geo_mean", "gmpo")) or mode in ("cispo", "sapo"):
        d.set("loss_aggregation", aggregation)
    if mode == "cispo":
        d.set("epsilon_high", 1 + high, f"1 + clip_ratio_high: the bound itself. verl bounds by {1 - low:g} below too")
    elif mode != "sapo":
        d.set("epsilon", low)
        d.set("epsilon_high", high)
    if mode not in _LOSSES:
        d.set("delta", cap, "verl's dual clip, clip_ratio_c")
    if estimator in _ESTIMATORS:
        named = "none" if _ESTIMATORS[estimator] == "group" and not scaled else _ESTIMATORS[estimator]
        d.set("advantage_estimator", named)
    else:
        d.set("advantage_estimator", "group")
        d.decide(f"advantage_estimator: verl's {estimator!r} is not here; group, GRPO's, is written.")


def _kl(d: Draft) -> None:
    in_loss, in_reward = _actor(d, "use_kl_loss", False), d.take("algorithm.use_kl_in_reward", False)
    coefficient, kind = _actor(d, "kl_loss_coef", 0.001), _actor(d, "kl_loss_type", "low_var_kl")
    if in_reward:
        coefficient, kind = d.take("algorithm.kl_ctrl.kl_coef", 0.001), d.take("algorithm.kl_penalty", "kl")
        if in_loss:
            d.decide("beta: verl has the KL both in the loss and in the reward; here it is in one, the reward.")
    for key in ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"):
        d.take(key)
    if not (in_loss or in_reward) or not coefficient:
        d.set("beta", 0.0)
        return
    d.set("beta", coefficient)
    estimator = _KL.get(str(kind).removesuffix("+"), "k3")
    if str(kind).endswith("+"):
        estimator = {"k3": "k3+", "k1": "k2"}.get(estimator, estimator)  # k2's gradient is what the + adds
    if estimator == "k1" and not in_reward:
        d.decide(
            "kl_estimator: verl's kl_loss_type kl (k1) has no useful gradient in the loss; k2, the right one, is "
            "written."
        )
        estimator = "k2"
    d.set("kl_estimator", estimator, f"verl's {kind}")
    d.set("kl_placement", "reward" if in_reward else "loss")


def _rewards(d: Draft) -> None:
    entries: list[Any] = []
    path, name = d.take("custom_reward_function.path"), d.take("custom_reward_function.name", "compute_score")
    if path:
        module = str(path).removesuffix(".py").replace("/", ".").strip(".")
        d.decide(
            f"reward_funcs: {path}:{name} takes (data_source, solution_str, ground_truth, extra_info) and scores one "
            "completion; a reward here takes completions and columns, and returns a list. Write one around it: "
            f"{{func: '{module.rpartition('.')[2]}:{name}'}}."
        )
    model = d.take("reward_model.model.path")
    if d.take("reward_model.enable", False) and model:
        entries.append(model)
    manager = d.take("reward_model.reward_manager", "naive")
    if not path and not entries:
        entries.append({"name": "accuracy", "weight": 1.0})
        d.notes["reward_funcs"] = (
            f"verl's manager {manager!r} chooses the function by data_source (gsm8k: the number after ####; math: the "
            "last \\boxed). Its scores for wrong answers may be -1"
        )
    entries += _overlong(d)
    if entries:
        note = d.notes.get("reward_funcs", "")
        d.set("reward_funcs", entries, note)
    if d.take("algorithm.filter_groups.enable", False):
        metric = d.take("algorithm.filter_groups.metric", "acc")
        d.set("dynamic_sampling", "accuracy" if metric == "acc" and not path and not model else "reward")
        batches = d.take("algorithm.filter_groups.max_num_gen_batches", 0)
        if batches:
            d.set("dynamic_sampling_max_rounds", max(1, batches - 1), "refills; verl counts generations")
    d.take("algorithm.filter_groups.metric")
    d.take("algorithm.filter_groups.max_num_gen_batches")


def _overlong(d: Draft) -> list[Any]:
    for prefix in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        enabled, size = d.take(f"{prefix}.enable", False), d.take(f"{prefix}.len", 0)
        factor = d.take(f"{prefix}.penalty_factor", 1.0)
        d.leave(f"{prefix}.log", "every reward is logged")
        if enabled:
            longest = d.take("reward_model.reward_kwargs.max_resp_len", d.given.get("data.max_response_length", 512))
            return [{"name": "soft_overlong", "weight": factor, "kwargs": {"max_length": longest, "buffer": size}}]
    return []


def _model_and_data(d: Draft) -> None:
    rank, alpha = (
        d.take(f"actor_rollout_ref.model.lora_{name}", d.take(f"actor_rollout_ref.model.lora.{name}", default))
        for name, default in (("rank", 0), ("alpha", 16))
    )
    modules = d.take("actor_rollout_ref.model.target_modules", "all-linear")
    if rank:
        d.set("use_peft", True)
        d.set("lora_r", rank)
        d.set("lora_alpha", alpha)
        d.set("lora_target_modules", modules)
    files = d.take("data.train_files")
    names = [files] if isinstance(files, str) else list(files or [])
    d.take("data.val_files")
    if names:
        folder = str(names[0]).rpartition("/")[0]
        one = len(names) == 1 and str(names[0]).endswith("train.parquet") and folder
        d.set("dataset_name", f"{folder}" if one else str(names[0]), f"train_files: {', '.join(map(str, names))}")
        d.decide(
            "The data: verl's parquet has the reference in the nested column reward_model (ground_truth). Write it "
            "to a "
            "column of its own (solution), or name the original dataset: openai/gsm8k with answer_format: gsm8k."
            + ("" if len(names) == 1 else f" Of {len(names)} files the first is written; put them into one folder.")
        )
    samples = d.take("data.train_max_samples", -1)
    if samples > 0:
        d.set("max_samples", samples)
    template = {
        k.rpartition(".")[2]: d.take(k) for k in list(d.given) if k.startswith("data.apply_chat_template_kwargs.")
    }
    if template:
        d.set("chat_template_kwargs", template)
    if d.take("trainer.project_name") is not None:
        d.environment("WANDB_PROJECT", d.given["trainer.project_name"])
    if not d.given.get("trainer.default_local_dir"):
        project = d.given.get("trainer.project_name", "verl_examples")
        d.set(
            "output_dir", f"checkpoints/{project}/{d.given.get('trainer.experiment_name', 'gsm8k')}", "verl's default"
        )
    logger = d.take("trainer.logger", ["console", "wandb"])
    trackers = [name for name in ([logger] if isinstance(logger, str) else logger) if name != "console"]
    d.set("report_to", trackers or "none")
    if d.take("trainer.resume_mode", "auto") == "disable":
        d.set("resume_from_checkpoint", "never")


def _sampler(d: Draft) -> None:
    name = d.take("actor_rollout_ref.rollout.name", "vllm")
    d.set("use_vllm", True)
    d.set("vllm_mode", "colocate", "verl's hybrid engine: the sampler has the GPUs of the training")
    if name != "vllm":
        d.decide(f"use_vllm: verl's rollout engine {name!r} is not here; vLLM is written.")
    top_k = d.take("actor_rollout_ref.rollout.top_k", -1)
    if top_k > 0:
        d.set("top_k", top_k)
    if d.take("actor_rollout_ref.rollout.multi_turn.enable", False):
        d.decide("multi_turn: list its tools as functions: environments: [{tools: [./file.py:function]}].")
    mode, cap = (
        d.take("algorithm.rollout_correction.rollout_is"),
        d.take("algorithm.rollout_correction.rollout_is_threshold", 2.0),
    )
    if mode:
        d.set("vllm_importance_sampling_correction", True)
        d.set("vllm_importance_sampling_mode", f"{mode}_truncate")
        d.set("vllm_importance_sampling_clip_max", cap)
    else:
        d.set("vllm_importance_sampling_correction", False, "verl's default; true corrects for the sampler's rounding")
