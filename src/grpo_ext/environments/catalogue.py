"""The registry with all packaged environments."""

from grpo_ext.environments.library import calculator, command, guess, python, retry
from grpo_ext.environments.protocol import environments

__all__ = ["calculator", "command", "environments", "guess", "python", "retry"]
