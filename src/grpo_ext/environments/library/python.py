"""Python programs, run in the sandbox of `rewards.code`, as a tool."""

from collections.abc import Iterator
from typing import Any

from grpo_ext.environments.protocol import environments
from grpo_ext.rewards.code import sandbox


@environments.register("python")
class Python:
    """One tool, `python`: no network, no files but its own, nothing kept from one call to the next.

    Args:
        timeout: seconds that a program may take.
        memory_mb: what it may use.
        longest: characters of its output that the model reads.
        packages: whether it can import what is installed here.
        min_protection: as the reward `code` has it.
    """

    def __init__(
        self,
        timeout: float = 5.0,
        memory_mb: int = 512,
        longest: int = 2000,
        packages: bool = False,
        min_protection: str = "isolated",
    ) -> None:
        """Nothing is started yet."""
        self._limits = sandbox.Limits(timeout=timeout, memory_mb=memory_mb)
        self._longest, self._packages, self._protection = longest, packages, min_protection

    @staticmethod
    def preload(min_protection: str = "isolated", **_: Any) -> None:
        """Find out once what this machine can do."""
        sandbox.available(min_protection)

    @staticmethod
    def option_problems(min_protection: str = "isolated", **_: Any) -> Iterator[str]:
        """What is wrong with its options."""
        if min_protection not in sandbox.PROTECTIONS:
            yield f"min_protection={min_protection!r}. Known: {', '.join(sandbox.PROTECTIONS)}."

    def reset(self, **row: object) -> None:
        """Nothing to begin with."""

    def python(self, code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: The whole program; it prints what you want to know.

        Returns:
            What it printed, and its error if it failed.
        """
        outcome = sandbox.run(
            code, limits=self._limits, min_protection=self._protection, packages=self._packages
        )  # fmt: skip
        said = outcome.stdout.decode(errors="replace")
        if outcome.stopped:
            said += f"\n[stopped: {outcome.stopped}]"
        elif not outcome.ok:
            said += outcome.stderr.decode(errors="replace")[-self._longest // 2 :]
        kept = said if len(said) <= self._longest else f"{said[: self._longest]}\n[cut]"
        return kept.strip() or "[nothing was printed]"
