"""Look at a trainer's data and first batch for what a run would not compute right: prompts, lengths, images."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from peft import PeftModel

from grpo_ext.config.images import image_problems, rollout_problems
from grpo_ext.config.mappings import as_mapping
from grpo_ext.data.chat_template import prompt_ids
from grpo_ext.data.pictures import image_columns
from grpo_ext.data.prompts import PromptLook, unseen_layout
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.packing.images import COUNT, RowImages
from grpo_ext.packing.obstacles import causal_lm
from grpo_ext.packing.rotary import fix_rotary, growing, longest_possible, unchanged_until
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.signatures import callable_name
from grpo_ext.rollout.seeing import images_in

logger = logging.getLogger(__name__)


def check_processor(trainer: Any, *datasets: object) -> None:
    """Refuse datasets with columns of images for a tokenizer, which would write them into the prompt as text.

    Raises:
        ConfigError: it is one.
    """
    found = image_columns(*datasets)
    if found and not trainer._is_vlm:
        reason = f"the processor is a {type(trainer.processing_class).__name__}, so the model would not see the images"
        cure = "Name a model of images and text with its processor, or remove the column."
        raise ConfigError([Problem(f"column {found[0]!r}", ABSENT, reason, cure)])


def check_prompts(trainer: Any, train: object, evaluated: object, *, played: bool) -> None:
    """Look at the first prompts of datasets that no recipe has prepared, and at layouts; log warnings.

    Raises:
        ConfigError: the model would not read the prompts as they are meant.
    """
    tokenizer, options = trainer._tokenizer, as_mapping(trainer.chat_template_kwargs)
    problems, notes, look = list[Problem](), list[Problem](), PromptLook(tokenizer, options, played)
    named = {"train_dataset": train, **(evaluated if isinstance(evaluated, Mapping) else {"eval_dataset": evaluated})}
    for name, dataset in named.items():
        if isinstance(dataset, Dataset) and "prompt" in dataset.column_names:
            found, unmeant = look(dataset, name)
            problems, notes = problems + found, notes + unmeant
    if problems:
        raise ConfigError(problems)
    for reward in trainer.reward_funcs:
        spec = getattr(reward, "spec", None) or RewardSpec(callable_name(reward), reward)
        notes += [note for note, _ in unseen_layout(spec, train, tokenizer, options)]
    for note in notes if trainer.accelerator.is_main_process else ():
        logger.warning(str(note))


def fix_lengths(trainer: Any, train: object, *, played: bool) -> None:
    """Fix rotary embeddings that change with the length, where prompt and completion may cross the change.

    Raises:
        ConfigError: they may, and the model's own code is unknown, or its weights are those of an adapter only.
    """
    config, args = causal_lm(trainer.model).config, trainer.args
    if (kind := growing(config)) is None:
        return
    limit, most = unchanged_until(config), longest_possible(config)
    if trainer.use_vllm:  # which fixes them by what it is started for
        longest = most if kind == "dynamic" else args.vllm_max_model_length or most
    else:
        longest = most if played or not isinstance(train, Dataset) else min(most, _longest_row(trainer, train, most))
    if longest <= limit:
        return
    why = f"its {kind} rotary embeddings change beyond {limit} tokens, which prompt and completion may exceed"
    keep = f"lower max_completion_length and max_prompt_length to {limit} tokens together"
    problem = partial(Problem, "model_name_or_path", trainer.model.config._name_or_path or ABSENT)
    if isinstance(trainer.model, PeftModel):
        why += ", and an adapter, which is saved without them, would be loaded on others"
        cure = "save the base with factors that do not change (longrope: short_factor equal to long_factor)"
        raise ConfigError([problem(why, f"{keep[0].upper()}{keep[1:]}; or {cure}.")])
    for model in filter(None, (trainer.model, trainer.ref_model)):
        if not fix_rotary(causal_lm(trainer.accelerator.unwrap_model(model)), longest):
            raise ConfigError([problem(why, f"{keep[0].upper()}{keep[1:]}.")])
    if trainer.accelerator.is_main_process:
        logger.warning(
            f"{why}: all tokens get the frequencies of a row of {longest} tokens, in this run and in the model that "
            f"it saves. To keep those of short rows, {keep}."
        )


def _longest_row(trainer: Any, train: Dataset, most: int) -> int:
    """Return the most tokens of a prompt and its completion."""
    if image_columns(train):
        return most
    tokenizer, options = trainer._tokenizer, as_mapping(trainer.chat_template_kwargs)
    prompts = (prompt_ids(prompt, tokenizer, options) for prompt in train["prompt"])
    return max(map(len, prompts), default=0) + int(trainer.max_completion_length)


def check_seen(trainer: Any, prompts: list) -> None:
    """Refuse settings beside images in the prompts themselves, which no column announced.

    Raises:
        ConfigError: a setting is not shown to be right for them, or an image is missing.
    """
    rollouts = {name: getattr(trainer, name) for name in ("tools", "rollout_func", "environment_factories")}
    problems = [*image_problems(trainer.args, ["images"]), *rollout_problems(rollouts)]
    if any(image is None for prompt in prompts for image in images_in(prompt)):
        cure = "Give as many images as there are {'type': 'image'} in the messages."
        problems.append(Problem("prompt", ABSENT, "a part of type 'image' has no image", cure))
    if problems:
        raise ConfigError(problems)


def check_fields(rows: Sequence[RowImages], known: Sequence[str]) -> None:
    """Refuse a processor whose tensors do not all reach the model through TRL's forward, with arguments `known`.

    Raises:
        ConfigError: one would be left out.
    """
    if unknown := sorted({name for row in rows for name in row if name not in known}):
        reason = f"its processor makes {', '.join(unknown)}, which TRL does not pass to the model"
        raise ConfigError([Problem("model_name_or_path", ABSENT, reason, "Use another model for images.")])
    if any("pixel_values" not in row for row in rows if int(row[COUNT])):
        reason = "its processor returns no pixel_values for a prompt with images"
        raise ConfigError([Problem("model_name_or_path", ABSENT, reason, "Use another model for images.")])


def images_of_tools() -> Problem:
    """Return the problem of a tool that returned an image."""
    reason = "a tool returned an image, and TRL leaves out all images of a batch where one completion is cut short"
    return Problem("tools", ABSENT, reason, "Return text.")
