"""Settings that are not shown to be right for prompts with images: refused where there are any."""

from collections.abc import Iterator, Mapping

from grpo_ext.config import pieces, process_engine, truncation
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import columns_of_images
from grpo_ext.config.vllm import splits_weights
from grpo_ext.errors import ABSENT, Problem


def image_problems(config: GRPOExtArguments, columns: object) -> Iterator[Problem]:
    """Yield the problems of a dataset whose `columns` hold images."""
    found = columns_of_images(columns)
    if len(found) > 1:
        yield Problem("column 'image'", ABSENT, "TRL reads 'images' where both are given", "Keep one of them.")
    for part in (truncation, process_engine, pieces):
        yield from part.image_problems(config, columns)
    if found:
        yield from setting_problems(config)


def setting_problems(config: GRPOExtArguments) -> Iterator[Problem]:
    """Yield the problems of settings beside prompts with images."""
    if config.use_vllm:
        reason = "completions of prompts with images are sampled by transformers only"
        yield Problem("use_vllm", True, reason, "Set use_vllm: false.")
    if splits_weights():
        reason = "gradients of weights that are split over processes are untested where prompts have images"
        yield Problem("the launch", ABSENT, reason, "Launch with --accelerate_config ddp, or ZeRO 1 or 2.")
    parallel = config.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        reason = "an image has no place in a sequence that is spread over processes"
        yield Problem("parallelism_config", ABSENT, reason, "Leave it out.")


def rollout_problems(given: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems of TRL's arguments that make rollouts, by name, beside prompts with images."""
    for name in (name for name, argument in given.items() if argument):
        reason = "images in the prompt are shown to completions of a single turn only"
        yield Problem(name, ABSENT, reason, f"Remove {name}, or use prompts of text.")
