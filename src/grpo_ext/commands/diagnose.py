"""`grpo-ext diagnose`: the likely faults of a run, each with the step, the figures it is told from, and the cure."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_ext.errors import ConfigError
from grpo_ext.report.doctor import Diagnosis, diagnosed


def run(argv: Sequence[str]) -> int:
    """Print the findings; 0 where there are none, 1 where there are some, 2 where there is nothing to read."""
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
        for head, told in (("seen", finding.evidence), ("is", finding.rule.meaning), ("cure", finding.rule.cure)):
            yield from textwrap.wrap(told, 110, initial_indent=f"  {head:5}", subsequent_indent=" " * 7)
    if not diagnosis.findings:
        yield f"No fault is told by {diagnosis.logs} logs, up to step {diagnosis.run.step}."
    elif len(diagnosis.findings) > 1:
        yield "The first is the likely cause; what comes after it may be its consequence."
    if diagnosis.unseen:
        yield f"Nothing can be said of {' and '.join(diagnosis.unseen)}."
