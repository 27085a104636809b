"""Values of single tokens, from the recorded batches of a run, for the browser of completions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpo_ext.errors import ConfigError
from grpo_ext.packing.micro_batches import live_mask
from grpo_ext.trainer.recording import FOLDER, ranks_in, read, runs_of, steps_in, tokens_of, unpacked

TOKEN_VALUES = ("advantage", "ratio", "entropy")
"""Values by which tokens can be coloured."""
STEPS, TOKENS = 12, 800
"""Largest number of recordings that are read, and of tokens per completion."""
_BROKEN = "\ufffd"
T = TypeVar("T")

Values = dict[str, Any]
"""`text`: pieces of a completion; for each kind a list of numbers or one number; `left`: number of tokens left out."""


@dataclass
class RecordedCompletion:
    """A completion of a recorded step."""

    prompt: str
    text: str
    rewards: dict[str, float | None]
    advantage: float
    values: Values


@dataclass
class RunRecordings:
    """The recordings of a run, each read on first use."""

    folders: dict[int, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _read: dict[int, dict[int, RecordedCompletion]] = field(default_factory=dict)

    def of(self, step: int) -> dict[int, RecordedCompletion]:
        """Return a step's completions by their row in the generation; empty for a step without a recording."""
        if step in self.folders and step not in self._read:
            self._read[step] = {}
            for path in ranks_in(self.folders[step]):
                try:
                    self._read[step] |= _completions(read(path))
                except (ConfigError, KeyError, RuntimeError, TypeError, ValueError) as error:
                    broken = error.problems[0] if isinstance(error, ConfigError) else f"{path}: no batch ({error})."
                    self.notes.append(f"{broken} Its tokens are left out.")
        return self._read.get(step, {})


def recordings(run_folder: Path, notes: list[str]) -> RunRecordings:
    """Return at most `STEPS` recordings of a run, evenly spaced, including the first and the last."""
    return RunRecordings(dict(evenly(list(steps_in(run_folder / FOLDER).items()), STEPS)), notes)


def evenly(things: Sequence[T], most: int) -> list[T]:
    """Return at most `most` things, evenly spaced, including the first and the last."""
    if len(things) <= most:
        return list(things)
    return [things[i * (len(things) - 1) // (most - 1)] for i in range(most)]


def _completions(content: Mapping[str, Any]) -> dict[int, RecordedCompletion]:
    found: dict[int, RecordedCompletion] = {}
    for kept in content["micro_batches"]:
        batch = unpacked(kept)
        logps = batch["per_token_logps"].float()
        columns = {
            "advantage": batch["advantages"].float().reshape(len(logps), -1).expand(logps.shape),
            "ratio": (logps - batch.get("old_per_token_logps", logps).float()).exp(),
            "entropy": batch["entropies"].float(),
        }
        live, written = live_mask(batch).bool(), batch["completion_mask"].bool()
        prompts, completions = tokens_of(kept, "prompt"), tokens_of(kept, "completion")
        for i, row in enumerate(batch["generation_row"].tolist()):
            masked = {name: column[i].masked_fill(~live[i], math.nan) for name, column in columns.items()}
            known = {name: values[written[i]].tolist() for name, values in masked.items()}
            rewards = batch["group_rewards"][i, row % batch["group_rewards"].shape[1]].tolist()
            pieces = _pieces(completions[i], content["tokens"])
            found[row] = RecordedCompletion(
                prompt="".join(text for text, _ in _pieces(prompts[i], content["tokens"])),
                text="".join(text for text, _ in pieces),
                rewards={n: _number(r) for n, r in zip(content["reward_names"], rewards, strict=True)},
                advantage=next((v for v in known["advantage"] if not math.isnan(v)), 0.0),
                values=_values(pieces, known),
            )
    return found


def _pieces(ids: Sequence[int], texts: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the text of each token, or of several that form one character, with the index of the first."""
    broken = {i for i in set(ids) if _BROKEN in texts[str(i)]}
    pieces, place = [], 0
    for run in runs_of(ids, broken):
        pieces.append((texts[",".join(map(str, run))], place))
        place += len(run)
    return pieces


def _values(pieces: Sequence[tuple[str, int]], known: Mapping[str, Sequence[float]]) -> Values:
    shown = pieces[:TOKENS]
    values: Values = {"text": [text for text, _ in shown], "left": len(pieces) - len(shown)}
    for name, column in known.items():
        numbers = [_number(column[place]) for _, place in shown]
        values[name] = numbers[0] if numbers and len(set(numbers)) == 1 else numbers
    return values


def _number(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
