"""Read the parts of a recipe from its YAML values and the command line, by TRL's parser.

Each part has a parser of its own, so that a mistake in one does not hide those in another.
"""

import argparse
import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trl import ModelConfig, TrlParser

from grpo_ext.config.broken import without
from grpo_ext.config.fields import sound_values
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.mappings import holds
from grpo_ext.config.paths import PATHS, expand, unknown
from grpo_ext.config.settings import FUNCTIONS
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.files import as_list
from grpo_ext.recipe.parts import PARTS
from grpo_ext.registry import located

ALSO: Mapping[str, Any] = {"lora_target_modules": str} | dict.fromkeys(
    ("reward_funcs", "eval_sets", "environments", "datasets", "test_size"), object
)
"""Fields of the parts that may have another type too, or whose own checks report their type."""


class Parser(TrlParser):
    """TRL's parser, which leaves text that is not a number or bool to the checks, so that all is reported at once."""

    def __init__(self, parts: object) -> None:
        super().__init__(parts, allow_abbrev=False, add_help=False)

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
