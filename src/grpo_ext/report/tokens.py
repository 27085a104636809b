"""Values of single tokens, from the batches that a run has recorded, for the page's browser of completions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.packing.micro_batches import live_mask
from grpo_ext.trainer.recording import FOLDER, ranks_in, read, runs_of, steps_in, tokens_of, unpacked

KINDS = ("advantage", "ratio", "entropy")
"""By which tokens can be coloured."""
STEPS, MOST = 12, 800
"""Of which recordings are read, and tokens of a completion that are shown."""
_BROKEN = "\ufffd"

Values = dict[str, Any]
"""`text`: pieces of a completion; a list of numbers, or one for all, for each kind; `left`: tokens not shown."""


@dataclass
class Completion:
    """One of a recorded step."""

    prompt: str
    text: str
    rewards: dict[str, float | None]
    advantage: float
    values: Values


@dataclass
class Recorded:
    """The recordings of a run; each is read when it is asked for."""

    folders: dict[int, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _read: dict[int, dict[int, Completion]] = field(default_factory=dict)

    def of(self, step: int) -> dict[int, Completion]:
        """A step's completions by their row in the generation; none where nothing was recorded."""
        if step not in self.folders:
            return {}
        if step not in self._read:
            self._read[step] = {}
            for path in ranks_in(self.folders[step]):
                try:
                    self._read[step] |= _completions(read(path))
                except (ConfigError, KeyError, RuntimeError, TypeError, ValueError) as error:
                    said = error.problems[0] if isinstance(error, ConfigError) else f"{path} holds no batch ({error})."
                    self.notes.append(f"{said} Its tokens are left out.")
        return self._read[step]


def recordings(run_folder: Path, notes: list[str]) -> Recorded:
    """Of a run, at most `STEPS`, spread evenly with the first and the last."""
    folders = list(steps_in(run_folder / FOLDER).items())
    if len(folders) > STEPS:
        folders = [folders[i * (len(folders) - 1) // (STEPS - 1)] for i in range(STEPS)]
    return Recorded(dict(folders), notes)


def _completions(content: Mapping[str, Any]) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
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
            among = live[i][written[i]].tolist()
            each = {name: column[i][written[i]].tolist() for name, column in columns.items()}
            known = {
                name: [value if on else math.nan for value, on in zip(values, among, strict=True)]
                for name, values in each.items()
            }
            rewards = batch["group_rewards"][i, row % batch["group_rewards"].shape[1]].tolist()
            found[row] = Completion(
                prompt="".join(text for text, _ in _pieces(prompts[i], content["tokens"])),
                text="".join(text for text, _ in _pieces(completions[i], content["tokens"])),
                rewards={n: _number(r) for n, r in zip(content["reward_names"], rewards, strict=True)},
                advantage=next((v for v in known["advantage"] if not math.isnan(v)), 0.0),
                values=_values(_pieces(completions[i], content["tokens"]), known),
            )
    return found


def _pieces(ids: Sequence[int], texts: Mapping[str, str]) -> list[tuple[str, int]]:
    """Text of each token, or of several that make up a character, and the place of the first of them."""
    broken = {i for i in set(ids) if _BROKEN in texts[str(i)]}
    pieces, place = [], 0
    for run in runs_of(ids, broken):
        pieces.append((texts[",".join(map(str, run))], place))
        place += len(run)
    return pieces


def _values(pieces: Sequence[tuple[str, int]], known: Mapping[str, Sequence[float]]) -> Values:
    shown = pieces[:MOST]
    values: Values = {"text": [text for text, _ in shown], "left": len(pieces) - len(shown)}
    for name, column in known.items():
        numbers = [_number(column[place]) for _, place in shown]
        values[name] = numbers[0] if numbers and len(set(numbers)) == 1 else numbers
    return values


def _number(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
