"""Mixtures, the key `datasets`: checked before anything is loaded, then put together as TRL's `get_dataset` does."""

import json
import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import datasets

from grpo_ext.data import files as local_files
from grpo_ext.data.config import DataConfig
from grpo_ext.data.held_out import hold_out
from grpo_ext.data.loading import call_loader, load_files, load_split
from grpo_ext.data.prepare import AnyDataset
from grpo_ext.data.rows import ANSWER_COLUMNS, PROMPT_COLUMNS
from grpo_ext.errors import DataError
from grpo_ext.registry import did_you_mean


def check_mixture(mixture: Any, config: DataConfig | None = None) -> None:
    """Refuse a mixture that cannot be loaded with these settings, as far as it shows without loading.

    Raises:
        DataError: every problem, each with value, reason and cure.
    """
    found = [text for number, entry in enumerate(mixture.datasets) for text in _entry_problems(number, entry)]
    found += _fraction_problems([entry.fraction for entry in mixture.datasets], mixture.streaming)
    size = mixture.test_split_size
    if config is not None and config.max_samples is not None and mixture.streaming and len(mixture.datasets) > 1:
        found.append(
            f"max_samples={config.max_samples} with streaming: streams have no lengths to take a share of, so the "
            "rows would all be the first dataset's. Set streaming: false, or remove max_samples."
        )
    if size is not None and mixture.streaming:
        found.append(f"test_split_size={size!r} with streaming: rows cannot be held out from a stream. Unset one.")
    if size is not None and (not _is_positive(size) or (size > 1 and size != int(size))):
        found.append(
            f"test_split_size={size!r} must be a fraction between 0 and 1, or a whole number of rows from 1 up."
        )
    if found:
        raise DataError("\n".join(found))


def _entry_problems(number: int, entry: Any) -> list[str]:
    name = f"datasets[{number}]"
    if not isinstance(entry.path, str) or not entry.path:
        return [f"{name}: path={entry.path!r} must be a name or a path. Write text, in quotes if need be."]
    if _is_json(entry.path):
        return [f"datasets={entry.path!r}: a mixture cannot be given on the command line. Write it in the recipe."]
    found = []
    if not isinstance(entry.split, str) or not entry.split:
        found.append(f"{name}: split={entry.split!r} must be text. Write for example split: train, or leave it out.")
    for key in ("name", "data_dir"):
        value = getattr(entry, key)
        if value is not None and not isinstance(value, str):
            found.append(f"{name}: {key}={value!r} must be text. Put it in quotes, or leave it out.")
    columns = entry.columns
    if columns is not None and not (columns and _is_texts(columns)):
        found.append(f"{name}: columns={columns!r} must be a list of column names. Write columns: [prompt, solution].")
    files = entry.data_files
    if files is not None and not all(
        _is_texts(part) for part in (files.values() if isinstance(files, dict) else [files])
    ):
        found.append(f"{name}: data_files={files!r} must be a path, a list of paths, or a mapping from split to them.")
    if entry.data_files is None and entry.data_dir is None and local_files.is_path(entry.path):
        found += [text.replace("dataset_name=", f"{name}: path=", 1) for text in local_files.path_problems(entry.path)]
    return found


def _fraction_problems(fractions: list[Any], streaming: bool) -> list[str]:
    given = [fraction for fraction in fractions if fraction is not None]
    if not given:
        return []
    if streaming:
        return [f"fraction={given[0]!r} with streaming: a stream has no length to take a share of. Unset one."]
    if len(given) < len(fractions):
        missing = fractions.index(None)
        return [f"datasets[{missing}]: fraction=None, but others have one. Set it for every dataset or for none."]
    if not all(_is_positive(fraction) for fraction in given):
        return [f"datasets: the fractions {given!r} must be numbers above 0. Leave out a dataset that is not wanted."]
    return []


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value))


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list | dict)
    except ValueError:
        return False


def is_local(mixture: Any) -> bool:
    """Whether nothing of the mixture has to be downloaded."""
    return all(
        _named_files(entry) or (_is_plain(entry) and local_files.is_path(entry.path)) for entry in mixture.datasets
    )


def load_mixture(mixture: Any, config: DataConfig, *, by_prompt: bool = True) -> dict[str, AnyDataset]:
    """Return the datasets of a mixture as one, under `train`, and under `test` what `test_split_size` holds out.

    `max_samples` takes from each dataset its share; `by_prompt` is that of `hold_out`.

    Raises:
        DataError: as `check_mixture`, or a dataset, a split or a column is not there, or the datasets do not fit.
    """
    check_mixture(mixture, config)
    parts, found = [], []
    for number, entry in enumerate(mixture.datasets):
        try:
            parts.append(_load_entry(number, entry, config, mixture.streaming))
        except DataError as error:
            found += error.problems
    parts = _with_one_name(parts, config)
    if found := found or list(_differences(mixture.datasets, parts, config)):
        raise DataError("\n".join(found))
    fractions = [entry.fraction for entry in mixture.datasets]
    if fractions[0] is not None:
        total = sum(fractions)
        rows = min(len(part) * total / fraction for part, fraction in zip(parts, fractions, strict=True))
        counts = [round(fraction / total * rows) for fraction in fractions]
        parts = [part.select(range(count)) for part, count in zip(parts, counts, strict=True)]
    if config.max_samples is not None and not mixture.streaming:
        parts = _first_of_each(parts, mixture.datasets, config.max_samples)
    whole = call_loader(datasets.concatenate_datasets, parts, source="datasets (put together)")
    size = mixture.test_split_size
    if size is None:
        return {"train": whole}
    names = [config.prompt_column] if config.prompt_column else PROMPT_COLUMNS
    column = next((name for name in names if name in _names(whole)), "")
    # without a seed, as TRL does it, every process would hold out other rows
    number = math.ceil(size * len(whole)) if size < 1 else int(size)  # the command line makes 5.0 of 5
    split: dict[str, Any] = {
        "setting": f"test_split_size={size!r}",
        "column": column,
        "by_prompt": by_prompt and bool(column),
    }
    train, test = hold_out(whole, number, config.split_seed, **split)
    return {"train": train, "test": test}


def _first_of_each(parts: list[Any], entries: list[Any], most: int) -> list[Any]:
    """The first rows of each dataset, `most` in all, in the proportion of their lengths.

    Raises:
        DataError: a dataset would have no row.
    """
    lengths = [len(part) for part in parts]
    if most >= sum(lengths):
        return parts
    ends = [round(most * end / sum(lengths)) for end in accumulate(lengths, initial=0)]
    counts = [end - start for start, end in pairwise(ends)]
    if 0 in counts:
        number = counts.index(0)
        raise DataError(
            f"max_samples={most}: no row of datasets[{number}] ({entries[number].path}) would be left, by its share "
            f"of {lengths[number]} in {sum(lengths)} rows. Set max_samples: {-(-sum(lengths) // min(lengths))}, or "
            "leave that dataset out."
        )
    return [part.select(range(count)) for part, count in zip(parts, counts, strict=True)]


def _with_one_name(parts: list[Any], config: DataConfig) -> list[Any]:
    """Where some call their prompts (or answers) otherwise than others, under one name: `question` is a `prompt`."""
    for chosen, usual in ((config.prompt_column, PROMPT_COLUMNS), (config.answer_column, ANSWER_COLUMNS)):
        named = [next((name for name in usual if name in _names(part)), None) for part in parts]
        if chosen is None and len(set(named)) > 1:
            parts = [
                part if name in (None, usual[0]) else part.rename_column(name, usual[0])
                for part, name in zip(parts, named, strict=True)
            ]
    return parts


def _names(part: Any) -> list[str]:
    return list(part.column_names or next(iter(part), {}))


def _differences(entries: list[Any], parts: list[Any], config: DataConfig) -> Iterator[str]:
    """Datasets that cannot be one: without prompts, without the others' answers, or with other types in a column."""
    every = {name for part in parts for name in _names(part)}
    for number, (entry, part) in enumerate(zip(entries, parts, strict=True)):
        names, name = _names(part), f"datasets[{number}] ({entry.path})"
        absent = [
            " or ".join([chosen] if chosen else usual)
            for chosen, usual in ((config.prompt_column, PROMPT_COLUMNS), (config.answer_column, ANSWER_COLUMNS))
            if (wanted := chosen or next((column for column in usual if column in every), None)) in every
            and wanted not in names
        ]
        if absent:
            yield (
                f"{name} has no column {', and none '.join(absent)}, as others have. Its columns: {', '.join(names)}. "
                "Rename them in the file, or leave this dataset out."
            )
    first: dict[str, tuple[Any, str]] = {}
    for entry, part in zip(entries, parts, strict=True):
        for column, feature in (part.features or {}).items():
            known, path = first.setdefault(column, (feature, entry.path))
            if {getattr(known, "dtype", ""), getattr(feature, "dtype", "")} == {"string", "int64"}:
                yield (
                    f"datasets: column {column!r} holds text in one of {path} and {entry.path}, numbers in the other. "
                    "Write the numbers in quotes, as text."
                )


def _load_entry(number: int, entry: Any, config: DataConfig, streaming: bool) -> Any:
    source = f"datasets[{number}] ({entry.path}), split {entry.split}"
    files = _named_files(entry)
    if files and files[0].suffix in (".json", ".jsonl"):
        dataset: Any = load_files(files, config, streaming, entry.split, source).dataset
    elif _is_plain(entry) and local_files.is_path(entry.path):
        split = load_split(entry.path, config, entry.name, streaming, entry.split)
        assert split is not None
        dataset = split.dataset
    else:
        keywords = {key: getattr(entry, key) for key in ("name", "data_dir", "data_files", "split")}
        dataset = call_loader(datasets.load_dataset, entry.path, streaming=streaming, source=source, **keywords)
    if entry.columns is None:
        return dataset
    names = _names(dataset)
    unknown = [column for column in entry.columns if column not in names]
    if unknown:
        raise DataError(
            "\n".join(
                f"datasets[{number}] ({entry.path}): columns has {column!r}, which is no column. "
                f"{did_you_mean(column, names)}"
                for column in unknown
            )
        )
    return dataset.select_columns(entry.columns)


def _is_plain(entry: Any) -> bool:
    return entry.data_files is None and entry.data_dir is None


def _named_files(entry: Any) -> list[Path]:
    """The local files of the split that `data_files` names for a builder such as `json`; none if one is not there."""
    if entry.path not in local_files.BUILDERS.values() or entry.data_dir is not None or not entry.data_files:
        return []
    given = entry.data_files
    if isinstance(given, dict):
        given = given.get(entry.split, [])
    files = [Path(name).expanduser() for name in ([given] if isinstance(given, str) else given)]
    fits = all(file.is_file() and local_files.BUILDERS.get(file.suffix) == entry.path for file in files)
    return files if fits else []
