"""Games of the package textarena, for one player: the model reads the transcript of the game and writes its move."""

import importlib.util
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_ext.environments.protocol import Conversation, Message, Step
from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.text import completion_text

PLAYER = 0
BEGINNING_SECONDS = 60.0
"""What a game may take to begin; some look for a board for hours."""


class TextArena(Conversation):
    """One game; its options are those of the game, and the prompt's seed deals the same game to all completions.

    What it observes is the whole transcript, which takes the place of what was said before. It pays once, at the end.
    """

    def __init__(self, game: str, **options: Any) -> None:
        """Make the game."""
        import textarena

        self._game = textarena.make(game, **options)

    @staticmethod
    def preload(**_: Any) -> None:
        """Import the games once for all attempts."""
        import textarena  # noqa: F401

    @staticmethod
    def option_problems(game: str, **options: Any) -> Iterator[str]:
        """Whether there is such a game, and whether one player can begin it here."""
        if importlib.util.find_spec("textarena") is None:
            yield f"textarena/{game} needs textarena, which is not installed. Install grpo-ext[textarena]."
            return
        from textarena.envs.registration import ENV_REGISTRY

        if game not in ENV_REGISTRY:
            yield f"textarena has no game {game!r}. {did_you_mean(game, ENV_REGISTRY)}"
            return
        if problem := _beginning(game, options):
            yield (
                f"textarena/{game} does not begin with one player on this machine ({problem}). Name a game for one "
                "player that needs no network."
            )

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Deal the game."""
        self._game.reset(num_players=1, seed=self.seed)
        return self._transcript()

    def step(self, message: Message) -> Step:
        """Make the move."""
        done, _ = self._game.step(completion_text([message]))
        if not done:
            return Step(self._transcript(), None, False, True)
        return Step(None, _paid(*self._game.close()), True)

    @property
    def is_single(self) -> bool:
        """Whether one player plays it; some games for several begin with one, and never end."""
        import textarena

        return isinstance(self._game.state, textarena.SinglePlayerState)

    def _transcript(self) -> list[Message]:
        _, said = self._game.get_observation()
        text = said if isinstance(said, str) else "\n".join(str(part) for _, part, *_ in said)
        return [{"role": "user", "content": text}]


def _beginning(game: str, options: Mapping[str, Any]) -> str | None:
    """Why a game does not begin; None: it does."""
    problems: list[str] = []

    def begin() -> None:
        try:
            made = TextArena(game, **options)
            made.reset({})
            if not made.is_single:
                problems.append("it is for several")
        except BaseException as error:  # such as that it wants two players, or a download
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=begin, daemon=True)  # what does not end nobody can stop; it ends with the process
    thread.start()
    thread.join(BEGINNING_SECONDS)
    if thread.is_alive():
        return f"it had not begun after {BEGINNING_SECONDS:g} s"
    return problems[0] if problems else None


def _paid(rewards: Mapping[int, Any] | None, told: Mapping[int, Mapping[str, Any]]) -> float:
    """The reward; some games say it where the reason belongs, and the reason in its place."""
    reward = (rewards or {}).get(PLAYER, 0.0)
    return float(told[PLAYER]["reason"].removeprefix("Invalid Move: ") if isinstance(reward, str) else reward)
