"""Every rule that a config must obey, checked all at once; those of the run around the loss are here."""

from collections.abc import Iterator
from functools import partial

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
from grpo_ext.config.rules import Conflict, Rule, as_far_as_sound, is_set, without
from grpo_ext.config.sampler import SAMPLER_RULES
from grpo_ext.config.settings import SETTINGS
from grpo_ext.config.truncation import TRUNCATION_RULES
from grpo_ext.config.vllm import VLLM_RULES
from grpo_ext.errors import Problem


def _unused(name: str, reason: str, config: GRPOExtArguments) -> Iterator[Problem]:
    if is_set(config, name):
        yield Problem(name, getattr(config, name), f"GRPO does not use it: {reason}", "Remove it.")


RUN_RULES: tuple[Rule, ...] = (
    *(partial(_unused, name, row.unused) for name, row in SETTINGS.items() if row.unused),
    Conflict.of("do_predict", "GRPO has no prediction", "Remove it."),
    Conflict.of(
        "neftune_noise_alpha",
        "each forward draws its own noise, so that policy, old policy and reference differ before anything is learned",
        "Remove it.",
    ),
    Conflict.of(
        "remove_unused_columns",
        "it would remove the columns that rewards read, such as solution",
        "Set remove_unused_columns: false.",
    ),
    Conflict(
        "save_strategy eval_strategy",
        lambda c: c.save_strategy == "best" and c.metric_for_best_model is not None and c.eval_strategy == "no",
        "without evaluations no checkpoint would be saved",
        "Set eval_strategy: steps or epoch.",
    ),
    Conflict(
        "fp16 use_cpu",
        lambda c: c.fp16 and not c.bf16 and c.use_cpu,
        "a CPU does not train in float16",
        "Set fp16: false.",
    ),
    Conflict.of(
        "enable_jit_checkpoint",
        "two processes may stop at different steps, and one exits with 0, as if done",
        "Remove it: SIGTERM, SIGHUP and Ctrl-C already save a checkpoint and exit with 75.",
    ),
    Conflict(
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
        lambda c: (
            c.vllm_importance_sampling_cap is not None
            and is_set(c, "vllm_importance_sampling_clip_max")
            and c.vllm_importance_sampling_clip_max != c.vllm_importance_sampling_cap
        ),
        "it is the old name of vllm_importance_sampling_clip_max, and would override it",
        "Remove vllm_importance_sampling_cap.",
    ),
)
"""Settings without a use here, that contradict another one, or that would end the run late."""

RELATIONS: tuple[Rule, ...] = (
    *(*BATCH_RULES, *ENGINE_RULES, *VLLM_RULES, *SAMPLER_RULES, *RUN_RULES, *KEYWORD_RULES),
    *(*PROCESS_RULES, *TRUNCATION_RULES, *LOSS_RULES, *ADDED_LOSS_RULES, *AHEAD_RULES, *ROUTE_RULES),
)
"""Rules between fields. A rule ends where it reads a field that is refused already, so each is about one matter."""


def problems(config: GRPOExtArguments) -> list[Problem]:
    """Return all that makes a config unusable, from its raw fields, before TRL derives any."""
    refused = field_problems(config)
    sound = without(config, refused)
    of_relations = (problem for rule in RELATIONS for problem in as_far_as_sound(rule(sound)))
    return [*refused.values(), *of_relations] or dry_run_problems(config)


def field_problems(config: GRPOExtArguments) -> dict[str, Problem]:
    """Return the first problem of each field that is unusable independently of the other fields."""
    first: dict[str, Problem] = {}
    for rule in (path_problems, mapping_problems, type_problems, choice_problems, range_problems):
        for problem in rule(config):
            first.setdefault(problem.field, problem)
    return first
