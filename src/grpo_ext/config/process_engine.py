"""Rules of samplers beside the policy: the process of `rollout_engine: process`, and a server beside training."""

from collections.abc import Iterator, Mapping

import torch

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.launch import local_world_size, planning
from grpo_ext.config.rules import Rule
from grpo_ext.config.truncation import rescalings
from grpo_ext.errors import ABSENT, Problem

_CURE = "Remove it, or set rollout_engine: auto."
_UNDECODED: dict[str, object] = {
    **dict.fromkeys(("top_h", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens"), None),
    **dict.fromkeys(("stop_strings", "max_time", "prefill_chunk_size", "prompt_lookup_num_tokens"), None),
    **dict.fromkeys(("renormalize_logits", "return_dict_in_generate"), False),
    **{"encoder_no_repeat_ngram_size": 0, "use_cache": True},
}
"""Keys of `generation_kwargs` that `rollout.decoding` refuses, besides those that rescale; each with its default."""


def samples_in_process(config: GRPOExtArguments) -> bool:
    """Return whether completions are sampled in a process beside the trainer's."""
    other = config.use_vllm or config.use_transformers_continuous_batching
    return config.rollout_engine == "process" and not other


def samples_by_server(config: GRPOExtArguments) -> bool:
    """Return whether a vLLM server samples while the policy trains."""
    return bool(config.rollout_ahead and config.use_vllm and config.vllm_mode == "server")


def _inexact(config: GRPOExtArguments) -> Iterator[Problem]:
    if not samples_in_process(config):
        return
    reasons = {
        "torch_compile": "the process decodes by the plain forward",
        "cache_implementation": "the process has a cache of its own",
    }
    for name, reason in reasons.items():
        if value := getattr(config, name):
            yield Problem(name, value, reason, _CURE, {"rollout_engine": "process"})


def _device(config: GRPOExtArguments) -> Iterator[Problem]:
    name = config.rollout_device
    if name is None:
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        yield Problem("rollout_device", name, "it is not a device", "Write cpu, cuda or cuda:1.")
        return
    if device.type == "cpu" or planning() or not samples_in_process(config):
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = 0 if accelerator is None or accelerator.type != device.type else torch.accelerator.device_count()
    if (device.index or 0) >= devices:
        yield Problem("rollout_device", name, f"this process sees {devices} devices of this type", "Set another one.")


def _undecodable(config: GRPOExtArguments) -> Iterator[Problem]:
    if not samples_in_process(config) or not isinstance(config.generation_kwargs, dict):
        return
    options = config.generation_kwargs
    rescaling = (name.removeprefix("generation_kwargs.") for name in rescalings(config))
    for name in dict.fromkeys(name for name in (*rescaling, *_UNDECODED) if name in options):
        if (value := options[name]) is not None and value != _UNDECODED.get(name):
            reason = "the process samples token by token, each row by itself"
            yield Problem(f"generation_kwargs.{name}", value, reason, _CURE, {"rollout_engine": "process"})


def same_device(config: GRPOExtArguments) -> Iterator[Problem]:
    """Warn of sampler and policy on one GPU, where their work adds up."""
    if config.use_cpu or not samples_in_process(config) or not config.rollout_ahead:
        return
    device = None if config.rollout_device is None else torch.device(config.rollout_device)
    if device is not None and (device.type == "cpu" or (device.index or 0) >= local_world_size()):
        return
    reason = "sampler and policy compute on one device, so only the wait for rewards and environments is hidden"
    cure = "Set rollout_device to one that does not train, or remove rollout_ahead."
    yield Problem("rollout_ahead", config.rollout_ahead, reason, cure, {"rollout_device": config.rollout_device})


PROCESS_RULES: tuple[Rule, ...] = (_inexact, _undecodable, _device)
"""Settings beside a process that samples, and its device."""


def rollout_problems(config: GRPOExtArguments, values: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problem of rollouts by arguments, `values` by name, in which a sampler beside would have no part."""
    for name in (name for name, argument in values.items() if argument):
        reason = "single turns of the dataset's prompts and of environments only are sampled"
        if samples_in_process(config):
            yield Problem(name, ABSENT, f"{reason} by the process", _CURE, {"rollout_engine": "process"})
        elif samples_by_server(config):
            cure, beside = "Remove it, or remove rollout_ahead.", {"rollout_ahead": config.rollout_ahead}
            yield Problem(name, ABSENT, f"{reason} beside the training", cure, beside)
