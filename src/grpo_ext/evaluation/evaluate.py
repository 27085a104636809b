"""An evaluation set by the engine that trains: chunks of prompts, spread over processes, sampled and judged.

A chunk is sampled from a seed of its own, and all chunks have equally many rows, so that neither the number of
processes nor an interruption changes what is drawn. Finished chunks are kept in a file; an evaluation that was cut off
continues after the last of them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list, gather_object

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.environments.composition import any_pays
from grpo_ext.errors import RewardError
from grpo_ext.evaluation.sampling import evaluating, seeded
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.rewards.protocol import ENVIRONMENT
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rollout.seeds import Source, numbered

TURNS, FAILED = f"{ENVIRONMENT}/turns", f"{ENVIRONMENT}/failed"
Sample = dict[str, Any]
"""A prompt's row with a completion and what was made of it."""
READ = "answer_parsed"
"""What `accuracy` (or a judge of one's own, by `log_extra`) has read, empty where it found nothing: votes of maj@k."""


def evaluate(
    trainer: Any,
    chosen: EvalSet,
    rows: Sequence[Mapping[str, Any]],
    *,
    kept: Path,
    identity: Mapping[str, Any],
    workers: int | None = None,
) -> list[Sample]:
    """Samples of all rows, on every process; the main one keeps chunks as they are finished in the file `kept`.

    `identity` is what a file was made by (model, weights, settings): one of another is begun anew.

    Raises:
        RewardError: a reward failed under `on_error: raise`; on all processes.
    """
    size = prompts_at_a_time(trainer.args, chosen.samples, len(rows))
    identity = {**identity, "prompts_at_a_time": size}
    chunks = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    accelerator = trainer.accelerator
    done = _agreed(_begun(kept, identity) if accelerator.is_main_process else None)
    left = [i for i in range(len(chunks)) if i not in done]
    runtime = Runtime(chosen.rewards, workers=workers, seed=chosen.seed)
    world, rank = accelerator.num_processes, accelerator.process_index
    try:
        with evaluating(trainer, chosen):
            for start in range(0, len(left), world):
                taken = left[start : start + world]
                mine = taken[min(rank, len(taken) - 1)]  # a process that has none helps to sample the last
                made = _sampled(trainer, chosen, rows, chunks[mine], mine, size)
                failed: list[str] = []
                found = {mine: _judged(trainer, chosen, made, runtime, failed)} if rank < len(taken) else {}
                told = gather_object([(found, failed)])
                if errors := [error for _, theirs in told for error in theirs]:
                    raise RewardError(errors[0])
                fresh = {chunk: samples for theirs, _ in told for chunk, samples in theirs.items()}
                done |= fresh
                if accelerator.is_main_process:
                    _keep(kept, fresh)
    finally:
        runtime.close()
    return [sample for chunk in range(len(chunks)) for sample in done[chunk]]


def prompts_at_a_time(args: Any, samples: int, prompts: int) -> int:
    """Prompts of a chunk: about as many completions as an evaluation batch has, or as a process trains on.

    The number of chunks is the least, and the last one as full as it can be.
    """
    most = max(1, max(args.per_device_eval_batch_size, args.per_device_train_batch_size) // samples)
    return -(-prompts // -(-prompts // most)) if prompts else most


class _Sampled(NamedTuple):
    """Rows of a chunk with what the engine made of them, `samples` to a prompt."""

    places: range
    rows: list[dict[str, Any]]
    made: list[dict[str, Any]]
    """The rows, with what a rollout function has added."""
    ids: list[list[int]]
    masks: list[list[int]]
    completions: list[Any]


def _sampled(
    trainer: Any, chosen: EvalSet, rows: Sequence[Mapping[str, Any]], places: range, chunk: int, size: int
) -> _Sampled:
    """Completions of a chunk's prompts, which have these `places` in the set.

    A last chunk of fewer than `size` prompts is filled up with its last one, and cut afterwards: the processes of a
    round need equally many rows, and so the draws are the same for any number of processes.
    """
    filled = [*places, *[places[-1]] * (size - len(places))]
    asked = [dict(rows[i]) for i in filled for _ in range(chosen.samples)]
    numbers = range(places[0] * chosen.samples, (places[0] + size) * chosen.samples)
    attempts = numbered(chosen.seed, Source.EVALUATION, numbers, chosen.samples)
    with seeded(trainer, chunk, attempts):
        collected = trainer.rollouts(asked, attempts)
    real = len(places) * chosen.samples
    made, (_, ids, tool_mask, completions, *_) = collected.rows, collected.generated
    masks = [[1] * len(row) for row in ids] if tool_mask is None else tool_mask
    return _Sampled(places, asked[:real], made[:real], ids[:real], masks[:real], completions[:real])


def _judged(trainer: Any, chosen: EvalSet, sampled: _Sampled, runtime: Runtime, failed: list[str]) -> list[Sample]:
    """Samples with their rewards; messages of rewards whose failure ends the run are added to `failed`."""
    rows, ids = sampled.rows, sampled.ids
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    made = sampled.made
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in made] for name in made[0] if name != "prompt"}
    columns["prompts"] = [row["prompt"] for row in rows]
    columns |= {"completions": sampled.completions, "completion_ids": ids}
    rewards, extras = _scored(runtime, columns, trainer.state, failed)
    if trainer.acting is not None:
        _add_played(trainer.acting, [row[TRAJECTORY] for row in sampled.made], rewards, extras)
    found = []
    for j, row in enumerate(rows):
        place, tokens = sampled.places[j // chosen.samples], sum(sampled.masks[j])
        sample = {**row, "index": place, "completion": sampled.completions[j], "tokens": tokens}
        sample |= {f"rewards/{name}": values[j] for name, values in rewards.items()}
        sample |= {name: values[j] for name, values in extras.items()}
        found.append(sample | {"truncated": ids[j][-1] not in ends})
    return found


def _add_played(
    acting: Any, attempts: Sequence[Any], rewards: dict[str, list[float | None]], extras: dict[str, list[Any]]
) -> None:
    """What environments paid, and how many turns it took; what an environment lost nobody scores."""
    for name, values in rewards.items():
        rewards[name] = [None if attempt.lost else value for attempt, value in zip(attempts, values, strict=True)]
    if any_pays(acting.specs.values()):
        rewards[ENVIRONMENT] = [acting.paid(attempt, weighted=False) for attempt in attempts]
    extras[TURNS] = [len(attempt.turns) for attempt in attempts]
    extras[FAILED] = [attempt.failure is not None for attempt in attempts]


def _scored(
    runtime: Runtime, columns: dict[str, Any], state: Any, failed: list[str]
) -> tuple[dict[str, list[float | None]], dict[str, list[Any]]]:
    """Values of each reward, and the columns that rewards tell."""
    extras: dict[str, list[Any]] = {}
    given = {
        "log_extra": extras.__setitem__,
        "log_metric": lambda *_: None,
        "trainer_state": SimpleNamespace(global_step=state.global_step, max_steps=state.max_steps),
    }
    scores = {function.__name__: function.scores({**columns, **given}) for function in runtime.functions}
    failed += [of_one.error for of_one in scores.values() if of_one.error]
    return {name: of_one.values for name, of_one in scores.items()}, extras


# What is finished.


def _begun(path: Path, identity: Mapping[str, Any]) -> dict[int, list[Sample]]:
    """Finished chunks of the file, made ready for more; a line that a kill has cut off is left out."""
    head = json.dumps(identity, default=str, sort_keys=True)
    lines = path.read_text().splitlines() if path.is_file() else []
    sound = [line for line in lines[1:] if line.endswith("}") and lines[0] == head]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in [head, *sound]))
    chunks = (json.loads(line) for line in sound)
    return {chunk["chunk"]: chunk["samples"] for chunk in chunks}


def _keep(path: Path, fresh: Mapping[int, list[Sample]]) -> None:
    with path.open("a") as file:
        for chunk, samples in sorted(fresh.items()):
            file.write(json.dumps({"chunk": chunk, "samples": samples}, default=str) + "\n")


def _agreed(value: Any) -> Any:
    """The main process's value, on every process."""
    box = [value]
    broadcast_object_list(box, from_process=0)
    return box[0]
