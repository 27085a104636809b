"""Python programs, run in the sandbox of `rewards.code`, as a tool."""

from collections.abc import Iterator

from grpo_ext.environments.protocol import environments
from grpo_ext.errors import Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.code import sandbox


@environments.register("python")
class Python:
    """One tool, `python`: no network, only its own files, no state between calls.

    Args:
        timeout: limit of a program in seconds.
        memory_mb: limit of its memory.
        longest: characters of its output that the model reads.
        packages: whether it can import installed packages.
        min_protection: as in the reward `code`.
    """

    def __init__(
        self,
        timeout: float = 5.0,
        memory_mb: int = 512,
        longest: int = 2000,
        packages: bool = False,
        min_protection: str = "isolated",
    ) -> None:
        self._limits = sandbox.Limits(timeout=timeout, memory_mb=memory_mb)
        self._longest, self._packages, self._protection = longest, packages, min_protection

    @staticmethod
    def preload(min_protection: str = "isolated", **_: object) -> None:
        """Find out once which protection this machine has."""
        sandbox.available(min_protection)

    @staticmethod
    def option_problems(min_protection: str = "isolated", **_: object) -> Iterator[Problem]:
        """Yield the problem of an unknown protection."""
        if min_protection not in sandbox.PROTECTIONS:
            cure = did_you_mean(min_protection, sandbox.PROTECTIONS)
            yield Problem("min_protection", min_protection, "not one of its values", cure)

    def reset(self, **row: object) -> None:
        """Keep no state."""

    def python(self, code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: The whole program; it prints what you want to know.

        Returns:
            Its output, and its error if it failed.
        """
        outcome = sandbox.run(
            code, limits=self._limits, min_protection=self._protection, packages=self._packages
        )  # fmt: skip
        output = outcome.stdout.decode(errors="replace")
        if outcome.stopped:
            output += f"\n[stopped: {outcome.stopped}]"
        elif not outcome.ok:
            output += outcome.stderr.decode(errors="replace")[-self._longest // 2 :]
        kept = output if len(output) <= self._longest else f"{output[: self._longest]}\n[cut]"
        return kept.strip() or "[nothing was printed]"
