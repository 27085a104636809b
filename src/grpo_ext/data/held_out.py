"""Rows held out for evaluation: no prompt is on both sides of a split, and what two splits share is counted."""

import json
import logging
from collections import Counter
from typing import Any

import numpy as np
from datasets import Dataset

from grpo_ext.errors import DataError

logger = logging.getLogger(__name__)

_IMAGES = ("image", "images")
"""Columns that make different tasks of one prompt."""


def hold_out(
    dataset: Dataset, number: int, seed: int, *, setting: str, column: str = "prompt", by_prompt: bool = True
) -> tuple[Dataset, Dataset]:
    """Split a dataset into training rows and `number` evaluation rows, as `setting` (name=value) asks for.

    Rows with the same prompt stay together, so that fewer rows than `number` may be held out. `by_prompt=False` is
    for prompts that do not say what the task is, such as those of a game.

    Raises:
        DataError: nothing is left to train on.
    """
    rows, name = len(dataset), setting.partition("=")[0]
    if number >= rows:
        raise DataError(f"{setting} holds out {number} of {rows} rows: none is left to train on. Set {name}: 0.1.")
    keys = _keys(dataset, column) if by_prompt and not set(_IMAGES) & set(dataset.column_names) else []
    counts = Counter(keys)
    if len(counts) == len(keys):
        parts = dataset.train_test_split(test_size=number, seed=seed)
        return parts["train"], parts["test"]
    chosen = _chosen(counts, number, seed)
    if not chosen:
        raise DataError(
            f"{setting}: all {rows} rows have the same prompt, so none can be held out that is not trained on. Remove "
            f"{name} and set eval_strategy: 'no', or name a test split."
        )
    held = [index for index, key in enumerate(keys) if key in chosen]
    logger.warning(
        "%s: %d of %d rows are held out, those of %d of %d prompts. Rows with the same prompt stay together.",
        *(setting, len(held), rows, len(chosen), len(counts)),
    )
    return dataset.select([i for i, key in enumerate(keys) if key not in chosen]), dataset.select(held)


def _chosen(counts: Counter[str], number: int, seed: int) -> set[str]:
    """Prompts in random order, as long as their rows are not more than `number`; at least one, never all."""
    prompts = list(counts)
    chosen: set[str] = set()
    left = number
    for index in np.random.default_rng(seed).permutation(len(prompts)):
        if counts[prompts[index]] <= left and len(chosen) < len(prompts) - 1:
            chosen.add(prompts[index])
            left -= counts[prompts[index]]
    return chosen or set(sorted(prompts, key=counts.__getitem__)[: min(1, len(prompts) - 1)])


def shared_prompts(train: Any, evaluation: Any, name: str = "the evaluation data") -> list[str]:
    """A sentence that counts the evaluation rows whose prompt is trained on; none where there are none.

    Streams, and prompts with images, are not compared.
    """
    if not isinstance(train, Dataset) or not isinstance(evaluation, Dataset | list):
        return []
    if set(_IMAGES) & set(train.column_names):
        return []
    prompts = evaluation["prompt"] if isinstance(evaluation, Dataset) else [row["prompt"] for row in evaluation]
    rows = [_key(prompt) for prompt in prompts]
    trained = set(_keys(train, "prompt"))
    shared = sum(key in trained for key in rows)
    if not shared:
        return []
    return [
        f"{shared} of the {len(rows)} rows of {name} have a prompt that is also trained on, so their figures do not "
        "show how the model answers new prompts. Remove these prompts from one of the two."
    ]


def _keys(dataset: Dataset, column: str) -> list[str]:
    return [_key(row[column]) for row in dataset.select_columns([column])]


def _key(prompt: Any) -> str:
    """Text that two prompts share only if they are the same; Arrow gives messages keys that are None."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps(_without_none(prompt), sort_keys=True, default=str)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
