"""Images of rows: what the processor made of each prompt by itself, and its parts joined for a forward.

Processors differ in what the first dimension of a tensor counts: patches, tiles, images or prompts. The tensors of a
single prompt all belong to its row, whatever they count, so rows can be moved, left out and joined without knowing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

IMAGES: Final = "images"
"""Key of a micro-batch: the images of each row."""
COUNT: Final = "num_images"
OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""Tensors with a number for each token: 0 for text, others for images."""
_TOKENS = ("input_ids", "attention_mask")

RowImages: TypeAlias = dict[str, Tensor]
"""Tensors that a processor made of one prompt beside its tokens, on the CPU, and the number of its images."""


def row_images(fields: Mapping[str, Any], count: int) -> RowImages:
    """Return the images of a prompt from what its processor made of that prompt by itself, a batch of one."""
    tensors = {name: torch.as_tensor(np.asarray(value)) for name, value in fields.items() if name not in _TOKENS}
    row = {name: value[0] if name in OF_TOKENS else value for name, value in tensors.items()}
    return {**row, COUNT: torch.tensor(count)}


def no_images() -> RowImages:
    """Return the images of a row that has none, beside rows whose processor was not asked."""
    return {COUNT: torch.tensor(0)}


def joined_fields(rows: Sequence[RowImages]) -> dict[str, Tensor]:
    """Join tensors of several rows, padded with 0 to the largest, but for those with a number for each token."""
    names = dict.fromkeys(name for row in rows for name in row if name not in (COUNT, *OF_TOKENS))
    fields: dict[str, Tensor] = {}
    for name in names:
        tensors = [row[name] for row in rows if name in row]
        largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        fields[name] = tensors[0].new_zeros(sum(map(len, tensors)), *largest)
        for part, tensor in zip(fields[name].split([*map(len, tensors)]), tensors, strict=True):
            part[:, *map(slice, tensor.shape[1:])] = tensor
    return fields


def joined_types(rows: Sequence[RowImages], mask: Tensor, completion: int) -> dict[str, Tensor]:
    """Return the types of tokens, [rows, width]: those of prompts, and 0 for completions, unless these have images."""
    names = dict.fromkeys(name for row in rows for name in row if name in OF_TOKENS)
    lengths = mask[:, : mask.shape[1] - completion].sum(dim=1).tolist()
    types = {name: torch.zeros(mask.shape, dtype=torch.long) for name in names}
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        for name in names if names.keys() <= row.keys() else ():
            if len(row[name]) < length:
                raise RuntimeError(f"row {i} has a prompt of {length} tokens, and {name} of {len(row[name])} tokens.")
            place = types[name][i, mask.shape[1] - completion - length :][: len(row[name])]
            place.copy_(row[name][: len(place)])
    return types


def forward_arguments(rows: Sequence[RowImages], mask: Tensor, completion: int) -> dict[str, Any]:
    """Return the arguments of TRL's forward for whole rows, whose attention mask is `mask`."""
    fields = joined_fields(rows)
    arguments: dict[str, Any] = {**fields, **joined_types(rows, mask, completion)}
    arguments = {name: value.to(mask.device) for name, value in arguments.items()}
    if "pixel_values" in fields:
        arguments[COUNT] = [int(row[COUNT]) for row in rows]
        if not {"image_grid_thw", "image_position_ids"} & fields.keys():  # TRL would guess what is counted
            arguments["num_tiles"] = [len(row["pixel_values"]) if "pixel_values" in row else 0 for row in rows]
    return arguments
