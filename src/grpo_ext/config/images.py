"""Settings that are not shown to be right for prompts with images: refused where there are any."""

from collections.abc import Iterator, Mapping

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.process_engine import samples_by_server, samples_in_process
from grpo_ext.config.routes import rollout_problems as route_problems
from grpo_ext.config.rules import columns_of_images
from grpo_ext.config.vllm import splits_weights
from grpo_ext.errors import ABSENT, Problem


def image_problems(config: GRPOExtArguments, columns: object) -> Iterator[Problem]:
    """Yield the problems of a dataset whose `columns` hold images."""
    found = columns_of_images(columns)
    if len(found) > 1:
        yield Problem("column 'image'", ABSENT, "TRL reads 'images' where both are given", "Keep one of them.")
    if not found:
        return
    yield from route_problems(config, {found[0]: True})
    if samples_in_process(config):
        yield Problem("rollout_engine", "process", "the process does not take images", "Set rollout_engine: auto.")
    elif samples_by_server(config):
        reason = "images are not sampled beside the training"
        yield Problem("rollout_ahead", config.rollout_ahead, reason, "Remove rollout_ahead.")
    if config.micro_batch_tokens is not None:
        reason, cure = "rows with images are not cut by tokens yet", "Unset it, and lower per_device_train_batch_size."
        yield Problem("micro_batch_tokens", config.micro_batch_tokens, reason, cure)
    if config.use_vllm:
        reason = "completions of prompts with images are sampled by transformers only"
        yield Problem("use_vllm", True, reason, "Set use_vllm: false.")
    if splits_weights():
        reason = "gradients of weights that are split over processes are untested where prompts have images"
        yield Problem("the launch", ABSENT, reason, "Launch with --accelerate_config ddp, or ZeRO 1 or 2.")


def rollout_problems(given: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems of TRL's arguments that make rollouts, by name, beside prompts with images."""
    for name in (name for name, argument in given.items() if argument):
        reason = "images in the prompt are shown to completions of a single turn only"
        yield Problem(name, ABSENT, reason, f"Remove {name}, or use prompts of text.")
