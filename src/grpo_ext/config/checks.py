"""Every rule a config must obey, each answered with the value, the reason and the cure, all at once."""

from typing import Any

from grpo_ext.config.batches import BATCH_RULES
from grpo_ext.config.broken import Rule, as_far_as_sound, without
from grpo_ext.config.engines import ENGINE_RULES
from grpo_ext.config.fields import choice_problems, range_problems, type_problems
from grpo_ext.config.idle import IDLE_RULES
from grpo_ext.config.loss import LOSS_RULES
from grpo_ext.config.machine import hardware_problems
from grpo_ext.config.mappings import KEYWORD_RULES, mapping_problems
from grpo_ext.config.paths import path_problems
from grpo_ext.config.rehearsal import rehearsal_problems
from grpo_ext.config.run import RUN_RULES
from grpo_ext.config.vllm import VLLM_RULES

RELATIONS: tuple[Rule, ...] = (
    *BATCH_RULES,
    hardware_problems,
    *ENGINE_RULES,
    *VLLM_RULES,
    *RUN_RULES,
    *KEYWORD_RULES,
    *IDLE_RULES,
    *LOSS_RULES,
)
"""Rules between fields. A rule ends where it reads a field that is refused already, so each speaks of one matter."""


def problems(config: Any) -> list[str]:
    """What makes `config` unusable; empty when nothing does. Reads raw fields only, before TRL derives any."""
    refused = field_problems(config)
    sound = without(config, refused)
    found = [*refused.values(), *(str(p) for rule in RELATIONS for p in as_far_as_sound(rule(sound)))]
    return found or rehearsal_problems(config)


def field_problems(config: Any) -> dict[str, str]:
    """Return the first problem of each field that is unusable whatever the other fields are."""
    found: dict[str, str] = {}
    for rule in (path_problems, mapping_problems, type_problems, choice_problems, range_problems):
        for problem in map(str, rule(config)):
            found.setdefault(problem.partition("=")[0], problem)
    return found
