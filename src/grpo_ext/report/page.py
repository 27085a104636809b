"""The report: one HTML file with everything in it, under 5 MB whatever the runs' size."""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_ext.report import answer
from grpo_ext.report.completions import browsed, clipped, embedded
from grpo_ext.report.curves import COLOURS, DASHES, EXPLAINED, OTHERS, Curve, Picture, curves, pictures
from grpo_ext.report.doctor import of_run
from grpo_ext.report.facts import differing, facts, said
from grpo_ext.report.reading import RunFolder, read_runs

MAX_SIZE = 5_000_000
_FOR_COMPLETIONS = 2_800_000
ANSWERS = "reward"
"""The curve that stands beside the answer, and not among the others."""
_COLUMNS = 12
"""Of results of evaluations side by side: the first and the last."""


def write_report(paths: Sequence[str | Path], output: Path) -> Path:
    """Write the report of some runs' folders; returns `output`.

    Raises:
        ConfigError: a folder is not there, or has nothing to show.
        OSError: the file cannot be written.
    """
    page = html(read_runs(paths))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def html(runs: Sequence[RunFolder], watched: str = "") -> str:
    """The page; `watched` is the version of a page that is served and loads itself anew."""
    shown, left_out = curves(runs)
    drawn = _drawn(shown, runs)
    parts = {
        "answer": ("Did it learn?", _answer(runs, [curve for curve in shown if curve.name == ANSWERS], drawn)),
        "findings": ("Likely faults", _findings(runs)),
        "run": ("What was run", _what_was_run(runs)),
        "curves": ("Curves", _curves(runs, shown, left_out, drawn)),
        "evaluation": ("Evaluation", _evaluation(runs)),
        "completions": ("Completions", ""),
        "settings": ("All settings", _settings(runs)),
    }
    data = _json("curves-data", {name: picture.data for name, picture in (drawn or {}).items()})
    used = len(data.encode()) + sum(len(part.encode()) for _, part in parts.values())
    room = min(_FOR_COMPLETIONS, MAX_SIZE - 200_000 - used)
    parts["completions"] = ("Completions", _browser(runs, room))
    name = _text(", ".join(run.name for run in runs))
    known = {key: part for key, part in parts.items() if part[1]}
    links = "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in known.items())
    body = "".join(
        f'<section id="{key}"><details open><summary><h2>{title}</h2></summary>{part}</details></section>'
        for key, (title, part) in known.items()
    )
    watching = f'<p id="watched" class="dim" data-version="{_text(watched)}">Still training.</p>' if watched else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{_policy(bool(watched))}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: report</title><style>{_own('page.css')}</style></head><body>"
        f"<nav>{links}</nav><main><header><h1>{name}</h1>{watching}</header>{_notes(runs)}{body}</main>"
        f"{data}<script>{_script()}</script></body></html>\n"
    )


def _script() -> str:
    return _own("page.js") + _own("curves.js")


def _json(name: str, data: Any) -> str:
    return f'<script id="{name}" type="application/json">{embedded(data)}</script>' if data else ""


def _drawn(shown: Sequence[Curve], runs: Sequence[RunFolder]) -> dict[str, Picture] | None:
    """Return the pictures, or None where matplotlib is not installed."""
    try:
        return pictures(shown, [run.name for run in runs])
    except ImportError:
        return None


def _answer(runs: Sequence[RunFolder], reward: Sequence[Curve], drawn: Mapping[str, Picture] | None) -> str:
    """Answer whether each run learned, with what it took and what the diagnosis warns of."""
    rows: dict[str, list[str]] = {}
    for place, run in enumerate(runs):
        found = {change.name: f"{change.before} \u2192 {change.after}" for change in answer.held_out(run)}
        if (trained := answer.in_training(run)) is not None:
            found[trained.name] = f"{trained.before} \u2192 {trained.after}"
        faults = [f"{finding.rule.name} (step {finding.step})" for finding in of_run(run).findings]
        found |= {"warnings of the diagnosis": ", ".join(faults) or "none"} | answer.spent(run)
        for name, value in found.items():
            rows.setdefault(name, [""] * len(runs))[place] = _text(value)
    who = [f"{_text(run.name)}: " if len(runs) > 1 else "" for run in runs]
    verdicts = "".join(
        f"<p class='answer'>{name}{_text(answer.sentence(run))}</p>" for name, run in zip(who, runs, strict=True)
    )
    picture = "".join(_figure(curve, (drawn or {}).get(curve.name), runs) for curve in reward)
    return (
        f'{verdicts}<div class="curves">{picture}</div>{_table(_heads(runs, ""), [[n, *v] for n, v in rows.items()])}'
    )


@cache
def _own(name: str) -> str:
    return (files("grpo_ext.report") / name).read_text(encoding="utf-8")


def _policy(watched: bool) -> str:
    """Nothing is loaded from anywhere, and no script runs but ours, whatever a completion holds."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; form-action 'none'"
    rules += "; base-uri 'none'" + ("; connect-src 'self'" if watched else "")
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _text(value: Any, most: int = 600) -> str:
    return escape(clipped(str(value), most))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """A table of cells that are HTML already; the first of a row is its head."""
    cell = '<td class="number">' if numbers else "<td>"
    head = "".join(f'<th scope="col">{name}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"{cell}{value}</td>" for value in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _notes(runs: Sequence[RunFolder]) -> str:
    lines = []
    for run in runs:
        who = f"{run.name}: " if len(runs) > 1 else ""
        lines += [f"<li>{_text(who + note)}</li>" for note in run.notes[:8]]
        if len(run.notes) > 8:
            lines.append(f"<li>{_text(who)}and {len(run.notes) - 8} more of this kind.</li>")
    return f'<div class="notes"><p>What is missing here:</p><ul>{"".join(lines)}</ul></div>' if lines else ""


def _heads(runs: Sequence[RunFolder], first: str) -> list[str]:
    return [first, *(_text(run.name) for run in runs)]


def _what_was_run(runs: Sequence[RunFolder]) -> str:
    by_run = [facts(run) for run in runs]
    names = list(dict.fromkeys(name for found in by_run for name in found))
    table = _table(_heads(runs, ""), [[name, *(_text(found.get(name, "")) for found in by_run)] for name in names])
    if len(runs) == 1:
        return table
    rows = [[_text(key), *map(_text, values)] for key, values in differing(runs)]
    between = _table(_heads(runs, "setting"), rows) if rows else "<p>None that is on record.</p>"
    return f"{table}<h3>Settings that differ</h3>{between}"


def _findings(runs: Sequence[RunFolder]) -> str:
    """What the doctor says; nothing where it finds nothing."""
    rows = [
        [_text(f"{run.name}, step {f.step}" if len(runs) > 1 else f"step {f.step}"), *map(_text, told)]
        for run in runs
        for f in of_run(run).findings
        for told in [(f.rule.name, f.evidence, f"{f.rule.meaning}. {f.rule.cure}")]
    ]
    return _table(["since", "fault", "seen", "what it is, and the cure"], rows) if rows else ""


def _settings(runs: Sequence[RunFolder]) -> str:
    keys = sorted({key for run in runs for key, value in run.record.items() if value is not None})
    rows = [[_text(key), *(_text(said(run, key), 300) for run in runs)] for key in keys[:1000]]
    if not rows:
        return ""
    return f"<details><summary>{len(rows)} settings</summary>{_table(_heads(runs, 'setting'), rows)}</details>"


def _curves(
    runs: Sequence[RunFolder], shown: Sequence[Curve], left_out: Sequence[str], drawn: Mapping[str, Picture] | None
) -> str:
    if not shown:
        return ""
    without = "" if drawn is not None else "<p>No pictures: <code>pip install 'grpo-ext[plot]'</code> adds them.</p>"
    hint = "Hover for values; drag to zoom into steps, double-click to see all. A light band holds 80 % of the steps."
    without += f"<p class='dim'>{hint}</p>" if drawn else ""
    parts = []
    for section, members in groupby((c for c in shown if c.name != ANSWERS), key=lambda curve: curve.section):
        figures = "".join(_figure(curve, (drawn or {}).get(curve.name), runs) for curve in members)
        figures = f'<div class="curves">{figures}</div>'
        if section == OTHERS:
            parts.append(f"<details><summary>{section}</summary>{figures}</details>")
        else:
            parts.append(f"<h3>{section}</h3>{figures}")
    if left_out:
        parts.append(
            f"<p class='dim'>Not drawn, as they never moved or are too many: {_text(', '.join(left_out), 2000)}.</p>"
        )
    return without + _legend(runs) + "".join(parts) + _as_table(shown, runs)


def _legend(runs: Sequence[RunFolder]) -> str:
    if len(runs) < 2:
        return ""
    lines = [
        f'<li><i style="border-top: 3px {DASHES[i % len(DASHES)]} {COLOURS[i]}"></i>{_text(run.name)}</li>'
        for i, run in enumerate(runs)
    ]
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _figure(curve: Curve, picture: Picture | None, runs: Sequence[RunFolder]) -> str:
    told = "; ".join(f"{_of(curve, place, runs) or curve.name}: {_ends(*line)}" for place, line in curve.lines.items())
    explained = f"<span>{_text(EXPLAINED[curve.name])}</span>" if curve.name in EXPLAINED else ""
    if curve.missing:
        explained += f"<span>{curve.missing} values were NaN or infinite: there the line has a gap</span>"
    swatches = zip(COLOURS, curve.parts, strict=False)
    keys = "".join(f'<li><i style="background: {colour}"></i>{_text(part)}</li>' for colour, part in swatches)
    explained += f'<ul class="parts">{keys}</ul>' if keys else ""
    caption = f"<figcaption>{_text(curve.name, 200)}{explained}</figcaption>"
    svg = picture.svg if picture else ""
    plot = (
        f'<div class="plot" role="img" data-curve="{_text(curve.name)}" aria-label="{_text(told, 1000)}">{svg}</div>'
    )
    return f"<figure>{plot}{caption}</figure>"


def _of(curve: Curve, place: int, runs: Sequence[RunFolder]) -> str:
    """What one of a curve's lines is: a part of it, or a run among others."""
    if curve.parts:
        return curve.parts[place]
    return runs[place].name if len(runs) > 1 else ""


def _ends(steps: Sequence[float], values: Sequence[float]) -> str:
    known = [(step, value) for step, value in zip(steps, values, strict=True) if not math.isnan(value)]
    (first, at_first), (last, at_last) = known[0], known[-1]
    return f"{at_first:.4g} at step {first:g}, {at_last:.4g} at step {last:g}"


def _as_table(shown: Sequence[Curve], runs: Sequence[RunFolder]) -> str:
    rows = []
    for curve in shown:
        for place, (_, values) in curve.lines.items():
            known = [value for value in values if not math.isnan(value)]
            name = [_text(curve.parts[place] if curve.parts else curve.name, 200)]
            name += [_text(runs[place].name)] if len(runs) > 1 else []
            rows.append([*name, *(f"{v:.4g}" for v in (known[0], known[-1], min(known), max(known)))])
    header = ["figure", *(["run"] if len(runs) > 1 else []), "first", "last", "least", "most"]
    return f"<details><summary>As a table</summary>{_table(header, rows, numbers=True)}</details>"


def _evaluation(runs: Sequence[RunFolder]) -> str:
    """A table for each set: figures down, models and steps across."""
    results = [(run, found) for run in runs for found in sorted(run.evaluations, key=_when)]
    parts = []
    for name in dict.fromkeys(found["set"] for _, found in results):
        mine = [(run, found) for run, found in results if found["set"] == name]
        shown = mine if len(mine) <= _COLUMNS else [mine[0], *mine[1 - _COLUMNS :]]
        figures = list(dict.fromkeys(figure for _, found in shown for figure in found["figures"]))[:60]
        header = ["figure", *(_column(run, found, len(runs) > 1) for run, found in shown)]
        rows = [[_text(f, 200), *(_cell(found["figures"].get(f)) for _, found in shown)] for f in figures]
        less = f"<p class='dim'>{len(shown)} of {len(mine)} results: the first and the last.</p>"
        parts.append(f"<h3>{_text(name)}</h3>{_table(header, rows, True)}{less if len(mine) > len(shown) else ''}")
    note = "<p class='dim'>In brackets: the interval over prompts.</p>"
    return note + "".join(parts[:30]) if parts else ""


def _when(found: Mapping[str, Any]) -> tuple[float, str]:
    step = found.get("step")
    return (step if isinstance(step, int | float) else math.inf), found["file"]


def _column(run: RunFolder, found: Mapping[str, Any], several: bool) -> str:
    model = re.split(r"[/\\]", str(found.get("model") or ""))[-1] if found.get("step") is None else ""
    when = f"step {found['step']}" if found.get("step") is not None else model or found["file"]
    return _text(f"{run.name}, {when}" if several else when)


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
    low, high = figure.get("low"), figure.get("high")
    if not all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high)):
        return f"{figure['mean']:.4g}"
    return f"{figure['mean']:.4g} ({low:.3g} to {high:.3g})"


def _browser(runs: Sequence[RunFolder], room: int) -> str:
    data = browsed(runs, room)
    if not data["total"]:
        return "<p>None were recorded: train with <code>log_completions: true</code>.</p>"
    colour = '<label>colour tokens by<select name="colour"></select></label>' if data["kinds"] else ""
    shown = len(data["rows"])
    many = f"{shown:,} of {data['total']:,} completions, of {len({r['step'] for r in data['rows']}):,} of "
    many += f"{data['steps']:,} recorded steps: drawn by whole groups, from steps that are spread evenly."
    if shown == data["total"]:
        many = f"All {shown:,} completions that were recorded."
    choices = "".join(
        f'<label>{label}<select name="{name}"></select></label>'
        for name, label in (("run", "run"), ("step", "step"), ("prompt", "prompt"))
    )
    return (
        f"<p>{many}</p><noscript><p>The browser of completions needs JavaScript.</p></noscript>"
        f'<form id="choose">{choices}'
        '<label>search<input name="search" type="search"></label>'
        '<label>only where<select name="of"></select></label>'
        '<label>is at least<input name="least" type="number" step="any" size="6"></label>'
        '<label>and at most<input name="most" type="number" step="any" size="6"></label>'
        '<label>sort by<select name="sort"></select></label>'
        '<label>order<select name="order"><option value="up">rising</option><option value="down">falling</option>'
        f'</select></label>{colour}<button type="reset">show all</button></form>'
        '<p id="legend" hidden></p>'
        '<p class="pages"><button id="back" type="button">back</button><button id="on" type="button">on</button>'
        '<span id="shown" role="status"></span></p><div id="cards"></div>'
        f"{_json('completions-data', data)}"
    )
