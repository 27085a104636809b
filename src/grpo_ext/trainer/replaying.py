"""Recorded batches in the place of rollouts: what `_prepare_inputs` hands to the loss."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from grpo_ext.errors import ConfigError
from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.micro_batches import silent
from grpo_ext.trainer.findings import BEFORE_THE_FORWARD, ORDER
from grpo_ext.trainer.generation import Generation, MicroBatch, live_mask
from grpo_ext.trainer.old_policy import forward_only
from grpo_ext.trainer.recording import Content, ranks_in, read, steps_in, unpacked

COMPUTED = (*ORDER[1 + len(BEFORE_THE_FORWARD) :], "entropies")
"""What a recording holds of the pass that it was recorded in."""


@contextmanager
def rollouts_set_aside(args: Any) -> Iterator[None]:
    """While TRL's trainer is built: no sampler and no reference, where both have been at work before."""
    if args.replay_batches is None:
        yield
        return
    with patch.multiple(args, use_vllm=False, beta=0.0, sync_ref_model=False):
        yield


class RecordedBatches:
    """The batches of a run, step by step."""

    def __init__(self, folder: str | Path) -> None:
        """Those that are in a run's folder `batches`."""
        self.folder = Path(folder).expanduser()

    def __call__(self, trainer: Any) -> Generation:
        """This process's part of the step that comes next.

        Raises:
            ConfigError: it was not recorded, or cannot be trained on here.
        """
        step, steps = trainer.state.global_step + 1, steps_in(self.folder)
        if step not in steps:
            raise ConfigError(
                [
                    f"replay_batches={str(self.folder)!r}: {len(steps)} steps were recorded, and step {step} is none "
                    "of them. Set max_steps to what was recorded, or record with record_batches: 1."
                ]
            )
        contents, rank = whole(steps[step]), trainer.accelerator.process_index
        processes = trainer.accelerator.num_processes
        if processes not in (1, len(contents)):
            raise ConfigError(
                [
                    f"{steps[step]} was recorded by {len(contents)} processes, and {processes} train. Start as many, "
                    "or one."
                ]
            )
        generation = restored(trainer, contents if processes == 1 else contents[rank : rank + 1])
        check_credit(trainer.objective, generation.micro_batches)
        found, expected = len(generation.micro_batches), trainer.args.gradient_accumulation_steps
        if found != expected:
            raise ConfigError(
                [
                    f"{steps[step]} holds {found} micro-batches for a process, and gradient_accumulation_steps is "
                    f"{expected}. Set it to {found}."
                ]
            )
        return generation


def whole(folder: Path) -> list[Content]:
    """All processes' parts of a step.

    Raises:
        ConfigError: one is missing or damaged.
    """
    contents = [read(path) for path in ranks_in(folder)]
    if not contents:
        raise ConfigError([f"{folder} holds no recorded batch (rank_0.pt). Name a step's folder."])
    missing = sorted(set(range(contents[0]["processes"])) - {content["rank"] for content in contents})
    if missing and any("micro_batches" in content for content in contents):
        raise ConfigError(
            [
                f"{folder} lacks rank_{missing[0]}.pt: {contents[0]['processes']} processes have recorded, each on "
                "its own disk perhaps. Bring their files together."
            ]
        )
    return contents


def micro_batches(contents: Sequence[Content]) -> list[MicroBatch]:
    """All processes' micro-batches of a step, as they were recorded.

    Raises:
        ConfigError: there are none.
    """
    kept = [batch for content in contents for batch in content.get("micro_batches", [])]
    if not kept:
        raise ConfigError(
            [
                f"Step {contents[0]['step']}: this dump holds the completions to which a reward gave NaN or inf; "
                "there was no batch yet. Look at its `rewards` with torch.load."
            ]
        )
    return kept


def restored(trainer: Any, contents: Sequence[Content], *, sees_silent: bool = False) -> Generation:
    """The micro-batches of a step, as the loss takes them.

    Args:
        trainer: with the model that they are for.
        contents: of the processes.
        sees_silent: whether rows without a recorded advantage have a part in the loss, though `trainer` would skip
            rows without one.

    Raises:
        ConfigError: they hold no batch, or none for this model.
    """
    device, kept = trainer.accelerator.device, micro_batches(contents)
    batches = [unpacked({n: v for n, v in batch.items() if n not in COMPUTED}, device) for batch in kept]
    _check_tokens(trainer, batches)
    for batch in batches if sees_silent or not trainer._skips else ():
        _fill_old(trainer, batch)
    totals = contents[0]["totals"]
    return Generation(batches, () if totals is None else (StepTotals(*totals.to(device)),))


def _check_tokens(trainer: Any, batches: Sequence[MicroBatch]) -> None:
    vocabulary = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.shape[0]
    largest = max(int(batch[name].max()) for batch in batches for name in ("prompt_ids", "completion_ids"))
    if largest >= vocabulary:
        raise ConfigError(
            [
                f"The batch holds token {largest}, and the model knows {vocabulary}: it is another model's. Give "
                "--model the one that was recorded."
            ]
        )
    if any("pixel_values" in batch for batch in batches):
        raise ConfigError(["The batch holds images, of which not all was recorded. Text alone can be replayed."])


def check_credit(objective: Objective, batches: Sequence[MicroBatch]) -> None:
    """Refuse recorded advantages that differ by token where the loss has one term for a whole completion.

    Raises:
        ConfigError: they do, and it has.
    """
    if any(batch["advantages"].dim() == 2 for batch in batches) and mixes_tokens(objective):
        raise ConfigError(
            [
                f"loss_type={objective.loss_type!r}: the recorded advantages differ by token, and this loss has one "
                "term for a whole completion. Replay with a loss that has a term for each token, such as grpo or gspo."
            ]
        )


def _fill_old(trainer: Any, batch: MicroBatch) -> None:
    """Old log-probabilities of rows that the recorded run left out of its forward: the model's own."""
    old = batch.get("old_per_token_logps")
    if old is None:
        return
    unknown = silent(batch["advantages"]) & ~(old * live_mask(batch)).any(dim=1)
    if unknown.any():
        with forward_only(trainer):
            logps = trainer._scores(trainer.model, batch, None)[0]
        batch["old_per_token_logps"] = torch.where(unknown[:, None], logps.to(old.dtype), old)
