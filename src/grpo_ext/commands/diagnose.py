"""`grpo-ext diagnose`: the likely problems of a run, each with its step, the metrics that show it, and the cure."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from grpo_ext.report.diagnosis import Diagnosis, diagnosed


def run(options: argparse.Namespace) -> int:
    """Print the findings; return 0 without findings, 1 with findings."""
    diagnosis = diagnosed(options.run)
    print(json.dumps(diagnosis.to_dict(), indent=2) if options.json else "\n".join(_lines(diagnosis)))
    return 1 if diagnosis.findings else 0


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield from (f"Note: {note}" for note in diagnosis.run.notes if "line" in note)
    for finding in diagnosis.findings:
        yield f"step {finding.step}: {finding.rule.name}"
        for head, text in (("seen", finding.evidence), ("is", finding.rule.meaning), ("cure", finding.rule.cure)):
            yield from textwrap.wrap(text, 110, initial_indent=f"  {head:5}", subsequent_indent=" " * 7)
    if not diagnosis.findings:
        yield f"No problem found in {diagnosis.logs} logs, up to step {diagnosis.run.step}. Checked:"
        yield from _metrics(diagnosis.checked)
    elif len(diagnosis.findings) > 1:
        yield "The first is the likely cause; the others may be its consequences."
    if diagnosis.unchecked:
        yield "Not checked, because these metrics were not logged:"
        yield from _metrics(diagnosis.unchecked)


def _metrics(rules: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield from (f"  {rule:26} {', '.join(metrics)}" for rule, metrics in rules.items())
