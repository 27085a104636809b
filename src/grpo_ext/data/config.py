"""Settings of the dataset, and what is wrong with them before anything is loaded."""

import inspect
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.data import chat_template, tasks
from grpo_ext.data import files as local_files
from grpo_ext.data.rows import ANSWER_FORMATS
from grpo_ext.errors import DataError
from grpo_ext.registry import did_you_mean

PROCEDURAL, QUICKSTART = "reasoning_gym/", "quickstart/"
GAME = f"{QUICKSTART}guess"
"""The quickstart's task that has no options."""
ON_BAD_ROW = ("error", "drop")


@dataclass
class DataConfig:
    """Dataset settings beside those of TRL's script arguments (`dataset_name`, `dataset_train_split`, ...)."""

    dataset_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Options of a procedural task (dataset_name: reasoning_gym/<task> or quickstart/addition), for "
            'example {"min_terms": 2, "max_terms": 3, "size": 5000, "seed": 1}.'
        },
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "System message put in front of every prompt that has none."},
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "Chat template of the tokenizer, saved with the model: Jinja text, or the path of a .jinja file. "
            "Unset: the tokenizer's own; its options are `chat_template_kwargs`."
        },
    )
    prompt_column: str | None = field(
        default=None,
        metadata={
            "help": "Column that becomes `prompt`. Unset: `prompt`, `question` or `problem`, whichever is there first."
        },
    )
    answer_column: str | None = field(
        default=None,
        metadata={
            "help": "Column that becomes `solution`, the reference answer that rewards see. Unset: `solution`, "
            "`answer`, `final_answer` or `gold`, whichever is there first, or none."
        },
    )
    answer_format: str | None = field(
        default=None,
        metadata={
            "help": "Where the answer stands in its column: `gsm8k` is the text after ####, `boxed` the content of "
            "the last \\boxed{}. Unset: the whole value."
        },
    )
    test_size: float | None = field(
        default=None,
        metadata={
            "help": "Rows held out from training for evaluation when the dataset has no test split: a fraction below "
            "1, a number of rows from 1 up. For a reasoning_gym task the size of its evaluation split (unset: 0.1)."
        },
    )
    split_seed: int = field(
        default=0, metadata={"help": "Seed of the split that `test_size`, or `test_split_size` of a mixture, makes."}
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={"help": "Drop (never truncate) prompts of more tokens than this, chat template included."},
    )
    min_pass_rate: float | None = field(
        default=None,
        metadata={
            "help": "Drop rows whose column `pass_rate` is below this, or not known. `grpo-ext sample` writes it: the "
            "share of a model's completions that were right."
        },
    )
    max_pass_rate: float | None = field(
        default=None, metadata={"help": "Drop rows whose column `pass_rate` is above this, or is not known."}
    )
    max_samples: int | None = field(
        default=None,
        metadata={
            "help": "Use only the first so many rows of each split, counted before anything is dropped or held out. "
            "Of a mixture (`datasets`), each dataset gives its share of them."
        },
    )
    on_bad_row: str = field(
        default="error",
        metadata={
            "help": "What becomes of rows that cannot be used, such as one with an empty prompt or without the "
            "answer it needs: `error` names them and ends, `drop` trains without them and logs their number. A line "
            "that is no JSON or CSV is an error in both."
        },
    )


def problems(
    config: DataConfig,
    dataset_name: str | None = None,
    *,
    dataset_config: str | None = None,
    streaming: bool = False,
) -> list[str]:
    """What is wrong with the settings as far as it shows without loading; each with value, reason and cure."""
    found = value_problems(config)
    if streaming and config.test_size is not None:
        found.append(
            f"test_size={config.test_size!r} with dataset_streaming: rows cannot be held out from a stream. "
            "Name a test split (dataset_test_split) or set dataset_streaming: false."
        )
    if dataset_name is None:
        return found + _foreign_kwargs(config, "datasets")
    if not isinstance(dataset_name, str) or not dataset_name:
        return [*found, f"dataset_name={dataset_name!r} must be a name or a path."]
    if dataset_name.startswith((PROCEDURAL, QUICKSTART)):
        return found + _procedural_problems(config, dataset_name, dataset_config, streaming)
    found += _foreign_kwargs(config, dataset_name)
    if not local_files.is_path(dataset_name):
        return found
    found += local_files.path_problems(dataset_name)
    if dataset_config is not None and Path(dataset_name).expanduser().is_file():
        found.append(f"dataset_config={dataset_config!r}: {dataset_name!r} is one file. Unset dataset_config.")
    return found


def value_problems(config: DataConfig) -> list[str]:
    """What is wrong with the settings whatever the dataset is."""
    found = []
    for name in ("system_prompt", "chat_template", "prompt_column", "answer_column", "answer_format"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            found.append(f"{name}={value!r} must be text that is not empty. Set it, or leave it unset.")
    for name, minimum in (("split_seed", 0), ("max_prompt_length", 1), ("max_samples", 1)):
        value = getattr(config, name)
        unset = value is None and name != "split_seed"
        if not unset and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            found.append(f"{name}={value!r} must be an integer >= {minimum}. Set it so, or leave it unset.")
    if isinstance(config.answer_format, str) and config.answer_format.strip() not in ("", *ANSWER_FORMATS):
        hint = did_you_mean(config.answer_format, ANSWER_FORMATS)
        found.append(f"answer_format={config.answer_format!r} is unknown. {hint} Unset, the value is taken as it is.")
    if config.on_bad_row not in ON_BAD_ROW:
        found.append(
            f"on_bad_row={config.on_bad_row!r} is unknown. {did_you_mean(str(config.on_bad_row), ON_BAD_ROW)}"
        )
    bounds: dict[str, Any] = {name: getattr(config, name) for name in ("min_pass_rate", "max_pass_rate")}
    for name, value in bounds.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1
        ):
            found.append(f"{name}={value!r} must be a share from 0 to 1. Set it so, or leave it unset.")
    if not found and None not in bounds.values() and bounds["min_pass_rate"] > bounds["max_pass_rate"]:
        found.append("{min_pass_rate} to {max_pass_rate}: no pass rate is between. Exchange them.".format(**bounds))
    if isinstance(config.chat_template, str) and config.chat_template.strip():
        found += chat_template.problems(config.chat_template, with_system=config.system_prompt is not None)
    size = config.test_size
    number = isinstance(size, int | float) and not isinstance(size, bool) and math.isfinite(size) and size > 0
    if size is not None and (not number or (size > 1 and size != int(size))):
        found.append(f"test_size={size!r} must be a fraction between 0 and 1, or a whole number of rows from 1 up.")
    try:
        options(config)
    except DataError as error:
        found.append(str(error))
    return found


def _foreign_kwargs(config: DataConfig, name: str) -> list[str]:
    if not config.dataset_kwargs:
        return []
    reason = f"{name!r} is not a procedural task ({PROCEDURAL}<task>, {QUICKSTART}addition), which alone has options."
    return [f"dataset_kwargs={config.dataset_kwargs!r}: {reason} Unset dataset_kwargs."]


def _procedural_problems(config: DataConfig, name: str, dataset_config: str | None, streaming: bool) -> list[str]:
    columns = {key: getattr(config, key) for key in ("prompt_column", "answer_column", "answer_format")}
    found = [
        f"{key}={value!r}: {name!r} makes its own columns prompt and solution. Unset {key}."
        for key, value in {**columns, "dataset_config": dataset_config}.items()
        if value is not None
    ]
    if streaming:
        found.append(f"dataset_streaming=True: {name!r} is made in memory. Set dataset_streaming: false.")
    if name.startswith(QUICKSTART):
        if config.test_size is not None:
            found.append(f"test_size={config.test_size!r}: {name!r} brings its own evaluation split. Unset test_size.")
        return found + (_foreign_kwargs(config, name) if name == GAME else _quickstart_problems(config))
    try:
        return found + tasks.option_problems(name.removeprefix(PROCEDURAL), options(config))
    except DataError:  # already among the values' problems
        return found


def split_problems(dataset_name: str, train_split: str, test_split: str) -> list[str]:
    """Splits asked of a procedural task, which has no others than train and test, and no slices of them."""
    if not dataset_name.startswith((PROCEDURAL, QUICKSTART)):
        return []
    return [
        f"{key}={given!r}: {dataset_name!r} makes only {only!r}. Unset {key}; dataset_kwargs has the size."
        for key, given, only in (
            ("dataset_train_split", train_split, "train"),
            ("dataset_test_split", test_split, "test"),
        )
        if given != only
    ]


def _quickstart_problems(config: DataConfig) -> list[str]:
    from grpo_ext.quickstart.task import load, problems

    known = [name for name in inspect.signature(load).parameters if name != "task"]
    try:
        given = options(config)
    except DataError:  # already among the values' problems
        return []
    found = [
        f"dataset_kwargs: the quickstart has no option {name!r}. {did_you_mean(name, known)}"
        for name in given
        if name not in known
    ]
    if not _is_count(given.get("seed", 0)):
        found.append(f"dataset_kwargs: seed={given['seed']!r} must be an integer >= 0.")
    split = given.get("eval_split", "held_out")
    if split not in ("held_out", "validation"):
        return [
            *found,
            f"dataset_kwargs: eval_split={split!r} must be 'held_out' or, to choose settings, 'validation'.",
        ]
    for name, pool in (("size", problems("train")), ("eval_size", problems(split))):
        size = given.get(name)
        if size is not None and not (_is_count(size) and 1 <= size <= len(pool)):
            found.append(
                f"dataset_kwargs: {name}={size!r} must be an integer from 1 to {len(pool)}, the problems there are."
            )
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def options(config: DataConfig) -> dict[str, Any]:
    """`dataset_kwargs` as a mapping; the command line gives JSON text.

    Raises:
        DataError: it is neither.
    """
    given = config.dataset_kwargs or {}
    cure = "Write {min_terms: 2} in a recipe, '{\"min_terms\": 2}' on the command line."
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise DataError(f"dataset_kwargs={given!r} is not JSON ({error}). {cure}") from None
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise DataError(f"dataset_kwargs={given!r} is not a mapping from option to value. {cure}")
    return given
