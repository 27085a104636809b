"""`router_replay`: where routes are not known, or cannot be given to every forward."""

from collections.abc import Iterator, Mapping

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.process_engine import samples_in_process
from grpo_ext.config.rules import Conflict, Rule, columns_of_images
from grpo_ext.errors import Problem

_OWN = "Set router_replay: old, which replays the policy's own routes"

ROUTE_RULES: tuple[Rule, ...] = (
    Conflict.of(
        "router_replay loss_defaults=trl",
        "stock TRL's forwards choose their experts themselves",
        "Set loss_defaults: paper, or remove router_replay.",
    ),
    Conflict.of(
        "router_replay=rollout use_vllm",
        "vLLM's routes are not read",
        f"{_OWN}, or use_vllm: false.",
    ),
    Conflict(
        "router_replay rollout_engine",
        lambda c: c.router_replay == "rollout" and samples_in_process(c),
        "the process does not return its routes",
        f"{_OWN}, or rollout_engine: auto.",
    ),
    Conflict.of(
        "router_replay=rollout use_transformers_continuous_batching !use_vllm",
        "continuous batching does not return its routes",
        f"{_OWN}, or use_transformers_continuous_batching: false.",
    ),
    Conflict.of(
        "router_replay overlap",
        "the chunks of a generation do not pass routes on",
        "Remove one of them.",
    ),
    Conflict.of(
        "router_replay micro_batch_tokens",
        "pieces of a micro-batch do not pass routes on",
        "Remove one of them.",
    ),
    Conflict.of(
        "router_replay torch_compile",
        "a compiled forward cannot take routes",
        "Set torch_compile: false.",
    ),
    Conflict.of(
        "router_replay use_liger_kernel",
        "its layers do not take routes",
        "Set use_liger_kernel: false.",
    ),
)


def rollout_problems(config: GRPOExtArguments, given: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problem of rollouts by `given` arguments, by name, whose tokens have no routes, or not one each."""
    for name in (name for name, value in given.items() if value and config.router_replay is not None):
        if name in ("environments", "rollout_func"):
            reason = f"contexts of {name} may be rewritten, and a token then has a route in each of them"
            yield Problem("router_replay", config.router_replay, reason, f"Remove router_replay or {name}.")
        elif config.router_replay == "rollout":
            reason = f"{name} add tokens that were not sampled, and have no routes"
            yield Problem("router_replay", config.router_replay, reason, f"{_OWN}, or remove {name}.")


def image_problems(config: GRPOExtArguments, columns: object) -> Iterator[Problem]:
    """Yield the problem of a dataset whose `columns` hold images."""
    if config.router_replay is not None and columns_of_images(columns):
        reason = "a model of images cannot take routes yet"
        yield Problem("router_replay", config.router_replay, reason, "Remove router_replay.")


def replay_problems(config: GRPOExtArguments, obstacle: str | None) -> Iterator[Problem]:
    """Yield the problem of a model that has an `obstacle` to replay."""
    if config.router_replay is not None and obstacle is not None:
        yield Problem("router_replay", config.router_replay, obstacle, "Remove router_replay.")
