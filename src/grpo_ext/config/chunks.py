"""`overlap: step`: what it excludes, and what makes a generation wait for its last row before any of it trains."""

import math
from collections.abc import Iterator

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.batches import micro_batches_of_one_generation
from grpo_ext.config.process_engine import samples_by_server, samples_in_process
from grpo_ext.config.rules import UPDATING, Conflict, Rule, plain
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.combinations import combinations

BY_DEEPSPEED = "DeepSpeed makes the optimizer step in its backward pass, before the denominators are known"
CHUNK_RULES: tuple[Rule, ...] = (
    Conflict(
        "overlap",
        lambda c: c.overlap and not samples_in_process(c) and not samples_by_server(c),
        "groups can only train beside a sampler of their own",
        "Set rollout_engine: process (without use_vllm), or vllm_mode: server (with it), or remove overlap.",
    ),
    Conflict.of(
        "overlap loss_defaults=trl",
        "stock TRL's denominators are those of the whole generation",
        "Set loss_defaults: paper, or remove overlap.",
    ),
    Conflict.of(
        "overlap dynamic_sampling",
        "which groups are replaced is known when the last one is scored",
        "Remove one of them.",
    ),
)


def chunk_rows(config: GRPOExtArguments) -> int:
    """Return the rows of a chunk on each process: the fewest micro-batches that hold whole groups."""
    return math.lcm(config.per_device_train_batch_size, config.num_generations or 1)


def overlap(config: GRPOExtArguments) -> str:
    """Return in words how many chunks a process's part of a generation has, or why it is one."""
    if reason := next(waits_for_all(config), None):
        return f"none: {reason}"
    rows, chunk = _rows(config), chunk_rows(config)
    return f"{-(-rows // chunk)} chunks of {chunk} completions on each process; a chunk trains as soon as it is scored"


def _rows(config: GRPOExtArguments) -> int:
    return config.per_device_train_batch_size * micro_batches_of_one_generation(config)


def waits_for_all(config: GRPOExtArguments) -> Iterator[str]:
    """Yield why no row may train before the last one of its generation is scored."""
    objective, rows, group = config.objective, _rows(config), config.num_generations or 1
    if not estimators.traits(objective.advantage).by_group:
        yield f"advantages by {objective.advantage!r} depend on the whole batch"
    if not combinations.traits(objective.combination).by_group:
        yield f"multi_objective_aggregation {objective.combination!r} normalizes over the whole batch"
    if aggregations.traits(objective.aggregation).denominator is None:
        yield f"loss_aggregation {objective.aggregation!r} is not a sum over one denominator"
    if config.entropy_coef or config.use_adaptive_entropy:
        yield "the entropy bonus has a denominator of its own"
    if config.top_entropy_quantile < 1:
        yield "top_entropy_quantile compares the tokens of a micro-batch"
    if config.samples_otherwise and (named := [rule for rule in config.sampler_rules if rule.of_the_batch]):
        yield f"the sampler correction {named[0].describe()!r} depends on the whole batch"
    if config.deepspeed:
        yield BY_DEEPSPEED
    if plain(config.optim) in UPDATING:
        yield "optim: lomo updates the weights in its backward pass, before the denominators are known"
    if rows % group:
        yield f"a group of {group} completions is on several processes, which have {rows} rows each"
    elif rows <= chunk_rows(config):
        yield f"the {rows} rows of a process are the fewest that hold whole groups and whole micro-batches"
    elif config.gradient_accumulation_steps == 1:
        yield "an optimizer step has one micro-batch"
