"""Whose configuration a file is, and what other projects' keys are called here."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ext.recipe.foreign import axolotl, openrlhf, swift, trl_family, verl
from grpo_ext.recipe.foreign.draft import Draft, Rule


@dataclass(frozen=True)
class Project:
    """A project whose configurations `migrate` turns into recipes."""

    title: str
    table: Mapping[str, Rule]
    translate: Callable[[Draft], None]
    nested: bool = False
    """Whether its YAML is a tree, whose keys are written with dots."""


PROJECTS = {
    "trl": Project("TRL", trl_family.OLDER, trl_family.trl),
    "script": Project("TRL", trl_family.OLDER | trl_family.UNSLOTH, trl_family.script),
    "open-r1": Project("Open-R1", trl_family.OPEN_R1 | trl_family.OLDER, trl_family.open_r1),
    "unsloth": Project("unsloth", trl_family.UNSLOTH | trl_family.OLDER, trl_family.unsloth),
    "verl": Project("verl", verl.TABLE, verl.translate, nested=True),
    "openrlhf": Project("OpenRLHF", openrlhf.TABLE, openrlhf.translate, nested=True),
    "swift": Project("ms-swift", swift.TABLE, swift.translate),
    "axolotl": Project("axolotl", axolotl.TABLE, axolotl.translate, nested=True),
}

_LAUNCH = "a launch configuration of accelerate. Keep it in its own file, and name that: accelerate_config: FILE"
_NO_REWARD = "which no reward drives, so that there is nothing to migrate"
NO_RECIPES: dict[str, str] = {
    "accelerate": _LAUNCH,
    "deepspeed": "a configuration of DeepSpeed. Write deepspeed: FILE into the recipe, or accelerate_config: zero2",
    "sft": f"an SFT recipe (supervised fine-tuning), {_NO_REWARD}. Train it by `trl sft`, and its result here",
    "dpo": f"a DPO recipe (pairs of preferences), {_NO_REWARD}. Train it by `trl dpo`, and its result here",
    "reward": f"a recipe for a reward model, {_NO_REWARD}. Train it by `trl reward`, and name it in reward_funcs here",
    "llama-factory": f"a LLaMA-Factory configuration (SFT, DPO, PPO, reward models), {_NO_REWARD}. Begin "
    "with a packaged recipe: `grpo-ext recipes`",
    "unsloth-studio": f"a configuration of unsloth's SFT, {_NO_REWARD}. Train it there, and its result here",
}
"""Kinds of files that are no configuration of a run by rewards, each with what to do."""

_SIGNS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("accelerate", lambda c: "distributed_type" in c or "compute_environment" in c),
    ("deepspeed", lambda c: "zero_optimization" in c or "train_micro_batch_size_per_gpu" in c),
    ("verl", lambda c: any(key.split(".")[0] == "actor_rollout_ref" for key in c)),
    ("llama-factory", lambda c: "finetuning_type" in c),
    ("axolotl", lambda c: "base_model" in c and "model_name_or_path" not in c),
    (
        "swift",
        lambda c: "rlhf_type" in c or ("tuner_type" in c and "model" in c) or ("train_type" in c and "model" in c),
    ),
    (
        "openrlhf",
        lambda c: "pretrain" in c or "actor.model_name_or_path" in c or _has(c, "actor", "model_name_or_path"),
    ),
    ("unsloth-studio", lambda c: isinstance(c.get("training"), Mapping) and "model" in c),
    ("open-r1", lambda c: bool(trl_family.OF_OPEN_R1_ALONE & c.keys()) or trl_family.names_open_r1_rewards(c)),
)
_NAMED_OTHERWISE = ("axolotl", "swift", "openrlhf", "unsloth-studio")
"""Projects that have no `model_name_or_path`, so that it speaks of a recipe with a stray key of theirs."""


def _has(config: Mapping[str, Any], section: str, key: str) -> bool:
    return isinstance(config.get(section), Mapping) and key in config[section]


_BY_REWARDS = ("reward_funcs", "num_generations", "max_completion_length", "reward_model_name_or_path", "use_vllm")


def kind_of(config: Mapping[str, Any], known: frozenset[str]) -> str | None:
    """Which project's, or what else it is; None for a recipe of ours or TRL's (whose keys are `known`)."""
    keys = {str(key): value for key, value in config.items()}
    named_as_here = "model_name_or_path" in keys
    kind = next(
        (name for name, sign in _SIGNS if sign(keys) and not (named_as_here and name in _NAMED_OTHERWISE)), None
    )
    if kind == "axolotl" and keys.get("rl") not in ("grpo", "gdpo"):
        return "dpo" if keys.get("rl") else "sft"
    if kind == "swift" and keys.get("rlhf_type") != "grpo":
        return "dpo" if keys.get("rlhf_type") else "sft"
    if kind is not None or any(key in keys for key in _BY_REWARDS):
        return kind
    return _supervised(keys.keys() - known)


def _supervised(unknown: set[str]) -> str | None:
    """Which of TRL's other trainers keys belong to: two of them, or one that no other trainer has."""
    if not unknown:
        return None
    trainers = trl_family.other_trainers()
    for kind, own in trainers.items():
        others = set().union(*(keys for name, keys in trainers.items() if name != kind))
        if len(unknown & own) >= 2 or unknown & (own - others):
            return kind
    return None


def foreign_file(config: Mapping[str, Any], name: str, known: frozenset[str]) -> str | None:
    """The one sentence about a file that is no recipe; None for one, also with a few keys of Open-R1's."""
    kind = kind_of(config, known)
    if kind is None or (kind == "open-r1" and len(config.keys() - known) < _MANY):
        return None
    return is_no_recipe(kind, name)


_MANY = 3
"""So many unknown keys are answered together."""


def is_no_recipe(kind: str, name: str) -> str:
    """The one sentence about a file that is no recipe."""
    if kind in NO_RECIPES:
        return f"{name} is {NO_RECIPES[kind]}."
    article = "an" if PROJECTS[kind].title[0] in "aOu" or kind == "swift" else "a"
    return (
        f"{name} is {article} {PROJECTS[kind].title} configuration. `grpo-ext migrate {name}` turns it into a recipe."
    )


def answer(key: str) -> str | None:
    """What to write here instead of another project's key, if it is one; its whole name goes before its last part."""
    found = sorted(_named(key), key=lambda named: (named[1] != key, named[2].computed))
    if not found:
        return None
    title, name, rule = found[0]
    called = f"{title} calls it so" if name == key else f"{title} has it as {name}"
    if not rule.to:
        return f"{called}. It is not taken over: {rule.note}. Remove it."
    if rule.computed:
        return f"{called}. Here it is {rule.to}" + (f": {rule.note}." if rule.note else ".")
    return f"{called}. Write {rule.to} here." + (f" What differs: {rule.note}." if rule.note else "")


def own_table(kind: str) -> Mapping[str, Rule]:
    """A project's keys without those that are older TRL's, whose table is TRL's; a script of TRL's has none."""
    table = PROJECTS[kind].table
    if kind in ("trl", "script"):
        return table if kind == "trl" else {}
    return {key: rule for key, rule in table.items() if trl_family.OLDER.get(key) is not rule}


def _named(key: str) -> Iterator[tuple[str, str, Rule]]:
    """Project, whole name and rule of each key of that name, or of that last part."""
    for kind, project in PROJECTS.items():
        for name, rule in own_table(kind).items():
            last = name.rpartition(".")[2] if project.nested else name
            old = project.title == "OpenRLHF" and openrlhf.OLD.get(key) == name
            if old or (key in (name, last) and "*" not in name):
                yield project.title, name, rule


def draft_of(kind: str, given: Mapping[str, Any]) -> Draft:
    """The recipe that a configuration becomes."""
    project = PROJECTS[kind]
    draft = Draft(flat(given) if project.nested else dict(given), project.table)
    for key, value in draft.given.items():
        if isinstance(value, str) and _OF_THE_SHELL.fullmatch(value):
            draft.leave(key, "only a shell would tell")
            draft.decide(
                f"{key}: {value} is what only a shell would tell. What is written is {project.title}'s default."
            )
            draft.given[key] = None
    project.translate(draft)
    if "reward_funcs" not in draft.values and not any("reward" in sentence for sentence in draft.decisions):
        draft.decide("reward_funcs: the file names none. Name some (docs/rewards.md), or functions of yours.")
    for key in draft.left_over():
        draft.leave(key, "without effect beside the other keys")
    return draft


_OF_THE_SHELL = re.compile(r"\$(\w+|\{.*\}|\(.*\))", re.DOTALL)
_WHOLE = ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "chat_template_kwargs", "generation_kwargs")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of keys with dots between the levels."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}".removeprefix("++").removeprefix("+")
        if isinstance(value, Mapping) and value and key not in _WHOLE:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found
