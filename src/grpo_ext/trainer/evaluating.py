"""EvaluatingTrainer: TRL's GRPOTrainer whose evaluation gives one figure, on any number of processes."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import has_length
from trl.trainer.utils import RepeatSampler

from grpo_ext.config.batches import eval_batch_problems
from grpo_ext.errors import ConfigError
from grpo_ext.rollout.random_streams import random_streams_kept
from grpo_ext.rollout.seeds import AttemptId, Source, numbered
from grpo_ext.trainer.evaluated import Evaluated
from grpo_ext.trainer.loss_terms import Figures
from grpo_ext.trainer.resumable import ResumableTrainer


class _SameOrder(RepeatSampler):
    """TRL's sampler with the same order each time, also where persistent workers keep it between evaluations.

    A prompt of an evaluation is known by its place in this order.
    """

    def __init__(self, sampler: Any) -> None:
        vars(self).update(vars(sampler))

    def __iter__(self) -> Iterator[int]:
        if self.seed is not None and self.shuffle:
            self.generator.manual_seed(self.seed)
        return super().__iter__()


class EvaluatingTrainer(ResumableTrainer):
    """`evaluate` over whole groups, each completion counted once; with `loss_defaults: trl` as stock TRL."""

    num_generations: Any
    num_generations_eval: Any
    _evaluated: Evaluated | None = None
    """The evaluation that is going on."""
    _eval_rows: tuple[int, int | None] = 0, None
    """Completions of all processes that the current evaluation has seen, and their number if it is known."""
    _figures: Figures
    _metrics: dict[str, defaultdict[str, list[float]]]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As TRL's, after a check that evaluation batches hold whole groups.

        Raises:
            ConfigError: they do not.
        """
        problems = list(eval_batch_problems(self.args))
        if problems:
            raise ConfigError(problems)
        return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, with figures over all completions in place of those over batches; training draws on as without."""
        known = has_length(dataloader)  # not of a stream
        rows = len(dataloader.dataset) * self.num_generations_eval if known else None
        self._eval_rows = 0, rows
        if self.args.loss_defaults == "trl":
            return super().evaluation_loop(dataloader, *args, **kwargs)
        self._figures.clear()  # a step that failed may have left its own
        evaluated = self._evaluated = Evaluated(rows)
        try:
            with random_streams_kept():
                output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self._evaluated = None
        metrics, weights = self._metrics["eval"], self.reward_weights.double()
        figures = evaluated.figures(self.reward_func_names, weights, self.num_generations_eval, self.objective)
        metrics.update({name: [value] for name, value in figures.items()})
        self._figures.log(metrics, self.accelerator)
        output.metrics[f"{kwargs.get('metric_key_prefix', 'eval')}_loss"] = metrics.pop("loss", [0.0])[-1]
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; counts the rows that the evaluation has seen."""
        output = super().prediction_step(model, inputs, *args, **kwargs)
        seen, known = self._eval_rows
        self._eval_rows = seen + len(inputs) * self.accelerator.num_processes, known
        return output

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return _SameOrder(super()._get_eval_sampler(eval_dataset))

    def attempt_ids(self, count: int) -> list[AttemptId]:
        """Which attempts this process's next `count` rows are, in training or evaluation; each process has as many."""
        args, world, rank = self.args, self.accelerator.num_processes, self.accelerator.process_index
        if self.model.training:
            generation = self._step // (int(args.steps_per_generation or 1) * self.num_iterations)
            rows = range((generation * world + rank) * count, (generation * world + rank + 1) * count)
            return numbered(args.seed, Source.TRAINING, rows, self.num_generations)
        seen, known = self._eval_rows
        places = (seen + rank * count + i for i in range(count))
        wrapped = (place if known is None else place % known for place in places)  # fillers are the first rows again
        return numbered(args.seed, Source.EVALUATION, wrapped, self.num_generations_eval)

    def _generate(self, prompts: list) -> tuple[Any, ...]:
        generated = super()._generate(prompts)
        if self._evaluated is not None:
            _, completions, tool_mask, *_ = generated
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            tokens = [len(ids) for ids in completions] if tool_mask is None else [sum(mask) for mask in tool_mask]
            self._evaluated.take_lengths(tokens, [ids[-1] not in ends for ids in completions], self.accelerator)
        return generated

    def _mask_fillers(self, output: dict[str, Any], rewards: Tensor) -> None:
        """Rows that only fill up the last batch of an evaluation have no part in its figures."""
        assert self._evaluated is not None
        real, local = self._evaluated.take(rewards), len(output["completion_mask"])
        mine = torch.arange(local, device=self.accelerator.device) + self.accelerator.process_index * local
        output["completion_mask"] = output["completion_mask"] * (mine < real)[:, None]
