"""verl's hydra tree: batches are counted in prompts, steps in generations, and the loss is put together of parts."""

from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.recipe.foreign.counting import set_batch, set_intervals, set_kl, set_machines
from grpo_ext.recipe.foreign.draft import Draft, Translation, rules

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
        "there, so completions / rollout.n; here rows per device x processes x accumulation",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "* per_device_train_batch_size | completions in both",
        "actor_rollout_ref.actor.ppo_micro_batch_size": "* per_device_train_batch_size | of all GPUs together there",
        "actor_rollout_ref.actor.use_dynamic_bsz": "* per_device_train_batch_size | verl fills micro-batches up to "
        "ppo_max_token_len_per_gpu tokens; here they have a number of rows",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "- | micro-batches have a number of rows here",
        "actor_rollout_ref.actor.ppo_epochs": "num_iterations",
        "actor_rollout_ref.actor.clip_ratio": "* - | verl's own clip_ratio_low and clip_ratio_high, 0.2 each, take "
        "its place",
        "actor_rollout_ref.actor.clip_ratio_low": "* epsilon",
        "actor_rollout_ref.actor.clip_ratio_high": "* epsilon_high | for cispo 1 + it: the bound of the ratio itself",
        "actor_rollout_ref.actor.clip_ratio_c": "* delta | the dual clip, 3 by default",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "* loss_type | vanilla by loss_agg_mode, gspo, cispo, sapo, "
        "geo_mean (gmpo); others are not here",
        "actor_rollout_ref.actor.policy_loss.tau_pos": "* - | verl reads tau_pos of actor",
        "actor_rollout_ref.actor.policy_loss.tau_neg": "* - | verl reads tau_neg of actor",
        "actor_rollout_ref.actor.policy_loss.*": "- | options of losses that are not here (clip_cov, kl_cov, dro)",
        "actor_rollout_ref.actor.loss_agg_mode": "* loss_aggregation | the same names; gspo, sapo and geo_mean "
        "always take seq-mean-token-mean",
        "actor_rollout_ref.actor.loss_scale_factor": "? | seq-mean-token-sum-norm divides by max_completion_length "
        "here",
        "actor_rollout_ref.actor.tau_pos": "* sapo_temperature_pos | of sapo",
        "actor_rollout_ref.actor.tau_neg": "* sapo_temperature_neg | of sapo",
        "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
        "actor_rollout_ref.actor.use_kl_loss": "* beta | false, and no KL in the reward: beta is 0",
        "actor_rollout_ref.actor.kl_loss_coef": "* beta | where use_kl_loss is true",
        "actor_rollout_ref.actor.kl_loss_type": "* kl_estimator | low_var_kl is k3, mse is k2, kl is k1, abs; a + "
        "adds k2's gradient. verl cuts k3 at 10",
        "actor_rollout_ref.actor.shuffle": "- | the completions of an optimizer step have no order",
        "actor_rollout_ref.actor.data_loader_seed": "- | seed is for all of it",
        "actor_rollout_ref.actor.checkpoint.*": "- | checkpoints hold all that a run needs to resume",
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
        "actor_rollout_ref.rollout.multi_turn.enable": "? | list its tools as functions: environments: [{tools: "
        "[./file.py:function]}]",
        "actor_rollout_ref.rollout.multi_turn.*": "- | list its tools under environments",
        "actor_rollout_ref.rollout.*": "- | of verl's sampler",
        "data.train_files": "* dataset_name | parquet, with the reference in the nested column reward_model",
        "data.val_files": "* dataset_name | a folder with train and test files has both splits here",
        "data.prompt_key": "prompt_column",
        "data.train_batch_size": "* generation_batch_size | prompts there; completions here: times rollout.n",
        "data.gen_batch_size": "- | dynamic_sampling draws the missing groups again",
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
        "reward_model.reward_manager.*": "- | reward_funcs names the rewards",
        "reward_model.overlong_buffer.*": "* reward_funcs | soft_overlong",
        "reward_model.reward_kwargs.*": "* reward_funcs | soft_overlong",
        "reward_model.*": "- | reward_model has options of its own: docs/rewards.md",
        "custom_reward_function.path": "* reward_funcs | module:function; its arguments differ",
        "custom_reward_function.name": "* reward_funcs | module:function; its arguments differ",
        "algorithm.adv_estimator": "* advantage_estimator | grpo is group, rloo is loo, reinforce_plus_plus is "
        "reinforce_pp, reinforce_plus_plus_baseline is reinforce_pp_baseline; gae, remax, opo and others are not here",
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
        "algorithm.rollout_correction.bypass_mode": "? | the objective is another one: old log-probabilities are the "
        "sampler's there, the policy's own here",
        "algorithm.rollout_correction.rollout_rs": "? | the objective is another one: verl leaves out tokens or "
        "completions by their ratio to the sampler; off_policy_mask_threshold and vllm_importance_sampling_mode: "
        "sequence_mask are nearest",
        "algorithm.rollout_correction.rollout_rs_threshold": "- | of rollout_rs",
        "algorithm.rollout_correction.rollout_is_batch_normalize": "? | verl normalises the weights to a mean of 1",
        "algorithm.rollout_correction.loss_type": "- | of bypass_mode",
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
        "trainer.default_local_dir": "output_dir | checkpoints/PROJECT/EXPERIMENT by default",
        "trainer.max_actor_ckpt_to_keep": "save_total_limit",
        "trainer.resume_mode": "* resume_from_checkpoint | disable: never",
        "trainer.resume_from_path": "- | resume_from_checkpoint takes a folder of a run of grpo-ext",
        "trainer.val_before_train": "* eval_on_start | where test_freq is not -1",
        "reward.num_workers": "reward_workers",
        "async_training.*": "? | rollouts run beside the training there; rollout_ahead: 1 is nearest",
        "rollout.*": "? | rollouts run beside the training there; rollout_ahead: 1 is nearest",
        "distillation.*": "? | verl trains on a teacher's distribution, which is not here",
        "model_engine": _ENGINE,
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
        "global_tool_config.*": _SPEED,
        "prefix_grouper.*": _SPEED,
        "transfer_queue.*": _SPEED,
        "hydra.*": _SPEED,
    }
)
_ESTIMATORS = {
    "grpo": "group",
    "grpo_vectorized": "group",
    "gdpo": "group",
    "rloo": "loo",
    "rloo_vectorized": "loo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
_BY_AGGREGATION = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}
_LOSSES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "gmpo": "gmpo"}
_OWN_MEAN = ("gspo", "sapo", "geo_mean", "gmpo")
"""Losses of verl that take the mean over completions whatever loss_agg_mode says."""
_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}." for part in ("actor", "model", "rollout"))
_CORRECTION = "algorithm.rollout_correction."


def _group(d: Draft) -> None:
    estimator, group = d.get("algorithm.adv_estimator", "gae"), d.get(f"{_ROLLOUT}n", 1)
    if estimator == "gae" and group < 2:
        raise ConfigError(
            [
                "PPO with a critic (algorithm.adv_estimator=gae, rollout.n=1): there is no critic here. Set "
                "algorithm.adv_estimator=grpo and actor_rollout_ref.rollout.n=8 there, and migrate that."
            ]
        )
    d.set("num_generations", group, of=f"{_ROLLOUT}n")
    if group < 2:
        d.decide(f"num_generations: rollout.n is {group}, and a group has at least 2 completions. Set it.")
    scaled = d.get("algorithm.norm_adv_by_std_in_grpo", True)
    of = ("algorithm.adv_estimator", *(["algorithm.norm_adv_by_std_in_grpo"] if "grpo" in estimator else []))
    named = _ESTIMATORS.get(estimator, "group")
    d.set("advantage_estimator", "none" if named == "group" and not scaled else named, of=of)
    if estimator == "gdpo":
        d.set("multi_objective_aggregation", "normalize_then_sum", of="algorithm.adv_estimator")
    if estimator not in _ESTIMATORS:
        d.decide(
            f"advantage_estimator: verl's {estimator!r} is not here; group, GRPO's, is written.",
            of="algorithm.adv_estimator",
        )


def _batch(d: Draft) -> None:
    prompts, group = d.get("data.train_batch_size", 1024), d.values["num_generations"]
    if prompts == 0:
        prompts = d.get(f"{_ACTOR}ppo_mini_batch_size", 256)
        d.decide(
            f"generation_batch_size: verl's asynchronous trainer has no train_batch_size; {prompts} prompts, one "
            "optimizer step, is written.",
            of="data.train_batch_size",
        )
    mini = d.get(f"{_ACTOR}ppo_mini_batch_size", 256)
    processes = d.get("trainer.n_gpus_per_node", 8) * d.get("trainer.nnodes", 1)
    micro, of_all = d.get(f"{_ACTOR}ppo_micro_batch_size_per_gpu"), d.get(f"{_ACTOR}ppo_micro_batch_size")
    rows = micro or (max(1, of_all // processes) if of_all else 8)
    drawn = f"{prompts} prompts (data.train_batch_size) x {group}"
    of_step = f"an optimizer step has {mini} prompts (ppo_mini_batch_size) x {group}"
    set_batch(
        d,
        (prompts * group, drawn, ("data.train_batch_size", f"{_ROLLOUT}n")),
        (mini * group, of_step, (f"{_ACTOR}ppo_mini_batch_size",)),
        (rows, f"{_ACTOR}ppo_micro_batch_size{'_per_gpu' if micro else ''}"),
        (processes, ("trainer.n_gpus_per_node", "trainer.nnodes")),
        f"{_ACTOR}use_dynamic_bsz" if d.get(f"{_ACTOR}use_dynamic_bsz") or not (micro or of_all) else "",
    )
    set_machines(d, d.get("trainer.nnodes", 1), of="trainer.nnodes")


def _length(d: Draft) -> None:
    prompts = d.get("data.train_batch_size") or 1024
    updates = max(1, prompts // d.get(f"{_ACTOR}ppo_mini_batch_size", 256)) * d.get(f"{_ACTOR}ppo_epochs", 1)
    of_eval = (f"{_ROLLOUT}val_kwargs.n", 1)
    each = set_intervals(d, "trainer.save_freq", "trainer.test_freq", of_eval, updates, "generations")
    if (steps := d.get("trainer.total_training_steps")) is not None:
        d.set("max_steps", steps * updates, each, of="trainer.total_training_steps")
    if d.values["eval_strategy"] == "steps":
        d.copy("eval_on_start", "trainer.val_before_train", default=True)
    warmup, ratio = (d.get(f"{_ACTOR}optim.lr_warmup_steps{end}", 0) for end in ("", "_ratio"))
    if warmup > 0:
        d.set("warmup_steps", warmup * updates, each, of=f"{_ACTOR}optim.lr_warmup_steps")
    elif ratio:
        d.set("warmup_steps", ratio, "a ratio", of=f"{_ACTOR}optim.lr_warmup_steps_ratio")
    engine = d.get(f"{_ACTOR}strategy", "fsdp")
    if engine not in ("fsdp", "fsdp2"):
        d.decide(f"accelerate_config: verl's engine {engine!r} is not here; fsdp2 is written.", of=f"{_ACTOR}strategy")
    if d.values["num_processes"] > 1:
        d.set("accelerate_config", "fsdp2", f"verl's {engine}", of=f"{_ACTOR}strategy")
    if (betas := d.get(f"{_ACTOR}optim.betas")) is not None:
        d.set("adam_beta1", betas[0], of=f"{_ACTOR}optim.betas")
        d.set("adam_beta2", betas[1], of=f"{_ACTOR}optim.betas")
    _schedule(d)


def _schedule(d: Draft) -> None:
    names = tuple(f"{_ACTOR}optim.{name}" for name in ("lr_scheduler_type", "warmup_style"))
    style, lowest = d.get(names[0]) or d.get(names[1]) or "constant", d.get(f"{_ACTOR}optim.min_lr_ratio")
    if style == "cosine" and lowest:
        d.set("lr_scheduler_type", "cosine_with_min_lr", of=names)
        d.set("lr_scheduler_kwargs", {"min_lr_rate": lowest}, of=f"{_ACTOR}optim.min_lr_ratio")
    elif style == "constant" and "warmup_steps" in d.values:
        d.set("lr_scheduler_type", "constant_with_warmup", "constant after the warm-up", of=names)
    else:
        d.set("lr_scheduler_type", style, of=names)


def _loss(d: Draft) -> None:
    mode, aggregation = (
        d.get(f"{_ACTOR}policy_loss.loss_mode", "vanilla"),
        d.get(f"{_ACTOR}loss_agg_mode", "token-mean"),
    )
    of_mode, of_mean = f"{_ACTOR}policy_loss.loss_mode", f"{_ACTOR}loss_agg_mode"
    d.set("loss_type", _LOSSES.get(mode) or _BY_AGGREGATION.get(aggregation, "grpo"), of=(of_mode, of_mean))
    if mode not in (*_LOSSES, "vanilla"):
        d.decide(f"loss_type: verl's policy_loss.loss_mode {mode!r} is not here; vanilla is written.", of=of_mode)
    if mode in _OWN_MEAN:
        d.sources["loss_type"].discard(of_mean)
        d.leave(of_mean, f"verl's {mode} always takes the mean over completions")
        if d.get(f"{_ACTOR}use_kl_loss", False) and aggregation != "seq-mean-token-mean":
            d.decide(f"loss_aggregation: verl's {mode} has the KL's mean by {aggregation}, here it is the loss's own.")
    elif aggregation not in _BY_AGGREGATION or mode == "cispo":
        d.set("loss_aggregation", aggregation, of=of_mean)
    _clip(d, mode)


def _clip(d: Draft, mode: str) -> None:
    low, high = (d.get(f"{_ACTOR}clip_ratio_{side}", 0.2) for side in ("low", "high"))
    if mode == "sapo":
        for sign in ("pos", "neg"):
            d.copy(f"sapo_temperature_{sign}", f"{_ACTOR}tau_{sign}")
            d.leave(f"{_ACTOR}policy_loss.tau_{sign}", f"verl's sapo reads actor.tau_{sign}")
    elif mode == "cispo":
        note = f"1 + clip_ratio_high: the bound itself. verl also bounds by {1 - low:g} below"
        d.set("epsilon_high", 1 + high, note, of=f"{_ACTOR}clip_ratio_high")
        if low < 1:
            d.decide(
                f"epsilon: verl's cispo also raises ratios below {1 - low:g}; here only the upper bound is one.",
                of=f"{_ACTOR}clip_ratio_low",
            )
    else:
        d.set("epsilon", low, of=f"{_ACTOR}clip_ratio_low")
        d.set("epsilon_high", high, of=f"{_ACTOR}clip_ratio_high")
        if mode not in _LOSSES:
            d.set("delta", d.get(f"{_ACTOR}clip_ratio_c", 3.0), "verl's dual clip", of=f"{_ACTOR}clip_ratio_c")
    both = d.get(f"{_ACTOR}clip_ratio")
    if both is not None and mode != "sapo" and {low, high} != {both}:
        d.decide(
            f"epsilon: clip_ratio={both} has no effect in verl, whose clip_ratio_low={low} and "
            f"clip_ratio_high={high} take its place. Write what you meant.",
            of=f"{_ACTOR}clip_ratio",
        )
    elif both is not None and "epsilon" in d.values:
        d.sources["epsilon"].add(f"{_ACTOR}clip_ratio")


def _kl(d: Draft) -> None:
    in_loss, in_reward = d.get(f"{_ACTOR}use_kl_loss", False), d.get("algorithm.use_kl_in_reward", False)
    switches = (f"{_ACTOR}use_kl_loss", "algorithm.use_kl_in_reward")
    names = (f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type")
    coefficient, kind = d.get(names[0], 0.001), d.get(names[1], "low_var_kl")
    if in_reward:
        names = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        coefficient, kind = d.get(names[0], 0.001), d.get(names[1], "kl")
        if in_loss:
            d.decide(
                "beta: verl has the KL both in the loss and in the reward; here it is in one, the reward.", switches
            )
    if not (in_loss or in_reward) or not coefficient:
        d.set("beta", 0.0, of=switches if not (in_loss or in_reward) else (*switches, names[0]))
        return
    estimator = _KL.get(str(kind).removesuffix("+"), "k3")
    if str(kind).endswith("+"):
        estimator = {"k3": "k3+", "k1": "k2"}.get(estimator, estimator)  # k2's gradient is what the + adds
    set_kl(d, coefficient, names[0], (estimator, f"verl's {kind}", names[1]), in_reward, switches)


def _rewards(d: Draft) -> None:
    entries: list[Any] = []
    of: set[str] = set()
    path, name = d.get("custom_reward_function.path"), d.get("custom_reward_function.name", "compute_score")
    if path:
        module = str(path).removesuffix(".py").replace("/", ".").strip(".")
        d.decide(
            f"reward_funcs: {path}:{name} takes (data_source, solution_str, ground_truth, extra_info) and scores one "
            "completion; a reward here takes completions and columns, and returns a list. Write one around it: "
            f"{{func: '{module.rpartition('.')[2]}:{name}'}}.",
            of=("custom_reward_function.path", "custom_reward_function.name"),
        )
    model = d.get("reward_model.model.path")
    if d.get("reward_model.enable", False) and model:
        entries.append(model)
        of |= {"reward_model.enable", "reward_model.model.path"}
    note, manager = "", d.get("reward_model.reward_manager", "naive")
    if not path and not entries:
        entries.append({"name": "accuracy", "weight": 1.0})
        of.add("reward_model.reward_manager")
        note = (
            f"verl's manager {manager!r} chooses the function by data_source (gsm8k: the number after ####; math: "
            "the last \\boxed). Its scores for wrong answers may be -1"
        )
    entries += _overlong(d, of)
    if entries:
        d.set("reward_funcs", entries, note, of=of)


def _dynamic_sampling(d: Draft) -> None:
    if d.get("algorithm.filter_groups.enable", False):
        metric = d.get("algorithm.filter_groups.metric", "acc")
        own = any(name == {"name": "accuracy", "weight": 1.0} for name in d.values.get("reward_funcs", []))
        chosen = "accuracy" if metric == "acc" and own else "reward"
        of_filter = ("algorithm.filter_groups.enable", "algorithm.filter_groups.metric")
        d.set("dynamic_sampling", chosen, of=of_filter)
        if batches := d.get("algorithm.filter_groups.max_num_gen_batches", 0):
            note = "refills; verl counts generations"
            of_batches = "algorithm.filter_groups.max_num_gen_batches"
            d.set("dynamic_sampling_max_rounds", max(1, batches - 1), note, of=of_batches)


def _overlong(d: Draft, of: set[str]) -> list[Any]:
    for prefix in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        d.leave(f"{prefix}.log", "every reward is logged")
        if d.get(f"{prefix}.enable", False):
            size, factor = d.get(f"{prefix}.len", 0), d.get(f"{prefix}.penalty_factor", 1.0)
            longest = d.get("reward_model.reward_kwargs.max_resp_len", d.get("data.max_response_length", 512))
            of |= {f"{prefix}.{name}" for name in ("enable", "len", "penalty_factor")}
            of.add("reward_model.reward_kwargs.max_resp_len")
            return [{"name": "soft_overlong", "weight": factor, "kwargs": {"max_length": longest, "buffer": size}}]
    return []


def _model(d: Draft) -> None:
    section = "lora." if d.get(f"{_MODEL}lora.rank") else "lora_"
    rank = d.get(f"{_MODEL}{section}rank", 0)
    if not rank:
        return
    d.set("use_peft", True, of=f"{_MODEL}{section}rank")
    d.set("lora_r", rank, of=f"{_MODEL}{section}rank")
    d.copy("lora_alpha", f"{_MODEL}{section}alpha", default=32 if section == "lora." else 16)
    d.copy("lora_target_modules", f"{_MODEL}target_modules", f"{_MODEL}lora.target_modules", default="all-linear")


def _data(d: Draft) -> None:
    train, held_out = (_listed(d.get(f"data.{name}")) for name in ("train_files", "val_files"))
    if train:
        folder = train[0].rpartition("/")[0]
        whole = folder and len(train) == 1 and train[0].endswith("train.parquet")
        both = bool(whole and len(held_out) == 1 and held_out[0] == f"{folder}/test.parquet")
        note = f"train_files: {', '.join(train)}"
        d.set("dataset_name", folder if whole else train[0], note, of=("data.train_files", *["data.val_files"] * both))
        d.decide(
            "The data: verl's parquet has the reference in the nested column reward_model (ground_truth). Write it "
            "to a column of its own (solution), or name the original dataset: openai/gsm8k with answer_format: gsm8k."
            + ("" if len(train) == 1 else f" Of {len(train)} files the first is written; put them into one folder.")
        )
        if not both and d.values["eval_strategy"] == "steps":
            d.decide(
                f"Evaluation: verl evaluates on {', '.join(held_out) or 'its default'}; here on a split of the same "
                "dataset. Put both into one folder as train.parquet and test.parquet, set test_size, or "
                "eval_strategy: no.",
                of="data.val_files",
            )
        elif not both:
            d.leave("data.val_files", "nothing is evaluated (test_freq)")
    if d.get("data.train_max_samples", -1) > 0:
        d.set("max_samples", d.given["data.train_max_samples"], of="data.train_max_samples")
    prefix = "data.apply_chat_template_kwargs."
    if template := {key.removeprefix(prefix): value for key, value in d.given.items() if key.startswith(prefix)}:
        d.set("chat_template_kwargs", template, of=[prefix + key for key in template])


def _listed(value: Any) -> list[str]:
    return [str(name) for name in (value if isinstance(value, list) else [value] if value else [])]


def _run(d: Draft) -> None:
    d.environment("WANDB_PROJECT", "trainer.project_name")
    if not d.get("trainer.default_local_dir"):
        names = ("trainer.project_name", "trainer.experiment_name")
        project, experiment = d.get(names[0], "verl_examples"), d.get(names[1], "gsm8k")
        d.set("output_dir", f"checkpoints/{project}/{experiment}", "verl's default", of=names)
    logger = [name for name in _listed(d.get("trainer.logger", ["console", "wandb"])) if name != "console"]
    trackers = [name for name in logger if name in _TRACKERS]
    note = "metrics.jsonl is always written" if "file" in logger else ""
    d.set("report_to", trackers or "none", note, of="trainer.logger")
    if unknown := [name for name in logger if name not in (*_TRACKERS, "file")]:
        d.decide(f"report_to: verl's logger {', '.join(unknown)} is not here.", of="trainer.logger")
    if d.get("trainer.resume_mode", "auto") == "disable":
        d.set("resume_from_checkpoint", "never", of="trainer.resume_mode")


_TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio")


def _sampler(d: Draft) -> None:
    name = d.get(f"{_ROLLOUT}name", "vllm")
    d.set("use_vllm", True, of=f"{_ROLLOUT}name")
    d.set("vllm_mode", "colocate", "verl's hybrid engine: the sampler has the GPUs of the training")
    if name != "vllm":
        d.decide(f"use_vllm: verl's rollout engine {name!r} is not here; vLLM is written.", of=f"{_ROLLOUT}name")
    if d.get(f"{_ROLLOUT}top_k", -1) > 0:
        d.set("top_k", d.given[f"{_ROLLOUT}top_k"], of=f"{_ROLLOUT}top_k")
    _correction(d)


def _correction(d: Draft) -> None:
    """Correct for the sampler: one threshold truncates, two of them mask what is outside."""
    mode = d.get(f"{_CORRECTION}rollout_is")
    if mode:
        names = (f"{_CORRECTION}rollout_is", f"{_CORRECTION}rollout_is_threshold")
        bounds = [float(part) for part in str(d.get(names[1], 2.0)).split("_")]
        d.set("vllm_importance_sampling_correction", True, of=names[0])
        d.set("vllm_importance_sampling_mode", f"{mode}_{'truncate' if len(bounds) == 1 else 'mask'}", of=names)
        d.set("vllm_importance_sampling_clip_max", bounds[-1], of=names[1])
        if len(bounds) == 2:
            d.set("vllm_importance_sampling_clip_min", bounds[0], of=names[1])
    else:
        d.set(
            "vllm_importance_sampling_correction",
            False,
            "verl's default; true corrects for the sampler's rounding",
            of=f"{_CORRECTION}rollout_is",
        )


VERL = Translation(
    "verl",
    TABLE,
    (_group, _batch, _length, _loss, _kl, _rewards, _dynamic_sampling, _model, _data, _run, _sampler),
    {
        key: {"0.7": value}
        for key, value in {
            "learning_rate": 1e-6,
            "weight_decay": 0.01,
            "max_completion_length": 512,
            "max_prompt_length": 512,
            "num_train_epochs": 30,
            "bf16": True,
            "gradient_checkpointing": True,
        }.items()
    },
    versions=("0.7", "0.10"),
    nested=True,
    aliases={
        "reward.custom_reward_function.": "custom_reward_function.",
        "reward.reward_manager.name": "reward_model.reward_manager",
        "reward_manager.name": "reward_model.reward_manager",
        "reward.reward_manager.": "reward_model.reward_manager.",
        "reward_manager.": "reward_model.reward_manager.",
        "reward.reward_model.model_path": "reward_model.model.path",
        "reward.reward_model.": "reward_model.",
        "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    },
    table_defaults={
        "trainer.project_name": "verl_examples",
        "trainer.experiment_name": "gsm8k",
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
    },
)
