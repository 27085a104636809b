"""Read the folder of a run for the report; unreadable parts are left out, with a line in `notes`."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.evaluation.results import EVALUATION
from grpo_ext.safe_reading import parse_json, read_json
from grpo_ext.trainer.checkpoints.choice import numbered
from grpo_ext.trainer.checkpoints.finish import FINISHED_FILE, METRICS_FILE
from grpo_ext.trainer.checkpoints.identity import RECIPE_FILE
from grpo_ext.trainer.diagnosis.rules import Finding, diagnose

MAX_RUNS = 24
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
        steps = [row["step"] for row in self.log] + [int((self.finished or {}).get("step") or 0)]
        return int(max(steps))

    @property
    def rewards(self) -> dict[str, float | None]:
        """Weights by name; None for a reward that only the log knows."""
        logged = (re.fullmatch("rewards/(.*)/mean", name) for row in self.log for name in row)
        on_record = ((re.fullmatch(r"rewards\.(.*)\.weight", key), value) for key, value in self.record.items())
        weights = {key[1]: value if isinstance(value, int | float) else None for key, value in on_record if key}
        return dict.fromkeys(match[1] for match in logged if match) | weights

    @cached_property
    def findings(self) -> list[Finding]:
        """Findings of the diagnosis over the whole log."""
        return diagnose(self.training_log)

    @property
    def training_log(self) -> list[dict[str, Any]]:
        """Rows of training steps, in their order."""
        rows = (row for row in self.log if "reward" in row or "grad_norm" in row)
        return sorted(rows, key=lambda row: row["step"])

    def series(self) -> dict[str, Series]:
        """Return the logged metrics by name, in the order of the steps."""
        series: dict[str, Series] = {}
        for row in sorted(self.log, key=lambda row: row["step"]):
            for name, value in row.items():
                if name != "step" and (value is None or isinstance(value, int | float)):
                    steps, values = series.setdefault(name, ([], []))
                    steps.append(row["step"])
                    # NaN also for what no axis can be drawn for
                    values.append(math.nan if value is None or abs(value) >= 1e300 else float(value))
        return {name: s for name, s in series.items() if not all(map(math.isnan, s[1]))}


def read_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """Read the runs in some folders, each under the shortest unique name.

    Raises:
        ConfigError: too many folders, a folder that does not exist, or one without anything to show.
    """
    folders = [Path(path).expanduser() for path in paths]
    if problems := list(_problems(folders)):
        raise ConfigError(problems)
    runs = [_read(name, folder) for name, folder in zip(_names(folders), folders, strict=True)]
    reason = f"no content to report: no log in {METRICS_FILE}, no {COMPLETIONS}/, no {EVALUATION}/"
    cure = "Name the output_dir of a run that has logged (logging_steps)."
    empty = [
        run for run in runs if not (run.log or run.evaluations or any(run.folder.glob(f"{COMPLETIONS}/*.parquet")))
    ]
    if empty:
        raise ConfigError(Problem(str(run.folder), ABSENT, reason, " ".join([cure, *run.notes])) for run in empty)
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
    run.objective = {k.partition(".")[2]: v for k, v in run.record.items() if k.startswith("objective.")}
    run.log = _log(folder / METRICS_FILE, run.notes)
    run.evaluations = list(_evaluations(folder / EVALUATION, run.notes))
    if not run.record:
        run.notes.append(f"No record of the settings yet, in {FINISHED_FILE} or a checkpoint's {RECIPE_FILE}.")
    if not run.log:
        run.notes.append(f"No log: {METRICS_FILE} has no rows.")
    return run


def _object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """Return the JSON object in a file; None, with a note, for other content."""
    try:
        content = read_json(path)
        if isinstance(content, dict):
            return content
        reason = f"holds a {type(content).__name__} where an object is expected"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({error})"
    notes.append(f"{path.parent.name}/{path.name} {reason}; it was left out.")
    return None


_LARGEST_LOG = 2**27
"""Most bytes of a log that are read."""


def _log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = {}
    try:
        with path.open("rb") as file:
            lines = file.read(_LARGEST_LOG).decode(errors="replace").split("\n")
            if file.read(1):
                notes.append(f"{path.name}: only its first {_LARGEST_LOG:,} bytes were read.")
                lines.pop()  # which is cut
        rows = {number: _row(line) for number, line in enumerate(lines, 1) if line.strip()}
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error}).")
    if broken := [number for number, row in rows.items() if row is None]:
        which = (
            f"line {broken[0]}" if len(broken) == 1 else f"{len(broken)} lines, the first of them line {broken[0]},"
        )
        notes.append(f"{path.name}: {which} left out (half written, or not a JSON object with a step).")
    return [row for row in rows.values() if row is not None]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int | float) and not isinstance(step, bool) and 0 <= step < 1e15 else None


def _evaluations(folder: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield results of evaluations: set, model, step, figures of {mean, low, high, prompts}."""
    for path in sorted(folder.glob("*/*.json")):
        content = _object(path, notes)
        if content is None:
            continue
        figures = content.get("figures")
        pairs = figures.items() if isinstance(figures, Mapping) else ()
        readable = {n: f for n, f in pairs if isinstance(f, Mapping) and isinstance(f.get("mean"), int | float)}
        if not readable:
            notes.append(f"{EVALUATION}/{path.parent.name}/{path.name} holds no figures; it was left out.")
            continue
        yield {**content, "figures": readable, "set": str(content.get("set") or path.parent.name), "file": path.stem}
