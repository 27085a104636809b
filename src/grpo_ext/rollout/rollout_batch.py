"""`RolloutBatch`: the rollouts of one process for one generation, from the dataset's rows to their rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from grpo_ext.objective.trajectory import COLUMN, Trajectory, Turn
from grpo_ext.packing.images import IMAGES, RowImages
from grpo_ext.packing.routes import ROUTES
from grpo_ext.packing.sampling_support import SUPPORTS
from grpo_ext.rollout.seeds import AttemptId

TurnRewards = list[list[float] | None]
"""Per-turn rewards of one row, by reward function; None where a function scored the whole trajectory."""


class Generated(NamedTuple):
    """The tuple that TRL's `_generate` returns, one entry per row."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list[Any]
    logprobs: list[Any] | None
    extra: dict[str, Any]
    """Columns that a rollout function added."""
    images: list[Any] | None
    tool_images: list[Any]

    def has(self, completions: list[Any], completion_ids: list[list[int]]) -> bool:
        """Return whether these are its completions."""
        return (self.completions, self.completion_ids) == (completions, completion_ids)


@dataclass
class RolloutBatch:
    """Rollouts, one per row, in the order in which the fields are filled."""

    rows: list[dict[str, Any]]
    """Rows of the dataset; later with the columns of a rollout function."""
    attempts: Sequence[AttemptId] = ()
    """The attempt that each row is; its random numbers are derived from it."""
    prompts: list[Any] = field(default_factory=list)
    """Prompts of the rows as the model gets them, with their images and the first observations of environments."""
    generated: Generated | None = None
    supports: list[Tensor] = field(default_factory=list)
    """The sets that each row's tokens were drawn from by a truncated sampler, as in `packing.sampling_support`."""
    routes: list[Tensor] = field(default_factory=list)
    """The experts that each row's tokens were sent to, as in `packing.routes`, if they are replayed."""
    turns: list[Turn] = field(default_factory=list)
    """The turns that TRL's loop of tools has sampled, with the sampling supports."""
    images: list[RowImages] = field(default_factory=list)
    """The images of each row, as in `packing.images`; empty where no row has any."""
    played: Sequence[tuple[Trajectory, Any]] = ()
    """Trajectories with the figures of their episodes, where environments were played."""
    scored: Mapping[str, Any] = field(default_factory=dict)
    """`rewards.outcomes.Scores` by each reward function, by its name; models score on the main thread."""
    seconds: float = 0.0
    """Seconds that completing and scoring took, where that was done ahead of training."""
    rewards: Tensor | None = None
    """Rewards of all processes, [completions, functions], on the CPU, once known; NaN where one was not scored."""
    turn_rewards: list[TurnRewards] = field(default_factory=list)
    """Per-turn rewards of each row."""
    scored_ids: list[list[int]] = field(default_factory=list)
    """Tokens of the completions that were scored, which a subclass may have changed."""
    logged: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that reward functions logged for the table of completions."""

    @property
    def lists(self) -> dict[str, list[Any]]:
        """Kept sets, routes and images of the rows, where there are any, by their names in a micro-batch."""
        lists: dict[str, list[Any]] = {SUPPORTS: self.supports, ROUTES: self.routes, IMAGES: self.images}
        return {name: rows for name, rows in lists.items() if rows}

    @property
    def trajectories(self) -> list[Trajectory]:
        """Trajectories of the rows, or an empty list where completions are plain."""
        return [] if self.generated is None else self.generated.extra.get(COLUMN) or []
