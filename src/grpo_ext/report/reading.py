"""A run's folder as the report needs it; what cannot be read is left out, and said in `notes`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.evaluation.results import FOLDER as EVALUATION
from grpo_ext.trainer.checkpoints.choice import OBJECTIVE_FILE, numbered
from grpo_ext.trainer.checkpoints.finish import FINISHED_FILE, METRICS_FILE
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE

MAX_RUNS = 10
STATE_FILE = "trainer_state.json"
COMPLETIONS = "completions"

Series = tuple[list[float], list[float]]
"""Steps and values; NaN where a value was none."""


@dataclass
class RunFolder:
    """What one run has left."""

    name: str
    folder: Path
    log: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    """What defines it, as its checkpoints have it (`recipe.json`)."""
    objective: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last that is known of."""
        known = [row["step"] for row in self.log] + [int((self.finished or {}).get("step") or 0)]
        return int(max(known))

    @property
    def rewards(self) -> dict[str, float | None]:
        """Weights by name; None where only the log tells of a reward."""
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
        """What was logged, by name, in the order of the steps."""
        found: dict[str, Series] = {}
        for row in sorted(self.log, key=lambda row: row["step"]):
            for name, value in row.items():
                if name != "step" and (value is None or isinstance(value, int | float)):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(row["step"])
                    values.append(_number(value))
        return {name: s for name, s in found.items() if not all(map(math.isnan, s[1]))}


def _number(value: Any) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) < 1e300 else math.nan  # what no axis could be drawn for


def read_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """The runs of some folders, each under the shortest name that tells it from the others.

    Raises:
        ConfigError: too many, a folder that is not there, or one without anything to show.
    """
    if len(paths) > MAX_RUNS:
        raise ConfigError([f"{len(paths)} runs are too many for one page. Name at most {MAX_RUNS}."])
    folders = [Path(path).expanduser() for path in paths]
    problems = [
        f"{folder}: {'no folder' if folder.exists() else 'no such folder'}. Name the output_dir of a run."
        for folder in folders
        if not folder.is_dir()
    ]
    problems += [f"{folder}: named twice. Name each run once." for folder in _repeated(folders)]
    if problems:
        raise ConfigError(problems)
    runs = [_read(name, folder) for name, folder in zip(_names(folders), folders, strict=True)]
    for run in runs:
        if not (run.log or run.evaluations or any((run.folder / COMPLETIONS).glob("*.parquet"))):
            problems.append(
                f"{run.folder}: nothing to report: no {METRICS_FILE} with a log in it, no checkpoint with a log, no "
                f"{COMPLETIONS}/, no {EVALUATION}/. Name the output_dir of a run that has logged (logging_steps)."
                + "".join(f" {note}" for note in run.notes)
            )
    if problems:
        raise ConfigError(problems)
    return runs


def _repeated(folders: Sequence[Path]) -> list[Path]:
    places = [folder.resolve() for folder in folders]
    return [folder for i, folder in enumerate(folders) if places[i] in places[:i]]


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
    said = {k.partition(".")[2]: v for k, v in run.record.items() if k.startswith("objective.")}
    run.objective = said or next((o for p in places if (o := _object(p / OBJECTIVE_FILE, run.notes))), {})
    run.log = _log(folder / METRICS_FILE, run.notes) or _log_of_states(places, run.notes)
    run.evaluations = list(_evaluations(folder / EVALUATION, run.notes))
    if not run.record:
        run.notes.append(f"Neither {FINISHED_FILE} nor a checkpoint's {RECIPE_FILE} says yet what was run.")
    if not run.log:
        run.notes.append(f"No log: there is no row in {METRICS_FILE}, nor in a checkpoint's {STATE_FILE}.")
    return run


def _object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """A file's JSON object; None, with a note, where there is something else."""
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
        which = (
            f"line {broken[0]}" if len(broken) == 1 else f"{len(broken)} lines, the first of them line {broken[0]},"
        )
        why = "half written, or no JSON object with a step"
        notes.append(f"{path.name}: {which} left out ({why}).")
    return rows


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _is_row(row: Any) -> bool:
    step = row.get("step") if isinstance(row, dict) else None
    return isinstance(step, int | float) and not isinstance(step, bool) and 0 <= step < 1e15


def _log_of_states(places: Sequence[Path], notes: list[str]) -> list[dict[str, Any]]:
    """The log in the newest checkpoint's state, of a run by an elder version or by TRL alone."""
    for place in places:
        state = _object(place / STATE_FILE, notes) or {}
        history = state.get("log_history")
        if isinstance(history, list) and (rows := [row for row in history if _is_row(row)]):
            notes.append(f"The log is that of {place.name}/{STATE_FILE}: there is no row in {METRICS_FILE}.")
            return rows
    return []


def _evaluations(folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Results of evaluations: set, model, step, figures of {mean, low, high, prompts}."""
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


def _is_figure(figure: Any) -> bool:
    return isinstance(figure, Mapping) and isinstance(figure.get("mean"), int | float)
