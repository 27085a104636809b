"""Protocols of environments: TRL's class of tools, or a `Conversation` that answers the model's whole message."""

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, TypeAlias

from grpo_ext.registry import Registry

Message: TypeAlias = dict[str, Any]
Opening: TypeAlias = str | list[Message] | None
environments: Registry[type] = Registry("environment")
"""Environments that a recipe can name; `catalogue` registers the packaged ones."""
ENVIRONMENT_COLUMN = "environment"
"""Dataset column with the name of the row's environment, as in TRL."""
RESET, REWARD = "reset", "get_reward"
"""Methods of TRL's classes that are not tools."""


class Step(NamedTuple):
    """An environment's answer to a message of the model."""

    observation: str | list[Message] | None = None
    """The model's next input: messages, or text, which becomes a user message."""
    reward: float | None = None
    """Reward of this turn."""
    done: bool = False
    afresh: bool = False
    """Whether the observation replaces the whole conversation so far."""


class Conversation:
    """An environment that reads whole messages. Subclass it; an instance serves one attempt at one prompt.

    A class with public methods that is not a subclass follows TRL's protocol: its methods are tools.
    """

    in_process = False
    """Whether it runs in the training process: for environments that answer immediately and cannot fail."""
    needs: tuple[str, ...] = ()
    """Columns of the data that it needs."""
    seed = 0
    """Seed of the prompt, so that all its completions play the same game; set before `reset`."""

    def reset(self, row: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """Begin with a row of the dataset; return text to append to the prompt, or messages to replace it."""
        return None

    def step(self, message: Message) -> Step | tuple | Awaitable[Step | tuple]:
        """Answer the model's message: observation, reward of the turn, whether it is over."""
        raise NotImplementedError


def is_conversation(environment: type | None) -> bool:
    """Return whether it reads whole messages, not calls of tools."""
    return isinstance(environment, type) and issubclass(environment, Conversation)


def owns_reward(environment: type | None) -> bool:
    """Return whether it has its own reward."""
    return is_conversation(environment) or callable(getattr(environment, REWARD, None))
