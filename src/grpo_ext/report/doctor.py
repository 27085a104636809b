"""What a run's log tells of its faults: the rules that warn during training, over the whole of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.errors import ConfigError
from grpo_ext.report.reading import RunFolder, read_runs
from grpo_ext.trainer.diagnosis.rules import Finding, diagnose
from grpo_ext.trainer.metrics_file import METRICS_FILE

NEEDED = {"sampling/mismatch": "the sampler beside the policy", "advantages/of_reward": "the rows as they train"}
"""Figures without which whole kinds of faults cannot be told, and of what they tell."""


@dataclass(frozen=True)
class Diagnosis:
    """Faults of one run, and what they were told from."""

    run: RunFolder
    logs: int
    findings: list[Finding]

    @property
    def unseen(self) -> list[str]:
        """What was not recorded, so that nothing is said of it."""
        logged = {name for row in self.run.log for name in row}
        return [f"{what} ({name} was not logged)" for name, what in NEEDED.items() if name not in logged]

    def to_dict(self) -> dict[str, Any]:
        """For a program."""
        found = [
            {"fault": f.rule.name, "step": f.step, "evidence": f.evidence, "is": f.rule.meaning, "cure": f.rule.cure}
            for f in self.findings
        ]
        return {"run": str(self.run.folder), "logs": self.logs, "findings": found, "unseen": self.unseen}


def diagnosed(folder: str | Path) -> Diagnosis:
    """The faults of a run, in the order in which its log tells of them.

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
    """The same of a run that has been read."""
    rows = sorted((row for row in run.log if "reward" in row), key=lambda row: row["step"])
    return Diagnosis(run, len(rows), diagnose(rows))
