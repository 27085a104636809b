"""The rules of the run around the loss: when it logs, evaluates and saves, its precision, optimizer and schedule."""

import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

from grpo_ext.config.broken import Rule
from grpo_ext.config.idle import is_set
from grpo_ext.config.launch import world_size
from grpo_ext.config.machine import is_installed
from grpo_ext.config.mappings import as_mapping
from grpo_ext.registry import did_you_mean


def _workers_kept(config: Any) -> Iterator[str]:
    if config.dataloader_persistent_workers and not config.dataloader_num_workers:
        yield (
            "dataloader_persistent_workers=True with dataloader_num_workers=0: there are no workers to keep. "
            "Remove it, or set dataloader_num_workers."
        )


def _fetched_ahead(config: Any) -> Iterator[str]:
    if config.dataloader_prefetch_factor is not None and not config.dataloader_num_workers:
        yield (
            f"dataloader_prefetch_factor={config.dataloader_prefetch_factor} with dataloader_num_workers=0: there are "
            "no workers to fetch ahead. Remove it, or set dataloader_num_workers."
        )


def _deepspeed(config: Any) -> Iterator[str]:
    if config.deepspeed and not is_installed("deepspeed"):
        yield "deepspeed is set, but not installed. Install it (pip install deepspeed), or remove the setting."


def _spread(config: Any) -> Iterator[str]:
    if config.fsdp and config.deepspeed:
        yield f"fsdp={config.fsdp!r} beside deepspeed: a model is spread by one of them. Remove one."
    elif config.fsdp and world_size() == 1:
        yield (
            f"fsdp={config.fsdp!r}: one process has no other to share a model with. Remove it, or launch several: "
            "--num_processes 2."
        )


def _signals(config: Any) -> Iterator[str]:
    if config.enable_jit_checkpoint:
        yield (
            "enable_jit_checkpoint=True: two processes may stop at different steps, and one ends with 0, as if done. "
            "Remove it: SIGTERM, SIGHUP and Ctrl-C save a checkpoint and end with 75 by themselves."
        )


def _old_name(config: Any) -> Iterator[str]:
    cap, high = config.vllm_importance_sampling_cap, config.vllm_importance_sampling_clip_max
    if cap is not None and is_set(config, "vllm_importance_sampling_clip_max") and high != cap:
        yield (
            f"vllm_importance_sampling_cap={cap} is the old name of vllm_importance_sampling_clip_max={high}, and "
            "would win over it. Remove vllm_importance_sampling_cap."
        )


def _first_evaluation(config: Any) -> Iterator[str]:
    if config.eval_on_start and config.eval_strategy == "no":
        yield (
            "eval_on_start=True with eval_strategy='no': there is no evaluation set to load. Set eval_strategy: "
            "steps or epoch, or remove it."
        )


def _saved_when_best(config: Any) -> Iterator[str]:
    if config.save_strategy == "best" and config.metric_for_best_model is None:
        yield (
            "save_strategy='best' without metric_for_best_model: best by what? Set metric_for_best_model, for "
            "example eval_reward."
        )
    elif config.save_strategy == "best" and config.eval_strategy == "no":
        yield (
            "save_strategy='best' with eval_strategy='no': nothing is evaluated, so nothing would be saved. Set "
            "eval_strategy: steps or epoch."
        )


def _whole_steps(name: str, config: Any) -> Iterator[str]:
    steps = getattr(config, name) or 0
    if steps > 1 and steps != int(steps):
        yield f"{name}={steps}: beyond 1 it is a number of steps, below a fraction of the run. Set a whole number."


def _no_steps(kind: str, config: Any) -> Iterator[str]:
    if getattr(config, f"{kind}_strategy") == "steps" and getattr(config, f"{kind}_steps") == 0:
        yield (
            f"{kind}_steps=0 with {kind}_strategy='steps': steps of no length. Set it to 1 or more, or "
            f"{kind}_strategy: 'no'."
        )


def _replayed(config: Any) -> Iterator[str]:
    """Whether each step of the run was recorded, as far as its length is known."""
    if config.replay_batches is None:
        return
    folder, steps = Path(config.replay_batches).expanduser(), max(1, config.max_steps)
    missing = next((step for step in range(1, steps + 1) if not (folder / f"step_{step}").is_dir()), None)
    if missing is not None:
        cure = f"Set max_steps to {missing - 1} at most, or name" if missing > 1 else "Name"
        yield (
            f"replay_batches={config.replay_batches!r}: there is no step_{missing} in this folder. {cure} the "
            "folder batches of a run that had record_batches: 1."
        )


def _evaluated_replay(config: Any) -> Iterator[str]:
    if config.replay_batches is not None and config.use_vllm and config.eval_strategy != "no":
        yield (
            "eval_strategy with replay_batches and use_vllm=True: no engine is started that could evaluate. Set "
            "eval_strategy: 'no', or use_vllm: false."
        )


def _best(config: Any) -> Iterator[str]:
    """Whether the best checkpoint is one that was evaluated, by a figure that there is."""
    evaluated, saved = _word(config.eval_strategy), _word(config.save_strategy)
    if not config.load_best_model_at_end or saved == "best":
        return
    if evaluated == "no":
        yield (
            "load_best_model_at_end=True with eval_strategy='no': nothing would tell which is best. Set "
            f"eval_strategy: {'steps' if saved == 'no' else saved}, or load_best_model_at_end: false."
        )
    elif evaluated != saved:
        yield (
            f"load_best_model_at_end=True with eval_strategy={evaluated!r} and save_strategy={saved!r}: the best is "
            f"one that was both evaluated and saved. Set save_strategy: {evaluated}."
        )
    elif evaluated == "steps":
        every = config.eval_steps or config.logging_steps
        if every >= 1 and config.save_steps % every:
            yield (
                f"load_best_model_at_end=True with save_steps={config.save_steps:g} and eval_steps={every:g}: a "
                f"checkpoint would be saved between evaluations. Set save_steps: {every:g}, or a multiple of it."
            )


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _precision(config: Any) -> Iterator[str]:
    if config.fp16 and config.bf16:
        yield "fp16=True and bf16=True: there is one precision. Set fp16: false, which trains more stably in bf16."
    elif config.fp16 and config.use_cpu:
        yield "fp16=True with use_cpu: a CPU does not train in float16. Set fp16: false."


def _projection(config: Any) -> Iterator[str]:
    optim = _word(config.optim)
    if optim.startswith(("galore", "apollo")) and config.optim_target_modules is None:
        yield (
            f"optim={optim!r} without optim_target_modules: it projects the gradients of the modules named there. "
            "Set optim_target_modules: all-linear."
        )


def _optimizer_args(config: Any) -> Iterator[str]:
    optim = _word(config.optim)
    if config.optim_args and optim in _WITHOUT_ARGS:
        yield (
            f"optim_args={config.optim_args!r}: transformers gives optim={optim!r} no further options. Remove it; "
            "adam_beta1, adam_beta2, adam_epsilon and weight_decay have fields of their own."
        )


_WITHOUT_ARGS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


_OF_EVERY_SCHEDULE = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


def _followed_evaluations(config: Any) -> Iterator[str]:
    name = _word(config.lr_scheduler_type)
    if name in _BY_EVALUATIONS and config.eval_strategy == "no":
        yield (
            f"lr_scheduler_type={name!r} with eval_strategy='no': it follows the figure of an evaluation. Set "
            "eval_strategy: steps, or lr_scheduler_type: linear."
        )


_BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


def _options_of_schedule(config: Any) -> dict[str, inspect.Parameter]:
    """Return what `lr_scheduler_kwargs` may hold; a schedule steered by evaluations is not looked at."""
    name = _word(config.lr_scheduler_type)
    if name in _BY_EVALUATIONS:
        return {}
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    parameters = inspect.signature(schedule).parameters
    return {key: p for key, p in parameters.items() if key not in _OF_EVERY_SCHEDULE}


def _schedule_options(config: Any) -> Iterator[str]:
    name, given = _word(config.lr_scheduler_type), as_mapping(config.lr_scheduler_kwargs)
    options = _options_of_schedule(config)
    for key, value in given.items() if name not in _BY_EVALUATIONS else ():
        if key not in options:
            cure = did_you_mean(str(key), options) if options else "It takes none: remove it."
            yield f"lr_scheduler_kwargs.{key}={value!r}: lr_scheduler_type {name!r} has no such option. {cure}"
    for key, parameter in options.items():
        if parameter.default is parameter.empty and key not in given:
            example = f"{{{key}: {_EXAMPLES.get(key, 1)}}}"
            yield f"lr_scheduler_type={name!r} without {key}. Set lr_scheduler_kwargs: {example}."


def _final_rate(config: Any) -> Iterator[str]:
    given = as_mapping(config.lr_scheduler_kwargs)
    options = _options_of_schedule(config)
    if {"min_lr", "min_lr_rate"} <= options.keys() and not {"min_lr", "min_lr_rate"} & given.keys():
        yield (
            f"lr_scheduler_type={_word(config.lr_scheduler_type)!r} without the rate that it ends at. Set "
            "lr_scheduler_kwargs: {min_lr_rate: 0.1}, a tenth of learning_rate."
        )


_EXAMPLES = {"num_decay_steps": 10}

RUN_RULES: tuple[Rule, ...] = (
    *(_first_evaluation, _saved_when_best),
    *(partial(_whole_steps, name) for name in ("logging_steps", "save_steps", "eval_steps")),
    *(partial(_no_steps, kind) for kind in ("logging", "save")),
    *(_best, _precision, _projection, _optimizer_args, _followed_evaluations, _schedule_options, _final_rate),
    *(_replayed, _evaluated_replay, _workers_kept, _fetched_ahead, _deepspeed, _spread, _signals, _old_name),
)
"""Settings that would end the run late, or that silently mean something else."""
