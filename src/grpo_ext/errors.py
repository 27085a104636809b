"""What a user is told of: each is raised with the value, the reason and the cure in its message."""

NOT_FINISHED = 75
"""Exit code of a run that was told to end, or lost a process: the same command goes on (EX_TEMPFAIL)."""


class UnknownNameError(ValueError):
    """A name that no registry entry and no importable path answers to."""


class ConfigError(ValueError):
    """All that is wrong with a recipe; `problems` holds one sentence for each mistake."""

    def __init__(self, problems: list[str]) -> None:
        """Number and join the problems."""
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  - {p}" for p in problems)]))


class DataError(ValueError):
    """A dataset, or a setting of one, that cannot be used; each line of the message names a place and the cure."""

    @property
    def problems(self) -> list[str]:
        """One for each mistake, as those of a `ConfigError`."""
        return str(self).splitlines()


class RewardError(RuntimeError):
    """A reward with `on_error: raise` failed; the message names it and says why."""


class NonFiniteError(RuntimeError):
    """NaN or inf where the optimizer would have seen it; raised on all processes, with what was found first."""


class RolloutDrift(RuntimeError):
    """The sampler is not the policy, and `rollout_drift_action` says to stop."""


class ServerLost(RuntimeError):
    """The vLLM server is gone for good; raised on all processes."""


class SaveError(RuntimeError):
    """A checkpoint or the model could not be written; raised on all processes, elder checkpoints are untouched."""


class RankLost(RuntimeError):
    """Another process of the launch is gone, or did not come within `ddp_timeout`."""


class RunInterrupted(SystemExit):
    """A run was told to end and has saved what it had; uncaught, its process ends with `NOT_FINISHED`."""

    def __init__(self, line: str) -> None:
        """`line` says what was saved."""
        super().__init__(NOT_FINISHED)
        self.line = line

    def __str__(self) -> str:
        """What was saved."""
        return self.line
