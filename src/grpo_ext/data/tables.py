"""Datasets from the rows of json and jsonl files; `datasets` would turn "2023-01-05" into a point in time."""

import json
import math
from collections.abc import Collection, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset

from grpo_ext.data.files import checked_rows, place_of
from grpo_ext.data.json_rows import Written
from grpo_ext.data.rows import number_text
from grpo_ext.errors import DataError

STREAM_HEAD = 1000  # rows of a stream that show which columns it has


class _Unfit(ValueError):
    """A number that no column can hold, and the number of its row."""

    def __init__(self, row: int, reason: str) -> None:
        """`row` counts from 0 over all files."""
        super().__init__(reason)
        self.row = row


def read(files: list[Path], texts: Collection[str]) -> Dataset:
    """All rows, in memory; a column of `texts` whose numbers Arrow would round becomes text.

    Raises:
        DataError: broken lines, a column of mixed types, a number that cannot be kept, or no row at all.
    """
    rows = [row for _, row in checked_rows(files)]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        try:
            columns[name] = _column([row.get(name) for row in rows], name in texts)
        except _Unfit as error:
            raise DataError(f"{place_of(files, error.row)}, column {name!r}: {error}") from None
    schema = pa.schema([(name, array.type) for name, (array, _) in columns.items()])
    inferred = datasets.Features.from_arrow_schema(schema)
    features = datasets.Features({name: feature or inferred[name] for name, (_, feature) in columns.items()})
    table = pa.table({name: array for name, (array, _) in columns.items()}, schema=features.arrow_schema)
    return Dataset(table, info=datasets.DatasetInfo(features=features))


def _column(values: list[Any], text: bool) -> tuple[Any, Any]:
    """Arrow array, and its feature where the array's type does not say it."""
    if text and any(isinstance(value, Written) for value in values):
        return _as_text(values), None
    try:
        array = pa.array(values)
        if not _has_empty_struct(array.type):
            return array, None
    except (pa.ArrowException, OverflowError):  # integers beyond 64 bits or beside floats, mixed types inside lists
        if text and all(value is None or isinstance(value, int | float) for value in values):
            return _as_text(values), None
    for row, value in enumerate(values):
        _check_integers(value, row)
    feature = datasets.Json()
    written = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.array(written, type=feature.pa_type), feature


def _as_text(values: list[Any]) -> pa.Array:
    for row, value in enumerate(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise _Unfit(row, f"{value!r} is no answer. Write null or text, or remove the row.")
    return pa.array([None if value is None else number_text(value) for value in values])


def _check_integers(value: Any, row: int) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise _Unfit(row, f"the integer {value!r:.60} has more than 64 bits. Write it as text, in quotes.")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(part, row)


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Whether an object without keys is part of a type, which no file of Arrow's can hold."""
    if not pa.types.is_nested(kind):
        return False
    inside = [kind.field(number).type for number in range(kind.num_fields)]
    return not inside or any(_has_empty_struct(part) for part in inside)


def select(dataset: Dataset, split: str, spec: str) -> Dataset:
    """What a slice such as `train[:100]` or `train[:10%]` takes of a split."""
    if spec == split:
        return dataset
    parts = datasets.ReadInstruction.from_spec(spec).to_absolute({split: len(dataset)})
    return dataset.select([index for part in parts for index in range(part.from_, part.to)])


def stream(files: list[Path]) -> IterableDataset:
    """The rows as they are read; a broken line is named when the stream gets to its thousand."""
    return IterableDataset.from_generator(_stream, gen_kwargs={"files": files})


def _stream(files: list[Path]) -> Iterator[dict[str, Any]]:
    rows = checked_rows(files, limit=1)
    head = list(islice(rows, STREAM_HEAD))
    columns = dict.fromkeys(name for _, row in head for name in row)
    for place, row in chain(head, rows):
        for name in row:
            if name not in columns:
                reason = f"not in the first {STREAM_HEAD} rows. Add it there, as null, or turn streaming off."
                raise DataError(f"{place}, column {name!r}: {reason}")
        yield {**columns, **row}
