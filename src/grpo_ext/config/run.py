"""The rules of the run around the loss: logging, evaluation, checkpoints, precision, optimizer and data loading."""

import inspect
from collections.abc import Iterator
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.launch import world_size
from grpo_ext.config.machine import is_installed
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.rules import Conflict, Rule, is_set, plain
from grpo_ext.config.settings import SETTINGS
from grpo_ext.config.spec import wrong_type
from grpo_ext.errors import Problem
from grpo_ext.registry import did_you_mean


def _unused(name: str, config: GRPOExtArguments) -> Iterator[Problem]:
    if is_set(config, name):
        yield Problem(name, getattr(config, name), f"GRPO does not use it: {SETTINGS[name].unused}", "Remove it.")


def _whole_steps(name: str, config: GRPOExtArguments) -> Iterator[Problem]:
    steps = getattr(config, name) or 0
    if steps > 1 and steps != int(steps):
        reason = "above 1 it is a number of steps, below 1 a fraction of the run"
        yield Problem(name, steps, reason, "Set a whole number.")


def _no_steps(kind: str, config: GRPOExtArguments) -> Iterator[Problem]:
    steps, strategy = f"{kind}_steps", f"{kind}_strategy"
    if getattr(config, strategy) == "steps" and getattr(config, steps) == 0:
        cure = f"Set it to 1 or more, or {strategy}: 'no'."
        yield Problem(steps, 0, "an interval of 0 steps", cure, {strategy: "steps"})


def _best(config: GRPOExtArguments) -> Iterator[Problem]:
    """Refuse to load a best checkpoint that would not be evaluated."""
    evaluated, saved = plain(config.eval_strategy), plain(config.save_strategy)
    if not config.load_best_model_at_end or saved == "best":
        return
    refused = partial(Problem, "load_best_model_at_end", True)
    if evaluated == "no":
        cure = f"Set eval_strategy: {'steps' if saved == 'no' else saved}, or load_best_model_at_end: false."
        yield refused("without evaluations no checkpoint is the best", cure, {"eval_strategy": "no"})
    elif evaluated != saved:
        beside = {"eval_strategy": evaluated, "save_strategy": saved}
        yield refused("the best checkpoint must be evaluated and saved", f"Set save_strategy: {evaluated}.", beside)
    elif evaluated == "steps":
        every = config.eval_steps or config.logging_steps
        if every >= 1 and config.save_steps % every:
            cure = f"Set save_steps: {every:g}, or a multiple of it."
            beside = {"save_steps": config.save_steps, "eval_steps": every}
            yield refused("a checkpoint would be saved between evaluations", cure, beside)


_OF_EVERY_SCHEDULE = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
_BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")
_EXAMPLES = {"num_decay_steps": 10}


def _options_of_schedule(config: GRPOExtArguments) -> dict[str, inspect.Parameter]:
    """Return what `lr_scheduler_kwargs` may hold; a schedule steered by evaluations is not looked at."""
    name = str(plain(config.lr_scheduler_type))
    if name in _BY_EVALUATIONS:
        return {}
    parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters  # type: ignore[arg-type]
    return {key: p for key, p in parameters.items() if key not in _OF_EVERY_SCHEDULE}


def _schedule_options(config: GRPOExtArguments) -> Iterator[Problem]:
    name, given = str(plain(config.lr_scheduler_type)), as_mapping(config.lr_scheduler_kwargs)
    options = _options_of_schedule(config)
    for key, value in given.items() if name not in _BY_EVALUATIONS else ():
        if key not in options:
            cure = did_you_mean(str(key), options) if options else "It takes none: remove it."
            reason = f"lr_scheduler_type {name!r} has no such option"
            yield Problem(f"lr_scheduler_kwargs.{key}", value, reason, cure)
        elif isinstance(value, str | list | dict) and isinstance(default := options[key].default, int | float):
            yield wrong_type(f"lr_scheduler_kwargs.{key}", value, type(default), default)
    for key, parameter in options.items():
        if parameter.default is parameter.empty and key not in given:
            cure = f"Set lr_scheduler_kwargs: {{{key}: {_EXAMPLES.get(key, 1)}}}."
            yield Problem("lr_scheduler_type", name, f"it needs {key}", cure)


def _checkpointing_options(config: GRPOExtArguments) -> Iterator[Problem]:
    parameters = inspect.signature(checkpoint).parameters.values()
    known = ["preserve_rng_state", *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)]
    for key, value in as_mapping(config.gradient_checkpointing_kwargs).items():
        if key in ("every_n_layers", "offload"):  # of transformers
            reason = "TRL sets checkpointing again after each pass without a gradient, and would drop it then"
            yield Problem(f"gradient_checkpointing_kwargs.{key}", value, reason, "Remove it.")
        elif key not in known:
            reason = "torch.utils.checkpoint has no such option"
            yield Problem(f"gradient_checkpointing_kwargs.{key}", value, reason, did_you_mean(str(key), known))


def _final_rate(config: GRPOExtArguments) -> Iterator[Problem]:
    ends = {"min_lr", "min_lr_rate"}
    if ends <= _options_of_schedule(config).keys() and not ends & as_mapping(config.lr_scheduler_kwargs).keys():
        cure = "Set lr_scheduler_kwargs: {min_lr_rate: 0.1}, a tenth of learning_rate."
        yield Problem("lr_scheduler_type", plain(config.lr_scheduler_type), "its final learning rate is not set", cure)


_WITHOUT_ARGS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")

RUN_RULES: tuple[Rule, ...] = (
    *(partial(_unused, name) for name, row in SETTINGS.items() if row.unused),
    *(partial(_whole_steps, name) for name in ("logging_steps", "save_steps", "eval_steps")),
    *(partial(_no_steps, kind) for kind in ("logging", "save")),
    *(_best, _schedule_options, _final_rate, _checkpointing_options),
    Conflict.of("do_eval eval_strategy=no", "it evaluates at no step", "Remove it, or set eval_strategy: steps."),
    Conflict.of(
        "neftune_noise_alpha",
        "each forward draws its own noise, so that policy, old policy and reference differ before anything is learned",
        "Remove it.",
    ),
    Conflict.of("do_predict", "GRPO has no prediction", "Remove it."),
    Conflict.of(
        "sync_ref_model !beta", "without a KL term the run has no reference model", "Set beta > 0 or remove it."
    ),
    Conflict.of(
        "remove_unused_columns",
        "it would remove the columns that rewards read, such as solution",
        "Set remove_unused_columns: false.",
    ),
    Conflict.of(
        "auto_find_batch_size",
        "the generation batch must hold whole groups, which a batch size halved on the way would break",
        "Remove it, and lower per_device_train_batch_size by hand.",
    ),
    Conflict.of(
        "log_completions_hub_repo !log_completions",
        "the log has no completions to upload",
        "Set log_completions: true, or remove it.",
    ),
    Conflict.of(
        "eval_on_start eval_strategy=no",
        "the run has no evaluation set to load",
        "Set eval_strategy: steps or epoch, or remove it.",
    ),
    Conflict.of(
        "save_strategy=best !metric_for_best_model",
        "the metric that decides which is best is not set",
        "Set metric_for_best_model, for example eval_reward.",
    ),
    Conflict(
        "save_strategy eval_strategy",
        lambda c: c.save_strategy == "best" and c.metric_for_best_model is not None and c.eval_strategy == "no",
        "without evaluations no checkpoint would be saved",
        "Set eval_strategy: steps or epoch.",
    ),
    Conflict.of("fp16 bf16", "a run has one precision", "Set fp16: false, which trains more stably in bf16."),
    Conflict(
        "fp16 use_cpu",
        lambda c: c.fp16 and not c.bf16 and c.use_cpu,
        "a CPU does not train in float16",
        "Set fp16: false.",
    ),
    Conflict(
        "optim optim_target_modules",
        lambda c: str(plain(c.optim)).startswith(("galore", "apollo")) and c.optim_target_modules is None,
        "it projects the gradients of the modules that optim_target_modules names",
        "Set optim_target_modules: all-linear.",
    ),
    Conflict(
        "optim_args optim",
        lambda c: c.optim_args and plain(c.optim) in _WITHOUT_ARGS,
        "transformers passes no further options to this optimizer",
        "Remove it; adam_beta1, adam_beta2, adam_epsilon and weight_decay have fields of their own.",
    ),
    Conflict(
        "lr_scheduler_type eval_strategy",
        lambda c: plain(c.lr_scheduler_type) in _BY_EVALUATIONS and c.eval_strategy == "no",
        "it follows the metric of an evaluation",
        "Set eval_strategy: steps, or lr_scheduler_type: linear.",
    ),
    Conflict.of(
        "dataloader_persistent_workers !dataloader_num_workers",
        "the run has no workers to keep",
        "Remove it, or set dataloader_num_workers.",
    ),
    Conflict.of(
        "dataloader_prefetch_factor !dataloader_num_workers",
        "the run has no workers to fetch ahead",
        "Remove it, or set dataloader_num_workers.",
    ),
    Conflict(
        "deepspeed",
        lambda c: c.deepspeed and not is_installed("deepspeed"),
        "deepspeed is not installed",
        "Install it (pip install deepspeed), or remove the setting.",
    ),
    Conflict.of("fsdp deepspeed", "only one of them can shard a model", "Remove one."),
    Conflict(
        "fsdp",
        lambda c: c.fsdp and not c.deepspeed and world_size() == 1,
        "one process has no other to share a model with",
        "Remove it, or launch several: --num_processes 2.",
    ),
    Conflict(
        "ddp_backend",
        lambda c: c.ddp_backend and c.use_cpu and world_size() == 1,
        "one process has no other to exchange with",
        "Remove it, or launch several: --num_processes 2.",
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
