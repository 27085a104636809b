"""Claims of papers, each with our experiment, figures and verdict: `make bench-claims`.

Writes results/claims.json, claims.md and a plot for each claim, claims/NAME.png. It may be stopped anywhere: figures
that the file has are not made again, unless `--again` is set. `--only NAME ...` makes some claims, `--exact` no
trained runs, `--page` only the page. Several may run side by side with other names.
"""

import argparse
import fcntl
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from claim import Claim, Verdict

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FOLDER = Path(__file__).parent
RESULT = FOLDER.parent / "results" / "claims.json"
PAGE = FOLDER.parent / "claims.md"
NAMES = [
    "length",
    "difficulty",
    "maxrl",
    "pass_at_k",
    "gdpo",
    "clip_higher",
    "mismatch",
    "variance",
    "rare_tokens",
    "merges",
    "turns",
]
"""Modules of this folder, in the order of the page; each has a `CLAIM`."""


def claim_of(name: str) -> Claim:
    found: Claim = importlib.import_module(name).CLAIM
    return found


def known() -> dict[str, Any]:
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def keep(name: str, **figures: Any) -> None:
    """Write figures of a claim; a run replaces the one of its key. Other processes may write others meanwhile."""
    with open(FOLDER / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole = known()
        part = whole.setdefault(name, {})
        if (run := figures.pop("run", None)) is not None:
            runs = [r for r in part.get("runs", []) if r["key"] != run["key"]] + [run]
            part["runs"] = sorted(runs, key=lambda r: json.dumps(r["key"]))
        part |= figures
        ordered = {n: whole[n] for n in NAMES if n in whole}
        written = RESULT.with_suffix(".new")
        written.write_text(json.dumps(ordered, indent=1) + "\n")
        written.replace(RESULT)


def make(name: str, again: bool, exact_only: bool) -> None:
    """Make the figures of a claim that are not there."""
    claim, had = claim_of(name), {} if again else known().get(name, {})
    if claim.exact and "exact" not in had:
        start = time.process_time()
        exact = claim.exact()
        keep(name, exact=exact, exact_seconds=round(time.process_time() - start, 1))
    if claim.train is None or exact_only:
        return
    done = [run["key"] for run in had.get("runs", [])]
    for key in (list(key) for key in claim.keys if list(key) not in done):
        start = time.process_time()
        run = {"key": key, **claim.train(*key)}
        keep(name, run=run | {"seconds": round(time.process_time() - start, 1)})
        print(f"{name} {key}: {time.process_time() - start:.0f} s", flush=True)


def part(claim: Claim, figures: dict[str, Any]) -> str:
    """Return the section of a claim."""
    exact, runs = figures.get("exact", {}), figures.get("runs", [])
    if len(runs) < len(claim.keys):
        made = f"{claim.paper}. {len(runs)} of {len(claim.keys)} runs are made."
        return "\n".join([f'<a id="{claim.name}"></a>', "", f"## {claim.title}", "", made, ""])
    picture(claim, exact, runs)
    verdict = claim.judge(exact, runs)
    seconds = figures.get("exact_seconds", 0) + sum(run["seconds"] for run in runs)
    cost = f"{seconds / 60:.0f} minutes of one core" if seconds >= 90 else f"{seconds:.0f} s"
    lines = [
        f'<a id="{claim.name}"></a>',
        "",
        f"## {claim.title}",
        "",
        f"**{worded(verdict, runs).capitalize()}.** {verdict.why}",
        "",
        f"*{claim.paper}:* {claim.statement}",
        "",
        f"*Experiment:* {claim.experiment}" + (f" {len(runs)} runs, {seeds_of(runs)} seeds." if runs else ""),
        "",
        f"*Would have counted as failure:* {claim.failure}",
        "",
        claim.table(exact, runs),
        "",
        f"![{claim.title}](claims/{claim.name}.png)",
        "",
        f"{cost}; `make bench-claims ONLY={claim.name}`.",
        "",
    ]
    return "\n".join(lines)


def seeds_of(runs: list[Any]) -> int:
    return len({run["key"][-1] for run in runs})


def worded(verdict: Verdict, runs: list[Any]) -> str:
    return f"{verdict.word} with {seeds_of(runs)} seeds" if runs else verdict.word


def picture(claim: Claim, exact: dict[str, Any], runs: list[Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(9, 4))
    claim.draw(figure, exact, runs)
    figure.tight_layout()
    figure.savefig(FOLDER / f"{claim.name}.png", dpi=100)
    plt.close(figure)


def page() -> str:
    """Return Markdown: a table of findings, then a section for each claim."""
    whole = known()
    rows, sections = [], []
    for name in NAMES:
        claim, figures = claim_of(name), whole.get(name, {})
        sections.append(part(claim, figures))
        ready = len(figures.get("runs", [])) >= len(claim.keys)
        finding = "not run to its end"
        if ready:
            runs = figures.get("runs", [])
            verdict = claim.judge(figures.get("exact", {}), runs)
            finding = f"{verdict.finding} ({worded(verdict, runs)})"
        rows.append(f"| [{claim.title}](#{name}) | {claim.paper} | {finding} |")
    seconds = sum(
        figures.get("exact_seconds", 0) + sum(run["seconds"] for run in figures.get("runs", []))
        for figures in whole.values()
    )
    head = [
        "# Published claims, checked",
        "",
        "What papers state about their losses and estimators, beside what we measure with one implementation:",
        "tiny models on a CPU, and exact sums where a policy can be enumerated. A finding speaks of these",
        "experiments, not of large models. Intervals are of 95 % over seeds, by Student's t.",
        "Claims that fail stay here. `make bench-claims` rewrites this page and resumes where it stopped;",
        f"all of it takes {seconds / 3600:.1f} hours of one core.",
        "",
        "| claim | source | what we found |",
        "|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join([*head, *sections])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--exact", action="store_true", help="no trained runs")
    parser.add_argument("--again", action="store_true", help="also make what results/claims.json has")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    for name in [] if given.page else given.only:
        make(name, given.again, given.exact)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
