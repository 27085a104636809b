"""Losses beside the policy's: what they add to a generation, and their share of an optimizer step's loss.

Each has its own rows, tokens and denominator, so that it does not change the gradient of another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo_ext.config.added_losses import JSD, AddedLoss, CrossEntropy, Distillation, ReverseKL
from grpo_ext.config.weight_schedule import weight_at
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.objective.aggregation import StepTotals, aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.options import bind
from grpo_ext.objective.ratios import full_precision, masked
from grpo_ext.packing.micro_batches import TOKENS, MicroBatch, active_mask, rows_of
from grpo_ext.packing.scorer import Scorer
from grpo_ext.packing.teacher_head import TeacherHead, divergence_from, teacher_head
from grpo_ext.trainer.loss import LossOutput
from grpo_ext.trainer.scoring import SHARDED
from grpo_ext.trainer.teacher import Teacher

Logps = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""Log-probabilities of a generation by a model, without a gradient."""


class AddedLosses:
    """The losses that `losses` lists.

    Args:
        losses: their settings.
        teachers: by name of the teacher.
        scorer: computes forwards.
        score: the trainer's `_get_per_token_logps_and_entropies`, which a subclass may override.
        tokenizer: of prompts and demonstrations.
        template: options of its chat template.
        accelerator: knows how many processes average their gradients.

    Raises:
        ConfigError: the engine cannot compute one of them.
    """

    def __init__(
        self,
        losses: Sequence[AddedLoss],
        teachers: Mapping[str, Teacher],
        scorer: Scorer,
        score: Callable[..., Any],
        tokenizer: Any,
        template: Mapping[str, Any],
        accelerator: Accelerator,
    ) -> None:
        self.losses, self.teachers, self.scorer, self.score = losses, teachers, scorer, score
        self.tokenizer, self.template, self.accelerator = tokenizer, template, accelerator
        if is_deepspeed_zero3_enabled() and (whole := [loss.label for loss in losses if isinstance(loss, JSD)]):
            reason = "ZeRO-3 splits the weights of the LM head, which it reads twice"
            raise ConfigError([Problem("losses", whole[0], reason, "Use reverse_kl, or ZeRO-2.")])

    # A generation.

    def columns(
        self, rows: Sequence[Mapping[str, Any]], group: int, batch: Mapping[str, Any], policy: nn.Module, logps: Logps
    ) -> dict[str, Any]:
        """Return what the losses add to the columns of a generation.

        A list of token ids for each row: of its demonstration or of the teacher's prompt, [0] where a loss needs
        neither, none where the row is not one of its rows. And a teacher's log-probabilities of the sampled tokens.
        """
        first = self.accelerator.process_index * len(rows)
        added: dict[str, Any] = {}
        for loss in self.losses:
            added[_ids(loss)] = [
                torch.tensor(self._tokens(loss, row, (first + i) % group == 0), dtype=torch.long)
                for i, row in enumerate(rows)
            ]
            if isinstance(loss, ReverseKL):
                teacher = self.teachers[loss.teacher]
                with teacher.weights(policy):
                    added[_logps(loss)] = logps(teacher.model, self._of_teacher(loss, {**batch, **added}))
        return added

    def _tokens(self, loss: AddedLoss, row: Mapping[str, Any], is_first: bool) -> list[int]:
        if not loss.holds_for(row):
            return []
        if isinstance(loss, CrossEntropy):  # once for the completions of a prompt
            return self._demonstration(row[loss.column]) if is_first else []
        assert isinstance(loss, Distillation)
        return [0] if loss.teacher_prompt is None else self._prompt(loss.teacher_prompt, row)

    def _demonstration(self, text: Any) -> list[int]:
        if not text:
            return []
        if not isinstance(text, str):
            reason = "a demonstration is a text"
            raise ConfigError([Problem("losses.column", text, reason, "Name a column of texts.")])
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    def _prompt(self, template: str, row: Mapping[str, Any]) -> list[int]:
        """Return the tokens of the teacher's prompt: of a conversation, the last message is put into the template."""
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return self.tokenizer(template.format(**{**row, "prompt": prompt}))["input_ids"]
        last = {**prompt[-1], "content": template.format(**{**row, "prompt": prompt[-1]["content"]})}
        encoding = self.tokenizer.apply_chat_template(
            [*prompt[:-1], last], add_generation_prompt=True, tokenize=True, return_dict=True, **self.template
        )
        return encoding["input_ids"]

    def _of_teacher(self, loss: Distillation, batch: Mapping[str, Any]) -> MicroBatch:
        """Return rows with the prompts that the teacher reads."""
        if loss.teacher_prompt is None:
            return cast(MicroBatch, batch)
        device, pad = batch["prompt_ids"].device, self.tokenizer.pad_token_id
        prompts = [ids if len(ids) else torch.tensor([pad]) for ids in batch[_ids(loss)]]
        ids = pad_sequence([ids.cpu() for ids in prompts], True, pad, "left")
        mask = pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids in prompts], True, 0, "left")
        return cast(MicroBatch, {**batch, "prompt_ids": ids.to(device), "prompt_mask": mask.to(device)})

    def masks(self, batch: MicroBatch) -> list[Tensor]:
        """Return the tokens that each loss counts, [rows, time]."""
        return [_mask(loss, batch) for loss in self.losses]

    # A micro-batch.

    def teacher_heads(self, policy: nn.Module, inputs: MicroBatch) -> list[TeacherHead | None]:
        """Return the outputs of teachers whose whole distribution is needed; before the policy's own forward.

        A teacher may be the policy with other weights, which may not change before its backward.
        """
        return [self._head(loss, policy, inputs) if isinstance(loss, JSD) else None for loss in self.losses]

    def _head(self, loss: JSD, policy: nn.Module, inputs: MicroBatch) -> TeacherHead:
        teacher, rows = self.teachers[loss.teacher], self._of_teacher(loss, inputs)
        stays = teacher.initial is None and self.accelerator.distributed_type not in SHARDED
        labelled, score = _labelled(rows, _mask(loss, inputs)), partial(self._forward, teacher.model, rows)
        with teacher.weights(policy), self.scorer.forward_only():
            return teacher_head(score, *labelled, stays=stays)

    def _forward(self, model: nn.Module, rows: MicroBatch) -> Tensor:
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        return self.scorer.stock(model, ids, mask, rows["completion_ids"].shape[1])[0]

    def add(
        self,
        output: LossOutput,
        model: nn.Module,
        inputs: MicroBatch,
        heads: Sequence[TeacherHead | None],
        totals: Sequence[StepTotals],
        progress: tuple[int, int],
    ) -> LossOutput:
        """Return the loss of a micro-batch with its share of these losses, and their figures.

        `totals` are the denominators of each loss over the optimizer step, `progress` the step and the run's steps.
        """
        assert output.figures is not None
        loss, means = output.loss, dict(output.figures.means)
        for spec, head, total in zip(self.losses, heads, totals, strict=True):
            values, mask = self._values(spec, output.per_token_logps, model, inputs, head)
            share = aggregations[spec.aggregation](values, mask, total) * self.accelerator.num_processes
            loss = loss + weight_at(spec.weight, spec.weight_schedule, *progress) * share
            means[f"losses/{spec.label}"] = values.detach(), mask
        return output._replace(loss=loss, figures=output.figures._replace(means=means))

    def _values(
        self, loss: AddedLoss, logps: Tensor, model: nn.Module, inputs: MicroBatch, head: TeacherHead | None
    ) -> tuple[Float[Tensor, "rows time"], Int[Tensor, "rows time"]]:
        """Return a loss at each token, and the tokens that count."""
        mask = _mask(loss, inputs)
        if isinstance(loss, ReverseKL):
            return reverse_kl(logps, inputs, cast(Mapping[str, Tensor], inputs)[_logps(loss)], mask, loss), mask
        if isinstance(loss, JSD):
            assert head is not None
            divergence = divergence_from(
                lambda: self._forward(model, inputs), *_labelled(inputs, mask), head, beta=loss.beta, clip=loss.clip
            )
            return divergence, mask
        return -self._demonstrated(loss, model, inputs), mask

    def _demonstrated(self, loss: AddedLoss, model: nn.Module, inputs: MicroBatch) -> Float[Tensor, "rows time"]:
        """Return the log-probabilities of demonstrations; where no row has any, of a token that does not count."""
        ids, mask = self._padded(loss, inputs), _mask(loss, inputs)
        rows = mask.any(dim=1).nonzero()[:, 0] if mask.any() else torch.zeros(1, dtype=torch.long, device=mask.device)
        prompts = {name: inputs[name] for name in TOKENS[:2]}
        seen = mask if mask.any() else torch.ones_like(mask)
        batch = cast(MicroBatch, {**prompts, "completion_ids": ids, "completion_mask": seen})
        logps = self.scorer.micro_batch(self.score, model, rows_of(batch, rows), entropy=False)[0]
        return logps.new_zeros(mask.shape).index_copy(0, rows, logps)

    def _padded(self, loss: AddedLoss, inputs: MicroBatch) -> Int[Tensor, "rows time"]:
        ids = cast(Mapping[str, list[Tensor]], inputs)[_ids(loss)]
        pad, device = self.tokenizer.pad_token_id, inputs["prompt_ids"].device
        return pad_sequence([row if len(row) else row.new_tensor([pad]) for row in ids], True, pad).to(device)


def reverse_kl(logps: Tensor, inputs: Mapping[str, Any], teacher: Tensor, mask: Tensor, loss: ReverseKL) -> Tensor:
    """Estimate KL(policy || teacher) at each sampled token."""
    logps = full_precision(logps)
    old = full_precision(inputs.get("old_per_token_logps", logps.detach()))
    tensors = {
        "log_ref_ratio": masked(full_precision(teacher) - logps, mask),
        "log_ratio": masked(logps - old, mask),
        "mask": mask,
    }
    return bind(kl_estimators[loss.kl_estimator], tensors)()


def _ids(loss: AddedLoss) -> str:
    return f"losses.{loss.label}"


def _logps(loss: AddedLoss) -> str:
    return f"losses.{loss.label}.teacher_logps"


def _mask(loss: AddedLoss, inputs: Mapping[str, Any]) -> Int[Tensor, "rows time"]:
    """Return the tokens that a loss counts: of completions, or of demonstrations."""
    device, ids = inputs["prompt_ids"].device, inputs[_ids(loss)]
    lengths = torch.tensor([len(row) for row in ids], device=device)[:, None]
    if isinstance(loss, CrossEntropy):
        return (torch.arange(max(1, int(lengths.max())), device=device) < lengths).long()
    return active_mask(inputs) * (lengths > 0)


def _labelled(rows: Mapping[str, Any], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of rows that TRL's LM head is asked for, and those that count, [rows, width]."""
    prompts = torch.zeros_like(rows["prompt_mask"], dtype=torch.bool)
    return torch.cat([prompts, rows["completion_mask"].bool()], dim=1), torch.cat([prompts, mask.bool()], dim=1)
