"""How a rule of a config is written: a function that yields problems, or a row that names settings in conflict."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.errors import Problem

Rule: TypeAlias = Callable[[GRPOExtArguments], Iterator[Problem]]
"""Takes a config and yields the problems of one matter."""
IMAGE_COLUMNS = ("image", "images")
"""Dataset columns in which TRL looks for a prompt's images: one, or a list."""


@dataclass(frozen=True)
class Conflict:
    """A rule with one condition.

    Args:
        fields: the setting to name and the others that make it a mistake, in one text.
        when: whether a config has the mistake.
        reason: as in `Problem`; "{c.beta}" is replaced by the value.
        cure: as in `Problem`, likewise.
    """

    fields: str
    when: Callable[[GRPOExtArguments], object]
    reason: str
    cure: str

    @classmethod
    def of(cls, settings: str, reason: str, cure: str) -> "Conflict":
        """Return the rule that some settings exclude each other: `a`, which is set; `!a`, which is not; `a=x`."""
        fields = " ".join(setting.strip("!").partition("=")[0] for setting in settings.split())
        return cls(fields, lambda config: all(_holds(config, setting) for setting in settings.split()), reason, cure)

    def __call__(self, config: GRPOExtArguments) -> Iterator[Problem]:
        """Yield the problem, if there is one."""
        if self.when(config):
            (field, value), *others = ((name, plain(getattr(config, name))) for name in self.fields.split())
            yield Problem(field, value, self.reason.format(c=config), self.cure.format(c=config), dict(others))


def _holds(config: GRPOExtArguments, setting: str) -> bool:
    name, compared, value = setting.strip("!").partition("=")
    found = plain(getattr(config, name))
    return found == value if compared else bool(found) != setting.startswith("!")


def plain(value: object) -> object:
    """Return a setting as a recipe writes it; in a copy of a config it may be a member of an enum."""
    return getattr(value, "value", value)


def columns_of_images(columns: object) -> list[str]:
    """Return the columns of a dataset that hold images; some streams have None for columns."""
    return [name for name in IMAGE_COLUMNS if isinstance(columns, list) and name in columns]


def is_set(config: object, name: str) -> bool:
    """Return whether a field of a dataclass differs from its default."""
    field = next(f for f in dataclasses.fields(config) if f.name == name)  # type: ignore[arg-type]
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return bool(getattr(config, name) != default)
