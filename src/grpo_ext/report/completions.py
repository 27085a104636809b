"""Some of a run's completions, whole groups of steps that are spread evenly, as the page's browser reads them."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from grpo_ext.report.reading import COMPLETIONS, RunFolder
from grpo_ext.report.tokens import KINDS, Completion, Recorded, recordings

STEPS, ROWS = 40, 1200
"""Of which completions are shown, and how many, in all runs together."""
CLIPS = (6000, 2000, 700, 250)
"""Characters of a text: the most with which all fit in."""
EXTRAS = 12
_OWN = ("step", "prompt", "completion", "advantage", "reward", "total")

Row = dict[str, Any]


def browsed(runs: Sequence[RunFolder], room: int) -> dict[str, Any]:
    """What the page's browser shows, with how many there are in all; its JSON has at most `room` characters."""
    rows, total, steps = [], 0, 0
    for place, run in enumerate(runs):
        mine, count, files = _sampled(run, ROWS // len(runs))
        rows += [{"run": place, **row} for row in mine]
        total, steps = total + count, steps + files
    names = list(dict.fromkeys(name for row in rows for name in row["parts"]))
    shown: dict[str, Any] = {}
    for_tokens = min(room // 2, sum(len(embedded(row["tokens"])) for row in rows if "tokens" in row))
    for clip in CLIPS:
        shown = _table(rows, clip)
        if len(embedded(shown)) <= room - for_tokens:
            break
    while rows and len(embedded(shown)) > room - for_tokens:
        rows = rows[::2]
        shown = _table(rows, CLIPS[-1])
    shown["kinds"] = _with_tokens(shown["rows"], rows, for_tokens)
    return {**shown, "parts": names, "runs": [printable(run.name) for run in runs], "total": total, "steps": steps}


def _with_tokens(shown: Sequence[Row], rows: Sequence[Row], room: int) -> list[str]:
    """Give shown rows the values of their tokens, evenly, as far as there is room; what they can be coloured by."""
    known = [(into, row["tokens"]) for into, row in zip(shown, rows, strict=True) if "tokens" in row]
    needed = sum(len(embedded(tokens)) for _, tokens in known)
    every = max(1, -(-needed // max(1, room)))
    for into, tokens in known[::every]:
        values = {**tokens, "text": [printable(text) for text in tokens["text"]]}
        if (size := len(embedded(values))) <= room:
            into["tokens"] = values
            room -= size
    return list(KINDS) if any("tokens" in row for row in shown) else []


def embedded(content: Any) -> str:
    """JSON that can stand inside of a page's script element, whatever is in it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def printable(text: str) -> str:
    """`text` with its control characters and lone surrogates made visible, so that any page can hold it."""
    return _INVISIBLE.sub(_visible, text)


_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")


def _visible(match: re.Match[str]) -> str:
    """A control picture, or the code point in brackets: of what turns writing round there is no picture."""
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"\u27e8U+{code:04X}\u27e9"


def clipped(text: str, most: int, length: int = 0) -> str:
    """Beginning and end of a text, and how much of it that is; `length` is that of a text whose middle is gone."""
    length = length or len(text)
    if length <= most:
        return printable(text)
    end = most // 4
    said = f"\n\u2026 [{length - most:,} of {length:,} characters left out] \u2026\n"
    return printable(text[: most - end]) + said + printable(text[-end:])


def _table(rows: Sequence[Row], clip: int) -> dict[str, Any]:
    """Rows whose prompts are numbers of a list of their own: a group has one."""
    prompts: dict[str, int] = {}
    found = []
    for row in rows:
        prompt, completion = clipped(row["prompt"][0], clip, row["prompt"][1]), row["completion"]
        shown = {"prompt": prompts.setdefault(prompt, len(prompts)), "length": completion[1]}
        kept = {name: value for name, value in row.items() if name != "tokens"}
        found.append({**kept, **shown, "completion": clipped(completion[0], clip, completion[1])})
    return {"prompts": list(prompts), "rows": found}


def _sampled(run: RunFolder, most: int) -> tuple[list[Row], int, int]:
    """Rows, the number of all rows, and of all files."""
    counts: dict[Path, int] = {}
    folder = run.folder / COMPLETIONS
    for path in sorted(folder.glob("*.parquet")):
        try:
            counts[path] = parquet.read_metadata(path).num_rows
        except (pyarrow.ArrowException, OSError):
            run.notes.append(f"{COMPLETIONS}/{path.name} is no whole parquet file; it was left out.")
    recorded, steps = recordings(run.folder, run.notes), {path: _step_of(path) for path in counts}
    chosen = set(_spread(list(counts), STEPS)) | {path for path in counts if steps[path] in recorded.folders}
    alone = [step for step in recorded.folders if step not in steps.values()]
    each = max(1, most // max(1, len(chosen) + len(alone)))
    rows = []
    for path in sorted(chosen):
        try:
            rows += _rows(path, each, run, recorded)
        except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
            run.notes.append(f"{COMPLETIONS}/{path.name}: its rows cannot be read ({error}); it was left out.")
    found = {step: recorded.of(step) for step in alone}
    for step, completions in found.items():
        rows += [_as_recorded(step, completion, run.rewards) for completion in list(completions.values())[:each]]
    counted = sum(counts.values()) + sum(map(len, found.values()))
    return sorted(rows, key=lambda row: row["step"]), counted, len(counts) + len(alone)


def _step_of(path: Path) -> int:
    return int(re.sub(r"\D", "", path.stem)[:15] or 0)


def _spread(things: Sequence[Path], most: int) -> list[Path]:
    """At most `most`, evenly, with the first and the last."""
    if len(things) <= most:
        return list(things)
    return [things[i * (len(things) - 1) // (most - 1)] for i in range(most)]


def _rows(path: Path, most: int, run: RunFolder, recorded: Recorded) -> list[Row]:
    file = parquet.read_table(path)
    if missing := [name for name in ("prompt", "completion") if name not in file.column_names]:
        run.notes.append(f"{COMPLETIONS}/{path.name}: no column {' nor '.join(missing)}; it was left out.")
        return []
    indices = _whole_groups([text_of(prompt) for prompt in file["prompt"].to_pylist()], most, path.name)
    parts = _reward_columns(file, run)
    rows = [_as_shown(row, parts, path, run.rewards) for row in file.take(indices).to_pylist()]
    for place, row in zip(indices, rows, strict=True):
        same = recorded.of(row["step"]).get(place)
        if same is not None and row["completion"][0][:500].strip() in same.text:
            row["tokens"] = same.values
    return rows


def _whole_groups(prompts: Sequence[str], most: int, seed: str) -> list[int]:
    """Indices of groups that are drawn, the same at each call; rows of one prompt stand side by side."""
    groups = [[i for i, _ in pairs] for _, pairs in groupby(enumerate(prompts), key=lambda pair: pair[1])]
    random.Random(seed).shuffle(groups)
    chosen: list[int] = []
    for group in groups:
        if not chosen or len(chosen) + len(group) <= most:
            chosen += group[:most]
    return sorted(chosen)


def _reward_columns(file: Any, run: RunFolder) -> dict[str, str]:
    """Column by reward: as TRL names it, or as `score` and `sample` do; of a run that says nothing, all of floats."""
    known = {
        name: column for name in run.rewards for column in (name, f"rewards/{name}") if column in file.column_names
    }
    known |= {name[len("rewards/") :]: name for name in file.column_names if name.startswith("rewards/")}
    if known:
        return known
    return {f.name: f.name for f in file.schema if pyarrow.types.is_floating(f.type) and f.name not in _OWN}


def _as_shown(
    row: Mapping[str, Any], parts: Mapping[str, str], path: Path, weights: Mapping[str, float | None]
) -> Row:
    scores = {name: _finite(row[column]) for name, column in parts.items()}
    extras = {k: v for k, v in row.items() if k not in (*_OWN, *parts.values()) and v is not None}
    step = _finite(row.get("step"))
    return {
        "step": int(step if step is not None else _step_of(path)),
        "prompt": _kept(row["prompt"]),
        "completion": _kept(row["completion"]),
        "parts": {printable(name): score for name, score in scores.items()},
        "reward": _total(scores, weights),
        "advantage": _finite(row.get("advantage")),
        "extras": {clipped(k, 80): clipped(text_of(v), 300) for k, v in list(extras.items())[:EXTRAS]},
    }


def _as_recorded(step: int, completion: Completion, weights: Mapping[str, float | None]) -> Row:
    """A row of a step of which the batch was recorded, and no table of completions."""
    return {
        "step": step,
        "prompt": _kept(completion.prompt),
        "completion": _kept(completion.text),
        "parts": {printable(name): score for name, score in completion.rewards.items()},
        "reward": _total(completion.rewards, weights),
        "advantage": _finite(completion.advantage),
        "extras": {},
        "tokens": completion.values,
    }


def _kept(value: Any) -> tuple[str, int]:
    """As much of a text as may be shown, and its length: a run may have gigabytes."""
    text, most = text_of(value), CLIPS[0]
    return (text if len(text) <= 2 * most else text[:most] + text[-most:]), len(text)


def _total(scores: Mapping[str, float | None], weights: Mapping[str, float | None]) -> float | None:
    """The weighted sum of the parts that are known; of parts whose weights are not, their sum."""
    known = {name: value for name, value in scores.items() if value is not None}
    weighted = [value * (1.0 if (weight := weights.get(name)) is None else weight) for name, value in known.items()]
    return _finite(sum(weighted)) if known else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return round(float(value), 6)


def text_of(value: Any) -> str:
    """Text as it is; messages with their roles, but for a single one, whose role goes without saying."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "role" in part for part in value):
        said = [_message(message) for message in value]
        roles = [str(message["role"]) for message in value]
        return said[0] if len(said) == 1 else "\n\n".join(f"[{r}]\n{s}" for r, s in zip(roles, said, strict=True))
    return "" if value is None else json.dumps(value, default=str, ensure_ascii=False)


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            str(part.get("text") or f"[{part.get('type')}]") if isinstance(part, Mapping) else str(part)
            for part in content
        )
    calls = message.get("tool_calls")
    called = "\n" + json.dumps(calls, default=str, ensure_ascii=False) if calls else ""
    return f"{content or ''}{called}"
