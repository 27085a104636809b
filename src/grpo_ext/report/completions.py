"""A sample of the runs' completions for the browser of the page: whole groups, from evenly spaced steps."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
from pyarrow import parquet

from grpo_ext.data.rows import Row
from grpo_ext.objective.trajectory import BRANCHES
from grpo_ext.report.reading import COMPLETIONS, RunFolder
from grpo_ext.rewards.text import conversation_text, message_text
from grpo_ext.safe_reading import finite
from grpo_ext.terminal import clipped, printable

STEPS, ROWS = 40, 1200
"""Largest number of steps per run, and of completions of all runs."""
CLIPS = (6000, 2000, 700, 250)
"""Largest lengths of a text; the first is used with which all completions fit."""
_EXTRAS = 12
_OWN = ("step", "prompt", "completion", "advantage", "reward", "total", BRANCHES)

T = TypeVar("T")
_Weights = Mapping[str, float | None]


def browsed(runs: Sequence[RunFolder], room: int) -> dict[str, Any]:
    """Return the data of the browser, whose JSON has at most `room` characters, with the number of all completions."""
    rows, total, steps = [], 0, 0
    for place, run in enumerate(runs):
        sampled, count, files = _sampled(run, ROWS // len(runs))
        rows += [{"run": place, **row} for row in sampled]
        total, steps = total + count, steps + files
    names = list(dict.fromkeys(name for row in rows for name in row["parts"]))
    shown: dict[str, Any] = {}
    for clip in CLIPS:
        shown = _table(rows, clip)
        if len(embedded(shown)) <= room:
            break
    while rows and len(embedded(shown)) > room:
        rows = rows[::2]
        shown = _table(rows, CLIPS[-1])
    return {**shown, "parts": names, "runs": [printable(run.name) for run in runs], "total": total, "steps": steps}


def embedded(content: object) -> str:
    """Return JSON that is safe inside a script element of a page."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _table(rows: Sequence[Row], clip: int) -> dict[str, Any]:
    """Return prompts, each once, and rows with the index of their prompt."""
    prompts: dict[str, int] = {}
    table_rows = []
    for row in rows:
        prompt, completion = clipped(row["prompt"][0], clip, row["prompt"][1]), row["completion"]
        shown = {"prompt": prompts.setdefault(prompt, len(prompts)), "length": completion[1]}
        table_rows.append({**row, **shown, "completion": clipped(completion[0], clip, completion[1])})
    return {"prompts": list(prompts), "rows": table_rows}


def _sampled(run: RunFolder, most: int) -> tuple[list[Row], int, int]:
    """Return rows, the number of all rows, and the number of all steps."""
    counts: dict[Path, int] = {}
    folder = run.folder / COMPLETIONS
    for path in sorted(folder.glob("*.parquet")):
        try:
            counts[path] = parquet.read_metadata(path).num_rows
        except (pyarrow.ArrowException, OSError):
            run.notes.append(f"{COMPLETIONS}/{path.name} is not a complete parquet file; it was left out.")
    chosen = evenly(list(counts), STEPS)
    rows: list[Row] = []
    for path in chosen:
        try:
            rows += _rows(path, max(1, most // len(chosen)), run)
        except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
            run.notes.append(f"{COMPLETIONS}/{path.name}: its rows cannot be read ({error}); it was left out.")
    return sorted(rows, key=lambda row: row["step"]), sum(counts.values()), len(counts)


def evenly(things: Sequence[T], most: int) -> list[T]:
    """Return at most `most` things, evenly spaced, including the first and the last."""
    if len(things) <= most:
        return list(things)
    return [things[i * (len(things) - 1) // (most - 1)] for i in range(most)]


def _step_of(path: Path) -> int:
    return int(re.sub(r"\D", "", path.stem)[:15] or 0)


def _rows(path: Path, most: int, run: RunFolder) -> list[Row]:
    file = parquet.read_table(path)
    if missing := [name for name in ("prompt", "completion") if name not in file.column_names]:
        run.notes.append(f"{COMPLETIONS}/{path.name}: no column {' nor '.join(missing)}; it was left out.")
        return []
    indices = _whole_groups([as_text(prompt) for prompt in file["prompt"].to_pylist()], most, path.name)
    parts = _reward_columns(file, run)
    return [_from_table(row, parts, path, run.rewards) for row in file.take(indices).to_pylist()]


def _whole_groups(prompts: Sequence[str], most: int, seed: str) -> list[int]:
    """Return the rows of randomly chosen groups; consecutive rows with one prompt are a group."""
    groups = [[i for i, _ in pairs] for _, pairs in groupby(enumerate(prompts), key=lambda pair: pair[1])]
    random.Random(seed).shuffle(groups)
    chosen: list[int] = []
    for group in groups:
        if not chosen or len(chosen) + len(group) <= most:
            chosen += group[:most]
    return sorted(chosen)


def _reward_columns(file: pyarrow.Table, run: RunFolder) -> dict[str, str]:
    """Return the column of each reward, as TRL or `score` and `sample` name it; else all columns of floats."""
    columns = {
        name: column for name in run.rewards for column in (name, f"rewards/{name}") if column in file.column_names
    }
    columns |= {name[len("rewards/") :]: name for name in file.column_names if name.startswith("rewards/")}
    if columns:
        return columns
    return {f.name: f.name for f in file.schema if pyarrow.types.is_floating(f.type) and f.name not in _OWN}


def _from_table(row: Mapping[str, Any], parts: Mapping[str, str], path: Path, weights: _Weights) -> Row:
    """Return what is shown of a completion; its reward is the weighted sum of the known scores."""
    scores = {name: _rounded(row[column]) for name, column in parts.items()}
    scored = {name: score for name, score in scores.items() if score is not None}
    total = sum(score * (1.0 if (w := weights.get(name)) is None else w) for name, score in scored.items())
    extras = {k: v for k, v in row.items() if k not in (*_OWN, *parts.values()) and v is not None}
    step = _rounded(row.get("step"))
    return {
        "step": int(step if step is not None else _step_of(path)),
        "prompt": _kept(row["prompt"]),
        "completion": _kept("\n\n".join(filter(None, map(as_text, (row["completion"], row.get(BRANCHES)))))),
        "parts": {printable(name): score for name, score in scores.items()},
        "reward": _rounded(total) if scored else None,
        "advantage": _rounded(row.get("advantage")),
        "extras": {clipped(k, 80): clipped(as_text(v), 300) for k, v in list(extras.items())[:_EXTRAS]},
    }


def _kept(value: object) -> tuple[str, int]:
    """Return as much of a text as may be shown, and its length; a run may have gigabytes."""
    text, most = as_text(value), CLIPS[0]
    return (text if len(text) <= 2 * most else text[:most] + text[-most:]), len(text)


def _rounded(value: object) -> float | None:
    return None if (number := finite(value)) is None else round(number, 6)


def as_text(value: object) -> str:
    """Return a text unchanged; several messages with their roles, a single one without."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "role" in part for part in value):
        return message_text(value[0]) if len(value) == 1 else conversation_text(value)
    return "" if value is None else json.dumps(value, default=str, ensure_ascii=False)
