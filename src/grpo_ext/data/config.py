"""Settings of the dataset, and their checks before anything is loaded."""

import typing
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_ext.config.setting import setting
from grpo_ext.config.spec import Spec
from grpo_ext.data import chat_template, tasks
from grpo_ext.data import files as local_files
from grpo_ext.errors import DataError, Problem
from grpo_ext.objective.options import Count, Within, option_defaults
from grpo_ext.registry import did_you_mean
from grpo_ext.safe_reading import parse_json

PROCEDURAL, QUICKSTART = "reasoning_gym/", "quickstart/"
GAME = f"{QUICKSTART}guess"
"""The quickstart's task that has no options."""
_TASKS = (f"{QUICKSTART}addition", GAME)
_FAMILIES = {PROCEDURAL.rstrip("/"): "chain_sum", QUICKSTART.rstrip("/"): "addition"}
"""Procedural tasks by the first part of their names, with one of each."""
NaturalNumber = Annotated[int, Within(least=0.0)]
Share = Annotated[float, Within(least=0.0, most=1.0)]


@dataclass
class DataConfig:
    """Dataset settings beside those of TRL's script arguments (`dataset_name`, `dataset_train_split`, ...)."""

    dataset_kwargs: dict | str | None = setting(
        None,
        "Options of a procedural task (dataset_name: reasoning_gym/<task> or quickstart/addition), for "
        'example {"min_terms": 2, "max_terms": 3, "size": 5000, "seed": 1}.',
    )
    system_prompt: str | None = setting(None, "System message put in front of every prompt that has none.")
    chat_template: str | None = setting(
        None,
        "Chat template of the tokenizer, saved with the model: Jinja text, or the path of a .jinja file. "
        "Unset: the tokenizer's own; its options are `chat_template_kwargs`.",
    )
    prompt_column: str | None = setting(
        None, "Column that becomes `prompt`. Unset: the first of `prompt`, `question` and `problem` that exists."
    )
    answer_column: str | None = setting(
        None,
        "Column that becomes `solution`, the reference answer that rewards see. Unset: the first of "
        "`solution`, `answer`, `final_answer` and `gold` that exists, if any.",
    )
    answer_format: Literal["gsm8k", "boxed"] | None = setting(
        None,
        "Where the answer is in its column: `gsm8k` is the text after ####, `boxed` the content of "
        "the last \\boxed{}. Unset: the whole value.",
    )
    test_size: float | None = setting(
        None,
        "Rows held out from training for evaluation when the dataset has no test split: a fraction below "
        "1, a number of rows from 1 up. For a reasoning_gym task the size of its evaluation split (unset: 0.1).",
        needs=("dataset_name (a mixture has test_split_size)",),
    )
    split_seed: NaturalNumber = setting(
        0, "Seed of the split that `test_size`, or `test_split_size` of a mixture, makes.", needs=("test_size",)
    )
    max_prompt_length: Count | None = setting(
        None, "Drop (never truncate) prompts of more tokens than this, chat template included."
    )
    min_pass_rate: Share | None = setting(
        None,
        "Drop rows whose column `pass_rate` is below this, or not known. `grpo-ext sample` writes it: the "
        "share of a model's completions that were right.",
    )
    max_pass_rate: Share | None = setting(None, "Drop rows whose column `pass_rate` is above this, or is not known.")
    max_samples: Count | None = setting(
        None,
        "Use only the first so many rows of each split, counted before anything is dropped or held out. "
        "In a mixture (`datasets`), each dataset gives its share of them.",
    )
    on_bad_row: Literal["error", "drop"] = setting(
        "error",
        "How to treat rows that cannot be used, such as one with an empty prompt or without the answer it "
        "needs: `error` names them and ends, `drop` trains without them and logs their number. A line that is "
        "not JSON or CSV is an error in both.",
    )


def _meant_task(name: str) -> str:
    """Return the procedural task that a name misspells, "" for the name of a task or of other data."""
    written, _, task = name.replace("-", "_").partition("/")
    family = "".join(get_close_matches(written, _FAMILIES, 1, 0.8))
    meant = f"{family}/{task or _FAMILIES.get(family, '')}"
    is_task = meant in _TASKS or (meant.startswith(PROCEDURAL) and not tasks.task_problems(task, {}))
    sure = written in _FAMILIES or (is_task and not local_files.is_path(name))
    return meant if sure and not is_generated(name) else ""


def dataset_problems(
    config: DataConfig, dataset_name: str | None = None, *, dataset_config: str | None = None, streaming: bool = False
) -> list[Problem]:
    """Return what is wrong with the settings, as far as it shows without loading."""
    problems = value_problems(config)
    if streaming and config.test_size is not None:
        cure = "Name a test split (dataset_test_split) or set dataset_streaming: false."
        beside = {"dataset_streaming": True}
        problems.append(Problem("test_size", config.test_size, "rows cannot be held out from a stream", cure, beside))
    if dataset_name is None:
        return problems + _unused_kwargs(config, "datasets")
    if not isinstance(dataset_name, str) or not dataset_name:
        return [*problems, Problem("dataset_name", dataset_name, "must be a name or a path", "Write one.")]
    if meant := _meant_task(dataset_name):
        return [*problems, Problem("dataset_name", dataset_name, "names no task", f"Write {meant}.")]
    if is_generated(dataset_name):
        return problems + _procedural_problems(config, dataset_name, dataset_config, streaming)
    problems += _unused_kwargs(config, dataset_name)
    if local_files.is_path(dataset_name):
        problems += local_files.data_path_problems(dataset_name)
        if dataset_config is not None and Path(dataset_name).expanduser().is_file():
            reason, cure = f"{dataset_name!r} is one file", "Unset dataset_config (--dataset_config null)."
            problems.append(Problem("dataset_config", dataset_config, reason, cure))
    return problems


def is_generated(name: object) -> bool:
    """Return whether a dataset is a procedural task, whose rows are made here."""
    return isinstance(name, str) and name.startswith((PROCEDURAL, QUICKSTART))


def is_size(value: float) -> bool:
    """Return whether a value is a fraction above 0 and below 1, or a whole number from 1 up."""
    return 0 < value <= 1 or (value > 1 and value % 1 == 0)


_SPEC = Spec(typing.get_type_hints(DataConfig, include_extras=True))
_TEXTS = ("system_prompt", "chat_template", "prompt_column", "answer_column")


def value_problems(config: DataConfig) -> list[Problem]:
    """Return what is wrong with the settings independently of the dataset."""
    problems = [p for name, value in vars(config).items() for p in _SPEC.value_problems(name, name, value)]
    wrong = {problem.field for problem in problems}
    for name in _TEXTS:
        value = getattr(config, name)
        if isinstance(value, str) and not value.strip():
            problems.append(Problem(name, value, "must be text that is not empty", "Set it, or leave it unset."))
    if (size := config.test_size) is not None and "test_size" not in wrong and not is_size(size):
        reason = "must be a fraction between 0 and 1, or a whole number of rows from 1 up"
        problems.append(Problem("test_size", size, reason, "Correct it, or leave it unset."))
    low, high = config.min_pass_rate, config.max_pass_rate
    if not wrong and low is not None and high is not None and low > high:
        problems.append(
            Problem("min_pass_rate", low, "the range is empty", "Exchange the two.", {"max_pass_rate": high})
        )
    if isinstance(config.chat_template, str) and config.chat_template.strip():
        problems += chat_template.template_problems(config.chat_template)
    try:
        task_options(config)
    except DataError as error:
        problems += error.problems
    return problems


def _unused_kwargs(config: DataConfig, name: str) -> list[Problem]:
    if not config.dataset_kwargs:
        return []
    reason = f"{name!r} is not a procedural task ({PROCEDURAL}<task>, {QUICKSTART}addition), and takes no options"
    return [Problem("dataset_kwargs", config.dataset_kwargs, reason, "Unset dataset_kwargs.")]


def _procedural_problems(config: DataConfig, name: str, dataset_config: str | None, streaming: bool) -> list[Problem]:
    columns = {key: getattr(config, key) for key in ("prompt_column", "answer_column", "answer_format")}
    if name.startswith(QUICKSTART) and name not in _TASKS:
        return [Problem("dataset_name", name, "the quickstart has no such task", did_you_mean(name, _TASKS))]
    problems = [
        Problem(key, value, f"{name!r} makes its own columns prompt and solution", f"Unset {key}.")
        for key, value in {**columns, "dataset_config": dataset_config}.items()
        if value is not None
    ]
    if streaming:
        problems.append(Problem("dataset_streaming", True, f"{name!r} is made in memory", "Set it to false."))
    if name.startswith(QUICKSTART) and config.test_size is not None:
        problems.append(
            Problem("test_size", config.test_size, f"{name!r} brings its own evaluation split", "Unset it.")
        )
    if name == GAME:
        return problems + _unused_kwargs(config, name)
    try:
        options = task_options(config)
    except DataError:  # `value_problems` reports it
        return problems
    if name.startswith(QUICKSTART):
        return problems + _quickstart_problems(options)
    return problems + tasks.task_problems(name.removeprefix(PROCEDURAL), options)


def split_problems(dataset_name: str, train_split: str, test_split: str) -> list[Problem]:
    """Return a problem for each split of a procedural task other than train and test, which has no slices either."""
    if not is_generated(dataset_name):
        return []
    return [
        Problem(key, split, f"{dataset_name!r} makes only {only!r}", f"Unset {key}; dataset_kwargs has the size.")
        for key, split, only in (
            ("dataset_train_split", train_split, "train"),
            ("dataset_test_split", test_split, "test"),
        )
        if split != only
    ]


def _quickstart_problems(options: dict[str, Any]) -> list[Problem]:
    from grpo_ext.quickstart.task import addition_pairs, load

    pools = {"size": "train", "eval_size": "validation" if options.get("eval_split") == "validation" else "held_out"}
    hints: dict[str, Any] = {
        name: Annotated[int, Within(least=1.0, most=float(len(addition_pairs(pool))))] | None
        for name, pool in pools.items()
    }
    hints |= {"eval_split": Literal["held_out", "validation"], "seed": NaturalNumber}
    defaults = option_defaults(load)
    spec = Spec({name: hints[name] for name in defaults}, defaults, owner="the quickstart")
    return [*spec.problems("dataset_kwargs", options)]


def task_options(config: DataConfig) -> dict[str, Any]:
    """Return `dataset_kwargs` as a mapping; the command line gives JSON text.

    Raises:
        DataError: it is neither.
    """
    options = config.dataset_kwargs or {}
    cure = "Write {min_terms: 2} in a recipe, '{\"min_terms\": 2}' on the command line."
    try:
        options = parse_json(options) if isinstance(options, str) else options
    except ValueError as error:
        raise DataError([Problem("dataset_kwargs", options, f"not JSON ({error})", cure)]) from None
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise DataError([Problem("dataset_kwargs", options, "not a mapping from option to value", cure)])
    return options
