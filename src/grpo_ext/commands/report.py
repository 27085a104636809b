"""`grpo-ext report`: a run, or several side by side, as one HTML file that needs no network."""

import argparse
from pathlib import Path

from grpo_ext.errors import ConfigError, Problem
from grpo_ext.report.page import write_report


def run(options: argparse.Namespace) -> int:
    """Write the report."""
    output = options.output or (options.runs[0] if len(options.runs) == 1 else Path()) / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):
        cure = "Let its name end in .html."
        raise ConfigError([Problem("--output", str(output), "the report is an HTML file", cure)])
    if output.is_dir():
        raise ConfigError([Problem("--output", str(output), "it is a folder", "Name a file.")])
    write_report(options.runs, output)
    print(f"Report: {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0
