"""The registry with all packaged environments."""

from grpo_ext.environments.library import calculator, guess, python, retry
from grpo_ext.environments.protocol import environments

__all__ = ["calculator", "environments", "guess", "python", "retry"]
