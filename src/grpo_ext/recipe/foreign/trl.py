"""Recipes and command lines of TRL, whose defaults depend on the version, and of Open-R1, which pins one."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.objective.losses import losses
from grpo_ext.recipe.files import recipes_folder
from grpo_ext.recipe.foreign.engine import Draft, Translation, rules
from grpo_ext.recipe.foreign.shell import OF_WANDB
from grpo_ext.recipe.launching import FLAGS, VALUES
from grpo_ext.recipe.parts import all_keys

OLDER = rules(
    {
        "=": "torch_dtype=dtype evaluation_strategy=eval_strategy no_cuda=use_cpu push_to_hub_model_id=hub_model_id "
        "push_to_hub_token=hub_token vllm_max_model_len=vllm_max_model_length epsilon_low=epsilon "
        "vllm_guided_decoding_regex=vllm_structured_outputs_regex vllm_tp=vllm_tensor_parallel_size "
        "logging_dir=env.TENSORBOARD_LOGGING_DIR",
        "warmup_ratio": "warmup_steps | a value below 1 is a ratio",
        "overwrite_output_dir": "- | transformers 5 dropped it; resume_from_checkpoint: never starts from step 0",
        "save_safetensors": "- | transformers 5 always does",
        "group_by_length": "- | the sampler keeps the completions of a prompt together",
        "include_tokens_per_second": "- | num_tokens and step_time are logged",
        "use_liger_loss use_liger_kernel_loss": "- | log-probabilities are always computed without full logits",
        "vllm_device": "- | vllm_mode chooses where vLLM runs",
        "tokenizer_name_or_path": "- | the tokenizer is the one in the model's folder",
    }
)
"""Keys that transformers and TRL have renamed or dropped."""
OPEN_R1_TABLE = rules(
    {
        "=": "dataset_prompt_column=prompt_column dataset_solution_column=answer_column "
        "dataset_id_or_path=dataset_name hub_model_revision=hub_revision wandb_log_unique_prompts=log_unique_prompts "
        "wandb_project=env.WANDB_PROJECT wandb_entity=env.WANDB_ENTITY wandb_run_group=env.WANDB_RUN_GROUP",
        "dataset_mixture": "* datasets | id is path and config is name here; weight is fraction",
        "push_to_hub push_to_hub_revision": "* push_to_hub | the latter to hub_revision",
        "overwrite_hub_revision": "- | a push adds a commit to the branch",
        "benchmarks": "- | jobs of Open-R1's cluster; `grpo-ext eval` measures a saved model",
        "callbacks": "* hub_strategy | push_to_hub_revision pushes each checkpoint, as hub_strategy: every_save does",
        "cosine_min_value_correct": "* reward_funcs = 0.5 | an option of cosine_length",
        "cosine_max_value_correct": "* reward_funcs = 1.0 | an option of cosine_length",
        "cosine_min_value_wrong": "* reward_funcs = 0.0 | an option of cosine_length",
        "cosine_max_value_wrong": "* reward_funcs = -0.5 | an option of cosine_length",
        "cosine_max_len": "* reward_funcs | max_length of cosine_length, in tokens; Open-R1 counts characters",
        "repetition_n_grams": "* reward_funcs = 3 | n of repetition",
        "repetition_max_penalty": "* reward_funcs = -1.0 | max_penalty of repetition",
        "max_completion_len": "* reward_funcs = 16384 | max_length of soft_overlong",
        "soft_punish_cache": "* reward_funcs = 4096 | buffer of soft_overlong",
        "code_language": "* reward_funcs = python | default_language of code_format",
        "code_eval_test_batch_size": "- | the reward code runs the tests of a completion one after the other",
        "code_eval_scoring_mode": "- | the reward code gives the share of tests passed, or 0 or 1 (partial)",
        "parallel_code_exec_per_proc": "- | the reward code has workers: the cores of this machine",
        "code_provider e2b_router_url morph_router_url": "- | the reward code runs in a sandbox on this machine",
        "ioi_provider": "- | a judge of IOI tasks is not supported",
    }
)
ONLY_OPEN_R1 = OPEN_R1_TABLE.keys() - {
    *("dataset_id_or_path", "wandb_project", "wandb_entity", "wandb_run_group", "callbacks")
}
DEFAULTS: Mapping[str, Any] = {
    "loss_type": {"0.16": "bnpo", "0.22": "dapo"},
    "beta": {"0.16": 0.04, "0.19": 0.0},
    "use_bias_correction_kl": {"0.16": False, "1.10": True},
    "temperature": {"0.16": 0.9, "0.18": 1.0},
    "top_k": {"0.16": 50, "0.18": 0},
    "max_completion_length": {"0.16": 256, "1.10": 512},
    "max_prompt_length": {"0.16": 512, "0.28": None},
    "bf16": {"0.16": False, "0.19": None},
    "gradient_checkpointing": {"0.16": False, "0.22": True},
    "vllm_mode": {"0.16": "server", "1.0": "colocate"},
    "vllm_importance_sampling_correction": {"0.16": False, "0.23": True},
    "vllm_importance_sampling_mode": {"0.23": "token_truncate", "0.26": "sequence_mask"},
    "vllm_importance_sampling_clip_max": {"0.23": 2.0, "0.26": 3.0},
}
"""TRL's defaults; today's other defaults are those of every version."""
_VERSIONS = ("0.16", "0.18", "0.19", "0.22", "0.23", "0.26", "0.28", "1.0", "1.10", "1.16")
_OURS = {f.name for f in dataclasses.fields(GRPOExtConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}


def _finish(d: Draft) -> None:
    if not _OURS & d.given.keys():
        row = losses.get(d.values.get("loss_type", GRPOExtConfig.loss_type))
        if row is not None and row.trl:  # stock TRL has this loss
            note = "what is unset is stock TRL's, to the last digit; without this line it is the paper's"
            d.set("loss_defaults", "trl", note, of=())
    low, high = (f"vllm_importance_sampling_clip_{bound}" for bound in ("min", "max"))
    if low in d.values and high not in d.values:
        d.decide(f"{high}: write the upper bound. Left out, it is TRL's default; with null there is none.")
    _whole_groups(d)
    renamed = sorted(OLDER.keys() & d.given.keys())
    if d.title == "TRL" and d.version == _VERSIONS[-1] and renamed:
        d.decide(
            f"The version of TRL: {', '.join(renamed)} is of an older one than {d.version}, whose defaults are "
            "written. Name yours: --version 0.18, for instance (docs/migrating.md has what changed when)."
        )


def _whole_groups(d: Draft) -> None:
    """Where only several processes make whole groups of rows and accumulation, write the fewest that do."""
    rows, group = d.values.get("per_device_train_batch_size", 8), d.values.get("num_generations", 8)
    steps = d.values.get("steps_per_generation") or d.values.get("gradient_accumulation_steps", 1)
    evaluated = d.values.get("eval_strategy", "no") != "no"
    of_eval = d.values.get("per_device_eval_batch_size", 8), d.values.get("num_generations_eval") or group
    if {"num_processes", "generation_batch_size"} & d.values.keys():
        return

    def fit(processes: int) -> bool:
        whole = rows * steps * processes % group == 0
        return whole and not (evaluated and of_eval[0] * processes % of_eval[1])

    if not all(isinstance(value, int) for value in (rows, group, steps, *of_eval)) or fit(1):
        return
    processes = next((n for n in range(2, 65) if fit(n)), None)
    if processes is not None:
        d.set("num_processes", processes, of=())
        d.decide(
            f"num_processes: the file does not give it. {processes} is the fewest with which {rows} x {steps} "
            f"completions of each process are whole groups of {group}."
        )


def _launch(d: Draft) -> None:
    if isinstance(path := d.get("config_file"), str):
        name = Path(path).stem.removeprefix("deepspeed_")
        shipped = (recipes_folder() / "accelerate_configs" / f"{name}.yaml").is_file()
        d.set("accelerate_config", name if shipped else path, f"{path} there" if shipped else "")
    if isinstance(name := d.get("reward_funcs"), str):
        d.set("reward_funcs", [name], of="reward_funcs")
    if isinstance(weight := d.get("reward_weights"), int | float):
        d.set("reward_weights", [weight], of="reward_weights")
    for key in [key for key in d.given if key.startswith("no_") and key.removeprefix("no_") in d.project.same]:
        d.set(key.removeprefix("no_"), not d.given[key], of=key)  # HfArgumentParser's --no_gradient_checkpointing


# Open-R1.

_REWARDS = {
    "cosine": (
        "cosine_length stays at its end beyond max_length",
        *("cosine_max_value_correct", "cosine_min_value_correct", "cosine_min_value_wrong", "cosine_max_value_wrong"),
    ),
    "repetition_penalty": ("", "repetition_n_grams", "repetition_max_penalty"),
    "soft_overlong_punishment": ("", "max_completion_len", "soft_punish_cache"),
    "code_format": ("", "code_language"),
    "accuracy": (
        "accuracy reads more forms of an answer than Open-R1's, and leaves a reference unscored that it cannot read; "
        "accuracy_reward is nearest to Open-R1's (TRL's, math-verify on LaTeX)",
    ),
    "format": ("format is stricter than Open-R1's: each tag once, no text after the answer",),
    "reasoning_steps": ("reasoning_steps knows more marks of a step than Open-R1's",),
}
"""Open-R1's reward -> what differs here, and the keys of its options."""
_MISSING = {
    "length": "compares the completions of a batch with one another, which rewards here do not; length_penalty, "
    "soft_overlong and cosine_length look at one completion",
    "ioi_code": "needs a judge of IOI tasks (piston)",
    "cf_code": "needs a judge of Codeforces tasks (piston)",
}


def names_open_r1_rewards(config: Mapping[str, Any]) -> bool:
    """Return whether `reward_funcs` holds a name that only Open-R1 and its followers have."""
    funcs = config.get("reward_funcs")
    only_there = {"cosine", "binary_code", "tag_count", "repetition_penalty", "soft_overlong_punishment", *_MISSING}
    return isinstance(funcs, list) and any(isinstance(name, str) and name in only_there for name in funcs)


def _rewards(d: Draft) -> None:
    names = d.get("reward_funcs", ["accuracy", "format", "tag_count"])
    weights = d.get("reward_weights", [1.0] * len(names))
    of, entries, notes = {"reward_funcs", "reward_weights"}, [], []
    for name, weight in zip(names, weights, strict=False):
        note, *keys = _REWARDS.get(name, ("",))
        of |= set(keys)
        notes += [note] if note else []
        entries += [{**entry, "weight": weight}] if (entry := _reward(d, name, keys)) else []
    if entries:
        d.set("reward_funcs", entries, "; ".join(notes), of=of)
    for key in {*d.computing("reward_funcs")} - of - d.asked:
        d.leave(key, "its reward is not in reward_funcs")


def _reward(d: Draft, name: str, keys: list[str]) -> dict[str, Any] | None:
    """Return the entry of one reward, which has its options in `keys`."""
    values = [d.get(key) for key in keys]
    if name == "cosine":
        longest = d.get("max_completion_length", 256)
        d.decide(
            "reward cosine: Open-R1 measures characters (cosine_max_len), cosine_length tokens. Its max_length is set "
            f"to max_completion_length={longest}; look at the lengths of your completions.",
            "cosine_max_len",
        )
        return _cosine(d, longest, keys)
    if name == "repetition_penalty":
        return {"name": "repetition", "kwargs": {"n": values[0], "max_penalty": values[1]}}
    if name == "soft_overlong_punishment":
        return {"name": "soft_overlong", "kwargs": {"max_length": values[0], "buffer": values[1]}}
    if name == "tag_count":
        return {"name": "tags", "kwargs": {"newlines": True}}
    if name == "code_format":
        return {"name": "code_format", "kwargs": {"default_language": values[0]}}
    if name in ("code", "binary_code"):
        d.decide(
            f"reward {name}: Open-R1 reads the tests from the column verification_info, code from the column tests. "
            "Write that column (docs/rewards.md has its forms)."
        )
        return {"name": "code", **({} if name == "code" else {"kwargs": {"partial": False}})}
    if name in _MISSING:
        cure = "Name a function of yours: {func: 'module:function'}"
        d.decide(f"reward {name}: not supported, it {_MISSING[name]}. {cure}.", "reward_funcs")
        return None
    return {"name": name}


def _cosine(d: Draft, max_length: object, keys: list[str]) -> dict[str, Any]:
    """Return the entry of `cosine_length`; `keys` are those of correct answers, short and long, then of wrong ones."""
    short, long, short_wrong, long_wrong = map(d.get, keys)
    if short < long or short_wrong > long_wrong:
        d.decide(
            f"reward cosine: correct answers go from {short:g} (short) to {long:g} (long), wrong ones from "
            f"{short_wrong:g} to {long_wrong:g}. cosine_length takes length from correct ones and gives it to wrong "
            "ones: the values that do the opposite are exchanged.",
            *keys,
        )
    values = {
        "min_value_correct": min(short, long),
        "max_value_correct": max(short, long),
        "min_value_wrong": min(short_wrong, long_wrong),
        "max_value_wrong": max(short_wrong, long_wrong),
    }
    return {"name": "cosine_length", "kwargs": {"max_length": max_length, **values}}


def _files(d: Draft) -> None:
    """Name the file of `dataset_name: json`, whose `dataset_config` is a mapping there."""
    config = d.get("dataset_config")
    file = config.get("data_files") if isinstance(config, Mapping) else None
    if d.get("dataset_name") in ("json", "csv", "parquet") and isinstance(file, str):
        d.set("dataset_name", file, of=("dataset_name", "dataset_config"))
        if further := ", ".join(key for key in config if key != "data_files"):
            d.decide(f"dataset_config: {further} has no counterpart. See datasets in docs/recipes.md.")


def _data(d: Draft) -> None:
    _files(d)
    if pushes := [key for key in ("push_to_hub", "push_to_hub_revision") if key in d.given]:
        to = "to hub_revision" if d.get("push_to_hub_revision") else ""
        d.set("push_to_hub", any(d.get(key) for key in pushes), to, of=pushes)
    column = next((key for key in ("prompt_column", "dataset_prompt_column") if key in d.given), "prompt_column")
    d.set("prompt_column", d.get(column, "prompt"), of=column)
    callbacks = d.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    if "push_to_hub_revision" in callbacks:
        d.set("hub_strategy", "every_save", "each checkpoint is pushed, as Open-R1's callback does")
    if unknown := [name for name in callbacks if name != "push_to_hub_revision"]:
        d.decide(f"callbacks: {', '.join(unknown)} is unknown.", "callbacks")
    mixture = d.get("dataset_mixture")
    if not isinstance(mixture, Mapping):
        return
    names = {"id": "path", "config": "name", "weight": "fraction"}
    entries = [{names.get(key, key): value for key, value in entry.items()} for entry in mixture.get("datasets", [])]
    d.set("datasets", entries, "fraction is a share of the mixture; Open-R1's weight is a share of the dataset")
    if any("fraction" in entry for entry in entries):
        d.decide(
            "datasets: Open-R1's weight is the share of each dataset that is kept, fraction here its share in the "
            "mixture. Set the fractions, or write a slice into split (train[:25%])."
        )
    for key, name in (("seed", "split_seed"), ("test_split_size", "test_split_size")):
        if key in mixture:
            d.set(name, mixture[key], of="dataset_mixture")


_COMMAND = rules(
    {
        "=": " ".join(f"{name}=env.{name}" for name in ("PYTORCH_CUDA_ALLOC_CONF", *OF_WANDB)),
        "config_file": "* accelerate_config | a file, or the name of one that is shipped here",
        "CUDA_VISIBLE_DEVICES": "- | export it before the start",
    }
)
TRL = Translation(
    "TRL",
    OLDER | _COMMAND,
    (_launch, _files),
    versions=_VERSIONS,
    defaults=DEFAULTS,
    same=frozenset((*all_keys(), *VALUES, *FLAGS, "env", "num_processes", "accelerate_config")),
    finish=_finish,
)
OPEN_R1 = dataclasses.replace(
    TRL,
    title="Open-R1",
    table=OPEN_R1_TABLE | OLDER,
    steps=(_launch, _rewards, _data),
    versions=("0.18",),
    describes_default="the default of TRL {version}, which Open-R1 pins",
)
