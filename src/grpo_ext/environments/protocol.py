"""What an environment is: TRL's class of tools, or a `Conversation` that answers the model's whole message."""

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, TypeAlias

from grpo_ext.registry import Registry

Message: TypeAlias = dict[str, Any]
Opening: TypeAlias = str | list[Message] | None
environments: Registry[type] = Registry("environment")
"""Those that a recipe can name; `catalogue` fills it."""
COLUMN = "environment"
"""Dataset column that says which environment a row is of, as in TRL."""
RESET, REWARD = "reset", "get_reward"
"""Methods of TRL's classes that are no tools."""


class Step(NamedTuple):
    """What an environment answers to a message of the model's."""

    observation: str | list[Message] | None = None
    """What the model reads next: text, which becomes a user message, or messages."""
    reward: float | None = None
    """Of this turn."""
    done: bool = False
    afresh: bool = False
    """Whether the observation is all that the model reads next, in place of what was said before."""


class Conversation:
    """An environment that reads whole messages; subclass it, one instance lives for one attempt at one prompt.

    A class with other public methods that does not derive from this one is TRL's: its methods are tools.
    """

    in_process = False
    """Whether it runs in the training process: for what answers at once and cannot fail."""
    needs: tuple[str, ...] = ()
    """Columns of the data without which it cannot begin."""
    seed = 0
    """Alike for all completions of a prompt, so that they play the same game; set before `reset`."""

    def reset(self, row: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """Begin with a row of the dataset; the answer is put behind the prompt if text, in its place if messages."""
        return None

    def step(self, message: Message) -> Step | tuple | Awaitable[Step | tuple]:
        """Answer the model's message: observation, reward of the turn, whether it is over."""
        raise NotImplementedError


def is_conversation(environment: type | None) -> bool:
    """Whether it reads whole messages, not calls of tools."""
    return isinstance(environment, type) and issubclass(environment, Conversation)


def owns_reward(environment: type | None) -> bool:
    """Whether it says itself what an attempt was worth."""
    return is_conversation(environment) or callable(getattr(environment, REWARD, None))
