"""Results of an evaluation: figures with intervals, for all prompts and each source of data; a file and a table."""

import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.data.rows import Row
from grpo_ext.errors import redacted
from grpo_ext.evaluation.estimators import Mean, maj_at_k, mean_of, mean_of_shares, pass_at_k
from grpo_ext.evaluation.evaluate import ANSWER_READ, FAILED, TURNS
from grpo_ext.rewards.library.math_judgement import by_value
from grpo_ext.safe_reading import read_json, write_text
from grpo_ext.tables import Table

EVALUATION = "evaluation"
"""In a run's folder: <set>/<model or step>.json and the samples beside it."""
_Figures = dict[str, Mean]
_NO_ANSWER = re.compile(r"|None|\[[A-Za-z ]+\]")
"""Answers that mean that none was found, such as `accuracy`'s [no answer] and [cut off]."""


@dataclass
class Result:
    """Figures of one model on one evaluation set.

    Args:
        set: the name of the set.
        model: hub id or folder.
        step: optimizer step of the run, if it was evaluated while training.
        settings: those of the set.
        figures: means over prompts, by name.
        by_source: the same for the prompts of each source.
        left_out: prompts that have no sample which the first judge could score.
        right: for each judge the share of right samples of each prompt, by its index in the set.
    """

    set: str
    model: str
    step: int | None
    settings: dict[str, Any]
    figures: _Figures
    by_source: dict[str, _Figures] = field(default_factory=dict)
    left_out: int = 0
    right: dict[str, dict[str, float]] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write a JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        by_source = {source: _as_json(figures) for source, figures in self.by_source.items()}
        plain = asdict(self) | {"figures": _as_json(self.figures), "by_source": by_source}
        write_text(path, json.dumps(plain, indent=2, default=str) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read a file of `write`.

        Raises:
            ValueError: it is another file.
        """
        try:
            plain = read_json(path)
            figures = {source: _from_json(of_source) for source, of_source in plain["by_source"].items()}
            return cls(**{**plain, "figures": _from_json(plain["figures"]), "by_source": figures})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a result of an evaluation ({error}). Evaluate again.") from None


def _as_json(means: _Figures) -> dict[str, dict[str, float | None]]:
    return {name: {k: None if math.isinf(v) else v for k, v in mean._asdict().items()} for name, mean in means.items()}


def _from_json(plain: Mapping[str, Mapping[str, Any]]) -> _Figures:
    infinite: dict[str, Any] = {"low": -math.inf, "high": math.inf}
    return {
        name: Mean(**{end: infinite[end] if value is None else value for end, value in mean.items()})
        for name, mean in plain.items()
    }


def result(chosen: EvalSet, samples: Sequence[Row], *, model: str, step: int | None = None) -> Result:
    """Return the figures of an evaluation's samples."""
    prompts = per_prompt(chosen, samples)
    sources = sorted({str(prompt["source"]) for prompt in prompts if prompt["source"] is not None})
    settings = {name: value for name, value in asdict(chosen).items() if name not in ("name", "rewards", "plays")}
    settings |= {"rewards": [asdict(spec) for spec in chosen.rewards], "judge": chosen.judges, "k": chosen.ks}
    return Result(
        chosen.name,
        model,
        step,
        redacted(settings),
        figures(prompts),
        {source: figures([p for p in prompts if str(p["source"]) == source]) for source in sources},
        sum(chosen.judges[0] not in prompt["right"] for prompt in prompts),
        {
            judge: {str(i): prompt["right"][judge] for i, prompt in enumerate(prompts) if judge in prompt["right"]}
            for judge in chosen.judges
        },
    )


def per_prompt(chosen: EvalSet, samples: Sequence[Row]) -> list[Row]:
    """Return the figures of each prompt by name; `right` has the judges that could score any of its samples.

    A sample that a judge could not score beside others that it could, such as a truncated one, is not right.
    """
    groups: dict[int, list[Row]] = {}
    for sample in samples:
        groups.setdefault(sample["index"], []).append(sample)
    rows = []
    for group in groups.values():
        right: dict[str, float] = {}
        shares: dict[str, float] = {}
        means = _group_means(chosen, group)
        for judge in chosen.judges:
            values = [sample[f"rewards/{judge}"] for sample in group]
            if any(value is not None for value in values):
                judged = [value is not None and value >= chosen.threshold for value in values]
                right[judge] = sum(judged) / len(judged)
                first = judge == chosen.judges[0]
                named = _shares(chosen, group, judged, votes=first)
                shares |= named if first else {f"{judge}/{name}": share for name, share in named.items()}
                if first and any(judged):
                    means["tokens_of_right"] = fmean(compress((sample["tokens"] for sample in group), judged))
        rows.append({"source": group[0].get(chosen.source_column), "right": right, "shares": shares, "means": means})
    return rows


def _shares(chosen: EvalSet, group: Sequence[Row], right: Sequence[bool], *, votes: bool) -> dict[str, float]:
    shares = {f"avg@{len(group)}": sum(right) / len(right)}
    ks = [k for k in chosen.ks if k > 1]
    shares |= {f"pass@{k}": pass_at_k(len(group), sum(right), k) for k in ks}
    if votes and any(ANSWER_READ in sample for sample in group):
        answers = [
            None if _NO_ANSWER.fullmatch(str(sample.get(ANSWER_READ) or "")) else sample[ANSWER_READ]
            for sample in group
        ]
        shares |= {f"maj@{k}": maj_at_k(_votes(answers, right), right, k) for k in ks}
        shares["answered"] = sum(answer is not None for answer in answers) / len(answers)
    return shares


def _votes(answers: Sequence[Any], right: Sequence[bool]) -> list[Hashable]:
    """Return the votes of samples, by value: answers that are always right are one, and so are 1/2 and 0.5."""
    wrong = {answer for answer, is_right in zip(answers, right, strict=True) if not is_right}
    values = by_value(wrong - {None})
    return [answer if answer is None else values.get(answer, True) for answer in answers]


def _group_means(chosen: EvalSet, group: Sequence[Row]) -> dict[str, float]:
    means = {}
    for column in (*(f"rewards/{name}" for name in chosen.reward_names), "tokens", "truncated", TURNS, FAILED):
        values = [float(sample[column]) for sample in group if sample.get(column) is not None]
        if values:
            means[column] = sum(values) / len(values)
    return means


def figures(prompts: Sequence[Row]) -> _Figures:
    """Return the means over prompts with their intervals."""
    means = {}
    for kind in ("shares", "means"):
        for name in dict.fromkeys(name for prompt in prompts for name in prompt[kind]):
            values = [prompt[kind][name] for prompt in prompts if name in prompt[kind]]
            means[name] = (mean_of_shares if min(values) >= 0 and max(values) <= 1 else mean_of)(values)
    return means


def logged_figures(result: Result) -> dict[str, float]:
    """Return the figures as a tracker gets them, `eval_<set>/<figure>`, with both ends of the intervals of shares."""
    logs = {}
    for name, mean in result.figures.items():
        logs[f"eval_{result.set}/{name}"] = mean.mean
        if "@" in name:
            logs |= {f"eval_{result.set}/{name}_low": mean.low, f"eval_{result.set}/{name}_high": mean.high}
    for source, of_source in result.by_source.items():
        logs |= {f"eval_{result.set}/{source}/{name}": mean.mean for name, mean in of_source.items() if "@" in name}
    return logs


def table(results: Sequence[Result]) -> Table:
    """Return a table with a row for each figure and a column for each model."""
    first = results[0]
    prompts = max((mean.prompts for mean in first.figures.values()), default=0)
    table = Table(title=f"{first.set}: {prompts} prompts x {first.settings['samples']}", title_justify="left")
    table.add_column("figure")
    for result in results:
        table.add_column(
            result.model if result.step is None else f"{result.model}, step {result.step}", justify="right"
        )
    for name in first.figures:
        table.add_row(name, *(_cell(result.figures.get(name)) for result in results))
    for source, of_source in first.by_source.items():
        for name in (name for name in of_source if "@" in name):
            table.add_row(f"{source}: {name}", *(_cell(r.by_source.get(source, {}).get(name)) for r in results))
    return table


def _cell(mean: Mean | None) -> str:
    if mean is None:
        return ""
    return f"{mean.mean:.3f}" if math.isinf(mean.low) else f"{mean.mean:.3f}  ({mean.low:.3f} to {mean.high:.3f})"


def gain(before: Mapping[str, float], after: Mapping[str, float]) -> Mean:
    """Return the mean difference of a judge's shares of right samples (`Result.right`), paired by prompt."""
    return mean_of([after[i] - before[i] for i in before if i in after])


def differences(results: Sequence[Result]) -> list[str]:
    """Return how much more is right than in the first result, paired by prompt, which intervals apart cannot show."""
    first, *others = results
    lines = []
    for other in others:
        for judge in first.right:
            difference = gain(first.right[judge], other.right[judge])
            interval = f"{difference.mean:+.3f}  ({difference.low:+.3f} to {difference.high:+.3f})"
            lines.append(f"{other.model}, right by {judge}: {interval}, prompt by prompt over {difference.prompts}")
    return lines
