"""`grpo-ext report` and `diagnose`: a run as one HTML file that needs no network, and its likely problems as text."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.report.page import write_report
from grpo_ext.report.reading import RunFolder, read_runs
from grpo_ext.trainer.checkpoints.finish import METRICS_FILE
from grpo_ext.trainer.diagnosis.evidence import OF_UPDATES
from grpo_ext.trainer.diagnosis.rules import RULES

_Metrics = Mapping[str, Sequence[str]]


def run(options: argparse.Namespace) -> int:
    """Write the report, or print the findings."""
    return _report(options) if options.command == "report" else _diagnose(options)


def _diagnose(options: argparse.Namespace) -> int:
    """Print the findings; return 0 without findings, 1 with findings."""
    (run_folder,) = read_runs([options.run])
    logged = {name for row in run_folder.log for name in row if name in OF_UPDATES or "reward" in row}
    unchecked = {rule.name: missing for rule in RULES if (missing := rule.missing(logged))}
    checked = {rule.name: list(rule.figures) for rule in RULES if rule.name not in unchecked}
    if not logged:
        reason = f"no log of a training step was found in {METRICS_FILE}"
        cure = " ".join(["Name the output_dir of a run that has logged (logging_steps).", *run_folder.notes])
        raise ConfigError([Problem(str(run_folder.folder), ABSENT, reason, cure)])
    if options.json:
        print(json.dumps(_plain(run_folder, checked, unchecked), indent=2))
    else:
        print("\n".join(_lines(run_folder, checked, unchecked)))
    return 1 if run_folder.findings else 0


def _plain(run: RunFolder, checked: _Metrics, unchecked: _Metrics) -> dict[str, object]:
    findings = [
        {"fault": f.rule.name, "step": f.step, "evidence": f.evidence, "is": f.rule.meaning, "cure": f.rule.cure}
        for f in run.findings
    ]
    rules = {"looked_at": checked, "unseen": unchecked}
    seen = {"run": str(run.folder), "logs": len(run.training_log), "findings": findings}
    return {**seen, **rules}


def _lines(run: RunFolder, checked: _Metrics, unchecked: _Metrics) -> Iterator[str]:
    yield from (f"Note: {note}" for note in run.notes if "line" in note)
    for finding in run.findings:
        yield f"step {finding.step}: {finding.rule.name}"
        for head, text in (("seen", finding.evidence), ("is", finding.rule.meaning), ("cure", finding.rule.cure)):
            yield from textwrap.wrap(text, 110, initial_indent=f"  {head:5}", subsequent_indent=" " * 7)
    if not run.findings:
        yield f"No problem found in {len(run.training_log)} logs, up to step {run.step}. Checked:"
        yield from _metrics(checked)
    elif len(run.findings) > 1:
        yield "The first is the likely cause; the others may be its consequences."
    if unchecked:
        yield "Not checked, because these metrics were not logged:"
        yield from _metrics(unchecked)


def _metrics(rules: _Metrics) -> Iterator[str]:
    yield from (f"  {rule:26} {', '.join(metrics)}" for rule, metrics in rules.items())


def _report(options: argparse.Namespace) -> int:
    output = options.output or (options.runs[0] if len(options.runs) == 1 else Path()) / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):
        cure = "Let its name end in .html."
        raise ConfigError([Problem("--output", str(output), "the report is an HTML file", cure)])
    if output.is_dir():
        raise ConfigError([Problem("--output", str(output), "it is a folder", "Name a file.")])
    write_report(options.runs, output)
    print(f"Report: {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0
