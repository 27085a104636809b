"""The agents of a generation: their requests become turns to sample, and sampled turns become answers."""

import logging
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from grpo_ext.environments.endpoint.history import Finished, History, key_of, keys_of
from grpo_ext.environments.endpoint.requests import Inbox, PendingRequest, Refused, Reply, calls_of, thinking_of
from grpo_ext.environments.endpoint.server import Endpoint
from grpo_ext.environments.episode import Call, Episode, EpisodeLimits, MessageParser
from grpo_ext.environments.protocol import AgentTask, Message
from grpo_ext.environments.rendering import CannotRender, Renderer, TooLong
from grpo_ext.objective.trajectory import Sample, Turn
from grpo_ext.waiting import shutdown

logger = logging.getLogger(__name__)
_UNKNOWN = 2**19
"""Most tokens of a context where the model's positions are not known."""
_TAKING_SECONDS = 1.0
"""After which other things are looked at, the end of the run among them, before further requests are."""


class Agents:
    """Serves the agents of one generation.

    Args:
        renderer: renders contexts.
        parse: parses samples.
        limits: limits of each episode.
        tools: whether the chat template and its parser know calls of tools.
    """

    def __init__(self, renderer: Renderer, parse: MessageParser, limits: EpisodeLimits, tools: bool) -> None:
        self._renderer, self._parse, self._limits, self._tools = renderer, parse, limits, tools
        self._episodes: dict[int, Episode] = {}
        self._inbox: Inbox | None = None
        self._endpoint: Endpoint | None = None

    @property
    def descriptors(self) -> list[int]:
        """The descriptor that is readable while there are requests."""
        return [] if self._inbox is None else [self._inbox.descriptor]

    def begin(self, episode: Episode, endpoint: Endpoint) -> AgentTask:
        """Give an episode its way to the model. Return what its process gets."""
        self._endpoint, self._inbox = endpoint, self._inbox or Inbox()
        assert episode.connection is not None
        episode.line = endpoint.open(self._inbox, episode.connection.pause)
        episode.dialogue = History(self._renderer, self._limits.context or _UNKNOWN)
        self._episodes[episode.line.number] = episode
        return AgentTask(dict(episode.task.row), episode.line.url, episode.line.key)

    def end(self, episode: Episode) -> None:
        """Refuse what the episode still asks, and note its conversation."""
        if episode.line is None or episode.dialogue is None or self._endpoint is None:
            return
        self._endpoint.shut(episode.line)
        self._episodes.pop(episode.line.number, None)
        episode.messages, episode.branches = episode.dialogue.messages, episode.dialogue.branches
        episode.opening = episode.dialogue.opening or episode.opening

    def close(self) -> None:
        """End all episodes."""
        for episode in list(self._episodes.values()):
            self.end(episode)
        if self._inbox is not None:
            self._inbox.close()

    # Requests.

    def take(self) -> list[Call]:
        """Return the turns that agents have asked for, and refuse requests that cannot be answered."""
        calls: list[Call] = []
        requests, until = [] if self._inbox is None else self._inbox.take(), time.monotonic() + _TAKING_SECONDS
        for number, request in enumerate(requests):
            if number and self._inbox is not None and (shutdown().is_set() or time.monotonic() > until):
                self._inbox.put_back(requests[number:])
                break
            episode = self._episodes.get(request.line)
            if episode is None:  # it has ended, and its line has refused the request
                continue
            try:
                calls += [] if request.left else self._calls(episode, request)
            except Exception as error:  # a request costs its own episode only
                request.done(_refusal(error))
            self._go_on(episode, anew=False)
        return calls

    def _go_on(self, episode: Episode, *, anew: bool) -> None:
        """Start an episode's clock again, or stop it, by whether it waits for the model."""
        assert episode.connection is not None
        if episode.pending:
            episode.connection.pause()
        else:
            episode.connection.resume(anew=anew)

    def _calls(self, episode: Episode, request: PendingRequest) -> list[Call]:
        """Return a turn for each answer of a request.

        Raises:
            Refused: a limit of the episode is reached.
            CannotRender: the chat template does not take its messages.
        """
        history, choices = episode.dialogue, request.chat.choices
        assert history is not None
        if request.chat.tools and not self._tools:
            raise Refused("TRL cannot read calls of tools in the chat template of this model", "unsupported_parameter")
        most = episode.task.spec.max_turns
        if episode.figures.turns + episode.pending + choices > most or episode.left > most:
            episode.truncated = episode.over_limit = True
            raise Refused(f"the episode has made all its requests (max_turns={most})", "turn_limit_exceeded")
        try:
            opened = history.opened(request.chat)
        except TooLong as error:
            episode.truncated = episode.over_limit = True
            raise _no_room(str(error)) from None
        news = history.new_tokens(opened.context.ids) if self._limits.counts_all else 0
        if self._limits.room(episode.spent + news, opened.context) < choices:
            episode.truncated = episode.over_limit = True
            raise _no_room(f"the context has {len(opened.context.ids)} tokens")
        history.note(opened.context.ids)
        episode.spent += news
        episode.pending += choices
        return [Call(episode, opened.context, request, opened) for _ in range(choices)]

    def limited(self, calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
        """Return the turns to sample, with their limits, and the turns that wait until others have left them room.

        Turns of one episode share its room. A turn without room is refused, one without an agent that waits forgotten.
        """
        wanted = [call for call in calls if not self._forgotten(call)]
        sharing = Counter(call.episode.number for call in wanted)
        ready: list[Call] = []
        waiting: list[Call] = []
        for call in wanted:
            episode, request = call.episode, call.request
            share = self._limits.room(episode.spent + episode.reserved, call.context) // sharing[episode.number]
            sharing[episode.number] -= 1
            if request is None:
                call.limit = share
            elif share < 1 and episode.reserved:
                waiting.append(call)
                continue
            elif share < 1:
                episode.truncated = episode.over_limit = request.left = True
                request.done(_no_room(f"the context has {len(call.context.ids)} tokens"))
                self._forgotten(call)
                continue
            else:
                call.limit = min(share, request.chat.limit or share)
                episode.reserved += call.limit
            ready.append(call)
        return ready, waiting

    def _forgotten(self, call: Call) -> bool:
        """Forget a turn if its agent waits for it no longer. Return whether it is forgotten."""
        if call.request is None or not call.request.left:
            return False
        call.episode.pending, call.episode.left = call.episode.pending - 1, call.episode.left + 1
        self._go_on(call.episode, anew=False)
        return True

    # Answers.

    def answer(self, call: Call, sample: Sample, version: int) -> None:
        """Note a sampled turn, and answer its request if it was the last one of it."""
        episode, request, opened = call.episode, call.request, call.opened
        assert request is not None
        assert opened is not None
        assert episode.dialogue is not None
        episode.reserved -= call.limit
        if self._forgotten(call):
            return
        ids, logprobs, message, stopped = self._cut(sample, call)
        ended = bool(ids) and ids[-1] in self._limits.ends and not stopped
        episode.turns.append(Turn(call.context.ids, ids, logprobs, version, support=sample.support))
        episode.figures.turns, episode.pending = episode.figures.turns + 1, episode.pending - 1
        calls = calls_of(message)
        episode.figures.calls += len(calls)
        episode.spent += len(ids)
        whole = {"role": "assistant", "content": self._renderer.decoded(ids)}
        written = None if ended else message if stopped else whole
        if ids:
            keys = [*keys_of(request.chat), key_of(message)]
            episode.dialogue.add(Finished(keys, request.chat.messages, opened, ids, message, written))
        if not ended and not stopped and len(ids) != request.chat.limit:
            episode.truncated = True
        finish = "tool_calls" if calls else "stop" if ended or stopped else "length"
        texts = self._logprobs(ids, logprobs) if request.chat.logprobs else None
        said = (str(message.get("content") or ""), thinking_of(message), calls)
        request.add(Reply(*said, finish, len(call.context.ids), len(ids), texts, stopped))
        self._go_on(episode, anew=True)

    def _cut(self, sample: Sample, call: Call) -> tuple[list[int], list[float | None] | None, Message, str | None]:
        """Return ids, log-probabilities and message of a sample up to its first stop text, and that text.

        The turn ends with the token that completes the stop text, as if sampling had ended there.
        """
        assert call.request is not None
        chat, ids = call.request.chat, sample.ids
        kept = stop_at(ids, chat.stop, self._text) if chat.stop else None
        if kept is None:
            return ids, sample.logprobs, self._parse(ids, call.context.ids, chat.tools), None
        text = self._text(ids[:kept])
        end, stop = min((place, stop) for stop in chat.stop if (place := text.find(stop)) >= 0)
        before = bisect_right(range(kept), end, key=lambda count: len(self._text(ids[:count]))) - 1
        message = self._parse(ids[:before], call.context.ids, chat.tools)
        if not message.get("tool_calls") and not thinking_of(message):
            message = {"role": "assistant", "content": text[:end]}
        logprobs = None if sample.logprobs is None else sample.logprobs[:kept]
        return ids[:kept], logprobs, message, stop

    def _text(self, ids: list[int]) -> str:
        text: str = self._renderer.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _logprobs(self, ids: list[int], logprobs: list[float | None] | None) -> list[tuple[str, float | None]]:
        return [(self._text([i]), value) for i, value in zip(ids, logprobs or [None] * len(ids), strict=True)]


def _refusal(error: Exception) -> Refused:
    """Return the answer to a request that has failed."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, CannotRender):
        return Refused(str(error), "template")
    logger.debug("request", exc_info=error)
    return Refused(f"{type(error).__name__}: {error}")


def _no_room(reason: str) -> Refused:
    limits = "max_completion_length, positions of the model"
    return Refused(f"no room for an answer: {reason} ({limits})", "context_length_exceeded")


def stop_at(ids: list[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """Return the number of ids whose text first holds one of `stops`; None if it never does."""

    def holds(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stops)

    return bisect_left(range(len(ids)), True, key=lambda i: holds(i + 1)) + 1 if holds(len(ids)) else None
