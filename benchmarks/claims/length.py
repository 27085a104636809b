"""Dr. GRPO's first bias: a loss that is divided by the length makes wrong answers grow."""

import itertools
import math
import random
import re
import statistics
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from claim import FAILS, HOLDS, ONLY_IF, Claim, Exact, Run, Verdict, interval, markdown, of, shown
from torch import Tensor

from grpo_ext.objective.aggregation import step_totals
from grpo_ext.objective.objective import Objective, resolve

LOSSES = ["grpo", "dr_grpo", "dapo", "gspo", "luspo"]
LAYOUTS = {
    "after": "answer, then filler",
    "before": "filler, then answer",
    "helps": "filler, then answer; filler helps",
}
UNSET = (
    *("importance_sampling_level", "loss_kwargs", "epsilon", "epsilon_high", "delta", "kl_estimator", "kl_placement"),
    *("use_bias_correction_kl", "advantage_estimator", "advantage_kwargs", "scale_rewards", "missing_rewards"),
    *("multi_objective_aggregation", "loss_aggregation", "loss_aggregation_kwargs"),
)
FILLERS, GROUP = 3, 4
"""The most filler tokens, and the completions of a group, of the exact part."""


def settled(loss_type: str, **settings: Any) -> Objective:
    """Return the objective of a recipe that sets `loss_type` and `settings`."""
    usual = dict.fromkeys(UNSET) | {"loss_defaults": "paper", "beta": 0.0, "max_completion_length": FILLERS + 2}
    return resolve(SimpleNamespace(**(usual | {"loss_type": loss_type} | settings)))


class Policy:
    """A policy of which all completions are listed: right or wrong, and 0 to `fillers` filler tokens.

    A completion is an answer and filler in the order of `layout`. After each filler token the model stops or goes on;
    the last filler token ends it without a choice. In layout "after" the model stops at a rate of its own after a
    right and after a wrong answer. In "before" it cannot know yet; in "helps" the answer is right more often after
    more filler.
    """

    def __init__(self, layout: str, fillers: int = FILLERS, right: float = 0.3, go_on: float = 0.6) -> None:
        odds = [right] * (fillers + 1)
        if layout == "helps":
            odds = [right + (0.9 - right) * k / fillers for k in range(fillers + 1)]
        answers = [[math.log(p), math.log(1 - p)] for p in odds]
        filler = [math.log(go_on), math.log(1 - go_on)]
        self.logits = torch.tensor([*answers, filler, filler], dtype=torch.float64).requires_grad_()
        self.choices, self.right = [], []
        for k, correct in itertools.product(range(fillers + 1), (True, False)):
            answer = (k if layout == "helps" else 0, 0 if correct else 1)
            rate = fillers + (2 if layout == "after" and not correct else 1)
            after = [(rate, 0)] * k + [(rate, 1)] * (k < fillers)
            self.choices.append([answer, *after] if layout == "after" else [*after, answer])
            self.right.append(float(correct))
        self.lengths = torch.tensor([len(c) for c in self.choices], dtype=torch.float64)

    def token_logps(self) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each token of each completion, and the mask."""
        longest = max(map(len, self.choices))
        logps = self.logits.log_softmax(-1)
        rows = [torch.stack([logps[c] for c in one]) for one in self.choices]
        padded = [torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows]
        return torch.stack(padded), (torch.arange(longest) < self.lengths[:, None]).long()

    def mean_length(self, right: bool) -> Tensor:
        """Return the expected length of right or of wrong completions."""
        logps, mask = self.token_logps()
        weight = (logps * mask).sum(-1).exp() * (torch.tensor(self.right) == float(right))
        return (weight * self.lengths).sum() / weight.sum()


def step(policy: Policy, objective: Objective, completions: int) -> Tensor:
    """Return minus the expected gradient of the loss in the logits, summed over all groups of `completions`."""
    logps, mask = policy.token_logps()
    log_p = (logps * mask).sum(-1).detach()
    groups = list(itertools.combinations_with_replacement(range(len(log_p)), completions))
    right = torch.tensor(policy.right, dtype=torch.float64)
    rewards = torch.stack([right[list(group)] for group in groups])[..., None]
    advantages = objective.advantages(rewards, torch.ones(1, dtype=torch.float64))
    losses = []
    for group, advantage in zip(groups, advantages, strict=True):
        if not advantage.any():
            continue
        orders = math.factorial(completions) / math.prod(map(math.factorial, Counter(group).values()))
        rows = list(group)
        inputs = {"advantages": advantage, "old_per_token_logps": logps[rows].detach()}
        tensors = objective.tensors(logps[rows], inputs, mask[rows])
        value = objective.aggregate(objective.surrogate_loss(tensors), mask[rows], step_totals([mask[rows]]))
        losses.append(orders * log_p[rows].sum().exp() * value)
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), policy.logits)
    return -gradient


def drift(policy: Policy, objective: Objective, completions: int = GROUP) -> dict[str, float]:
    """Return the rate at which a step of norm 1 changes the expected length of wrong and of right completions."""
    direction = step(policy, objective, completions)
    direction = direction / direction.norm()
    found = {}
    for name, right in (("wrong", False), ("right", True)):
        (slope,) = torch.autograd.grad(policy.mean_length(right), policy.logits)
        found[name] = (slope * direction).sum().item()
    return found


EXACT_LOSSES = {
    **{name: (name, {}) for name in [*LOSSES, "deepseek_v3", "rloo"]},
    "grpo without std": ("grpo", {"advantage_estimator": "none"}),
}


def exact() -> Exact:
    found: Exact = {}
    for layout in LAYOUTS:
        found[layout] = {
            name: drift(Policy(layout), settled(loss, **settings)) for name, (loss, settings) in EXACT_LOSSES.items()
        }
    found["dapo by group"] = {
        str(g): drift(Policy("after", fillers=2), settled("dapo"), g)["wrong"] for g in (2, 4, 6)
    }
    found["grpo by group"] = {
        str(g): drift(Policy("after", fillers=2), settled("grpo"), g)["wrong"] for g in (2, 4, 6)
    }
    return found


# Trained

KNOWN, GUESSED = "abcdef", "gh"
"""Prompts with a digit to learn, and prompts of which the digit is drawn anew each time: they have no answer."""
CHOICE = "0123"
DIGITS = dict(zip(KNOWN, random.Random(0).choices(CHOICE, k=len(KNOWN)), strict=True))
SHAPE = {"after": re.compile(r"(\d)\.*"), "before": re.compile(r"\.*(\d)")}
STEPS, FIRST, WINDOW, LIMIT, FREE = 300, 10, 40, 10, 7
SETTINGS: dict[str, Any] = {"learning_rate": 5e-4, "max_completion_length": LIMIT}
TRAINED = {"after": LOSSES, "before": LOSSES[:2]}
KEYS = [(layout, loss, seed) for layout, losses in TRAINED.items() for loss in losses for seed in range(5)]


def written(layout: str, digit: str, fillers: int) -> str:
    return digit + "." * fillers if layout == "after" else "." * fillers + digit


def demonstrate_after(draw: random.Random) -> tuple[str, str]:
    return draw.choice(KNOWN + GUESSED), written("after", draw.choice(CHOICE), draw.randrange(FREE))


def demonstrate_before(draw: random.Random) -> tuple[str, str]:
    return draw.choice(KNOWN + GUESSED), written("before", draw.choice(CHOICE), draw.randrange(FREE))


class Judge:
    """The reward: 1 for the digit of the prompt. Keeps lengths of each step: known or guessed, right or wrong."""

    __name__ = "right"

    def __init__(self, layout: str, seed: int) -> None:
        self.layout, self.seed, self.seen = layout, seed, []

    def __call__(self, prompts, completions, completion_ids, trainer_state, **_) -> list[float]:
        self.seen.append({})
        rewards = []
        for prompt, text, ids in zip(prompts, completions, completion_ids, strict=True):
            found = SHAPE[self.layout].fullmatch(text)
            draw = random.Random(f"{self.seed} {trainer_state.global_step} {prompt}")
            target = DIGITS.get(prompt) or draw.choice(CHOICE)
            right = found is not None and found[1] == target
            kind = ("known " if prompt in KNOWN else "guessed ") + ("right" if right else "wrong")
            self.seen[-1].setdefault(kind, []).append(len(ids))
            rewards.append(float(right))
        return rewards

    def lengths(self, kind: str, begin: int, end: int) -> list[int]:
        return [n for step in self.seen[begin:end] for n in step.get(kind, [])]


def train(layout: str, loss: str, seed: int) -> Run:
    import toy

    demonstrate = demonstrate_after if layout == "after" else demonstrate_before
    folder = toy.warm(f"length-{layout}", seed, demonstrate)
    judge = Judge(layout, seed)
    rows = [{"prompt": p} for p in KNOWN + GUESSED]
    toy.train(folder, rows, [judge], SETTINGS | {"loss_type": loss, "max_steps": STEPS, "seed": seed})
    kinds = [f"{a} {b}" for a in ("known", "guessed") for b in ("right", "wrong")]
    run: Run = {"growth": {}, "curves": {}}
    for kind in kinds:
        first, last = judge.lengths(kind, 0, FIRST), judge.lengths(kind, STEPS - WINDOW, STEPS)
        run["growth"][kind] = round(statistics.mean(last) - statistics.mean(first), 3) if first and last else None
        pieces = [judge.lengths(kind, i, i + 10) for i in range(0, STEPS, 10)]
        run["curves"][kind] = [round(statistics.mean(piece), 2) if piece else None for piece in pieces]
    right, wrong = (len(judge.lengths(f"known {x}", STEPS - WINDOW, STEPS)) for x in ("right", "wrong"))
    return run | {"solved": round(right / (right + wrong), 3)}


# Page


def grown(runs: list[Run], layout: str, loss: str, kind: str) -> list[float]:
    return [run["growth"][kind] for run in of(runs, layout, loss)]


def gap(runs: list[Run], layout: str, loss: str) -> list[float]:
    """Return the growth of wrong answers less that of right ones, to prompts that have an answer, by seed."""
    pairs = zip(*(grown(runs, layout, loss, kind) for kind in ("known wrong", "known right")), strict=True)
    return [wrong - right for wrong, right in pairs]


def excess(runs: list[Run], layout: str, loss: str) -> list[float]:
    """Return the gap's growth under `loss` beyond that under `dr_grpo`, by seed."""
    return [a - b for a, b in zip(gap(runs, layout, loss), gap(runs, layout, "dr_grpo"), strict=True)]


def judge(exact: Exact, runs: list[Run]) -> Verdict:
    grows = {layout: interval(excess(runs, layout, "grpo"))[1] > 0 for layout in SHAPE}
    signs = exact["after"]["grpo"]["wrong"] > 1e-6 and abs(exact["after"]["dr_grpo"]["wrong"]) < 1e-12
    everywhere = exact["before"]["grpo"]["wrong"] > 1e-6
    word = FAILS if not (signs and any(grows.values())) else HOLDS if everywhere and all(grows.values()) else ONLY_IF
    why = (
        "In expectation a step on `grpo` lengthens wrong answers and shortens right ones, and one on `dr_grpo` does "
        "neither, where the answer comes before the filler. "
        if signs
        else "The exact drifts do not have the signs that the paper gives. "
    )
    if not everywhere:
        why += (
            "Where the filler comes first there is no drift under any loss: the model must know that it is wrong "
            "while it writes the additional tokens. "
        )
    spread = ", ".join(f"{shown(gap(runs, 'after', loss), 2)} under `{loss}`" for loss in ("grpo", "dr_grpo"))
    return Verdict(
        word,
        f"{why}In training the gap between wrong and right answers grows by {spread} (answer first); the difference "
        f"by seed is {shown(excess(runs, 'after', 'grpo'), 2)}, and {shown(excess(runs, 'before', 'grpo'), 2)} with "
        "the filler first.",
    )


def table(exact: Exact, runs: list[Run]) -> str:
    rows = [
        [
            f"`{name}`" if name in LOSSES else name,
            *(f"{exact[layout][name][x]:+.4f}" for layout in LAYOUTS for x in ("wrong", "right")),
        ]
        for name in EXACT_LOSSES
    ]
    header = ["loss", *(f"{x}: {title}" for title in LAYOUTS.values() for x in ("wrong", "right"))]
    lines = ["Exact: change of the expected length of wrong and of right completions for a step of norm 1.", ""]
    lines += [markdown(header, rows), ""]
    pairs = exact["dapo by group"].items()
    ratio = ", ".join(f"{v / exact['grpo by group'][g]:.3f} at G = {g}" for g, v in pairs)
    lines += [f"The drift of `dapo`, whose step here is one group, over that of `grpo`: {ratio}.", ""]
    lines += [f"Trained: growth in tokens from the first {FIRST} steps to the last {WINDOW} of {STEPS}.", ""]
    kinds = ["known wrong", "known right", "guessed wrong"]
    rows = [
        [
            LAYOUTS[layout],
            f"`{loss}`",
            *(shown(grown(runs, layout, loss, kind), 2) for kind in kinds),
            shown(gap(runs, layout, loss), 2),
            f"{statistics.mean(run['solved'] for run in of(runs, layout, loss)):.2f}",
        ]
        for layout, losses in TRAINED.items()
        for loss in losses
    ]
    header = ["order", "loss", "wrong", "right", "wrong, no answer exists", "wrong less right", "solved at the end"]
    return "\n".join([*lines, markdown(header, rows)])


def gaps(run: Run) -> list[float | None]:
    """Return the length of wrong less that of right answers to known prompts, every 10 steps."""
    pairs = zip(run["curves"]["known wrong"], run["curves"]["known right"], strict=True)
    return [None if wrong is None or right is None else wrong - right for wrong, right in pairs]


def draw(figure: Any, exact: Exact, runs: list[Run]) -> None:
    for i, layout in enumerate(SHAPE):
        axis = figure.add_subplot(1, 2, i + 1)
        for loss in TRAINED[layout]:
            curves = [gaps(run) for run in of(runs, layout, loss)]
            means = [
                statistics.mean(x) if (x := [v for v in at if v is not None]) else math.nan
                for at in zip(*curves, strict=True)
            ]
            axis.plot([10 * k + 5 for k in range(len(means))], means, label=loss)
        axis.set(xlabel="step", ylabel="wrong less right completions, tokens", title=LAYOUTS[layout])
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)


CLAIM = Claim(
    name="length",
    title="Dividing by the length makes wrong answers grow",
    paper="Dr. GRPO, arXiv:2503.20783",
    statement=(
        "A loss that is averaged over the tokens of each completion pulls harder, per token, on short right answers "
        "and pushes less on long wrong ones. So the model comes to prefer brevity where it is right and length where "
        "it is wrong. Without the division (`dr_grpo`) it does not."
    ),
    experiment=(
        f"Exact: a policy that writes an answer and 0 to {FILLERS} filler tokens, all groups of {GROUP} completions "
        "enumerated, in three orders: the answer first, the filler first, and the filler first where it makes the "
        f"answer right more often. Trained: {len(KNOWN)} prompts of one letter with a digit to be learned, one of "
        f"four, and {len(GUESSED)} without an answer, of which the digit is drawn anew at each step. Filler is free, "
        f"after the digit or before it. {STEPS} steps of 64 completions, 8 of each prompt, learning rate 5e-4 for "
        "all losses. In pilot runs the lengths of right and wrong answers wandered together by several tokens, so the "
        "gap between the two is compared."
    ),
    failure=(
        "The exact drift of wrong answers under `grpo` is not positive, or that under `dr_grpo` not 0; or, in "
        "training, the growth of the gap between wrong and right answers under `grpo` less that under `dr_grpo` (by "
        "seed) has an interval that reaches 0 in both orders. If it does so in one order only, or if the exact drift "
        "is 0 in one order, the claim holds only in some cases."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=KEYS,
    train=train,
)
