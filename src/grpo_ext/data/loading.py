"""From a name to datasets: hub, local files, folders, procedural tasks; training split and what is held out."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, IterableDataset

from grpo_ext.data import files as local_files
from grpo_ext.data import tables, tasks
from grpo_ext.data.config import GAME, PROCEDURAL, QUICKSTART, DataConfig, options, problems, split_problems
from grpo_ext.data.held_out import hold_out
from grpo_ext.data.prepare import AnyDataset, Split, prepare_split
from grpo_ext.data.rows import ANSWER_COLUMNS, PROMPT_COLUMNS
from grpo_ext.errors import DataError
from grpo_ext.registry import did_you_mean

logger = logging.getLogger(__name__)

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
    tokenizer: Any = None,
    template_kwargs: dict[str, Any] | None = None,
    by_prompt: bool = True,
) -> tuple[AnyDataset, AnyDataset | None]:
    """Training and evaluation dataset, loaded and prepared; evaluation is None unless needed or `test_size` is set.

    `by_prompt` is that of `hold_out`.

    Raises:
        DataError: a setting, a file, a split, a column or rows cannot be used; the message names each with its cure.
    """
    found = problems(config, dataset_name, dataset_config=dataset_config, streaming=streaming)
    found += split_problems(dataset_name, train_split, test_split)
    if found:
        raise DataError("\n".join(found))
    eval_wanted = eval_needed or config.test_size is not None
    train, test = None, None
    if dataset_name.startswith(QUICKSTART):
        train, test = _load_quickstart(dataset_name, config)
    elif dataset_name.startswith(PROCEDURAL):
        train, test = _load_procedural(dataset_name, config, eval_wanted)
    else:
        load = partial(load_split, dataset_name, config, dataset_config, streaming)
        with _collecting(found):
            train = load(train_split)
        with _collecting(found):
            test = load(test_split, optional=True) if eval_wanted else None
    named = test_split != "test"
    if eval_wanted and test is None and (config.test_size is None or named) and not found:
        hold_out_instead = "remove dataset_test_split" if config.test_size else "set test_size: 0.1 to hold rows out"
        cures = ", or ".join([*_other_split(dataset_name, train_split), hold_out_instead])
        found.append(
            f"dataset_test_split={test_split!r}: {dataset_name} has no split {test_split!r} beside it, and evaluation "
            f"is asked for. {cures[0].upper()}{cures[1:]}; or evaluate on other data: eval_strategy: 'no', and "
            "eval_sets with a dataset_name."
        )
    prepared: list[AnyDataset] = []
    for split in (train, test):
        with _collecting(found):
            prepared += [] if split is None else [prepare_split(split, config, tokenizer, template_kwargs)]
    if found:
        raise DataError("\n".join(dict.fromkeys(found)))
    if not eval_wanted or len(prepared) == 2:
        if test is not None and config.test_size is not None and not dataset_name.startswith(PROCEDURAL):
            logger.warning("test_size=%s is not applied: %s exists.", config.test_size, test.source)
        return prepared[0], prepared[1] if eval_wanted else None
    size = config.test_size
    assert size is not None
    number = int(size) if size >= 1 else max(1, round(size * len(prepared[0])))
    return hold_out(prepared[0], number, config.split_seed, setting=f"test_size={size!r}", by_prompt=by_prompt)


def _other_split(name: str, train_split: str) -> list[str]:
    """The cure that names another split of the dataset; none for a single file, which has no other."""
    path = Path(name).expanduser()
    if path.is_file():
        return []
    splits = list(local_files.folder_splits(path)) if path.is_dir() else []
    others = [split for split in splits if split != train_split]
    return [f"set dataset_test_split: {others[0]}" if others else "set dataset_test_split to its name"]


@contextmanager
def _collecting(found: list[str]) -> Iterator[None]:
    """Go on after a fault of the data, so that all are told at once."""
    try:
        yield
    except DataError as error:
        found += error.problems


def _load_quickstart(name: str, config: DataConfig) -> tuple[Split, Split | None]:
    from grpo_ext.quickstart import game, task

    train, test = game.load() if name == GAME else task.load(name.removeprefix(QUICKSTART), **options(config))
    return Split(train, f"{name}, split train"), Split(test, f"{name}, split test")


def _load_procedural(name: str, config: DataConfig, eval_wanted: bool) -> tuple[Split | None, Split | None]:
    size = (PROCEDURAL_EVAL_FRACTION if config.test_size is None else config.test_size) if eval_wanted else None
    train, test = tasks.generate(name.removeprefix(PROCEDURAL), options(config), size)
    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    text = datasets.Value("string")
    features = datasets.Features({"prompt": [message], "solution": text, "reasoning_gym_entry": text})
    splits = [
        Split(Dataset.from_list(rows, features=features), f"{name}, split {split}") if rows else None
        for split, rows in (("train", train), ("test", test))
    ]
    return splits[0], splits[1]


def load_split(
    name: str, config: DataConfig, dataset_config: str | None, streaming: bool, split: str, *, optional: bool = False
) -> Split | None:
    """One split of local files or of the hub; None when it is optional and not there."""
    path = Path(name).expanduser()
    source = f"{name}, split {split}"
    if not local_files.is_path(name):
        return _load_by_name(name, dataset_config, streaming, split, source, optional)
    if path.is_dir() and local_files.is_saved_to_disk(path):
        return _load_saved(path, streaming, split, source, optional)
    if path.is_file() and optional:
        return None
    if path.is_file() and re.split(r"\W", split)[0] not in ("train", path.stem):
        raise DataError(
            f"{source}: no such split, {path.name} being one file. Remove the split, or write train; a slice is "
            "written train[:100]."
        )
    key = re.split(r"\W", split)[0]
    files = local_files.split_files(path, key) if dataset_config is None else []
    if not files and dataset_config is None:
        splits = local_files.folder_splits(path)
        if key not in splits and splits:
            if optional:
                return None
            raise DataError(f"{source}: no such split. {did_you_mean(key, splits)}")
        files = splits.get(key, [])
    if files:
        return load_files(files, config, streaming, split, source)
    return _load_by_name(str(path), dataset_config, streaming, split, source, optional)


def load_files(files: list[Path], config: DataConfig, streaming: bool, split: str, source: str) -> Split:
    """The rows of one split's files, all of one kind; `split` may be a slice.

    Raises:
        DataError: a file cannot be read, or a slice of a stream is asked for.
    """
    key = re.split(r"\W", split)[0]
    kind = files[0].suffix
    if streaming and split != key:
        raise DataError(f"{source}: a stream has no slices. Name the split {key!r}, and set max_samples.")
    if kind in (".json", ".jsonl") and streaming:
        return Split(tables.stream(files), source, tuple(files))
    texts = {config.prompt_column or "", config.answer_column or "", *PROMPT_COLUMNS, *ANSWER_COLUMNS}
    if kind in (".json", ".jsonl"):
        dataset = call_loader(tables.select, tables.read(files, texts), key, split, source=source)
        return Split(dataset, source, tuple(files) if split == key else ())
    reading: dict[str, Any] = {}
    if kind == ".csv":
        header = local_files.csv_columns(files[0])
        # pandas would read the answer 007 as 7 and the word None as a missing value
        reading = {"converters": {name: str for name in header if name in texts}}
        reading |= {"keep_default_na": False, "na_values": [""]}
        if not streaming:  # a stream may be larger than one wants to read twice
            local_files.check_files(files)
    else:
        files = local_files.filled_parquet(files)
    if streaming and kind == ".csv":
        keywords = {"files": files, "source": source, "reading": reading}
        return Split(IterableDataset.from_generator(_stream_csv, gen_kwargs=keywords), source, tuple(files))
    builder, data_files = local_files.BUILDERS[kind], {key: [str(file) for file in files]}
    load = partial(datasets.load_dataset, builder, data_files=data_files, split=split, streaming=streaming)
    return Split(call_loader(load, source=source, **reading), source, tuple(files) if split == key else ())


def _stream_csv(files: list[Path], source: str, reading: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of csv files; what pandas raises half way names the dataset."""
    data_files = [str(file) for file in files]
    try:
        yield from datasets.load_dataset("csv", data_files=data_files, split="train", streaming=True, **reading)
    except Exception as error:
        raise _load_error(source, error) from error


def _load_saved(path: Path, streaming: bool, split: str, source: str, optional: bool) -> Split | None:
    loaded = call_loader(datasets.load_from_disk, str(path), source=source)
    key = re.split(r"\W", split)[0]
    if split != key:
        raise DataError(f"{source}: what save_to_disk has written has no slices. Name the split {key!r}.")
    if isinstance(loaded, DatasetDict):
        if split not in loaded and optional:
            return None
        if split not in loaded:
            raise DataError(f"{source}: no such split. {did_you_mean(split, loaded)}")
        loaded = loaded[split]
    elif optional:
        return None
    elif split != "train":
        raise DataError(f"{source}: no such split, the folder holding one dataset. Name the split train.")
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
        raise _load_error(source, error) from error
    return Split(dataset, source)


def call_loader(function: Callable[..., Any], *arguments: Any, source: str, **keywords: Any) -> Any:
    """What a function of `datasets` returns.

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
    reason = error.__cause__ or error  # datasets wraps the news into "An error occurred"
    return DataError(
        f"{source}: cannot be loaded: {type(reason).__name__}: {reason}. Check dataset_name, dataset_config and the "
        f"splits; a local path starts with ./ or /, a procedural task with {PROCEDURAL}."
    )
