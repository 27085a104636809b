"""Compute the gradient of an optimizer step one row at a time: no padding, no batch, and the papers' denominators.

The recording has the rows of each step and the weights before and after it. Everything else is computed again:
log-probabilities by a plain forward of one row, advantages of whole generations, the loss of one row, and its share of
the step by the counts of the step's rows and tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.combinations import weighted_total
from grpo_ext.objective.objective import Objective
from grpo_ext.trainer.advantages import GroupMeans
from support.fixed_rows import Rows, row_score
from support.watched import Weights

MicroBatches = Sequence[tuple[int, list[int]]]
RowLoss = Callable[[Objective, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Terms:
    """Terms of the loss beside the objective; `cut_masked` is `mask_truncated_completions`."""

    temperature: float = 1.0
    entropy_coef: float = 0.0
    cut_masked: bool = False
    reward_weights: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Counts:
    """Live rows and tokens of an optimizer step, tokens of the row's micro-batch, and the number of micro-batches."""

    rows: int
    tokens: int
    of_micro_batch: int
    micro_batches: int


def share(objective: Objective, per_token: Tensor, counts: Counts) -> Tensor:
    """Return the contribution of a row with the losses `per_token` [tokens] to the loss of the step."""
    n = len(per_token)
    limit = objective.aggregation_kwargs.get("max_completion_length", 1)
    divided_by = {
        "seq-mean-token-mean": n * counts.rows,
        "token-mean": counts.tokens,
        "seq-mean-token-sum": counts.rows,
        "seq-mean-token-sum-norm": counts.rows * limit,
        "micro-batch-token-mean": counts.of_micro_batch * counts.micro_batches,
    }.get(objective.aggregation)
    if divided_by is not None:
        return per_token.sum() / divided_by
    totals = StepTotals(*(torch.tensor(x) for x in (counts.tokens, counts.rows, counts.micro_batches)))
    return objective.aggregate(per_token[None], torch.ones(1, n), totals)  # a custom one


class RowByRow:
    """Computes the gradients of the steps of a recorded run.

    Args:
        model: a model of the same architecture, on any device; its weights are overwritten.
        watched: the recording of `Watched.save`.
        row_loss: losses [1, tokens] of one row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        rows: Rows,
        terms: Terms,
        watched: Mapping[str, Any],
        row_loss: RowLoss,
    ) -> None:
        self.model, self.objective, self.rows, self.terms = model.eval(), objective, rows, terms
        self.weights: list[Weights] = watched["weights"]
        self.steps: list[MicroBatches] = watched["steps"]
        self.row_loss = row_loss
        self.history = GroupMeans(objective.remembered_batches)
        self._old: dict[tuple[int, int], Tensor] = {}
        self._reference: dict[tuple[int, int], Tensor] = {}
        self._entropies: dict[tuple[int, int], Tensor] = {}
        self._advantages: dict[int, Tensor] = {}
        self._marks: dict[int, Tensor] = {}

    @cached_property
    def size(self) -> int:
        """Rows of a generation: the largest number in any step."""
        return 1 + max(row for step in self.steps for _, rows in step for row in rows)

    def gradients(self) -> list[Weights]:
        """Return the gradient of each step."""
        return [self._gradient(step) for step in range(len(self.steps))]

    def _gradient(self, step: int) -> Weights:
        micro_batches = self.steps[step]
        for generation in sorted({generation for generation, _ in micro_batches} - self._advantages.keys()):
            self._begin(generation)
        self._load(self.weights[step])
        self.model.zero_grad()
        active = [[(g, row) for row in rows if self._active(row)] for g, rows in micro_batches]
        lengths = [sum(len(self.rows.completion(*place)) for place in places) for places in active]
        for places, of_micro_batch in zip(active, lengths, strict=True):
            counts = Counts(sum(map(len, active)), sum(lengths), of_micro_batch, len(active))
            for place in places:
                self._add(place, counts)
        return {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def _add(self, place: tuple[int, int], counts: Counts) -> None:
        logps, entropies = self._forward(place)
        generation, row = place
        advantage = self._advantages[generation].flatten(0, 1)[row].to(logps.device)
        inputs = {
            "per_token_logps": logps[None],
            "old_per_token_logps": self._old[place].to(logps.device)[None],
            "advantages": advantage[None] if advantage.dim() == 0 else advantage[None, : len(logps)],
        }
        if self.objective.beta:
            inputs["ref_per_token_logps"] = self._reference[place].to(logps.device)[None]
        if generation in self._marks:
            inputs["marks"] = self._marks[generation].flatten(0, 1)[row].to(logps.device)[None, : len(logps)]
        loss = share(self.objective, self.row_loss(self.objective, inputs)[0], counts)
        if self.terms.entropy_coef:
            loss = loss - self.terms.entropy_coef * entropies.sum() / counts.tokens
        loss.backward()

    def _begin(self, generation: int) -> None:
        """Compute old log-probabilities, those of the reference, and the advantages of a generation."""
        places = [(generation, row) for row in range(self.size)]
        with torch.no_grad():
            self._load(self.weights[generation])
            for place in places:
                self._old[place], self._entropies[place] = self._forward(place)
            if self.objective.beta:
                self._load(self.weights[0])
                self._reference |= {place: self._forward(place)[0] for place in places}
        self._advantages[generation] = self._estimated(generation, places)

    def _estimated(self, generation: int, places: list[tuple[int, int]]) -> Tensor:
        """Advantages [groups, completions (, time)]."""
        objective, group = self.objective, self.rows.group
        completions = [self.rows.completion(*place) for place in places]
        scores = [[row_score(ids, k) for k in range(self.rows.rewards)] for ids in completions]
        rewards = torch.tensor(scores).double().view(-1, group, self.rows.rewards)  # TRL has them in float32
        weights = torch.tensor(self.terms.reward_weights).double()
        total = weighted_total(rewards, weights, missing=objective.missing_rewards)
        tokens: dict[str, Tensor] = {}
        if objective.sees_tokens:
            width = max(map(len, completions))
            kept = [len(ids) if self._active(row) else 0 for (_, row), ids in zip(places, completions, strict=True)]
            mask = torch.arange(width) < torch.tensor(kept)[:, None]
            tokens["mask"] = mask.long().view(-1, group, width)
            columns = {"per_token_logps": self._old, "entropies": self._entropies}
            rows = {name: [column[place].cpu() for place in places] for name, column in columns.items()}
            rows["completion_ids"] = [torch.tensor(ids) for ids in completions]
            further = {name: pad_sequence(row, batch_first=True) for name, row in rows.items()}
            asked = objective.generation_inputs & further.keys()
            tokens |= {name: further[name].view(-1, group, width) for name in asked}
        if objective.kl_in_reward:
            tokens["kl"] = self._penalties(places, width).view(-1, group, width)
            rewards = objective.less_kl(rewards, weights, **tokens)
            weights, total = weights.new_ones(1), rewards[..., 0]
        values = objective.advantages(rewards, weights, self.history.concatenated(), None, **tokens)
        self.history.remember(rewards, total)
        values = values.float()  # TRL's dtype
        if (marks := objective.marks(values, tokens)) is not None:
            self._marks[generation] = marks
        return values

    def _penalties(self, places: list[tuple[int, int]], width: int) -> Tensor:
        found = torch.zeros(len(places), width, dtype=torch.float64)
        for i, place in enumerate(places):
            if self._active(place[1]):
                log_ref_ratio = (self._reference[place] - self._old[place])[None]
                penalty = self.objective.kl_penalty(
                    {"log_ref_ratio": log_ref_ratio, "mask": torch.ones_like(log_ref_ratio)}
                )
                found[i, : log_ref_ratio.shape[1]] = penalty[0]
        return found

    def _active(self, row: int) -> bool:
        return not (self.terms.cut_masked and self.rows.is_cut(row))

    def _forward(self, place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [tokens] of a completion."""
        generation, row = place
        prompt = self.rows.prompt(generation, row // self.rows.group)
        completion = torch.tensor(self.rows.completion(generation, row), device=self.model.device)
        ids = torch.cat([torch.tensor(prompt, device=self.model.device), completion])[None]
        logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        log_p = torch.log_softmax(logits / self.terms.temperature, dim=-1)
        return log_p.gather(1, completion[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)

    @torch.no_grad()
    def _load(self, weights: Weights) -> None:
        for name, parameter in self.model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])


def differences(watched: Mapping[str, Any], gradients: Sequence[Weights], learning_rate: float) -> list[float]:
    """Return |moved / learning rate + gradient| / |gradient| of each step of plain SGD, over all parameters."""
    found = []
    for (before, after), gradient in zip(pairwise(watched["weights"]), gradients, strict=True):
        error = torch.cat(
            [
                ((before[n].double() - after[n].double()) / learning_rate - g.double()).flatten()
                for n, g in gradient.items()
            ]
        )
        size = torch.cat([g.double().flatten() for g in gradient.values()]).norm()
        found.append((error.norm() / size).item() if size else error.norm().item())
    return found
