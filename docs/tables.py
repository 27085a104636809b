"""Rewrite the tables of README.md, CONTRIBUTING.md, docs/ and benchmarks/: `python docs/tables.py` (`make tables`).

The tables come from the code and from benchmarks/results. A table is between `<!-- name -->` and `<!-- /name -->`,
where name is a key of `TABLES`. `--check` only lists the files that are out of date, and fails if there are any.
"""

import ast
import dataclasses
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

from formulas import mathematics
from grpo_ext.commands.lists import by_entry as entries
from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.declarations import AS_THE_ROW_SAYS
from grpo_ext.config.setting import Change
from grpo_ext.config.settings import row_of, settings_changed_by
from grpo_ext.config.spec import Spec
from grpo_ext.evaluation.estimators import mean_of
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.objective.objective import resolve
from grpo_ext.objective.ratios import ratios
from grpo_ext.objective.surrogates import surrogates
from grpo_ext.recipe.parts import MODEL, OURS, REWARDS_AND_DATA, TRLS, subjects
from grpo_ext.rewards.catalogue import rewards
from grpo_ext.rewards.signatures import TRL_ARGUMENTS
from grpo_ext.trainer.diagnosis.recording import FIGURES
from grpo_ext.trainer.diagnosis.rules import RULES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DRIFT = "sampling/drift_max"
Rows = Iterable[tuple[str, ...]]


def table(header: tuple[str, ...], rows: Rows) -> str:
    """Return a Markdown table, with pipes escaped."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Return `text` as inline code, or an empty text."""
    return f"`{text}`" if text else ""


def by_entry(registry: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries by all of their names: "`grpo`, `deepseek_math`"."""
    return {", ".join(map(code, names)): entry for names, entry in entries(registry)}


def plain(text: str) -> str:
    """Return `text` on one line, with < escaped outside of inline code."""
    pieces = " ".join(text.split()).split("`")
    return "`".join(p if i % 2 else p.replace("<", "&lt;") for i, p in enumerate(pieces))


def summary(function: Any) -> str:
    """Return the first paragraph of a docstring."""
    return plain((inspect.getdoc(function) or "").split("\n\n")[0])


def papers(function: Any) -> str:
    """Return links to the arXiv ids in a docstring."""
    found = dict.fromkeys(re.findall(r"\d{4}\.\d{5}", inspect.getdoc(function) or ""))
    return ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in found)


def options(function: Any, without: tuple[str, ...] = ()) -> str:
    """Return the keyword-only parameters, which a recipe may set, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in without}
    shown = (name if value is inspect.Parameter.empty else f"{name}={value!r}" for name, value in names.items())
    return ", ".join(map(code, shown))


def loss_table() -> str:
    """Return a table of loss_type, formula and paper."""
    rows = ((names, mathematics(row.formula), row.paper) for names, row in by_entry(losses).items())
    return table(("`loss_type`", "what is minimised", "source"), rows)


def axes_table() -> str:
    """Return a table of the axes of each loss."""
    rows = []
    for names, row in by_entry(losses).items():
        surrogate = f"{row.surrogate}({', '.join(f'{k}={v}' for k, v in row.options.items())})"
        estimator = f"{row.advantage}({', '.join(f'{k}={v}' for k, v in row.advantage_kwargs.items())})"
        kl = f"{row.kl}, {row.kl_placement}"
        cells = (surrogate, row.ratio, estimator.removesuffix("()"), kl, row.aggregation)
        rows.append((names, *map(code, cells), "yes" if row.trl else ""))
    headers = ("surrogate", "ratio", "advantage", "KL, if `beta` > 0", "aggregation", "TRL's name too")
    return table(("`loss_type`", *headers), rows)


def defaults_table() -> str:
    """Return a table of the losses of stock TRL whose defaults differ here."""
    rows = []
    for names, row in by_entry(losses).items():
        if row.trl:
            paper, stock = (settled(names.split("`")[1], loss_defaults) for loss_defaults in ("paper", "trl"))
            differing = [axis for axis in paper if axis not in stock or paper[axis] != stock[axis]]
            rows.append((names, *(listed(axes, differing) for axes in (paper, stock))))
    return table(("`loss_type`", "`loss_defaults: paper` (default)", "`loss_defaults: trl`"), rows)


def settled(loss_type: str, loss_defaults: str) -> dict[str, Any]:
    """Return every axis of a loss in a recipe that sets only its name."""
    unset = {f.name: f.default for f in dataclasses.fields(GRPOExtArguments)}
    objective = resolve(SimpleNamespace(**unset | {"loss_type": loss_type, "loss_defaults": loss_defaults}))
    names = {"ratio": "importance_sampling_level", "kl": "kl_estimator", "advantage": "advantage_estimator"}
    axes = {names[axis]: getattr(objective, axis) for axis in names}
    for name, value in objective.options.items():
        if any(Spec.of_function(objective.row.function).value_problems(name, name, value)):
            continue  # the default is refused: it must be set
        shown = f"{value:g}" if isinstance(value, float) else value  # float32's 1.05 is 1.05
        axes["epsilon" if name == "epsilon_low" else name] = shown
    return axes


def listed(axes: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return axes as a recipe writes them; one without a default must be set."""
    return ", ".join(code(f"{name}: {axes[name]}") if name in axes else f"{code(name)} must be set" for name in names)


def described(registry: Mapping[str, Any], key: str, without: tuple[str, ...] = ()) -> str:
    """Return a table of a registry of functions: name, first paragraph, options, papers."""
    rows = [(n, summary(f), options(f, without), papers(f)) for n, f in by_entry(registry).items()]
    headers = (code(key), "what it is", "options", "paper")
    used = [i for i in range(4) if i < 2 or any(row[i] for row in rows)]
    return table(tuple(headers[i] for i in used), (tuple(row[i] for i in used) for row in rows))


def reward_table() -> str:
    """Return a table of rewards: name, meaning, required columns, options."""
    rows = []
    # by module, so that the order does not depend on which was imported first
    for names, function in sorted(by_entry(rewards).items(), key=lambda entry: entry[1].__module__):
        parameters = inspect.signature(function).parameters.values()
        columns = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in TRL_ARGUMENTS]
        rows.append((names, summary(function), ", ".join(map(code, columns)), options(function)))
    return table(("name", "what it gives", "needs column", "options"), rows)


CHANGES = {
    Change.NOTHING: "allowed",
    Change.ROUNDING: "allowed: rounding differs",
    Change.LENGTH: "allowed: the run ends elsewhere",
    Change.SPLIT: "allowed: with the same rows in a step",
    Change.MODEL: "allowed: for the same weights",
    Change.ANOTHER_RUN: "",
}


def argument_tables(title: str) -> str:
    """Return a table of every argument of a subject of `recipe.help`, with its default and what it declares."""
    rows = []
    for f in subjects()[title]:
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        default = "" if default is dataclasses.MISSING else str(getattr(default, "value", default))
        row = row_of(f)
        choices = None if row.choices is None else list(row.choices)
        allowed = str(row.within or "") if choices is None else ", ".join(code(str(name)) for name in choices)
        if row.unused:
            allowed = f"only the default: {row.unused}"
        elif row.function:
            allowed += ", `./file.py:function`"
        meaning = plain(str(f.metadata.get("help", "")).replace("%%", "%"))
        if title in (MODEL, TRLS):
            meaning = re.split(r"(?<=[a-z0-9`)'\"]\.) (?=[A-Z`])", meaning)[0]  # the page has where the rest is
        shown = "of the row" if AS_THE_ROW_SAYS in meaning else code(default)
        meaning = meaning.replace(AS_THE_ROW_SAYS, "").strip()
        rows.append((code(f.name), shown, allowed, CHANGES[row.change], meaning))
    return table(("argument", "default", "values", "in a resume", "meaning"), rows)


def splits_table() -> str:
    """Return a table of `make bench-splits`: largest relative difference of a gradient, by loss and engine."""
    cases = json.loads((RESULTS / "splits.json").read_text())["cases"]
    columns = list(dict.fromkeys((case["launch"], case["stock"]) for case in cases))
    columns.sort(key=lambda column: column[1])
    rows = []
    for loss in dict.fromkeys(case["loss"] for case in cases):
        cells = []
        for column in columns:
            found = [c["difference"] for c in cases if c["loss"] == loss and (c["launch"], c["stock"]) == column]
            cells.append(f"{max(found):.0e}" if found else "")
        rows.append((code(loss), *cells))
    names = {"one": "1 process", "ddp": "2, DDP", "fsdp2": "2, FSDP2"} | {
        f"zero{n}": f"2, ZeRO-{n}" for n in (1, 2, 3)
    }
    heads = (f"stock TRL, {names[launch]}" if stock else names[launch] for launch, stock in columns)
    return table(("`loss_type`", *heads), rows)


def house_table() -> str:
    """Return a table of the packages in order of their layers, with their docstrings."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = []
    for name in contracts[0]["layers"]:
        wing = ROOT / "src" / "grpo_ext" / name
        path = wing / "__init__.py" if wing.is_dir() else wing.with_suffix(".py")
        inside, _, knows = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
        rows.append((code(f"{name}/" if wing.is_dir() else path.name), plain(inside), plain(knows)))
    return table(("from the top floor to the ground", "what is inside", "what it may know, where to begin"), rows)


def ratio(median: float, spread: tuple[float, float] | None = None) -> tuple[str, str]:
    """Return two cells, median and range."""
    return f"**{median:.2f}**", f"{spread[0]:.2f} to {spread[1]:.2f}" if spread else ""


def resumable_table() -> str:
    """Return a table of the settings that may change when a run resumes, by effect."""
    of_rewards = {"rewards: timeout, retries, isolate, independent"}
    kinds = {
        "listed; changes no trained number": settings_changed_by(Change.NOTHING) | of_rewards,
        "listed; numbers differ by rounding": settings_changed_by(Change.ROUNDING),
        "honoured; the learning-rate schedule runs to the new end": settings_changed_by(Change.LENGTH),
        "honoured while a step and a generation have as many rows as before; random streams are other ones": (
            settings_changed_by(Change.SPLIT)
        ),
        "free, where the base model is the same": settings_changed_by(Change.MODEL),
    }
    return table(
        ("changed", "what happens"), [(", ".join(map(code, sorted(keys))), kind) for kind, keys in kinds.items()]
    )


def fault_table() -> str:
    """Return a table of the rules of the diagnosis."""
    rows = ((rule.name, rule.seen, plain(rule.meaning), plain(rule.cure)) for rule in RULES)
    return table(("fault", "what the log shows", "what it is", "what to do"), rows)


def figure_table() -> str:
    """Return a table of the metrics that only the diagnosis reads."""
    return table(("metric", "what it is"), ((code(name), plain(meaning)) for name, meaning in FIGURES.items()))


def sampler_results() -> dict[str, Any]:
    """Return the results of `make bench-sampler`."""
    found: dict[str, Any] = json.loads((RESULTS / "sampler_correction.json").read_text())
    return found


def sampler_kept_table() -> str:
    """Return a table of the share of the gradient that is left, by noise and length."""
    rows, lengths = [], {row["tokens"]: f"{row['tokens']:,}" for row in sampler_results()["kept"]}
    for deviation in dict.fromkeys(row["deviation"] for row in sampler_results()["kept"]):
        of_it = [row for row in sampler_results()["kept"] if row["deviation"] == deviation]
        for title, key in (("TRL's default", "stock"), ("ours", "ours")):
            rows.append((f"{deviation:g} nats, {title}", *(f"{row[key]:.2f}" for row in of_it)))
    return table(("tokens", *lengths.values()), rows)


def sampler_bias_table() -> str:
    """Return a table of the relative error of the expected gradient, by rule and distance of the sampler."""
    found = sampler_results()
    shown = [(row["rule"], *("0" if x < 1e-12 else f"{x:.2g}" for x in row["bias"])) for row in found["bias"]]
    return table(("rule", *(f"logits off by {x:g}" for x in found["distances"])), shown)


def sampler_precision_table() -> str:
    """Return a table of how far sampler and policy differ in a healthy run, by engine and dtype."""
    rows = json.loads((RESULTS / "sampler_precision.json").read_text())["rows"]
    heads = ("engine, dtypes", *(f"`sampling/{name}`" for name in ("mismatch", "bias", "ess")))
    figures = (
        (f"{row['sampling/mismatch']:.2g}", f"{row['sampling/bias']:.0e}", f"{row['sampling/ess']:.4f}")
        for row in rows.values()
    )
    return table(heads, [(name, *cells) for name, cells in zip(rows, figures, strict=True)])


def sampler_training_table() -> str:
    """Return a table of what a model learned with each rule from a sampler with rounded weights."""
    runs = json.loads((RESULTS / "sampler_training.json").read_text())
    rows = []
    keys = dict.fromkeys((run["updates"], run["bits"], run["rule"]) for run in runs)
    for key in sorted(keys, key=lambda key: (key[0], -key[1])):
        of_it, (updates, bits, rule) = [run for run in runs if (run["updates"], run["bits"], run["rule"]) == key], key
        figures = [run["figures"] for run in of_it]
        cells = [f"{mean(figure['sampling/mismatch'] for figure in figures):.2g}"]
        for kind in ("short", "long"):
            cells.append(", ".join(f"{run['after'][kind]:.2f}" for run in of_it))
            cells.append(f"{mean(figure.get(f'sampling/kept_{kind}', 1.0) for figure in figures):.2f}")
        several = f", {updates} updates" if updates > 1 else ""
        rows.append(
            (f"{bits} bits{several}, {rule}", *cells, f"{mean(figure['sampling/ess'] for figure in figures):.3g}")
        )
    heads = ("`mismatch`", "short answers", "`kept_short`", "long answers", "`kept_long`", "`ess`")
    return table(("weights and rule", *heads), rows)


def sampler_engines_table() -> str:
    """Return a table of what a model learned from vLLM and from transformers, by the same recipe."""
    rows, runs = [], json.loads((RESULTS / "sampler_engines.json").read_text())
    for settings in dict.fromkeys(run["settings"] for run in runs):
        first: list[float] = []
        for engine in dict.fromkeys(run["engine"] for run in runs):
            of_it = [run for run in runs if (run["settings"], run["engine"]) == (settings, engine)]
            after, drifts = [run["after"] for run in of_it], [run["figures"].get(DRIFT, 0.0) for run in of_it]
            shares = (", ".join(f"{run[when]:.3f}" for run in of_it) for when in ("before", "after"))
            first, apart = first or after, [its - theirs for its, theirs in zip(after, first or after, strict=True)]
            cells = (interval(mean_of(apart)._asdict(), "+"), f"{max(drifts):.0e}") if any(drifts) else ("", "")
            rows.append(
                (
                    code(settings) if ":" in settings else settings,
                    engine,
                    *shares,
                    interval(mean_of(after)._asdict()),
                    *cells,
                )
            )
    heads = ("before", "after", "mean", "less that of transformers, by seed", "largest drift")
    return table(("setting", "engine", *heads), rows)


def agents_table() -> str:
    """Return a table of agents that were trained as they are."""
    lines = (RESULTS / "real_agents.jsonl").read_text().splitlines()
    rows = []
    for run in map(json.loads, lines):
        attempts = run["attempts"]
        played = [one for one in attempts if not one["failure"]]
        read = [tokens for one in played for tokens in one["read"]]
        paid = [one["reward"] for one in played if one["reward"] is not None]
        cells = (
            str(run["steps"]),
            f"{len(attempts) - len(played)} of {len(attempts)}",
            f"{mean(one['turns'] for one in played):.1f}",
            f"{mean(one['contexts'] for one in played):.1f}",
            f"{min(read):,} to {max(read):,}",
            f"{sum(one['sampled'] for one in played):,}",
            "yes" if all(one["same"] for one in played) else "no",
            f"{sum(paid):.0f} of {len(paid)}",
        )
        rows.append((run["agent"], run["version"], run["dialect"], run["model"], *cells))
    columns = ("steps", "lost episodes", "turns", "contexts", "tokens read by a turn", "tokens sampled")
    return table(("agent", "version", "dialect", "model", *columns, "all trained, as sampled", "paid"), rows)


def interval(mean: dict[str, float], sign: str = "") -> str:
    """Return a mean with its interval."""
    return f"{mean['mean']:{sign}.3f} ({mean['low']:{sign}.3f} to {mean['high']:{sign}.3f})"


def curves() -> dict[str, Any]:
    """Return what `make bench-curves` found."""
    return json.loads((RESULTS / "real_curves.json").read_text())


def arms_table() -> str:
    """Return a table of runs of a real model: steps, hours, tokens, what is cut off, figures of held-out problems."""
    found, rows = curves(), []
    for name, arm in found["sums"].items():
        steps, tokens = arm["steps"], arm["figures"]["test"].get("tokens_of_right")
        cells = (
            str(len(steps)),
            f"{steps[-1]['hours']:.2f}" if steps else "",
            f"{tokens['mean']:.1f}" if tokens else "none is right",
            f"{max(figures['truncated']['mean'] for figures in arm['figures'].values()):.3f}",
            *(interval(arm["figures"][shown["set"]][shown["name"]]) for shown in found["shown"]),
        )
        rows.append((name, *cells))
    titles = (shown["title"] for shown in found["shown"])
    return table(("", "steps", "hours", "tokens of a right answer", "most cut off", *titles), rows)


def gains_table() -> str:
    """Return a table of what the runs of a real model gained, prompt by prompt."""
    arms = {name: arm["gains"] for name, arm in curves()["sums"].items() if arm["steps"]}
    judges = {"strict": "accuracy", "lenient": "last_number"}
    heads = (f"{part}, {judge}" for part in next(iter(arms.values())) for judge in judges)
    rows = (
        (name, *(interval(part[judge], sign="+") for part in gains.values() for judge in judges.values()))
        for name, gains in arms.items()
    )
    return table(("", *heads), rows)


def gsm8k_table() -> str:
    """Return a table of a real model on GSM8K."""
    rows = (
        (recipe, str(at["step"]), interval(at["right"]), f"{at['tokens']['mean']:.0f}", f"{at['cut off']['mean']:.2f}")
        for recipe, curve in curves()["gsm8k"].items()
        for at in curve["held out"]
    )
    return table(("recipe", "step", "right", "tokens", "cut off"), rows)


def rates_table() -> str:
    """Return a table of what an untrained model solves, by task and level."""
    found = json.loads((RESULTS / "task_rates.json").read_text())
    rows = (
        (task, f"{its['pass@1']:.2f}", f"{its['pass@8']:.2f}", f"{its['tokens']:.0f}", f"{its['cut off']:.2f}")
        for task, its in found.items()
    )
    return table(("task and level", "pass@1", "pass@8", "tokens", "cut off"), rows)


PARTS = {
    "process": "transformers in its own process",
    "judge": "the same, a longer training, a judge of 2 s",
    "server": "vLLM server (CPU)",
}
"""Parts of benchmarks/overlap.py."""


def overlap_table() -> str:
    """Return a table of `make bench-overlap`: steps in turn and steps that overlap with rollouts."""
    path, rows = RESULTS / "overlap.json", []
    if not path.exists():
        return "Not measured yet."
    found = json.loads(path.read_text())["parts"]
    for part in (part for part in PARTS if part in found):
        its = found[part]
        apart = f"{its['rollout_seconds']:.2f} s + {its['training_seconds']:.2f} s"
        for name, row in its["variants"].items():
            setting, _, judge = name.partition(", ")
            shown = setting if setting == "in turn" else code(setting)
            faster = ratio(row["first_over_step"]["median"], row["first_over_step"]["range"])
            least = f"{row['step_over_least']['median']:.2f}"
            step = f"{row['step_seconds']:.2f} s"
            rows.append((PARTS[part], apart, f"{shown}{', judge' if judge else ''}", step, *faster, least))
            apart = ""
    heads = ("sampling + training", "steps", "a step", "times faster than in turn", "spread", "step / least")
    rest = "".join(f" Not run yet: {text}." for part, text in PARTS.items() if part not in found)
    runs = "; ".join(
        f"{PARTS[part]}: {found[part]['repeats']} x {found[part]['steps']}" for part in PARTS if part in found
    )
    return f"{table(('sampler', *heads), rows)}\n\nRepeats and steps of each: {runs}.{rest}"


def gpu_table(path: Path = RESULTS / "gpu.json") -> str:
    """Return a table of `make bench-gpu`: what was checked, and steps beside stock TRL."""
    if not path.exists():
        no_figures = "not run yet: `make bench-gpu`, on a machine with a GPU, writes this table"
        return table(("part", "stock TRL", "grpo-ext", "outcome"), [("all", "", "", no_figures)])
    found = json.loads(path.read_text())
    rows = [row | {"part": part} for part, rows in found["parts"].items() for row in rows]
    lines = [
        timed(row) if "work" in row else (row["part"], "", "", plain(f"{row['outcome']}: {row['detail']}"))
        for row in rows
    ]
    return table((f"on {found['device']}", "stock TRL", "grpo-ext", "outcome"), lines)


def timed(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the line of a step: seconds and what it adds to the GPU's memory."""
    cells = []
    for side in ("stock", "grpo-ext"):
        seconds, mib = row["seconds_of"][side], row["mib"][side]
        cells.append("out of memory" if seconds is None else f"{seconds:.3f} s" + (f", {mib:,.0f} MiB" if mib else ""))
    return row["work"], *cells, f"**{row['ratio']:.2f}** times faster" if row["ratio"] else ""


TABLES: dict[str, Callable[[], str]] = {
    "house": house_table,
    "splits": splits_table,
    "losses": loss_table,
    "axes": axes_table,
    "defaults": defaults_table,
    "surrogates": lambda: described(surrogates, "surrogate"),
    "ratios": lambda: described(ratios, "importance_sampling_level"),
    "kl": lambda: described(kl_estimators, "kl_estimator"),
    "advantages": lambda: described(estimators, "advantage_estimator"),
    "combinations": lambda: described(
        combinations, "multi_objective_aggregation", without=("missing", "eps", "noise")
    ),
    "aggregations": lambda: described(aggregations, "loss_aggregation", without=("max_completion_length",)),
    "rewards": reward_table,
    "arguments_ours": lambda: argument_tables(OURS),
    "arguments_data": lambda: argument_tables(REWARDS_AND_DATA),
    "arguments_model": lambda: argument_tables(MODEL),
    "arguments_trl": lambda: argument_tables(TRLS),
    "resumable": resumable_table,
    "faults": fault_table,
    "figures": figure_table,
    "sampler_kept": sampler_kept_table,
    "sampler_bias": sampler_bias_table,
    "sampler_precision": sampler_precision_table,
    "sampler_training": sampler_training_table,
    "sampler_engines": sampler_engines_table,
    "agents": agents_table,
    "gpu": gpu_table,
    "overlap": overlap_table,
    "arms": arms_table,
    "gains": gains_table,
    "gsm8k": gsm8k_table,
    "rates": rates_table,
}


def rewritten(text: str) -> str:
    """Return `text` with its tables up to date."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- /\1 -->",
        lambda found: f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- /{found[1]} -->",
        text,
        flags=re.DOTALL,
    )


def stale(write: bool = False) -> list[str]:
    """Return the files whose tables are out of date; with `write`, update them."""
    found = []
    folders = (path for name in ("docs", "benchmarks") for path in sorted((ROOT / name).glob("*.md")))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *folders):
        text = path.read_text()
        new = rewritten(text)
        if new != text:
            found.append(str(path.relative_to(ROOT)))
            if write:
                path.write_text(new)
    return found


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    names = stale(write=not check)
    print("\n".join(f"{'out of date' if check else 'rewritten'}: {name}" for name in names) or "all tables up to date")
    sys.exit(bool(check and names))
