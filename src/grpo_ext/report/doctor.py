"""The faults of a run: the rules that warn during training, over its whole log."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.report.reading import RunFolder, read_runs
from grpo_ext.trainer.checkpoints.finish import METRICS_FILE
from grpo_ext.trainer.diagnosis.rules import RULES, Finding, diagnose


@dataclass(frozen=True)
class Diagnosis:
    """Faults of one run, and what was looked at."""

    run: RunFolder
    logs: int
    findings: list[Finding]

    @property
    def looked_at(self) -> dict[str, list[str]]:
        """Each rule whose metrics were logged, with those metrics."""
        return {rule.name: list(rule.figures) for rule in RULES if rule.name not in self.unseen}

    @property
    def unseen(self) -> dict[str, list[str]]:
        """Each rule that says nothing here, with the metrics that were not logged."""
        logged = {name for row in self.run.log for name in row}
        return {rule.name: missing for rule in RULES if (missing := rule.missing(logged))}

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in JSON's types."""
        found = [
            {"fault": f.rule.name, "step": f.step, "evidence": f.evidence, "is": f.rule.meaning, "cure": f.rule.cure}
            for f in self.findings
        ]
        seen = {"looked_at": self.looked_at, "unseen": self.unseen}
        return {"run": str(self.run.folder), "logs": self.logs, "findings": found, **seen}


def diagnosed(folder: str | Path) -> Diagnosis:
    """Return the faults of a run, in order of their steps.

    Raises:
        ConfigError: no such folder, or no log of training in it.
    """
    (run,) = read_runs([folder])
    diagnosis = of_run(run)
    if not diagnosis.logs:
        raise ConfigError(
            [
                f"{run.folder}: nothing to diagnose: no log of a training step, neither in {METRICS_FILE} nor in a "
                "checkpoint. Name the output_dir of a run that has logged (logging_steps)."
                + "".join(f" {note}" for note in run.notes)
            ]
        )
    return diagnosis


def of_run(run: RunFolder) -> Diagnosis:
    """Return the faults of a run whose folder has been read."""
    rows = sorted((row for row in run.log if "reward" in row), key=lambda row: row["step"])
    return Diagnosis(run, len(rows), diagnose(rows))
