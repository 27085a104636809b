"""ms-swift's arguments of `swift rlhf --rlhf_type grpo`: TRL's mostly, with names and defaults of its own."""

from typing import Any

from grpo_ext.recipe.foreign.draft import Draft, cosine_length, rules
from grpo_ext.recipe.parts import all_keys

_MOVES = "- | how ms-swift moves weights between training and vLLM; vllm_enable_sleep_mode does it here"
_DATA = "- | how ms-swift prepares data; changes no result"
_OPTION = "* reward_funcs | an option of a reward, which stands with it"
TABLE = rules(
    rlhf_type="- | a recipe is GRPO's",
    model="model_name_or_path | names of ModelScope are not always those of the Hugging Face hub",
    model_type="- | the model's own configuration says it",
    template="- | the tokenizer's chat template, or chat_template",
    model_revision="model_revision",
    use_hf="- | names are those of the Hugging Face hub, or folders",
    torch_dtype="dtype",
    attn_impl="* attn_implementation | flash_attn is flash_attention_2",
    attention_backend="* attn_implementation | flash is flash_attention_2",
    tuner_type="* use_peft | lora; full is false; others are not here",
    train_type="* use_peft | lora; full is false; others are not here",
    lora_rank="lora_r",
    lora_dropout="lora_dropout",
    target_modules="* lora_target_modules",
    modules_to_save="* lora_modules_to_save",
    target_parameters="lora_target_parameters",
    use_rslora="use_rslora",
    use_dora="use_dora",
    freeze_vit="- | not here; name what LoRA trains by lora_target_modules",
    freeze_llm="- | not here; name what LoRA trains by lora_target_modules",
    freeze_aligner="- | not here; name what LoRA trains by lora_target_modules",
    quant_method="* load_in_4bit | bnb with quant_bits 4 or 8",
    quant_bits="* load_in_4bit | or load_in_8bit",
    bnb_4bit_quant_type="bnb_4bit_quant_type",
    adapters="* model_name_or_path | an adapter to begin from",
    ref_adapters="- | the reference is the policy as it begins",
    ref_model="- | the reference is the policy as it begins",
    dataset="* dataset_name | name#N is max_samples: N, name:subset is dataset_config",
    val_dataset="* dataset_test_split | a split of the same dataset here",
    split_dataset_ratio="* test_size | 0 is none",
    columns="* answer_column, prompt_column | what solution and query are called",
    dataset_shuffle="shuffle_dataset",
    load_from_cache_file=_DATA,
    dataset_num_proc=_DATA,
    strict=_DATA,
    streaming="dataset_streaming",
    system="* system_prompt | the text, or the content of the file",
    enable_thinking="* chat_template_kwargs | enable_thinking",
    max_length="max_prompt_length | in GRPO the prompt alone; longer prompts are dropped here, cut from the left "
    "there",
    truncation_strategy="- | max_prompt_length drops, as delete does",
    max_pixels="- | of the model's processor",
    loss_scale="- | every token of a completion counts",
    padding_free="- | shared_prefix packs rows where it is exact",
    sequence_parallel_size="- | a row is the work of one process",
    reward_model="* reward_funcs | an entry of the list",
    reward_model_plugin="- | reward_model has options of its own: docs/rewards.md",
    external_plugins="* reward_funcs | a file that registers classes; here a function: {func: 'module:function'}",
    cosine_min_len_value_wrong=_OPTION,
    cosine_max_len_value_wrong=_OPTION,
    cosine_min_len_value_correct=_OPTION,
    cosine_max_len_value_correct=_OPTION,
    cosine_max_len=_OPTION,
    repetition_n_grams=_OPTION,
    repetition_max_penalty=_OPTION,
    soft_max_length=_OPTION,
    soft_cache_length=_OPTION,
    tau_pos="sapo_temperature_pos",
    tau_neg="sapo_temperature_neg",
    overlong_filter="mask_truncated_completions",
    dynamic_sample="* dynamic_sampling | reward: groups whose rewards are all the same are drawn anew",
    max_resample_times="dynamic_sampling_max_rounds",
    advantage_estimator="* advantage_estimator | grpo is group, rloo is loo, reinforce_plus_plus is "
    "reinforce_pp_baseline",
    kl_in_reward="* kl_placement | true: reward",
    scale_rewards="* advantage_estimator | group, batch, none as in TRL; gdpo is multi_objective_aggregation: "
    "normalize_then_sum",
    off_policy_sequence_mask_delta="off_policy_mask_threshold",
    rollout_importance_sampling_mode="* vllm_importance_sampling_mode | the same names",
    rollout_importance_sampling_threshold="* vllm_importance_sampling_clip_max",
    log_rollout_offpolicy_metrics="- | the sampler's drift is always logged",
    log_entropy="- | the entropy is always logged",
    vllm_max_model_len="vllm_max_model_length",
    vllm_server_group_port="vllm_group_port",
    vllm_enable_lora=_MOVES,
    vllm_enable_prefix_caching="- | vLLM does it by default",
    vllm_server_pass_dataset="- | write it as a class, and list it under environments",
    sleep_level="* vllm_enable_sleep_mode | 1 and 2 are true",
    move_model_batches=_MOVES,
    offload_model=_MOVES,
    offload_optimizer=_MOVES,
    async_generate="* - | rollouts are of the current weights here",
    multi_turn_scheduler="* - | write it as a class, and list it under environments",
    max_turns="- | write it as a class, and list it under environments",
    use_gym_env="* - | write it as a class, and list it under environments",
    gym_env="* - | write it as a class, and list it under environments",
    deepspeed="* accelerate_config | zero1, zero2, zero3; the _offload ones by a file of accelerate",
    warmup_ratio="warmup_steps | a value below 1 is a ratio",
    lr_warmup_fraction="warmup_steps | a value below 1 is a ratio",
    lr="learning_rate",
    min_lr="* lr_scheduler_kwargs | min_lr, of cosine_with_min_lr",
    global_batch_size="* gradient_accumulation_steps | completions of an optimizer step, of all GPUs",
    micro_batch_size="* per_device_train_batch_size",
    colocate_groups="- | vllm_mode says where vLLM runs",
    cross_entropy_loss_fusion="- | of Megatron, which is not here",
    gradient_accumulation_fusion="- | of Megatron, which is not here",
    tensor_model_parallel_size="- | of Megatron, which is not here; --accelerate_config says how weights are spread",
    pipeline_model_parallel_size="- | of Megatron, which is not here; --accelerate_config says how weights are spread",
    expert_model_parallel_size="- | of Megatron, which is not here; --accelerate_config says how weights are spread",
    context_parallel_size="- | of Megatron, which is not here; --accelerate_config says how weights are spread",
    **dict.fromkeys(
        (
            "no_save_optim",
            "no_save_rng",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "finetune",
            "offload_bridge",
            "sequence_parallel",
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
        ),
        "- | of Megatron, which is not here",
    ),
    train_iters="max_steps",
    save_safetensors="- | transformers 5 always does",
    merge_lora="- | the adapter is saved; merge it afterwards",
    fipo_decay_rate="- | an option of fipo, which is not here",
    fipo_clip_range="- | an option of fipo, which is not here",
    fipo_clip_high_only="- | an option of fipo, which is not here",
    fipo_safety_threshold="- | an option of fipo, which is not here",
    MASTER_ADDR="main_process_ip",
    add_version="- | output_dir is taken as it is",
    create_checkpoint_symlink="- | not here",
    load_args="- | a recipe says it all",
    NPROC_PER_NODE="num_processes",
    NNODES="* num_processes | times NPROC_PER_NODE",
    CUDA_VISIBLE_DEVICES="- | export it before the start",
    MASTER_PORT="main_process_port",
    MAX_PIXELS="* env",
    PYTORCH_CUDA_ALLOC_CONF="* env",
    IMAGE_MAX_TOKEN_NUM="* env",
)
_ESTIMATORS = {"rloo": "loo", "reinforce_plus_plus": "reinforce_pp_baseline"}
_SAME = frozenset(all_keys())


def translate(d: Draft) -> None:
    """All arguments; where one is not given, ms-swift's default."""
    for section in ("train", "rollout"):
        if isinstance(inner := d.given.get(section), dict):
            d.given = {k: v for k, v in d.given.items() if k != section} | inner
    _launch(d)
    _model(d)
    _data(d)
    _loss(d)
    _rewards(d)
    _sampler(d)
    d.apply_table(_SAME)
    said = "ms-swift's default"
    lora = bool(d.values.get("use_peft"))
    for key, value in (
        ("learning_rate", 1e-4 if lora else 1e-5),
        ("lr_scheduler_type", "cosine"),
        ("weight_decay", 0.1),
        ("adam_beta2", 0.95),
        ("temperature", 0.9),
        ("num_generations", 8),
        ("max_completion_length", 512),
        ("gradient_accumulation_steps", 1),
        ("per_device_train_batch_size", 1),
        ("bf16", True),
    ):
        if key not in d.values:
            d.set(key, value, said)
    if "eval_steps" in d.given and "eval_strategy" not in d.values and "test_size" not in d.values:
        d.values.pop("eval_steps", None)
        d.leave("eval_steps", "nothing is held out for evaluation (split_dataset_ratio is 0)")
    _whole_groups(d)


def _whole_groups(d: Draft) -> None:
    """A generation of whole groups; ms-swift asks the same of its own."""
    rows, group = d.values["per_device_train_batch_size"], d.values["num_generations"]
    steps = d.values.get("steps_per_generation", d.values["gradient_accumulation_steps"])
    accumulation = d.values["gradient_accumulation_steps"]
    if not all(isinstance(value, int) for value in (rows, group, steps, accumulation)):
        return
    if steps % accumulation:
        d.decide(
            f"steps_per_generation={steps} is no multiple of gradient_accumulation_steps={accumulation}: an "
            "optimizer step "
            "would mix generations. Choose one that is."
        )
    completions = rows * steps * d.values.get("num_processes", 1)
    if "generation_batch_size" not in d.values and completions % group:
        d.decide(
            f"The batch: {completions} completions drawn at once are no whole groups of {group}. Choose "
            "per_device_train_batch_size, steps_per_generation or num_processes."
        )


def _launch(d: Draft) -> None:
    nodes = int(d.take("NNODES", 1))
    if "NPROC_PER_NODE" in d.given:
        d.set("num_processes", int(d.take("NPROC_PER_NODE")) * nodes)
    elif isinstance(gpus := d.given.get("gpus"), int):
        d.take("gpus")
        d.set("num_processes", gpus)
    engine = d.take("deepspeed")
    if isinstance(engine, str) and engine:
        stage = next((f"zero{n}" for n in "123" if f"zero{n}" in engine), None)
        if stage:
            d.set("accelerate_config", stage, "" if engine == stage else f"{engine} there")
        if stage is None or "offload" in engine:
            d.decide(
                f"deepspeed: {engine!r} offloads or is a file. Write it into a file of accelerate, and name that."
            )
    for name in ("MAX_PIXELS", "PYTORCH_CUDA_ALLOC_CONF", "IMAGE_MAX_TOKEN_NUM"):
        if name in d.given:
            d.environment(name, d.take(name))
    size, step = d.take("micro_batch_size"), d.take("global_batch_size")
    if size:
        d.set("per_device_train_batch_size", size)
        processes = d.values.get("num_processes", 1)
        if step and step % (size * processes) == 0:
            d.set("gradient_accumulation_steps", step // (size * processes), f"{step} completions (global_batch_size)")
            if "steps_per_generation" in d.given:  # counted in optimizer steps by its Megatron side
                steps = d.take("steps_per_generation")
                d.set("steps_per_generation", steps * (step // (size * processes)), f"{steps} optimizer steps there")
        elif step:
            d.decide(f"global_batch_size={step}: choose gradient_accumulation_steps for the number of your processes.")


def _model(d: Draft) -> None:
    tuner = d.take("tuner_type", d.take("train_type", "lora"))
    if tuner == "lora":
        d.set("use_peft", True, "" if "tuner_type" in d.given or "train_type" in d.given else "ms-swift's default")
        modules = d.take("target_modules", "all-linear")
        one = modules[0] if isinstance(modules, list) and len(modules) == 1 else modules
        d.set("lora_target_modules", one)
        d.set("lora_r", d.take("lora_rank", 8))
        d.set("lora_alpha", d.take("lora_alpha", 32))
        d.set("lora_dropout", d.take("lora_dropout", 0.05))
        d.set("disable_dropout", False, "lora_dropout has an effect in ms-swift; 0.0 and true here are exact")
        if (saved := d.take("modules_to_save")) is not None:
            d.set("lora_modules_to_save", saved if isinstance(saved, list) else [saved])
    elif tuner != "full":
        d.decide(f"tuner_type: {tuner!r} is not here. Choose LoRA (use_peft: true) or all weights.")
    bits = d.take("quant_bits")
    if d.take("quant_method") == "bnb" and bits in (4, 8):
        d.set(f"load_in_{bits}bit", True)
    if (adapters := d.take("adapters")) is not None:
        d.decide(f"adapters: {adapters}: merge the adapter into the model first, or name its folder as the model.")
    attention = d.take("attention_backend", d.take("attn_impl"))
    d.take("attn_impl")
    if attention:
        d.set("attn_implementation", "flash_attention_2" if attention in ("flash", "flash_attn") else attention)
    lowest = d.take("min_lr")
    if lowest is not None and float(lowest) == float(d.given.get("lr") or d.given.get("learning_rate") or -1):
        d.set("lr_scheduler_type", "constant", "min_lr is the learning rate")
    elif lowest is not None:
        d.set("lr_scheduler_type", "cosine_with_min_lr")
        d.set("lr_scheduler_kwargs", {"min_lr": lowest})


def _data(d: Draft) -> None:
    names = d.take("dataset", [])
    names = [names] if isinstance(names, str) else names
    if names:
        name, _, count = str(names[0]).partition("#")
        name, _, subset = name.partition(":")
        d.set("dataset_name", name, "names of ModelScope are not always those of the Hugging Face hub")
        if subset:
            d.set("dataset_config", subset)
        if count:
            d.set("max_samples", int(count))
    if len(names) > 1:
        d.decide(
            f"dataset_name: of {len(names)} datasets the first is written. Mix them by datasets (docs/recipes.md)."
        )
    ratio = d.take("split_dataset_ratio", 0)
    if ratio:
        d.set("test_size", ratio)
        if "eval_strategy" not in d.given:
            d.set("eval_strategy", "steps")
    if d.take("val_dataset") is not None:
        d.decide("val_dataset: evaluation is on a split of the same dataset here: dataset_test_split, or test_size.")
    columns = d.take("columns", {})
    for column, meaning in (columns if isinstance(columns, dict) else {}).items():
        key = {"solution": "answer_column", "query": "prompt_column"}.get(meaning)
        if key:
            d.set(key, column)
        else:
            d.decide(f"columns: {column} as {meaning}: rename the column in the data.")
    system = d.take("system")
    if isinstance(system, str) and system.endswith((".txt", ".md")):
        d.decide(f"system_prompt: write the content of {system} here.")
    elif system:
        d.set("system_prompt", system)
    if (thinking := d.take("enable_thinking")) is not None:
        d.set("chat_template_kwargs", {"enable_thinking": thinking})


def _loss(d: Draft) -> None:
    said = "ms-swift's default"
    loss = d.take("loss_type", "grpo")
    if loss in ("real", "fipo"):
        d.decide(f"loss_type: {loss!r} is not here; grpo is written. `loss_type: module:function` takes one of yours.")
        loss = "grpo"
    d.set("loss_type", loss, "" if "loss_type" in d.given else said)
    for key in ("epsilon", "epsilon_high"):
        if loss == "sapo":
            d.leave(key, "sapo does not clip")
    estimator = d.take("advantage_estimator", "grpo")
    scaled = d.take("scale_rewards")
    if estimator in _ESTIMATORS:
        note = "group mean, then whitened over the batch" if estimator != "rloo" else ""
        d.set("advantage_estimator", _ESTIMATORS[estimator], note)
        if scaled not in (None, "none", "batch"):
            d.decide(f"scale_rewards={scaled!r} with {estimator}: advantage_estimator alone says it here.")
    elif scaled == "gdpo":
        d.set("multi_objective_aggregation", "normalize_then_sum")
    elif scaled is not None:
        d.set("scale_rewards", scaled)
    in_reward = d.take("kl_in_reward", estimator != "grpo")
    beta = float(d.take("beta", 0.04))
    d.set("beta", beta, "" if "beta" in d.given else said)
    if in_reward and beta:
        d.set("kl_placement", "reward")
        d.set("kl_estimator", "k1", "what can stand in the reward")
    if d.take("dynamic_sample", False):
        d.set("dynamic_sampling", "reward")
    else:
        d.leave("max_resample_times", "dynamic_sample is false")
    if loss == "cispo":
        d.decide("epsilon_high of cispo is the bound of the ratio itself here and in TRL (5.0); look at yours.")
    if loss == "dr_grpo" and scaled is None:
        d.set("scale_rewards", "group", f"{said}; the paper's Dr. GRPO has none")


def _rewards(d: Draft) -> None:
    names = d.take("reward_funcs", [])
    names = [names] if isinstance(names, str) else names
    external = d.take("external_plugins")
    entries: list[Any] = [entry for name in names if (entry := _reward(d, str(name), external)) is not None]
    models = d.take("reward_model", [])
    entries += [models] if isinstance(models, str) else models
    weights = d.take("reward_weights")
    if weights and len(weights) == len(entries) == len(names):
        entries = [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    elif weights:
        d.decide(f"reward_weights={weights}: give each entry of reward_funcs its weight.")
    if entries:
        d.set("reward_funcs", entries, d.notes.get("reward_funcs", ""))
    options = ("cosine_", "repetition_n", "repetition_m", "soft_m", "soft_c")
    for key in [k for k in d.given if k.startswith(options) and k not in d.taken]:
        d.leave(key, "its reward is not in reward_funcs")


def _reward(d: Draft, name: str, external: Any) -> dict[str, Any] | None:
    longest = d.given.get("max_completion_length", 512)
    if name == "accuracy":
        d.notes["reward_funcs"] = "accuracy leaves a reference unscored that it cannot read, where ms-swift gives 0"
        return {"name": "accuracy"}
    if name == "format":
        return {"name": "format", "kwargs": {"style": "think_answer_inline"}}
    if name == "repetition":
        n, penalty = d.take("repetition_n_grams", 3), d.take("repetition_max_penalty", -1.0)
        return {"name": "repetition", "kwargs": {"n": n, "max_penalty": penalty}}
    if name == "soft_overlong":
        kwargs = {"max_length": d.take("soft_max_length", longest), "buffer": d.take("soft_cache_length")}
        if kwargs["buffer"] is None:
            d.decide("reward soft_overlong: set its buffer (soft_cache_length there).")
        return {"name": "soft_overlong", "kwargs": kwargs}
    if name == "cosine":
        correct, wrong = (
            (d.take(f"cosine_min_len_value_{word}", short), d.take(f"cosine_max_len_value_{word}", long))
            for word, short, long in (("correct", 1.0, 0.5), ("wrong", -0.5, 0.0))
        )
        return cosine_length(d, d.take("cosine_max_len", longest), correct=correct, wrong=wrong)
    where = f" of {external}" if external else ""
    d.decide(f"reward {name!r}{where}: a class registered there; here a function, {{func: 'module:function'}}.")
    return None


def _sampler(d: Draft) -> None:
    if "sleep_level" in d.given:
        d.set("vllm_enable_sleep_mode", bool(d.take("sleep_level")))
    mode, threshold = d.take("rollout_importance_sampling_mode"), d.take("rollout_importance_sampling_threshold", 2.0)
    if mode:
        d.set("vllm_importance_sampling_correction", True)
        d.set("vllm_importance_sampling_mode", mode)
        d.set("vllm_importance_sampling_clip_max", threshold)
    elif d.given.get("use_vllm"):
        d.set("vllm_importance_sampling_correction", False, "ms-swift's default")
    if isinstance(groups := d.given.get("colocate_groups"), list) and groups:
        d.set("vllm_mode", "colocate")
    if d.take("async_generate", False):
        d.decide("async_generate: rollouts are of the current weights here, and training waits for them.")
    for key in ("multi_turn_scheduler", "use_gym_env", "gym_env"):
        if d.take(key):
            d.decide(f"{key}: write it as a class (docs/environments.md): environments: [{{path: ./file.py:Class}}].")
