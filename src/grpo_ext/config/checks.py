"""Every rule a config must obey, each answered with the value, the reason and the cure, all at once."""

import re
from collections.abc import Iterator
from typing import Any

from grpo_ext.config.batches import batch_problems
from grpo_ext.config.engines import engine_problems
from grpo_ext.config.fields import choice_problems, range_problems, type_problems
from grpo_ext.config.idle import idle_problems
from grpo_ext.config.loss import LOSS_RULES
from grpo_ext.config.machine import hardware_problems
from grpo_ext.config.mappings import keyword_problems, mapping_problems
from grpo_ext.config.rehearsal import rehearsal_problems
from grpo_ext.config.run import run_problems
from grpo_ext.config.vllm import vllm_problems


def problems(config: Any) -> list[str]:
    """What makes `config` unusable; empty when nothing does. Reads raw fields only, before TRL derives any."""
    found: dict[str, str] = {}  # by field: one mistake is told once
    for rule in (mapping_problems, type_problems, choice_problems, range_problems):
        for problem in rule(config):
            found.setdefault(_field(problem), problem)
    broken = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in found) or "(?!)")
    told = [*found.values(), *(p for p in _relations(config, sound=not found) if not broken.search(p))]
    return told or rehearsal_problems(config)


def _field(problem: str) -> str:
    """The field that a problem's sentence begins with."""
    return problem.partition("=")[0]


def _relations(config: Any, *, sound: bool) -> Iterator[str]:
    """Problems between fields, each of which may be broken itself unless `sound`."""
    for rule in (
        batch_problems,
        hardware_problems,
        engine_problems,
        vllm_problems,
        run_problems,
        keyword_problems,
        idle_problems,
        *LOSS_RULES,
    ):
        try:
            yield from rule(config)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            if sound:  # otherwise the rule has stumbled over a field that is reported already
                raise
