"""ms-swift's arguments of `swift rlhf --rlhf_type grpo`: TRL's mostly, with names and defaults of its own."""

import math
from typing import Any

from grpo_ext.recipe.foreign import shared, trl
from grpo_ext.recipe.foreign.engine import Draft, Translation, rules
from grpo_ext.recipe.parts import all_keys

_MOVES = "- | how ms-swift moves weights between training and vLLM; vllm_enable_sleep_mode does it here"
_CLASS = "? | write it as a class (docs/environments.md): environments: [{path: ./file.py:Class}]"
_TABLE = rules(
    {
        "=": "use_rslora use_dora bnb_4bit_quant_type torch_dtype=dtype target_parameters=lora_target_parameters "
        "dataset_shuffle=shuffle_dataset streaming=dataset_streaming overlong_filter=mask_truncated_completions "
        "off_policy_sequence_mask_delta=off_policy_mask_threshold vllm_max_model_len=vllm_max_model_length "
        "vllm_server_group_port=vllm_group_port response_length=max_completion_length "
        "max_new_tokens=max_completion_length structured_outputs_regex=vllm_structured_outputs_regex "
        "lr=learning_rate train_iters=max_steps max_epochs=num_train_epochs log_interval=logging_steps "
        "save_interval=save_steps eval_interval=eval_steps num_workers=dataloader_num_workers model_revision "
        "MASTER_ADDR=main_process_ip MASTER_PORT=main_process_port MAX_PIXELS=env.MAX_PIXELS "
        "PYTORCH_CUDA_ALLOC_CONF=env.PYTORCH_CUDA_ALLOC_CONF IMAGE_MAX_TOKEN_NUM=env.IMAGE_MAX_TOKEN_NUM",
        "rlhf_type": "- | a recipe is GRPO's",
        "model": "model_name_or_path | names of ModelScope are not always those of the Hugging Face hub",
        "model_type": "- | the model's own configuration has it",
        "template agent_template": "- | the tokenizer's chat template, or chat_template",
        "use_hf": "- | names are those of the Hugging Face hub, or folders",
        "attn_impl": "* attn_implementation | flash_attn is flash_attention_2",
        "attention_backend": "* attn_implementation | flash is flash_attention_2",
        "tuner_type train_type": "* use_peft | lora; full is false; others are not supported",
        "lora_rank": "* lora_r = 8 | of lora",
        "lora_alpha": "* lora_alpha = 32 | of lora",
        "lora_dropout": "* lora_dropout = 0.05 | of lora",
        "target_modules": "* lora_target_modules = all-linear | of lora",
        "modules_to_save": "* lora_modules_to_save | of lora",
        "freeze_vit freeze_llm freeze_aligner": "- | not supported; name what LoRA trains by lora_target_modules",
        "quant_method": "* load_in_4bit, load_in_8bit | bnb with quant_bits 4 or 8",
        "quant_bits": "* load_in_4bit, load_in_8bit | or load_in_8bit",
        "adapters": "? | merge the adapter into the model first, or name its folder as the model",
        "ref_adapters ref_model": "- | the reference is the policy as it begins",
        "dataset": "* dataset_name | name#N is max_samples: N, name:subset is dataset_config",
        "val_dataset": "? | evaluation is on a split of the same dataset here: dataset_test_split, or test_size",
        "split_dataset_ratio": "* test_size | 0 is none",
        "top_k": "top_k | off is -1 there, 0 here",
        "columns": "* answer_column, prompt_column | what solution and query are called",
        "load_from_cache_file dataset_num_proc strict": "- | how ms-swift prepares data; changes no result",
        "system": "* system_prompt | the text, or the content of the file",
        "enable_thinking": "chat_template_kwargs | enable_thinking",
        "max_length": "max_prompt_length | longer prompts are dropped here, cut from the left there",
        "truncation_strategy": "- | max_prompt_length drops, as delete does",
        "max_pixels": "- | of the model's processor",
        "loss_scale": "- | every token of a completion counts",
        "padding_free": "- | shared_prefix packs rows where it is exact",
        "sequence_parallel_size": "- | a row is the work of one process",
        "reward_model": "* reward_funcs | an entry of the list",
        "reward_model_plugin": "- | reward_model has options of its own: docs/rewards.md",
        "external_plugins": "* - | registers classes; here a function: {func: 'module:function'}",
        "cosine_min_len_value_correct": "* reward_funcs = 1.0 | an option of cosine_length",
        "cosine_max_len_value_correct": "* reward_funcs = 0.5 | an option of cosine_length",
        "cosine_min_len_value_wrong": "* reward_funcs = -0.5 | an option of cosine_length",
        "cosine_max_len_value_wrong": "* reward_funcs = 0.0 | an option of cosine_length",
        "cosine_max_len": "* reward_funcs | an option of cosine_length",
        "repetition_n_grams": "* reward_funcs = 3 | an option of repetition",
        "repetition_max_penalty": "* reward_funcs = -1.0 | an option of repetition",
        "soft_max_length soft_cache_length": "* reward_funcs | an option of soft_overlong",
        "tau_pos": "* sapo_temperature_pos | of sapo",
        "tau_neg": "* sapo_temperature_neg | of sapo",
        "dynamic_sample": "* dynamic_sampling | reward: groups whose rewards are all the same are drawn again",
        "max_resample_times": "* dynamic_sampling_max_rounds | of dynamic_sample",
        "advantage_estimator": "* advantage_estimator = grpo | reinforce_plus_plus is reinforce_pp_baseline",
        "kl_in_reward": "* kl_placement | true: reward",
        "beta": "* beta = 0.04",
        "scale_rewards": "* scale_rewards | as in TRL; gdpo is multi_objective_aggregation: normalize_then_sum",
        "rollout_importance_sampling_mode": "* sampler_correction | its sequences take the geometric mean",
        "rollout_importance_sampling_threshold": "* sampler_correction = 2.0 | of rollout_importance_sampling_mode",
        "log_rollout_offpolicy_metrics log_entropy": "- | always logged",
        "vllm_enable_prefix_caching": "- | vLLM does it by default",
        "sleep_level": "vllm_enable_sleep_mode | 1 and 2 are true",
        "vllm_enable_lora move_model_batches offload_model offload_optimizer": _MOVES,
        "importance_sampling_level": "importance_sampling_level | sequence_token, GSPO's per token, is sequence",
        "loss_type": "* loss_type = grpo | real, fipo are not supported",
        "async_generate": "? | rollouts are of the current weights here; rollout_ahead: 1 is nearest",
        "multi_turn_scheduler": _CLASS,
        "use_gym_env": _CLASS,
        "gym_env": _CLASS,
        "max_turns vllm_server_pass_dataset": "- | write it as a class, and list it under environments",
        "deepspeed": "* accelerate_config | zero1, zero2, zero3; the _offload ones by a file of accelerate",
        "warmup_ratio lr_warmup_fraction": "warmup_steps | a value below 1 is a ratio",
        "min_lr": "* lr_scheduler_kwargs | min_lr, of cosine_with_min_lr",
        "global_batch_size": "* gradient_accumulation_steps | completions of an optimizer step, of all GPUs",
        "micro_batch_size": "per_device_train_batch_size",
        "cross_entropy_loss_fusion gradient_accumulation_fusion tensor_model_parallel_size moe_* finetune "
        "pipeline_model_parallel_size expert_model_parallel_size context_parallel_size no_save_optim no_save_rng "
        "recompute_granularity recompute_method recompute_num_layers offload_bridge sequence_parallel "
        "optimizer_cpu_offload use_precision_aware_optimizer num_experts_per_token": "- | of Megatron, which is not "
        "supported; accelerate_config spreads the weights",
        "save_safetensors load_safetensors": "- | transformers 5 always does",
        "stop_words": "? | generation_kwargs: {stop: [...]} with vLLM, stop_strings without",
        "merge_lora": "- | the adapter is saved; merge it afterwards",
        "fipo_*": "- | an option of fipo, which is not supported",
        "add_version": "- | output_dir is taken as it is",
        "create_checkpoint_symlink": "- | not supported",
        "load_args": "- | the recipe has all of them",
        "NPROC_PER_NODE nproc_per_node": "* num_processes | of each machine",
        "NNODES": "* num_processes = 1 | times NPROC_PER_NODE",
        "CUDA_VISIBLE_DEVICES": "- | export it before the start",
        "colocate_groups": "* vllm_mode | colocate",
        "chord_*": "? | the objective is another one: supervised rows beside the rollouts",
        "teacher_*": "? | the objective is another one: a teacher's distribution",
        "*_teacher_model": "- | of the teacher",
    }
)
_ESTIMATORS = {"rloo": "loo", "reinforce_plus_plus": "reinforce_pp_baseline"}
_FLASH = dict.fromkeys(("flash", "flash_attn"), "flash_attention_2")


def _flatten(d: Draft) -> None:
    """Bring the sections of its ray YAML to the top."""
    for section in ("train", "rollout"):
        if isinstance(inner := d.given.get(section), dict):
            d.given = {k: v for k, v in d.given.items() if k != section} | inner


def _launch(d: Draft) -> None:
    if "NPROC_PER_NODE" in d.given:
        of = "NPROC_PER_NODE", "NNODES"
        d.set("num_processes", int(d.get(of[0])) * int(d.get(of[1])), of=of)
    elif processes := next((name for name in ("gpus", "nproc_per_node") if isinstance(d.get(name), int)), None):
        d.copy("num_processes", processes)
    shared.set_zero_stage(d, exact=True)
    size, step = d.get("micro_batch_size"), d.get("global_batch_size")
    if not size:  # its Megatron side counts a step in completions of all GPUs
        return
    accumulation, rest = divmod(step or 0, size * d.values.get("num_processes", 1))
    if step and not rest:
        d.set("gradient_accumulation_steps", accumulation, f"{step} completions (global_batch_size)")
        if steps := d.get("steps_per_generation"):
            note = f"{steps} optimizer steps there"
            d.set("steps_per_generation", steps * accumulation, note, of="steps_per_generation")
    elif step:
        choice = "choose gradient_accumulation_steps for the number of your processes"
        d.decide(f"global_batch_size={step}: {choice}.", "global_batch_size")


def _model(d: Draft) -> None:
    tuner, of_tuner = d.get("tuner_type", d.get("train_type", "lora")), ("tuner_type", "train_type")
    if tuner == "lora":
        keys = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout"}
        shared.set_lora(d, **{name: [key] for name, key in keys.items()}, target_modules=["target_modules"])
        modules = d.values["lora_target_modules"]
        if isinstance(modules, list) and len(modules) == 1:
            d.values["lora_target_modules"] = modules[0]
        d.set("use_peft", True, of=of_tuner)
        if (saved := d.get("modules_to_save")) is not None:
            d.set("lora_modules_to_save", shared.to_list(saved))
    elif tuner == "full":
        d.set("use_peft", False, of=of_tuner)
    else:
        d.decide(f"tuner_type: {tuner!r} is not supported. Choose LoRA (use_peft: true) or all weights.", *of_tuner)
    if d.get("quant_method") == "bnb" and d.get("quant_bits") in (4, 8):
        d.set(f"load_in_{d.given['quant_bits']}bit", True)
    attention = d.first("attention_backend", "attn_impl")
    if name := d.get(attention):
        d.set("attn_implementation", _FLASH.get(name, name), of=attention)
    lowest = d.get("min_lr")
    if lowest is not None and float(lowest) == float(d.get("lr") or d.get("learning_rate") or -1):
        d.set("lr_scheduler_type", "constant", "min_lr is the learning rate", of="min_lr")
    elif lowest is not None:
        d.set("lr_scheduler_type", "cosine_with_min_lr", of="min_lr")
        d.set("lr_scheduler_kwargs", {"min_lr": lowest})


def _data(d: Draft) -> None:
    names = shared.to_list(d.get("dataset"))
    if names:
        name, _, count = str(names[0]).partition("#")
        name, _, subset = name.partition(":")
        d.set("dataset_name", name, "names of ModelScope are not always those of the Hugging Face hub")
        if subset:
            d.set("dataset_config", subset, of="dataset")
        if count:
            d.set("max_samples", int(count), of="dataset")
        shared.decide_first_of(d, names, "dataset")
    shared.set_held_out(d, "split_dataset_ratio")
    if "test_size" not in d.values and d.get("eval_strategy", "no") == "no":
        for key in ("eval_steps", "per_device_eval_batch_size"):
            d.leave(key, "split_dataset_ratio is 0: there is no evaluation")
    columns = d.get("columns")
    for column, meaning in (columns if isinstance(columns, dict) else {}).items():
        if named := {"solution": "answer_column", "query": "prompt_column"}.get(meaning):
            d.set(named, column)
        else:
            d.decide(f"columns: {column} as {meaning}: rename the column in the data.", "columns")
    system = d.get("system")
    if isinstance(system, str) and system.endswith((".txt", ".md")):
        d.decide(f"system_prompt: write the content of {system} here.", "system")
    elif system:
        d.set("system_prompt", system)


def _loss(d: Draft) -> None:
    loss = d.get("loss_type")
    d.set("loss_type", "grpo" if loss in ("real", "fipo") else loss)
    if loss in ("real", "fipo"):
        sentence = "is not supported; grpo is written. `loss_type: module:function` takes one of yours"
        d.decide(f"loss_type: {loss!r} {sentence}.", "loss_type")
    if loss == "sapo":
        for key in ("epsilon", "epsilon_high"):
            d.leave(key, "sapo does not clip")
        for sign in ("pos", "neg"):
            d.copy(f"sapo_temperature_{sign}", f"tau_{sign}")
    estimator, scaled = d.get("advantage_estimator"), d.get("scale_rewards")
    if estimator in _ESTIMATORS:
        note = "group mean, then whitened over the batch" if estimator != "rloo" else ""
        d.set("advantage_estimator", _ESTIMATORS[estimator], note, of="advantage_estimator")
        if scaled not in (None, "none" if estimator == "rloo" else "batch"):
            d.decide(f"scale_rewards={scaled!r} has no effect with {estimator} here.", "scale_rewards")
    elif scaled == "gdpo":
        d.set("multi_objective_aggregation", "normalize_then_sum", of="scale_rewards")
    elif "scale_rewards" in d.given or d.values["loss_type"] == "dr_grpo":
        note = "" if scaled else f"{d.default_note}; the paper's Dr. GRPO has none"
        d.set("scale_rewards", scaled or "group", note, of="scale_rewards")
    beta = d.copy("beta", "beta")
    if d.get("kl_in_reward", estimator != "grpo") and float(beta):
        d.set("kl_placement", "reward", of=d.first("kl_in_reward", "advantage_estimator"))
        d.set("kl_estimator", "k1", "the only one that a reward can hold", of=())
    if d.get("dynamic_sample"):
        d.set("dynamic_sampling", "reward")
        d.copy("dynamic_sampling_max_rounds", "max_resample_times")


def _rewards(d: Draft) -> None:
    names, weights, notes = shared.to_list(d.get("reward_funcs")), d.get("reward_weights"), []
    of = {"reward_funcs", "reward_model", "reward_weights"}
    entries: list[Any] = [entry for name in names if (entry := _reward(d, str(name), of)) is not None]
    entries += shared.to_list(d.get("reward_model"))
    if "accuracy" in names:
        notes.append("accuracy leaves a reference unscored that it cannot read, where ms-swift gives 0")
    if weights and len(weights) == len(entries) == len(names):
        entries = [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    elif weights:
        of.discard("reward_weights")
        d.decide(f"reward_weights={weights}: give each entry of reward_funcs its weight.", "reward_weights")
    if entries:
        d.set("reward_funcs", entries, "; ".join(notes), of=of)
    for key in set(d.computing("reward_funcs")) - of:
        d.leave(key, "its reward is not in reward_funcs")


_COSINE = tuple(f"cosine_{end}_len_value_{word}" for word in ("correct", "wrong") for end in ("min", "max"))
_OPTIONS: dict[str, tuple[str, ...]] = {
    "repetition": ("repetition_n_grams", "repetition_max_penalty"),
    "soft_overlong": ("soft_max_length", "soft_cache_length"),
    "cosine": (*_COSINE, "cosine_max_len"),
}


def _reward(d: Draft, name: str, of: set[str]) -> dict[str, Any] | None:
    """Return the entry of one reward; add the keys that it was made of."""
    longest, keys = d.get("max_completion_length", 512), _OPTIONS.get(name, ())
    of |= set(keys)
    if name == "accuracy":
        return {"name": "accuracy"}
    if name == "format":
        return {"name": "format", "kwargs": {"style": "think_answer_inline"}}
    if name == "repetition":
        return {"name": "repetition", "kwargs": {"n": d.get(keys[0]), "max_penalty": d.get(keys[1])}}
    if name == "soft_overlong":
        if d.get("soft_cache_length") is None:
            d.decide("reward soft_overlong: set its buffer (soft_cache_length there).")
        return shared.overlong_entry(d.get("soft_max_length", longest), d.get("soft_cache_length"))
    if name == "cosine":
        return shared.cosine_entry(d, d.get("cosine_max_len", longest), keys[:4])
    where = f" of {d.get('external_plugins')}" if d.get("external_plugins") else ""
    cure = "a class registered there; here a function, {func: 'module:function'}"
    d.decide(f"reward {name!r}{where}: {cure}.", "external_plugins", "reward_funcs")
    return None


_CORRECTS, _OF_IT = "rollout_importance_sampling", ("mode", "threshold")


def _corrections(bound: float) -> dict[str, Any]:
    """Return the blocks of each mode; `sequence_mask` weighs tokens of the completions whose mean ratio is kept."""
    mean = {"level": "geometric", "statistic": "k1", "lower": round(-math.log(bound), 12), "action": "mask"}
    return {
        "token_truncate": {"level": "token", "upper": bound},
        "token_mask": {"level": "token", "upper": bound, "action": "mask"},
        "sequence_truncate": {"level": "geometric", "upper": bound},
        "sequence_mask": [{"level": "token"}, mean],
    }


def _sampler(d: Draft) -> None:
    if mode := d.get("rollout_importance_sampling_mode"):
        bound, keys = d.get("rollout_importance_sampling_threshold"), [f"{_CORRECTS}_{key}" for key in _OF_IT]
        d.set("vllm_importance_sampling_correction", True, of=keys[0])
        blocks = _corrections(float(bound)).get(mode)
        if blocks is None:
            d.decide(f"{keys[0]}={mode}: not one of ms-swift's. Write sampler_correction.", *keys)
        else:
            d.set("sampler_correction", blocks, of=keys)
    if isinstance(groups := d.get("colocate_groups"), list) and groups:
        d.set("vllm_mode", "colocate")


def _finish(d: Draft) -> None:
    """Write the learning rate of the tuner, stock TRL's axes, and check that a generation is of whole groups."""
    if "learning_rate" not in d.values:
        d.set("learning_rate", 1e-4 if d.values.get("use_peft") else 1e-5)
    trl.set_stock(d, "ms-swift's losses have TRL's form and defaults; without this line the paper's")
    rows, group = (d.values.get(name, 8) for name in ("per_device_train_batch_size", "num_generations"))
    accumulation = d.values.get("gradient_accumulation_steps", 1)
    steps = d.values.get("steps_per_generation", accumulation)
    if not all(isinstance(value, int) for value in (rows, group, steps, accumulation)):
        return
    if steps % accumulation:
        d.decide(
            f"steps_per_generation={steps} is not a multiple of gradient_accumulation_steps={accumulation}: an "
            "optimizer step would mix generations. Choose one that is."
        )
    completions = rows * steps * d.values.get("num_processes", 1)
    if "generation_batch_size" not in d.values and completions % group:
        d.decide(
            f"The batch: {completions} completions drawn at once are not whole groups of {group}. Choose "
            "per_device_train_batch_size, steps_per_generation or num_processes."
        )


SWIFT = Translation(
    "ms-swift",
    _TABLE,
    (_flatten, _launch, _model, _data, _loss, _rewards, _sampler),
    versions=("4.0", "4.1", "4.6"),
    defaults={
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "temperature": 0.9,
        "top_k": {"4.0": 50, "4.1": 0},
        "top_p": {"4.0": 0.9, "4.1": 1.0},
        "max_completion_length": 512,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "use_bias_correction_kl": False,
        "vllm_importance_sampling_correction": False,
    },
    converters={
        "top_k": lambda k: max(k, 0),
        "sleep_level": bool,
        "enable_thinking": lambda on: {"enable_thinking": on},
        "importance_sampling_level": lambda level: level.removesuffix("_token"),
    },
    same=frozenset(all_keys()),
    finish=_finish,
)
