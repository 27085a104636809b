"""Everything that the next step depends on beside weights, optimizer and random streams; one file for each process.

It holds the current generation and the position in it, the memory of estimators and samplers, the sums since the last
log, and a reference that follows the policy. It is restored where the same number of processes resumes with the same
number of micro-batches.
"""

import logging
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.trainer.checkpoints.processes import everywhere, is_sharded, local

logger = logging.getLogger(__name__)

_TABLE = ("prompt", "completion", "advantages")
"""Columns of TRL's table of completions; `rewards` and `extra` hold further ones, images are not kept."""


@dataclass
class Resumed:
    """The checkpoint that a run resumes from.

    Attributes:
        state: this process's part of it; None where the checkpoint was made by another split of the batch.
        step: optimizer steps before it.
        pending: whether `state` is still to be restored.
        epoch_over: whether the checkpoint was written at the end of an epoch.
    """

    checkpoint: Path
    state: dict[str, Any] | None
    step: int
    pending: bool = True
    epoch_over: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Epoch, and batches of the dataloader that it has taken."""
        epoch, batches = self.state["place"] if self.state else (0, 0)
        return epoch, batches

    @property
    def unknown(self) -> int:
        """Number of steps whose loss is not known."""
        return self.step if self.state is None else 0


@cache
def accept_numbered_cpu() -> None:
    """Let a checkpoint be loaded to `cpu:0`, which transformers before 5.23 does with several CPU processes."""
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, location: storage if re.fullmatch(r"cpu:\d+", location) else None
    )


def _file(folder: Path, rank: int) -> Path:
    return folder / f"run_state_{rank}.pt"


def write(folder: Path, rank: int, state: Mapping[str, Any]) -> None:
    """Write a process's state between two optimizer steps into a checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)  # a process may come here before the one that saves the model
    torch.save(dict(state), _file(folder, rank))


def read(folder: Path, rank: int, device: torch.device, split: list[int]) -> dict[str, Any] | None:
    """Return this process's state; None, with a warning, if the checkpoint was made by another split; collective."""
    path = _file(folder, rank)
    state = torch.load(path, map_location=device, weights_only=True) if path.exists() else {}
    same_split = everywhere(state.get("split") == split)
    if all(same_split):
        return state
    if rank == 0 and any(same_split):
        missing = ", ".join(str(rank) for rank, has in enumerate(same_split) if not has)
        logger.warning(
            f"{folder} has no state of ranks {missing} where they run now: the machines have come back in another "
            "order. Random streams and, inside of a generation, completions are new ones from here on; weights, "
            "optimizer and data continue where they were."
        )
    elif rank == 0:
        logger.warning(
            f"{folder} was made by another number of processes or micro-batches: random streams and, inside of a "
            "generation, completions are new ones from here on; weights, optimizer and data continue where they were."
        )
    return None


def table_of(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of TRL's table of completions."""
    columns: dict[str, Any] = {name: list(logs[name]) for name in _TABLE}
    for kind in ("rewards", "extra"):
        columns[kind] = {name: list(values) for name, values in logs[kind].items()}
    return columns


def fill_table(logs: dict[str, Any], table: Mapping[str, Any]) -> None:
    """Make the table hold these columns."""
    for name, column in table.items():
        into: dict[str, deque] | defaultdict[str, deque] = logs if name in _TABLE else logs[name]
        for key in [name] if name in _TABLE else list(into):
            into[key].clear()
        for key, values in ({name: column} if name in _TABLE else column).items():
            into[key].extend(values)


# Parts of a checkpoint that transformers does not restore.


def stateful(callbacks: Sequence[TrainerCallback]) -> list[TrainerCallback]:
    """Return the callbacks whose attributes a checkpoint holds, such as EarlyStoppingCallback."""
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def restore_callbacks(state: TrainerState, callbacks: Sequence[TrainerCallback]) -> None:
    """Restore the attributes of stateful callbacks."""
    saved: Any = state.stateful_callbacks or {}
    restorable = stateful(callbacks)
    for name in {type(callback).__name__ for callback in restorable} & saved.keys():
        alike = [callback for callback in restorable if type(callback).__name__ == name]
        entries = saved[name] if isinstance(saved[name], list) else [saved[name]]
        for callback, entry in zip(alike, entries[-len(alike) :], strict=False):
            vars(callback).update(entry.get("attributes", {}))


def find_best_checkpoint(state: TrainerState, checkpoint: Path) -> None:
    """Set the best checkpoint to the one beside `checkpoint`, if there is one: the run may be a copy of another."""
    beside = checkpoint.parent / f"checkpoint-{state.best_global_step}"
    if state.best_global_step and beside.is_dir():
        state.best_model_checkpoint = str(beside)


def evaluation_due(args: GRPOExtConfig, state: TrainerState, *, epoch_over: bool) -> bool:
    """Return whether the last step should have been followed by an evaluation that the log does not have."""
    step, last = state.global_step, state.global_step >= state.max_steps  # the last step also ends its epoch
    by_steps = args.eval_strategy == "steps" and (last or step % state.eval_steps == 0)
    by_epoch = args.eval_strategy == "epoch" and (last or epoch_over)
    if args.eval_delay > (step if by_steps else state.epoch or 0) or not (by_steps or by_epoch):
        return False
    return not any(row["step"] == step and any(name.startswith("eval_") for name in row) for row in state.log_history)


def load_default_adapter(model: nn.Module, checkpoint: Path) -> None:
    """Load the adapter `default`, which transformers does not load from a folder with several adapters."""
    if not isinstance(model, PeftModel) or "default" not in model.peft_config or len(model.peft_config) < 2:
        return
    names = ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME
    if any((checkpoint / name).is_file() for name in names):
        active = model.active_adapter
        model.load_adapter(str(checkpoint), "default", is_trainable=active == "default")
        model.set_adapter(active)


def load_renamed(model: PreTrainedModel, folder: Path, missing: Sequence[str]) -> None:
    """Load the weights `missing`, which `save_pretrained` wrote under other names, as `from_pretrained` reads them.

    Raises:
        ConfigError: the folder lacks a weight of the model, or has another one.
    """
    widest = max((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    reading: dict[str, Any] = {"dtype": widest, "ignore_mismatched_sizes": True, "output_loading_info": True}
    kind: Any = type(model)
    saved, loading_info = kind.from_pretrained(folder, config=model.config, **reading)
    problems = []
    for word in ("missing", "unexpected", "mismatched"):
        if names := sorted(key if isinstance(key, str) else key[0] for key in loading_info[f"{word}_keys"]):
            reason = f"it has {len(names)} {word} weights: {', '.join(names[:3])}{', ...' if names[3:] else ''}"
            cure = f"Resume a run of {kind.__name__} from one of its own checkpoints."
            problems.append(Problem("resume_from_checkpoint", str(folder), reason, cure))
    if problems:
        raise ConfigError(problems)
    weights, own = saved.state_dict(), model.state_dict()
    with torch.no_grad():
        for name in missing:
            own[name].copy_(weights[name])


# A reference that follows the policy (`sync_ref_model`).


def _reference_file(folder: Path, rank: int, parameters: Mapping[str, Any]) -> Path:
    return folder / (f"reference_{rank}.pt" if any(map(is_sharded, parameters.values())) else "reference.pt")


def write_reference(folder: Path, rank: int, parameters: Mapping[str, Any], *, saves: bool) -> None:
    """Write parameters; where none is split, the process that `saves` does."""
    path = _reference_file(folder, rank, parameters)
    if parameters and (saves or path.name != "reference.pt"):
        torch.save({name: local(parameter) for name, parameter in parameters.items()}, path)


def read_reference(folder: Path, rank: int, parameters: Mapping[str, Any]) -> None:
    """Set parameters to what `write_reference` wrote."""
    if not parameters:
        return
    saved = torch.load(_reference_file(folder, rank, parameters), map_location="cpu", weights_only=True)
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter).copy_(saved[name])
