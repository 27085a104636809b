"""Batches as the loss saw them, one file for each step and process: every N steps, or where NaN was found.

What is written is enough to compute the step's loss and gradient again, by `grpo-ext replay` or in a run that trains
on recordings (`replay_batches`).
"""

import logging
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from grpo_ext import __version__
from grpo_ext.errors import ConfigError
from grpo_ext.trainer.checkpoints.identity import plain, settings
from grpo_ext.trainer.checkpoints.manifest import sync
from grpo_ext.trainer.findings import ObservedBatch

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "batches"
"""In output_dir; one folder for each step in it."""
RESERVE = 2**30
"""Bytes of the disk that recordings leave free: checkpoints need them."""
_STEP = re.compile(r"step_(\d+)")
_RANK = re.compile(r"rank_(\d+)\.pt")
_BROKEN = "\ufffd"

MicroBatch = dict[str, Any]
Content = dict[str, Any]


# Taken from a trainer.


def due(trainer: Any) -> bool:
    """Whether the batch of the step that is being computed is to be kept: the first, and every Nth after it.

    So the weights that a batch belongs to are those of checkpoint N, 2N, ...
    """
    every = trainer.args.record_batches
    return bool(every) and trainer.state.global_step % every == 0


def taken(trainer: Any, window: Sequence[ObservedBatch]) -> Content:
    """This process's part of the step that is being computed."""
    inputs = [dict(watched.inputs) for watched in window]
    totals = trainer._generation.totals_of(window[0].inputs) if window else None
    kept = [packed({**batch, **watched.computed}) for batch, watched in zip(inputs, window, strict=True)]
    return {
        **origin(trainer),
        "totals": None if totals is None else torch.stack(list(totals)).cpu(),
        "micro_batches": kept,
        "tokens": texts(trainer._tokenizer, inputs),
    }


def origin(trainer: Any) -> Content:
    """What a batch belongs to: step and weights, settings, rewards."""
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


def packed(tensors: Mapping[str, Any]) -> MicroBatch:
    """A micro-batch on the CPU, its whole numbers in as few bytes as hold them; `dtypes` says what they were."""
    kept: MicroBatch = {"dtypes": {}}
    for name, values in tensors.items():
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


def unpacked(kept: Mapping[str, Any], device: Any = "cpu") -> MicroBatch:
    """A micro-batch as it was."""
    return {
        name: values.to(device, getattr(torch, kept["dtypes"][name]))
        for name, values in kept.items()
        if name != "dtypes"
    }


def texts(tokenizer: Any, inputs: Sequence[MicroBatch]) -> dict[str, str]:
    """The text of each token by its id, and of tokens that are no text by themselves together.

    A token is decoded behind itself, since at its beginning a text may lose a space.
    """
    rows = [row for batch in inputs for part in ("prompt", "completion") for row in tokens_of(batch, part)]
    known = sorted({i for row in rows for i in row})

    def decoded(ids: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False) if ids else []

    once, twice = decoded([[i] for i in known]), decoded([[i, i] for i in known])
    found = {str(i): two[len(one) :] for i, one, two in zip(known, once, twice, strict=True)}
    broken = {i for i in known if _BROKEN in found[str(i)]}
    runs = sorted({run for row in rows for run in runs_of(row, broken) if len(run) > 1})
    return found | dict(zip((",".join(map(str, run)) for run in runs), decoded(runs), strict=True))


def tokens_of(batch: Mapping[str, Any], part: str) -> list[list[int]]:
    """The ids of each row's `part` ('prompt', 'completion'), without padding."""
    pairs = zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def runs_of(ids: Sequence[int], broken: set[int]) -> list[tuple[int, ...]]:
    """`ids` one by one, but tokens that are parts of characters together with those beside them."""
    found: list[list[int]] = []
    for i in ids:
        if found and i in broken and found[-1][-1] in broken:
            found[-1].append(i)
        else:
            found.append([i])
    return [tuple(run) for run in found]


# On the disk.


def file_of(root: Path, step: int, rank: int) -> Path:
    """Where a process's part of a step lies under `root`."""
    return root / f"step_{step}" / f"rank_{rank}.pt"


def write(path: Path, content: Content) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: the disk refuses.
        RuntimeError: torch's word for the same.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    try:
        torch.save(content, aside)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


class Recorder:
    """Writes batches while a run trains; a disk that is full costs the recordings, not the run."""

    def __init__(self, trainer: Any) -> None:
        """For a trainer with `record_batches` in its arguments."""
        self.trainer, self.stopped = trainer, False

    def keep(self, window: Iterable[ObservedBatch], grad_norm: Tensor) -> None:
        """Write this process's part of the step, if it is due."""
        if self.stopped or not due(self.trainer):
            return
        root, window = Path(self.trainer.args.output_dir or ".") / FOLDER, list(window)
        try:
            if any("pixel_values" in watched.inputs for watched in window):
                raise RuntimeError("it holds images, and text alone is recorded")
            content = {**taken(self.trainer, window), "grad_norm": grad_norm.item()}
            root.mkdir(parents=True, exist_ok=True)
            needed, free = size(content), shutil.disk_usage(root).free
            if free < needed + RESERVE:
                raise OSError(f"it needs {needed / 1e6:,.0f} MB, the disk has {free / 1e6:,.0f} MB free")
            write(file_of(root, content["step"], content["rank"]), content)
        except Exception as error:
            self.stopped = True
            logger.warning(f"{root}: this batch could not be recorded ({error}). The run goes on and records no more.")


def size(content: Content) -> int:
    """Bytes of the tensors of a recording."""
    tensors = (values for batch in content["micro_batches"] for values in batch.values() if isinstance(values, Tensor))
    return sum(values.nbytes for values in tensors)


def read(path: Path) -> Content:
    """A recording.

    Raises:
        ConfigError: it is not there, damaged, of another format, or something else.
    """
    again = "Name another one, or record it anew (record_batches)."
    try:
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:
                raise ConfigError([f"{path} is damaged: {bad} in it is not what was written. {again}"])
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file. Name a step's folder in a run's {FOLDER}/ or failures/."]) from None
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([f"{path} is damaged, or no recorded batch ({reason}). {again}"]) from error
    if not isinstance(content, dict) or "step" not in content:
        raise ConfigError([f"{path} is no recorded batch. Name a step's folder in a run's {FOLDER}/ or failures/."])
    if content.get("format") != FORMAT:
        raise ConfigError(
            [
                f"{path} has format {content.get('format')!r}, and this version of grpo-ext ({__version__}) reads "
                f"{FORMAT}. Read it with the version that wrote it ({content.get('grpo_ext', 'before 0.2')})."
            ]
        )
    return content


def steps_in(root: Path) -> dict[int, Path]:
    """The folders of recorded steps under `root`, by step."""
    found = {int(m[1]): path for path in root.glob("step_*") if (m := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items()))


def ranks_in(folder: Path) -> list[Path]:
    """The files of a step, by rank."""
    found = {int(m[1]): path for path in folder.glob("rank_*.pt") if (m := _RANK.fullmatch(path.name))}
    return [path for _, path in sorted(found.items())]


# What both a reader and a trainer ask of a recording.


def with_rewards(output: dict[str, Any], rewards: Tensor, rank: int) -> dict[str, Tensor]:
    """What makes a completion's advantage, to go with it through shuffling: its group's rewards, its row.

    Args:
        output: the generation of this process.
        rewards: of all processes, [groups, completions, functions].
        rank: of this process.
    """
    local = len(output["completion_ids"])
    row = torch.arange(rank * local, (rank + 1) * local, device=rewards.device)
    return {"group_rewards": rewards[row // rewards.shape[1]], "generation_row": row}
