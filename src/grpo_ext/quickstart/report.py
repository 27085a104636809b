"""The quickstart's report: learning curves as a picture, and what changed as a page of Markdown."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.quickstart.evaluate import Evaluation

Log = Sequence[Mapping[str, Any]]

PART_PREFIX, PART_SUFFIX = "rewards/", "/mean"
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#64748b")


@dataclass(frozen=True)
class Run:
    """What one quickstart run measured: held-out evaluations, the trainer's log history, seconds per phase."""

    before: Evaluation
    after: Evaluation
    log_history: Log
    loss: str
    seconds: Mapping[str, float]
    model_directory: str


def write_report(directory: str | os.PathLike[str], run: Run) -> Path:
    """Write curves.png and report.md into `directory`; returns the path of report.md.

    Without matplotlib the picture is left out and the page says so.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    drawn = draw_curves(directory / "curves.png", run)
    page = directory / "report.md"
    page.write_text(_page(run, drawn), encoding="utf-8")
    return page


def draw_curves(path: Path, run: Run) -> bool:
    """Save the picture; False without matplotlib."""
    try:
        figure = curves(run)
    except ImportError:
        return False
    figure.savefig(path, dpi=130)
    return True


def curves(run: Run) -> Any:
    """Reward and its parts, accuracy with the held-out marks, completion length, as a figure of matplotlib's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, accuracy, length = figure.subplots(1, 3)
    _draw_rewards(rewards, run.log_history)
    _draw_accuracy(accuracy, run)
    _draw_length(length, run.log_history)
    for axes in (rewards, accuracy, length):
        axes.set_xlabel("GRPO step")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(axes.lines) > 1:  # below, where no line can come
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
    return figure


def _series(log: Log, key: str) -> tuple[list[float], list[float]]:
    """Steps and values at which `key` was logged."""
    rows = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in rows], [value for _, value in rows]


def _parts(log: Log) -> list[str]:
    """Names of the reward functions, in the order in which they were logged."""
    keys = dict.fromkeys(key for entry in log for key in entry)
    return [
        k[len(PART_PREFIX) : -len(PART_SUFFIX)] for k in keys if k.startswith(PART_PREFIX) and k.endswith(PART_SUFFIX)
    ]


def _draw_rewards(axes: Any, log: Log) -> None:
    """Total reward, bold, over its parts."""
    axes.plot(*_series(log, "reward"), color="#111827", linewidth=2.4, label="total")
    for name, colour in zip(_parts(log), COLOURS * 3, strict=False):
        axes.plot(*_series(log, f"{PART_PREFIX}{name}{PART_SUFFIX}"), color=colour, linewidth=1.4, label=name)
    axes.set(title="Mean reward of the sampled completions", ylim=(0, None))


def _draw_accuracy(axes: Any, run: Run) -> None:
    """Sampled accuracy while training; greedy held-out accuracy before and after."""
    steps, values = _series(run.log_history, f"{PART_PREFIX}accuracy{PART_SUFFIX}")
    last = steps[-1] if steps else 1
    axes.plot(steps, values, color=COLOURS[0], linewidth=2, label="training problems, sampled")
    ends = [run.before.accuracy, run.after.accuracy]
    axes.plot([0, last], ends, "D", color="#dc2626", markersize=9, clip_on=False, zorder=5, label="held-out, greedy")
    for step, value, side in zip((0, last), ends, ("left", "right"), strict=True):
        offset = (9, -4) if side == "left" else (-9, -16)
        axes.annotate(f"{value:.0%}", (step, value), xytext=offset, textcoords="offset points", ha=side, weight="bold")
    axes.set(title="Accuracy", ylim=(0, 1.03))


def _draw_length(axes: Any, log: Log) -> None:
    """Mean completion length: it grows as the carries get their lines."""
    axes.plot(*_series(log, "completions/mean_length"), color=COLOURS[2], linewidth=2)
    axes.set(title="Mean completion length (tokens)")


def _page(run: Run, drawn: bool) -> str:
    """The Markdown page."""
    before, after, count = run.before, run.after, len(run.after.samples)
    picture = "![Learning curves](curves.png)" if drawn else "No picture: `pip install 'grpo-ext[plot]'` adds it."
    spent = " + ".join(f"{seconds:.0f} s {phase}" for phase, seconds in run.seconds.items())
    return f"""# A language model that learned to carry

Before GRPO the model solves **{before.accuracy:.1%}** of {count} held-out additions, after it **{after.accuracy:.1%}**
(greedy decoding; no held-out problem, nor its mirror b + a, was in any training).

{picture}

|  | before GRPO | after GRPO |
|---|---:|---:|
| held-out accuracy | {before.accuracy:.1%} | {after.accuracy:.1%} |
| well-formed completions | {before.format_rate:.1%} | {after.format_rate:.1%} |

**Loss.** `{run.loss}`

**Time.** {sum(run.seconds.values()):.0f} s: {spent}.

## What happened

A fresh transformer of 0.57 million parameters first imitated a careless teacher: right format, right sums of
two digits, but six carries in ten forgotten. Then GRPO rewarded nothing but the format and the final answer. Nobody
showed the model when to carry: it sampled eight attempts per problem and learned from the ones that came out right.

## The same held-out problems, before and after

{_comparison(run)}

## How to go on

- The trained model: `{run.model_directory}`, a folder that `AutoModelForCausalLM.from_pretrained` loads.
- Another loss: one word, `loss_type`, changes; `grpo-ext losses` lists them.
- Another reward, loss or advantage: the folder `examples/` of the repository has one runnable change each.
- A real model and real data: `grpo-ext recipes` lists the recipes.
"""


def _comparison(run: Run, count: int = 4) -> str:
    """HTML table of `count` problems, completions side by side: those that GRPO repaired first."""
    pairs = list(zip(run.before.samples, run.after.samples, strict=True))
    pairs.sort(key=lambda pair: (not (pair[1].correct and not pair[0].correct), pair[0].correct))
    rows = [
        f"<tr><td><code>{old.question}{old.solution}</code></td><td>{_cell(old)}</td><td>{_cell(new)}</td></tr>"
        for old, new in pairs[:count]
    ]
    return "\n".join(["<table>", "<tr><th>problem</th><th>before</th><th>after</th></tr>", *rows, "</table>"])


def _cell(sample: Any) -> str:
    """A completion as preformatted text with its verdict."""
    text = sample.completion.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    return f"{'✅ right' if sample.correct else '❌ wrong'}<br><code>{text}</code>"
