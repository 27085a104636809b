"""Run episodes independently: while one environment computes, the policy samples turns of the others.

The loop waits for one of two things. While an episode is ready for the policy it does not wait: all ready episodes are
the engine's next wave, and environments go on computing. While no episode is ready it waits for any environment to
answer, to run out of time, or to end. So each episode is always with the engine, with an environment that has a
deadline, or over, and a failure concerns one episode only. An agent is an environment with one request, `run`, that
asks for turns itself while it computes; its clock stops while it waits for an answer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from grpo_ext.config.images import described, fingerprint, images_in
from grpo_ext.environments.agents import Agents
from grpo_ext.environments.engine import TurnEngine
from grpo_ext.environments.episode import Call, Episode, EpisodeFigures, EpisodeLimits, MessageParser, Task
from grpo_ext.environments.hosts import Answer, Connection, EnvironmentHost, answers, most_episodes
from grpo_ext.environments.observations import final_reward, opened, stepped
from grpo_ext.environments.protocol import Message
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


class EpisodeLoop:
    """Runs the episodes of a generation.

    Args:
        engine: samples turns.
        host: runs the environments.
        renderer: renders contexts.
        parse: parses samples.
        limits: limits of each episode.
        waiting: context in which the loop waits for environments while no turn is sampled.
        tools: whether agents may give the model tools.
    """

    def __init__(
        self,
        engine: TurnEngine,
        host: EnvironmentHost,
        renderer: Renderer,
        parse: MessageParser,
        limits: EpisodeLimits,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        tools: bool = True,
    ) -> None:
        self.engine, self.host, self.renderer, self.parse, self.limits = engine, host, renderer, parse, limits
        self.waiting = waiting
        self.agents = Agents(renderer, parse, limits, tools)
        self._waiting: deque[Episode] = deque()
        self._open = self._most = 0
        self._done: dict[int, tuple[Trajectory, EpisodeFigures]] = {}
        self._ready: list[Call] = []
        self._computing: dict[Connection, Episode] = {}
        self._sampling: dict[TurnRequest, Call] = {}
        self._answered: deque[tuple[Episode, Answer]] = deque()
        self._leaves = False

    def run(self, tasks: Sequence[Task]) -> list[tuple[Trajectory, EpisodeFigures]]:
        """Return trajectory and figures of each task, in order; a failed environment fails its episode only."""
        episodes = [Episode(number, task) for number, task in enumerate(tasks)]
        self._waiting, self._most = deque(episodes), most_episodes()
        try:
            self._admit()
            while self.engine.anyone(self._unfinished, self._leaves):
                with nullcontext() if self.engine.pending else self.waiting():
                    self._take_answers()
                if self._ready or self._sampling or not self._busy:
                    self._wave()
        finally:
            self.agents.close()
            for episode in episodes:  # open ones, after a failure of the engine
                if episode.connection is not None and episode.number not in self._done:
                    episode.connection.close()
            self.host.drain()
        return [self._done[number] for number in range(len(tasks))]

    @property
    def _unfinished(self) -> bool:
        return bool(self._ready or self._computing or self._answered or self._sampling)

    @property
    def _busy(self) -> bool:
        """Whether an environment computes; an agent that waits for an answer does not."""
        return any(not episode.pending for episode in self._computing.values())

    # Environments.

    def _admit(self) -> None:
        """Begin episodes, as many as there are descriptors for."""
        while self._waiting and self._open < self._most and not self._leaves:
            self._open += 1
            self._begin(self._waiting.popleft())

    def _begin(self, episode: Episode) -> None:
        task = episode.task
        episode.history, episode.opening = list(task.prompt), list(task.prompt)
        try:
            episode.connection = self.host.open(task.spec, task.seed)
        except EnvironmentFailed as failure:
            self._answered.append((episode, Answer({}, str(failure), 0.0)))
        except WaitedInVain as error:
            self._leaves = True
            self._answered.append((episode, Answer({}, str(error), 0.0)))
        except Exception as error:  # no descriptors, no threads left
            self._answered.append((episode, Answer({}, f"{FailureKind.DIED}: it could not be started ({error})", 0.0)))
        else:
            if task.spec.is_agent:
                self._ask(episode, "run", self.agents.begin(episode, self.host.endpoint))
            else:
                self._ask(episode, "reset", dict(task.row))

    def _ask(self, episode: Episode, request: str, value: object) -> None:
        connection, episode.request = episode.connection, request
        assert connection is not None
        try:
            answer = connection.ask((request, value), episode.task.spec.turn_timeout)
        except Exception as error:  # a column that cannot be sent to a process
            answer = Answer({}, f"{FailureKind.GARBAGE}: {error}", 0.0)
        if answer is None:
            self._computing[connection] = episode
        else:
            self._answered.append((episode, answer))

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
            answered, woken = answers(list(self._computing), seconds, descriptors)
            sampled = self.engine.descriptor in woken
            if answered:
                waited.progressed()
            self._answered.extend((self._computing.pop(connection), answer) for connection, answer in answered)
            if not self._answered and (sampled or not idle):
                return

    def _wait(self) -> Wait:
        """Return the wait for the environments that compute; each has a deadline of its own."""
        specs = [episode.task.spec for episode in self._computing.values()]
        names = ", ".join(sorted({spec.name for spec in specs}))
        longest = max((spec.turn_timeout for spec in specs), default=0.0)
        return Wait(f"environment {names}", longest, "turn_timeout", GRACE_SECONDS)

    def _handle(self, episode: Episode, answer: Answer) -> None:
        episode.figures.seconds += answer.seconds
        if answer.failure is not None:
            raised = answer.failure.startswith(FailureKind.RAISED)
            if raised and episode.over_limit and episode.turns:  # most likely by the refusal: no room was left
                self._end(episode, 0.0, None)
            else:
                self._fail(episode, answer.failure)
            return
        handlers = {"reset": self._opened, "step": self._stepped, "finish": self._finished, "run": self._ran}
        try:
            handlers[episode.request](episode, answer.value)
        except InvalidResult as error:
            self._fail(episode, f"{FailureKind.GARBAGE}: {episode.request}: {error}")
        except CannotRender as error:
            self._fail(episode, f"{TEMPLATE}: {error}")

    def _opened(self, episode: Episode, value: Mapping[str, Any]) -> None:
        episode.history = opened(episode.task.prompt, value, self.renderer.harmless)
        episode.opening = episode.observation = list(episode.history)
        episode.context = self.renderer.opening(episode.history, episode.task.tools)
        self._continue(episode)

    def _stepped(self, episode: Episode, value: Mapping[str, Any]) -> None:
        step = stepped(value)
        figures, turn = episode.figures, episode.turns[-1]
        figures.calls, figures.refused = figures.calls + step.calls, figures.refused + step.refused
        episode.turns[-1] = replace(turn, reward=step.reward)
        news = self.renderer.harmless(step.observation)
        if step.done or figures.turns >= episode.task.spec.max_turns:
            episode.messages += news
            self._finish(episode, truncated=not step.done)
            return
        seen = [*episode.context.ids, *turn.sampled]
        if step.afresh:
            if episode.context.images or images_in(news):
                raise CannotRender("a conversation with images cannot begin afresh: it is trained as one row")
            episode.context, episode.history = self.renderer.opening(news, episode.task.tools), news
        else:
            episode.context, message = self.renderer.following(
                episode.context, turn.sampled, episode.history, episode.parsed, news, episode.task.tools
            )
            episode.history += [message, *news]
        if self.limits.counts_all:
            episode.spent += len(episode.context.ids) - common(seen, episode.context.ids)
        if self._room(episode) >= 1:
            episode.messages += news
            episode.observation = news
        self._continue(episode)

    def _continue(self, episode: Episode) -> None:
        if self._room(episode) < 1:
            self._finish(episode, truncated=True)
        else:
            self._ready.append(Call(episode, episode.context))

    def _finish(self, episode: Episode, *, truncated: bool) -> None:
        episode.truncated = truncated
        self._ask(episode, "finish", None)

    def _room(self, episode: Episode) -> int:
        return self.limits.room(episode.spent, episode.context)

    # The policy.

    def _wave(self) -> None:
        """Begin all turns that episodes are ready for, in order of the episodes."""
        open_calls = (call for call in self._ready if call.episode.number not in self._done)
        wave, self._ready = self.agents.limited(sorted(open_calls, key=lambda call: call.episode.number))
        turns = [TurnRequest(call.context.ids, call.limit, call.episode.number, call.context.images) for call in wave]
        self._sampling |= dict(zip(turns, wave, strict=True))
        for turn, sample in self.engine.generate(turns):
            call = self._sampling.pop(turn)
            if call.request is None:
                self._sampled(call.episode, sample)
            elif call.episode.number not in self._done:
                self.agents.answer(call, sample, self.engine.version)

    def _sampled(self, episode: Episode, sample: Sample) -> None:
        context, state = episode.context, _state(episode.observation)
        drawn = sample.ids, sample.logprobs, self.engine.version
        episode.turns.append(Turn(context.ids, *drawn, state=state, support=sample.support, images=context.images))
        episode.figures.turns += 1
        episode.spent += len(sample.ids)
        episode.parsed = self.parse(sample.ids, episode.context.ids, episode.task.tools)
        episode.messages.append(episode.parsed)
        if sample.ids and sample.ids[-1] in self.limits.ends:
            self._ask(episode, "step", episode.parsed)
        else:
            self._finish(episode, truncated=True)

    # The end.

    def _finished(self, episode: Episode, value: Mapping[str, Any]) -> None:
        self._end(episode, final_reward(value), None)

    def _ran(self, episode: Episode, value: Mapping[str, Any]) -> None:
        episode.status = status if isinstance(status := value.get("status"), int) else None
        if episode.turns or episode.truncated:
            self._end(episode, final_reward(value), None)
        else:
            assert episode.connection is not None
            reason = f"it ended without an answer of the model. {' '.join(episode.connection.output()[-400:].split())}"
            self._fail(episode, f"{FailureKind.RAISED}: run: {reason}")

    def _fail(self, episode: Episode, failure: str) -> None:
        on_error = episode.task.spec.on_error
        if episode.line is not None:
            failure = failure.replace(episode.line.key, "(its key)")
        failure = without_secrets(failure)
        episode.truncated = True
        episode.turns = [replace(turn, reward=None) for turn in episode.turns]
        self._end(episode, None if isinstance(on_error, str) else float(on_error), failure)

    def _prompt(self, episode: Episode) -> Context:
        """Return a context for an episode that failed before its first turn."""
        try:
            return self.renderer.opening(episode.task.prompt, episode.task.tools)
        except CannotRender:
            return Context([min(self.limits.ends)], "")

    def _end(self, episode: Episode, reward: float | None, failure: str | None) -> None:
        output = ""
        if episode.connection is not None:
            if episode.line is not None:
                output = episode.connection.output().replace(episode.line.key, "(its key)")
            episode.connection.close()
        self.agents.end(episode)
        context = episode.context if episode.context.ids else self._prompt(episode)
        turns = episode.turns or [Turn(context.ids, [], None, self.engine.version, images=context.images)]
        name = episode.task.spec.name
        messages = episode.messages or [{"role": "assistant", "content": ""}]
        seen = (name, messages, episode.opening, episode.branches, output, episode.status)
        trajectory = Trajectory(turns, reward, episode.truncated, failure, *seen)
        self._done[episode.number] = trajectory, episode.figures
        self._open -= 1
        self._admit()


def _state(observation: list[Message]) -> str:
    """Return what tells an environment's messages from others: of images their bytes, not their place in memory."""
    images = [fingerprint(image) for image in images_in(observation)]
    return repr((described(observation), images) if images else observation)
