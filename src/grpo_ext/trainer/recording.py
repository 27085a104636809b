"""Record the batches of a run as the loss saw them: one file for each step and process, every N steps or at a NaN."""

import logging
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from grpo_ext import __version__
from grpo_ext.bounded import replacing
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.images import IMAGES
from grpo_ext.packing.kept import KEPT
from grpo_ext.trainer.checkpoints.identity import plain, settings
from grpo_ext.trainer.checkpoints.manifest import sync
from grpo_ext.trainer.findings import ObservedBatch

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "batches"
"""Folder in output_dir, with a folder for each step."""
RESERVE = 2**30
"""Bytes of the disk that recordings leave free for checkpoints."""
_STEP = re.compile(r"step_(\d+)")
_RANK = re.compile(r"rank_(\d+)\.pt")
_KINDS = {"rank": int, "processes": int, "settings": dict, "objective": dict, "reward_weights": list}
_BROKEN = "\ufffd"

Kept = dict[str, Any]
"""A micro-batch on the disk: its tensors, whole numbers narrowed, and their `dtypes`."""
Content = dict[str, Any]
"""A file."""


class Recorded(Protocol):
    """A trainer whose batches are recorded."""

    accelerator: Accelerator
    args: GRPOExtConfig
    model: Any
    objective: Objective
    reward_func_names: list[str]
    reward_weights: Tensor
    state: TrainerState
    _generation: Any
    _tokenizer: PreTrainedTokenizerBase


# From a trainer.


def due(trainer: Recorded) -> bool:
    """Return whether the batch of the current step is recorded: the first, and every Nth after it.

    So the weights that a batch belongs to are those of checkpoint N, 2N, ...
    """
    every = trainer.args.record_batches
    return bool(every) and trainer.state.global_step % every == 0


def taken(trainer: Recorded, window: Sequence[ObservedBatch]) -> Content:
    """Return this process's part of the current step."""
    inputs = [dict(watched.inputs) for watched in window]
    totals = trainer._generation.totals_of(window[0].inputs) if window else None
    kept = [packed({**batch, **watched.computed}) for batch, watched in zip(inputs, window, strict=True)]
    return {
        **origin(trainer),
        "totals": None if totals is None else torch.stack(list(totals)).cpu(),
        "micro_batches": kept,
        "tokens": texts(trainer._tokenizer, inputs),
    }


def origin(trainer: Recorded) -> Content:
    """Return what a batch belongs to: step and weights, settings, rewards."""
    config = getattr(trainer.model, "config", None)
    return {
        "format": FORMAT,
        "grpo_ext": __version__,
        "step": trainer.state.global_step + 1,
        "rank": trainer.accelerator.process_index,
        "processes": trainer.accelerator.num_processes,
        "settings": settings(trainer.args),
        "objective": plain(trainer.objective.to_dict()),
        "model": getattr(config, "_name_or_path", None) or None,
        "adapter": is_peft_model(trainer.model),
        "reward_names": list(trainer.reward_func_names),
        "reward_weights": trainer.reward_weights.tolist(),
    }


def packed(tensors: Mapping[str, object]) -> Kept:
    """Return a micro-batch on the CPU, its whole numbers narrowed; `dtypes` holds the original types."""
    kept: Kept = {"dtypes": {}}
    for name, values in tensors.items():
        if name == KEPT and isinstance(values, list):
            kept[name] = [of_row.cpu() for of_row in values]
        if name == IMAGES:  # those of a prompt are one object for all its rows, on the disk too
            kept[name] = values
        if not isinstance(values, Tensor):
            continue
        kept["dtypes"][name] = str(values.dtype).removeprefix("torch.")
        values = values.detach().cpu()
        if not values.is_floating_point() and values.numel():
            least, most = values.min().item(), values.max().item()
            narrow = torch.bool if least >= 0 and most <= 1 else torch.int32
            values = values.to(narrow if most < 2**31 and least >= -(2**31) else values.dtype)
        kept[name] = values.clone()
    return kept


def unpacked(kept: Mapping[str, Any], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the tensors of a micro-batch with their original types, its kept sets and its images."""
    return {
        name: values if name in (KEPT, IMAGES) else values.to(device, getattr(torch, kept["dtypes"][name]))
        for name, values in kept.items()
        if name != "dtypes"
    }


def texts(tokenizer: PreTrainedTokenizerBase, inputs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the text of each token by its id, and of runs of tokens that are parts of characters.

    A token is decoded after itself, since a text may lose a space at its beginning.
    """
    rows = [row for batch in inputs for part in ("prompt", "completion") for row in tokens_of(batch, part)]
    known = sorted({i for row in rows for i in row})

    def decoded(ids: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False) if ids else []

    once, twice = decoded([[i] for i in known]), decoded([[i, i] for i in known])
    found = {str(i): two[len(one) :] for i, one, two in zip(known, once, twice, strict=True)}
    broken = {i for i in known if _BROKEN in found[str(i)]}
    runs = [[*run] for run in sorted({run for row in rows for run in runs_of(row, broken) if len(run) > 1})]
    return found | dict(zip((",".join(map(str, run)) for run in runs), decoded(runs), strict=True))


def tokens_of(batch: Mapping[str, Any], part: str) -> list[list[int]]:
    """Return the ids of each row's `part` ('prompt', 'completion'), without padding."""
    pairs = zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def runs_of(ids: Sequence[int], broken: set[int]) -> list[tuple[int, ...]]:
    """Split `ids` into single tokens, keeping neighbouring parts of characters together."""
    found: list[list[int]] = []
    for i in ids:
        if found and i in broken and found[-1][-1] in broken:
            found[-1].append(i)
        else:
            found.append([i])
    return [tuple(run) for run in found]


# On disk.


def file_of(root: Path, step: int, rank: int) -> Path:
    """Return the path of a process's part of a step under `root`."""
    return root / f"step_{step}" / f"rank_{rank}.pt"


def write(path: Path, content: Content) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: the disk refuses.
        RuntimeError: the same, raised by torch.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        torch.save(content, aside)
        sync(aside)


class Recorder:
    """Writes batches while a run trains; a full disk costs the recordings, not the run."""

    def __init__(self, trainer: Recorded) -> None:
        self.trainer, self.stopped = trainer, False

    def keep(self, window: Iterable[ObservedBatch], grad_norm: Tensor) -> None:
        """Write this process's part of the step, if it is due."""
        if self.stopped or not due(self.trainer):
            return
        root, window = Path(self.trainer.args.output_dir or ".") / FOLDER, list(window)
        try:
            content = {**taken(self.trainer, window), "grad_norm": grad_norm.item()}
            root.mkdir(parents=True, exist_ok=True)
            needed, free = size(content), shutil.disk_usage(root).free
            if free < needed + RESERVE:
                raise OSError(f"it needs {needed / 1e6:,.0f} MB, the disk has {free / 1e6:,.0f} MB free")
            write(file_of(root, content["step"], content["rank"]), content)
        except Exception as error:
            self.stopped = True
            logger.warning(f"{root}: this batch could not be recorded ({error}). The run continues without recording.")


def size(content: Content) -> int:
    """Return the bytes of the tensors of a recording."""
    every = [values for batch in content["micro_batches"] for values in batch.values()]
    listed = [value for values in every for value in (values if isinstance(values, list) else [values])]
    found = [tensor for value in listed for tensor in (value.values() if isinstance(value, dict) else [value])]
    tensors = {id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def read(path: Path) -> Content:
    """Read a recording.

    Raises:
        ConfigError: it is missing, damaged, of another format, or something else.
    """
    again, folder = "Name another one, or record again (record_batches).", f"{FOLDER}/ or failures/"
    try:
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:
                raise refusal(path, f"the recording is damaged: {bad} in it is not what was written", again)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise refusal(path, "no such file", f"Name a step's folder in a run's {folder}.") from None
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refusal(path, f"the file is damaged, or not a recorded batch ({reason})", again) from error
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise refusal(path, "this is not a recorded batch", f"Name a step's folder in a run's {folder}.")
    if content.get("format") != FORMAT:
        reason = f"it has format {content.get('format')!r}, and grpo-ext {__version__} reads {FORMAT}"
        raise refusal(
            path, reason, f"Read it with the version that wrote it ({content.get('grpo_ext', 'before 0.2')})."
        )
    if wrong := [name for name, kind in _KINDS.items() if not isinstance(content.get(name), kind)]:
        raise refusal(path, f"its {wrong[0]} is missing or of the wrong type", again)
    return content


def steps_in(root: Path) -> dict[int, Path]:
    """Return the folders of recorded steps under `root`, by step."""
    found = {int(m[1]): path for path in root.glob("step_*") if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def ranks_in(folder: Path) -> list[Path]:
    """Return the files of a step, by rank."""
    found = {int(m[1]): path for path in folder.glob("rank_*.pt") if (m := _RANK.fullmatch(path.name))}
    return [path for _, path in sorted(found.items())]


def refusal(place: object, reason: str, cure: str) -> ConfigError:
    """Return an error about a recording."""
    return ConfigError([Problem(str(place), ABSENT, reason, cure)])


# Columns of a generation that a recording needs.


def with_rewards(output: Mapping[str, Any], rewards: Tensor, rank: int) -> dict[str, Tensor]:
    """Return columns that follow a completion through shuffling: its group's rewards and its row.

    Args:
        output: the generation of this process.
        rewards: rewards of all processes, [groups, completions, functions].
        rank: index of this process.
    """
    local = len(output["completion_ids"])
    row = torch.arange(rank * local, (rank + 1) * local, device=rewards.device)
    return {"group_rewards": rewards[row // rewards.shape[1]], "generation_row": row}
