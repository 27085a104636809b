"""Attempts that advance on their own: while one environment thinks, the policy speaks to the others.

The loop waits for one of two things. While an attempt is ready for the policy it does not wait at all: whatever is
ready is the engine's next wave, and environments think on meanwhile. While none is ready it waits for an answer of any
environment, which comes, or whose time is up, or whose process ends. So each attempt is always with the engine, with
an environment that has a deadline, or over; and a failure is of one attempt alone.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from grpo_ext.environments.composition import EnvironmentSpec
from grpo_ext.environments.hosts import Answer, Connection, EnvironmentHost, answers
from grpo_ext.environments.observations import opened, stepped, worth
from grpo_ext.environments.protocol import Message
from grpo_ext.environments.rendering import CannotRender, Context, Renderer
from grpo_ext.environments.session import EnvironmentFailed, FailureKind, InvalidResult
from grpo_ext.objective.trajectory import Sample, Trajectory, Turn, common

TEMPLATE = "template"
"""Kind of failure: what was said cannot be rendered."""
_MOMENT = 0.005
"""Seconds in which answers that come together make one wave."""


class Engine(Protocol):
    """What samples."""

    version: int
    """Of the weights."""
    descriptor: int | None
    """Readable when a turn is there that it has sampled while the loop went on."""

    @property
    def waits(self) -> bool:
        """Whether a wave waits until all environments have answered."""

    @property
    def pending(self) -> int:
        """Turns that it samples while the loop goes on."""

    def generate(
        self, contexts: list[list[int]], limits: list[int], attempts: list[int]
    ) -> list[tuple[int, Sample]]:  # fmt: skip
        """Begin a turn behind each context, of at most so many tokens; attempts whose turns are there, and the turns.

        Those are all that were begun, in their order, where it samples in waves.
        """

    def anyone(self, here: bool) -> bool:
        """Whether any process that generates together with this one still has an attempt."""


class Parser(Protocol):
    """Reads a message out of what was sampled."""

    def __call__(self, ids: list[int], context: list[int], tools: list[dict] | None) -> Message:
        """The message, with the calls of tools in it."""


@dataclass(frozen=True)
class Limits:
    """How far an attempt may go."""

    completion: int
    """Tokens that may follow the prompt."""
    counts_all: bool
    """Whether an environment's tokens count too."""
    context: int | None
    """Positions that the model has."""
    ends: frozenset[int]
    """Tokens that end a turn."""


@dataclass(frozen=True)
class Task:
    """One attempt to be made."""

    spec: EnvironmentSpec
    row: Mapping[str, Any]
    prompt: list[Message]
    tools: list[dict] | None
    seed: int
    """Of the environment."""


@dataclass
class Figures:
    """What an attempt took."""

    turns: int = 0
    calls: int = 0
    refused: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Attempt:
    number: int
    task: Task
    line: Connection | None = None
    context: Context = field(default_factory=lambda: Context([], ""))
    history: list[Message] = field(default_factory=list)
    opening: list[Message] = field(default_factory=list)
    observation: list[Message] = field(default_factory=list)
    """The environment's messages before the next turn: its state, as far as the policy can see it."""
    said: list[Message] = field(default_factory=list)
    """Behind the prompt, as rewards see it."""
    parsed: Message = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    asked: str = ""
    spent: int = 0
    truncated: bool = False
    over: bool = False


class Attempts:
    """A generation's attempts, from their beginning to their trajectories.

    Args:
        engine: samples.
        hosts: run the environments.
        renderer: makes contexts.
        parse: reads messages.
        limits: of each attempt.
        waiting: what it waits for environments in, while nothing is sampled.
    """

    def __init__(
        self,
        engine: Engine,
        hosts: EnvironmentHost,
        renderer: Renderer,
        parse: Parser,
        limits: Limits,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Nothing is begun."""
        self.engine, self.hosts, self.renderer, self.parse, self.limits = engine, hosts, renderer, parse, limits
        self.waiting = waiting
        self._done: dict[int, tuple[Trajectory, Figures]] = {}
        self._ready: list[_Attempt] = []
        self._thinking: dict[Connection, _Attempt] = {}
        self._speaking: dict[int, _Attempt] = {}
        self._answered: deque[tuple[_Attempt, Answer]] = deque()

    def run(self, tasks: Sequence[Task]) -> list[tuple[Trajectory, Figures]]:
        """The trajectory of each task, in order, and what it took; whatever environments do."""
        attempts = [_Attempt(number, task) for number, task in enumerate(tasks)]
        try:
            for attempt in attempts:
                self._begin(attempt)
            while self.engine.anyone(bool(self._ready or self._thinking or self._answered or self._speaking)):
                with nullcontext() if self.engine.pending else self.waiting():
                    self._take_answers()
                if self._ready or self._speaking or not self._thinking:
                    self._wave()
        finally:
            for attempt in attempts:  # those that an engine's failure has left open
                if attempt.line is not None and attempt.number not in self._done:
                    attempt.line.close()
            self.hosts.drain()
        return [self._done[number] for number in range(len(tasks))]

    # Environments.

    def _begin(self, attempt: _Attempt) -> None:
        task = attempt.task
        attempt.history, attempt.opening = list(task.prompt), list(task.prompt)
        try:
            attempt.line = self.hosts.open(task.spec, task.seed)
        except EnvironmentFailed as failure:
            self._answered.append((attempt, Answer({}, str(failure), 0.0)))
        except Exception as error:  # no descriptors, no threads left
            self._answered.append((attempt, Answer({}, f"{FailureKind.DIED}: it could not be started ({error})", 0.0)))
        else:
            self._ask(attempt, "reset", dict(task.row))

    def _ask(self, attempt: _Attempt, what: str, value: Any) -> None:
        line, attempt.asked = attempt.line, what
        assert line is not None
        try:
            answer = line.ask((what, value), attempt.task.spec.turn_timeout)
        except Exception as error:  # a column that cannot be sent to a process
            answer = Answer({}, f"{FailureKind.GARBAGE}: {error}", 0.0)
        if answer is None:
            self._thinking[line] = attempt
        else:
            self._answered.append((attempt, answer))

    def _take_answers(self) -> None:
        """Those that there are; where nothing else is to be done, wait for the first."""
        while True:
            while self._answered:
                self._hear(*self._answered.popleft())
            if not self._thinking and not self.engine.pending:
                return
            idle = self.engine.waits or not self._ready
            found, spoken = answers(list(self._thinking), 3600.0 if idle else _MOMENT, self.engine.descriptor)
            self._answered.extend((self._thinking.pop(line), answer) for line, answer in found)
            if not self._answered and (spoken or not idle):
                return

    def _hear(self, attempt: _Attempt, answer: Answer) -> None:
        attempt.figures.seconds += answer.seconds
        if answer.failure is not None:
            self._fail(attempt, answer.failure)
            return
        try:
            {"reset": self._open, "step": self._go_on, "finish": self._finish}[attempt.asked](attempt, answer.value)
        except InvalidResult as error:
            self._fail(attempt, f"{FailureKind.GARBAGE}: {attempt.asked}: {error}")
        except CannotRender as error:
            self._fail(attempt, f"{TEMPLATE}: {error}")

    def _open(self, attempt: _Attempt, value: Mapping[str, Any]) -> None:
        attempt.history = opened(attempt.task.prompt, value, self.renderer.harmless)
        attempt.opening = attempt.observation = list(attempt.history)
        attempt.context = self.renderer.opening(attempt.history, attempt.task.tools)
        self._continue(attempt)

    def _go_on(self, attempt: _Attempt, value: Mapping[str, Any]) -> None:
        """What follows an environment's answer to a turn."""
        step = stepped(value)
        figures, turn = attempt.figures, attempt.turns[-1]
        figures.calls, figures.refused = figures.calls + step.calls, figures.refused + step.refused
        attempt.turns[-1] = replace(turn, reward=step.reward)
        news = self.renderer.harmless(step.observation)
        if step.done or figures.turns >= attempt.task.spec.max_turns:
            attempt.truncated = not step.done
            attempt.said += news
            self._ask(attempt, "finish", None)
            return
        seen = [*attempt.context.ids, *turn.sampled]
        if step.afresh:
            attempt.context, attempt.history = self.renderer.opening(news, attempt.task.tools), news
        else:
            attempt.context, message = self.renderer.following(
                attempt.context, turn.sampled, attempt.history, attempt.parsed, news, attempt.task.tools
            )
            attempt.history += [message, *news]
        if self.limits.counts_all:
            attempt.spent += len(attempt.context.ids) - common(seen, attempt.context.ids)
        if self._room(attempt) < 1:
            attempt.truncated = True
            self._ask(attempt, "finish", None)
            return
        attempt.said += news
        attempt.observation = news
        self._continue(attempt)

    def _continue(self, attempt: _Attempt) -> None:
        if self._room(attempt) < 1:
            attempt.truncated = True
            self._ask(attempt, "finish", None)
        else:
            self._ready.append(attempt)

    def _room(self, attempt: _Attempt) -> int:
        """Tokens that the policy may still sample."""
        left = self.limits.completion - attempt.spent
        positions = left if self.limits.context is None else self.limits.context - len(attempt.context.ids)
        return min(left, positions)

    # The policy.

    def _wave(self) -> None:
        """A turn of every attempt that is ready, in their order."""
        wave = sorted(self._ready, key=lambda attempt: attempt.number)
        self._ready = []
        self._speaking |= {attempt.number: attempt for attempt in wave}
        samples = self.engine.generate(
            [attempt.context.ids for attempt in wave],
            [self._room(attempt) for attempt in wave],
            [attempt.number for attempt in wave],
        )
        for number, sample in samples:
            self._speak(self._speaking.pop(number), sample)

    def _speak(self, attempt: _Attempt, sample: Sample) -> None:
        turn = Turn(attempt.context.ids, sample.ids, sample.logprobs, self.engine.version)
        attempt.turns.append(replace(turn, state=repr(attempt.observation)))
        attempt.figures.turns += 1
        attempt.spent += len(sample.ids)
        attempt.parsed = self.parse(sample.ids, attempt.context.ids, attempt.task.tools)
        attempt.said.append(attempt.parsed)
        if sample.ids and sample.ids[-1] in self.limits.ends:
            self._ask(attempt, "step", attempt.parsed)
        else:
            attempt.truncated = True
            self._ask(attempt, "finish", None)

    # The end.

    def _finish(self, attempt: _Attempt, value: Mapping[str, Any]) -> None:
        self._end(attempt, worth(value), None)

    def _fail(self, attempt: _Attempt, failure: str) -> None:
        chosen = attempt.task.spec.on_error
        attempt.truncated = True
        attempt.turns = [replace(turn, reward=None) for turn in attempt.turns]
        if not attempt.context.ids:
            attempt.context = self._prompt(attempt)
        self._end(attempt, None if isinstance(chosen, str) else float(chosen), failure)

    def _prompt(self, attempt: _Attempt) -> Context:
        """Of an attempt that never began, something to stand before its nothing."""
        try:
            return self.renderer.opening(attempt.task.prompt, attempt.task.tools)
        except CannotRender:
            return Context([min(self.limits.ends)], "")

    def _end(self, attempt: _Attempt, reward: float | None, failure: str | None) -> None:
        if attempt.line is not None:
            attempt.line.close()
        turns = attempt.turns or [Turn(attempt.context.ids, [], None, self.engine.version)]
        name = attempt.task.spec.name
        said = attempt.said or [{"role": "assistant", "content": ""}]
        trajectory = Trajectory(turns, reward, attempt.truncated, failure, name, said, attempt.opening)
        self._done[attempt.number] = trajectory, attempt.figures
