"""An episode: its task, its limits, what it took, and its state while the loop runs it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.endpoint.history import History, Opened
from grpo_ext.environments.endpoint.requests import Line, PendingRequest
from grpo_ext.environments.hosts import Connection
from grpo_ext.environments.protocol import Message
from grpo_ext.environments.rendering import Context
from grpo_ext.objective.trajectory import Turn


class MessageParser(Protocol):
    """Parses a sampled message."""

    def __call__(self, ids: list[int], context: list[int], tools: list[dict] | None) -> Message:
        """Return the message with its tool calls."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of each episode."""

    completion: int
    """Most tokens after the prompt."""
    counts_all: bool
    """Whether an environment's tokens count as well."""
    context: int | None
    """Positions of the model."""
    ends: frozenset[int]
    """Tokens that end a turn."""

    def room(self, spent: int, context: Context) -> int:
        """Return the number of tokens that the policy may still sample after a context, `spent` of them gone."""
        left = self.completion - spent
        return left if self.context is None else min(left, self.context - len(context.ids))


@dataclass(frozen=True)
class Task:
    """An episode to be made."""

    spec: EnvironmentSpec
    row: Mapping[str, Any]
    prompt: list[Message]
    tools: list[dict] | None
    seed: int
    """Seed of the environment."""


@dataclass
class EpisodeFigures:
    """Turns, tool calls, refused tool calls and seconds of an episode."""

    turns: int = 0
    calls: int = 0
    refused: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Episode:
    """State of an episode in the loop."""

    number: int
    task: Task
    connection: Connection | None = None
    context: Context = field(default_factory=lambda: Context([], ""))
    history: list[Message] = field(default_factory=list)
    opening: list[Message] = field(default_factory=list)
    observation: list[Message] = field(default_factory=list)
    """The environment's messages before the next turn: the state that the policy sees."""
    messages: list[Message] = field(default_factory=list)
    """Messages after the prompt, as rewards see them."""
    branches: str = ""
    """Further conversations of an agent, for people."""
    parsed: Message = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    figures: EpisodeFigures = field(default_factory=EpisodeFigures)
    request: str = ""
    spent: int = 0
    truncated: bool = False
    over_limit: bool = False
    """Whether an agent's request was refused for a limit."""
    status: int | None = None
    """The exit status of an agent's program."""
    line: Line | None = None
    """An agent's way to the model."""
    dialogue: History | None = None
    pending: int = 0
    """Answers that an agent waits for."""
    left: int = 0
    """Answers for which an agent has not waited."""
    reserved: int = 0
    """Most tokens of the answers that are being sampled for an agent."""


@dataclass(eq=False)
class Call:
    """A turn that an episode is ready for."""

    episode: Episode
    context: Context
    request: PendingRequest | None = None
    """The request that it answers, of an agent."""
    opened: Opened | None = None
    limit: int = 1
    """Most tokens of the turn."""
