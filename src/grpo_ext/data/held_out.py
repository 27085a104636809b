"""Rows held out for evaluation: no prompt is on both sides of a split; prompts that two splits share are counted."""

import json
import logging
from collections import Counter
from typing import Any

import numpy as np
from datasets import Dataset

from grpo_ext.data.messages import without_none
from grpo_ext.errors import DataError, Problem

logger = logging.getLogger(__name__)

_IMAGES = {"image", "images"}
"""Columns that make different tasks of one prompt."""


def hold_out(
    dataset: Dataset,
    number: int,
    seed: int,
    *,
    setting: str,
    value: float,
    column: str = "prompt",
    by_prompt: bool = True,
) -> tuple[Dataset, Dataset]:
    """Split a dataset into training rows and `number` evaluation rows, which the setting asks for with this value.

    Rows with the same prompt stay together, so that fewer rows than `number` may be held out. `by_prompt=False` is
    for prompts that do not identify the task, such as those of a game.

    Raises:
        DataError: no row is left to train on.
    """
    rows = len(dataset)
    if number >= rows:
        reason = f"this holds out {number} of {rows} rows and leaves no row to train on"
        raise DataError([Problem(setting, value, reason, f"Set {setting}: 0.1.")])
    keys = _keys(dataset, column) if by_prompt and _IMAGES.isdisjoint(dataset.column_names) else []
    counts = Counter(keys)
    if len(counts) == len(keys):
        parts = dataset.train_test_split(test_size=number, seed=seed)
        return parts["train"], parts["test"]
    chosen = _chosen(counts, number, seed)
    if not chosen:
        reason = f"all {rows} rows have the same prompt, so every evaluation row would also be trained on"
        cure = f"Remove {setting} and set eval_strategy: 'no', or name a test split."
        raise DataError([Problem(setting, value, reason, cure)])
    held = [index for index, key in enumerate(keys) if key in chosen]
    logger.warning(
        "%s=%s: %d of %d rows are held out, those of %d of %d prompts. Rows with the same prompt stay together.",
        *(setting, value, len(held), rows, len(chosen), len(counts)),
    )
    return dataset.select([i for i, key in enumerate(keys) if key not in chosen]), dataset.select(held)


def _chosen(counts: Counter[str], number: int, seed: int) -> set[str]:
    """Prompts in random order, until their rows would be more than `number`; at least one, never all."""
    prompts = list(counts)
    chosen: set[str] = set()
    left = number
    for index in np.random.default_rng(seed).permutation(len(prompts)):
        if counts[prompts[index]] <= left and len(chosen) < len(prompts) - 1:
            chosen.add(prompts[index])
            left -= counts[prompts[index]]
    return chosen or set(sorted(prompts, key=counts.__getitem__)[: min(1, len(prompts) - 1)])


def shared_prompts(train: object, evaluation: object, name: str = "the evaluation data") -> list[str]:
    """Return a warning with the number of evaluation rows whose prompt is trained on; empty if there are none.

    Streams, and prompts with images, are not compared.
    """
    if not isinstance(train, Dataset) or not isinstance(evaluation, Dataset | list):
        return []
    if not _IMAGES.isdisjoint(train.column_names) or "prompt" not in train.column_names:
        return []
    prompts = evaluation["prompt"] if isinstance(evaluation, Dataset) else [row["prompt"] for row in evaluation]
    trained = set(_keys(train, "prompt"))
    shared = sum(_key(prompt) in trained for prompt in prompts)
    return [
        f"{shared} of the {len(prompts)} rows of {name} have a prompt that is also trained on, so their figures do "
        "not show how the model answers new prompts. Remove these prompts from one of the two."
    ][: bool(shared)]


def _keys(dataset: Dataset, column: str) -> list[str]:
    return [_key(row[column]) for row in dataset.select_columns([column])]


def _key(prompt: Any) -> str:
    """Text that two prompts share only if they are the same; Arrow adds keys that are None to messages."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(without_none(prompt), sort_keys=True, default=str)
