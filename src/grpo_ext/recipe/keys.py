"""Check the keys of a recipe and of its command line: unknown ones, and values that belong to none."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.foreign import projects
from grpo_ext.recipe.parser import parser_of
from grpo_ext.recipe.parts import PARTS, all_keys
from grpo_ext.recipe.replaced_keys import REPLACED
from grpo_ext.registry import did_you_mean
