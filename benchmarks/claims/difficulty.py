"""The weight of a prompt by its pass rate, under every estimator: Dr. GRPO's bias by difficulty."""

from typing import Any

from claim import FAILS, HOLDS, ONLY_IF, Claim, Verdict, interval, markdown, of, shown
from enumeration import by_group, estimator, moments, prompt, weight

RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
GROUPS = (4, 8, 16, 64)
OTHERS = (0.5,)
ESTIMATORS = ("none", "loo", "group", "batch", "maxrl", "pass_at_k", "minimind", "beta", "bernoulli")
ESTIMATORS += ("reinforce_pp", "reinforce_pp_baseline")
ARMS = ("none", "group")
MIDDLE = 0.75


def weights(name: str, group: int = 8) -> list[float]:
    """Return the factor of the gradient of the pass rate in the mean estimate, over the pass rate."""
    alone = by_group(estimator(name))
    found = []
    for rate in RATES:
        batch = [prompt(rate, 2, 2), *([] if alone else [prompt(other, 2, 2) for other in OTHERS])]
        found.append(weight(moments(estimator(name), batch, group)[0], batch[0]))
    return found


def exact() -> dict[str, Any]:
    """Return weights relative to that at a pass rate of .5; those of `group` also by the size of the group."""

    def relative(name: str, group: int) -> list[float]:
        found = weights(name, group)
        return [w / found[RATES.index(0.5)] for w in found]

    return {
        "weights": {name: relative(name, 8) for name in ESTIMATORS},
        "group": {str(group): relative("group", group) for group in GROUPS},
    }


def train(arm: str, seed: int) -> dict[str, Any]:
    """Train on keys of two levels; return the mean pass rate of the middle and of the hard one, every 5 steps."""
    import lookup

    right = lookup.solutions(seed)
    middle, hard = [range(level, len(lookup.KEYS), 4) for level in (0, 3)]
    rows = [{"prompt": lookup.KEYS[i], "solution": right[i]} for i in (*middle, *hard)]

    def figures(model: Any) -> list[float]:
        found = [
            [p[lookup.ANSWERS.index(right[i])] for i, p in zip(keys, _at(lookup, model, keys), strict=True)]
            for keys in (middle, hard)
        ]
        return [sum(rates) / len(rates) for rates in found]

    settings = {"advantage_estimator": arm, "loss_aggregation": "seq-mean-token-mean"}
    seen = lookup.train(seed, rows, settings, 30, figures)
    return {"middle": [s[0] for s in seen], "hard": [s[1] for s in seen]}


def _at(lookup: Any, model: Any, keys: range) -> list[list[float]]:
    found: list[list[float]] = lookup.distributions(model, [lookup.KEYS[i] for i in keys])
    return found


def crossing(seen: list[float], level: float) -> float:
    """Return the place at which a curve first reaches the level, or its end."""
    for i in range(1, len(seen)):
        if seen[i] >= level > seen[i - 1]:
            return i - 1 + (level - seen[i - 1]) / (seen[i] - seen[i - 1])
    return len(seen) - 1.0


def gains(runs: list[Any], arm: str) -> list[float]:
    """Return what the hard level has gained when the middle one reaches `MIDDLE`, by seed."""
    found = []
    for run in of(runs, arm):
        place = crossing(run["middle"], MIDDLE)
        i = min(int(place), len(run["hard"]) - 2)
        found.append(run["hard"][i] + (place - i) * (run["hard"][i + 1] - run["hard"][i]) - run["hard"][0])
    return found


def judge(figures: dict[str, Any], runs: list[Any]) -> Verdict:
    """Return whether `group` favours both ends exactly, and hard prompts in training."""
    relative = figures["weights"]
    both_ends = all(relative["group"][i] > 1 + 1e-9 for i, rate in enumerate(RATES) if rate != 0.5)
    flat = max(abs(w - 1) for name in ("none", "loo") for w in relative[name]) < 1e-9
    more = [x - y for x, y in zip(gains(runs, "group"), gains(runs, "none"), strict=True)]
    trained = interval(more)[1] > 0
    small, large = figures["group"]["8"][0], figures["group"]["64"][0]
    why = (
        f"Exactly, `group` weighs a prompt of pass rate .01 or .99 {small:.2f} times one of .5 in groups of 8 and "
        f"{large:.2f} times in groups of 64; `none` and `loo` weigh all alike. `maxrl` weighs .01 "
        f"{relative['maxrl'][0]:.1f} times and .99 {relative['maxrl'][-1]:.2f} times. Trained, when the middle level "
        f"reaches {MIDDLE:g}, hard prompts have gained {shown(more)} more by `group` than by `none`"
        + ("." if trained else ": in training the difference of `group` is within the noise.")
    )
    word = HOLDS if both_ends and flat and trained else ONLY_IF if both_ends and flat else FAILS
    return Verdict(word, why)


def table(figures: dict[str, Any], runs: list[Any]) -> str:
    """Return the weights, and the gains in training."""
    rows = [[f"`{name}`", *[f"{w:.2f}" for w in found]] for name, found in figures["weights"].items()]
    rows += [[f"`group`, groups of {g}", *[f"{w:.2f}" for w in found]] for g, found in figures["group"].items()]
    first = markdown(["weight relative to that at .5; pass rate", *[f"{rate:g}" for rate in RATES]], rows)
    rows = [
        [
            f"`{arm}`",
            shown([5 * crossing(run["middle"], MIDDLE) for run in of(runs, arm)], 1),
            shown([run["hard"][0] for run in of(runs, arm)]),
            shown(gains(runs, arm)),
            shown([run["hard"][-1] for run in of(runs, arm)]),
            shown([run["middle"][-1] for run in of(runs, arm)]),
        ]
        for arm in ARMS
    ]
    head = [
        "trained",
        f"steps until middle {MIDDLE:g}",
        "hard, before",
        "hard, gain by then",
        "hard, end",
        "middle, end",
    ]
    return f"{first}\n\n{markdown(head, rows)}"


def draw(figure: Any, figures: dict[str, Any], runs: list[Any]) -> None:
    """Plot weights over the pass rate, and the hard level over the middle one."""
    left, right = figure.subplots(1, 2)
    for name in ("none", "group", "maxrl", "pass_at_k", "beta", "bernoulli", "reinforce_pp"):
        left.plot(RATES, figures["weights"][name], marker="o", ms=3, label=name)
    left.plot(RATES, figures["group"]["64"], ls="--", color="gray", label="group, G = 64")
    left.set(xlabel="pass rate", ylabel="weight / weight at .5", yscale="log", title="weight of a prompt, G = 8")
    left.legend(fontsize=7)
    for i, arm in enumerate(ARMS):
        for run in of(runs, arm):
            label = arm if run["key"][-1] == 0 else None
            right.plot(run["middle"], run["hard"], color=f"C{i}", lw=1, label=label)
    right.axvline(MIDDLE, color="black", lw=0.8, ls=":")
    right.set(xlabel="pass rate of the middle level", ylabel="pass rate of the hard level", title="trained, 5 seeds")
    right.legend(fontsize=8)


CLAIM = Claim(
    name="difficulty",
    title="Dividing by the group's std favours very easy and very hard prompts",
    paper="Dr. GRPO, arXiv:2503.20783",
    statement="(As TRL's documentation and reviews report it; of the paper, the abstract was read.) Division by the "
    "std of a group's rewards gives prompts whose rewards hardly vary, the too easy and the too hard ones, a higher "
    "weight in the update; without the division all prompts count the same.",
    experiment="Exact: the expected gradient of a prompt is a weight times the gradient of its pass rate; the weight "
    "of every estimator for 0/1 rewards, groups of 8 (`pass_at_k`: k = 2), relative to that at a pass rate of .5. "
    "Estimators that see the batch have one of .5 in it. Trained: a tiny Llama that was warmed up on "
    "keys and their answers, 4 keys that it answers right about half of the time and 4 hardly ever; groups of 16, "
    "8 prompts a step, 30 steps at learning rate 1e-3, only `advantage_estimator` differs. Pass rates are read off "
    f"the model. Compared where the middle level reaches {MIDDLE:g}, so that the scale of a gradient does not count. "
    "A pilot of seed 100 set the steps and that level; an arm of `maxrl` was dropped for its cost before the runs.",
    failure="A weight of `group` that is not above its weight at .5 at some other pass rate, or weights of `none` "
    "that differ. Trained: the interval of (gain of the hard level by `group` - by `none`) is not above 0; then the "
    "claim is only about the expected gradient.",
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=[(arm, seed) for arm in ARMS for seed in range(5)],
    train=train,
)
