"""Protocols of environments: TRL's class of tools, a `Conversation` that answers messages, an `Agent` that asks."""

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, TypeAlias

from grpo_ext.registry import Registry

Message: TypeAlias = dict[str, Any]
Opening: TypeAlias = Any
"""Text, an image (PIL, or an array of bytes), content parts, messages, or None."""
environments: Registry[type] = Registry("environment")
"""Environments that a recipe can name; `catalogue` registers the packaged ones."""
ENVIRONMENT_COLUMN = "environment"
"""Dataset column with the name of the row's environment, as in TRL."""
RESET, REWARD = "reset", "get_reward"
"""Methods of TRL's classes that are not tools."""


OUTPUTS = ("agent.out", "test.out")
"""Files among an episode's temporary files into which an agent's program and its test print."""
IMAGE = "image"
"""Type of a content part with an image, a PIL image or an array of bytes."""
MEDIA = ("image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url")
"""Types of content parts that environments refuse."""
PARTS_CURE = "Use text, and images as {'type': 'image', 'image': ...}."


class Step(NamedTuple):
    """An environment's answer to a message of the model."""

    observation: Any = None
    """The model's next input: messages, or text, an image or content parts, which become a user message."""
    reward: float | None = None
    """Reward of this turn."""
    done: bool = False
    afresh: bool = False
    """Whether the observation replaces the whole conversation so far."""


class Conversation:
    """An environment that reads whole messages. Subclass it; an instance serves one episode of one prompt.

    A class with public methods that is not a subclass follows TRL's protocol: its methods are tools.
    """

    in_process = False
    """Whether it runs in the training process: for environments that answer immediately and cannot fail."""
    needs: tuple[str, ...] = ()
    """Columns of the data that it needs."""
    seed = 0
    """Seed of the prompt, so that all its completions play the same game; set before `reset`."""

    def reset(self, row: Mapping[str, Any]) -> Opening | Awaitable[Opening]:
        """Begin with a row; return text, an image or parts to append to the prompt, or messages to replace it."""
        return None

    def step(self, message: Message) -> Step | tuple | Awaitable[Step | tuple]:
        """Answer the model's message: observation, reward of the turn, whether it is over."""
        raise NotImplementedError


class AgentTask(NamedTuple):
    """The row and the way to the model that an agent gets; both end with the episode."""

    row: Mapping[str, Any]
    url: str
    """Address of the endpoint; OpenAI's paths begin with `/v1` behind it."""
    key: str


class Agent:
    """An environment that calls the model itself, through an endpoint that speaks OpenAI's protocol."""

    in_process = False
    needs: tuple[str, ...] = ()
    """Columns of the data that it needs."""
    status: int | None = None
    """The exit status of its program, if it is one."""

    @staticmethod
    def pays(options: Mapping[str, Any]) -> bool:
        """Return whether it has a reward of its own, by its options."""
        return True

    def run(self, task: AgentTask) -> float | Awaitable[float | None] | None:
        """Run the agent to its end. Return its reward, or None if it has none."""
        raise NotImplementedError


def is_conversation(environment: type | None) -> bool:
    """Return whether it reads whole messages, not calls of tools."""
    return isinstance(environment, type) and issubclass(environment, Conversation)


def is_agent(environment: type | None) -> bool:
    """Return whether it calls the model itself."""
    return isinstance(environment, type) and issubclass(environment, Agent)


def has_tools(environment: type | None) -> bool:
    """Return whether the model calls its methods."""
    return not is_conversation(environment) and not is_agent(environment)


def owns_reward(environment: type | None, options: Mapping[str, Any]) -> bool:
    """Return whether it has its own reward."""
    if isinstance(environment, type) and issubclass(environment, Agent):
        return environment.pays(options)
    return is_conversation(environment) or callable(getattr(environment, REWARD, None))


# Content parts, [{"type": "text", "text": ...}, ...].


def is_parts(content: object) -> bool:
    """Return whether a value is a list of content parts."""
    return isinstance(content, list) and bool(content) and all(map(_is_part, content))


def _is_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") in (IMAGE, *MEDIA) or (part.get("type") == "text" and isinstance(part.get("text"), str))


def medium(content: Any) -> str | None:
    """Return the type of the first content part that is neither text nor an image; None if there is none."""
    return next((part["type"] for part in content if part["type"] in MEDIA), None) if is_parts(content) else None


def is_text(content: Any) -> bool:
    """Return whether a value is a list of content parts of text."""
    return is_parts(content) and all(part["type"] == "text" for part in content)


def parts_text(parts: list[dict[str, Any]]) -> str:
    """Return the text of content parts, concatenated as chat templates do."""
    return "".join(part["text"] for part in parts)
