"""The rules of the run around the loss: what GRPO does not use, and what would end, or undo, a run late."""

from collections.abc import Iterator
from functools import partial

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import Conflict, Rule, is_set
from grpo_ext.config.settings import SETTINGS
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
