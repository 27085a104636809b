"""What an evaluation found: figures with intervals, for all prompts and each source of data; a file and a table."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.errors import redacted
from grpo_ext.evaluation.estimators import maj_at_k, pass_at_k
from grpo_ext.evaluation.evaluate import FAILED, READ, TURNS, Sample
from grpo_ext.evaluation.intervals import Mean, mean_of, mean_of_shares
from grpo_ext.rewards.protocol import judge as default_judge

FOLDER = "evaluation"
"""In a run's folder: <set>/<model or step>.json and the samples beside it."""
Figures = dict[str, Mean]
_NOTHING = re.compile(r"|None|\[[A-Za-z ]+\]")
"""What a judge says where it found no answer, such as `accuracy`'s [no answer] and [cut off]."""


@dataclass
class Result:
    """An evaluation set and what one model made of it."""

    set: str
    model: str
    step: int | None
    settings: dict[str, Any]
    figures: Figures
    by_source: dict[str, Figures] = field(default_factory=dict)
    left_out: int = 0
    """Prompts of which the judge could score no sample."""
    right: dict[str, float] = field(default_factory=dict)
    """Of each prompt, by its place in the set, the share of right samples."""

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = asdict(self)
        plain["figures"] = _plain(self.figures)
        plain["by_source"] = {source: _plain(figures) for source, figures in self.by_source.items()}
        path.write_text(json.dumps(plain, indent=2, default=str) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Result":
        """What `write` has written.

        Raises:
            ValueError: it is no such file.
        """
        try:
            plain = json.loads(path.read_text())
            figures = {source: _means(found) for source, found in plain["by_source"].items()}
            return cls(**{**plain, "figures": _means(plain["figures"]), "by_source": figures})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: no result of an evaluation ({error}). Evaluate again.") from None


def result(chosen: EvalSet, samples: Sequence[Sample], *, model: str, step: int | None = None) -> Result:
    """The figures of an evaluation."""
    prompts = per_prompt(chosen, samples)
    sources = sorted({str(prompt["source"]) for prompt in prompts if prompt["source"] is not None})
    settings = {name: value for name, value in asdict(chosen).items() if name not in ("name", "rewards", "plays")}
    settings |= {"rewards": [asdict(spec) for spec in chosen.rewards], "judge": judge(chosen), "k": chosen.ks}
    return Result(
        chosen.name,
        model,
        step,
        redacted(settings),
        figures(prompts),
        {source: figures([p for p in prompts if str(p["source"]) == source]) for source in sources},
        sum(not prompt["judged"] for prompt in prompts),
        {str(i): share for i, prompt in enumerate(prompts) for share in list(prompt["shares"].values())[:1]},
    )


def judge(chosen: EvalSet) -> str:
    """The reward that says what is right."""
    return chosen.judge or default_judge(chosen.reward_names)


def per_prompt(chosen: EvalSet, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """For each prompt its figures by name; `judged` is false where the judge could score none of its samples.

    A sample that the judge could not score beside others that it could, such as a truncated one, is not right.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["index"], []).append(sample)
    column = f"rewards/{judge(chosen)}"
    found = []
    for group in groups.values():
        values = [sample[column] for sample in group]
        right = [value is not None and value >= chosen.threshold for value in values]
        prompt = {"source": group[0].get(chosen.source_column), "judged": any(v is not None for v in values)}
        shares = _shares(chosen, group, right) if prompt["judged"] else {}
        found.append({**prompt, "shares": shares, "means": _group_means(chosen, group)})
    return found


def _shares(chosen: EvalSet, group: Sequence[Sample], right: Sequence[bool]) -> dict[str, float]:
    shares = {f"avg@{len(group)}": sum(right) / len(right)}
    ks = [k for k in chosen.ks if k > 1]
    shares |= {f"pass@{k}": pass_at_k(len(group), sum(right), k) for k in ks}
    if any(READ in sample for sample in group):
        answers = [None if _NOTHING.fullmatch(str(sample.get(READ) or "")) else sample[READ] for sample in group]
        shares |= {f"maj@{k}": maj_at_k(answers, right, k) for k in ks}
        shares["answered"] = sum(answer is not None for answer in answers) / len(answers)
    return shares


def _group_means(chosen: EvalSet, group: Sequence[Sample]) -> dict[str, float]:
    means = {}
    for column in (*(f"rewards/{name}" for name in chosen.reward_names), "tokens", "truncated", TURNS, FAILED):
        known = [float(sample[column]) for sample in group if sample.get(column) is not None]
        if known:
            means[column] = sum(known) / len(known)
    return means


def figures(prompts: Sequence[Mapping[str, Any]]) -> Figures:
    """Means over prompts with their intervals."""
    found = {}
    for kind, mean in (("shares", mean_of_shares), ("means", mean_of)):
        for name in dict.fromkeys(name for prompt in prompts for name in prompt[kind]):
            found[name] = mean([prompt[kind][name] for prompt in prompts if name in prompt[kind]])
    return found


def flat(found: Result) -> dict[str, float]:
    """Figures as a tracker gets them, `eval_<set>/<figure>`, with both ends of the intervals of shares."""
    logs = {}
    for name, mean in found.figures.items():
        logs[f"eval_{found.set}/{name}"] = mean.mean
        if "@" in name:
            logs |= {f"eval_{found.set}/{name}_low": mean.low, f"eval_{found.set}/{name}_high": mean.high}
    for source, of_source in found.by_source.items():
        logs |= {f"eval_{found.set}/{source}/{name}": mean.mean for name, mean in of_source.items() if "@" in name}
    return logs


def table(results: Sequence[Result]) -> Any:
    """A rich table: a line for each figure, a column for each model."""
    from rich.table import Table

    first = results[0]
    drawn = Table(title=f"{first.set}: {_prompts(first)} prompts x {first.settings['samples']}", title_justify="left")
    drawn.add_column("figure")
    for found in results:
        drawn.add_column(found.model if found.step is None else f"{found.model}, step {found.step}", justify="right")
    for name in first.figures:
        drawn.add_row(name, *(_cell(found.figures.get(name)) for found in results))
    for source, of_source in first.by_source.items():
        for name in (name for name in of_source if "@" in name):
            drawn.add_row(f"{source}: {name}", *(_cell(r.by_source.get(source, {}).get(name)) for r in results))
    return drawn


def difference(before: Result, after: Result) -> str:
    """How much more is right after than before, prompt by prompt: what two separate intervals cannot tell."""
    both = [after.right[i] - before.right[i] for i in before.right if i in after.right]
    found = mean_of(both)
    name = next(iter(after.figures))
    return f"{name}: {found.mean:+.3f}  ({found.low:+.3f} to {found.high:+.3f}), prompt by prompt over {len(both)}"


def _prompts(found: Result) -> int:
    return max((mean.prompts for mean in found.figures.values()), default=0)


def _cell(mean: Mean | None) -> str:
    if mean is None:
        return ""
    return f"{mean.mean:.3f}" if math.isinf(mean.low) else f"{mean.mean:.3f}  ({mean.low:.3f} to {mean.high:.3f})"


def _plain(found: Figures) -> dict[str, Any]:
    return {name: {k: None if math.isinf(v) else v for k, v in mean._asdict().items()} for name, mean in found.items()}


def _means(plain: Mapping[str, Mapping[str, Any]]) -> Figures:
    def end(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    return {
        name: Mean(m["mean"], end(m["low"], -math.inf), end(m["high"], math.inf), m["prompts"])
        for name, m in plain.items()
    }
