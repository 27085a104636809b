"""Rows as they are read: paths and bytes become pictures, and prompts have no gaps."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, IterableDataset, List, Value
from trl.data_utils import prepare_multimodal_messages

from grpo_ext.config.rules import IMAGE_COLUMNS, columns_of_images
from grpo_ext.data.messages import without_gaps
from grpo_ext.data.rows import Row, RowError, parse_chat
from grpo_ext.errors import ABSENT, DataError, Problem

ONE, SEVERAL = IMAGE_COLUMNS
_WHOLE = List({"role": Value("string"), "content": Value("string")})
"""Prompts in which no key can be missing."""


def image_columns(*data: Any) -> list[str]:
    """Return the names of columns of images of some datasets, or mappings of them."""
    every = [each for one in data for each in (one.values() if isinstance(one, Mapping) else [one])]
    names = [name for dataset in every for name in (getattr(dataset, "column_names", None) or ())]
    return columns_of_images(names)


def with_opened_images(dataset: Any, source: str, folder: Path | None = None) -> Any:
    """Return a dataset whose columns of images hold pictures; any other dataset as it is.

    Args:
        dataset: its images are paths, bytes, {'bytes': ..., 'path': ...} or pictures.
        source: its name in an error.
        folder: relative paths count from there; None: from the working directory.

    Raises:
        DataError: a column does not hold images, a file does not exist, or a prompt with images is text.
    """
    names = image_columns(dataset)
    if not names:
        return dataset
    problems = [*_shapes(dataset, names, source)]
    if isinstance(dataset, Dataset) and not problems:
        problems += [*_missing(dataset, names, source, folder), *_texts(dataset, names, source)]
    if problems:
        raise DataError(problems)
    for name in names if isinstance(dataset, Dataset) else ():
        dataset = _opened(dataset, name, folder)
    return dataset


def _leaf(dataset: Any, name: str) -> Any:
    feature = dataset.features[name]
    return feature.feature if isinstance(feature, List) else feature


def _shapes(dataset: Dataset | IterableDataset, names: list[str], source: str) -> Iterator[Problem]:
    """Yield columns with values other than images, or with lists under the wrong name."""
    for name in names:
        place, cure = f"{source}, column {name!r}", "Give paths, bytes or pictures."
        if isinstance(dataset, IterableDataset) and not isinstance((dataset.features or {}).get(name), Image | List):
            yield Problem(place, ABSENT, "a stream's paths are not opened", "Set dataset_streaming: false.")
            continue
        leaf, listed = _leaf(dataset, name), isinstance(dataset.features[name], List)
        if listed != (name == SEVERAL):
            held, other = ("lists", SEVERAL) if listed else ("single values", ONE)
            yield Problem(place, ABSENT, f"it holds {held}", f"Rename the column to {other!r}.")
        elif not isinstance(leaf, Image) and not _is_path(leaf) and not _is_bytes(leaf):
            yield Problem(place, ABSENT, f"it holds {leaf}", cure)


def _is_path(leaf: Any) -> bool:
    return isinstance(leaf, Value) and leaf.dtype in ("string", "large_string")


def _is_bytes(leaf: Any) -> bool:
    binary = isinstance(leaf, Value) and leaf.dtype in ("binary", "large_binary")
    return binary or (isinstance(leaf, dict) and set(leaf) == {"bytes", "path"})


def _missing(dataset: Dataset, names: list[str], source: str, folder: Path | None) -> Iterator[Problem]:
    """Yield the first path without a file."""
    for name in (name for name in names if _is_path(_leaf(dataset, name))):
        for index, values in enumerate(dataset.select_columns([name])[name]):
            for path in _listed(values):
                if path is not None and not _in_folder(path, folder).is_file():
                    error = RowError(f"no file {path!r}", "Paths count from the folder of the data's file.", name)
                    yield error.at(f"{source}, row {index} (from 0)")
                    return


def _texts(dataset: Dataset, names: list[str], source: str) -> Iterator[Problem]:
    """Yield the first prompt that is text, in which an image would have no place."""
    if "prompt" in dataset.column_names and isinstance(parse_chat(dataset[:1]["prompt"][0], "prompt"), str):
        reason = f"the prompts are text, and an image ({names[0]!r}) needs a message"
        yield Problem(f"{source}, column 'prompt'", ABSENT, reason, "Write [{role: user, content: ...}].")


def _in_folder(path: str, folder: Path | None) -> Path:
    return (folder or Path()) / Path(path).expanduser()


def _opened(dataset: Dataset, name: str, folder: Path | None) -> Dataset:
    leaf = _leaf(dataset, name)
    if isinstance(leaf, Image):
        return dataset
    if _is_path(leaf):

        def absolute(values: Any) -> dict[str, Any]:
            whole = [None if path is None else str(_in_folder(path, folder).absolute()) for path in _listed(values)]
            return {name: whole if isinstance(values, list) else whole[0]}

        dataset = dataset.map(absolute, input_columns=name, load_from_cache_file=False)
    picture = Image(mode="RGB")
    return dataset.cast_column(name, List(picture) if name == SEVERAL else picture)


def as_read(dataset: Any) -> Any:
    """Return a dataset whose rows have prompts without the gaps of Arrow, and images that are opened and have a place.

    A stream, and a dataset that the caller reads in a way of its own, stay as they are.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] is not None:
        return dataset
    images = {name: _leaf(dataset, name) for name in image_columns(dataset)}
    prompt = dataset.features.get("prompt")
    if not images and (prompt is None or isinstance(prompt, Value) or prompt == _WHOLE):
        return dataset
    for name, leaf in images.items():
        closed = Image(mode=leaf.mode, decode=False)
        dataset = dataset.cast_column(name, List(closed) if name == SEVERAL else closed)
    return dataset.with_transform(partial(_read, modes={name: leaf.mode for name, leaf in images.items()}))


def _read(batch: Mapping[str, list[Any]], modes: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Return rows as they are read."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    for row in rows:
        row |= {"prompt": without_gaps(row["prompt"])} if "prompt" in row else {}
        for name in modes.keys() & row.keys():
            opened = [_picture(one, modes[name], name, row) for one in _listed(row[name]) if one is not None]
            row[name] = opened if name == SEVERAL else next(iter(opened), None)
        with_images(row)
    return {name: [row[name] for row in rows] for name in batch}


def images_as_stored(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the images of each row as a file holds them, paths or bytes; nothing of a row of other data."""
    names = image_columns(dataset)
    if not isinstance(dataset, Dataset) or not names:
        yield from ({} for _ in dataset)
        return
    for row in dataset.with_format(None).select_columns(names):
        stored = {name: [_stored(one) for one in _listed(row[name])] for name in names}
        yield {name: values if name == SEVERAL else values[0] for name, values in stored.items()}


def _stored(image: dict[str, Any] | None) -> Any:
    return image["path"] if image is not None and image["bytes"] is None else image


def with_images(row: Mapping[str, Any]) -> Any:
    """Return a row's prompt with its images in it, as TRL puts them.

    Raises:
        DataError: there are more or fewer images than places for them.
    """
    prompt = without_gaps(row.get("prompt"))
    names = columns_of_images(list(row))
    images = [image for image in _listed(row[names[-1]]) if image is not None] if names else []
    if isinstance(prompt, str) and images:
        raise _unusable(
            "the prompt is text, which has no place for images", "Write [{role: user, content: ...}].", names[-1], row
        )
    if not names or not isinstance(prompt, list):
        return prompt
    try:
        placed = prepare_multimodal_messages(prompt, images=images)
    except ValueError as error:
        cure = "Give as many images as there are {'type': 'image'} in the messages, or text in place of such parts."
        raise _unusable(str(error).rstrip("."), cure, names[-1], row) from error
    return placed if images else prompt


def _picture(value: Any, mode: str | None, name: str, row: Row) -> Any:
    try:
        return Image(mode=mode).decode_example(value)
    except Exception as error:  # PIL has many
        shown = value.get("path") or f"{len(value.get('bytes') or b'')} bytes"
        reason = f"the image ({shown}) cannot be opened ({type(error).__name__}: {error})"
        raise _unusable(reason, "Correct or remove it.", name, row) from error


def _unusable(reason: str, cure: str, name: str, row: Mapping[str, Any]) -> DataError:
    return DataError([RowError(reason, cure, name).at(f"the row with the prompt {row.get('prompt')!r:.160}")])


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]
