"""What a user is told of: each is raised with the value, the reason and the cure in its message."""


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
    """A dataset, or a setting of one, that cannot be used; the message names the place and the cure."""


class RewardError(RuntimeError):
    """A reward with `on_error: raise` failed; the message names it and says why."""


class RolloutDrift(RuntimeError):
    """The sampler is not the policy, and `rollout_drift_action` says to stop."""


class ServerLost(RuntimeError):
    """The vLLM server is gone for good; raised on all processes."""


class NotSaved(RuntimeError):
    """A model of which no weights were written."""
