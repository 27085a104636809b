"""`replay_routes`: where a sampler's choice of experts is not known, or cannot be given to the forward that trains."""

from collections.abc import Iterator, Mapping

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import Conflict, Rule
from grpo_ext.config.vllm import splits_weights
from grpo_ext.errors import Problem

ROUTE_RULES: tuple[Rule, ...] = (
    Conflict.of("replay_routes !use_vllm", "only vLLM returns its routes", "Set use_vllm: true, or remove it."),
    Conflict.of("replay_routes torch_compile", "a compiled forward cannot take routes", "Set torch_compile: false."),
    Conflict.of("replay_routes losses", "a teacher cannot take the routes of another model", "Remove one of them."),
    Conflict(
        "replay_routes vllm_mode vllm_tensor_parallel_size",
        lambda c: c.replay_routes and c.vllm_mode == "colocate" and c.vllm_tensor_parallel_size > 1,
        "vLLM returns routes to the first process of an engine only",
        "Set vllm_tensor_parallel_size: 1, or vllm_mode: server.",
    ),
    Conflict(
        "replay_routes",
        lambda c: c.replay_routes and splits_weights(),
        "replay is untested where weights are split over processes",
        "Launch with --accelerate_config ddp, or ZeRO 1 or 2.",
    ),
)
"""Settings under which routes do not arrive."""


def route_problem(reason: str) -> Problem:
    """Return the problem of routes that are not known or cannot be replayed."""
    return Problem("replay_routes", True, reason, "Remove replay_routes.")


def rollout_problems(config: GRPOExtArguments, given: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problem of rollouts with `given` arguments, by name."""
    for name in (name for name, argument in given.items() if argument and config.replay_routes):
        reason = f"routes are carried for single turns of text, which {name} may not be"
        yield Problem("replay_routes", True, reason, f"Remove replay_routes or {name}.")
