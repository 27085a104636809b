"""`rollout_ahead`: what it excludes, and how many generations a run has."""

import math
from collections.abc import Iterator

from datasets import Dataset

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.batches import micro_batches_of_one_generation, prompts_of_one_generation
from grpo_ext.config.process_engine import samples_by_server, samples_in_process
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.errors import Problem


def generations(config: GRPOExtArguments, rows: int | None = None) -> int | None:
    """Return how many generations a run has, of a dataset of `rows`; None where that is not known."""
    accumulation, iterations = config.gradient_accumulation_steps, config.num_iterations
    if config.max_steps > 0:
        return math.ceil(config.max_steps * accumulation / (micro_batches_of_one_generation(config) * iterations))
    if rows is None:
        return None
    prompts, _ = prompts_of_one_generation(config)
    return math.ceil(rows // prompts * config.num_train_epochs)


def _too_far(config: GRPOExtArguments, rows: int | None = None) -> Iterator[Problem]:
    count = generations(config, rows)
    if config.rollout_ahead and count is not None and config.rollout_ahead >= count:
        reason = f"the run has {count} generations, so the initial weights would sample all of them"
        cure = f"Set it to {count - 1} at most, or train longer." if count > 1 else "Remove it, or train longer."
        yield Problem("rollout_ahead", config.rollout_ahead, reason, cure)


def ahead_problems(config: GRPOExtArguments, dataset: object) -> Iterator[Problem]:
    """Yield why the rows of a training set cannot be sampled ahead."""
    if not config.rollout_ahead:
        return
    if not isinstance(dataset, Dataset):
        reason = "the rows of later generations are drawn by number, which a stream does not allow"
        yield Problem("rollout_ahead", config.rollout_ahead, reason, "Remove it, or set dataset_streaming: false.")
    elif config.max_steps <= 0:
        yield from _too_far(config, len(dataset))


AHEAD_RULES: tuple[Rule, ...] = (
    _too_far,
    Conflict(
        "rollout_ahead vllm_mode",
        lambda c: c.rollout_ahead and c.use_vllm and c.vllm_mode == "colocate",
        "a colocated vLLM has the policy's device and weights, and samples in turn with the training",
        "Set vllm_mode: server, or remove rollout_ahead.",
    ),
    Conflict(
        "rollout_ahead rollout_engine",
        lambda c: c.rollout_ahead and not c.use_vllm and not samples_in_process(c),
        "generations can only be sampled ahead by a sampler that has older weights",
        "Set rollout_engine: process, or use_vllm: true with vllm_mode: server.",
    ),
    Conflict.of(
        "rollout_ahead loss_defaults=trl",
        "stock TRL trains on completions of its present weights",
        "Set loss_defaults: paper, or remove rollout_ahead.",
    ),
    Conflict(
        "rollout_ahead vllm_importance_sampling_correction",
        lambda c: c.rollout_ahead and not c.vllm_importance_sampling_correction and c.old_logps == "recomputed",
        "completions of older weights would bias the gradient",
        "Set it to true, or old_logps: sampler, with which the loss takes its ratio to those weights.",
    ),
    Conflict(
        "rollout_ahead dynamic_sampling vllm_mode",
        lambda c: c.rollout_ahead > 1 and c.dynamic_sampling and samples_by_server(c),
        "fresh prompts are sampled by the weights of their generation, and a server has the latest ones only",
        "Set rollout_ahead: 1, or remove dynamic_sampling.",
    ),
    Conflict.of(
        "ignore_data_skip rollout_ahead",
        "a run that resumes would train on other rows than those that were sampled ahead",
        "Remove ignore_data_skip.",
    ),
)


def described(config: GRPOExtArguments) -> str:
    """Return in words what `rollout_ahead` does, for `grpo-ext check`."""
    count = config.rollout_ahead
    words = "one generation is" if count == 1 else f"{count} generations are"
    return f"{words} sampled and scored while one trains, by weights as many generations older"
