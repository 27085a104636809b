"""Sampler and policy differ: which correction learns, and which takes the gradient of long completions.

The trained part uses the task, the warm models and the sampler in vLLM's place of sampler_training.py.
"""

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from claim import FAILS, HOLDS, ONLY_IF, Claim, Exact, Run, Verdict, interval, markdown, shown
from torch import Tensor

from grpo_ext.objective.sampler_correction import DEFAULT, SamplerRule, corrected, trl_rule

CAP, LAG, BITS, STEPS, LONG, SHORT_TOKENS = 3.0, 4, 8, 24, 64, 5
"""Cap of sequence rules; updates and bits of the sampler; optimizer steps; tokens of long and of short completions."""
LENGTHS, NOISES = (4, 16, 64, 256, 1024), (0.02, 0.05, 0.1, 0.2)
MASK = {"level": "token", "lower": 0.5, "upper": 2.0, "action": "mask"}
GEOMETRIC = {"level": "geometric", "statistic": "k1", "lower": -0.01, "upper": 0.01, "action": "reject"}
RULES: dict[str, tuple[SamplerRule, ...]] = {
    "token TIS": DEFAULT,
    "token mask": (SamplerRule(**MASK),),  # type: ignore[arg-type]
    "geometric rejection": (SamplerRule(**GEOMETRIC),),  # type: ignore[arg-type]
    "sequence TIS": (trl_rule("sequence_truncate", None, CAP),),
    "sequence mask": (trl_rule("sequence_mask", None, CAP),),
}
SEQUENCE = ("sequence TIS", "sequence mask")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain clip": {"old_logps": "sampler"},
    "token TIS": {},
    "token mask": {"sampler_correction": MASK},
    "geometric rejection": {"sampler_correction": GEOMETRIC},
    "sequence TIS": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "sequence mask": {"vllm_importance_sampling_mode": "sequence_mask"},
}
FIGURES = ("kept_short", "kept_long", "mismatch", "mismatch_kl", "chi2", "ess")


def normal(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def closed_form(rule: str, n: float, s: float) -> float:
    """Return the expected weight of a completion of n tokens whose log-ratios are N(-s^2/2, s^2) under the sampler."""
    spread = s * math.sqrt(n)
    if not spread:
        return 1.0
    below = normal((math.log(CAP) - spread**2 / 2) / spread)
    return below if rule == "sequence mask" else below + CAP * (1 - normal((math.log(CAP) + spread**2 / 2) / spread))


def two_points(n: int, s: float) -> tuple[Tensor, Tensor]:
    """Return token log-ratios c +- s with E exp = 1, [n + 1, n]: a row for each number of pluses; probabilities."""
    ups = torch.arange(n + 1, dtype=torch.float64)
    signs = torch.where(torch.arange(n) < ups[:, None], 1.0, -1.0).double()
    pairs = torch.lgamma(ups.new_tensor(n + 1.0)) - torch.lgamma(ups + 1) - torch.lgamma(n - ups + 1)
    return s * signs - math.log(math.cosh(s)), (pairs - n * math.log(2)).exp()


def kept(rules: tuple[SamplerRule, ...], n: int, s: float) -> float:
    """Return the expected weight of a token under rules of the package, by enumeration."""
    log_ratio, probability = two_points(n, s)
    weights = corrected(rules, log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio)).weights
    return (probability * weights.mean(1)).sum().item()


def exact() -> Exact:
    """Kept share of the gradient by rule, length and noise, beside the closed form."""
    rows = []
    for s in NOISES:
        for n in LENGTHS:
            row = {"s": s, "n": n} | {name: kept(rules, n, s) for name, rules in RULES.items()}
            rows.append(row | {f"{rule}, closed form": closed_form(rule, n, s) for rule in SEQUENCE})
    return {"rows": rows}


def train(seed: int) -> Run:
    """Train with each rule; the sampler has the weights of `LAG` updates before, rounded to int8."""
    import logging
    import warnings

    sys.path.insert(0, str(Path(__file__).parent.parent))
    import toy  # noqa: F401 (one thread)

    import sampler_training

    class Late(sampler_training.Engine):
        """Takes the weights of `LAG` pushes before."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.pushed: list[dict[str, Tensor]] = []
            self.arriving: dict[str, Tensor] = {}

        def load_weights(self, pushed: list[tuple[str, Tensor]]) -> None:
            self.arriving |= {name: weight.detach().clone() for name, weight in pushed}

        def reset_prefix_cache(self) -> None:
            """End a push."""
            if self.arriving:
                self.pushed, self.arriving = [*self.pushed, self.arriving][-LAG - 1 :], {}
                super().load_weights(list(self.pushed[0].items()))

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sampler_training.disable_progress_bars()
    sampler_training.LONG = LONG
    folder, found = sampler_training.warm(seed), {}
    for name, settings in SETTINGS.items():
        trainer = sampler_training.trained(settings, BITS, seed, 1, STEPS, Late)
        logs = [entry for entry in trainer.state.log_history if "reward" in entry]
        steps = {figure: [entry.get(f"sampling/{figure}") for entry in logs] for figure in FIGURES}
        figures = {figure: _mean(values) for figure, values in steps.items()}
        if name in SEQUENCE:  # the noise grows over a run, so the closed form is taken step by step
            noise = [math.sqrt(2 * max(value, 0.0)) for value in steps["mismatch_kl"]]
            for third, n in (("short", SHORT_TOKENS), ("long", LONG)):
                figures[f"closed_{third}"] = _mean([closed_form(name, n, s) for s in noise])
        found[name] = {"after": sampler_training.score(trainer.model, folder), "figures": figures}
        found[name]["rewards"] = [round(entry["reward"], 3) for entry in logs[::4]]
    model = sampler_training.LlamaForCausalLM.from_pretrained(folder)
    return {"before": sampler_training.score(model, folder), "rules": found}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{statistics.mean(known):.4g}") if known else None


def figures_of(runs: list[Run], rule: str, figure: str) -> list[float]:
    return [run["rules"][rule]["figures"][figure] for run in runs]


def learned(runs: list[Run], rule: str, kind: str) -> list[float]:
    return [run["rules"][rule]["after"][kind] for run in runs]


def judge(exact: Exact, runs: list[Run]) -> Verdict:
    """Compare the weight of long completions with that of short ones, with the closed form, and what is learned."""
    ratio = {
        rule: [
            long / short
            for long, short in zip(
                figures_of(runs, rule, "kept_long"), figures_of(runs, rule, "kept_short"), strict=True
            )
        ]
        for rule in RULES
    }
    starved = interval(ratio["sequence mask"])[2] < 0.75 and interval(ratio["token TIS"])[1] > 0.9
    off = [
        abs(a - b)
        for rule in SEQUENCE
        for a, b in zip(figures_of(runs, rule, "kept_long"), figures_of(runs, rule, "closed_long"), strict=True)
    ]
    paired = zip(learned(runs, "token TIS", "long"), learned(runs, "sequence mask", "long"), strict=True)
    gained = [a - b for a, b in paired]
    harmed = interval(gained)[1] > 0
    why = (
        f"weight of a long completion over a short one: sequence mask {shown(ratio['sequence mask'])}, sequence TIS "
        f"{shown(ratio['sequence TIS'])}, token TIS {shown(ratio['token TIS'])}; the closed form is off by "
        f"{statistics.mean(off):.2f} on average. Long answers, token TIS less sequence mask: {shown(gained)}."
    )
    if not starved:
        return Verdict(FAILS, f"Long completions keep their weight: {why}")
    if statistics.mean(off) > 0.15:
        return Verdict(ONLY_IF, f"token noise is independent, as the closed form has it: {why}")
    if not harmed:
        return Verdict(ONLY_IF, f"one looks at the gradient; what is learned does not show it here: {why}")
    return Verdict(HOLDS, f"The {why}")


def table(exact: Exact, runs: list[Run]) -> str:
    """Return what was learned and kept by rule, and the exact shares."""

    def cell(rule: str, figure: str) -> str:
        values = figures_of(runs, rule, figure)
        return "" if None in values else shown(values, 2)

    header = ["rule", "short, right", "long, right", "ESS", "kept, short", "kept, long", "closed form, long"]
    rows = [
        [
            rule,
            *(shown(learned(runs, rule, kind), 2) for kind in ("short", "long")),
            *(cell(rule, figure) for figure in ("ess", "kept_short", "kept_long")),
            cell(rule, "closed_long") if rule in SEQUENCE else "",
        ]
        for rule in SETTINGS
    ]
    before = {kind: shown([run["before"][kind] for run in runs], 2) for kind in ("short", "long")}
    rows.insert(0, ["before training", before["short"], before["long"], "", "", "", ""])
    names = [*RULES, "sequence mask, closed form"]
    shares = [
        [row["s"], row["n"], *(f"{row[name]:.3f}" for name in names)] for row in exact["rows"] if row["s"] > 0.02
    ]
    return "\n\n".join(
        [
            markdown(header, rows),
            "Exact: expected weight of a token, by enumeration of two-point noise s per token:",
            markdown(["s", "tokens", *names], shares),
        ]
    )


def draw(figure: Any, exact: Exact, runs: list[Run]) -> None:
    """Draw the exact shares over the length, and what was learned."""
    left, right = figure.subplots(1, 2)
    rows = [row for row in exact["rows"] if row["s"] == 0.1]
    for i, name in enumerate(RULES):
        left.plot([r["n"] for r in rows], [r[name] for r in rows], marker="o", color=f"C{i + 1}", label=name)
    lengths = [2 ** (k / 4) for k in range(8, 41)]
    for rule in SEQUENCE:
        left.plot(lengths, [closed_form(rule, n, 0.1) for n in lengths], "k:", linewidth=1)
    left.set_xscale("log", base=2)
    left.set_xlabel("tokens of a completion (noise s = .1 per token; dotted: closed form)")
    left.set_ylabel("expected weight")
    left.legend(fontsize=8, frameon=False)
    for i, name in enumerate(SETTINGS):
        for place, kind in enumerate(("short", "long")):
            values = learned(runs, name, kind)
            mean, low, high = interval(values)
            right.errorbar(place + 0.1 * i, mean, [[mean - low], [high - mean]], fmt="o", color=f"C{i}", label=name)
    right.set_xticks([0.25, 1.25], ["short answers", "long answers"])
    right.set_ylabel("right digits after training")
    for axis in (left, right):
        axis.grid(alpha=0.25)


CLAIM = Claim(
    name="mismatch",
    title="Rules on the ratio of whole completions starve long ones",
    paper="richardli.xyz/rl-collapse, part 3; TRL's and verl's corrections of the sampler",
    statement=(
        "The ratio of a whole completion to a sampler that is not quite the policy moves away from 1 with its length, "
        "so a fixed bound on it (sequence TIS, sequence mask) rejects long completions whatever their quality per "
        "token; a bound on the geometric mean does not depend on length in this way."
    ),
    experiment=(
        "Exact: expected weight of a token by length, for two-point noise of token log-ratios, through the package's "
        "`corrected`, beside Phi((log C - n s^2/2) / (s sqrt n)). Trained: the task of benchmarks/sampler_training.py "
        f"(short answers of 4 digits, long ones of {LONG}) through the trainer's path of vLLM, with a sampler that "
        f"has the weights of {LAG} updates before, rounded to int8; {STEPS} steps with each of six rules in each run. "
        "The noise of the closed form is sqrt(2 KL per token), step by step. (int8 without staleness changes little: "
        "benchmarks/results/sampler_training.json.)"
    ),
    failure=(
        "The weight of the longest third over that of the shortest is not below .75 under the sequence mask (whole "
        "interval), or not above .9 under token TIS. Further the claim is limited if the closed form is off by more "
        "than .15 on average, or if the share of right digits in long answers after training is not higher "
        "with token TIS than with the sequence mask (interval of the paired difference above 0)."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=[(seed,) for seed in range(5)],
    train=train,
)
