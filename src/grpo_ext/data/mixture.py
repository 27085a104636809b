"""Mixtures, the key `datasets`: checked before anything is loaded, then put together as TRL's `get_dataset` does."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import datasets
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from grpo_ext.config.spec import Spec
from grpo_ext.data import files as local_files
from grpo_ext.data.config import DataConfig, is_size, value_problems
from grpo_ext.data.held_out import hold_out
from grpo_ext.data.loading import call_loader, collecting, load_files, load_split
from grpo_ext.data.prepare import AnyDataset
from grpo_ext.data.rows import ANSWER_COLUMNS, PROMPT_COLUMNS, unusable, with_system_prompt
from grpo_ext.errors import ABSENT, DataError, Problem
from grpo_ext.objective.options import Within
from grpo_ext.registry import did_you_mean

_ENTRY = Spec.of(DatasetConfig, example="{path: ..., split: train}")
DATASET_ENTRY = replace(
    _ENTRY, hints={**_ENTRY.hints, "split": str, "fraction": Annotated[float, Within(above=0.0)] | None}
)
"""An entry of `datasets`."""


def check_mixture(mixture: DatasetMixtureConfig, config: DataConfig | None = None) -> None:
    """Refuse a mixture that cannot be loaded with these settings, as far as it shows without loading.

    Raises:
        DataError: every problem.
    """
    entries, size, streaming = mixture.datasets, mixture.test_split_size, {"streaming": True}
    problems = [problem for number, entry in enumerate(entries) for problem in _entry_problems(number, entry)]
    problems += _fraction_problems([entry.fraction for entry in entries], mixture.streaming)
    problems += [] if config is None else value_problems(config)
    if config is not None and config.max_samples is not None and mixture.streaming and len(entries) > 1:
        reason = "streams have no lengths to take a share of, so the rows would all be the first dataset's"
        cure = "Set streaming: false, or remove max_samples."
        problems.append(Problem("max_samples", config.max_samples, reason, cure, streaming))
    if size is not None and mixture.streaming:
        reason = "rows cannot be held out from a stream"
        problems.append(Problem("test_split_size", size, reason, "Unset one of them.", streaming))
    if size is not None and not (isinstance(size, int | float) and is_size(size)):
        reason = "must be a fraction between 0 and 1, or a whole number of rows from 1 up"
        problems.append(Problem("test_split_size", size, reason, "Correct it, or leave it unset."))
    if problems:
        raise DataError(problems)


def _entry_problems(number: int, entry: DatasetConfig) -> Iterator[Problem]:
    place = f"datasets[{number}]"
    if isinstance(entry.path, str) and entry.path.lstrip().startswith(("{", "[")):  # JSON
        yield Problem(
            "datasets", entry.path, "a mixture cannot be given on the command line", "Write it in the recipe."
        )
    elif problems := [*DATASET_ENTRY.problems(place, vars(entry))]:
        yield from problems
    elif not entry.path or not entry.split or entry.columns == []:
        yield Problem(place, ABSENT, "path, split or columns is empty", f"Write {DATASET_ENTRY.example}.")
    elif _is_plain(entry) and local_files.is_path(entry.path):
        yield from local_files.data_path_problems(entry.path, f"{place}.path")


def _fraction_problems(fractions: list[float | None], streaming: bool) -> Iterator[Problem]:
    shares = [fraction for fraction in fractions if fraction is not None]
    if shares and streaming:
        reason = "a stream has no length to take a share of"
        yield Problem("fraction", shares[0], reason, "Unset one of them.", {"streaming": True})
    elif shares and len(shares) < len(fractions):
        field, reason = f"datasets[{fractions.index(None)}].fraction", "other datasets have one"
        yield Problem(field, None, reason, "Set it for every dataset or for none.")


def is_local(mixture: DatasetMixtureConfig) -> bool:
    """Return whether the mixture needs no download."""
    return all(
        _named_files(entry) or (_is_plain(entry) and local_files.is_path(entry.path)) for entry in mixture.datasets
    )


def load_mixture(
    mixture: DatasetMixtureConfig, config: DataConfig, *, by_prompt: bool = True
) -> dict[str, AnyDataset]:
    """Return the datasets of a mixture as one, under `train`, and under `test` what `test_split_size` holds out.

    `max_samples` takes from each dataset its share; `by_prompt` is that of `hold_out`.

    Raises:
        DataError: as `check_mixture`, or a dataset, a split or a column does not exist, or the datasets do not fit.
    """
    check_mixture(mixture, config)
    parts, problems = [], list[Problem]()
    for number, entry in enumerate(mixture.datasets):
        with collecting(problems):
            parts.append(_load_entry(number, entry, config, mixture.streaming))
    parts = _with_one_name(parts, config)
    if problems := problems or list(_differences(mixture.datasets, parts, config)):
        raise DataError(problems)
    fractions = [entry.fraction for entry in mixture.datasets if entry.fraction is not None]
    if fractions:
        total = sum(fractions)
        rows = min(len(part) * total / fraction for part, fraction in zip(parts, fractions, strict=True))
        counts = [round(fraction / total * rows) for fraction in fractions]
        if 0 in counts:
            number = counts.index(0)
            reason = f"no row of {mixture.datasets[number].path} would be left of the {sum(counts)} of the mixture"
            cure = "Set a larger fraction, or leave that dataset out."
            raise DataError([Problem(f"datasets[{number}].fraction", fractions[number], reason, cure)])
        parts = [part.select(range(count)) for part, count in zip(parts, counts, strict=True)]
    if config.max_samples is not None and not mixture.streaming:
        parts = _first_of_each(parts, mixture.datasets, config.max_samples)
    whole = call_loader(datasets.concatenate_datasets, parts, source="datasets (put together)")
    size = mixture.test_split_size
    if size is None:
        return {"train": whole}
    names = [config.prompt_column] if config.prompt_column else PROMPT_COLUMNS
    column = next((name for name in names if name in _names(whole)), "")
    number = math.ceil(size * len(whole)) if size < 1 else int(size)  # the command line makes 5.0 of 5
    train, test = hold_out(  # seeded; without a seed, as TRL does it, every process would hold out other rows
        whole,
        number,
        config.split_seed,
        setting="test_split_size",
        value=size,
        column=column,
        by_prompt=by_prompt and bool(column),
    )
    return {"train": train, "test": test}


def _first_of_each(parts: list[Any], entries: list[DatasetConfig], most: int) -> list[Any]:
    """Return the first rows of each dataset, `most` in all, in the proportion of their lengths."""
    lengths = [len(part) for part in parts]
    if most >= sum(lengths):
        return parts
    ends = [round(most * end / sum(lengths)) for end in accumulate(lengths, initial=0)]
    counts = [end - start for start, end in pairwise(ends)]
    if 0 in counts:
        number = counts.index(0)
        share = f"by its share of {lengths[number]} in {sum(lengths)} rows"
        reason = f"no row of datasets[{number}] ({entries[number].path}) would be left, {share}"
        cure = f"Set max_samples: {-(-sum(lengths) // min(lengths))}, or leave that dataset out."
        raise DataError([Problem("max_samples", most, reason, cure)])
    return [part.select(range(count)) for part, count in zip(parts, counts, strict=True)]


def _with_one_name(parts: list[Any], config: DataConfig) -> list[Any]:
    """Give columns of prompts and of answers one name where the datasets differ: `question` here, `problem` there.

    Text in `prompt` goes to the model as it stands, and text in a column of another name as a message. So prompts are
    called `prompt` only where one of the datasets calls them so, and text from the others becomes a message there.
    """
    for chosen, usual in _column_names(config):
        named = [next((name for name in usual if name in _names(part)), None) for part in parts]
        if chosen is not None or len(set(named)) < 2:
            continue
        prompts = usual is PROMPT_COLUMNS
        common = usual[0] if usual[0] in named or not prompts else next(name for name in named if name)
        for i, name in enumerate(named):
            if name not in (None, common):
                parts[i] = parts[i].rename_column(name, common)
        if prompts and common == usual[0] and config.system_prompt is None:
            kinds = [getattr((part.features or {}).get(common), "dtype", "") for part in parts]
            texts = [i for i, kind in enumerate(kinds) if kind == "string"]
            if len({named[i] == common for i in texts}) > 1:
                other = next(named[i] for i in texts if named[i] != common)
                reason = f"text in {common!r} would go to the model as it stands, and in {other!r} as a message"
                cure = "Give the columns one name in the files, or set system_prompt: then all are messages."
                raise unusable("datasets", reason, cure)
            texts = [i for i in texts if named[i] != common]
            for i in texts:
                parts[i] = parts[i].map(lambda row: {"prompt": with_system_prompt(row["prompt"], None)})
    return parts


def _column_names(config: DataConfig) -> list[tuple[str | None, Sequence[str]]]:
    """Return the chosen and the usual names of the column of prompts, and of that of answers."""
    return [(config.prompt_column, PROMPT_COLUMNS), (config.answer_column, ANSWER_COLUMNS)]


def _names(part: AnyDataset) -> list[str]:
    return list(part.column_names or next(iter(part), {}))


def _differences(entries: list[DatasetConfig], parts: list[Any], config: DataConfig) -> Iterator[Problem]:
    """Yield why datasets cannot be one: no prompts, no answers beside others that have them, or other types."""
    every = {name for part in parts for name in _names(part)}
    for number, (entry, part) in enumerate(zip(entries, parts, strict=True)):
        names = _names(part)
        absent = [
            " or ".join([chosen] if chosen else usual)
            for chosen, usual in _column_names(config)
            if (wanted := chosen or next((column for column in usual if column in every), None)) in every
            and wanted not in names
        ]
        if absent:
            reason = f"no column {', and none '.join(absent)}, as others have. Its columns: {', '.join(names)}"
            cure = "Rename them in the file, or leave this dataset out."
            yield Problem(f"datasets[{number}] ({entry.path})", ABSENT, reason, cure)
    first: dict[str, tuple[Any, str]] = {}
    for entry, part in zip(entries, parts, strict=True):
        for column, feature in (part.features or {}).items():
            first_feature, path = first.setdefault(column, (feature, entry.path))
            if {getattr(first_feature, "dtype", ""), getattr(feature, "dtype", "")} == {"string", "int64"}:
                reason = f"column {column!r} holds text in one of {path} and {entry.path}, numbers in the other"
                yield Problem("datasets", ABSENT, reason, "Write the numbers in quotes, as text.")


def _load_entry(number: int, entry: DatasetConfig, config: DataConfig, streaming: bool) -> Any:
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
    if unknown := [column for column in entry.columns if column not in names]:
        field = f"datasets[{number}] ({entry.path}), columns"
        reasons = [(f"{column!r} is not a column", did_you_mean(column, names)) for column in unknown]
        raise DataError([Problem(field, ABSENT, reason, cure) for reason, cure in reasons])
    return dataset.select_columns(entry.columns)


def _is_plain(entry: DatasetConfig) -> bool:
    return entry.data_files is None and entry.data_dir is None


def _named_files(entry: DatasetConfig) -> list[Path]:
    """Return the local files of the split that `data_files` names for a builder such as `json`, if all exist."""
    names: Any = entry.data_files
    if entry.path not in local_files.BUILDERS.values() or entry.data_dir is not None or not names:
        return []
    names = names.get(entry.split, []) if isinstance(names, dict) else names
    files = [Path(name).expanduser() for name in ([names] if isinstance(names, str) else names)]
    fits = all(file.is_file() and local_files.BUILDERS.get(file.suffix) == entry.path for file in files)
    return files if fits else []
