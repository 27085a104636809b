"""Micro-batches of one generation, sampled or recorded: their denominators, and log-probabilities of the old policy.

Rows that are computed together, padded and packed in the same way, have the same log-probabilities to the last bit; in
half precision another micro-batch moves them by hundredths. So old log-probabilities come from the very forward of the
loss: a micro-batch that the loss reaches before the policy moves keeps the log-probabilities of that pass, and the
others get theirs just before it moves.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.aggregation import StepTotals, step_totals
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.micro_batches import MicroBatch, live_mask, silent
from grpo_ext.trainer.findings import BEFORE_THE_FORWARD, ORDER
from grpo_ext.trainer.recording import Content, Recorded, ranks_in, read, steps_in, unpacked

COMPUTED = (*ORDER[1 + len(BEFORE_THE_FORWARD) :], "entropies")
"""Tensors of a recording that its own forward computed."""


@dataclass(frozen=True)
class Generation:
    """The micro-batches of one generation, from their arrangement until the next generation replaces them."""

    micro_batches: Sequence[MicroBatch] = ()
    totals: Sequence[StepTotals] = ()
    """Totals of each optimizer step over all processes; empty with stock TRL's denominators."""

    def __contains__(self, inputs: MicroBatch) -> bool:
        return any(batch is inputs for batch in self.micro_batches)

    def totals_of(self, inputs: MicroBatch) -> StepTotals | None:
        """Return the totals of the optimizer step that a micro-batch belongs to, or None for one from elsewhere."""
        window = len(self.micro_batches) // max(1, len(self.totals))
        places = (i for i, batch in enumerate(self.micro_batches) if batch is inputs and self.totals)
        return next((self.totals[i // window] for i in places), None)


# Denominators.


def counted(micro_batches: Sequence[MicroBatch], window: int, accelerator: Accelerator) -> list[StepTotals]:
    """Totals of each step of `window` micro-batches over all processes, in one reduction."""
    masks = [live_mask(batch) for batch in micro_batches]
    local = [torch.stack(step_totals(masks[i : i + window])) for i in range(0, len(masks), window)]
    return [StepTotals(*row) for row in accelerator.reduce(torch.stack(local), reduction="sum")]


def counted_once(mask: Tensor, micro_batches: int, accelerator: Accelerator) -> StepTotals:
    """Totals as if all of a step's `micro_batches` were like this one: evaluation, or a loss outside of training."""
    return StepTotals(*(accelerator.reduce(torch.stack(step_totals([mask])), reduction="sum") * micro_batches))


def stock_totals(inputs: MicroBatch, micro_batches: int, share: float, processes: int) -> StepTotals:
    """Stock TRL's totals: all rows, and `share` of the generation's tokens."""
    rows, tokens = len(inputs["completion_mask"]), inputs["num_items_in_batch"].clamp(min=1.0) * share
    steps = torch.tensor(float(micro_batches * processes), device=tokens.device)
    return StepTotals(tokens=tokens, sequences=steps * rows, micro_batches=steps)


# The old policy.


def no_early_pass(args: GRPOExtConfig) -> AbstractContextManager[None]:
    """Skip TRL's pass for old log-probabilities, whose rows are not in the loss's micro-batches yet.

    TRL decides by `gradient_accumulation_steps` whether an optimizer step may begin within a generation. With vLLM's
    importance sampling correction it still runs the pass, for the sampler's ratio.
    """
    return temporarily(args, gradient_accumulation_steps=int(args.steps_per_generation or 1) * args.num_iterations)


@contextmanager
def forward_only(model: PreTrainedModel, args: GRPOExtConfig) -> Iterator[None]:
    """Disable gradients, and checkpointing with them: torch warns of a checkpoint without a gradient."""
    kwargs: Any = args.gradient_checkpointing_kwargs
    with torch.no_grad(), disable_gradient_checkpointing(model, kwargs):
        yield


# Recorded batches in place of rollouts, as `_prepare_inputs` hands them to the loss.


class Replays(Recorded, Protocol):
    """A trainer that trains on recordings."""

    @property
    def _skips(self) -> bool: ...

    def _scores(self, model: nn.Module, inputs: MicroBatch, live: Tensor | None) -> tuple[Tensor, Any, Any]: ...


def without_rollouts(args: GRPOExtConfig) -> AbstractContextManager[None]:
    """While TRL's trainer is built for a replay: no sampler and no reference, whose work is in the recording."""
    if args.replay_batches is None:
        return nullcontext()
    return temporarily(args, use_vllm=False, beta=0.0, sync_ref_model=False)


class RecordedBatches:
    """The batches of a run, step by step.

    Args:
        folder: `batches` of a run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def __call__(self, trainer: Replays) -> Generation:
        """Return this process's part of the next step.

        Raises:
            ConfigError: it was not recorded, or cannot be trained on here.
        """
        step, steps = trainer.state.global_step + 1, steps_in(self.folder)
        if step not in steps:
            reason = f"{len(steps)} steps were recorded, and step {step} is not among them"
            cure = "Set max_steps to what was recorded, or record with record_batches: 1."
            raise ConfigError([Problem("replay_batches", str(self.folder), reason, cure)])
        contents, rank = whole(steps[step]), trainer.accelerator.process_index
        processes = trainer.accelerator.num_processes
        if processes not in (1, len(contents)):
            reason = f"it was recorded by {len(contents)} processes, and {processes} train"
            raise _refusal(steps[step], reason, "Start as many, or one.")
        _check_weights(trainer.args, contents[0], steps[step])
        generation = restored(trainer, contents if processes == 1 else contents[rank : rank + 1])
        check_credit(trainer.objective, generation.micro_batches)
        found, expected = len(generation.micro_batches), trainer.args.gradient_accumulation_steps
        if found != expected:
            reason = f"it holds {found} micro-batches for a process, and gradient_accumulation_steps is {expected}"
            raise _refusal(steps[step], reason, f"Set it to {found}.")
        return generation


def _check_weights(args: GRPOExtConfig, content: Content, folder: Path) -> None:
    """Refuse a correction of the sampler other than the recorded one, whose weights are in the batches.

    Raises:
        ConfigError: it differs.
    """
    recorded = GRPOExtConfig.as_given(content["settings"]).sampler_rules
    if args.samples_otherwise and recorded != args.sampler_rules:
        reason = f"its weights correct the sampler by {recorded or 'no rule'}, and these settings have another rule"
        raise _refusal(folder, reason, "Set sampler_correction as the recorded run did.")


def whole(folder: Path) -> list[Content]:
    """Read all processes' parts of a step.

    Raises:
        ConfigError: one is missing or damaged.
    """
    contents = [read(path) for path in ranks_in(folder)]
    if not contents:
        raise _refusal(folder, "it holds no recorded batch (rank_0.pt)", "Name a step's folder.")
    missing = sorted(set(range(contents[0]["processes"])) - {content["rank"] for content in contents})
    if missing and any("micro_batches" in content for content in contents):
        count = contents[0]["processes"]
        reason = f"it lacks rank_{missing[0]}.pt: {count} processes have recorded, each on its own disk perhaps"
        raise _refusal(folder, reason, "Bring their files together.")
    return contents


def micro_batches(contents: Sequence[Content]) -> list[dict[str, Any]]:
    """Return all processes' micro-batches of a step, as they were recorded.

    Raises:
        ConfigError: there are none.
    """
    kept = [batch for content in contents for batch in content.get("micro_batches", [])]
    if not kept:
        reason = "this dump holds the completions to which a reward gave NaN or inf, from before the batch was formed"
        raise _refusal(f"Step {contents[0]['step']}", reason, "Look at its `rewards` with torch.load.")
    return kept


def restored(trainer: Replays, contents: Sequence[Content], *, sees_silent: bool = False) -> Generation:
    """Return the micro-batches of a step, as the loss takes them.

    Args:
        trainer: has the model that they are for.
        contents: recordings of the processes.
        sees_silent: whether rows without a recorded advantage have a part in the loss, though `trainer` would skip
            rows without one.

    Raises:
        ConfigError: they hold no batch, or none for this model.
    """
    device, kept = trainer.accelerator.device, micro_batches(contents)
    inputs = ({name: value for name, value in batch.items() if name not in COMPUTED} for batch in kept)
    batches = [cast(MicroBatch, unpacked(batch, device)) for batch in inputs]
    _check_tokens(trainer.accelerator.unwrap_model(trainer.model), batches)
    for batch in batches if sees_silent or not trainer._skips else ():
        _fill_old(trainer, batch)
    totals = contents[0]["totals"]
    return Generation(batches, () if totals is None else (StepTotals(*totals.to(device)),))


def _check_tokens(model: Any, batches: Sequence[MicroBatch]) -> None:
    weight = model.get_input_embeddings().weight
    vocabulary = getattr(weight, "ds_shape", weight.shape)[0]  # ZeRO 3 leaves an empty tensor
    largest = max(int(ids.max()) for batch in batches for ids in (batch["prompt_ids"], batch["completion_ids"]))
    if largest >= vocabulary:
        reason = f"it holds token {largest}, and the model has {vocabulary}: it was recorded with another model"
        raise _refusal("the batch", reason, "Give --model the one that was recorded.")
    if any("pixel_values" in batch for batch in batches):
        reason = "it holds images, which were not recorded in full"
        raise _refusal("the batch", reason, "Replay batches of text only.")


def check_credit(objective: Objective, batches: Sequence[MicroBatch]) -> None:
    """Refuse recorded advantages that differ by token where the loss has one term for a whole completion.

    Raises:
        ConfigError: they do, and it has.
    """
    if any(batch["advantages"].dim() == 2 for batch in batches) and mixes_tokens(objective):
        reason = "the recorded advantages differ by token, and this loss has one term for a whole completion"
        cure = "Replay with a loss that has a term for each token, such as grpo or gspo."
        raise ConfigError([Problem("loss_type", objective.loss_type, reason, cure)])


def _fill_old(trainer: Replays, batch: MicroBatch) -> None:
    """Compute the old log-probabilities of rows that the recorded run left out of its forward."""
    old = batch.get("old_per_token_logps")
    if old is None:
        return
    unknown = silent(batch["advantages"]) & ~(old * live_mask(batch)).any(dim=1)
    if unknown.any():
        with forward_only(trainer.model, trainer.args):
            logps = trainer._scores(trainer.model, batch, None)[0]
        batch["old_per_token_logps"] = torch.where(unknown[:, None], logps.to(old.dtype), old)


def _refusal(place: object, reason: str, cure: str) -> ConfigError:
    return ConfigError([Problem(str(place), ABSENT, reason, cure)])
