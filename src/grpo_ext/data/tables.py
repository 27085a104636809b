"""Datasets from the rows of json and jsonl files; `datasets` would turn "2023-01-05" into a point in time."""

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset

from grpo_ext.data.files import checked_rows
from grpo_ext.data.rows import Row, RowError
from grpo_ext.errors import DataError

STREAM_HEAD = 1000  # rows of a stream that show which columns it has


def read_rows(files: list[Path]) -> Dataset:
    """Return all rows, in memory.

    Raises:
        DataError: broken lines, a column of mixed types, or no row at all.
    """
    rows = [row for _, row in checked_rows(files)]
    names = dict.fromkeys(name for row in rows for name in row)  # `from_list` reads those of the first row only
    return Dataset.from_dict({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[object]) -> pa.Array:
    """Return an Arrow array, of JSON if Arrow has no type for it.

    `on_mixed_types` of `datasets` would read a text such as "5" beside other types as a number.
    """
    try:
        array = pa.array(values)
        if not _has_empty_struct(array.type):
            return array
    except (pa.ArrowException, OverflowError):  # mixed types in lists, integers that are no float beside floats
        pass
    written = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.array(written, type=datasets.Json.pa_type)


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Return whether a type includes an object without keys, which Arrow cannot write to a file."""
    if not pa.types.is_nested(kind):
        return False
    inside = [kind.field(number).type for number in range(kind.num_fields)]
    return not inside or any(_has_empty_struct(part) for part in inside)


def select(dataset: Dataset, split: str, spec: str) -> Dataset:
    """Return the rows of a slice of a split, such as `train[:100]` or `train[:10%]`."""
    if spec == split:
        return dataset
    parts = datasets.ReadInstruction.from_spec(spec).to_absolute({split: len(dataset)})
    return dataset.select([index for part in parts for index in range(part.from_, part.to)])


def stream(files: list[Path]) -> IterableDataset:
    """Return the rows as a stream; a broken line is reported when the stream reaches it."""
    return IterableDataset.from_generator(_stream, gen_kwargs={"files": files})


def _stream(files: list[Path]) -> Iterator[Row]:
    rows = checked_rows(files, limit=1)
    head = list(islice(rows, STREAM_HEAD))
    columns = dict.fromkeys(name for _, row in head for name in row)
    for place, row in chain(head, rows):
        for name in row:
            if name not in columns:
                reason = f"not in the first {STREAM_HEAD} rows"
                raise DataError([RowError(reason, "Add it there, as null, or turn streaming off.", name).at(place)])
        yield {**columns, **row}
