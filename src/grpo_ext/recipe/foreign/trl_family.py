"""TRL's own recipes of several years, Open-R1's, and what unsloth's scripts hand to TRL: nearly recipes already."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from grpo_ext.recipe.foreign.draft import Draft, cosine_length, rules, whole_groups
from grpo_ext.recipe.launching import FLAGS, VALUES
from grpo_ext.recipe.parts import all_keys
from grpo_ext.rewards.catalogue import rewards

_KWARGS = "* reward_funcs | an option of a reward, which stands with it"
OLDER = rules(
    torch_dtype="dtype",
    warmup_ratio="warmup_steps | a value below 1 is a ratio",
    evaluation_strategy="eval_strategy",
    no_cuda="use_cpu",
    logging_dir="* env | TENSORBOARD_LOGGING_DIR",
    overwrite_output_dir="- | transformers 5 dropped it; a run resumes from its last checkpoint, and "
    "resume_from_checkpoint: never starts afresh",
    save_safetensors="- | transformers 5 always does",
    group_by_length="- | the sampler keeps the completions of a prompt together",
    include_tokens_per_second="- | num_tokens and step_time are logged",
    push_to_hub_model_id="hub_model_id",
    push_to_hub_token="hub_token",
    use_liger_loss="- | log-probabilities are always computed without full logits",
    use_liger_kernel_loss="- | log-probabilities are always computed without full logits",
    vllm_max_model_len="vllm_max_model_length",
    vllm_guided_decoding_regex="vllm_structured_outputs_regex",
    vllm_device="- | vllm_mode says where vLLM runs",
    vllm_tp="vllm_tensor_parallel_size",
    epsilon_low="epsilon",
)
"""What transformers and TRL have renamed or dropped."""
OPEN_R1 = rules(
    dataset_prompt_column="prompt_column",
    dataset_solution_column="answer_column",
    dataset_id_or_path="dataset_name",
    dataset_mixture="* datasets | id is path and config is name here; weight is fraction",
    hub_model_revision="hub_revision",
    push_to_hub_revision="push_to_hub | to hub_revision",
    overwrite_hub_revision="- | a push adds a commit to the branch",
    benchmarks="- | jobs of Open-R1's cluster; `grpo-ext eval` measures a saved model",
    callbacks="* hub_strategy | push_to_hub_revision pushes each checkpoint, as hub_strategy: every_save does",
    wandb_project="* env | WANDB_PROJECT",
    wandb_entity="* env | WANDB_ENTITY",
    wandb_run_group="* env | WANDB_RUN_GROUP",
    wandb_log_unique_prompts="log_unique_prompts",
    cosine_min_value_wrong=_KWARGS,
    cosine_max_value_wrong=_KWARGS,
    cosine_min_value_correct=_KWARGS,
    cosine_max_value_correct=_KWARGS,
    cosine_max_len="* reward_funcs | max_length of cosine_length, which counts tokens where Open-R1 counts characters",
    repetition_n_grams=_KWARGS,
    repetition_max_penalty=_KWARGS,
    max_completion_len=_KWARGS,
    soft_punish_cache=_KWARGS,
    code_language=_KWARGS,
    code_eval_test_batch_size="- | the reward code runs the tests of a completion one after the other",
    code_eval_scoring_mode="- | the reward code gives the share of tests passed, or with partial: false all or "
    "nothing",
    parallel_code_exec_per_proc="- | the reward code has workers: the cores of this machine",
    code_provider="- | the reward code runs on this machine, in a sandbox",
    ioi_provider="- | the judge of IOI tasks is not here",
    e2b_router_url="- | the reward code runs on this machine, in a sandbox",
    morph_router_url="- | the reward code runs on this machine, in a sandbox",
)
UNSLOTH = rules(
    max_seq_length="* vllm_max_model_length | prompt and completion together",
    fast_inference="use_vllm | unsloth's own vLLM runs in the training process: vllm_mode: colocate",
    gpu_memory_utilization="vllm_gpu_memory_utilization",
    max_lora_rank="- | vLLM gets the merged weights, for which no rank is reserved",
    full_finetuning="* use_peft | its opposite",
    use_gradient_checkpointing="* gradient_checkpointing | 'unsloth' is true here",
    random_state="seed",
    r="lora_r",
    target_modules="lora_target_modules",
    modules_to_save="lora_modules_to_save",
    bias="- | LoRA trains no biases here, as bias: none says",
    loftq_config="- | not here",
    model_name="model_name_or_path",
    vllm_sampling_params="* generation_kwargs | its fields",
    unsloth_num_chunks="- | log-probabilities are always computed without full logits",
    unsloth_logit_chunk_multiplier="- | log-probabilities are always computed without full logits",
    unsloth_grpo_mini_batch="- | per_device_train_batch_size is the micro-batch",
    **{
        f"finetune_{part}": "- | LoRA's parts are named by lora_target_modules"
        for part in (
            "vision_layers",
            "language_layers",
            "attention_modules",
            "mlp_modules",
        )
    },
)
OF_OPEN_R1_ALONE = OPEN_R1.keys() - {
    "dataset_id_or_path",
    "wandb_project",
    "wandb_entity",
    "wandb_run_group",
    "callbacks",
}


def names_open_r1_rewards(config: Mapping[str, Any]) -> bool:
    """Whether `reward_funcs` holds a name that only Open-R1 and its followers have."""
    funcs = config.get("reward_funcs")
    only_there = {"cosine", "length", "cf_code", "ioi_code", "binary_code"}
    return isinstance(funcs, list) and any(isinstance(name, str) and name in only_there for name in funcs)


@cache
def other_trainers() -> dict[str, set[str]]:
    """Fields of TRL's other configurations that no configuration of GRPO has."""
    import trl

    ours = set(all_keys())
    kinds = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig}
    older = {"sft": {"max_seq_length", "dataset_text_field", "dataset_num_proc"}, "dpo": set(), "reward": set()}
    return {kind: ({f.name for f in dataclasses.fields(c)} | older[kind]) - ours for kind, c in kinds.items()}


def trl(draft: Draft) -> None:
    """TRL's: every key as it is, or as it is called now."""
    _environment(draft)
    if "max_seq_length" in draft.given:
        draft.set("vllm_max_model_length", draft.take("max_seq_length"), "prompt and completion together")
    draft.apply_table(frozenset((*all_keys(), *VALUES, *FLAGS, "env", "num_processes", "accelerate_config")))
    whole_groups(draft)


def _environment(draft: Draft) -> None:
    for key, name in (
        ("wandb_project", "WANDB_PROJECT"),
        ("wandb_entity", "WANDB_ENTITY"),
        ("wandb_run_group", "WANDB_RUN_GROUP"),
        ("logging_dir", "TENSORBOARD_LOGGING_DIR"),
    ):
        if (value := draft.take(key)) is not None:
            draft.environment(name, value)


# Open-R1.


def open_r1(draft: Draft) -> None:
    """Open-R1's: TRL 0.18's keys and defaults, its own dataset keys, and its rewards with their options."""
    names = draft.take("reward_funcs", ["accuracy", "format", "tag_count"])
    weights = draft.take("reward_weights", [1.0] * len(names))
    entries = _open_r1_rewards(draft, names, weights)
    if entries:
        draft.set("reward_funcs", entries, draft.notes.get("reward_funcs", ""))
    for key in [key for key, rule in OPEN_R1.items() if rule.to == "reward_funcs" and key not in draft.taken]:
        draft.leave(key, "its reward is not in reward_funcs")
    _mixture(draft)
    for name in draft.take("callbacks", []):
        if name == "push_to_hub_revision":
            draft.set("hub_strategy", "every_save", "each checkpoint is pushed, as Open-R1's callback does")
        else:
            draft.decide(f"callbacks: {name!r} is not known here.")
    trl(draft)
    _defaults_of_trl_018(draft)


def _defaults_of_trl_018(draft: Draft) -> None:
    """Open-R1 pins TRL 0.18, whose defaults a recipe relies on where it is silent."""
    said = "the default of TRL 0.18, which Open-R1 pins"
    for key, value in (
        ("loss_type", "bnpo"),
        ("beta", 0.04),
        ("max_completion_length", 256),
        ("prompt_column", "prompt"),
    ):
        if key not in draft.values:
            draft.set(key, value, said if key != "prompt_column" else "Open-R1's default")
    if draft.values.get("use_vllm") and "vllm_mode" not in draft.values:
        draft.set(
            "vllm_mode", "server", f"{said}; `grpo-ext serve` starts it, or colocate: inside the training process"
        )
    if "num_generations" not in draft.values:
        draft.set("num_generations", 8, said)


def _open_r1_rewards(draft: Draft, names: list[Any], weights: list[float]) -> list[Any]:
    entries = []
    for name, weight in zip(names, weights, strict=False):
        entry = _open_r1_reward(draft, name)
        if entry is not None:
            entries.append({**entry, "weight": weight})
    return entries


_DIFFERENCES = {
    "accuracy": "accuracy reads more forms of an answer than Open-R1's, and leaves a reference unscored that it "
    "cannot read; accuracy_reward is nearest to Open-R1's (TRL's, math-verify on LaTeX)",
    "format": "format is stricter than Open-R1's: each tag once, nothing after the answer",
    "reasoning_steps": "reasoning_steps knows more marks of a step than Open-R1's",
    "cosine": "cosine_length counts tokens where Open-R1's cosine counts characters, and stays at its end beyond "
    "max_length",
}


def _open_r1_reward(draft: Draft, name: Any) -> dict[str, Any] | None:
    if name in _DIFFERENCES:
        before = draft.notes.get("reward_funcs")
        draft.notes["reward_funcs"] = f"{before}; {_DIFFERENCES[name]}" if before else _DIFFERENCES[name]
    if name == "cosine":
        longest = draft.given.get("max_completion_length", 256)
        draft.taken.update(key for key in draft.given if key == "cosine_max_len")
        draft.decide(
            "reward cosine: Open-R1 measures characters (cosine_max_len), cosine_length tokens. Its max_length is set "
            f"to max_completion_length={longest}; look at the lengths of your completions."
        )
        correct = (draft.take("cosine_max_value_correct", 1.0), draft.take("cosine_min_value_correct", 0.5))
        wrong = (draft.take("cosine_min_value_wrong", 0.0), draft.take("cosine_max_value_wrong", -0.5))
        return cosine_length(draft, longest, correct=correct, wrong=wrong)
    if name == "repetition_penalty":
        n, penalty = draft.take("repetition_n_grams", 3), draft.take("repetition_max_penalty", -1.0)
        return {"name": name, "kwargs": {"ngram_size": n, "max_penalty": penalty}}
    if name == "soft_overlong_punishment":
        longest, cache_ = draft.take("max_completion_len", 16384), draft.take("soft_punish_cache", 4096)
        return {"name": name, "kwargs": {"max_completion_len": longest, "soft_punish_cache": cache_}}
    if name == "code_format":
        return {"name": name, "kwargs": {"default_language": draft.take("code_language", "python")}}
    if name in ("code", "binary_code"):
        draft.decide(
            f"reward {name}: Open-R1 reads the tests from the column verification_info, code from the column tests. "
            "Write that column (docs/rewards.md says in which forms)."
        )
        return {"name": "code"} if name == "code" else {"name": "code", "kwargs": {"partial": False}}
    if name in ("length", "ioi_code", "cf_code"):
        what = {
            "length": "compares the completions of a batch with one another, which rewards here do not; "
            "length_penalty, "
            "soft_overlong and cosine_length look at one completion",
            "ioi_code": "needs a judge of IOI tasks (piston)",
            "cf_code": "needs a judge of Codeforces tasks (piston)",
        }[name]
        draft.decide(f"reward {name}: not here, it {what}. Name a function of yours: {{func: 'module:function'}}.")
        return None
    return {"name": name}


def _mixture(draft: Draft) -> None:
    mixture = draft.take("dataset_mixture")
    if not isinstance(mixture, Mapping):
        return
    names = {"id": "path", "config": "name", "weight": "fraction"}
    entries = [{names.get(key, key): value for key, value in entry.items()} for entry in mixture.get("datasets", [])]
    draft.set("datasets", entries, "fraction is a share of the mixture; Open-R1's weight is a share of the dataset")
    if any("fraction" in entry for entry in entries):
        draft.decide(
            "datasets: Open-R1's weight is the share of each dataset that is kept, fraction here its share in the "
            "mixture. Set the fractions, or write a slice into split (train[:25%])."
        )
    if "seed" in mixture:
        draft.set("split_seed", mixture["seed"])
    if "test_split_size" in mixture:
        draft.set("test_split_size", mixture["test_split_size"])


# Scripts in Python, and unsloth's.


def script(draft: Draft) -> None:
    """A script's: what it hands to TRL's GRPOConfig, to LoRA and to a loader."""
    names, weights = draft.take("reward_funcs", []), draft.take("reward_weights")
    entries: list[Any] = []
    for index, name in enumerate(names):
        weight = weights[index] if isinstance(weights, list) and len(weights) == len(names) else 1.0
        if name.rpartition(".")[2] in rewards:
            entries.append({"name": name.rpartition(".")[2], "weight": weight})
        else:
            draft.decide(
                f"reward {name}: a function of the script. Move it into a module of its own, and write "
                f"{{func: 'module:{name}', weight: {weight:g}}}; it must take **kwargs."
            )
    if entries:
        draft.set("reward_funcs", entries)
    full = draft.take("full_finetuning", False)
    if full:
        draft.leave("use_peft", "full_finetuning is true")
    elif draft.take("use_peft"):
        draft.set("use_peft", True)
        modules = draft.take("target_modules", "all-linear")
        draft.set("lora_target_modules", modules)
        if draft.given.get("lora_dropout"):
            draft.set("disable_dropout", False, "lora_dropout has an effect there; 0.0 and true here are exact")
    checkpointing = draft.take("use_gradient_checkpointing")
    if checkpointing is not None:
        draft.set("gradient_checkpointing", bool(checkpointing))
    draft.leave("vllm_sampling_params", "an object; write its fields into generation_kwargs")
    trl(draft)
    if "system_prompt" not in draft.values:
        draft.decide(
            "The data: what the script does to the rows is not read. prompt_column, answer_column, answer_format and "
            "system_prompt do the usual (docs/recipes.md)."
        )


def unsloth(draft: Draft) -> None:
    """unsloth's script: as any, with vLLM in the training process and batches that are whole groups."""
    rows, group = draft.given.get("per_device_train_batch_size", 8), draft.given.get("num_generations", 8)
    accumulation = draft.given.get("gradient_accumulation_steps", 1)
    raised = isinstance(rows, int) and isinstance(group, int) and rows * accumulation % group
    if raised:
        draft.take("per_device_train_batch_size")
        draft.set("per_device_train_batch_size", group, f"{rows} there, which unsloth raises to whole groups")
    script(draft)
    if draft.values.get("use_vllm"):
        draft.set("vllm_mode", "colocate", "unsloth's fast_inference runs in the training process")
    else:
        for key in [key for key in draft.values if key.startswith("vllm_")]:
            del draft.values[key]
