"""Diagnosis of a run: the rules that warn during training, over its whole log."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.report.reading import RunFolder, read_runs
from grpo_ext.trainer.checkpoints.finish import METRICS_FILE
from grpo_ext.trainer.diagnosis.rules import RULES, Finding, diagnose


@dataclass(frozen=True)
class Diagnosis:
    """Findings about one run, and the rules that were checked."""

    run: RunFolder
    logs: int
    findings: list[Finding]

    @property
    def checked(self) -> dict[str, list[str]]:
        """Each rule whose metrics were logged, with those metrics."""
        return {rule.name: list(rule.figures) for rule in RULES if rule.name not in self.unchecked}

    @property
    def unchecked(self) -> dict[str, list[str]]:
        """Each rule that could not be checked, with the metrics that were not logged."""
        logged = {name for row in self.run.log for name in row}
        return {rule.name: missing for rule in RULES if (missing := rule.missing(logged))}

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis in JSON's types."""
        found = [
            {"fault": f.rule.name, "step": f.step, "evidence": f.evidence, "is": f.rule.meaning, "cure": f.rule.cure}
            for f in self.findings
        ]
        rules = {"looked_at": self.checked, "unseen": self.unchecked}
        return {"run": str(self.run.folder), "logs": self.logs, "findings": found, **rules}


def diagnosed(folder: str | Path) -> Diagnosis:
    """Return the findings about a run, in order of their steps.

    Raises:
        ConfigError: the folder does not exist, or holds no log of training.
    """
    (run,) = read_runs([folder])
    diagnosis = of_run(run)
    if not diagnosis.logs:
        reason = f"no log of a training step was found, neither in {METRICS_FILE} nor in a checkpoint"
        cure = " ".join(["Name the output_dir of a run that has logged (logging_steps).", *run.notes])
        raise ConfigError([Problem(str(run.folder), ABSENT, reason, cure)])
    return diagnosis


def of_run(run: RunFolder) -> Diagnosis:
    """Return the diagnosis of a run whose folder has been read."""
    rows = sorted((row for row in run.log if "reward" in row), key=lambda row: row["step"])
    return Diagnosis(run, len(rows), diagnose(rows))
