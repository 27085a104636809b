"""Every rule that a config must obey, checked all at once."""

from grpo_ext.config.added_losses import ADDED_LOSS_RULES
from grpo_ext.config.ahead import AHEAD_RULES
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.batches import BATCH_RULES
from grpo_ext.config.dry_run import dry_run_problems
from grpo_ext.config.engines import ENGINE_RULES
from grpo_ext.config.fields import choice_problems, path_problems, range_problems, type_problems
from grpo_ext.config.loss import LOSS_RULES
from grpo_ext.config.mappings import KEYWORD_RULES, mapping_problems
from grpo_ext.config.process_engine import PROCESS_RULES
from grpo_ext.config.routes import ROUTE_RULES
from grpo_ext.config.rules import Rule, as_far_as_sound, without
from grpo_ext.config.run import RUN_RULES
from grpo_ext.config.sampler import SAMPLER_RULES
from grpo_ext.config.truncation import TRUNCATION_RULES
from grpo_ext.config.vllm import VLLM_RULES
from grpo_ext.errors import Problem

RELATIONS: tuple[Rule, ...] = (
    *(*BATCH_RULES, *ENGINE_RULES, *VLLM_RULES, *SAMPLER_RULES, *RUN_RULES, *KEYWORD_RULES),
    *(*PROCESS_RULES, *TRUNCATION_RULES, *LOSS_RULES, *ADDED_LOSS_RULES, *AHEAD_RULES, *ROUTE_RULES),
)
"""Rules between fields. A rule ends where it reads a field that is refused already, so each is about one matter."""


def problems(config: GRPOExtArguments) -> list[Problem]:
    """Return all that makes a config unusable, from its raw fields, before TRL derives any."""
    refused = field_problems(config)
    sound = without(config, refused)
    found = [*refused.values(), *(p for rule in RELATIONS for p in as_far_as_sound(rule(sound)))]
    return found or dry_run_problems(config)


def field_problems(config: GRPOExtArguments) -> dict[str, Problem]:
    """Return the first problem of each field that is unusable independently of the other fields."""
    found: dict[str, Problem] = {}
    for rule in (path_problems, mapping_problems, type_problems, choice_problems, range_problems):
        for problem in rule(config):
            found.setdefault(problem.field, problem)
    return found
