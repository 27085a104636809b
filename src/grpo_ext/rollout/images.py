"""Prompts with images: rendered and tokenized each by itself, once for all completions of a prompt."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_ext.config.images import described, images_in
from grpo_ext.errors import ABSENT, DataError, Problem
from grpo_ext.objective.trajectory import Trajectory
from grpo_ext.packing.images import OF_TOKENS, RowImages, joined_fields, no_images, row_images
from grpo_ext.rollout.rollout_batch import Generated

Tokenized = tuple[list[list[int]], list[Any] | None, dict[str, Any]]
"""The result of TRL's `_tokenize_prompts`: ids, images and further tensors of the prompts."""
Alone = Callable[[Any, int | None], Tokenized]
"""Tokenizes one prompt as TRL does, with the tools of the row of this number, or with none."""


def each_alone(stock: Alone, prompts: list) -> tuple[Tokenized, list[RowImages]]:
    """Tokenize prompts, some with images, each by itself with `stock`; completions of one prompt share it.

    Returns TRL's result, and the images of each prompt.

    Raises:
        DataError: the processor fails on one of them.
    """
    ids: list[list[int]] = []
    rows: list[RowImages] = []
    for i, prompt in enumerate(prompts):
        if i and prompt == prompts[i - 1]:
            ids.append(ids[-1])
            rows.append(rows[-1])
            continue
        try:
            (row_ids,), _, fields = stock(prompt, i)
        except Exception as error:  # of the processor: a side that is too long, a mark of an image in a text
            reason = f"the processor fails on {described(prompt)!r:.160} ({type(error).__name__}: {error})"
            raise DataError([Problem("prompt", ABSENT, reason, "Correct the row, or remove it.")]) from error
        ids.append(list(row_ids))
        rows.append(row_images(fields, len(images_in(prompt))))
    return (ids, [images_in(prompt) or None for prompt in prompts], fields_of(ids, rows)), rows


def fields_of(ids: Sequence[Sequence[int]], rows: Sequence[RowImages]) -> dict[str, Any]:
    """Return the inputs of a model beside the tokens `ids` of rows, as TRL passes them to its turns."""
    found: dict[str, Any] = joined_fields(rows)
    for name in (name for name in OF_TOKENS if any(name in row for row in rows)):
        both = zip(ids, rows, strict=True)
        found[name] = [row[name].tolist() if name in row else [0] * len(tokens) for tokens, row in both]
    return found


def with_images_of(trajectories: Sequence[Trajectory], generated: Generated) -> Generated:
    """Return rollouts with the images of their trajectories, and those that environments have added to the prompt."""
    images = [one.turns[-1].images for one in trajectories]
    if not any(images):
        return generated
    added = [of[len(images_in(one.opening)) :] for of, one in zip(images, trajectories, strict=True)]
    return generated._replace(images=[of or None for of in images], tool_images=added)


def images_of_row(stock: Alone, ids: Sequence[int], images: Sequence[Any] | None) -> RowImages:
    """Return the images of a row with these tokens, wherever they are: in its prompt, or among what tools returned.

    Their tensors are those of a message with all of them, and a token has the type that it has there.
    """
    if not images:
        return no_images()
    (made,), _, fields = stock(
        [{"role": "user", "content": [{"type": "image", "image": one} for one in images]}], None
    )
    row = row_images(fields, len(images))
    for name in (name for name in OF_TOKENS if name in row):
        types = dict(zip(made, row[name].tolist(), strict=True))
        row[name] = torch.tensor([types.get(token, 0) for token in ids])
    return row
