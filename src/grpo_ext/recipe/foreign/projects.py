"""Recognise whose configuration a file is, convert it, and answer what another project's key is called here."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.recipe.foreign import axolotl, openrlhf, swift, trl_family, verl
from grpo_ext.recipe.foreign.draft import Draft, Rule, Translation, number

PROJECTS = {
    "trl": trl_family.TRL,
    "open-r1": trl_family.OPEN_R1,
    "verl": verl.VERL,
    "openrlhf": openrlhf.OPENRLHF,
    "swift": swift.SWIFT,
    "axolotl": axolotl.AXOLOTL,
}

_LAUNCH = "a launch configuration of accelerate. Keep it in its own file, and name that: accelerate_config: FILE"
_NO_REWARD = "which no reward drives, so that there is nothing to migrate"
NO_RECIPES: dict[str, str] = {
    "accelerate": _LAUNCH,
    "deepspeed": "a configuration of DeepSpeed. Write deepspeed: FILE into the recipe, or accelerate_config: zero2",
    "sft": f"an SFT recipe (supervised fine-tuning), {_NO_REWARD}. Train it by `trl sft`, and its result here",
    "dpo": f"a DPO recipe (pairs of preferences), {_NO_REWARD}. Train it by `trl dpo`, and its result here",
    "reward": f"a recipe for a reward model, {_NO_REWARD}. Train it by `trl reward`, and name it in reward_funcs here",
    "llama-factory": f"a LLaMA-Factory configuration (SFT, DPO, PPO, reward models), {_NO_REWARD}. Begin with a "
    "packaged recipe: `grpo-ext recipes`",
    "unsloth-studio": f"a configuration of unsloth's SFT, {_NO_REWARD}. Train it there, and its result here",
}
"""Kinds of files that do not configure a run by rewards, each with what to do."""

_SIGNS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("accelerate", lambda c: "distributed_type" in c or "compute_environment" in c),
    ("deepspeed", lambda c: "zero_optimization" in c or "train_micro_batch_size_per_gpu" in c),
    ("verl", lambda c: any(key.split(".")[0] == "actor_rollout_ref" for key in c)),
    ("llama-factory", lambda c: "finetuning_type" in c),
    ("axolotl", lambda c: "base_model" in c or c.get("rl") in ("grpo", "gdpo")),
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
    """Return the project, or what else it is; None for a recipe of ours or TRL's (whose keys are `known`)."""
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
    """Return which of TRL's other trainers the keys are of: two of them, or one that no other trainer has."""
    if not unknown:
        return None
    trainers = trl_family.other_trainers()
    for kind, own in trainers.items():
        others = set().union(*(keys for name, keys in trainers.items() if name != kind))
        if len(unknown & own) >= 2 or unknown & (own - others):
            return kind
    return None


def foreign_file(config: Mapping[str, Any], name: str, known: frozenset[str]) -> str | None:
    """Return one sentence about a file that is not a recipe; None for a recipe, also with a few keys of Open-R1."""
    kind = kind_of(config, known)
    if kind is None or (kind == "open-r1" and len(config.keys() - known) < _MANY):
        return None
    return is_no_recipe(kind, name)


_MANY = 3
"""From so many unknown keys on they are answered together."""


def is_no_recipe(kind: str, name: str) -> str:
    """Return one sentence about a file that is not a recipe."""
    if kind in NO_RECIPES:
        return f"{name} is {NO_RECIPES[kind]}."
    article = "an" if PROJECTS[kind].title[0] in "aOu" or kind == "swift" else "a"
    return (
        f"{name} is {article} {PROJECTS[kind].title} configuration. `grpo-ext migrate {name}` turns it into a recipe."
    )


def answer(key: str) -> str | None:
    """Return what to write here instead of another project's key; a whole name is preferred to a last part."""
    found = sorted(_named(key), key=lambda named: (named[1] != key, named[2].computed))
    if not found:
        return None
    title, name, rule = found[0]
    called = f"{title} calls it so" if name == key else f"{title} has it as {name}"
    if rule.asks:
        return f"{called}: {rule.note}."
    if not rule.to:
        return f"{called}. It is not converted: {rule.note}. Remove it."
    if rule.computed:
        return f"{called}. Here it is {rule.to}" + (f": {rule.note}." if rule.note else ".")
    return f"{called}. Write {rule.to} here." + (f" What differs: {rule.note}." if rule.note else "")


_NOTHING: Mapping[str, str] = {}


def own_table(kind: str) -> Mapping[str, Rule]:
    """Return a project's keys without those of older TRLs, whose table is TRL's."""
    table = PROJECTS[kind].table
    return table if kind == "trl" else {k: rule for k, rule in table.items() if trl_family.OLDER.get(k) is not rule}


def _named(key: str) -> Iterator[tuple[str, str, Rule]]:
    """Find project, whole name and rule of each key with that name, or that last part."""
    for kind, project in PROJECTS.items():
        for name, rule in own_table(kind).items():
            last = name.rpartition(".")[2] if project.nested else name
            if project.aliases.get(key) == name or (key in (name, last) and "*" not in name):
                yield project.title, name, rule


def draft_of(kind: str, given: Mapping[str, Any], version: str = "", asked: Mapping[str, str] = _NOTHING) -> Draft:
    """Convert a configuration; `asked` holds sentences about keys that depend on a condition.

    Raises:
        ConfigError: it trains without a group of completions, or the version is unknown.
    """
    project = PROJECTS[kind]
    draft = project.draft(_resolved(project, given), _version(project, given, version))
    for key, value in draft.given.items():
        if isinstance(value, str) and re.fullmatch(r"\$\{[\w.]*[.:].*\}", value):
            draft.leave(key, f"{draft.title}'s own default")
        elif (rule := draft.rule(key)) and not (rule.to or rule.computed or rule.asks):
            continue
        elif isinstance(value, str) and _OF_THE_SHELL.fullmatch(value):
            draft.leave(key, "only running the script would show it")
            draft.decide(f"{key}: only running the script would show {value}. {draft.title}'s default is written.")
    draft.given = {key: value for key, value in draft.given.items() if key not in draft.left}
    unknown, draft.left = draft.left, {}
    for step in project.steps:
        step(draft)
    draft.apply_table(project.same)
    draft.fill(project.defaults(draft))
    if project.finish:
        project.finish(draft)
    if "reward_funcs" not in draft.values and not any("reward" in sentence for sentence in draft.decisions):
        draft.decide("reward_funcs: the file names none. Name some (docs/rewards.md), or functions of yours.")
    for key, sentence in asked.items():
        if key in draft.converted:
            draft.decide(sentence)
    draft.settle()
    draft.left |= unknown
    draft.given |= dict.fromkeys(unknown)
    _ask_unresolved(draft)
    return draft


def _version(project: Translation, given: Mapping[str, Any], version: str) -> str:
    known = ", ".join(project.versions)
    if version and (not re.fullmatch(r"\d+(\.\d+)*", version) or number(version) < number(project.versions[0])):
        raise ConfigError([f"--version {version}: the defaults of {project.title} are known since {known}."])
    return version or project.version_of(given) or project.versions[-1]


def _resolved(project: Translation, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that have a value, under their present names, with `${other.key}` filled in."""
    values = flat(given) if project.nested else dict(given)
    renamed = {_present(project.aliases, key): value for key, value in values.items() if value not in (None, "???")}

    def other(found: re.Match[str]) -> str:
        value = renamed.get(found[1], project.table_defaults.get(found[1]))
        return found[0] if value is None or isinstance(value, list | dict) else str(value)

    for _ in range(3):  # interpolations may contain others
        for key, value in renamed.items():
            if isinstance(value, str) and "${" in value:
                renamed[key] = _INTERPOLATION.sub(other, value)
    return renamed


def _present(aliases: Mapping[str, str], key: str) -> str:
    """Return today's name of a key; an alias that ends in a dot renames a section."""
    section = next((old for old in aliases if old.endswith(".") and key.startswith(old)), None)
    return aliases.get(key) or (f"{aliases[section]}{key.removeprefix(section)}" if section else key)


def _ask_unresolved(draft: Draft) -> None:
    """Ask for what is left of a shell's or hydra's variables in a value."""
    for key, value in draft.values.items():
        if key not in ("system_prompt", "chat_template") and (names := _UNRESOLVED.findall(str(value))):
            draft.decide(
                f"{key}: {', '.join(dict.fromkeys(names))} has no value in the file. Write it out; a recipe takes "
                "$NAME from the environment."
            )


_OF_THE_SHELL = re.compile(r"\$(\w+|\{.*\}|\(.*\))", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_UNRESOLVED = re.compile(r"\$\{.*?\}|\$\(.*?\)|\$[A-Za-z_]\w*")
_WHOLE = ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "chat_template_kwargs", "generation_kwargs")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write a tree of keys with dots between the levels."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}".removeprefix("++").removeprefix("+")
        if isinstance(value, Mapping) and value and key not in _WHOLE:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found
