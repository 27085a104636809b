"""`grpo-ext diagnose`: the likely faults of a run, each with the step, the metrics that show it, and the cure."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_ext.errors import ConfigError
from grpo_ext.report.doctor import Diagnosis, diagnosed


def run(argv: Sequence[str]) -> int:
    """Print the findings; return 0 without any, 1 with some, 2 where there is nothing to read."""
    parser = argparse.ArgumentParser(prog="grpo-ext diagnose", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of a run, finished or not")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    options = parser.parse_args(argv)
    try:
        diagnosis = diagnosed(options.run)
    except ConfigError as error:
        print(f"grpo-ext diagnose: {error}", file=sys.stderr)
        return 2
    print(json.dumps(diagnosis.to_dict(), indent=2) if options.json else "\n".join(_lines(diagnosis)))
    return 1 if diagnosis.findings else 0


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield from (f"Note: {note}" for note in diagnosis.run.notes if "line" in note)
    for finding in diagnosis.findings:
        yield f"step {finding.step}: {finding.rule.name}"
        for head, text in (("seen", finding.evidence), ("is", finding.rule.meaning), ("cure", finding.rule.cure)):
            yield from textwrap.wrap(text, 110, initial_indent=f"  {head:5}", subsequent_indent=" " * 7)
    if not diagnosis.findings:
        yield f"No fault found in {diagnosis.logs} logs, up to step {diagnosis.run.step}. Looked at:"
        yield from _metrics(diagnosis.looked_at)
    elif len(diagnosis.findings) > 1:
        yield "The first is the likely cause; the others may be its consequences."
    if diagnosis.unseen:
        yield "Not looked at, because these metrics were not logged:"
        yield from _metrics(diagnosis.unseen)


def _metrics(rules: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield from (f"  {rule:26} {', '.join(metrics)}" for rule, metrics in rules.items())
