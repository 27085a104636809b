"""The rules of the run around the loss: when it logs, evaluates and saves, and what must be installed for it."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from grpo_ext.config.idle import is_set

FRESH_START = "never"
"""`--resume_from_checkpoint never` ignores the checkpoints in `output_dir`."""
AFRESH = (FRESH_START, "false")
"""Values of `resume_from_checkpoint`, in any case, that ignore the checkpoints in `output_dir`."""
LAST = ("true", "last")
"""Values of `resume_from_checkpoint` that, like none, mean the last checkpoint in `output_dir`."""


def run_problems(config: Any) -> Iterator[str]:
    """Settings that would end the run late, or that silently mean something else."""
    yield from _rhythm(config)
    if config.dataloader_persistent_workers and not config.dataloader_num_workers:
        yield (
            "dataloader_persistent_workers=True with dataloader_num_workers=0: there are no workers to keep. "
            "Remove it, or set dataloader_num_workers."
        )
    if config.dataloader_prefetch_factor is not None and not config.dataloader_num_workers:
        yield (
            f"dataloader_prefetch_factor={config.dataloader_prefetch_factor} with dataloader_num_workers=0: there are "
            "no workers to fetch ahead. Remove it, or set dataloader_num_workers."
        )
    if config.deepspeed and importlib.util.find_spec("deepspeed") is None:
        yield "deepspeed is set, but not installed. Install it (pip install deepspeed), or remove the setting."
    if config.enable_jit_checkpoint:
        yield (
            "enable_jit_checkpoint=True: two processes may stop at different steps, and one ends with 0, as if done. "
            "Remove it: SIGTERM, SIGHUP and Ctrl-C save a checkpoint and end with 75 by themselves."
        )
    cap, high = config.vllm_importance_sampling_cap, config.vllm_importance_sampling_clip_max
    if cap is not None and is_set(config, "vllm_importance_sampling_clip_max") and high != cap:
        yield (
            f"vllm_importance_sampling_cap={cap} is the old name of vllm_importance_sampling_clip_max={high}, and "
            "would win over it. Remove vllm_importance_sampling_cap."
        )


def _rhythm(config: Any) -> Iterator[str]:
    evaluates = config.eval_strategy != "no"
    if config.eval_on_start and not evaluates:
        yield (
            "eval_on_start=True with eval_strategy='no': there is no evaluation set to load. Set eval_strategy: "
            "steps or epoch, or remove it."
        )
    if config.save_strategy == "best" and config.metric_for_best_model is None:
        yield (
            "save_strategy='best' without metric_for_best_model: best by what? Set metric_for_best_model, for "
            "example eval_reward."
        )
    elif config.save_strategy == "best" and not evaluates:
        yield (
            "save_strategy='best' with eval_strategy='no': nothing is evaluated, so nothing would be saved. Set "
            "eval_strategy: steps or epoch."
        )
    for name in ("logging_steps", "save_steps", "eval_steps"):
        steps = getattr(config, name) or 0
        if steps > 1 and steps != int(steps):
            yield f"{name}={steps}: beyond 1 it is a number of steps, below a fraction of the run. Set a whole number."
    for kind in ("logging", "save"):
        if getattr(config, f"{kind}_strategy") == "steps" and getattr(config, f"{kind}_steps") == 0:
            yield (
                f"{kind}_steps=0 with {kind}_strategy='steps': steps of no length. Set it to 1 or more, or "
                f"{kind}_strategy: 'no'."
            )


# What must be installed; asked only of the machine that is to run.
