"""The protocol of a sampler of turns, as the loop uses it."""

from typing import Protocol

from grpo_ext.objective.trajectory import Sample, TurnRequest


class TurnEngine(Protocol):
    """Samples turns."""

    version: int
    """Version of the weights."""
    descriptor: int | None
    """File descriptor that is readable when a turn has been sampled in the background."""

    @property
    def waits(self) -> bool:
        """Whether a wave waits until all environments have answered."""

    @property
    def pending(self) -> int:
        """Number of turns that are being sampled in the background."""

    def generate(self, turns: list[TurnRequest]) -> list[tuple[TurnRequest, Sample]]:
        """Begin turns; return finished ones. An engine that samples in waves returns all of them, in order."""

    def anyone(self, here: bool, leaves: bool) -> bool:
        """Return whether any process that generates together with this one still has an episode.

        Args:
            here: whether this process has one.
            leaves: whether this process has waited in vain, since a signal ends the run.

        Raises:
            SamplerLost: one of them has, and an episode is left.
        """

    def close(self) -> None:
        """End the engine after a generation."""
