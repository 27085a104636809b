"""Recorded batches in place of rollouts, as `_prepare_inputs` hands them to the loss."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerState

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.micro_batches import MicroBatch, live_mask, silent
from grpo_ext.trainer.batches import Generation, forward_only
from grpo_ext.trainer.findings import BEFORE_THE_FORWARD, ORDER
from grpo_ext.trainer.recording import Content, ranks_in, read, steps_in, unpacked

COMPUTED = (*ORDER[1 + len(BEFORE_THE_FORWARD) :], "entropies")
"""Tensors of a recording that its own forward computed."""


class Replays(Protocol):
    """A trainer that trains on recordings."""

    accelerator: Accelerator
    args: GRPOExtConfig
    model: PreTrainedModel
    objective: Objective
    state: TrainerState

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
            raise ConfigError([_problem(steps[step], reason, "Start as many, or one.")])
        _check_weights(trainer.args, contents[0], steps[step])
        generation = restored(trainer, contents if processes == 1 else contents[rank : rank + 1])
        check_credit(trainer.objective, generation.micro_batches)
        found, expected = len(generation.micro_batches), trainer.args.gradient_accumulation_steps
        if found != expected:
            reason = f"it holds {found} micro-batches for a process, and gradient_accumulation_steps is {expected}"
            raise ConfigError([_problem(steps[step], reason, f"Set it to {found}.")])
        return generation


def _check_weights(args: GRPOExtConfig, content: Content, folder: Path) -> None:
    """Refuse a correction of the sampler other than the recorded one, whose weights are in the batches.

    Raises:
        ConfigError: it differs.
    """
    recorded = GRPOExtConfig.as_given(content["settings"]).sampler_rules
    if args.use_vllm and recorded != args.sampler_rules:
        reason = f"its weights correct the sampler by {recorded or 'no rule'}, and these settings have another rule"
        raise ConfigError([_problem(folder, reason, "Set sampler_correction as the recorded run did.")])


def whole(folder: Path) -> list[Content]:
    """Read all processes' parts of a step.

    Raises:
        ConfigError: one is missing or damaged.
    """
    contents = [read(path) for path in ranks_in(folder)]
    if not contents:
        raise ConfigError([_problem(folder, "it holds no recorded batch (rank_0.pt)", "Name a step's folder.")])
    missing = sorted(set(range(contents[0]["processes"])) - {content["rank"] for content in contents})
    if missing and any("micro_batches" in content for content in contents):
        count = contents[0]["processes"]
        reason = f"it lacks rank_{missing[0]}.pt: {count} processes have recorded, each on its own disk perhaps"
        raise ConfigError([_problem(folder, reason, "Bring their files together.")])
    return contents


def micro_batches(contents: Sequence[Content]) -> list[dict[str, Any]]:
    """Return all processes' micro-batches of a step, as they were recorded.

    Raises:
        ConfigError: there are none.
    """
    kept = [batch for content in contents for batch in content.get("micro_batches", [])]
    if not kept:
        reason = "this dump holds the completions to which a reward gave NaN or inf, from before the batch was formed"
        raise ConfigError([_problem(f"Step {contents[0]['step']}", reason, "Look at its `rewards` with torch.load.")])
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
    vocabulary = model.get_input_embeddings().weight.shape[0]
    largest = max(int(ids.max()) for batch in batches for ids in (batch["prompt_ids"], batch["completion_ids"]))
    if largest >= vocabulary:
        reason = f"it holds token {largest}, and the model has {vocabulary}: it was recorded with another model"
        raise ConfigError([_problem("the batch", reason, "Give --model the one that was recorded.")])
    if any("pixel_values" in batch for batch in batches):
        reason = "it holds images, which were not recorded in full"
        raise ConfigError([_problem("the batch", reason, "Replay batches of text only.")])


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


def _problem(place: object, reason: str, cure: str) -> Problem:
    return Problem(str(place), ABSENT, reason, cure)
