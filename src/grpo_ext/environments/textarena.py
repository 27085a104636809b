"""Games of the package textarena for one player: the model reads the transcript of the game and writes its move."""

import importlib.util
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step
from grpo_ext.errors import Problem
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.text import completion_text

PLAYER = 0
BEGINNING_SECONDS = 60.0
"""Limit for a game to begin; some look for a board for hours."""


class TextArena(Conversation):
    """One game. The prompt's seed deals the same game to all completions.

    An observation is the whole transcript and replaces the conversation so far. The reward comes at the end.

    Args:
        game: its name in textarena.
        options: options of the game.
    """

    def __init__(self, game: str, **options: object) -> None:
        import textarena

        self._game = textarena.make(game, **options)

    @staticmethod
    def preload(**_: object) -> None:
        """Import the games once for all attempts."""
        import textarena  # noqa: F401

    @staticmethod
    def option_problems(game: str, **options: object) -> Iterator[Problem]:
        """Yield the problem of a game that one player cannot begin on this machine."""
        if importlib.util.find_spec("textarena") is None:
            yield Problem("game", game, "textarena is not installed", "Install grpo-ext[textarena].")
            return
        from textarena.envs.registration import ENV_REGISTRY

        if game not in ENV_REGISTRY:
            yield Problem("game", game, "textarena has no such game", did_you_mean(game, ENV_REGISTRY))
        elif problem := _obstacle(game, options):
            reason = f"it does not begin with one player on this machine ({problem})"
            yield Problem("game", game, reason, "Name a game for one player that needs no network.")

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Deal the game."""
        self._game.reset(num_players=1, seed=self.seed)
        return self._transcript()

    def step(self, message: Message) -> Step:
        """Make the move."""
        done, _ = self._game.step(completion_text([message]))
        if not done:
            return Step(self._transcript(), None, False, True)
        return Step(None, _final_reward(*self._game.close()), True)

    def _transcript(self) -> list[Message]:
        _, observation = self._game.get_observation()
        text = observation if isinstance(observation, str) else "\n".join(str(part) for _, part, *_ in observation)
        return [{"role": "user", "content": text}]


def _obstacle(game: str, options: Mapping[str, object]) -> str | None:
    """Return why a game does not begin, or None if it does."""
    problems: list[str] = []

    def begin() -> None:
        try:
            made = TextArena(game, **options)
            made.reset({})
            from textarena import SinglePlayerState

            if not isinstance(made._game.state, SinglePlayerState):  # some games for several begin, and never end
                problems.append("it is for several")
        except BaseException as error:  # such as a second player that it needs, or a download
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=begin, daemon=True)  # it cannot be stopped, but ends with the process
    thread.start()
    thread.join(BEGINNING_SECONDS)
    if thread.is_alive():
        return f"it had not begun after {BEGINNING_SECONDS:g} s"
    return problems[0] if problems else None


def _final_reward(rewards: Mapping[int, Any] | None, infos: Mapping[int, Mapping[str, Any]]) -> float:
    """Return the player's reward. Some games swap reward and reason."""
    reward = (rewards or {}).get(PLAYER, 0.0)
    return float(infos[PLAYER]["reason"].removeprefix("Invalid Move: ") if isinstance(reward, str) else reward)
