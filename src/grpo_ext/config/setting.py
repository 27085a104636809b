"""A setting's declaration beside its default: help, bounds, choices, what it waits for, what a change does."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from grpo_ext.objective.options import Within


class Change(Enum):
    """The effect of another value of a setting on a run that resumes."""

    NOTHING = auto()
    """No trained number changes. (With `loss_defaults: trl` an evaluation draws random numbers.)"""
    ROUNDING = auto()
    """The same numbers are computed in another way."""
    LENGTH = auto()
    """The run ends elsewhere, and the learning-rate schedule follows."""
    SPLIT = auto()
    """Nothing but random streams, if the rows of an optimizer step and of a generation stay the same together."""
    MODEL = auto()
    """Nothing, if the other name has the same weights."""
    ANOTHER_RUN = auto()
    """It cannot resume: it would be another run."""


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting, by default: any value of its type, and a change makes it another run.

    Args:
        within: bounds of a number.
        choices: the names that it may have; None where all are allowed.
        function: whether it may also name a function of the user's, `./file.py:name`; `choices` is a registry then.
        text: cure of a value that is not text, where that value as text would be wrong too.
        unused: why GRPO has no use for the setting; only its default is allowed.
        needs: the switches without which it has no effect, such as "use_vllm: true"; see `warnings.is_on`.
        change: what a change does to a run that resumes.
    """

    within: Within | None = None
    choices: Collection[object] | None = None
    function: bool = False
    text: str = ""
    unused: str = ""
    needs: tuple[str, ...] = ()
    change: Change = Change.ANOTHER_RUN


class _Metadata(dict[str, Any]):
    """A field's metadata. transformers passes a copy of it to argparse, which takes the help only."""

    def copy(self) -> dict[str, Any]:
        return {"help": self["help"]}


def setting(default: object, meaning: str, within: Within | None = None, **declared: Any) -> Any:
    """Return a field of a dataclass with its meaning, for the help of a command, and what else `Setting` declares."""
    return field(default=default, metadata=_Metadata(help=meaning, setting=Setting(within, **declared)))


FINITE = Within()
"""The bounds of a number that has no others."""
POSITIVE = Within(above=0.0)
NOT_NEGATIVE = Within(least=0.0)
COUNT = Within(least=1.0)
VLLM = ("use_vllm: true",)
APART = ("use_vllm: true or rollout_ahead",)
CORRECTED = (*APART, "vllm_importance_sampling_correction: true")
ENVIRONMENTS = ("environments",)
"""The recipe's, or the trainer's; `environments.compatibility` refuses what needs them without them."""
