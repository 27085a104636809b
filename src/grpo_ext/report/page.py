"""The report: one HTML file with everything in it, under 5 MB for runs of any size."""

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup, escape

from grpo_ext.report import answer
from grpo_ext.report.completions import browsed, embedded
from grpo_ext.report.curves import EXPLAINED, OTHERS, REWARD, Curve, Picture, curves, pictures, style
from grpo_ext.report.facts import differing, facts, shown_setting
from grpo_ext.report.reading import RunFolder, read_runs
from grpo_ext.report.seeds import Band, Group, grouped
from grpo_ext.safe_reading import finite, write_text
from grpo_ext.terminal import clipped

MAX_SIZE = 5_000_000
_FOR_COMPLETIONS = 2_800_000
_SECTIONS = {
    "answer": "Did it learn?",
    "findings": "Likely problems",
    "run": "What was run",
    "curves": "Curves",
    "evaluation": "Evaluation",
    "completions": "Completions",
    "settings": "All settings",
}
_COLUMNS = 12
"""Largest number of results side by side: the first and the last ones."""

_Rows = list[list[str]]


def write_report(paths: Sequence[str | Path], output: Path) -> Path:
    """Write the report of the runs in some folders; return `output`.

    Raises:
        ConfigError: a folder does not exist, or has no content to show.
        OSError: the file cannot be written.
    """
    page = html(read_runs(paths))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page)
    return output


def html(runs: Sequence[RunFolder]) -> str:
    """Return the page."""
    groups = grouped(runs)
    content = {**_curves(groups), **_tables(runs, groups), "title": ", ".join(run.name for run in runs)}
    content["sections"] = {name: title for name, title in _SECTIONS.items() if content.get(name, True)}
    content["policy"] = _policy()
    used = len(_template().render(content).encode())
    content["browser"] = _browser(runs, min(_FOR_COMPLETIONS, MAX_SIZE - 200_000 - used))
    content["notes"] = list(_notes(runs))  # last: what could not be read is known by now
    return _template().render(content)


@cache
def _template() -> Template:
    """Return the template; text is escaped, clipped, and its control characters are made visible."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    environment.filters["clip"] = _clip
    environment.globals.update(style=Markup(_own("page.css")), script=Markup(_script()), others=OTHERS)
    return environment.from_string(_own("page.html"))


def _shown(value: object) -> Markup:
    return value if isinstance(value, Markup) else _clip(value, 600)


def _clip(value: object, most: int) -> Markup:
    return escape(clipped(str(value), most))


@cache
def _own(name: str) -> str:
    return (files("grpo_ext.report") / name).read_text(encoding="utf-8")


def _script() -> str:
    return _own("page.js") + _own("curves.js")


def _policy() -> Markup:
    """Return a policy that blocks network access and every script but ours, so that completions are inert."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; form-action 'none'"
    return Markup(f"{rules}; base-uri 'none'")


def _tables(runs: Sequence[RunFolder], groups: Sequence[Group]) -> dict[str, Any]:
    """Return the content of the page apart from curves and completions."""
    several = len(runs) > 1
    keys = sorted({key for run in runs for key, value in run.record.items() if value is not None})
    return {
        "several": several,
        "heads": lambda first: [first, *(run.name for run in runs)],
        "by_seed": [row for group in groups for row in group.changes()] if len(groups) < len(runs) else [],
        "answers": [f"{_prefix(run, runs)}{answer.sentence(run)}" for run in runs],
        "answer_rows": _joined([_answer(run) for run in runs]),
        "findings": list(_findings(runs)),
        "facts": _joined([facts(run) for run in runs]),
        "differing": [[key, *values] for key, values in differing(runs)] if several else [],
        "settings": [[key, *(_clip(shown_setting(run, key), 300) for run in runs)] for key in keys[:1000]],
        "evaluations": (evaluations := list(_evaluations(runs))[:30]),
        "evaluation": bool(evaluations),
    }


def _joined(by_run: Sequence[Mapping[str, str]]) -> _Rows:
    """Return a row per name, with the values of all runs."""
    names = dict.fromkeys(name for values in by_run for name in values)
    return [[name, *(values.get(name, "") for values in by_run)] for name in names]


def _prefix(run: RunFolder, runs: Sequence[RunFolder]) -> str:
    return f"{run.name}: " if len(runs) > 1 else ""


def _notes(runs: Sequence[RunFolder]) -> Iterator[str]:
    for run in runs:
        yield from (_prefix(run, runs) + note for note in run.notes[:8])
        if len(run.notes) > 8:
            yield f"{_prefix(run, runs)}and {len(run.notes) - 8} more of this kind."


def _answer(run: RunFolder) -> dict[str, str]:
    """Return how a run's figures changed, its problems, time and tokens."""
    changes = [*answer.held_out(run), *filter(None, [answer.in_training(run)])]
    values = {change.name: f"{change.before} \u2192 {change.after}" for change in changes}
    problems = [f"{finding.rule.name} (step {finding.step})" for finding in run.findings]
    return values | {"warnings of the diagnosis": ", ".join(problems) or "none"} | answer.spent(run)


def _findings(runs: Sequence[RunFolder]) -> Iterator[list[str]]:
    for run in runs:
        for finding in run.findings:
            since = f"{run.name}, step {finding.step}" if len(runs) > 1 else f"step {finding.step}"
            yield [since, finding.rule.name, finding.evidence, f"{finding.rule.meaning}. {finding.rule.cure}"]


# Curves.


def _curves(groups: Sequence[Group]) -> dict[str, Any]:
    shown, left_out = curves(groups)
    names = [group.name for group in groups]
    drawn = pictures(shown, names)
    others = [_figure(curve, drawn, names) for curve in shown if curve.name != REWARD]
    data = {name: picture.data for name, picture in drawn.items()}
    return {
        "answer_curves": [_figure(curve, drawn, names) for curve in shown if curve.name == REWARD],
        "curves": bool(shown),
        "groups": [(name, list(members)) for name, members in groupby(others, key=lambda figure: figure["section"])],
        "curves_data": Markup(embedded(data)) if data else "",
        "left_out": ", ".join(f"{name} ({reason})" for name, reason in left_out.items()),
        "legend": [(name, *style(i)) for i, name in enumerate(names)] if len(names) > 1 else [],
        "value_header": ["figure", *(["run"] if len(names) > 1 else []), "first", "last", "least", "most"],
        "values": list(_values(shown, names)),
    }


def _figure(curve: Curve, drawn: Mapping[str, Picture], names: Sequence[str]) -> dict[str, Any]:
    several = len(names) > 1
    lines = [f"{names[i] if several else curve.name}: {_ends(band)}" for i, band in curve.lines.items()]
    return {
        "name": curve.name,
        "section": curve.section,
        "missing": curve.missing,
        "explained": EXPLAINED.get(curve.name),
        "label": "; ".join(lines),
        "svg": Markup(drawn[curve.name].svg),
    }


def _ends(band: Band) -> str:
    points = [(step, value) for step, value in zip(band.steps, band.mean, strict=True) if not math.isnan(value)]
    (first, at_first), (last, at_last) = points[0], points[-1]
    return f"{at_first:.4g} at step {first:g}, {at_last:.4g} at step {last:g}"


def _values(shown: Sequence[Curve], names: Sequence[str]) -> Iterator[list[str]]:
    for curve in shown:
        for place, band in curve.lines.items():
            means = [value for value in band.mean if not math.isnan(value)]
            name = [names[place]] if len(names) > 1 else []
            yield [_clip(curve.name, 200), *name, *(f"{v:.4g}" for v in (means[0], means[-1], min(means), max(means)))]


# Evaluations and completions.


def _evaluations(runs: Sequence[RunFolder]) -> Iterator[dict[str, Any]]:
    """Yield a table for each set: a row per figure, a column per model and step."""
    results = [(run, result) for run in runs for result in sorted(run.evaluations, key=_order)]
    for name in dict.fromkeys(result["set"] for _, result in results):
        mine = [(run, result) for run, result in results if result["set"] == name]
        shown = mine if len(mine) <= _COLUMNS else [mine[0], *mine[1 - _COLUMNS :]]
        figures = list(dict.fromkeys(figure for _, result in shown for figure in result["figures"]))[:60]
        yield {
            "name": name,
            "header": ["figure", *(_column(run, result, len(runs) > 1) for run, result in shown)],
            "rows": [[_clip(f, 200), *(_cell(result["figures"].get(f)) for _, result in shown)] for f in figures],
            "shown": len(shown),
            "total": len(mine),
        }


def _order(result: Mapping[str, Any]) -> tuple[float, str]:
    step = result.get("step")
    return (step if isinstance(step, int | float) else math.inf), result["file"]


def _column(run: RunFolder, result: Mapping[str, Any], several: bool) -> str:
    model = re.split(r"[/\\]", str(result.get("model") or ""))[-1] if result.get("step") is None else ""
    when = f"step {result['step']}" if result.get("step") is not None else model or result["file"]
    return f"{run.name}, {when}" if several else when


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return ""
    low, high = finite(figure.get("low")), finite(figure.get("high"))
    if low is None or high is None:
        return f"{figure['mean']:.4g}"
    return f"{figure['mean']:.4g} ({low:.3g} to {high:.3g})"


def _browser(runs: Sequence[RunFolder], room: int) -> dict[str, Any] | None:
    """Return the data of the browser of completions, in at most `room` characters; None without completions."""
    data = browsed(runs, room)
    if not data["total"]:
        return None
    shown, steps = len(data["rows"]), len({row["step"] for row in data["rows"]})
    summary = (
        f"{shown:,} of {data['total']:,} completions, of {steps:,} of {data['steps']:,} recorded steps: whole groups, "
        "drawn at random from evenly spaced steps."
    )
    if shown == data["total"]:
        summary = f"All {shown:,} completions that were recorded."
    return {"summary": summary, "data": Markup(embedded(data))}
