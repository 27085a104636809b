"""Evaluate a set by the engine that trains: chunks of prompts, distributed over processes, sampled and scored.

A chunk is sampled from a seed of its own, and all chunks have the same number of rows, so that neither the number of
processes nor an interruption changes the samples. Finished chunks are kept in a file; an interrupted evaluation
continues after the last of them.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import GenerationConfig

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.images import described, fingerprint, sized
from grpo_ext.config.temporary import temporarily
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.data.rows import Row
from grpo_ext.environments.composition import any_pays
from grpo_ext.errors import RewardError, SamplerLost, without_secrets
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.objective.trajectory import of_agents
from grpo_ext.rewards.protocol import ENVIRONMENT
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rollout.seeds import AttemptId, Purpose, Source, derived, numbered
from grpo_ext.safe_reading import appending, write_text
from grpo_ext.trainer.checkpoints.processes import agreed, everywhere
from grpo_ext.trainer.grpo_trainer import GRPOExtTrainer
from grpo_ext.waiting import SIGNALLED, shutdown

TURNS, FAILED = f"{ENVIRONMENT}/turns", f"{ENVIRONMENT}/failed"
ANSWER_READ = "answer_parsed"
"""Column of the answer that `accuracy` (or another judge, by `log_extra`) has read, empty if none: a vote of maj@k."""


def evaluate(
    trainer: GRPOExtTrainer,
    chosen: EvalSet,
    rows: Sequence[Mapping[str, Any]],
    *,
    kept: Path,
    identity: Mapping[str, Any],
    workers: int | None = None,
) -> list[Row]:
    """Return samples of all rows, on every process; the main one keeps finished chunks in the file `kept`.

    A sample is a prompt's row with a completion, its tokens and its rewards. `identity` (model, weights, settings),
    the rows and the longest completion identify the file: one with another identity is overwritten.

    Raises:
        RewardError: a reward failed under `on_error: raise`; on all processes.
        SamplerLost: a signal ends the run; on all processes.
    """
    size = prompts_at_a_time(trainer.args, chosen.samples, len(rows))
    chunks = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    accelerator = trainer.accelerator
    of_rows = {"rows": digest(rows), "max_completion_length": length_of(trainer, chosen), "prompts_at_a_time": size}
    done = agreed(lambda: _finished(kept, {**identity, **of_rows}))
    left = [i for i in range(len(chunks)) if i not in done]
    runtime = Runtime(chosen.rewards, workers=workers, seed=chosen.seed)
    runtime.opened = trainer.opened
    world, rank = accelerator.num_processes, accelerator.process_index
    try:
        with evaluating(trainer, chosen):
            for start in range(0, len(left), world):
                if any(everywhere(shutdown().is_set())):
                    raise SamplerLost(f"evaluation of {chosen.name}: {SIGNALLED}")
                taken = left[start : start + world]
                own = taken[min(rank, len(taken) - 1)]  # a process without a chunk helps to sample the last one
                samples, columns = _sample(trainer, chosen, rows, chunks[own], own, size)
                errors = _add_rewards(trainer, samples, columns, runtime) if rank < len(taken) else []
                gathered = gather_object([(own if rank < len(taken) else None, samples, errors)])
                if failed := [error for _, _, theirs in gathered for error in theirs]:
                    signalled = SamplerLost(f"evaluation of {chosen.name}: {SIGNALLED}")
                    raise signalled if SIGNALLED in failed else RewardError(failed[0])
                fresh = {chunk: theirs for chunk, theirs, _ in gathered if chunk is not None}
                done |= fresh
                if accelerator.is_main_process:
                    with appending(kept) as file:
                        for chunk, theirs in sorted(fresh.items()):
                            file.write(
                                json.dumps({"chunk": chunk, "samples": without_secrets(theirs)}, default=sized) + "\n"
                            )
    finally:
        runtime.close()
    return [sample for chunk in range(len(chunks)) for sample in done[chunk]]


def digest(content: object) -> str:
    """Return what tells contents apart."""
    return hashlib.sha256(json.dumps(content, default=fingerprint, sort_keys=True).encode()).hexdigest()


def prompts_at_a_time(args: GRPOExtConfig, samples: int, prompts: int) -> int:
    """Prompts of a chunk: about as many completions as an evaluation batch has, or as a process trains on.

    The number of chunks is minimal, and the last one as full as possible.
    """
    most = max(1, max(args.per_device_eval_batch_size, args.per_device_train_batch_size) // samples)
    return -(-prompts // -(-prompts // most)) if prompts else most


def _sample(
    trainer: GRPOExtTrainer, chosen: EvalSet, rows: Sequence[Mapping[str, Any]], places: range, chunk: int, size: int
) -> tuple[list[Row], dict[str, list[Any]]]:
    """Return samples of the prompts with these `places` in the set, and the columns for rewards.

    A last chunk of fewer than `size` prompts is padded with its last one, and cut afterwards: the processes of a
    round need the same number of rows, and so the samples are the same for any number of processes.
    """
    padded = [*places, *[places[-1]] * (size - len(places))]
    prompts = [dict(rows[i]) for i in padded for _ in range(chosen.samples)]
    numbers = range(places[0] * chosen.samples, (places[0] + size) * chosen.samples)
    attempts = numbered(chosen.seed, Source.EVALUATION, numbers, chosen.samples)
    with seeded(trainer, chunk, attempts):
        collected = trainer.collector.rollouts(prompts, attempts)
    assert collected.generated is not None
    _, ids, tool_mask, completions, *_ = collected.generated
    ends = trainer.collector.worker.ends
    samples = [
        {
            **prompts[j],
            "index": places[j // chosen.samples],
            "completion": described(completions[j]),
            "tokens": len(ids[j]) if tool_mask is None else sum(tool_mask[j]),
            "truncated": ids[j][-1] not in ends,
        }
        for j in range(len(places) * chosen.samples)
    ]
    real = collected.rows[: len(samples)]
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in real] for name in real[0] if name != "prompt"}
    columns["prompts"] = [sample["prompt"] for sample in samples]
    return samples, columns | {"completions": completions[: len(real)], "completion_ids": ids[: len(real)]}


def _add_rewards(
    trainer: GRPOExtTrainer, samples: list[Row], columns: dict[str, list[Any]], runtime: Runtime
) -> list[str]:
    """Add rewards, and the columns that rewards log, to samples; return the errors of rewards that end the run."""
    rewards_by_name: dict[str, Sequence[Any]] = {}
    extras: dict[str, list[Any]] = {}
    state = SimpleNamespace(global_step=trainer.state.global_step, max_steps=trainer.state.max_steps)
    episodes = columns.get(TRAJECTORY) if trainer.episode_runner is not None else None
    errors = []
    for function in runtime.functions:
        scores = function.scores({**columns, "trainer_state": state})
        extras |= scores.extras
        errors += [scores.error] if scores.error else []
        lost = [False] * len(samples) if episodes is None else [episode.lost for episode in episodes]
        values = [None if gone else value for gone, value in zip(lost, scores.values, strict=True)]
        rewards_by_name[f"rewards/{function.__name__}"] = values
    if episodes is not None and trainer.episode_runner is not None:
        if any_pays(trainer.episode_runner.specs.values()):
            rewards = [trainer.episode_runner.paid(episode, weighted=False) for episode in episodes]
            rewards_by_name[f"rewards/{ENVIRONMENT}"] = rewards
        extras[TURNS] = [len(episode.turns) for episode in episodes]
        extras[FAILED] = [episode.failure is not None for episode in episodes]
        extras |= {name: texts for name, texts in of_agents(episodes).items() if any(texts)}
    for name, column in {**rewards_by_name, **extras}.items():
        for sample, value in zip(samples, column, strict=True):
            sample[name] = value
    return errors


def _finished(path: Path, identity: Mapping[str, Any]) -> dict[int, list[Row]]:
    """Return the finished chunks of a file and prepare it for more; a line that was cut off is dropped."""
    head = json.dumps(identity, default=str, sort_keys=True)
    lines = path.read_text().splitlines() if path.is_file() else []
    sound = [line for line in lines[1:] if line.endswith("}") and lines[0] == head]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{line}\n" for line in [head, *sound]))
    return {chunk["chunk"]: chunk["samples"] for chunk in map(json.loads, sound)}


# The settings of a set, with the engine that trains.


def evaluating(trainer: GRPOExtTrainer, chosen: EvalSet) -> AbstractContextManager[None]:
    """Return a context that samples by the settings of a set, and restores the trainer's state after it."""
    longest = length_of(trainer, chosen)
    if trainer.use_vllm:
        settings = temporarily(
            trainer.vllm_generation,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k or -1,
            min_p=chosen.min_p,
            max_completion_length=longest,
        )
    else:
        samples = chosen.temperature > 0
        kwargs = {**trainer.generation_kwargs, "do_sample": samples, "max_new_tokens": longest}
        kwargs |= {n: getattr(chosen, n) if samples else None for n in ("temperature", "top_p", "top_k", "min_p")}
        config = GenerationConfig(**kwargs, disable_compile=True)
        settings = temporarily(trainer, generation_config=config, generation_kwargs=kwargs)
    return trainer.evaluating(chosen.samples, settings)


@contextmanager
def seeded(trainer: GRPOExtTrainer, chunk: int, attempts: Sequence[AttemptId]) -> Iterator[None]:
    """Sample one chunk of prompts identically on any process; `attempts` are its rows."""
    seed = derived(Purpose.CHUNK, attempts[0].seed, chunk)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    each = [int(attempt.stream().integers(2**31)) for attempt in attempts]
    with trainer.vllm_generation.seeded(each) if trainer.use_vllm else nullcontext():
        yield


def length_of(trainer: GRPOExtTrainer, chosen: EvalSet) -> int:
    """Return the most tokens of a completion."""
    return chosen.max_completion_length or int(trainer.args.max_completion_length or 0)
