"""Check what a loaded model cannot compute right: lengths, and images in its batches."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.images import image_problems, images_in, rollout_problems
from grpo_ext.data.chat_template import prompt_ids
from grpo_ext.data.images import image_columns
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.packing.images import COUNT, RowImages
from grpo_ext.packing.rotary import fix_rotary, growing, longest_possible, unchanged_until

logger = logging.getLogger(__name__)


def fix_lengths(
    models: Sequence[PreTrainedModel],
    args: GRPOExtConfig,
    longest_row: Callable[[], float],
    *,
    adapter: bool,
    warns: bool,
) -> None:
    """Fix rotary embeddings that change with the length, where prompt and completion may cross the change.

    Args:
        models: the policy, and its reference if that is another model.
        args: settings.
        longest_row: returns the most tokens of a prompt and its completion; infinite where that is not known.
        adapter: whether only an adapter's weights are saved.
        warns: whether this process logs what it does.

    Raises:
        ConfigError: they may, and the model's own code is unknown, or its weights are those of an adapter only.
    """
    config = models[0].config
    if (kind := growing(config)) is None:
        return
    limit, most = unchanged_until(config), longest_possible(config)
    if args.use_vllm:  # which fixes them by what it is started for
        longest = most if kind == "dynamic" else args.vllm_max_model_length or most
    else:
        longest = int(min(most, longest_row()))
    if longest <= limit:
        return
    why = f"its {kind} rotary embeddings change beyond {limit} tokens, which prompt and completion may exceed"
    keep = f"lower max_completion_length and max_prompt_length to {limit} tokens together"
    problem = partial(Problem, "model_name_or_path", config._name_or_path or ABSENT)
    if adapter:
        why += ", and an adapter, which is saved without them, would be loaded on others"
        cure = "save the base with factors that do not change (longrope: short_factor equal to long_factor)"
        raise ConfigError([problem(why, f"{keep[0].upper()}{keep[1:]}; or {cure}.")])
    for model in models:
        if not fix_rotary(model, longest):
            raise ConfigError([problem(why, f"{keep[0].upper()}{keep[1:]}.")])
    if warns:
        logger.warning(
            f"{why}: all tokens get the frequencies of a row of {longest} tokens, in this run and in the model that "
            f"it saves. To keep those of short rows, {keep}."
        )


def longest_row(tokenizer: Any, options: Mapping[str, Any], train: object, completion: int) -> float:
    """Return the most tokens of a prompt and its completion; infinite where prompts are not known, or hold images."""
    if not isinstance(train, Dataset) or image_columns(train):
        return math.inf
    prompts = (prompt_ids(prompt, tokenizer, options) for prompt in train["prompt"])
    return max(map(len, prompts), default=0) + completion


def check_seen(args: GRPOExtConfig, rollout_func: object = None, prompts: Sequence[Any] = ()) -> None:
    """Refuse settings beside images in the prompts themselves, which no column announced.

    Args:
        args: settings.
        rollout_func: TRL's.
        prompts: with images.

    Raises:
        ConfigError: a setting is not shown to be right for them, or an image is missing.
    """
    problems = [*image_problems(args, ["images"]), *rollout_problems(rollout_func)]
    if any(image is None for prompt in prompts for image in images_in(prompt)):
        cure = "Give as many images as there are {'type': 'image'} in the messages."
        problems.append(Problem("prompt", ABSENT, "a part of type 'image' has no image", cure))
    if problems:
        raise ConfigError(problems)


def check_fields(rows: Sequence[RowImages], accepted: Sequence[str]) -> None:
    """Refuse a processor whose tensors do not all reach the model through TRL's forward, with arguments `accepted`.

    Raises:
        ConfigError: one would be left out.
    """
    if unknown := sorted({name for row in rows for name in row if name not in accepted}):
        reason = f"its processor makes {', '.join(unknown)}, which TRL does not pass to the model"
        raise ConfigError([Problem("model_name_or_path", ABSENT, reason, "Use another model for images.")])
    if any("pixel_values" not in row for row in rows if int(row[COUNT])):
        reason = "its processor returns no pixel_values for a prompt with images"
        raise ConfigError([Problem("model_name_or_path", ABSENT, reason, "Use another model for images.")])
