"""GDPO: several rewards that are summed before they are normalised collapse to few advantages."""

import itertools
import random
import statistics
from typing import Any

import torch
from claim import FAILS, HOLDS, ONLY_IF, Claim, Exact, Run, Verdict, interval, markdown, of, shown
from torch import Tensor

from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.estimate import estimate

METHODS = {
    "sum_then_normalize": ("sum_then_normalize", "group"),
    "without std": ("sum_then_normalize", "none"),
    "normalize_then_sum": ("normalize_then_sum", "group"),
    "average_advantages": ("average_advantages", "group"),
}
SIZES = [(2, 2), (2, 3), (2, 4), (2, 6), (2, 8), (3, 2), (3, 4), (4, 4)]
"""Rewards and completions of the groups that are enumerated."""


def all_groups(functions: int, completions: int) -> Tensor:
    """Return every group of completions with 0/1 rewards, order ignored: [groups, completions, functions]."""
    kinds = list(itertools.product((0.0, 1.0), repeat=functions))
    return torch.tensor(list(itertools.combinations_with_replacement(kinds, completions)), dtype=torch.float64)


def advantages(rewards: Tensor, method: str, one_by_one: bool = False) -> Tensor:
    """Return advantages with epsilons near 0, all groups in one generation batch or each in its own."""
    if one_by_one:
        return torch.cat([advantages(group[None], method) for group in rewards])
    combination, estimator = METHODS[method]
    options = {"eps": 0.0} if estimator == "group" else {}
    more = {"eps": 1e-9} if combination == "normalize_then_sum" else {}
    weights = torch.ones(rewards.shape[-1], dtype=rewards.dtype)

    def estimated(values: Tensor, column: int) -> Tensor:
        return estimate(estimator, values, **options)

    return combinations[combination](rewards, weights, estimated, **more)


def distinct(found: Tensor) -> int:
    """Count the groups' advantages that differ, order ignored."""
    ordered = found.sort(dim=-1).values
    return len({tuple(round(x, 5) + 0.0 for x in group) for group in ordered.tolist()})


def silenced(rewards: Tensor, found: Tensor) -> float:
    """Return the share of groups without any advantage among those whose completions earned different rewards."""
    mixed = (rewards != rewards[:, :1]).any(-1).any(-1)
    return (~(found[mixed].abs() > 1e-4).any(-1)).double().mean().item()


def exact() -> Exact:
    found: Exact = {}
    for functions, completions in SIZES:
        rewards = all_groups(functions, completions)
        row: dict[str, Any] = {"groups": len(rewards)}
        for method in METHODS:
            a = advantages(rewards, method)
            row[method] = {"distinct": distinct(a), "silenced": round(silenced(rewards, a), 4)}
        alone = advantages(rewards, "normalize_then_sum", one_by_one=True)
        row["normalize_then_sum, one prompt in a batch"] = {
            "distinct": distinct(alone),
            "silenced": round(silenced(rewards, alone), 4),
        }
        found[f"{functions} {completions}"] = row
    return found


# Trained

PROMPTS = "abcdefgh"
DIGITS = dict(zip(PROMPTS, random.Random(1).choices("0123456789", k=len(PROMPTS)), strict=True))
STEPS, WINDOW = 100, 20
SETTINGS: dict[str, Any] = {"learning_rate": 2e-3, "max_completion_length": 3, "loss_type": "dapo"}
TRAINED = {
    "summed, noise of 0 or 1": ("sum_then_normalize", 1.0),
    "summed, noise of 0 or 3": ("sum_then_normalize", 3.0),
    "GDPO, noise of 0 or 3": ("normalize_then_sum", 3.0),
}
"""Combination and size of the noisy reward. GDPO's advantages do not depend on that size."""
KEYS = [(method, seed) for method in TRAINED for seed in range(5)]


def demonstrate(draw: random.Random) -> tuple[str, str]:
    return draw.choice(PROMPTS), draw.choice("xy") + draw.choice("0123456789")


class Taste:
    """The noisy reward: `size` for the letter that is in favour, which is drawn anew for each prompt of each step."""

    __name__ = "taste"

    def __init__(self, seed: int, size: float) -> None:
        self.seed, self.size = seed, size

    def __call__(self, prompts, completions, trainer_state, **_) -> list[float]:
        step = trainer_state.global_step
        liked = [random.Random(f"{self.seed} {step} {p}").choice("xy") for p in prompts]
        return [self.size * (text[:1] == letter) for text, letter in zip(completions, liked, strict=True)]


def digit(prompts, completions, **_) -> list[float]:
    """Return the rare reward: 1 for the digit of the prompt in second place."""
    return [float(text[1:] == DIGITS[p]) for p, text in zip(prompts, completions, strict=True)]


def train(method: str, seed: int) -> Run:
    import toy

    folder = toy.warm("gdpo", seed, demonstrate)
    combination, size = TRAINED[method]
    settings = SETTINGS | {"multi_objective_aggregation": combination, "max_steps": STEPS, "seed": seed}
    trainer = toy.train(folder, [{"prompt": p} for p in PROMPTS], [Taste(seed, size), digit], settings)
    curves = {name: toy.curve(trainer, f"rewards/{name}/mean") for name in ("taste", "digit")}
    return {
        "mean": round(statistics.mean(curves["digit"]), 4),
        "last": round(statistics.mean(curves["digit"][-WINDOW:]), 4),
        "curves": {
            name: [round(statistics.mean(curve[i : i + 10]), 3) for i in range(0, STEPS, 10)]
            for name, curve in curves.items()
        },
    }


# Page


ONES, THREES, GDPO = TRAINED


def earned(runs: list[Run], method: str, figure: str = "mean") -> list[float]:
    return [run[figure] for run in of(runs, method)]


def gain(runs: list[Run], method: str) -> list[float]:
    """Return what GDPO earns of the rare reward over a run beyond `method`, by seed."""
    return [one - other for one, other in zip(earned(runs, GDPO), earned(runs, method), strict=True)]


def more_distinct(exact: Exact) -> bool:
    """True if GDPO keeps at least as many distinct advantages as both others everywhere, and more than the sum."""
    return all(
        row["normalize_then_sum"]["distinct"] >= row["without std"]["distinct"]
        and row["normalize_then_sum"]["distinct"] > row["sum_then_normalize"]["distinct"]
        for row in exact.values()
    )


def collapses_alone(exact: Exact) -> bool:
    """True if, at some size, a batch of one prompt leaves GDPO no more distinct advantages than the sum."""
    alone = "normalize_then_sum, one prompt in a batch"
    return any(row[alone]["distinct"] <= row["sum_then_normalize"]["distinct"] for row in exact.values())


def judge(exact: Exact, runs: list[Run]) -> Verdict:
    better = {method: interval(gain(runs, method))[1] > 0 for method in (ONES, THREES)}
    alone = collapses_alone(exact)
    if not (more_distinct(exact) and any(better.values())):
        word = FAILS
    else:
        word = HOLDS if all(better.values()) and not alone else ONLY_IF
    row = exact["2 8"]
    counts = [row[method]["distinct"] for method in ("sum_then_normalize", "without std", "normalize_then_sum")]
    why = (
        f"The {row['groups']} groups of 8 completions with two 0/1 rewards have {counts[0]} distinct advantages if "
        f"rewards are summed first, {counts[1]} without the std, {counts[2]} under GDPO. GDPO earns more of the rare "
        f"reward by {shown(gain(runs, THREES))} if the noisy reward is 0 or 3, by {shown(gain(runs, ONES))} if both "
        "are 0 or 1."
    )
    if not all(better.values()) and any(better.values()):
        why += " Where the rewards have one scale, more distinct advantages bring no visible gain here."
    if alone:
        why += (
            " The generation batch must hold several prompts: the last step of GDPO divides by the std of the batch, "
            "and in a batch of one prompt groups of two collapse as before."
        )
    return Verdict(word, why)


def table(exact: Exact, runs: list[Run]) -> str:
    methods = [*METHODS, "normalize_then_sum, one prompt in a batch"]
    rows = [
        [
            *key.split(),
            row["groups"],
            *(row[m]["distinct"] for m in methods),
            f"{row['sum_then_normalize']['silenced']:.1%}, {row['normalize_then_sum']['silenced']:.1%}",
        ]
        for key, row in exact.items()
    ]
    header = [
        "rewards",
        "completions",
        "groups",
        "summed first",
        "without std",
        "`normalize_then_sum`",
        "`average_advantages`",
        "`normalize_then_sum`, one prompt",
        "silenced: summed, GDPO",
    ]
    lines = [
        "Exact: distinct advantages over all groups of completions with 0/1 rewards, order ignored; and the share of "
        "groups with different rewards whose advantages are all 0.",
        "",
        markdown(header, rows),
        "",
        f"Trained: the rare reward, mean of {STEPS} steps and of the last {WINDOW}.",
        "",
    ]
    rows = [[method, shown(earned(runs, method)), shown(earned(runs, method, "last"))] for method in TRAINED]
    return "\n".join([*lines, markdown(["combination", "over the run", "at its end"], rows)])


def draw(figure: Any, exact: Exact, runs: list[Run]) -> None:
    axis = figure.add_subplot(1, 2, 1)
    sizes = [key for key in exact if key.startswith("2 ")]
    for method in ("sum_then_normalize", "without std", "normalize_then_sum"):
        axis.plot(
            [int(k.split()[1]) for k in sizes], [exact[k][method]["distinct"] for k in sizes], "o-", label=method
        )
    axis.set(xlabel="completions of a group", ylabel="distinct advantages", title="two 0/1 rewards, all groups")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    axis = figure.add_subplot(1, 2, 2)
    for i, method in enumerate(TRAINED):
        for run in of(runs, method):
            curve = run["curves"]["digit"]
            label = method if run["key"][-1] == 0 else None
            axis.plot([10 * k + 5 for k in range(len(curve))], curve, color=f"C{i}", linewidth=1, label=label)
    axis.set(xlabel="step", ylabel="rare reward", title="training, a line for each seed")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


CLAIM = Claim(
    name="gdpo",
    title="Rewards that are summed before they are normalised collapse",
    paper="GDPO, arXiv:2601.05242",
    statement=(
        "If several rewards are summed and the sum is normalised within the group, combinations of rewards that "
        "differ get one and the same advantage. Leaving out the std helps little. Normalising each reward alone, "
        "then summing, then normalising over the batch keeps many more distinct advantages (the last step does not "
        "change their number), and the harder reward is learned better."
    ),
    experiment=(
        "Exact: all groups of 2 to 8 completions with 2, 3 or 4 rewards of 0 or 1; distinct advantages are counted "
        "for each combination, with all groups in one generation batch and with one. Trained: a completion is a "
        "letter and a digit. The noisy reward (0 or 1, or 0 or 3) likes one of two letters, drawn anew for each "
        "prompt of each step, so that nothing can be learned from it; the rare one (0 or 1) wants the digit of the "
        f"prompt, one of ten. Equal weights, `dapo`, learning rate 2e-3, 8 prompts x 8 completions, {STEPS} steps. In "
        "pilot runs with a noise of 0 or 1 nothing was lost, so the size of 3 was added before the seeds of this "
        "page were run."
    ),
    failure=(
        "At some size GDPO does not keep more distinct advantages than the sum, or fewer than the sum without the "
        "std; or GDPO earns no more of the rare reward over the run than the sum, at both sizes of the noise (the "
        "interval of the difference by seed reaches 0). If it does so at one size, or if a batch of one prompt "
        "collapses again, the claim holds only in some cases."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=KEYS,
    train=train,
)
