"""Settings that several projects have: batches and intervals counted in generations, KL, LoRA, rewards by length."""

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_ext.errors import ConfigError, Problem
from grpo_ext.recipe.foreign.engine import Draft


def split_batch(completions: int, processes: int, at_most: int) -> tuple[int, int] | None:
    """Return rows per device and accumulation steps whose product over the processes is a step of so many completions.

    The rows are the largest divisor that is not more than `at_most`; None where the processes do not divide the step.

    >>> split_batch(1280, 8, 80), split_batch(64, 2, 40), split_batch(10, 4, 8)
    ((80, 2), (32, 1), None)
    """
    if completions < processes or completions % processes:
        return None
    each = completions // processes
    rows = next(size for size in range(min(max(1, at_most), each), 0, -1) if each % size == 0)
    return rows, each // rows


def set_group(d: Draft, key: str, estimator: str, names: Mapping[str, str], critic: bool, instead: str) -> str:
    """Write the completions per prompt and the advantage estimator, and return the latter.

    Raises:
        ConfigError: `critic`.
    """
    if critic:
        reason = "PPO trains a critic, and grpo-ext compares a group of completions instead"
        raise ConfigError([Problem(estimator, d.get(estimator), reason, f"Set {instead} there, and migrate that.")])
    group = d.copy("num_generations", key)
    if group < 2:
        d.decide(f"num_generations: {key} is {group}, and a group has at least 2 completions. Set it.")
    d.choose("advantage_estimator", estimator, names, "group")
    return d.values["advantage_estimator"]


def set_batch(d: Draft, prompts: int, step: int, rows: int, of_rows: str, by_tokens: str) -> None:
    """Write the batch keys, or ask where the numbers do not divide one another.

    Args:
        d: the draft, whose num_processes and num_generations are set.
        prompts: prompts of a generation.
        step: completions of an optimizer step.
        rows: completions of a micro-batch.
        of_rows: the foreign key of `rows`.
        by_tokens: the foreign key by which micro-batches are filled by tokens, if they are.
    """
    processes, group = d.values["num_processes"], d.values["num_generations"]
    found, drawn = split_batch(step, processes, rows), prompts * group
    d.set("generation_batch_size", drawn, f"{prompts} prompts x {group}")
    if found is None or drawn % step or drawn % group:
        d.set("per_device_train_batch_size", rows, of=of_rows)
        d.decide(
            f"The batch: {drawn} completions of a generation, {step} of an optimizer step and {processes} processes "
            "do not divide one another. Choose per_device_train_batch_size, gradient_accumulation_steps and "
            "generation_batch_size.",
            *d.computing("gradient_accumulation_steps"),
        )
    else:
        note = "" if found[0] == rows else f"{rows} there, which does not divide the step"
        d.set("per_device_train_batch_size", found[0], "a guess, see above" if by_tokens else note, of=of_rows)
        d.set("gradient_accumulation_steps", found[1], f"an optimizer step has {step} completions")
    if by_tokens:
        d.decide(
            f"per_device_train_batch_size: {d.title} fills micro-batches by tokens, grpo-ext by a number of rows. "
            f"{d.values['per_device_train_batch_size']} is a guess; it changes memory and speed, not the result.",
            by_tokens,
        )


def set_processes(d: Draft, nodes: str, gpus: str) -> None:
    """Write the number of processes and, if there are several, of machines."""
    machines = d.get(nodes)
    d.set("num_processes", d.get(gpus) * machines, of=(nodes, gpus))
    if machines > 1:
        d.set("num_machines", machines, of=nodes)
        d.decide(
            f"num_machines: {d.title} starts {machines} machines by itself. Start the same command on each, with its "
            "machine_rank and the first one's main_process_ip (docs/launching.md, Several machines).",
            nodes,
        )


def set_intervals(d: Draft, save: str, evaluate: str, completions: str, updates: int, unit: str) -> str:
    """Write when to save and evaluate, counted in generations of so many updates; return the comment."""
    each = f"{unit} there" + (f", of {updates} optimizer steps each" if updates > 1 else "")
    for key, name in ((save, "save"), (evaluate, "eval")):
        every = d.get(key)
        d.set(f"{name}_strategy", "steps" if every > 0 else "no", of=key)
        if every > 0:
            d.set(f"{name}_steps", every * updates, each, of=key)
    if d.values["eval_strategy"] == "steps":
        d.set("per_device_eval_batch_size", d.values["per_device_train_batch_size"], of=())
        d.copy("num_generations_eval", completions)
    return each


def set_betas(d: Draft, key: str) -> None:
    """Write the pair of Adam's betas."""
    for name, beta in zip(("adam_beta1", "adam_beta2"), d.get(key, ()), strict=False):
        d.set(name, beta)


def set_kl(d: Draft, beta: str, kind: str, names: Mapping[str, str], in_reward: bool, switches: Iterable[str]) -> None:
    """Write the KL term from the keys of its coefficient, its kind (`names` has ours) and its place."""
    d.set("beta", d.get(beta), of=beta)
    if not d.get(beta):
        return
    called, estimator = d.get(kind), names.get(str(d.get(kind)), d.get(kind))
    if estimator == "k1" and not in_reward:
        sentence = f"{called} (k1) has no useful gradient in the loss; k2, which has the right one, is written"
        d.decide(f"kl_estimator: {sentence}.", kind)
        estimator = "k2"
    d.set("kl_estimator", estimator, f"{d.title}'s {called}", of=kind)
    d.set("kl_placement", "reward" if in_reward else "loss", of=switches)


def set_lora(d: Draft, **keys: Iterable[str]) -> None:
    """Write LoRA's settings from the foreign keys of rank, alpha, dropout and target_modules."""
    d.set("use_peft", True, of=keys["rank"])
    for name, of in keys.items():
        d.copy("lora_r" if name == "rank" else f"lora_{name}", *of)
    if d.values.get("lora_dropout"):
        d.set("disable_dropout", False, f"lora_dropout has an effect in {d.title}; 0.0 and true are exact", of=())


def set_zero_stage(d: Draft, exact: bool) -> None:
    """Write the launch configuration that DeepSpeed's is named for, or ask; `exact`: a name may be all there is."""
    engine = str(d.get("deepspeed") or "")
    stage = next((f"zero{n}" for n in "123" if f"zero{n}" in engine), None)
    if stage:
        note = "" if exact and engine == stage else f"{engine} there"
        d.set("accelerate_config", stage, note, of="deepspeed")
    if engine and (stage is None or (exact and "offload" in engine)):
        sentence = "is a file, or offloads. Write it into a file of accelerate, and name that: accelerate_config"
        d.decide(f"deepspeed: {engine!r} {sentence}.", "deepspeed")


def set_held_out(d: Draft, share: str) -> None:
    """Write the share of the rows to evaluate on."""
    if d.get(share):
        d.set("test_size", d.get(share))
        d.copy("eval_strategy", "eval_strategy", default="steps")


def decide_first_of(d: Draft, names: list[Any], key: str) -> None:
    """Ask about the datasets behind the first."""
    if len(names) > 1:
        d.decide(
            f"dataset_name: the file has {len(names)} datasets, and the first is written. Mix them by datasets "
            "(docs/recipes.md).",
            key,
        )


def to_list(value: Any) -> list[Any]:
    """Return a list: of one value, or of none."""
    return value if isinstance(value, list) else [value] if value else []


def positive(value: int) -> int | None:
    """Return a number, or None for 0 and below, which switch a limit off."""
    return value if value > 0 else None


def overlong_entry(max_length: object, buffer: object, weight: object = None) -> dict[str, Any]:
    """Return the entry of the reward `soft_overlong`."""
    weighted = {} if weight is None else {"weight": weight}
    return {"name": "soft_overlong", **weighted, "kwargs": {"max_length": max_length, "buffer": buffer}}


def cosine_entry(d: Draft, max_length: object, keys: Iterable[str]) -> dict[str, Any]:
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


def whole_groups(d: Draft, processes_at_most: int = 64) -> None:
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
    processes = next((n for n in range(2, processes_at_most + 1) if fit(n)), None)
    if processes is not None:
        d.set("num_processes", processes, of=())
        d.decide(
            f"num_processes: the file does not give it. {processes} is the fewest with which {rows} x {steps} "
            f"completions of each process are whole groups of {group}."
        )
