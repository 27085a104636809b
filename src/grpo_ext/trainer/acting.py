"""Completions that are conversations with environments: TRL's `rollout_func` for a trainer whose recipe has some."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.chat_template_utils import parse_response

from grpo_ext.environments.composition import EnvironmentSpec, any_pays
from grpo_ext.environments.fit import reader_of
from grpo_ext.environments.hosts import EnvironmentHost
from grpo_ext.environments.loop import Attempts, Figures, Limits, Task
from grpo_ext.environments.protocol import COLUMN, Message
from grpo_ext.environments.rendering import Renderer
from grpo_ext.environments.tools import schemas
from grpo_ext.objective.trajectory import COLUMN as TRAJECTORY
from grpo_ext.objective.trajectory import Trajectory
from grpo_ext.rollout.seeds import AttemptId
from grpo_ext.trainer.turn_engines import engine_of, positions_of

logger = logging.getLogger(__name__)


def earned_by(specs: Sequence[EnvironmentSpec]) -> list[Callable[..., list[Any]]]:
    """The reward of the environments as a function of TRL's, if one has any: by turn, where turns have earned."""
    by_name = {spec.name: spec for spec in specs}

    def environment(trajectory: Sequence[Trajectory], **_: Any) -> list[Any]:
        paid = [None if attempt.lost else earned(attempt, by_name[attempt.environment]) for attempt in trajectory]
        return [0.0 if reward is None else reward for reward in paid]  # `Acting.unscored` says which are None

    return [environment] if any_pays(specs) else []


def earned(attempt: Trajectory, spec: EnvironmentSpec) -> list[float] | float | None:
    """What an attempt earned, times the environment's weight; None where the environment has no reward.

    Where turns have earned it is a number for each, and what the whole has earned is the last one's.
    """
    if not spec.owns_reward or (spec.uses_tools and attempt.reward is None):
        return None
    whole, turns = attempt.reward or 0.0, [turn.reward for turn in attempt.turns]
    if all(reward is None for reward in turns):
        return spec.weight * whole
    each = [reward or 0.0 for reward in turns]
    return [spec.weight * reward for reward in [*each[:-1], each[-1] + whole]]


class Acting:
    """Environments of one trainer; as a function, TRL's `rollout_func`.

    Args:
        trainer: its engine samples.
        specs: of the environments; with several a row's column `environment` says which.
        memory_gib: what each process may use.
    """

    def __init__(self, trainer: Any, specs: Sequence[EnvironmentSpec], memory_gib: float) -> None:
        """Nothing is started before the first generation."""
        self.trainer, self.hosts = trainer, EnvironmentHost(memory_gib)
        self.specs = {spec.name: spec for spec in specs}
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """What it waits for environments in."""
        self.rows: list[dict[str, Any]] = []
        """Of the dataset, which TRL does not hand to a rollout function."""
        self.attempts: Sequence[AttemptId] = ()
        """Which attempt at which prompt each row is: its seeds come from there."""
        self._tools = {s.name: schemas(s.target, s.functions) if s.uses_tools else None for s in specs}
        self._reader = reader_of(trainer._tokenizer) if any(self._tools.values()) else None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The rollouts of this process, as TRL takes them."""
        args, mode = trainer.args, "train" if trainer.model.training else "eval"
        engine = engine_of(trainer, self.attempts)
        limits = Limits(
            completion=args.max_completion_length,
            counts_all=args.completion_length_counts == "all",
            context=positions_of(trainer),
            ends=frozenset(trainer.eos_token_ids),
        )
        renderer = Renderer(trainer._tokenizer, trainer.chat_template_kwargs)
        attempts = Attempts(engine, self.hosts, renderer, self._parsed, limits, self.waiting)
        with closing(engine):
            done = attempts.run([self._task(*pair) for pair in zip(self.rows, self.attempts, strict=True)])
        self._tell(done, mode)
        return {"trajectories": [trajectory for trajectory, _ in done]}

    def _task(self, row: dict[str, Any], attempt: AttemptId) -> Task:
        spec = self.specs[row[COLUMN]] if len(self.specs) > 1 else next(iter(self.specs.values()))
        ours = (TRAJECTORY, COLUMN) if len(self.specs) > 1 else (TRAJECTORY,)
        given = {name: value for name, value in row.items() if name not in ours}
        prompt = [{key: value for key, value in message.items() if value is not None} for message in row["prompt"]]
        return Task(spec, given, prompt, self._tools[spec.name], attempt.game)

    def _parsed(self, ids: list[int], context: list[int], tools: list[dict] | None) -> Message:
        if tools and self._reader is not None:
            try:
                return parse_response(self._reader, ids, prefix=context, tools=list(tools))
            except Exception:  # what the model wrote is its own affair: it is text, then
                logger.debug("response", exc_info=True)
        return {"role": "assistant", "content": self.trainer._tokenizer.decode(ids, skip_special_tokens=True)}

    # Figures.

    def columns(self, attempts: Sequence[Trajectory]) -> dict[str, list[Any]]:
        """What the table of completions says of attempts beside what was said."""
        found: dict[str, list[Any]] = {
            "turn_rewards": [[turn.reward for turn in attempt.turns] for attempt in attempts],
            "failure": [attempt.failure for attempt in attempts],
        }
        names = {"environment_name": [attempt.environment for attempt in attempts]}
        return found | (names if len(self.specs) > 1 else {})

    def paid(self, attempt: Trajectory, *, weighted: bool = True) -> float | None:
        """What an attempt earned in all; None where no reward is to score it, or its environment has none."""
        spec = self.specs[attempt.environment]
        paid = None if attempt.lost else earned(attempt, spec if weighted else replace(spec, weight=1.0))
        return sum(paid) if isinstance(paid, list) else paid

    def unscored(self, attempts: Sequence[Trajectory], functions: int) -> Tensor:
        """Rewards that stay None, [attempts, functions]: all of a lost attempt, the environment's where it has none.

        TRL would print the whole row, ids and all, for a None.
        """
        found = torch.tensor([attempt.lost for attempt in attempts])[:, None].repeat(1, functions)
        if any_pays(self.specs.values()):  # the last function is `earned_by`'s
            found[:, -1] = torch.tensor([self.paid(attempt) is None for attempt in attempts])
        return found

    def _tell(self, done: Sequence[tuple[Trajectory, Figures]], mode: str) -> None:
        """Log what all processes' attempts took, by environment, and warn of failures."""
        mine = [(t.environment, t.truncated, t.failure, self.paid(t), vars(figures)) for t, figures in done]
        told = gather_object(mine) if self.trainer.accelerator.num_processes > 1 else mine
        metrics = self.trainer._metrics[mode]
        for name in self.specs:
            of = [attempt[1:] for attempt in told if attempt[0] == name]
            if not of:
                continue
            kinds = Counter(failure.partition(":")[0] for _, failure, _, _ in of if failure)
            rewards = [reward for _, _, reward, _ in of if reward is not None]
            figures = {key: sum(took[key] for *_, took in of) for key in vars(Figures())}
            shown = {
                "turns": figures["turns"] / len(of),
                "tool_calls": figures["calls"] / len(of),
                "tool_failures": figures["refused"] / max(1, figures["calls"]),
                "seconds": figures["seconds"] / len(of),
                "truncated": sum(truncated for truncated, *_ in of) / len(of),
                "failed": sum(kinds.values()) / len(of),
                **{f"failed/{kind}": count / len(of) for kind, count in sorted(kinds.items())},
                **({"reward": sum(rewards) / len(rewards)} if rewards else {}),
            }
            for key, value in shown.items():
                metrics[f"environments/{name}/{key}"].append(float(value))
            if kinds and self.trainer.accelerator.is_main_process:
                first = next(failure for _, failure, _, _ in of if failure)
                count = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))
                lot = self.specs[name].on_error
                logger.warning(
                    f"environment {name!r}: {sum(kinds.values())} of {len(of)} attempts failed ({count}), counted as "
                    f"{lot}. The first: {first[:500]}"
                )

    def close(self) -> None:
        """End all processes."""
        self.hosts.close()
