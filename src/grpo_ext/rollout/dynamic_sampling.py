"""Dynamic sampling: fresh prompts replace groups whose completions all score alike. DAPO, arXiv:2503.14476.

The batch is settled before TRL sees it: `DynamicSampler.settle` generates and scores, round by round, and what it
ends with (rows, completions, rewards) is handed to TRL as if it had been generated and scored in one go.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_ext.errors import ConfigError
from grpo_ext.objective.advantages import zero_variance
from grpo_ext.registry import did_you_mean
from grpo_ext.rollout.seeds import AttemptId, Source, numbered

TOTAL = "reward"
"""Value of `dynamic_sampling` that judges by advantages, those of all rewards together."""


# Pure decisions, alike on every process.


def judged(
    rewards: Float[Tensor, "groups completions functions"], names: Sequence[str], by: str
) -> Bool[Tensor, " groups"]:
    """Groups that one reward cannot tell apart: fewer than two scored completions, or all scored alike.

    Args:
        rewards: NaN where a function gave None.
        names: of the functions.
        by: the function that judges.
    """
    return zero_variance(rewards[..., list(names).index(by)])


def groups_to_draw(dead: int, num_generations: int, processes: int) -> int:
    """The least number of groups, `dead` or more, whose completions every process has an equal share of."""
    unit = processes // math.gcd(num_generations, processes)
    return -(-dead // unit) * unit


def replacements(dead: Sequence[bool], fresh_dead: Sequence[bool]) -> dict[int, int]:
    """Which fresh group takes the place of which dead one, in order, until either runs out."""
    places = [i for i, is_dead in enumerate(dead) if is_dead]
    living = [i for i, is_dead in enumerate(fresh_dead) if not is_dead]
    return dict(zip(places, living, strict=False))


def judge_problems(by: str | None, names: Sequence[str]) -> Iterator[str]:
    """Whether `dynamic_sampling` names a reward."""
    if by is not None and by != TOTAL and by not in names:
        yield f"dynamic_sampling={by!r}: no reward has this name. {did_you_mean(by, [*names, TOTAL])}"


# Fresh prompts.


class FreshPrompts:
    """Rows of a dataset in an order of their own, epoch after epoch; `drawn` is all there is to resume.

    Args:
        size: rows of the dataset.
        seed: of the order; every process needs the same.
        shuffled: whether the order is random; else it is the dataset's.
    """

    def __init__(self, size: int, seed: int, *, shuffled: bool = True) -> None:
        """Start at the first row of the order."""
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


class Row(NamedTuple):
    """One completion, as `GRPOTrainer._generate` returns it, and what rewards said beside the score."""

    example: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[int]
    tool_mask: list[int] | None
    completion: Any
    logprobs: list | None
    extra: dict[str, Any]
    logged: dict[str, Any]
    earned: list[list[float] | None]
    """What each function said of the turns of a trajectory."""


@dataclass
class Settled:
    """A batch that is generated and scored: this process's rows, and the rewards of all processes."""

    rows: list[Row]
    rewards: Float[Tensor, "batch functions"]
    columns: list[str] = field(default_factory=list)

    @property
    def examples(self) -> list[dict[str, Any]]:
        """What TRL takes as its inputs."""
        return [row.example for row in self.rows]

    @property
    def generation(self) -> tuple[Any, ...]:
        """What TRL's `_generate` returns."""

        def listed(name: str) -> list | None:
            values = [getattr(row, name) for row in self.rows]
            return None if any(value is None for value in values) else values

        extra = {key: [row.extra[key] for row in self.rows] for key in self.rows[0].extra}
        ids, completions = [r.completion_ids for r in self.rows], [r.completion for r in self.rows]
        prompts = [row.prompt_ids for row in self.rows]
        return prompts, ids, listed("tool_mask"), completions, listed("logprobs"), extra, None, []

    @property
    def earned(self) -> list[list[list[float] | None]]:
        """Of each row what each function said of its turns."""
        return [row.earned for row in self.rows]

    @property
    def logged(self) -> dict[str, list]:
        """Columns that rewards logged for the table of completions."""
        return {name: [row.logged.get(name) for row in self.rows] for name in self.columns}


class Generates(Protocol):
    """A trainer, as far as a batch is made and scored by it."""

    accelerator: Any
    args: Any
    environment_factories: Any
    num_generations: int
    reward_func_names: list[str]
    tools: Any
    train_dataset: Any
    _earned: list[list[list[float] | None]]
    _metrics: Any
    _pending_extra_logs: dict[str, Any]

    def rollouts(
        self, rows: list[dict[str, Any]], attempts: list[AttemptId]
    ) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
        """Rows with what became of them, and what TRL's `_generate` returns."""

    def silent_groups(self, settled: Settled) -> Tensor:
        """Groups of all processes, [groups], in which no completion would have an advantage."""

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> Tensor: ...


class DynamicSampler:
    """Refills what is dead in a generation batch; the same rounds on every process.

    Args:
        trainer: its `rollouts`, `_calculate_rewards` and training set are used.

    Raises:
        ConfigError: an unknown reward, or a trainer whose batches cannot be put together anew.
    """

    def __init__(self, trainer: Generates) -> None:
        """Check that it can be done."""
        self.trainer, self.by = trainer, trainer.args.dynamic_sampling
        self.rounds = trainer.args.dynamic_sampling_max_rounds
        problems = [*judge_problems(self.by, trainer.reward_func_names), *_unfit(trainer)]
        if problems:
            raise ConfigError(problems)
        shuffled = bool(trainer.args.shuffle_dataset)
        self.prompts = FreshPrompts(len(trainer.train_dataset), trainer.args.seed, shuffled=shuffled)
        self.settled: Settled | None = None

    @contextmanager
    def settling(
        self, examples: list[dict[str, Any]], attempts: list[AttemptId]
    ) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
        """While it lasts `settled` is the batch that came of `examples`, for TRL to find; yields its examples."""
        settled = self.settle(examples, attempts)
        self.settled = settled
        try:
            yield settled.examples
        finally:
            self.settled = None

    def settle(self, examples: list[dict[str, Any]], attempts: list[AttemptId]) -> Settled:
        """Generate and score `examples`; replace dead groups until none is left or the bound is reached."""
        trainer, group = self.trainer, self.trainer.num_generations
        batch = self._scored(examples, attempts)
        dead, drawn, rounds = self._dead(batch), len(batch.rewards), 0
        while any(dead) and rounds < self.rounds:
            rounds += 1
            fresh = self._scored(*self._fresh_examples(sum(dead)))
            fresh_dead = self._dead(fresh)
            drawn += len(fresh.rewards)
            exchange = replacements(dead, fresh_dead)
            self._replace(batch, fresh, exchange)
            dead = [is_dead and i not in exchange for i, is_dead in enumerate(dead)]
        metrics = trainer._metrics["train"]
        metrics["dynamic_sampling/rounds"].append(float(rounds))
        metrics["dynamic_sampling/waste"].append(1 - len(batch.rewards) / drawn)
        metrics["dynamic_sampling/kept_groups"].append(float(len(batch.rewards) // group - sum(dead)))
        return batch

    def _dead(self, batch: Settled) -> list[bool]:
        """Groups to replace, of a batch that has just been scored."""
        trainer = self.trainer
        if self.by == TOTAL:
            return trainer.silent_groups(batch).tolist()
        grouped = batch.rewards.double().view(-1, trainer.num_generations, batch.rewards.shape[1])
        return judged(grouped, trainer.reward_func_names, self.by).tolist()

    def _fresh_examples(self, dead: int) -> tuple[list[dict[str, Any]], list[AttemptId]]:
        """This process's share of the completions of enough fresh prompts: rows, and which attempts they are."""
        trainer, processes = self.trainer, self.trainer.accelerator.num_processes
        first = self.prompts.drawn * trainer.num_generations
        indices = self.prompts.draw(groups_to_draw(dead, trainer.num_generations, processes))
        every = [index for index in indices for _ in range(trainer.num_generations)]
        local = len(every) // processes
        mine = range(trainer.accelerator.process_index * local, (trainer.accelerator.process_index + 1) * local)
        rows = [dict(trainer.train_dataset[every[i]]) for i in mine]
        numbers = [first + i for i in mine]
        return rows, numbered(trainer.args.seed, Source.FRESH, numbers, trainer.num_generations)

    def _scored(self, examples: list[dict[str, Any]], attempts: list[AttemptId]) -> Settled:
        """Completions and rewards of `examples`, by TRL's own methods."""
        trainer, prompts = self.trainer, [example["prompt"] for example in examples]
        examples, generated = trainer.rollouts(examples, attempts)
        prompt_ids, ids, tool_mask, completions, logprobs, extra, images, _ = generated
        if images is not None:
            raise ConfigError([_NO_IMAGES.format(trainer.args.dynamic_sampling)])
        trainer._pending_extra_logs.clear()
        rewards = trainer._calculate_rewards(examples, prompts, completions, ids)
        pending = {name: list(values) for name, values in trainer._pending_extra_logs.items()}
        trainer._pending_extra_logs.clear()
        rows = [
            Row(
                example,
                prompt_ids[i],
                ids[i],
                None if tool_mask is None else tool_mask[i],
                completions[i],
                None if logprobs is None else logprobs[i],
                {name: example[name] for name in extra},
                {name: values[i] for name, values in pending.items() if len(values) == len(ids)},
                trainer._earned[i],
            )
            for i, example in enumerate(examples)
        ]
        return Settled(rows, rewards, list(pending))

    def _replace(self, batch: Settled, fresh: Settled, exchange: dict[int, int]) -> None:
        """Put fresh groups in the place of dead ones, on whichever processes their rows are."""
        group, accelerator = self.trainer.num_generations, self.trainer.accelerator
        rows = gather_object(fresh.rows) if accelerator.num_processes > 1 else fresh.rows
        first = accelerator.process_index * len(batch.rows)
        batch.columns = list(dict.fromkeys([*batch.columns, *fresh.columns]))
        for place, source in exchange.items():
            for i in range(group):
                batch.rewards[place * group + i] = fresh.rewards[source * group + i]
                local = place * group + i - first
                if 0 <= local < len(batch.rows):
                    batch.rows[local] = rows[source * group + i]


_NO_IMAGES = "dynamic_sampling={!r}: batches with images cannot be put together anew. Remove it."


def _unfit(trainer: Generates) -> Iterator[str]:
    by, dataset = trainer.args.dynamic_sampling, trainer.train_dataset
    if trainer.tools or trainer.environment_factories is not None:
        yield f"dynamic_sampling={by!r} with tools or environments: a row cannot take their state along. Remove one."
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        yield (
            f"dynamic_sampling={by!r} needs a training set whose rows can be drawn by number, and this one is "
            f"a {type(dataset).__name__}. Set dataset_streaming: false."
        )
    elif isinstance(dataset, Dataset) and {"image", "images"} & set(dataset.column_names):
        yield _NO_IMAGES.format(by)
