"""Run attempts independently: while one environment computes, the policy samples turns of the others.

The loop waits for one of two things. While an attempt is ready for the policy it does not wait: all ready attempts are
the engine's next wave, and environments go on computing. While no attempt is ready it waits for any environment to
answer, to run out of time, or to end. So each attempt is always with the engine, with an environment that has a
deadline, or over, and a failure concerns one attempt only. An agent is an environment with one request, `run`, that
asks for turns itself while it computes; its clock stops while it waits for an answer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from grpo_ext.environments.agents import Agents
from grpo_ext.environments.attempt import Attempt, AttemptFigures, AttemptLimits, Call, MessageParser, Task
from grpo_ext.environments.engine import TurnEngine
from grpo_ext.environments.hosts import Answer, Connection, EnvironmentHost, answers, most_attempts
from grpo_ext.environments.observations import final_reward, opened, stepped
from grpo_ext.environments.rendering import CannotRender, Context, Renderer
from grpo_ext.environments.session import EnvironmentFailed, FailureKind, InvalidResult
from grpo_ext.errors import without_secrets
from grpo_ext.objective.trajectory import Sample, Trajectory, Turn, TurnRequest, common
from grpo_ext.waiting import GRACE_SECONDS, Wait, WaitedInVain

TEMPLATE = "template"
"""Kind of failure: the chat template cannot render the conversation."""
_LONG = 3600.0
_MOMENT = 0.005
"""Seconds for which answers are collected into one wave."""


class Attempts:
    """Runs the attempts of a generation.

    Args:
        engine: samples turns.
        host: runs the environments.
        renderer: renders contexts.
        parse: parses samples.
        limits: limits of each attempt.
        waiting: context in which the loop waits for environments while no turn is sampled.
        tools: whether agents may give the model tools.
    """

    def __init__(
        self,
        engine: TurnEngine,
        host: EnvironmentHost,
        renderer: Renderer,
        parse: MessageParser,
        limits: AttemptLimits,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        tools: bool = True,
    ) -> None:
        self.engine, self.host, self.renderer, self.parse, self.limits = engine, host, renderer, parse, limits
        self.waiting = waiting
        self.agents = Agents(renderer, parse, limits, tools)
        self._waiting: deque[Attempt] = deque()
        self._open = self._most = 0
        self._done: dict[int, tuple[Trajectory, AttemptFigures]] = {}
        self._ready: list[Call] = []
        self._computing: dict[Connection, Attempt] = {}
        self._sampling: dict[TurnRequest, Call] = {}
        self._answered: deque[tuple[Attempt, Answer]] = deque()
        self._leaves = False

    def run(self, tasks: Sequence[Task]) -> list[tuple[Trajectory, AttemptFigures]]:
        """Return trajectory and figures of each task, in order; a failed environment fails its attempt only."""
        attempts = [Attempt(number, task) for number, task in enumerate(tasks)]
        self._waiting, self._most = deque(attempts), most_attempts()
        try:
            self._admit()
            while self.engine.anyone(self._unfinished, self._leaves):
                with nullcontext() if self.engine.pending else self.waiting():
                    self._take_answers()
                if self._ready or self._sampling or not self._busy:
                    self._wave()
        finally:
            self.agents.close()
            for attempt in attempts:  # open ones, after a failure of the engine
                if attempt.connection is not None and attempt.number not in self._done:
                    attempt.connection.close()
            self.host.drain()
        return [self._done[number] for number in range(len(tasks))]

    @property
    def _unfinished(self) -> bool:
        return bool(self._ready or self._computing or self._answered or self._sampling)

    @property
    def _busy(self) -> bool:
        """Whether an environment computes; an agent that waits for an answer does not."""
        return any(not attempt.asked for attempt in self._computing.values())

    # Environments.

    def _admit(self) -> None:
        """Begin attempts, as many as there are descriptors for."""
        while self._waiting and self._open < self._most and not self._leaves:
            self._open += 1
            self._begin(self._waiting.popleft())

    def _begin(self, attempt: Attempt) -> None:
        task = attempt.task
        attempt.history, attempt.opening = list(task.prompt), list(task.prompt)
        try:
            attempt.connection = self.host.open(task.spec, task.seed)
        except EnvironmentFailed as failure:
            self._answered.append((attempt, Answer({}, str(failure), 0.0)))
        except WaitedInVain as error:
            self._leaves = True
            self._answered.append((attempt, Answer({}, str(error), 0.0)))
        except Exception as error:  # no descriptors, no threads left
            self._answered.append((attempt, Answer({}, f"{FailureKind.DIED}: it could not be started ({error})", 0.0)))
        else:
            if task.spec.is_agent:
                self._ask(attempt, "run", self.agents.begin(attempt, self.host.endpoint))
            else:
                self._ask(attempt, "reset", dict(task.row))

    def _ask(self, attempt: Attempt, request: str, value: object) -> None:
        connection, attempt.request = attempt.connection, request
        assert connection is not None
        try:
            answer = connection.ask((request, value), attempt.task.spec.turn_timeout)
        except Exception as error:  # a column that cannot be sent to a process
            answer = Answer({}, f"{FailureKind.GARBAGE}: {error}", 0.0)
        if answer is None:
            self._computing[connection] = attempt
        else:
            self._answered.append((attempt, answer))

    def _take_answers(self) -> None:
        """Handle the answers that have come; wait for the first if there is no other work."""
        waited = self._wait()
        own = [] if self.engine.descriptor is None else [self.engine.descriptor]
        descriptors = [*own, *self.agents.descriptors]
        while True:
            while self._answered:
                self._handle(*self._answered.popleft())
            if calls := self.agents.take():
                self._ready += calls
                waited.progressed()
            if not self._busy and not self.engine.pending:
                return
            idle = self.engine.waits or not self._ready
            seconds = _LONG if idle else _MOMENT
            if idle and not self.engine.pending:  # a sampler has waits of its own
                try:
                    seconds = waited.look()
                except WaitedInVain:
                    self._leaves = True
                    return
            found, woken = answers(list(self._computing), seconds, descriptors)
            sampled = self.engine.descriptor in woken
            if found:
                waited.progressed()
            self._answered.extend((self._computing.pop(connection), answer) for connection, answer in found)
            if not self._answered and (sampled or not idle):
                return

    def _wait(self) -> Wait:
        """Return the wait for the environments that compute; each has a deadline of its own."""
        specs = [attempt.task.spec for attempt in self._computing.values()]
        names = ", ".join(sorted({spec.name for spec in specs}))
        longest = max((spec.turn_timeout for spec in specs), default=0.0)
        return Wait(f"environment {names}", longest, "turn_timeout", GRACE_SECONDS)

    def _handle(self, attempt: Attempt, answer: Answer) -> None:
        attempt.figures.seconds += answer.seconds
        if answer.failure is not None:
            raised = answer.failure.startswith(FailureKind.RAISED)
            if raised and attempt.over_limit and attempt.turns:  # most likely by the refusal: no room was left
                self._end(attempt, 0.0, None)
            else:
                self._fail(attempt, answer.failure)
            return
        handlers = {"reset": self._opened, "step": self._stepped, "finish": self._finished, "run": self._ran}
        try:
            handlers[attempt.request](attempt, answer.value)
        except InvalidResult as error:
            self._fail(attempt, f"{FailureKind.GARBAGE}: {attempt.request}: {error}")
        except CannotRender as error:
            self._fail(attempt, f"{TEMPLATE}: {error}")

    def _opened(self, attempt: Attempt, value: Mapping[str, Any]) -> None:
        attempt.history = opened(attempt.task.prompt, value, self.renderer.harmless)
        attempt.opening = attempt.observation = list(attempt.history)
        attempt.context = self.renderer.opening(attempt.history, attempt.task.tools)
        self._continue(attempt)

    def _stepped(self, attempt: Attempt, value: Mapping[str, Any]) -> None:
        step = stepped(value)
        figures, turn = attempt.figures, attempt.turns[-1]
        figures.calls, figures.refused = figures.calls + step.calls, figures.refused + step.refused
        attempt.turns[-1] = replace(turn, reward=step.reward)
        news = self.renderer.harmless(step.observation)
        if step.done or figures.turns >= attempt.task.spec.max_turns:
            attempt.messages += news
            self._finish(attempt, truncated=not step.done)
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
        if self._room(attempt) >= 1:
            attempt.messages += news
            attempt.observation = news
        self._continue(attempt)

    def _continue(self, attempt: Attempt) -> None:
        if self._room(attempt) < 1:
            self._finish(attempt, truncated=True)
        else:
            self._ready.append(Call(attempt, attempt.context))

    def _finish(self, attempt: Attempt, *, truncated: bool) -> None:
        attempt.truncated = truncated
        self._ask(attempt, "finish", None)

    def _room(self, attempt: Attempt) -> int:
        return self.limits.room(attempt.spent, attempt.context)

    # The policy.

    def _wave(self) -> None:
        """Begin all turns that attempts are ready for, in order of the attempts."""
        open_calls = (call for call in self._ready if call.attempt.number not in self._done)
        wave, self._ready = self.agents.limited(sorted(open_calls, key=lambda call: call.attempt.number))
        turns = [TurnRequest(call.context.ids, call.limit, call.attempt.number) for call in wave]
        self._sampling |= dict(zip(turns, wave, strict=True))
        for turn, sample in self.engine.generate(turns):
            call = self._sampling.pop(turn)
            if call.request is None:
                self._sampled(call.attempt, sample)
            elif call.attempt.number not in self._done:
                self.agents.answer(call, sample, self.engine.version)

    def _sampled(self, attempt: Attempt, sample: Sample) -> None:
        turn = Turn(attempt.context.ids, sample.ids, sample.logprobs, self.engine.version, support=sample.support)
        attempt.turns.append(replace(turn, state=repr(attempt.observation)))
        attempt.figures.turns += 1
        attempt.spent += len(sample.ids)
        attempt.parsed = self.parse(sample.ids, attempt.context.ids, attempt.task.tools)
        attempt.messages.append(attempt.parsed)
        if sample.ids and sample.ids[-1] in self.limits.ends:
            self._ask(attempt, "step", attempt.parsed)
        else:
            self._finish(attempt, truncated=True)

    # The end.

    def _finished(self, attempt: Attempt, value: Mapping[str, Any]) -> None:
        self._end(attempt, final_reward(value), None)

    def _ran(self, attempt: Attempt, value: Mapping[str, Any]) -> None:
        attempt.status = status if isinstance(status := value.get("status"), int) else None
        if attempt.turns or attempt.truncated:
            self._end(attempt, final_reward(value), None)
        else:
            assert attempt.connection is not None
            reason = f"it ended without an answer of the model. {' '.join(attempt.connection.output()[-400:].split())}"
            self._fail(attempt, f"{FailureKind.RAISED}: run: {reason}")

    def _fail(self, attempt: Attempt, failure: str) -> None:
        on_error = attempt.task.spec.on_error
        if attempt.line is not None:
            failure = failure.replace(attempt.line.key, "(its key)")
        failure = without_secrets(failure)
        attempt.truncated = True
        attempt.turns = [replace(turn, reward=None) for turn in attempt.turns]
        self._end(attempt, None if isinstance(on_error, str) else float(on_error), failure)

    def _prompt(self, attempt: Attempt) -> Context:
        """Return a context for an attempt that failed before its first turn."""
        try:
            return self.renderer.opening(attempt.task.prompt, attempt.task.tools)
        except CannotRender:
            return Context([min(self.limits.ends)], "")

    def _end(self, attempt: Attempt, reward: float | None, failure: str | None) -> None:
        output = ""
        if attempt.connection is not None:
            if attempt.line is not None:
                output = attempt.connection.output().replace(attempt.line.key, "(its key)")
            attempt.connection.close()
        self.agents.end(attempt)
        context = attempt.context if attempt.context.ids else self._prompt(attempt)
        turns = attempt.turns or [Turn(context.ids, [], None, self.engine.version)]
        name = attempt.task.spec.name
        messages = attempt.messages or [{"role": "assistant", "content": ""}]
        seen = (name, messages, attempt.opening, attempt.branches, output, attempt.status)
        trajectory = Trajectory(turns, reward, attempt.truncated, failure, *seen)
        self._done[attempt.number] = trajectory, attempt.figures
        self._open -= 1
        self._admit()
