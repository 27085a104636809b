"""Datasets from the rows of json and jsonl files; `datasets` would turn "2023-01-05" into a point in time."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import cast

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset

from grpo_ext.data.files import checked_rows, place_of
from grpo_ext.data.rows import Row, RowError, WrittenFloat, check_finite, number_text
from grpo_ext.errors import DataError

STREAM_HEAD = 1000  # rows of a stream that show which columns it has


def read_rows(files: list[Path], texts: Collection[str]) -> Dataset:
    """Return all rows, in memory; a column of `texts` whose numbers Arrow would round becomes text.

    Raises:
        DataError: broken lines, a column of mixed types, a number that cannot be kept, or no row at all.
    """
    rows = [row for _, row in checked_rows(files)]
    columns = {
        name: _column(name, [row.get(name) for row in rows], files, text=name in texts)
        for name in dict.fromkeys(name for row in rows for name in row)
    }
    schema = pa.schema([(name, array.type) for name, (array, _) in columns.items()])
    inferred = datasets.Features.from_arrow_schema(schema)
    features = datasets.Features({name: feature or inferred[name] for name, (_, feature) in columns.items()})
    table = pa.table({name: array for name, (array, _) in columns.items()}, schema=features.arrow_schema)
    return Dataset(table, info=datasets.DatasetInfo(features=features))


def _column(
    name: str, values: list[object], files: list[Path], *, text: bool
) -> tuple[pa.Array, datasets.features.features.FeatureType | None]:
    """Return the Arrow array, and its feature if the array's type does not imply it."""
    as_text = text and any(isinstance(value, WrittenFloat) for value in values)
    if not as_text:
        try:
            array = pa.array(values)
            if not _has_empty_struct(array.type):
                return array, None
        except (pa.ArrowException, OverflowError):  # integers beyond 64 bits or beside floats, mixed types in lists
            as_text = text and all(value is None or isinstance(value, int | float) for value in values)
    _check_each(check_finite if as_text else _check_integers, name, values, files)
    if as_text:
        return pa.array([value if value is None else number_text(cast(float, value)) for value in values]), None
    feature = datasets.Json()
    written = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pa.array(written, type=feature.pa_type), feature


def _check_each(check: Callable[[object, str], None], name: str, values: Iterable[object], files: list[Path]) -> None:
    """Raise for the first value that a check refuses, with its place."""
    for index, value in enumerate(values):
        try:
            check(value, name)
        except RowError as error:
            raise DataError([error.at(place_of(files, index))]) from None


def _check_integers(value: object, column: str) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise RowError(f"the integer {value!r:.60} has more than 64 bits", "Write it as text, in quotes.", column)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(part, column)


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


def stream(files: list[Path], texts: Collection[str]) -> IterableDataset:
    """Return the rows as a stream; numbers of `texts` that a float would round become text.

    A broken line is reported when the stream reaches it.
    """
    return IterableDataset.from_generator(_stream, gen_kwargs={"files": files, "texts": tuple(sorted(texts))})


def _stream(files: list[Path], texts: Collection[str]) -> Iterator[Row]:
    rows = checked_rows(files, limit=1)
    head = list(islice(rows, STREAM_HEAD))
    columns = dict.fromkeys(name for _, row in head for name in row)
    for place, row in chain(head, rows):
        for name, value in row.items():
            if name not in columns:
                reason = f"not in the first {STREAM_HEAD} rows"
                raise DataError([RowError(reason, "Add it there, as null, or turn streaming off.", name).at(place)])
            if name in texts and isinstance(value, WrittenFloat):
                row[name] = value.text
        yield {**columns, **row}
