"""Recipes and command lines of TRL, whose defaults depend on the version, and of Open-R1, which pins one."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.objective.losses import losses
from grpo_ext.recipe.files import recipes_folder
from grpo_ext.recipe.foreign.counting import cosine_length, whole_groups
from grpo_ext.recipe.foreign.draft import Defaults, Draft, Translation, rules
from grpo_ext.recipe.launching import FLAGS, VALUES
from grpo_ext.recipe.parts import all_keys

_KWARGS = "* reward_funcs | an option of that entry"
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
OPEN_R1_TABLE = rules(
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
COMMAND = rules(
    config_file="* accelerate_config | a file, or the name of one that is shipped here",
    PYTORCH_CUDA_ALLOC_CONF="* env",
    CUDA_VISIBLE_DEVICES="- | export it before the start",
)
"""Words of a launcher around the arguments."""
OF_OPEN_R1_ALONE = OPEN_R1_TABLE.keys() - {
    "dataset_id_or_path",
    "wandb_project",
    "wandb_entity",
    "wandb_run_group",
    "callbacks",
}


def names_open_r1_rewards(config: Mapping[str, Any]) -> bool:
    """Return whether `reward_funcs` holds a name that only Open-R1 and its followers have."""
    funcs = config.get("reward_funcs")
    only_there = {"cosine", "length", "cf_code", "ioi_code", "binary_code"}
    return isinstance(funcs, list) and any(isinstance(name, str) and name in only_there for name in funcs)


@cache
def other_trainers() -> dict[str, set[str]]:
    """Return the fields of TRL's other configurations that no configuration of GRPO has."""
    import trl

    ours = set(all_keys())
    kinds = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig}
    older = {"sft": {"max_seq_length", "dataset_text_field", "dataset_num_proc"}, "dpo": set(), "reward": set()}
    return {kind: ({f.name for f in dataclasses.fields(c)} | older[kind]) - ours for kind, c in kinds.items()}


DEFAULTS: Defaults = {
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
"""What a run of TRL does where its file is silent; today's other defaults are those of every version."""
_VERSIONS = ("0.16", "0.18", "0.19", "0.22", "0.23", "0.26", "0.28", "1.0", "1.10", "1.16")
_OURS = {f.name for f in dataclasses.fields(GRPOExtConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}


def stock(draft: Draft) -> None:
    """Write that the axes of the loss that the file leaves unset are stock TRL's, where stock TRL has the loss."""
    row = losses.get(draft.values.get("loss_type", GRPOExtConfig.loss_type))
    if row is not None and row.trl:
        note = "what is unset is stock TRL's, to the last digit; without this line it is the paper's"
        draft.set("loss_defaults", "trl", note)


def _finish(draft: Draft) -> None:
    if not _OURS & draft.given.keys():
        stock(draft)
    whole_groups(draft)
    renamed = sorted(OLDER.keys() & draft.given.keys())
    if draft.title == "TRL" and draft.version == _VERSIONS[-1] and renamed:
        draft.decide(
            f"The version of TRL: {', '.join(renamed)} is of an older one than {draft.version}, whose defaults are "
            "written. Name yours: --version 0.18, for instance (docs/migrating.md has what changed when)."
        )


def _environment(draft: Draft) -> None:
    for name in ("wandb_project", "wandb_entity", "wandb_run_group"):
        draft.environment(name.upper(), name)
    draft.environment("TENSORBOARD_LOGGING_DIR", "logging_dir")
    draft.environment("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if isinstance(path := draft.get("config_file"), str):
        name = Path(path).stem.removeprefix("deepspeed_")
        shipped = (recipes_folder() / "accelerate_configs" / f"{name}.yaml").is_file()
        draft.set("accelerate_config", name if shipped else path, f"{path} there" if shipped else "", of="config_file")
    if isinstance(name := draft.get("reward_funcs"), str):
        draft.set("reward_funcs", [name], of="reward_funcs")


# Open-R1.


def _open_r1_rewards(draft: Draft) -> None:
    """Open-R1's rewards with their options, which are keys of their own there."""
    names = draft.get("reward_funcs", ["accuracy", "format", "tag_count"])
    weights = draft.get("reward_weights", [1.0] * len(names))
    of = {"reward_funcs", "reward_weights"}
    entries, notes = [], []
    for name, weight in zip(names, weights, strict=False):
        entry, options = _open_r1_reward(draft, name)
        of |= options
        notes += [_DIFFERENCES[name]] if name in _DIFFERENCES else []
        entries += [{**entry, "weight": weight}] if entry else []
    if entries:
        draft.set("reward_funcs", entries, "; ".join(notes), of=of)
    for key, rule in OPEN_R1_TABLE.items():
        if rule.to == "reward_funcs" and key not in of | draft.asked:
            draft.leave(key, "its reward is not in reward_funcs")


_DIFFERENCES = {
    "accuracy": "accuracy reads more forms of an answer than Open-R1's, and leaves a reference unscored that it "
    "cannot read; accuracy_reward is nearest to Open-R1's (TRL's, math-verify on LaTeX)",
    "format": "format is stricter than Open-R1's: each tag once, nothing after the answer",
    "reasoning_steps": "reasoning_steps knows more marks of a step than Open-R1's",
    "cosine": "cosine_length counts tokens where Open-R1's cosine counts characters, and stays at its end beyond "
    "max_length",
}
_OPTIONS: dict[str, dict[str, tuple[str, Any]]] = {
    "repetition_penalty": {"ngram_size": ("repetition_n_grams", 3), "max_penalty": ("repetition_max_penalty", -1.0)},
    "soft_overlong_punishment": {
        "max_completion_len": ("max_completion_len", 16384),
        "soft_punish_cache": ("soft_punish_cache", 4096),
    },
    "code_format": {"default_language": ("code_language", "python")},
}
"""Reward -> option -> key of Open-R1 and its default."""
_MISSING = {
    "length": "compares the completions of a batch with one another, which rewards here do not; length_penalty, "
    "soft_overlong and cosine_length look at one completion",
    "ioi_code": "needs a judge of IOI tasks (piston)",
    "cf_code": "needs a judge of Codeforces tasks (piston)",
}


def _open_r1_reward(draft: Draft, name: Any) -> tuple[dict[str, Any] | None, set[str]]:
    """Return the entry of one reward, and the keys that it was made of."""
    if name == "cosine":
        return _cosine(draft)
    if name in _OPTIONS:
        kwargs = {option: draft.get(key, default) for option, (key, default) in _OPTIONS[name].items()}
        return {"name": name, "kwargs": kwargs}, {key for key, _ in _OPTIONS[name].values()}
    if name in ("code", "binary_code"):
        draft.decide(
            f"reward {name}: Open-R1 reads the tests from the column verification_info, code from the column tests. "
            "Write that column (docs/rewards.md says in which forms)."
        )
        return {"name": "code", **({} if name == "code" else {"kwargs": {"partial": False}})}, set()
    if name in _MISSING:
        sentence = (
            f"reward {name}: not here, it {_MISSING[name]}. Name a function of yours: {{func: 'module:function'}}."
        )
        draft.decide(sentence, of="reward_funcs")
        return None, set()
    return {"name": name}, set()


def _cosine(draft: Draft) -> tuple[dict[str, Any], set[str]]:
    longest = draft.get("max_completion_length", 256)
    of = {"cosine_max_value_correct", "cosine_min_value_correct", "cosine_min_value_wrong", "cosine_max_value_wrong"}
    draft.decide(
        "reward cosine: Open-R1 measures characters (cosine_max_len), cosine_length tokens. Its max_length is set "
        f"to max_completion_length={longest}; look at the lengths of your completions.",
        of="cosine_max_len",
    )
    correct = (draft.get("cosine_max_value_correct", 1.0), draft.get("cosine_min_value_correct", 0.5))
    wrong = (draft.get("cosine_min_value_wrong", 0.0), draft.get("cosine_max_value_wrong", -0.5))
    return cosine_length(draft, longest, correct=correct, wrong=wrong, of=of), of


def _open_r1_data(draft: Draft) -> None:
    draft.copy("prompt_column", "prompt_column", "dataset_prompt_column", default="prompt")
    if "push_to_hub_revision" in (draft.get("callbacks") or []):
        note = "each checkpoint is pushed, as Open-R1's callback does"
        draft.set("hub_strategy", "every_save", note, of="callbacks")
    if unknown := [name for name in draft.get("callbacks") or [] if name != "push_to_hub_revision"]:
        draft.decide(f"callbacks: {', '.join(unknown)} is not known here.", of="callbacks")
    mixture = draft.get("dataset_mixture")
    if not isinstance(mixture, Mapping):
        return
    names = {"id": "path", "config": "name", "weight": "fraction"}
    entries = [{names.get(key, key): value for key, value in entry.items()} for entry in mixture.get("datasets", [])]
    note = "fraction is a share of the mixture; Open-R1's weight is a share of the dataset"
    draft.set("datasets", entries, note, of="dataset_mixture")
    if any("fraction" in entry for entry in entries):
        draft.decide(
            "datasets: Open-R1's weight is the share of each dataset that is kept, fraction here its share in the "
            "mixture. Set the fractions, or write a slice into split (train[:25%])."
        )
    for key, name in (("seed", "split_seed"), ("test_split_size", "test_split_size")):
        if key in mixture:
            draft.set(name, mixture[key], of="dataset_mixture")


TRL = Translation(
    "TRL",
    OLDER | COMMAND,
    (_environment,),
    DEFAULTS,
    _VERSIONS,
    same=frozenset((*all_keys(), *VALUES, *FLAGS, "env", "num_processes", "accelerate_config")),
    finish=_finish,
)
OPEN_R1 = dataclasses.replace(
    TRL,
    title="Open-R1",
    says="the default of TRL {version}, which Open-R1 pins",
    table=OPEN_R1_TABLE | OLDER,
    steps=(_environment, _open_r1_rewards, _open_r1_data),
    versions=("0.18",),
    version_of=lambda given: "0.18",
)
