"""ms-swift's arguments of `swift rlhf --rlhf_type grpo`: TRL's mostly, with names and defaults of its own."""

from typing import Any

from grpo_ext.recipe.foreign import trl_family
from grpo_ext.recipe.foreign.counting import cosine_length
from grpo_ext.recipe.foreign.draft import Draft, Translation, rules
from grpo_ext.recipe.parts import all_keys

_MOVES = "- | how ms-swift moves weights between training and vLLM; vllm_enable_sleep_mode does it here"
_DATA = "- | how ms-swift prepares data; changes no result"
_OPTION = "* reward_funcs | an option of that entry"
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
    lora_rank="* lora_r | of lora",
    lora_dropout="* lora_dropout | of lora",
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
    adapters="? | merge the adapter into the model first, or name its folder as the model",
    ref_adapters="- | the reference is the policy as it begins",
    ref_model="- | the reference is the policy as it begins",
    dataset="* dataset_name | name#N is max_samples: N, name:subset is dataset_config",
    val_dataset="? | evaluation is on a split of the same dataset here: dataset_test_split, or test_size",
    split_dataset_ratio="* test_size | 0 is none",
    top_k="* top_k | off is -1 there, 0 here",
    columns="* answer_column, prompt_column | what solution and query are called",
    dataset_shuffle="shuffle_dataset",
    load_from_cache_file=_DATA,
    dataset_num_proc=_DATA,
    strict=_DATA,
    streaming="dataset_streaming",
    system="* system_prompt | the text, or the content of the file",
    enable_thinking="* chat_template_kwargs | enable_thinking",
    max_length="max_prompt_length | in GRPO only the prompt; longer prompts are dropped here, cut from the left there",
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
    tau_pos="* sapo_temperature_pos | of sapo",
    tau_neg="* sapo_temperature_neg | of sapo",
    overlong_filter="mask_truncated_completions",
    dynamic_sample="* dynamic_sampling | reward: groups whose rewards are all the same are drawn again",
    max_resample_times="* dynamic_sampling_max_rounds | of dynamic_sample",
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
    importance_sampling_level="* importance_sampling_level | sequence_token, GSPO's per token, is sequence",
    loss_type="* loss_type | real, fipo are not here",
    response_length="max_completion_length",
    max_new_tokens="max_completion_length",
    structured_outputs_regex="vllm_structured_outputs_regex",
    async_generate="? | rollouts are of the current weights here; rollout_ahead: 1 is nearest",
    multi_turn_scheduler="? | write it as a class (docs/environments.md): environments: [{path: ./file.py:Class}]",
    max_turns="- | write it as a class, and list it under environments",
    use_gym_env="? | write it as a class (docs/environments.md): environments: [{path: ./file.py:Class}]",
    gym_env="? | write it as a class (docs/environments.md): environments: [{path: ./file.py:Class}]",
    deepspeed="* accelerate_config | zero1, zero2, zero3; the _offload ones by a file of accelerate",
    warmup_ratio="warmup_steps | a value below 1 is a ratio",
    lr_warmup_fraction="warmup_steps | a value below 1 is a ratio",
    lr="learning_rate",
    min_lr="* lr_scheduler_kwargs | min_lr, of cosine_with_min_lr",
    global_batch_size="* gradient_accumulation_steps | completions of an optimizer step, of all GPUs",
    micro_batch_size="* per_device_train_batch_size",
    colocate_groups="- | vllm_mode says where vLLM runs",
    **dict.fromkeys(
        (
            *("cross_entropy_loss_fusion", "gradient_accumulation_fusion", "tensor_model_parallel_size"),
            *("pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size", "no_save_optim"),
            *("no_save_rng", "recompute_granularity", "recompute_method", "recompute_num_layers", "finetune"),
            *("offload_bridge", "sequence_parallel", "optimizer_cpu_offload", "use_precision_aware_optimizer"),
            *("num_experts_per_token", "moe_*"),
        ),
        "- | of Megatron, which is not here; accelerate_config says how weights are spread",
    ),
    train_iters="max_steps",
    max_epochs="num_train_epochs",
    log_interval="logging_steps",
    save_interval="save_steps",
    eval_interval="eval_steps",
    num_workers="dataloader_num_workers",
    load_safetensors="- | transformers 5 always does",
    stop_words="? | generation_kwargs: {stop: [...]} with vLLM, stop_strings without",
    agent_template="- | the tokenizer's chat template",
    nproc_per_node="* num_processes | of the launcher",
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
    NPROC_PER_NODE="* num_processes | times NNODES",
    NNODES="* num_processes | times NPROC_PER_NODE",
    CUDA_VISIBLE_DEVICES="- | export it before the start",
    MASTER_PORT="main_process_port",
    MAX_PIXELS="* env",
    PYTORCH_CUDA_ALLOC_CONF="* env",
    IMAGE_MAX_TOKEN_NUM="* env",
    **{
        "chord_*": "? | the objective is another one: supervised rows beside the rollouts are not here",
        "teacher_*": "? | the objective is another one: a teacher's distribution is not here",
        "*_teacher_model": "- | of the teacher",
    },
)
_ESTIMATORS = {"rloo": "loo", "reinforce_plus_plus": "reinforce_pp_baseline"}


def _flatten(d: Draft) -> None:
    """Bring the sections of its ray YAML to the top."""
    for section in ("train", "rollout"):
        if isinstance(inner := d.given.get(section), dict):
            d.given = {k: v for k, v in d.given.items() if k != section} | inner


def _launch(d: Draft) -> None:
    nodes = int(d.get("NNODES", 1))
    if "NPROC_PER_NODE" in d.given:
        d.set("num_processes", int(d.given["NPROC_PER_NODE"]) * nodes, of=("NPROC_PER_NODE", "NNODES"))
    elif processes := next((name for name in ("gpus", "nproc_per_node") if isinstance(d.get(name), int)), None):
        d.copy("num_processes", processes)
    engine = d.get("deepspeed")
    if isinstance(engine, str) and engine:
        stage = next((f"zero{n}" for n in "123" if f"zero{n}" in engine), None)
        if stage:
            d.set("accelerate_config", stage, "" if engine == stage else f"{engine} there", of="deepspeed")
        if stage is None or "offload" in engine:
            d.decide(
                f"deepspeed: {engine!r} offloads or is a file. Write it into a file of accelerate, and name that.",
                of="deepspeed",
            )
    for name in ("MAX_PIXELS", "PYTORCH_CUDA_ALLOC_CONF", "IMAGE_MAX_TOKEN_NUM"):
        d.environment(name, name)


def _batch(d: Draft) -> None:
    """Its Megatron side counts a step in completions of all GPUs."""
    size, step = d.get("micro_batch_size"), d.get("global_batch_size")
    if not size:
        return
    d.set("per_device_train_batch_size", size, of="micro_batch_size")
    processes = d.values.get("num_processes", 1)
    if step and step % (size * processes) == 0:
        accumulation = step // (size * processes)
        d.set(
            "gradient_accumulation_steps", accumulation, f"{step} completions (global_batch_size)", "global_batch_size"
        )
        if steps := d.get("steps_per_generation"):  # counted in optimizer steps by its Megatron side
            note = f"{steps} optimizer steps there"
            d.set("steps_per_generation", steps * accumulation, note, of="steps_per_generation")
    elif step:
        d.decide(
            f"global_batch_size={step}: choose gradient_accumulation_steps for the number of your processes.",
            of="global_batch_size",
        )


def _model(d: Draft) -> None:
    tuner = d.get("tuner_type", d.get("train_type", "lora"))
    if tuner == "lora":
        d.set("use_peft", True, of=("tuner_type", "train_type"))
        modules = d.get("target_modules", "all-linear")
        one = modules[0] if isinstance(modules, list) and len(modules) == 1 else modules
        d.set("lora_target_modules", one, of="target_modules")
        d.copy("lora_r", "lora_rank", default=8)
        d.copy("lora_alpha", "lora_alpha", default=32)
        if d.copy("lora_dropout", "lora_dropout", default=0.05):
            d.set("disable_dropout", False, "lora_dropout has an effect in ms-swift; 0.0 and true here are exact")
        if (saved := d.get("modules_to_save")) is not None:
            d.set("lora_modules_to_save", saved if isinstance(saved, list) else [saved], of="modules_to_save")
    else:
        d.leave("lora_alpha", "all weights are trained")
        if tuner != "full":
            d.decide(
                f"tuner_type: {tuner!r} is not here. Choose LoRA (use_peft: true) or all weights.",
                of=("tuner_type", "train_type"),
            )
        elif d.get("tuner_type", d.get("train_type")):
            d.set("use_peft", False, of=("tuner_type", "train_type"))
    if d.get("quant_method") == "bnb" and d.get("quant_bits") in (4, 8):
        d.set(f"load_in_{d.given['quant_bits']}bit", True, of=("quant_method", "quant_bits"))
    attention = d.get("attention_backend", d.get("attn_impl"))
    if attention:
        named = "flash_attention_2" if attention in ("flash", "flash_attn") else attention
        d.set("attn_implementation", named, of="attention_backend" if "attention_backend" in d.given else "attn_impl")
    lowest = d.get("min_lr")
    if lowest is not None and float(lowest) == float(d.get("lr") or d.get("learning_rate") or -1):
        d.set("lr_scheduler_type", "constant", "min_lr is the learning rate", of="min_lr")
    elif lowest is not None:
        d.set("lr_scheduler_type", "cosine_with_min_lr", of="min_lr")
        d.set("lr_scheduler_kwargs", {"min_lr": lowest}, of="min_lr")


def _data(d: Draft) -> None:
    names = d.get("dataset", [])
    names = [names] if isinstance(names, str) else names
    if names:
        name, _, count = str(names[0]).partition("#")
        name, _, subset = name.partition(":")
        d.set("dataset_name", name, "names of ModelScope are not always those of the Hugging Face hub", of="dataset")
        if subset:
            d.set("dataset_config", subset, of="dataset")
        if count:
            d.set("max_samples", int(count), of="dataset")
    if len(names) > 1:
        d.decide(
            f"dataset_name: of {len(names)} datasets the first is written. Mix them by datasets (docs/recipes.md).",
            of="dataset",
        )
    if ratio := d.get("split_dataset_ratio", 0):
        d.set("test_size", ratio, of="split_dataset_ratio")
        d.copy("eval_strategy", "eval_strategy", default="steps")
    if "test_size" not in d.values and d.get("eval_strategy", "no") == "no":
        for key in ("eval_steps", "per_device_eval_batch_size"):
            d.leave(key, "nothing is held out for evaluation (split_dataset_ratio is 0)")
    columns = d.get("columns", {})
    for column, meaning in (columns if isinstance(columns, dict) else {}).items():
        if named := {"solution": "answer_column", "query": "prompt_column"}.get(meaning):
            d.set(named, column, of="columns")
        else:
            d.decide(f"columns: {column} as {meaning}: rename the column in the data.", of="columns")
    system = d.get("system")
    if isinstance(system, str) and system.endswith((".txt", ".md")):
        d.decide(f"system_prompt: write the content of {system} here.", of="system")
    elif system:
        d.set("system_prompt", system, of="system")
    if (thinking := d.get("enable_thinking")) is not None:
        d.set("chat_template_kwargs", {"enable_thinking": thinking}, of="enable_thinking")


def _loss(d: Draft) -> None:
    loss = d.get("loss_type", "grpo")
    if loss in ("real", "fipo"):
        d.decide(
            f"loss_type: {loss!r} is not here; grpo is written. `loss_type: module:function` takes one of yours.",
            of="loss_type",
        )
        loss = "grpo"
    d.set("loss_type", loss, of="loss_type")
    if loss == "sapo":
        for key in ("epsilon", "epsilon_high"):
            d.leave(key, "sapo does not clip")
        for sign in ("pos", "neg"):
            d.copy(f"sapo_temperature_{sign}", f"tau_{sign}")
    if (level := d.get("importance_sampling_level")) is not None:
        note = "sequence_token there, which has the same gradient" if level == "sequence_token" else ""
        d.set("importance_sampling_level", level.removesuffix("_token"), note, of="importance_sampling_level")


def _advantages(d: Draft) -> None:
    estimator, scaled = d.get("advantage_estimator", "grpo"), d.get("scale_rewards")
    if estimator in _ESTIMATORS:
        note = "group mean, then whitened over the batch" if estimator != "rloo" else ""
        d.set("advantage_estimator", _ESTIMATORS[estimator], note, of="advantage_estimator")
        if scaled not in (None, "none" if estimator == "rloo" else "batch"):
            d.decide(
                f"scale_rewards={scaled!r} with {estimator}: advantage_estimator says it here.", of="scale_rewards"
            )
    elif scaled == "gdpo":
        d.set("multi_objective_aggregation", "normalize_then_sum", of="scale_rewards")
    elif "scale_rewards" in d.given or d.values["loss_type"] == "dr_grpo":
        note = "" if scaled else f"{d.says_default}; the paper's Dr. GRPO has none"
        d.set("scale_rewards", scaled or "group", note, of="scale_rewards")
    beta = d.copy("beta", "beta", default=0.04)
    if d.get("kl_in_reward", estimator != "grpo") and float(beta):
        d.set("kl_placement", "reward", of="kl_in_reward" if "kl_in_reward" in d.given else "advantage_estimator")
        d.set("kl_estimator", "k1", "the only one that a reward can hold")
    if d.get("dynamic_sample", False):
        d.set("dynamic_sampling", "reward", of="dynamic_sample")
        d.copy("dynamic_sampling_max_rounds", "max_resample_times")


def _rewards(d: Draft) -> None:
    names = d.get("reward_funcs", [])
    names = [names] if isinstance(names, str) else names
    of: set[str] = {"reward_funcs", "reward_model", "reward_weights"}
    notes: list[str] = []
    entries: list[Any] = [entry for name in names if (entry := _reward(d, str(name), of, notes)) is not None]
    models = d.get("reward_model", [])
    entries += [models] if isinstance(models, str) else models
    weights = d.get("reward_weights")
    if weights and len(weights) == len(entries) == len(names):
        entries = [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    elif weights:
        of.discard("reward_weights")
        d.decide(f"reward_weights={weights}: give each entry of reward_funcs its weight.", of="reward_weights")
    if entries:
        d.set("reward_funcs", entries, "; ".join(notes), of=of)
    for key in d.given:
        if TABLE.get(key) is TABLE["cosine_max_len"] and key not in of:
            d.leave(key, "its reward is not in reward_funcs")


def _reward(d: Draft, name: str, of: set[str], notes: list[str]) -> dict[str, Any] | None:
    """Return the entry of one reward; add the keys that it was made of, and what differs."""
    longest = d.get("max_completion_length", 512)
    if name == "accuracy":
        notes.append("accuracy leaves a reference unscored that it cannot read, where ms-swift gives 0")
        return {"name": "accuracy"}
    if name == "format":
        return {"name": "format", "kwargs": {"style": "think_answer_inline"}}
    if name == "repetition":
        of |= {"repetition_n_grams", "repetition_max_penalty"}
        n, penalty = d.get("repetition_n_grams", 3), d.get("repetition_max_penalty", -1.0)
        return {"name": "repetition", "kwargs": {"n": n, "max_penalty": penalty}}
    if name == "soft_overlong":
        of |= {"soft_max_length", "soft_cache_length"}
        kwargs = {"max_length": d.get("soft_max_length", longest), "buffer": d.get("soft_cache_length")}
        if kwargs["buffer"] is None:
            d.decide("reward soft_overlong: set its buffer (soft_cache_length there).")
        return {"name": "soft_overlong", "kwargs": kwargs}
    if name == "cosine":
        words = (("correct", 1.0, 0.5), ("wrong", -0.5, 0.0))
        keys = [f"cosine_{end}_len_value_{word}" for word, _, _ in words for end in ("min", "max")]
        of |= {*keys, "cosine_max_len"}
        values = [d.get(key, default) for key, default in zip(keys, (1.0, 0.5, -0.5, 0.0), strict=True)]
        return cosine_length(
            d, d.get("cosine_max_len", longest), correct=(values[0], values[1]), wrong=(values[2], values[3]), of=keys
        )
    external = d.get("external_plugins")
    where = f" of {external}" if external else ""
    d.decide(
        f"reward {name!r}{where}: a class registered there; here a function, {{func: 'module:function'}}.",
        of=("external_plugins", "reward_funcs"),
    )
    return None


def _sampler(d: Draft) -> None:
    if "sleep_level" in d.given:
        d.set("vllm_enable_sleep_mode", bool(d.given["sleep_level"]), of="sleep_level")
    if d.get("top_k", -1) > 0:
        d.copy("top_k", "top_k")
    elif "top_k" in d.given:
        d.set("top_k", 0, of="top_k")
    mode = d.get("rollout_importance_sampling_mode")
    if mode:
        d.set("vllm_importance_sampling_correction", True, of="rollout_importance_sampling_mode")
        d.set("vllm_importance_sampling_mode", mode, of="rollout_importance_sampling_mode")
        d.copy("vllm_importance_sampling_clip_max", "rollout_importance_sampling_threshold", default=2.0)
    if isinstance(groups := d.get("colocate_groups"), list) and groups:
        d.set("vllm_mode", "colocate", of="colocate_groups")


def _finish(d: Draft) -> None:
    """Write the learning rate of the tuner, stock TRL's axes, and check that a generation is of whole groups."""
    if "learning_rate" not in d.values:
        d.set("learning_rate", 1e-4 if d.values.get("use_peft") else 1e-5, d.says_default)
    trl_family.stock(d)
    if "loss_defaults" in d.values:
        d.notes["loss_defaults"] = "ms-swift's losses have TRL's form and defaults; without this line the paper's"
    rows, group = (d.values.get(f"{name}", 8) for name in ("per_device_train_batch_size", "num_generations"))
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
    TABLE,
    (_flatten, _launch, _batch, _model, _data, _loss, _advantages, _rewards, _sampler),
    {
        "lr_scheduler_type": {"4.0": "cosine"},
        "weight_decay": {"4.0": 0.1},
        "adam_beta2": {"4.0": 0.95},
        "temperature": {"4.0": 0.9},
        "top_k": {"4.0": 50, "4.1": 0},
        "top_p": {"4.0": 0.9, "4.1": 1.0},
        "max_completion_length": {"4.0": 512},
        "gradient_accumulation_steps": {"4.0": 1},
        "per_device_train_batch_size": {"4.0": 1},
        "bf16": {"4.0": True},
        "use_bias_correction_kl": {"4.0": False},
        "vllm_importance_sampling_correction": {"4.0": False},
    },
    versions=("4.0", "4.1", "4.6"),
    same=frozenset(all_keys()),
    finish=_finish,
)
