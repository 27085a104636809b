"""Losses beside the policy's, `losses`: distillation from a teacher and cross-entropy on demonstrations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, cast

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.rules import BrokenFieldRead, Rule
from grpo_ext.config.spec import Spec
from grpo_ext.config.weight_schedule import schedule_problems
from grpo_ext.errors import ABSENT, Problem
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.options import Within
from grpo_ext.registry import did_you_mean

FIELD = "losses"
TEACHER = f"{FIELD}.teacher"
INITIAL = "initial"
"""The teacher that is the policy before training."""


@dataclass(frozen=True)
class AddedLoss:
    """A loss beside the policy's, with its own weight, rows and denominator.

    Args:
        name: of its figure, `losses/<name>`; its type by default.
        weight: by which it is multiplied.
        weight_schedule: how the weight changes, as a reward's.
        where: by column of the dataset, the value, or list of values, of the rows that it holds for.
        aggregation: from its losses per token to a number, over its own tokens of the optimizer step.
    """

    type: ClassVar[str]
    name: str = ""
    weight: float = 1.0
    weight_schedule: str | list | dict | None = None
    where: dict = field(default_factory=dict)
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"

    @property
    def label(self) -> str:
        """The name of its figure."""
        return self.name or self.type

    def describe(self) -> str:
        """Return its settings in one line."""
        chosen = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "name")
        return f"{self.label}: {self.type}({', '.join(f'{n}={v}' for n, v in chosen if v not in (None, '', {}))})"

    def holds_for(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row of the dataset is one of its rows."""
        return all(row[name] in (value if isinstance(value, list) else [value]) for name, value in self.where.items())

    @property
    def columns(self) -> set[str]:
        """Columns of the dataset that it reads."""
        return set(self.where)


@dataclass(frozen=True)
class Distillation(AddedLoss):
    """A loss that draws the policy to a teacher's next-token distribution on its own completions.

    Args:
        teacher: `initial`, the policy before training, or the name or folder of another model.
        teacher_prompt: the prompt that the teacher reads in place of the policy's, with {prompt} and the row's columns
            in braces: it may hold the reference solution.
    """

    teacher: str = INITIAL
    teacher_prompt: str | None = None

    @property
    def columns(self) -> set[str]:
        """Columns of the dataset that it reads."""
        return super().columns | set(placeholders(self.teacher_prompt or "")) - {"prompt"}


@dataclass(frozen=True)
class ReverseKL(Distillation):
    r"""KL(policy || teacher), estimated at the sampled tokens by `kl_estimator`.

    On-policy distillation: GKD, arXiv:2306.13649. The default's gradient is that of the reverse KL also on completions
    of an older policy.
    """

    type: ClassVar[str] = "reverse_kl"
    kl_estimator: str = "r_k3"


@dataclass(frozen=True)
class JSD(Distillation):
    """The generalised Jensen-Shannon divergence over the whole vocabulary, as in `objective.divergence`."""

    type: ClassVar[str] = "jsd"
    beta: Annotated[float, Within(least=0.0, most=1.0)] = 0.5
    clip: Annotated[float, Within(above=0.0)] | None = None


@dataclass(frozen=True)
class CrossEntropy(AddedLoss):
    """-log p of a demonstration, the text in a column of the row, after the row's prompt; an empty one has no part."""

    type: ClassVar[str] = "cross_entropy"
    column: str = "demonstration"

    @property
    def columns(self) -> set[str]:
        """Columns of the dataset that it reads."""
        return super().columns | {self.column}


TYPES: dict[str, type[AddedLoss]] = {kind.type: kind for kind in (ReverseKL, JSD, CrossEntropy)}
EXAMPLE = "{type: reverse_kl, teacher: initial}"


def added_losses(config: GRPOExtArguments) -> tuple[AddedLoss, ...]:
    """Return the losses that a config lists.

    Raises:
        BrokenFieldRead: they are refused.
    """
    if any(_entries(config)):
        raise BrokenFieldRead
    entries = cast(Sequence[Mapping[str, Any]], config.losses or ())
    return tuple(
        TYPES[entry["type"]](**{name: value for name, value in entry.items() if name != "type" and value is not None})
        for entry in entries
    )


def placeholders(template: str) -> list[str]:
    """Return the names in braces; none of a text that is not a template."""
    try:
        return [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError:
        return []


def column_problems(losses: Sequence[AddedLoss], columns: Sequence[str]) -> Iterator[Problem]:
    """Yield the columns that losses read and a dataset with these `columns` has not."""
    for i, loss in enumerate(losses):
        for column in sorted(loss.columns - set(columns)):
            yield Problem(
                f"{FIELD}[{i}]", loss.label, f"the data have no column {column!r}", did_you_mean(column, columns)
            )


def added_loss_problems(losses: Sequence[AddedLoss], *, plain: bool) -> Iterator[Problem]:
    """Yield the losses that make rows of their own from a prompt, where prompts are not `plain` texts."""
    for i, loss in enumerate(losses):
        if not plain and not (isinstance(loss, ReverseKL) and loss.teacher_prompt is None):
            reason = "it reads prompts as plain texts, and here they hold images or something else goes on from them"
            yield Problem(f"{FIELD}[{i}]", loss.label, reason, "Use reverse_kl without teacher_prompt.")


def other_vocabulary(name: str, policy: Mapping[str, int], teacher: Mapping[str, int]) -> Iterator[Problem]:
    """Yield that a teacher's tokens are not the policy's: their log-probabilities would be of other texts."""
    other = next((token for token, number in policy.items() if teacher.get(token) != number), None)
    if other is not None:
        reason = f"its tokenizer does not give {other!r} the number that the policy's gives it"
        yield Problem(TEACHER, name, reason, "Take a teacher with the policy's tokenizer.")


def _entries(config: GRPOExtArguments) -> Iterator[Problem]:
    losses: object = config.losses
    if losses is None:
        return
    if not isinstance(losses, list | tuple):
        yield Problem(FIELD, losses, "not a list", f"Write {FIELD}: [{EXAMPLE}].")
        return
    sound = []
    for i, entry in enumerate(losses):
        problems = list(_entry(f"{FIELD}[{i}]", entry))
        yield from problems
        sound += [] if problems else [entry]
    labels = [entry.get("name") or entry["type"] for entry in sound]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield Problem(FIELD, label, "two losses have this name", "Give each a name of its own: name: ...")
    if sound and config.loss_defaults == "trl":
        yield Problem(FIELD, labels, "stock TRL has no losses beside the policy's", "Set loss_defaults: paper.")


def _entry(place: str, entry: object) -> Iterator[Problem]:
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or kind is None:
        yield Problem(f"{place}.type", ABSENT, "missing", f"Write {EXAMPLE}.")
        return
    if kind not in TYPES:
        yield Problem(f"{place}.type", kind, "no such loss", did_you_mean(str(kind), TYPES))
        return
    options = {name: value for name, value in entry.items() if name != "type"}
    yield from Spec.of(TYPES[kind], example=EXAMPLE).problems(place, options)
    traits = {name: kl_estimators.traits(name) for name in kl_estimators}
    usable = [name for name, its in traits.items() if its.in_loss and not its.per_completion]
    estimator = options.get("kl_estimator")
    if isinstance(estimator, str) and estimator not in usable:
        yield Problem(f"{place}.kl_estimator", estimator, "not one of its values", did_you_mean(estimator, usable))
    for problem in schedule_problems(options.get("weight_schedule")):
        yield replace(problem, field=f"{place}.{problem.field}")
    template = options.get("teacher_prompt")
    if isinstance(template, str) and "prompt" not in placeholders(template):
        yield Problem(
            f"{place}.teacher_prompt", template, "it has no {prompt}", "Put {prompt} where the prompt stands."
        )


def _by_tokens(config: GRPOExtArguments) -> Iterator[Problem]:
    if config.micro_batch_tokens is None or not isinstance(config.losses, list | tuple):
        return
    for i, entry in enumerate(config.losses):
        if isinstance(entry, Mapping) and entry.get("type") in (JSD.type, CrossEntropy.type):
            reason = "it has forwards of its own, which are not cut by tokens"
            yield Problem(f"{FIELD}[{i}].type", entry["type"], reason, "Unset micro_batch_tokens.")


ADDED_LOSS_RULES: tuple[Rule, ...] = (_entries, _by_tokens)
