"""verl's hydra tree: batches are counted in prompts, steps in generations, and several keys make one loss."""

import math
from typing import Any

from grpo_ext.recipe.foreign import shared
from grpo_ext.recipe.foreign.engine import Draft, Translation, rules

_ENGINE = "- | verl's own engine; accelerate_config (fsdp2, zero3) spreads the weights"
_SPEED = "- | of verl's workers"
_MODEL = {
    "=": "path=model_name_or_path trust_remote_code custom_chat_template=chat_template",
    "enable_gradient_checkpointing": "gradient_checkpointing = true",
    "lora_rank lora.rank": "* lora_r = 0 | 0 is no LoRA; use_peft switches it on here",
    "lora_alpha": "* lora_alpha = 16 | where the rank is not 0",
    "lora.alpha": "* lora_alpha = 32 | where the rank is not 0",
    "target_modules": "* lora_target_modules = all-linear | where the rank is not 0",
    "override_config.*": "- | change config.json in the model's folder",
    "*": _SPEED,
}
_ACTOR = {
    "=": "grad_clip=max_grad_norm ppo_epochs=num_iterations entropy_coeff=entropy_coef",
    "ppo_mini_batch_size": "* gradient_accumulation_steps = 256 | verl counts the prompts of an optimizer step",
    "ppo_micro_batch_size_per_gpu": "* per_device_train_batch_size | completions in both",
    "ppo_micro_batch_size": "* per_device_train_batch_size | of all GPUs together there",
    "use_dynamic_bsz": "* per_device_train_batch_size | a number of rows, where verl counts tokens",
    "ppo_max_token_len_per_gpu": "- | micro-batches have a number of rows here",
    "clip_ratio": "* - | verl's own clip_ratio_low and clip_ratio_high, 0.2 each, take its place",
    "clip_ratio_low": "* epsilon = 0.2",
    "clip_ratio_high": "* epsilon_high = 0.2 | for cispo 1 + it: the bound of the ratio itself",
    "clip_ratio_c": "* delta = 3.0 | the dual clip",
    "loss_agg_mode": "* loss_aggregation = token-mean | gspo, sapo and geo_mean always take seq-mean-token-mean",
    "loss_scale_factor": "? | seq-mean-token-sum-norm divides by max_completion_length here",
    "tau_pos": "* sapo_temperature_pos | of sapo",
    "tau_neg": "* sapo_temperature_neg | of sapo",
    "use_kl_loss": "* beta | false, and no KL in the reward: beta is 0",
    "kl_loss_coef": "* beta = 0.001 | where use_kl_loss is true",
    "kl_loss_type": "* kl_estimator = low_var_kl | low_var_kl is k3 (verl cuts it at 10), mse is k2, kl is k1",
    "shuffle": "- | the completions of an optimizer step have no order",
    "data_loader_seed": "- | seed is for all of it",
    "checkpoint.*": "- | checkpoints hold all that a run needs to resume",
    "strategy": "* accelerate_config = fsdp | fsdp and fsdp2 are fsdp2; megatron is not supported",
    "*": _ENGINE,
    "policy_loss": {
        "loss_mode": "* loss_type = vanilla | vanilla by loss_agg_mode, gspo, cispo, sapo, geo_mean (gmpo); no others",
        "tau_pos tau_neg": "* - | verl's sapo reads those of actor",
        "*": "- | options of losses that are not supported (clip_cov, kl_cov, dro)",
    },
    "optim": {
        "=": "clip_grad=max_grad_norm",
        "lr": "learning_rate = 1e-6",
        "weight_decay": "weight_decay = 0.01",
        "lr_warmup_steps": "* warmup_steps = 0 | times the optimizer steps of a generation",
        "lr_warmup_steps_ratio": "* warmup_steps | a value below 1 is a ratio",
        "betas": "* adam_beta1, adam_beta2 | a pair there",
        "lr_scheduler_type warmup_style": "* lr_scheduler_type",
        "min_lr_ratio": "* lr_scheduler_kwargs | min_lr_rate, of cosine_with_min_lr",
        "*": _ENGINE,
    },
}
_ROLLOUT = {
    "=": "temperature top_p tensor_model_parallel_size=vllm_tensor_parallel_size dtype=vllm_dtype "
    "gpu_memory_utilization=vllm_gpu_memory_utilization max_model_len=vllm_max_model_length "
    "free_cache_engine=vllm_enable_sleep_mode",
    "n": "* num_generations, generation_batch_size = 1",
    "name": "* use_vllm = vllm | vllm; sglang and others are not supported",
    "top_k": "top_k | off is -1 there, 0 here",
    "val_kwargs.n": "* num_generations_eval = 1 | where test_freq is not -1",
    "val_kwargs.*": "- | evaluation draws as training does",
    "multi_turn.enable": "? | list its tools as functions: environments: [{tools: [./file.py:function]}]",
    "multi_turn.*": "- | list its tools under environments",
    "*": "- | of verl's sampler",
}
_DATA = {
    "=": "prompt_key=prompt_column shuffle=shuffle_dataset seed=data_seed",
    "max_response_length": "max_completion_length = 512",
    "apply_chat_template_kwargs": "chat_template_kwargs",
    "train_files": "* dataset_name | parquet, with the reference in the nested column reward_model",
    "val_files": "* dataset_name | a folder with train and test files has both splits here",
    "train_batch_size": "* generation_batch_size = 1024 | prompts there; completions here: times rollout.n",
    "gen_batch_size": "- | dynamic_sampling draws the missing groups again",
    "val_batch_size": "- | per_device_eval_batch_size is for each process",
    "max_prompt_length": "max_prompt_length = 512 | prompts beyond it are dropped, never cut",
    "train_max_samples": "max_samples | -1 is all",
    "filter_overlong_prompts": "- | max_prompt_length always does",
    "truncation": "- | max_prompt_length drops longer prompts",
    "apply_chat_template_kwargs.*": "* chat_template_kwargs | as a mapping",
    "image_key": "- | only images in the column images",
    "*": _SPEED,
}
_ALGORITHM = {
    "adv_estimator": "* advantage_estimator = gae | grpo is group, rloo is loo, reinforce_plus_plus is reinforce_pp",
    "norm_adv_by_std_in_grpo": "* advantage_estimator = true | false: none",
    "use_kl_in_reward": "* kl_placement | true: reward",
    "kl_penalty": "* kl_estimator = kl | where the KL is in the reward; names as kl_loss_type's",
    "kl_ctrl.kl_coef": "* beta = 0.001 | where the KL is in the reward",
    "kl_ctrl.*": "- | the coefficient is fixed",
    "filter_groups.enable": "* dynamic_sampling",
    "filter_groups.metric": "* dynamic_sampling = acc | acc is accuracy, all others reward",
    "filter_groups.max_num_gen_batches": "* dynamic_sampling_max_rounds | verl counts the first generation too",
    "gamma lam": "- | of GAE; a completion has one reward",
    "*": "- | not supported",
    "rollout_correction": {
        "rollout_is": "* sampler_correction | the level of a ratio",
        "rollout_is_threshold": "* sampler_correction = 2.0 | of rollout_is: one bound truncates, two mask",
        "rollout_is_batch_normalize": "* sampler_correction | of rollout_is",
        "rollout_rs": "* sampler_correction | a block each, with action: reject",
        "rollout_rs_threshold": "* sampler_correction | of rollout_rs; of k1 the logarithms",
        "bypass_mode": "* old_logps | true: sampler",
        "loss_type": "* old_logps = ppo_clip | of bypass_mode",
    },
}
_TRAINER = {
    "=": "max_actor_ckpt_to_keep=save_total_limit",
    "total_epochs": "num_train_epochs = 30",
    "project_name": "env.WANDB_PROJECT",
    "experiment_name": "run_name",
    "total_training_steps": "* max_steps | generations there, optimizer steps here",
    "n_gpus_per_node": "* num_processes = 8 | times nnodes",
    "nnodes": "* num_processes = 1 | times n_gpus_per_node",
    "save_freq": "* save_steps = -1 | generations there, optimizer steps here; -1 is never",
    "test_freq": "* eval_steps = -1 | generations there, optimizer steps here; -1 is never",
    "logger": "* report_to = [console, wandb] | without console, which is always there",
    "default_local_dir": "output_dir | checkpoints/PROJECT/EXPERIMENT by default",
    "resume_mode": "resume_from_checkpoint | disable: never",
    "resume_from_path": "- | resume_from_checkpoint takes a folder of a run of grpo-ext",
    "val_before_train": "* eval_on_start = true | where test_freq is not -1",
    "log_val_generations": "- | log_completions logs those of training",
    "*": _SPEED,
}
_TABLE = rules(
    {
        "actor_rollout_ref": {
            "nccl_timeout": "ddp_timeout",
            "hybrid_engine": _SPEED,
            "ref.*": "- | the reference model is computed in the policy's own micro-batches",
            "model": _MODEL,
            "actor": _ACTOR,
            "rollout": _ROLLOUT,
        },
        "data": _DATA,
        "algorithm": _ALGORITHM,
        "trainer": _TRAINER,
        "reward_model": {
            "enable": "* reward_funcs | the model is an entry of the list",
            "model.path": "* reward_funcs | where reward_model.enable is true",
            "reward_manager": "* reward_funcs = naive | verl chooses the function by data_source; here it has a name",
            "reward_manager.*": "- | reward_funcs names the rewards",
            "overlong_buffer.* reward_kwargs.*": "* reward_funcs | soft_overlong",
            "*": "- | reward_model has options of its own: docs/rewards.md",
        },
        "custom_reward_function.path": "? | there a function of (data_source, solution_str, ground_truth, extra_info) "
        "scores one completion; here it takes lists of completions and columns. Write one around it, and name it in "
        "reward_funcs: {func: './file.py:function'}",
        "custom_reward_function.name": "- | reward_funcs names the function",
        "reward.num_workers": "reward_workers",
        "critic.*": "- | no critic here: the group is the baseline",
        "async_training.* rollout.*": "? | rollouts run beside the training there; rollout_ahead: 1 is nearest",
        "distillation.*": "? | verl trains on a teacher's distribution, which is not supported",
        "model_engine": f"?{_ENGINE[1:]}",
        "config_path config_name": "- | hydra's: the file of verl that the keys change",
        "CUDA_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF MASTER_PORT": "- | export it before the start",
        "NNODES": "- | a variable of the script",
        "ray_kwargs.* ray_init.* global_profiler.* global_tool_config.* prefix_grouper.* transfer_queue.*": _SPEED,
        "hydra.*": _SPEED,
    }
)
_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_M, _C = "actor_rollout_ref.model.", "algorithm.rollout_correction."
_ESTIMATORS = {
    **dict.fromkeys(("grpo", "grpo_vectorized", "gdpo"), "group"),
    **dict.fromkeys(("rloo", "rloo_vectorized"), "loo"),
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
_KL |= {f"{name}+": {"k3": "k3+", "k1": "k2"}.get(ours, ours) for name, ours in _KL.items()}  # with k2's gradient
_BY_AGGREGATION = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}
_LOSSES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "gmpo": "gmpo"}
_TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio")


def _group(d: Draft) -> None:
    estimator, group, scaled = "algorithm.adv_estimator", f"{_R}n", "algorithm.norm_adv_by_std_in_grpo"
    critic = d.get(estimator) == "gae" and d.get(group) < 2
    cure = f"{estimator}=grpo and {group}=8"
    if shared.set_group(d, group, estimator, _ESTIMATORS, critic, cure) == "group":
        d.set("advantage_estimator", "group" if d.get(scaled) else "none", of=(estimator, scaled))
    if d.get(estimator) == "gdpo":
        d.set("multi_objective_aggregation", "normalize_then_sum", of=estimator)


def _batch(d: Draft) -> None:
    prompts, mini = d.get("data.train_batch_size"), d.get(f"{_A}ppo_mini_batch_size")
    if prompts == 0:
        prompts = mini
        sentence = f"verl's asynchronous trainer has none; {prompts} prompts, one optimizer step, is written"
        d.decide(f"generation_batch_size: {sentence}.", "data.train_batch_size")
    shared.set_processes(d, "trainer.nnodes", "trainer.n_gpus_per_node")
    micro, of_all = d.get(f"{_A}ppo_micro_batch_size_per_gpu"), d.get(f"{_A}ppo_micro_batch_size")
    rows = micro or (max(1, of_all // d.values["num_processes"]) if of_all else 8)
    by_tokens = d.get(f"{_A}use_dynamic_bsz") or not (micro or of_all)
    of_rows = f"{_A}ppo_micro_batch_size{'_per_gpu' if micro else ''}"
    step = mini * d.values["num_generations"]
    shared.set_batch(d, prompts, step, rows, of_rows, f"{_A}use_dynamic_bsz" if by_tokens else "")


def _length(d: Draft) -> None:
    prompts = d.get("data.train_batch_size") or 1024
    updates = max(1, prompts // d.get(f"{_A}ppo_mini_batch_size")) * d.get(f"{_A}ppo_epochs", 1)
    keys = "trainer.save_freq", "trainer.test_freq", f"{_R}val_kwargs.n"
    each = shared.set_intervals(d, *keys, updates, "generations")
    if (steps := d.get("trainer.total_training_steps")) is not None:
        d.set("max_steps", steps * updates, each)
    if d.values["eval_strategy"] == "steps":
        d.copy("eval_on_start", "trainer.val_before_train")
    warmup, ratio = f"{_A}optim.lr_warmup_steps", f"{_A}optim.lr_warmup_steps_ratio"
    if d.get(warmup) > 0:
        d.set("warmup_steps", d.get(warmup) * updates, each, of=warmup)
    elif d.get(ratio):
        d.set("warmup_steps", d.get(ratio), "a ratio", of=ratio)
    shared.set_betas(d, f"{_A}optim.betas")
    style = d.get(f"{_A}optim.lr_scheduler_type") or d.get(f"{_A}optim.warmup_style") or "constant"
    if style == "cosine" and d.get(f"{_A}optim.min_lr_ratio"):
        style = "cosine_with_min_lr"
        d.set("lr_scheduler_kwargs", {"min_lr_rate": d.get(f"{_A}optim.min_lr_ratio")})
    elif style == "constant" and "warmup_steps" in d.values:
        style = "constant_with_warmup"
    d.set("lr_scheduler_type", style)


def _loss(d: Draft) -> None:
    of_mode, of_mean = f"{_A}policy_loss.loss_mode", f"{_A}loss_agg_mode"
    mode, mean = d.get(of_mode), d.get(of_mean)
    by_mean = _BY_AGGREGATION.get(mean, "grpo")
    d.choose("loss_type", of_mode, {**_LOSSES, "vanilla": by_mean}, by_mean)
    if mode in _LOSSES and mode != "cispo":
        d.leave(of_mean, f"verl's {mode} always takes the mean over completions")
        if d.get(f"{_A}use_kl_loss") and mean != "seq-mean-token-mean":
            d.decide(f"loss_aggregation: verl's {mode} takes the KL's mean by {mean}; here it is the loss's own.")
    else:
        d.set("loss_type", d.values["loss_type"], of=(of_mode, of_mean))
        if mean not in _BY_AGGREGATION or mode == "cispo":
            d.set("loss_aggregation", mean)


def _clip(d: Draft) -> None:
    mode, both = d.get(f"{_A}policy_loss.loss_mode"), d.get(f"{_A}clip_ratio")
    low, high = d.get(f"{_A}clip_ratio_low"), d.get(f"{_A}clip_ratio_high")
    if mode == "sapo":
        for sign in ("pos", "neg"):
            d.copy(f"sapo_temperature_{sign}", f"{_A}tau_{sign}")
    elif mode == "cispo":
        d.set(
            "epsilon_high", 1 + high, f"1 + clip_ratio_high: the bound itself. verl also bounds by {1 - low:g} below"
        )
        if low < 1:
            sentence = f"verl's cispo also raises ratios below {1 - low:g}; here only the upper bound exists"
            d.decide(f"epsilon: {sentence}.", f"{_A}clip_ratio_low")
    else:
        d.set("epsilon", low, of=(f"{_A}clip_ratio_low", *[f"{_A}clip_ratio"] * ({low, high} == {both})))
        d.set("epsilon_high", high)
        if mode not in _LOSSES:
            d.set("delta", d.get(f"{_A}clip_ratio_c"), "verl's dual clip")
    if both is not None and mode != "sapo" and {low, high} != {both}:
        sentence = f"has no effect in verl: clip_ratio_low={low} and clip_ratio_high={high} take its place"
        d.decide(f"epsilon: clip_ratio={both} {sentence}. Write what you meant.", f"{_A}clip_ratio")


def _kl(d: Draft) -> None:
    switches = f"{_A}use_kl_loss", "algorithm.use_kl_in_reward"
    in_loss, in_reward = map(d.get, switches)
    if in_loss and in_reward:
        d.decide("beta: verl has the KL both in the loss and in the reward; here it is in the reward only.", *switches)
    if in_reward:
        shared.set_kl(d, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", _KL, True, switches)
    elif in_loss:
        shared.set_kl(d, f"{_A}kl_loss_coef", f"{_A}kl_loss_type", _KL, False, switches)
    else:
        d.set("beta", 0.0, of=switches)


def _rewards(d: Draft) -> None:
    note, entries, of = "", [], []
    if d.get("reward_model.enable") and d.get("reward_model.model.path"):
        of = ["reward_model.enable", "reward_model.model.path"]
        entries = [d.get(of[1])]
    elif not d.get("custom_reward_function.path"):
        of, entries = ["reward_model.reward_manager"], [{"name": "accuracy", "weight": 1.0}]
        note = f"verl's {d.get(of[0])} chooses the function by data_source, and may give -1 for a wrong answer"
    for prefix in ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg."):
        d.leave(f"{prefix}log", "every reward is logged")
        if d.get(f"{prefix}enable"):
            longest = d.get("reward_model.reward_kwargs.max_resp_len", d.get("data.max_response_length"))
            weight = d.get(f"{prefix}penalty_factor", 1.0)
            entries.append(shared.overlong_entry(longest, d.get(f"{prefix}len", 0), weight))
            of += [f"{prefix}enable", f"{prefix}len", f"{prefix}penalty_factor"]
            of.append("reward_model.reward_kwargs.max_resp_len")
            break
    if entries:
        d.set("reward_funcs", entries, note, of=of)
    if d.get("algorithm.filter_groups.enable"):
        own = d.get("algorithm.filter_groups.metric") == "acc" and {"name": "accuracy", "weight": 1.0} in entries
        d.set("dynamic_sampling", "accuracy" if own else "reward")
        if batches := d.get("algorithm.filter_groups.max_num_gen_batches"):
            d.set("dynamic_sampling_max_rounds", max(1, batches - 1), "refills; verl counts generations")


def _data(d: Draft) -> None:
    train, held_out = (list(map(str, shared.to_list(d.get(f"data.{name}_files")))) for name in ("train", "val"))
    if train:
        folder = train[0].rpartition("/")[0]
        whole = folder and len(train) == 1 and train[0].endswith("train.parquet")
        both = bool(whole and held_out == [f"{folder}/test.parquet"])
        of = ("data.train_files", *["data.val_files"] * both)
        d.set("dataset_name", folder if whole else train[0], f"train_files: {', '.join(train)}", of=of)
        d.decide(
            "The data: verl's parquet has the reference in the nested column reward_model (ground_truth). Write it "
            "to a column of its own (solution), or name the original dataset: openai/gsm8k with answer_format: gsm8k."
        )
        shared.decide_first_of(d, train, "data.train_files")
        if not both and d.values["eval_strategy"] == "steps":
            d.decide(
                f"Evaluation: verl evaluates on {', '.join(held_out) or 'its default'}; here on a split of the same "
                "dataset. Put both into one folder as train.parquet and test.parquet, set test_size, or "
                "eval_strategy: no.",
                "data.val_files",
            )
        elif not both:
            d.leave("data.val_files", "evaluation is off (test_freq)")
    prefix = "data.apply_chat_template_kwargs."
    if template := {key.removeprefix(prefix): value for key, value in d.given.items() if key.startswith(prefix)}:
        d.set("chat_template_kwargs", template)


def _run(d: Draft) -> None:
    section = f"{_M}lora." if d.get(f"{_M}lora.rank") else f"{_M}lora_"
    if d.get(f"{section}rank"):
        modules = f"{_M}target_modules", f"{_M}lora.target_modules"
        shared.set_lora(d, rank=[f"{section}rank"], alpha=[f"{section}alpha"], target_modules=modules)
    if d.values["num_processes"] > 1:
        d.choose("accelerate_config", f"{_A}strategy", {"fsdp": "fsdp2", "fsdp2": "fsdp2"}, "fsdp2")
    if not d.get("trainer.default_local_dir"):
        project, experiment = "trainer.project_name", "trainer.experiment_name"
        path = f"checkpoints/{d.get(project, 'verl_examples')}/{d.get(experiment, 'gsm8k')}"
        d.set("output_dir", path, "verl's default", of=(project, experiment))
    logger = shared.to_list(d.get("trainer.logger"))
    note = "metrics.jsonl is always written" if "file" in logger else ""
    d.set("report_to", [name for name in logger if name in _TRACKERS] or "none", note)
    if unknown := [name for name in logger if name not in (*_TRACKERS, "file", "console")]:
        d.decide(f"report_to: verl's logger {', '.join(unknown)} is not supported.", "trainer.logger")


def _sampler(d: Draft) -> None:
    d.choose("use_vllm", f"{_R}name", {"vllm": True}, True)
    d.set("vllm_mode", "colocate", "verl's hybrid engine: the sampler has the GPUs of the training", of=())
    _correction(d)


_SELECTS, _BYPASS = (f"{_C}rollout_rs", f"{_C}rollout_rs_threshold"), (f"{_C}bypass_mode", f"{_C}loss_type")
_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}


def _correction(d: Draft) -> None:
    """Convert the weights, the rejections, or their absence where the old policy is the sampler."""
    weighs = f"{_C}rollout_is", f"{_C}rollout_is_threshold", f"{_C}rollout_is_batch_normalize"
    if d.get(_BYPASS[0]):
        if d.get(_BYPASS[1]) == "ppo_clip" and not d.get(_SELECTS[0]):
            d.set("old_logps", "sampler", of=_BYPASS)
        else:
            sentence = "verl then rejects or weighs by a ratio that moves with the policy. Write old_logps: sampler"
            d.decide(f"{_BYPASS[0]}=True: {sentence}, or sampler_correction.", *_BYPASS, *_SELECTS, *weighs)
        return
    blocks = []
    if level := d.get(weighs[0]):
        *lower, upper = (float(part) for part in str(d.get(weighs[1])).split("_"))
        block = {"level": level, "upper": upper, "action": "mask" if lower else "truncate"}
        blocks.append(
            block | ({"lower": lower[0]} if lower else {}) | ({"normalize": True} if d.get(weighs[2]) else {})
        )
    options, bounds = (str(d.get(name) or "").replace(" ", "").split(",") for name in _SELECTS)
    if options != [""]:
        each = bounds * len(options) if len(bounds) == 1 else bounds
        try:
            blocks += [_rejects(*pair) for pair in zip(options, each, strict=True)]
        except (KeyError, ValueError):
            sentence = f"{_SELECTS[0]}={d.get(_SELECTS[0])}: not one of verl's rejections with its threshold."
            d.decide(f"{sentence} Write sampler_correction.", *_SELECTS)
    note = "" if blocks else "verl's default; true corrects for the sampler's rounding"
    d.set("vllm_importance_sampling_correction", bool(blocks), note, of=(weighs[0], _SELECTS[0]))
    if blocks:
        d.set("sampler_correction", blocks[0] if len(blocks) == 1 else blocks, of=(*weighs, *_SELECTS))


def _rejects(option: str, bound: str) -> dict[str, Any]:
    """Return the block of one of verl's rejections, whose bounds of k1 are ratios."""
    where, _, statistic = option.rpartition("_")
    block = {"level": _LEVELS[where], "statistic": statistic, "action": "reject"}
    if statistic != "k1":
        return block | {"upper": float(bound)}
    *lower, upper = (float(part) for part in bound.split("_"))
    return block | {
        "lower": round(math.log(lower[0] if lower else 1 / upper), 12),
        "upper": round(math.log(upper), 12),
    }


VERL = Translation(
    "verl",
    _TABLE,
    (_group, _batch, _length, _loss, _clip, _kl, _rewards, _data, _run, _sampler),
    versions=("0.7", "0.10"),
    defaults={"bf16": True},
    converters={
        f"{_R}top_k": shared.positive,
        "data.train_max_samples": shared.positive,
        "trainer.resume_mode": {"disable": "never"}.get,
    },
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
)
