"""From a name to datasets: hub, local files, folders, procedural tasks; training split and what is held out."""

import dataclasses
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
from datasets import Dataset, DatasetDict, IterableDataset

from grpo_ext.data import files as local_files
from grpo_ext.data import tables, tasks
from grpo_ext.data.config import (
    GAME,
    PROCEDURAL,
    QUICKSTART,
    DataConfig,
    dataset_problems,
    split_problems,
    task_options,
)
from grpo_ext.data.held_out import hold_out
from grpo_ext.data.prepare import AnyDataset, Split, Tokenizer, prepare
from grpo_ext.data.rows import ANSWER_COLUMNS, PROMPT_COLUMNS, Row, unusable
from grpo_ext.errors import DataError, Problem
from grpo_ext.registry import did_you_mean

logger = logging.getLogger(__name__)

T = TypeVar("T")
PROCEDURAL_EVAL_FRACTION = 0.1


def load_datasets(
    dataset_name: str,
    config: DataConfig,
    *,
    dataset_config: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    streaming: bool = False,
    eval_needed: bool,
    tokenizer: Tokenizer = None,
    template_kwargs: Mapping[str, object] = {},
    by_prompt: bool = True,
) -> tuple[AnyDataset, AnyDataset | None]:
    """Load and prepare the training and evaluation dataset; the latter is None unless needed or `test_size` is set.

    `by_prompt` is that of `hold_out`.

    Raises:
        DataError: a setting, a file, a split, a column or rows cannot be used; the message names each with its cure.
    """
    problems = dataset_problems(config, dataset_name, dataset_config=dataset_config, streaming=streaming)
    problems += split_problems(dataset_name, train_split, test_split)
    if problems:
        raise DataError(problems)
    eval_wanted = eval_needed or config.test_size is not None
    train, test = None, None
    if dataset_name.startswith(QUICKSTART):
        from grpo_ext.quickstart import game, task

        rows = game.load_game() if dataset_name == GAME else task.load(**task_options(config))
        train, test = Split(rows[0], f"{dataset_name}, split train"), Split(rows[1], f"{dataset_name}, split test")
    elif dataset_name.startswith(PROCEDURAL):
        train, test = _load_procedural(dataset_name, config, eval_wanted)
    else:
        load = partial(load_split, dataset_name, config, dataset_config, streaming)
        with collecting(problems):
            train = load(train_split)
        with collecting(problems):
            test = load(test_split, optional=True) if eval_wanted else None
    if eval_wanted and test is None and (config.test_size is None or test_split != "test") and not problems:
        problems.append(_no_test_split(dataset_name, train_split, test_split, config.test_size is not None))
    prepared: list[AnyDataset] = []
    for split in (train, test):
        with collecting(problems):
            prepared += [] if split is None else [prepare(split, config, tokenizer, template_kwargs)]
    if problems:
        raise DataError(problems)
    if not eval_wanted or len(prepared) == 2:
        if test is not None and config.test_size is not None and not dataset_name.startswith(PROCEDURAL):
            logger.warning("test_size=%s is not applied: %s exists.", config.test_size, test.source)
        return prepared[0], prepared[1] if eval_wanted else None
    size = config.test_size
    assert size is not None
    number = int(size) if size >= 1 else max(1, round(size * len(prepared[0])))
    return hold_out(prepared[0], number, config.split_seed, setting="test_size", value=size, by_prompt=by_prompt)


def load_generated(
    name: str, config: DataConfig, split: str, tokenizer: Tokenizer, template_kwargs: Mapping[str, object]
) -> AnyDataset | None:
    """Load and prepare a split of a procedural task by itself, for an evaluation set of a recipe.

    The test split of a reasoning_gym task has as many rows as `dataset_kwargs` says, from seeds that training never
    reaches. Keys of a recipe that describe the columns of its own dataset do not apply.

    Raises:
        DataError: as for `load_datasets`, or the split is neither train nor test.
    """
    if split not in ("train", "test"):
        raise DataError([Problem("split", split, f"{name!r} makes only 'train' and 'test'", "Unset split.")])
    both = name.startswith(QUICKSTART)
    config = dataclasses.replace(config, prompt_column=None, answer_column=None, answer_format=None, test_size=None)
    if split == "test" and not both:
        config = dataclasses.replace(config, dataset_kwargs=tasks.held_out_seeds(task_options(config)))
    train, test = load_datasets(name, config, eval_needed=both, tokenizer=tokenizer, template_kwargs=template_kwargs)
    return test if both and split == "test" else train


def _no_test_split(name: str, train_split: str, test_split: str, has_test_size: bool) -> Problem:
    """Return the problem of an evaluation without rows; a single file cannot have another split."""
    path, cures = Path(name).expanduser(), []
    if not path.is_file():
        splits = local_files.folder_splits(path) if path.is_dir() else {}
        others = [split for split in splits if split != train_split]
        cures.append(f"Set dataset_test_split{f': {others[0]}' if others else ' to its name'}.")
    cures.append("Remove dataset_test_split." if has_test_size else "Set test_size: 0.1 to hold rows out.")
    cures.append("Or evaluate on other data: eval_strategy: 'no', and eval_sets with a dataset_name.")
    reason = f"evaluation needs this split, which {name} does not have"
    return Problem("dataset_test_split", test_split, reason, " ".join(cures))


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Continue after a `DataError`, so that all problems are reported at once."""
    try:
        yield
    except DataError as error:
        problems += [problem for problem in error.problems if problem not in problems]


def _load_procedural(name: str, config: DataConfig, eval_wanted: bool) -> list[Split | None]:
    size = (PROCEDURAL_EVAL_FRACTION if config.test_size is None else config.test_size) if eval_wanted else None
    train, test = tasks.generate(name.removeprefix(PROCEDURAL), task_options(config), size)
    text = datasets.Value("string")
    features = datasets.Features(
        {"prompt": [{"role": text, "content": text}], "solution": text, "reasoning_gym_entry": text}
    )
    return [
        Split(Dataset.from_list(rows, features=features), f"{name}, split {split}") if rows else None
        for split, rows in (("train", train), ("test", test))
    ]


def load_split(
    name: str, config: DataConfig, dataset_config: str | None, streaming: bool, split: str, *, optional: bool = False
) -> Split | None:
    """Load one split of local files or of the hub; None if it is optional and does not exist."""
    path, source, key = Path(name).expanduser(), f"{name}, split {split}", _key(split)
    if not local_files.is_path(name):
        return _load_by_name(name, dataset_config, streaming, split, source, optional)
    if path.is_dir() and local_files.is_saved_to_disk(path):
        return _load_saved(path, streaming, split, source, optional)
    if path.is_file() and optional:
        return None
    if path.is_file() and key not in ("train", path.stem):
        cure = "Remove the split, or write train; a slice is written train[:100]."
        raise unusable(source, f"no such split, {path.name} being one file", cure)
    files = local_files.split_files(path, key) if dataset_config is None else []
    if not files and dataset_config is None:
        splits = local_files.folder_splits(path)
        if key not in splits and splits:
            if optional:
                return None
            raise unusable(source, "no such split", did_you_mean(key, splits))
        files = splits.get(key, [])
    if files:
        return load_files(files, config, streaming, split, source)
    return _load_by_name(str(path), dataset_config, streaming, split, source, optional)


def _key(split: str) -> str:
    """Return the name of a split without its slice."""
    return re.split(r"\W", split)[0]


def load_files(files: list[Path], config: DataConfig, streaming: bool, split: str, source: str) -> Split:
    """Load the rows of one split's files, all of one kind; `split` may be a slice.

    Raises:
        DataError: a file cannot be read, or a slice of a stream is requested.
    """
    key, kind = _key(split), files[0].suffix
    if streaming and split != key:
        raise unusable(source, "a stream has no slices", f"Name the split {key!r}, and set max_samples.")
    places = tuple(files) if split == key else ()
    if kind in (".json", ".jsonl") and streaming:
        return Split(tables.stream(files), source, places)
    if kind in (".json", ".jsonl"):
        return Split(
            call_loader(lambda: tables.select(tables.read_rows(files), key, split), source=source), source, places
        )
    reading: dict[str, Any] = {}
    if kind == ".csv":
        texts = {config.prompt_column or "", config.answer_column or "", *PROMPT_COLUMNS, *ANSWER_COLUMNS}
        # pandas would read the answer 007 as 7 and the word None as a missing value
        converters = {name: str for name in local_files.csv_columns(files[0]) if name in texts}
        reading = {"converters": converters, "keep_default_na": False, "na_values": [""]}
        if streaming:
            keywords = {"files": files, "source": source, "reading": reading}
            return Split(IterableDataset.from_generator(_stream_csv, gen_kwargs=keywords), source, places)
        deque(local_files.checked_rows(files), maxlen=0)  # `datasets` would not name a broken line
    else:
        files = local_files.filled_parquet(files)
        places = tuple(files) if split == key else ()
    builder, data_files = local_files.BUILDERS[kind], {key: [str(file) for file in files]}
    load = partial(datasets.load_dataset, builder, data_files=data_files, split=split, streaming=streaming)
    return Split(call_loader(load, source=source, **reading), source, places)


def _stream_csv(files: list[Path], source: str, reading: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of csv files; an error that pandas raises half way names the dataset."""
    data_files = [str(file) for file in files]
    try:
        yield from datasets.load_dataset("csv", data_files=data_files, split="train", streaming=True, **reading)
    except Exception as error:
        raise _load_error(source, error) from error


def _load_saved(path: Path, streaming: bool, split: str, source: str, optional: bool) -> Split | None:
    loaded = call_loader(datasets.load_from_disk, str(path), source=source)
    if split != _key(split):
        cure = f"Name the split {_key(split)!r}."
        raise unusable(source, "a folder written by save_to_disk has no slices", cure)
    if isinstance(loaded, DatasetDict):
        if split not in loaded and optional:
            return None
        if split not in loaded:
            raise unusable(source, "no such split", did_you_mean(split, loaded))
        loaded = loaded[split]
    elif optional:
        return None
    elif split != "train":
        raise unusable(source, "no such split, the folder holding one dataset", "Name the split train.")
    return Split(loaded.to_iterable_dataset() if streaming else loaded, source)


def _load_by_name(
    name: str, dataset_config: str | None, streaming: bool, split: str, source: str, optional: bool
) -> Split | None:
    try:
        dataset = datasets.load_dataset(name, name=dataset_config, split=split, streaming=streaming)
    except Exception as error:
        missing = isinstance(error, ValueError) and str(error).startswith(("Unknown split", "Bad split"))
        if optional and missing:
            return None
        if (available := re.match(r"BuilderConfig .* not found\. Available: (.*)", str(error))) is not None:
            cure = f"Set it to one of {available[1]}, or unset it (--dataset_config null)."
            raise DataError(
                [Problem("dataset_config", dataset_config, f"{name} has no such configuration", cure)]
            ) from error
        raise _load_error(source, error) from error
    return Split(dataset, source)


def call_loader(function: Callable[..., T], *arguments: object, source: str, **keywords: object) -> T:
    """Call a function of `datasets`.

    Raises:
        DataError: the function failed; the message names the source.
    """
    try:
        return function(*arguments, **keywords)
    except DataError:
        raise
    except Exception as error:
        raise _load_error(source, error) from error


def _load_error(source: str, error: Exception) -> DataError:
    reason = error.__cause__ or error  # datasets wraps the reason into "An error occurred"
    cure = (
        "Check dataset_name, dataset_config and the splits; a local path starts with ./ or /, a procedural task with "
        f"{PROCEDURAL}."
    )
    return unusable(source, f"cannot be loaded: {type(reason).__name__}: {reason}", cure)
