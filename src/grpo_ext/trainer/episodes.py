"""Completions that are conversations with environments: played by a trainer's engine, scored, and logged."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response, supports_tool_calling

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.data.images import with_images
from grpo_ext.environments.compatibility import reader_of
from grpo_ext.environments.composition import EnvironmentSpec, any_pays
from grpo_ext.environments.engine import TurnEngine
from grpo_ext.environments.episode import EpisodeFigures, EpisodeLimits, Task
from grpo_ext.environments.hosts import EnvironmentHost
from grpo_ext.environments.loop import EpisodeLoop
from grpo_ext.environments.protocol import ENVIRONMENT_COLUMN, Message
from grpo_ext.environments.rendering import Renderer
from grpo_ext.environments.tools import schemas
from grpo_ext.errors import EpisodesFailed
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.objective.trajectory import Trajectory, of_agents
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.safe_reading import check_depth

logger = logging.getLogger(__name__)

PATIENCE = 5
"""Generations in a row in which every episode may be lost."""
_SHOWN = 600
"""Characters of a program's output that are shown."""
Episodes = Sequence[tuple[Trajectory, EpisodeFigures]]
"""Episodes with what each took."""


def sampling_of(args: GRPOExtConfig) -> dict[str, Any]:
    """Return the settings by which the policy samples, by OpenAI's names."""
    named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    fixed = {"presence_penalty": 0, "frequency_penalty": 0, "parallel_tool_calls": True}
    return {name: getattr(args, name) for name in named} | fixed


# Rewards of environments.


def environment_reward(specs: Sequence[EnvironmentSpec]) -> list[Callable[..., list[Any]]]:
    """Return the reward of the environments as a function for TRL, if any has one; it may score turns."""
    by_name = {spec.name: spec for spec in specs}

    def environment(trajectory: Sequence[Trajectory], **_: object) -> list[Any]:
        paid = [None if episode.lost else reward_of(episode, by_name[episode.environment]) for episode in trajectory]
        return [0.0 if reward is None else reward for reward in paid]  # those that are None: `EpisodeRunner.unscored`

    return [environment] if any_pays(specs) else []


def reward_of(trajectory: Trajectory, spec: EnvironmentSpec) -> list[float] | float | None:
    """Return a trajectory's reward times the environment's weight; None where the environment has no reward.

    Where turns have rewards it is a number for each turn; the reward of the whole is added to the last.
    """
    if not spec.owns_reward or ((spec.uses_tools or spec.is_agent) and trajectory.reward is None):
        return None
    whole, turns = trajectory.reward or 0.0, [turn.reward for turn in trajectory.turns]
    if all(reward is None for reward in turns):
        return spec.weight * whole
    each = [reward or 0.0 for reward in turns]
    return [spec.weight * reward for reward in [*each[:-1], each[-1] + whole]]


class EpisodeRunner:
    """The environments of a trainer, and their processes, which start with the first generation.

    Args:
        specs: the environments; with several, the column `environment` names the one of a row.
        tokenizer: the policy's.
        memory_gib: memory that each process may use.
        sampling: the settings by which the policy samples.
    """

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        tokenizer: PreTrainedTokenizerBase,
        memory_gib: float,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.hosts = tokenizer, EnvironmentHost(memory_gib, sampling)
        self.specs = {spec.name: spec for spec in specs}
        self._exits_shown: set[str] = set()
        self._lost = 0
        self._tools = {s.name: schemas(s.target, s.functions) if s.uses_tools else None for s in specs}
        self._reader = reader_of(tokenizer) if any(self._tools.values()) else None
        if self._reader is None and any(spec.is_agent for spec in specs):
            with suppress(ValueError):  # requests with tools are then refused
                self._reader = reader_of(tokenizer) if supports_tool_calling(tokenizer) else None

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        attempts: Sequence[AttemptId],
        engine: TurnEngine,
        limits: EpisodeLimits,
        renderer: Renderer,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Episodes:
        """Play one episode for each row and close the engine; `waiting` is as in `EpisodeLoop`."""
        loop = EpisodeLoop(engine, self.hosts, renderer, self._parsed, limits, waiting, tools=self._reader is not None)
        with closing(engine):
            both = zip(rows, attempts, strict=True)
            return loop.run([self._task(row, attempt.game) for row, attempt in both])

    def _task(self, row: Mapping[str, Any], seed: int) -> Task:
        several = len(self.specs) > 1
        spec = self.specs[row[ENVIRONMENT_COLUMN]] if several else next(iter(self.specs.values()))
        left_out = (TRAJECTORY, ENVIRONMENT_COLUMN) if several else (TRAJECTORY,)
        columns = {name: value for name, value in row.items() if name not in left_out}
        return Task(spec, columns, with_images(row), self._tools[spec.name], seed)

    def _parsed(self, ids: list[int], context: list[int], tools: list[dict] | None) -> Message:
        if tools and self._reader is not None:
            try:
                message = parse_response(self._reader, ids, prefix=context, tools=list(tools))
                check_depth(json.dumps(message))
                return message
            except Exception:  # what the model wrote has no such form: it is text
                logger.debug("response", exc_info=True)
        return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}

    def columns(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
        """Return further columns of the table of completions."""
        columns: dict[str, list[Any]] = {
            "turn_rewards": [[turn.reward for turn in trajectory.turns] for trajectory in trajectories],
            "failure": [trajectory.failure for trajectory in trajectories],
        }
        names = {"environment_name": [trajectory.environment for trajectory in trajectories]}
        agents = any(spec.is_agent for spec in self.specs.values())
        return columns | (names if len(self.specs) > 1 else {}) | (of_agents(trajectories) if agents else {})

    def paid(self, trajectory: Trajectory, *, weighted: bool = True) -> float | None:
        """Return the whole reward of a trajectory; None where it is lost, or its environment has none."""
        spec = self.specs[trajectory.environment]
        paid = None if trajectory.lost else reward_of(trajectory, spec if weighted else replace(spec, weight=1.0))
        return sum(paid) if isinstance(paid, list) else paid

    def unscored(self, trajectories: Sequence[Trajectory], functions: int) -> Tensor:
        """Rewards that stay None, [trajectories, functions]: all of a lost one, and the environment's if it has none.

        They are not None before: TRL would print the whole row, ids and all, for a row of None.
        """
        unscored = torch.tensor([trajectory.lost for trajectory in trajectories])[:, None].repeat(1, functions)
        if any_pays(self.specs.values()):  # the last function is `environment_reward`'s
            unscored[:, -1] = torch.tensor([self.paid(trajectory) is None for trajectory in trajectories])
        return unscored

    def records(self, played: Episodes) -> list["Record"]:
        """Return what the figures need of the episodes of all processes; collective."""
        mine = [
            Record(
                trajectory.environment,
                trajectory.truncated,
                trajectory.failure,
                trajectory.lost,
                self.paid(trajectory),
                trajectory.status,
                trajectory.output[-_SHOWN:] if trajectory.status else "",
                vars(took),
            )
            for trajectory, took in played
        ]
        return gather_object(mine)

    def figures(self, records: Sequence["Record"], *, warns: bool) -> dict[str, float]:
        """Return the figures of episodes by environment, and warn of failures on the process that `warns`."""
        named_figures: dict[str, float] = {}
        for name, spec in self.specs.items():
            episodes = [record for record in records if record.environment == name]
            if not episodes:
                continue
            kinds = Counter(record.failure.partition(":")[0] for record in episodes if record.failure)
            figures = _figures(episodes, kinds)
            named_figures |= {f"environments/{name}/{key}": float(value) for key, value in figures.items()}
            if not warns:
                continue
            if kinds:
                first = next(record.failure for record in episodes if record.failure)
                counts = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))
                logger.warning(
                    f"environment {name!r}: {sum(kinds.values())} of {len(episodes)} episodes failed ({counts}), "
                    f"counted as {spec.on_error}. The first: {first[:500]}"
                )
            if name not in self._exits_shown and any(record.status for record in episodes):
                self._exits_shown.add(name)
                logger.warning(_exits(name, episodes))
        return named_figures

    def note_losses(self, records: Sequence["Record"]) -> None:
        """Count generations of training in a row that lost every episode.

        Raises:
            EpisodesFailed: PATIENCE of them, on all processes.
        """
        self._lost = self._lost + 1 if records and all(record.lost for record in records) else 0
        if self._lost == PATIENCE:
            first = str(records[0].failure).rstrip(".")
            raise EpisodesFailed(
                f"every episode of {PATIENCE} generations in a row has failed, so that nothing was learned. The first "
                f"of the last one: {first}. Repair it, and run the same command to "
                "resume from the last checkpoint; `on_error: 0` pays failures in place of leaving them out."
            )

    def close(self) -> None:
        """End all processes."""
        self.hosts.close()


class Record(NamedTuple):
    """One episode, for the figures of all processes."""

    environment: str
    truncated: bool
    failure: str | None
    lost: bool
    reward: float | None
    status: int | None
    output: str
    """The end of its program's output, if it ended with another status than 0."""
    took: Mapping[str, float]


def _figures(episodes: Sequence[Record], kinds: Mapping[str, int]) -> dict[str, float]:
    """Return means over the episodes in one environment."""
    count = len(episodes)
    rewards = [record.reward for record in episodes if record.reward is not None]
    statuses = [record.status for record in episodes if record.status is not None]
    took = {key: sum(record.took[key] for record in episodes) for key in vars(EpisodeFigures())}
    return {
        "turns": took["turns"] / count,
        "tool_calls": took["calls"] / count,
        "tool_failures": took["refused"] / max(1, took["calls"]),
        "seconds": took["seconds"] / count,
        "truncated": sum(record.truncated for record in episodes) / count,
        "failed": sum(kinds.values()) / count,
        **{f"failed/{kind}": n / count for kind, n in sorted(kinds.items())},
        **({"nonzero_exit": sum(map(bool, statuses)) / len(statuses)} if statuses else {}),
        **({"reward": sum(rewards) / len(rewards)} if rewards else {}),
    }


def _exits(name: str, episodes: Sequence[Record]) -> str:
    """Return the line about programs that have ended with another status than 0."""
    crashed = [record for record in episodes if record.status]
    statuses = Counter(record.status or 0 for record in crashed)
    counts = ", ".join(f"{count} with {status}" for status, count in sorted(statuses.items()))
    return (
        f"environment {name!r}: of {len(episodes)} programs or tests {len(crashed)} ended with a nonzero status "
        f"({counts}); shown once, counted in environments/{name}/nonzero_exit. The first, with {crashed[0].status}, "
        f"printed: {' '.join(crashed[0].output.split()) or 'nothing'}"
    )
