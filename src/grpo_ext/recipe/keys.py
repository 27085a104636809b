"""Check the keys of a recipe and of its command line: unknown ones, and values that belong to none."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_ext.config.grpo_config import REMOVED, GRPOExtConfig
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.foreign import recognise
from grpo_ext.recipe.parser import RecipeParser
from grpo_ext.recipe.parts import PARTS, all_keys
from grpo_ext.registry import did_you_mean

_USUAL = {
    **dict.fromkeys(("kl_coef", "kl_coeff", "kl_loss_coef"), "beta"),
    **dict.fromkeys(("group_size", "num_return_sequences"), "num_generations"),
    **dict.fromkeys(("rewards", "reward_functions"), "reward_funcs"),
    "cliprange": "epsilon",
    "advantage_type": "advantage_estimator",
    **dict.fromkeys(("per_gpu_train_batch_size", "micro_batch_size"), "per_device_train_batch_size"),
    **{"base_model": "model_name_or_path", "lora_rank": "lora_r", "num_epochs": "num_train_epochs"},
}
"""Names that are common elsewhere; `foreign` has those of Open-R1 and of older TRL."""


def key_problems(values: Mapping[str, Any], args: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with the keys of a recipe's values and its command line."""
    known, written = all_keys(), flags(args)
    options = RecipeParser(PARTS)._option_string_actions if written else {}
    for key in [*values, *(key for key in written if f"--{key}" not in options)]:
        if key not in known:
            reason, cure = _unknown(str(key), values.get(key), known)
            yield Problem(str(key), values.get(key, ABSENT), reason, cure)
    yield from _stray_values(args)
    yield from _switched_off(values, args)


def _unknown(key: str, value: object, known: Sequence[str]) -> tuple[str, str]:
    """Return why an unknown key is refused, and the cure."""
    reason = "no such key"
    if key == "env":  # `load_recipe` has removed it from the recipe's values
        return "it is a key of a recipe only", "Write it there, or export the variables before the start."
    if key.removeprefix("no_") in known:
        return f"{reason}, and it would be ignored", _negation(key.removeprefix("no_"))
    if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", key):
        return f"{reason}; it looks like an environment variable", f"Write env: {{{key}: ...}}."
    if key in REMOVED:
        return REMOVED[key]
    if key in _USUAL:
        return reason, f"It is {_USUAL[key]} here. Write {_USUAL[key]}."
    if isinstance(value, Mapping) and set(value) & set(known):
        inside = ", ".join(map(str, value))
        return reason, f"A recipe is flat: write {inside} without {key} above."
    if (found := recognise.answer(key)) is not None:
        return reason, found
    hint = did_you_mean(key, known)
    return reason, hint if hint.startswith("Did") else "`grpo-ext train --help-all` lists all keys. Remove it."


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
    given = [name for name in ("do_train", "do_eval") if name in values or any(name in arg for arg in args)]
    if not given:
        return
    parser = RecipeParser(GRPOExtConfig)
    parser.set_defaults(**{name: values[name] for name in (*given, "eval_strategy") if name in values})
    parsed, _ = parser.parse_known_args(list(args))
    if "do_train" in given and parsed.do_train is False:
        cure = "Remove it; `grpo-ext check` checks a recipe without training."
        yield Problem("do_train", False, "a recipe is for training", cure)
    if "do_eval" in given and parsed.do_eval is False and parsed.eval_strategy not in ("no", False, None):
        beside = {"eval_strategy": parsed.eval_strategy}
        yield Problem("do_eval", False, "it evaluates", "Set eval_strategy: 'no', or remove do_eval.", beside)
