"""Read the parts of a recipe from its YAML values and the command line, by TRL's parser, and check the keys of both.

Each part has a parser of its own, so that a mistake in one does not hide those in another.
"""

import argparse
import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from grpo_ext.config.fields import sound_values
from grpo_ext.config.grpo_config import REMOVED, GRPOExtConfig
from grpo_ext.config.paths import PATHS, expand, unknown
from grpo_ext.config.rules import OF_THE_OWNERS, refusal, without
from grpo_ext.config.settings import FUNCTIONS
from grpo_ext.config.spec import holds
from grpo_ext.data.config import DataConfig
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.files import read_list
from grpo_ext.recipe.parts import PARTS, RecipeArguments, all_keys
from grpo_ext.registry import did_you_mean, located

_ALSO: Mapping[str, Any] = {"lora_target_modules": str, "answer_format": str, "on_bad_row": str} | dict.fromkeys(
    ("reward_funcs", "eval_sets", "environments", "datasets", "test_size"), object
)
"""Fields of the parts that may have another type too, or whose own checks report their type."""


class RecipeParser(TrlParser):
    """TRL's parser, which leaves text that is not a number or bool to the checks, so that all is reported at once."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts, allow_abbrev=False, add_help=False)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")  # argparse lacks -2e-3

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise ConfigError([Problem("command line", ABSENT, message.removeprefix("argument "), "Correct it.")])

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            return arg_string

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Leave a field's choices to the checks."""


@dataclasses.dataclass
class Parts:
    """The parts of a recipe; one that could not be made is None.

    Args:
        problems: those of the parts' own checks.
        unread: values that could not be read; other problems with them are consequences.
        training: if it was refused, holds values that cannot be looked at (`config.rules`).
    """

    problems: list[Problem]
    unread: list[Problem]
    script: RecipeArguments | None
    data: DataConfig | None
    training: GRPOExtConfig
    model: ModelConfig | None
    mixture: DatasetMixtureConfig | None


def parse_parts(values: Mapping[str, Any], args: Sequence[str], folder: Path | None) -> Parts:
    """Read the parts; what the command line gives wins. `folder` is the recipe's."""
    problems: list[Problem] = []
    unread: list[Problem] = []
    parts: list[Any] = []
    for part in PARTS:
        part_values: dict[str, Any] | None = None
        parsed = None
        try:
            part_values = _part_values(part, values, args, unread)
            sound = part_values
            if part is not GRPOExtConfig:  # which checks its types itself
                sound, wrong = sound_values(part, argparse.Namespace(**part_values), _ALSO)
                problems += wrong
            functions = {key: sound[key] for key in sound.keys() & FUNCTIONS if isinstance(sound[key], str)}
            parsed = part(**sound | {key: located(path, folder) for key, path in functions.items()})
        except ConfigError as error:
            problems += error.problems
        except OF_THE_OWNERS as error:
            written = object.__new__(part)
            vars(written).update(part_values or {})
            problems.append(refusal(error, written))
        parts.append(_refused(part_values) if part is GRPOExtConfig and parsed is None else parsed)
    if (model := parts[PARTS.index(ModelConfig)]) and re.fullmatch(r"\w+", str(model.lora_target_modules or "")):
        # TRL unpacks a list of one name, and PEFT takes the name for a regular expression of whole paths
        model.lora_target_modules = [model.lora_target_modules]
    return Parts(problems, unread, *parts)


def _part_values(part: Any, values: Mapping[str, Any], args: Sequence[str], unread: list[Problem]) -> dict[str, Any]:
    """Return the values of a part's fields, with lists read and paths expanded."""
    parser, fields = RecipeParser(part), {f.name for f in dataclasses.fields(part)}
    parser.set_defaults_with_config(**{key: value for key, value in values.items() if key in fields})
    part_values = vars(parser.parse_known_args(list(args))[0])
    lists = {name for name, hint in typing.get_type_hints(part).items() if holds(list, hint)}
    for key, value in part_values.items():
        is_word = key in lists and isinstance(value, str) and value.startswith("[")
        part_values[key] = read_list(key, [value] if is_word else value, unread)
    for key in part_values.keys() & PATHS:
        unread += unknown(key, part_values[key])
        part_values[key] = expand(key, part_values[key])
    return part_values


def _refused(values: Mapping[str, Any] | None) -> GRPOExtConfig:
    """Return settings that are not sound as a whole; None: their command line could not be parsed."""
    if values is not None:
        return GRPOExtConfig.as_given(values)
    return without(object.__new__(GRPOExtConfig), (f.name for f in dataclasses.fields(GRPOExtConfig)))


# Keys: unknown ones, and values that belong to none.

_USUAL = {
    **dict.fromkeys(("kl_coef", "kl_coeff", "kl_loss_coef"), "beta"),
    **dict.fromkeys(("group_size", "num_return_sequences"), "num_generations"),
    **dict.fromkeys(("rewards", "reward_functions"), "reward_funcs"),
    "cliprange": "epsilon",
    "advantage_type": "advantage_estimator",
    **dict.fromkeys(("per_gpu_train_batch_size", "micro_batch_size"), "per_device_train_batch_size"),
    **{"base_model": "model_name_or_path", "lora_rank": "lora_r", "num_epochs": "num_train_epochs"},
    **{"torch_dtype": "dtype", "evaluation_strategy": "eval_strategy", "warmup_ratio": "warmup_steps"},
    **{"dataset_prompt_column": "prompt_column", "dataset_solution_column": "answer_column"},
}
"""Names that are common elsewhere, or were in an older TRL; docs/migrating.md has more."""
_ALL_KEYS = "`grpo-ext train --help-all` lists all keys, docs/migrating.md those of other projects. Remove it."


def key_problems(values: Mapping[str, Any], args: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with the keys of a recipe's values and its command line."""
    keys, written = all_keys(), flags(args)
    options = RecipeParser(PARTS)._option_string_actions if written else {}
    for key in [*values, *(key for key in written if f"--{key}" not in options)]:
        if key not in keys:
            reason, cure = _unknown(str(key), values.get(key), keys)
            yield Problem(str(key), values.get(key, ABSENT), reason, cure)
    yield from _stray_values(args)
    yield from _switched_off(values, args)


def _unknown(key: str, value: object, keys: Sequence[str]) -> tuple[str, str]:
    """Return why an unknown key is refused, and the cure."""
    reason = "no such key"
    if key == "env":  # `load_recipe` has removed it from the recipe's values
        return "it is a key of a recipe only", "Write it there, or export the variables before the start."
    if key.removeprefix("no_") in keys:
        return f"{reason}, and it would be ignored", _negation(key.removeprefix("no_"))
    if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", key):
        return f"{reason}; it looks like an environment variable", f"Write env: {{{key}: ...}}."
    if key in REMOVED:
        return REMOVED[key]
    if key in _USUAL:
        return reason, f"It is {_USUAL[key]} here. Write {_USUAL[key]}."
    if isinstance(value, Mapping) and set(value) & set(keys):
        inside = ", ".join(map(str, value))
        return reason, f"A recipe is flat: write {inside} without {key} above."
    hint = did_you_mean(key, keys)
    return reason, hint if hint.startswith("Did") else _ALL_KEYS


def flags(args: Sequence[str]) -> list[str]:
    """Return the keys that a command line has."""
    return [arg[2:].split("=")[0].replace("-", "_") for arg in args if re.match(r"--[A-Za-z]", arg)]


def _stray_values(args: Sequence[str]) -> Iterator[Problem]:
    """Yield values on the command line that belong to no key; argparse would ignore them."""
    try:
        _, rest = RecipeParser(PARTS).parse_known_args(list(args)) if args else (None, [])
    except ConfigError:  # the part that the value belongs to reports it
        return
    for before, value in zip(["", *rest], rest, strict=False):
        if not value.startswith("--") and not before.startswith("--"):
            key, sign, right = value.partition("=")
            cure = f"--{key} {right}" if sign and key in all_keys() else f"--key {value}, or --config {value}"
            yield Problem("command line", ABSENT, f"{value!r} belongs to no key", f"Write {cure}.")


def _negation(key: str) -> str:
    """Return how to switch off a key that has no `--no_` form."""
    field = next(f for part in PARTS for f in dataclasses.fields(part) if f.name == key)
    value = "false" if "bool" in str(field.type) else "VALUE"
    return f"Write --{key} {value} on the command line, {key}: {value} in a recipe."


def _switched_off(values: Mapping[str, Any], args: Sequence[str]) -> Iterator[Problem]:
    """Yield `do_train` and `do_eval` that are set to false; as a default, false has no meaning."""
    names = [name for name in ("do_train", "do_eval") if name in values or any(name in arg for arg in args)]
    if not names:
        return
    parser = RecipeParser(GRPOExtConfig)
    parser.set_defaults(**{name: values[name] for name in (*names, "eval_strategy") if name in values})
    parsed, _ = parser.parse_known_args(list(args))
    if "do_train" in names and parsed.do_train is False:
        cure = "Remove it; `grpo-ext check` checks a recipe without training."
        yield Problem("do_train", False, "a recipe is for training", cure)
    if "do_eval" in names and parsed.do_eval is False and parsed.eval_strategy not in ("no", False, None):
        beside = {"eval_strategy": parsed.eval_strategy}
        yield Problem("do_eval", False, "it evaluates", "Set eval_strategy: 'no', or remove do_eval.", beside)
