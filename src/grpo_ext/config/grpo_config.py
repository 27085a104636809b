"""GRPOExtConfig: TRL's GRPOConfig plus the axes of the loss; every mistake is reported before a model is loaded."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from accelerate import PartialState

from grpo_ext.config import checks
from grpo_ext.config.arguments import KWARGS as KWARGS
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.broken import without
from grpo_ext.config.launch import check_joined, planning, rank
from grpo_ext.config.machine import OF_THE_GPU, meet_within
from grpo_ext.config.paths import OF_THE_RUN, expand
from grpo_ext.config.warnings import warnings
from grpo_ext.errors import ConfigError as ConfigError
from grpo_ext.errors import redacted, redacted_text

logger = logging.getLogger(__name__)


@dataclass
class GRPOExtConfig(GRPOExtArguments):
    """`trl.GRPOConfig` in which `loss_type` names a row of the table of losses, which fills what is left unset.

    Raises:
        ConfigError: everything that is wrong with the settings, at once, each with its value, reason and cure.
    """

    def __post_init__(self) -> None:
        """Check everything, report everything, then let TRL do its own."""
        problems = [*self._decode(), *checks.problems(self)]
        if problems:
            raise ConfigError(problems)
        if self.steps_per_generation is not None:  # agreeing, both may stand in a copy of a config; TRL wants one
            self.generation_batch_size = None
        meet_within(self)
        with self._hardware_set_aside():
            try:
                super().__post_init__()
            except (OSError, TypeError, ValueError, NotImplementedError) as error:
                raise ConfigError([str(error)]) from error
        if planning():
            return
        check_joined(PartialState().num_processes)
        if rank() == 0:
            for warning in warnings(self):
                logger.warning(warning)

    def __getstate__(self) -> dict[str, object]:
        """Without secrets: `training_args.bin` lies in every checkpoint, and is pushed to the hub."""
        return {name: redacted(value, name) for name, value in vars(self).items() if name != "_objective"}

    def to_dict(self) -> dict[str, Any]:
        """Without secrets: this is what trackers such as W&B are given."""
        return cast(dict[str, Any], redacted(super().to_dict()))

    def __str__(self) -> str:
        """Without secrets."""
        return redacted_text(super().__str__())

    __repr__ = __str__

    @classmethod
    def as_given(cls, values: Mapping[str, Any]) -> "GRPOExtConfig":
        """Return an unchecked config of these values, of which those that are refused cannot be looked at."""
        given = object.__new__(cls)
        vars(given).update(values)
        list(given._decode())
        return cast(GRPOExtConfig, without(given, checks.field_problems(given)))

    def _decode(self) -> Iterator[str]:
        """Turn what a command line gives as text into what it means, and expand paths; yield what cannot be read."""
        self._words_to_bools()
        for name in OF_THE_RUN:
            setattr(self, name, expand(name, getattr(self, name)))
        yield from self._decode_json()

    def _words_to_bools(self) -> None:
        """The command line gives the words where YAML gives a bool, for fields that are text as well."""
        for name in ("scale_rewards", "shared_prefix"):
            value = getattr(self, name)
            if isinstance(value, str) and value.lower() in ("true", "false"):
                setattr(self, name, value.lower() == "true")

    def _decode_json(self) -> Iterator[str]:
        """Read those dict fields of ours that the command line gives as JSON text; yield what cannot be read."""
        for name in (*KWARGS, "liger_kernel_config"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.startswith("{"):
                continue
            try:
                setattr(self, name, json.loads(text))
            except ValueError as error:
                setattr(self, name, None)
                cure = f"Write --{name} '{{\"option\": value}}'."
                yield f"{name}={text!r} is not JSON ({error}). {cure}"

    @contextmanager
    def _hardware_set_aside(self) -> Iterator[None]:
        """While a launch is only planned, keep transformers from asking this machine for the other one's GPU."""
        if self.bf16 is None:  # as TRL does
            self.bf16 = not self.fp16
        asked = {name: getattr(self, name) for name in OF_THE_GPU if planning() and not self.use_cpu}
        for name in asked:
            setattr(self, name, None if name == "tf32" else False)
        yield
        for name, value in asked.items():
            setattr(self, name, value)
