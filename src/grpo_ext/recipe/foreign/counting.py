"""What several projects say alike: batches and intervals counted in generations, a KL term, a reward by length."""

from collections.abc import Iterable
from typing import Any

from grpo_ext.recipe.foreign.draft import Draft


def split_batch(completions: int, processes: int, at_most: int) -> tuple[int, int] | None:
    """Rows per device and accumulation steps whose product over the processes is a step of so many completions.

    The rows are the largest divisor that is not more than `at_most`; None where the processes do not divide the step.

    >>> split_batch(1280, 8, 80), split_batch(64, 2, 40), split_batch(10, 4, 8)
    ((80, 2), (32, 1), None)
    """
    if completions < processes or completions % processes:
        return None
    each = completions // processes
    rows = next(size for size in range(min(max(1, at_most), each), 0, -1) if each % size == 0)
    return rows, each // rows


Counted = tuple[int, str, tuple[str, ...]]
"""A number of completions, how it was counted, and the foreign keys that it was made of."""


def set_batch(
    draft: Draft,
    generated: Counted,
    step: Counted,
    rows: tuple[int, str],
    processes: tuple[int, tuple[str, ...]],
    by_tokens: str,
) -> None:
    """Write the batch keys, or ask where the numbers do not divide one another; `by_tokens` fills micro-batches."""
    drawn, at_once, of_drawn = generated
    found, group = split_batch(step[0], processes[0], rows[0]), draft.values["num_generations"]
    draft.set("num_processes", processes[0], of=processes[1])
    draft.set("generation_batch_size", drawn, at_once, of=of_drawn)
    if found is None or drawn % step[0] or drawn % group:
        draft.set("per_device_train_batch_size", rows[0], of=rows[1])
        draft.decide(
            f"The batch: {drawn} completions drawn at once, {step[0]} in an optimizer step and {processes[0]} "
            "processes do not divide one another. Choose per_device_train_batch_size, gradient_accumulation_steps "
            "and generation_batch_size.",
            of=step[2],
        )
    else:
        note = "" if found[0] == rows[0] else f"{rows[0]} there, which does not divide the step"
        note = "a guess, see above" if by_tokens else note
        draft.set("per_device_train_batch_size", found[0], note, of=rows[1])
        draft.set("gradient_accumulation_steps", found[1], step[1], of=step[2])
    if by_tokens:
        draft.decide(
            f"per_device_train_batch_size: {draft.title} fills micro-batches by tokens, here they have a number of "
            f"rows. {draft.values['per_device_train_batch_size']} is a guess; what fits changes no result.",
            of=by_tokens,
        )


def set_machines(draft: Draft, machines: int, of: str) -> None:
    """Write the number of machines and ask for what each of them needs, where there are several."""
    if machines > 1:
        draft.set("num_machines", machines, of=of)
        draft.decide(
            f"num_machines: {draft.title} starts {machines} machines by itself. Start the same command on each, with "
            "its machine_rank and the first one's main_process_ip (docs/launching.md, Several machines).",
            of=of,
        )


def set_intervals(
    draft: Draft, save: str, evaluate: str, completions: tuple[str, int], updates: int, unit: str
) -> str:
    """Write when to save and evaluate, counted in generations of so many updates; return the comment."""
    each = f"{unit} there" + (f", of {updates} optimizer steps each" if updates > 1 else "")
    for key, name in ((save, "save"), (evaluate, "eval")):
        every = draft.get(key, -1)
        draft.set(f"{name}_strategy", "steps" if every > 0 else "no", of=key)
        if every > 0:
            draft.set(f"{name}_steps", every * updates, each, of=key)
    if draft.values["eval_strategy"] == "steps":
        draft.set("per_device_eval_batch_size", draft.values["per_device_train_batch_size"])
        draft.copy("num_generations_eval", completions[0], default=completions[1])
    return each


def set_kl(
    draft: Draft, coefficient: float, of: str, kind: tuple[str, str, str], in_reward: bool, place: Iterable[str]
) -> None:
    """Write the KL term; `kind` is the estimator, what the project calls it, and its key."""
    draft.set("beta", coefficient, of=of)
    if not coefficient:
        return
    estimator, called, of_kind = kind
    if estimator == "k1" and not in_reward:
        draft.decide(
            f"kl_estimator: {called} (k1) has no useful gradient in the loss; k2, the right one, is written.", of_kind
        )
        estimator = "k2"
    draft.set("kl_estimator", estimator, called, of=of_kind)
    draft.set("kl_placement", "reward" if in_reward else "loss", of=place)


def whole_groups(draft: Draft, processes_at_most: int = 64) -> None:
    """Where only several processes make whole groups of rows and accumulation, write the fewest that do."""
    rows, group = draft.values.get("per_device_train_batch_size", 8), draft.values.get("num_generations", 8)
    steps = draft.values.get("steps_per_generation") or draft.values.get("gradient_accumulation_steps", 1)
    evaluated = draft.values.get("eval_strategy", "no") != "no"
    of_eval = draft.values.get("per_device_eval_batch_size", 8), draft.values.get("num_generations_eval") or group
    if {"num_processes", "generation_batch_size"} & draft.values.keys():
        return

    def fit(processes: int) -> bool:
        whole = rows * steps * processes % group == 0
        return whole and not (evaluated and of_eval[0] * processes % of_eval[1])

    if not all(isinstance(value, int) for value in (rows, group, steps, *of_eval)) or fit(1):
        return
    processes = next((n for n in range(2, processes_at_most + 1) if fit(n)), None)
    if processes is not None:
        draft.set("num_processes", processes)
        draft.decide(
            f"num_processes: the file does not give it. {processes} is the least with which {rows} x {steps} "
            f"completions of each process are whole groups of {group}."
        )


def cosine_length(
    draft: Draft, max_length: Any, *, correct: tuple[float, float], wrong: tuple[float, float], of: Iterable[str]
) -> dict[str, Any]:
    """Return the reward `cosine_length` that goes from the first to the second value of each pair, short to long."""
    (short, long), (short_wrong, long_wrong) = correct, wrong
    if short < long or short_wrong > long_wrong:
        draft.decide(
            f"reward cosine: correct answers go from {short:g} (short) to {long:g} (long), wrong ones from "
            f"{short_wrong:g} to {long_wrong:g}. cosine_length takes length from correct ones and gives it to wrong "
            "ones: the values that do the opposite are exchanged.",
            of,
        )
    return {
        "name": "cosine_length",
        "kwargs": {
            "max_length": max_length,
            "min_value_correct": min(short, long),
            "max_value_correct": max(short, long),
            "min_value_wrong": min(short_wrong, long_wrong),
            "max_value_wrong": max(short_wrong, long_wrong),
        },
    }
