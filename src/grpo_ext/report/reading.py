"""Read the folder of a run for the report; unreadable parts are left out, with a line in `notes`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.evaluation.results import FOLDER as EVALUATION
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE, numbered
from grpo_ext.trainer.checkpoints.finish import FINISHED_FILE, METRICS_FILE
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE

MAX_RUNS = 10
STATE_FILE = "trainer_state.json"
COMPLETIONS = "completions"

Series = tuple[list[float], list[float]]
"""Steps and values; NaN for values that are not finite."""


@dataclass
class RunFolder:
    """The files of one run.

    Args:
        name: shortest name that is unique on the page.
        folder: its output_dir.
        log: rows of logged metrics.
        record: settings of the run, from its checkpoints (`recipe.json`).
        objective: the resolved loss.
        finished: content of `finished.json`; None for an unfinished run.
        evaluations: results of evaluation sets.
        notes: what could not be read.
    """

    name: str
    folder: Path
    log: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last known step."""
        known = [row["step"] for row in self.log] + [int((self.finished or {}).get("step") or 0)]
        return int(max(known))

    @property
    def rewards(self) -> dict[str, float | None]:
        """Weights by name; None for a reward that only the log knows."""
        found: dict[str, float | None] = {}
        for key, value in self.record.items():
            if key.startswith("rewards.") and key.endswith(".weight"):
                found[key[len("rewards.") : -len(".weight")]] = value if isinstance(value, int | float) else None
        logged = dict.fromkeys(name for row in self.log for name in row)
        parts = [
            k[len("rewards/") : -len("/mean")] for k in logged if k.startswith("rewards/") and k.endswith("/mean")
        ]
        return dict.fromkeys(parts) | found

    def series(self) -> dict[str, Series]:
        """Return the logged metrics by name, in the order of the steps."""
        found: dict[str, Series] = {}
        for row in sorted(self.log, key=lambda row: row["step"]):
            for name, value in row.items():
                if name != "step" and (value is None or isinstance(value, int | float)):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(row["step"])
                    values.append(_number(value))
        return {name: s for name, s in found.items() if not all(map(math.isnan, s[1]))}


def _number(value: float | None) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) < 1e300 else math.nan  # no axis could be drawn for it


def read_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """Read the runs in some folders, each under the shortest unique name.

    Raises:
        ConfigError: too many folders, a folder that does not exist, or one without anything to show.
    """
    folders = [Path(path).expanduser() for path in paths]
    if problems := list(_problems(folders)):
        raise ConfigError(problems)
    runs = [_read(name, folder) for name, folder in zip(_names(folders), folders, strict=True)]
    if problems := [_empty(run) for run in runs if not _has_content(run)]:
        raise ConfigError(problems)
    return runs


def _problems(folders: Sequence[Path]) -> Iterator[Problem]:
    if len(folders) > MAX_RUNS:
        yield Problem(f"{len(folders)} runs", ABSENT, "too many for one page", f"Name at most {MAX_RUNS}.")
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            reason = "not a folder" if folder.exists() else "no such folder"
            yield Problem(str(folder), ABSENT, reason, "Name the output_dir of a run.")
        elif folder.resolve() in seen:
            yield Problem(str(folder), ABSENT, "named twice", "Name each run once.")
        seen.add(folder.resolve())


def _has_content(run: RunFolder) -> bool:
    return bool(run.log or run.evaluations or any((run.folder / COMPLETIONS).glob("*.parquet")))


def _empty(run: RunFolder) -> Problem:
    reason = f"no content to report: no log in {METRICS_FILE} or a checkpoint, no {COMPLETIONS}/, no {EVALUATION}/"
    cure = "Name the output_dir of a run that has logged (logging_steps)."
    return Problem(str(run.folder), ABSENT, reason, " ".join([cure, *run.notes]))


def _names(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read(name: str, folder: Path) -> RunFolder:
    run = RunFolder(name, folder)
    places = [folder, *numbered(folder)]
    run.finished = _object(folder / FINISHED_FILE, run.notes)
    recorded = [(run.finished or {}).get("recipe"), *(_object(p / RECIPE_FILE, run.notes) for p in places)]
    run.record = next((r for r in recorded if isinstance(r, dict) and r), {})
    objective = {k.partition(".")[2]: v for k, v in run.record.items() if k.startswith("objective.")}
    run.objective = objective or next((o for p in places if (o := _object(p / OBJECTIVE_FILE, run.notes))), {})
    run.log = _log(folder / METRICS_FILE, run.notes) or _log_of_states(places, run.notes)
    run.evaluations = list(_evaluations(folder / EVALUATION, run.notes))
    if not run.record:
        run.notes.append(f"No record of the settings yet, in {FINISHED_FILE} or a checkpoint's {RECIPE_FILE}.")
    if not run.log:
        run.notes.append(f"No log: {METRICS_FILE} and the checkpoints' {STATE_FILE} have no rows.")
    return run


def _object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """Return the JSON object in a file; None, with a note, for other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        reason = f"holds a {type(content).__name__} where an object is expected"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = f"cannot be read ({error})"
    notes.append(f"{path.parent.name}/{path.name} {reason}; it was left out.")
    return None


def _log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows, broken = [], []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if row := _row(line):
                    rows.append(row)
                elif line.strip():
                    broken.append(number)
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error}).")
    if broken:
        which = f"line {broken[0]}" if len(broken) == 1 else f"{len(broken)} lines, from line {broken[0]} on,"
        notes.append(f"{path.name}: {which} left out (half written, or not a JSON object with a step).")
    return rows


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _is_row(row: object) -> bool:
    step = row.get("step") if isinstance(row, dict) else None
    return isinstance(step, int | float) and not isinstance(step, bool) and 0 <= step < 1e15


def _log_of_states(places: Sequence[Path], notes: list[str]) -> list[dict[str, Any]]:
    """Return the log in the newest checkpoint's state, for a run of stock TRL or an earlier version."""
    for place in places:
        state = _object(place / STATE_FILE, notes) or {}
        history = state.get("log_history")
        if isinstance(history, list) and (rows := [row for row in history if _is_row(row)]):
            notes.append(f"The log is that of {place.name}/{STATE_FILE}, because {METRICS_FILE} has no rows.")
            return rows
    return []


def _evaluations(folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield results of evaluations: set, model, step, figures of {mean, low, high, prompts}."""
    for path in sorted(folder.glob("*/*.json")):
        content = _object(path, notes)
        if content is None:
            continue
        figures = content.get("figures")
        known = {n: f for n, f in figures.items() if _is_figure(f)} if isinstance(figures, Mapping) else {}
        if not known:
            notes.append(f"{EVALUATION}/{path.parent.name}/{path.name} holds no figures; it was left out.")
            continue
        yield {**content, "figures": known, "set": str(content.get("set") or path.parent.name), "file": path.stem}


def _is_figure(figure: object) -> bool:
    return isinstance(figure, Mapping) and isinstance(figure.get("mean"), int | float)
