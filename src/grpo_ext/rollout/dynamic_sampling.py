"""Dynamic sampling: fresh prompts replace groups whose completions all score alike. DAPO, arXiv:2503.14476.

`DynamicSampler.settle` generates and scores round by round, and returns one `RolloutBatch`, as if it had been
generated and scored in one go.
"""

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.objective.advantages import zero_variance
from grpo_ext.packing.images import no_images
from grpo_ext.registry import did_you_mean
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from grpo_ext.rollout.seeds import AttemptId, Source, numbered

TOTAL = "reward"
"""Value of `dynamic_sampling` that judges groups by their advantages, from all rewards together."""


# Pure decisions, the same on every process.


def judged(
    rewards: Float[Tensor, "groups completions functions"], names: Sequence[str], by: str
) -> Bool[Tensor, " groups"]:
    """Groups without a signal from one reward: fewer than two scored completions, or all with the same score.

    Args:
        rewards: NaN where a function returned None.
        names: names of the functions.
        by: the function that judges.
    """
    return zero_variance(rewards[..., list(names).index(by)])


def groups_to_draw(dead: int, num_generations: int, processes: int) -> int:
    """Smallest number of groups, `dead` or more, whose completions divide evenly over the processes."""
    unit = processes // math.gcd(num_generations, processes)
    return -(-dead // unit) * unit


def replacements(dead: Sequence[bool], fresh_dead: Sequence[bool]) -> dict[int, int]:
    """Map dead groups to the fresh groups that replace them, in order, until either runs out."""
    places = [i for i, is_dead in enumerate(dead) if is_dead]
    living = [i for i, is_dead in enumerate(fresh_dead) if not is_dead]
    return dict(zip(places, living, strict=False))


def judge_problems(by: str | None, names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem unless `dynamic_sampling` names a reward."""
    if by is not None and by != TOTAL and by not in names:
        yield Problem("dynamic_sampling", by, "no reward has this name", did_you_mean(by, [*names, TOTAL]))


# Fresh prompts.


class FreshPrompts:
    """Row numbers of a dataset in an order independent of the sampler's, epoch after epoch.

    `drawn` is the whole state to resume from.

    Args:
        size: rows of the dataset.
        seed: seed of the order, the same on every process.
        shuffled: whether the order is random; else it is the dataset's.
    """

    def __init__(self, size: int, seed: int, *, shuffled: bool = True) -> None:
        self.size, self.seed, self.shuffled = size, seed, shuffled
        self.drawn = 0
        self._epoch, self._order = -1, list[int]()

    def draw(self, count: int) -> list[int]:
        """Indices of the next `count` rows."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        epoch, place = divmod(self.drawn, self.size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + epoch)
            order = torch.randperm(self.size, generator=generator) if self.shuffled else torch.arange(self.size)
            self._epoch, self._order = epoch, order.tolist()
        self.drawn += 1
        return self._order[place]


# The batch.


Row: TypeAlias = tuple[Any, ...]
"""Row, prompt, prompt ids, ids, tool mask, completion, log-probabilities, images, those as tensors, sampling supports,
routes, logged columns, turn rewards."""


@dataclass
class Batch:
    """A scored batch as rows, which processes can exchange: those of this process, and the rewards of all."""

    rows: list[Row]
    rewards: Float[Tensor, "batch functions"]
    logged: list[str]
    """Names of the columns that rewards logged."""
    extra: list[str]
    """Names of the columns that a rollout function added."""

    @classmethod
    def of(cls, rollouts: RolloutBatch) -> "Batch":
        """Split a scored generation into rows."""
        made, rewards, count = rollouts.generated, rollouts.rewards, len(rollouts.rows)
        assert made is not None
        assert rewards is not None
        full = {name: values for name, values in rollouts.logged.items() if len(values) == count}
        logged = [{name: values[i] for name, values in full.items()} for i in range(count)]
        unknown: list[Any] = [None] * count
        masks, logprobs = made.tool_mask or unknown, made.logprobs or unknown
        given = rollouts.rows, rollouts.prompts, made.prompt_ids
        columns = *given, made.completion_ids, masks, made.completions, logprobs
        lists = [x or unknown for x in (made.images, rollouts.images, rollouts.supports, rollouts.routes)]
        rows = list(zip(*columns, *lists, logged, rollouts.turn_rewards, strict=True))
        return cls(rows, rewards, list(rollouts.logged), list(made.extra))

    def rollouts(self) -> RolloutBatch:
        """Join the rows to a scored generation."""
        columns: list[Any] = [list(column) for column in zip(*self.rows, strict=True)]
        examples, prompts, prompt_ids, ids, masks, completions, logprobs, *lists, logged, turn_rewards = columns
        images, seen, supports, routes = lists
        extra = {name: [example[name] for example in examples] for name in self.extra}
        tool_mask, scores = (None if any(part is None for part in column) else column for column in (masks, logprobs))
        found = images if any(images) else None
        made = Generated(prompt_ids, ids, tool_mask, completions, scores, extra, found, [])
        of_rewards = {name: [row.get(name) for row in logged] for name in self.logged}
        scored = {"rewards": self.rewards, "turn_rewards": turn_rewards, "logged": of_rewards}
        supports, routes = ([] if of_rows[0] is None else of_rows for of_rows in (supports, routes))
        seen = [] if found is None else [row or no_images() for row in seen]
        given = {"supports": supports, "routes": routes, "images": seen, "scored_ids": ids}
        return RolloutBatch(examples, (), prompts, made, **given, **scored)


Collect = Callable[[list[dict[str, Any]], list[AttemptId]], RolloutBatch]
"""Generates and scores rows."""
ZeroAdvantages = Callable[[RolloutBatch], Tensor]
"""Returns the groups of all processes, [groups], in which no completion would have an advantage."""


class DynamicSampler:
    """Replaces the groups of a generation batch that have no signal; runs the same rounds on every process.

    Args:
        args: settings, with the name of the reward that judges in `dynamic_sampling`.
        dataset: training set that fresh prompts come from.
        names: names of the rewards.
        group: completions of a prompt.
        stateful: whether tools or TRL's environments keep state that a row cannot carry.
        accelerator: for the exchange of rows.

    Raises:
        ConfigError: the reward is unknown, or batches cannot be put together from rows.
    """

    def __init__(
        self,
        args: GRPOExtConfig,
        dataset: Dataset,
        names: Sequence[str],
        group: int,
        *,
        stateful: bool,
        accelerator: Accelerator,
    ) -> None:
        by = args.dynamic_sampling
        if problems := [*judge_problems(by, names), *_unfit(by, dataset, stateful)]:
            raise ConfigError(problems)
        assert by is not None
        self.by, self.rounds, self.seed = by, args.dynamic_sampling_max_rounds, args.seed
        self.dataset, self.names, self.group, self.accelerator = dataset, names, group, accelerator
        self.prompts = FreshPrompts(len(dataset), args.seed, shuffled=bool(args.shuffle_dataset))

    def settle(
        self,
        rows: list[dict[str, Any]],
        attempts: list[AttemptId],
        collect: Collect,
        zero_advantages: ZeroAdvantages,
        metrics: MutableMapping[str, list[float]],
    ) -> RolloutBatch:
        """Generate and score `rows`; replace groups without a signal until all have one or the bound is reached."""

        def scored(rows: list[dict[str, Any]], attempts: list[AttemptId]) -> tuple[Batch, list[bool]]:
            rollouts = collect(rows, attempts)
            return Batch.of(rollouts), self._dead(rollouts, zero_advantages)

        batch, dead = scored(rows, attempts)
        drawn, rounds = len(batch.rewards), 0
        while any(dead) and rounds < self.rounds:
            rounds += 1
            fresh, fresh_dead = scored(*self._fresh_rows(sum(dead)))
            drawn += len(fresh.rewards)
            exchange = replacements(dead, fresh_dead)
            self._replace(batch, fresh, exchange)
            dead = [is_dead and i not in exchange for i, is_dead in enumerate(dead)]
        metrics["dynamic_sampling/rounds"].append(float(rounds))
        metrics["dynamic_sampling/waste"].append(1 - len(batch.rewards) / drawn)
        metrics["dynamic_sampling/kept_groups"].append(float(len(batch.rewards) // self.group - sum(dead)))
        return batch.rollouts()

    def _dead(self, rollouts: RolloutBatch, zero_advantages: ZeroAdvantages) -> list[bool]:
        """Groups to replace."""
        if self.by == TOTAL:
            return zero_advantages(rollouts).tolist()
        assert rollouts.rewards is not None
        grouped = rollouts.rewards.double().view(-1, self.group, rollouts.rewards.shape[1])
        return judged(grouped, self.names, self.by).tolist()

    def _fresh_rows(self, dead: int) -> tuple[list[dict[str, Any]], list[AttemptId]]:
        """Draw fresh prompts; return this process's share of their completions: rows and attempts."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = self.prompts.drawn * self.group
        indices = self.prompts.draw(groups_to_draw(dead, self.group, processes))
        every = [index for index in indices for _ in range(self.group)]
        local = len(every) // processes
        mine = range(rank * local, (rank + 1) * local)
        attempts = numbered(self.seed, Source.FRESH, [first + i for i in mine], self.group)
        return [dict(self.dataset[every[i]]) for i in mine], attempts

    def _replace(self, batch: Batch, fresh: Batch, exchange: dict[int, int]) -> None:
        """Replace dead groups by fresh ones, on the processes that hold their rows."""
        group, accelerator = self.group, self.accelerator
        rows = gather_object(fresh.rows) if accelerator.num_processes > 1 else fresh.rows
        first = accelerator.process_index * len(batch.rows)
        batch.logged = list(dict.fromkeys([*batch.logged, *fresh.logged]))
        for place, source in exchange.items():
            for i in range(group):
                batch.rewards[place * group + i] = fresh.rewards[source * group + i]
                local = place * group + i - first
                if 0 <= local < len(batch.rows):
                    batch.rows[local] = rows[source * group + i]


def _unfit(by: str | None, dataset: object, stateful: bool) -> Iterator[Problem]:
    if stateful:
        yield Problem(
            "dynamic_sampling", by, "tools and environment_factory keep state that a row cannot carry", "Remove one."
        )
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        reason = f"it draws rows of the training set by number, which a {type(dataset).__name__} does not allow"
        yield Problem("dynamic_sampling", by, reason, "Set dataset_streaming: false.")
