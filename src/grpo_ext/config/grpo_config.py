"""GRPOExtConfig: TRL's GRPOConfig plus the axes of the loss; all mistakes are reported before a model is loaded."""

import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast
from warnings import catch_warnings

from accelerate import PartialState

from grpo_ext.config import checks
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.launch import check_joined, planning, rank, world_size
from grpo_ext.config.machine import OF_THE_GPU, choose_cpu, meet_within
from grpo_ext.config.paths import OF_THE_RUN, expand
from grpo_ext.config.rules import OF_THE_OWNERS, as_far_as_sound, refusal, without
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.warnings import warnings
from grpo_ext.errors import ConfigError as ConfigError
from grpo_ext.errors import Problem, redacted, redacted_text
from grpo_ext.registry import did_you_mean
from grpo_ext.safe_reading import parse_json

logger = logging.getLogger(__name__)

_EXCHANGED = {
    "warmup_ratio": "Write warmup_steps: a value below 1 is a ratio.",
    "max_prompt_length": "Remove it, and leave longer prompts out of the dataset (a recipe has the key).",
    "no_cuda": "Write use_cpu.",
    "overwrite_output_dir": "Write resume_from_checkpoint: never.",
    "torch_dtype": "Write model_init_kwargs: {dtype: ...}.",
    "vllm_device": "Remove it: vLLM takes the trainer's device, or runs as a server.",
    "vllm_guided_decoding_regex": "Write vllm_structured_outputs_regex.",
}
"""Arguments of earlier versions of TRL and transformers, with what replaces them."""
REMOVED = {
    "overlap": (
        "it is gone: it was slower than training in turn",
        "Set rollout_ahead: 1, which samples and scores a generation while the one before it trains.",
    ),
    "router_replay": ("it is gone: it could not read vLLM's routes", "Set replay_routes: true, which replays those."),
    "replay_batches": ("it is gone: a run trains on what it samples", "Remove it."),
    "probe": ("it is gone: a run logs the seconds of a step's parts", "Train --max_steps 4; read metrics.jsonl."),
    "push_to_hub_revision": (
        "it is gone: transformers pushes checkpoints",
        "Set hub_strategy: every_save (a commit for each checkpoint) or all_checkpoints (a folder for each).",
    ),
    "record_batches": (
        "it is gone: nothing reads recorded batches",
        "Remove it. A batch with NaN or inf is kept in `output_dir`/failures; log_completions writes completions.",
    ),
}
"""Settings of earlier versions of grpo-ext, with reason and cure."""

KWARGS = ("loss_kwargs", "advantage_kwargs", "loss_aggregation_kwargs")
"""Fields that hold the options of a function."""


def _unknown(name: str, known: Iterable[str]) -> tuple[str, str]:
    """Return why an argument is refused, and the cure."""
    return REMOVED.get(name) or ("no such argument", _EXCHANGED.get(name) or did_you_mean(name, known))


@dataclass
class GRPOExtConfig(GRPOExtArguments):
    """`trl.GRPOConfig` in which `loss_type` names a row of the table of losses, which fills what is left unset.

    Raises:
        ConfigError: all mistakes in the settings, each with its value, reason and cure.
    """

    def __new__(cls, *args: Any, **given: Any) -> "GRPOExtConfig":
        """Refuse all unknown arguments at once, with a cure for each, and what is wrong with the others."""
        known = inspect.signature(cls.__init__).parameters
        exact = all(p.kind is not p.VAR_KEYWORD for p in known.values())
        unknown = {name: value for name, value in given.items() if exact and name not in known}
        if not unknown:
            return super().__new__(cls)
        problems = [Problem(name, unknown[name], *_unknown(name, known)) for name in unknown]
        try:
            cls(*args, **{name: value for name, value in given.items() if name not in unknown})
        except ConfigError as error:
            problems += error.problems
        raise ConfigError(problems)

    def __post_init__(self) -> None:
        """Raise all problems at once, else let TRL derive its fields, and log warnings."""
        choose_cpu(self)
        self._decode()
        problems = checks.problems(self)
        if problems:
            if planning() or world_size() == 1:  # processes of a launch would wait for each other
                problems += self._also_refused(problems)
            raise ConfigError(problems)
        if self.steps_per_generation is not None:  # a copy of a config may have both, in agreement; TRL takes one
            self.generation_batch_size = None
        meet_within(self)
        if refused := [*self._derive()]:
            raise ConfigError(refused)
        if planning():
            return
        check_joined(PartialState().num_processes)
        if rank() == 0:
            for warning in warnings(self):
                logger.warning(str(warning))

    def _derive(self) -> Iterator[Problem]:
        """Let TRL and transformers derive their fields; yield what they refuse."""
        unset = self.vllm_importance_sampling_clip_max is self.vllm_importance_sampling_cap is None
        bound = {"vllm_importance_sampling_clip_max": self.trl_sampler_bound} if unset else {}
        hardware = self._hardware_set_aside()
        given = self.changed()  # with bf16 as TRL sets it
        with hardware, temporarily(self, **bound):  # TRL refuses a mode without a bound
            try:
                super().__post_init__()
            except OF_THE_OWNERS as error:
                refused = refusal(error, given)
                cure = "A GPU without bfloat16 has fp16: true." if refused.field == "bf16" else refused.cure
                yield replace(refused, cure=cure)

    def _also_refused(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """Yield what TRL refuses before it reads, or names, a field that has `problems`, or belongs to one."""
        names = {re.split(r"[.[]", name)[0] for p in problems for name in (p.field, *p.beside)}
        with catch_warnings(action="ignore"):
            found = as_far_as_sound(without(self, names)._derive())
            yield from (problem for problem in found if names.isdisjoint(re.findall(r"\w+", problem.reason)))

    def __getstate__(self) -> dict[str, object]:
        """Leave secrets out: `training_args.bin` is in every checkpoint and pushed to the hub."""
        return {name: redacted(value, name) for name, value in vars(self).items() if name != "_objective"}

    def to_dict(self) -> dict[str, Any]:
        """Leave secrets out: trackers such as W&B get these values."""
        return cast(dict[str, Any], redacted(super().to_dict()))

    def __str__(self) -> str:
        """Return the settings without secrets."""
        return redacted_text(super().__str__())

    __repr__ = __str__

    def changed(self, **values: object) -> "GRPOExtConfig":
        """Return a copy with other values, which are not checked; unlike one by `copy.copy` it keeps secrets."""
        changed = object.__new__(type(self))
        vars(changed).update(vars(self))
        for name, value in values.items():
            setattr(changed, name, value)
        return changed

    @classmethod
    def as_given(cls, values: Mapping[str, Any]) -> "GRPOExtConfig":
        """Return an unchecked config of these values, in which values that are refused cannot be read."""
        given = object.__new__(cls)
        vars(given).update(values)
        given._decode()
        return without(given, checks.field_problems(given))

    def _decode(self) -> None:
        """Convert texts of the command line and expand paths, as far as they can be read."""
        for name in ("scale_rewards", "shared_prefix"):  # which may be text too
            value = getattr(self, name)
            if isinstance(value, str) and value.lower() in ("true", "false"):
                setattr(self, name, value.lower() == "true")
        self.report_to = self.report_to or "none"  # transformers refuses null once the model is loaded
        for name in OF_THE_RUN:
            setattr(self, name, expand(name, getattr(self, name)))
        for name in (*KWARGS, "liger_kernel_config", "sampler_correction", "losses"):
            text = getattr(self, name)
            begins = ("{", "[") if name in ("sampler_correction", "losses") else "{"  # it may be a list
            if isinstance(text, str) and text.startswith(begins):
                with suppress(ValueError):  # `mapping_problems` says so
                    setattr(self, name, parse_json(text))

    def _hardware_set_aside(self) -> AbstractContextManager[None]:
        """While a launch is only planned, keep transformers from checking this machine for its GPU."""
        if self.bf16 is None:  # as TRL does
            self.bf16 = not self.fp16
        asked = OF_THE_GPU if planning() and not self.use_cpu else ()
        backend = {"ddp_backend": None} if planning() else {}  # transformers would ask the launch's process group
        return temporarily(self, **{name: None if name == "tf32" else False for name in asked}, **backend)
