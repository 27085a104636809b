"""Rules between the parts of a recipe: model, data, rewards and training; each answered with value, reason, cure."""

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peft import TaskType
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.scripts.utils import DatasetConfig

from grpo_ext.config.adapters import adapter_problems, is_adapter
from grpo_ext.config.broken import as_far_as_sound
from grpo_ext.config.fields import outside, sound_values, unknown_value
from grpo_ext.config.launch import elsewhere
from grpo_ext.config.machine import machine_problems
from grpo_ext.config.mappings import as_mapping
from grpo_ext.config.resuming import FRESH_START, noted, requested
from grpo_ext.config.rules import is_set
from grpo_ext.config.vllm import quantized_problem
from grpo_ext.data.config import GAME
from grpo_ext.data.config import problems as data_problems
from grpo_ext.environments import fit
from grpo_ext.environments.composition import EnvironmentSpec, any_pays
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.protocol import ENVIRONMENT
from grpo_ext.rollout.dynamic_sampling import TOTAL, judge_problems

QUICKSTART_TASKS = ("quickstart/addition", GAME)
ALSO: Mapping[str, Any] = {"lora_target_modules": str} | dict.fromkeys(
    ("reward_funcs", "eval_sets", "environments", "datasets", "test_size"), object
)
"""Fields of the parts that may be of a further type, or whose own checks speak of theirs."""


def mixture_problems(entries: Any) -> Iterator[str]:
    """Problems of the entries of `datasets`, before TRL makes objects of them."""
    defaults = {f.name: f.default for f in dataclasses.fields(DatasetConfig)}
    keys = list(defaults)
    if not isinstance(entries, list):
        yield f"datasets={entries!r}: not a list. Write datasets: [{{path: ..., split: train}}]."
        return
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or "path" not in entry:
            yield f"datasets[{i}]={entry!r}: no mapping with a path. Write {{path: ..., split: train}}."
            continue
        values = SimpleNamespace(**(defaults | {str(key): value for key, value in entry.items()}))
        _, told = sound_values(DatasetConfig, values)
        yield from (f"datasets[{i}]: {problem}" for problem in told)
        for key in entry:
            if key not in keys:
                yield f"datasets[{i}] has {key}={entry[key]!r}: no such key. {did_you_mean(str(key), keys)}"


def part_problems(script: Any, data: Any, training: Any, model: Any, mixture: Any) -> Iterator[str]:
    """Problems of the parts that are not the training's, and between parts; a part that failed already is None.

    Of `training` the values that are refused already cannot be looked at (`config.broken`).
    """
    found = [
        _reference(training, model),
        _resume(training),
        _streams(script, training, mixture),
        _loading(training, model),
        map(str, machine_problems(training, model)),
        _output(training.output_dir),
        _on_cpu(training, model),
        _quantized(training, model),
    ]
    for problems in (*([] if model is None else [_model(model)]), *found):
        yield from as_far_as_sound(problems)
    if script is not None:
        yield from map(str, outside(script))
        if sys.platform == "win32" and script.reward_workers != 0:
            yield (
                f"reward_workers={script.reward_workers}: Windows has not the pipes and process groups of reward "
                "workers. Set reward_workers: 0, which scores in the training process, or train on Linux or in WSL."
            )
    if script is not None and data is not None and mixture is not None:
        yield from _data(script, data, mixture)


def _reference(training: Any, model: Any) -> Iterator[str]:
    adapted = model is not None and (model.use_peft or is_adapter(model.model_name_or_path))
    if adapted and training.sync_ref_model:
        yield (
            "sync_ref_model=True with an adapter (use_peft, or as model_name_or_path): the reference is the model "
            "without it, or with it as it was, and stays what it is. Remove sync_ref_model."
        )


def _quantized(training: Any, model: Any) -> Iterator[str]:
    """Quantized weights that vLLM would sample from."""
    if model is not None and training.use_vllm:
        names = (name for name in ("load_in_4bit", "load_in_8bit") if getattr(model, name))
        yield from (str(quantized_problem(name, True)) for name in names)


def _output(folder: Any) -> Iterator[str]:
    """Whether a run can write where it is to."""
    if not isinstance(folder, str | None):
        return
    path = Path(folder or ".").expanduser().absolute()
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir():
        yield f"output_dir={folder!r}: {there} is a file. Set output_dir: {there}-run."
    elif not elsewhere() and not os.access(there, os.W_OK):
        yield f"output_dir={folder!r}: nothing can be written to {there}. Name a folder of yours."


def _on_cpu(training: Any, model: Any) -> Iterator[str]:
    attention = getattr(model, "attn_implementation", None)
    if training.use_cpu and str(attention).startswith("flash_attention"):
        yield f"attn_implementation={attention!r} with use_cpu: it runs on GPUs alone. Set attn_implementation: sdpa."


_TASK_TYPES = tuple(kind.value for kind in TaskType)


def _model(model: Any) -> Iterator[str]:
    path = model.model_name_or_path
    if not path:
        yield "model_name_or_path=None: no model to train. Set it to a hub id, a folder or 'quickstart'."
    elif isinstance(path, str) and path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        beside = Path(path).expanduser().parent
        siblings = {str(Path(path).parent / f.name): f.name for f in beside.iterdir()} if beside.is_dir() else {}
        close = get_close_matches(Path(path).name, siblings.values(), n=1)
        named = next((whole for whole, last in siblings.items() if [last] == close), None)
        cure = (
            f"Set model_name_or_path: ./{named}."
            if named and path[0] == "."
            else "Correct the path, or give a hub id."
        )
        yield f"model_name_or_path={path!r}: no such folder. {cure}"
    yield from map(str, adapter_problems(model))
    for name in ("dtype", "bnb_4bit_quant_type"):
        value = getattr(model, name)
        known = next(f for f in dataclasses.fields(model) if f.name == name).metadata["choices"]
        if isinstance(value, str) and value not in known:
            yield str(unknown_value(name, value, known))
    if isinstance(model.lora_task_type, str) and model.lora_task_type not in _TASK_TYPES:
        yield str(unknown_value("lora_task_type", model.lora_task_type, _TASK_TYPES))
    attention = model.attn_implementation
    if attention and "/" not in attention and attention not in (known := ("eager", *ALL_ATTENTION_FUNCTIONS)):
        yield str(unknown_value("attn_implementation", attention, known))
    yield from map(str, outside(model))
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and not (model.use_peft or is_adapter(path)):
            yield f"{name}=True: quantized weights cannot be trained, only an adapter on them. Set use_peft: true."


def _streams(script: Any, training: Any, mixture: Any) -> Iterator[str]:
    """A stream has no length, so that its epochs cannot be turned into steps."""
    for part, name in ((script, "dataset_streaming"), (mixture, "streaming")):
        if part is not None and getattr(part, name) and training.max_steps <= 0:
            yield f"{name}=True without max_steps: a stream has no length, so the run has no end. Set max_steps."


_OF_THE_MODEL = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "revision": "model_revision",
    "attn_implementation": "attn_implementation",
}


def _loading(training: Any, model: Any) -> Iterator[str]:
    given = as_mapping(training.model_init_kwargs)
    for key, name in _OF_THE_MODEL.items():
        if key in given and model is not None and is_set(model, name) and given[key] != getattr(model, name):
            yield (
                f"model_init_kwargs.{key}={given[key]!r} would go past {name}={getattr(model, name)!r}. Keep one of "
                "them."
            )


def _resume(training: Any) -> Iterator[str]:
    checkpoint = training.resume_from_checkpoint
    wanted, before = requested(checkpoint), noted(Path(training.output_dir or "."))
    carried_out = before is not None and before.asked == wanted  # rotation may have deleted it since
    if wanted not in (None, FRESH_START) and not carried_out and not Path(checkpoint).is_dir():
        yield (
            f"resume_from_checkpoint={checkpoint!r}: no such folder. Correct the path; 'last' takes the last one in "
            f"output_dir, {FRESH_START!r} starts afresh."
        )


def _data(script: Any, data: Any, mixture: Any) -> Iterator[str]:
    name = script.dataset_name
    if bool(name) == bool(mixture.datasets):
        both = "both dataset_name and datasets are" if mixture.datasets else "neither dataset_name nor datasets is"
        yield f"dataset_name={name!r}: {both} set. Set one of them."
    elif str(name).startswith("quickstart/") and name not in QUICKSTART_TASKS:
        yield f"dataset_name={name!r}: the quickstart has no such task. {did_you_mean(name, QUICKSTART_TASKS)}"
    else:
        yield from data_problems(data, name, dataset_config=script.dataset_config, streaming=script.dataset_streaming)


def reward_problems(
    rewards: list[RewardSpec], training: Any, environments: Sequence[EnvironmentSpec] = ()
) -> Iterator[str]:
    """Whether anything is rewarded at all, and whether dynamic sampling can find its judge."""
    yield from fit.reward_problems(environments, [spec for spec in rewards if spec.weight])
    earns = [ENVIRONMENT] if any_pays(environments) else []
    if rewards and not earns and not any(spec.weight for spec in rewards):
        yield "reward_funcs: all weights are 0, nothing would be rewarded. Give at least one a weight."
    if rewards or earns:
        names = [*(spec.name for spec in rewards), *earns]
        yield from as_far_as_sound(_judge(training, names))
        yield from as_far_as_sound(_figure(training.metric_for_best_model, names))


def _judge(training: Any, names: list[str]) -> Iterator[str]:
    if training.dynamic_sampling != TOTAL:
        yield from judge_problems(training.dynamic_sampling, names)


_FIGURES = ("loss", "reward", "reward_std", "kl", "entropy", "frac_reward_zero_std", "completions/mean_length")


def _figure(metric: Any, rewards: list[str]) -> Iterator[str]:
    """Whether an evaluation gives the figure that is to choose; one of a user's own cannot be known."""
    given = str(metric or "").removeprefix("eval_")
    known = {name: name for name in _FIGURES} | {f"rewards/{name}/mean": f"rewards/{name}/mean" for name in rewards}
    if not given or given in known or re.fullmatch(r"rewards/.*/(mean|std)", given):
        return
    known |= {name: f"rewards/{name}/mean" for name in rewards}
    if close := get_close_matches(given, known, n=1, cutoff=0.8):
        yield (
            f"metric_for_best_model={metric!r}: no evaluation gives that figure. Set metric_for_best_model: "
            f"eval_{known[close[0]]}."
        )


# Warned of.
