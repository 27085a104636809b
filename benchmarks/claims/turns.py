"""Advantages by turn: GiGPO and returns of turns, in a task of five turns of which one decides."""

import itertools
import random
import statistics
from typing import Any

import torch
from claim import FAILS, HOLDS, ONLY_IF, Claim, Exact, Run, Verdict, interval, markdown, of, shown

from grpo_ext.objective.estimate import estimate

TURNS, DECISIVE = 5, 3
ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "group": ("group", {}),
    "gigpo": ("gigpo", {}),
    "turn_return, gamma 1": ("turn_return", {"gamma": 1.0}),
    "turn_return, gamma 0": ("turn_return", {"gamma": 0.0}),
}


def by_turn(name: str, right: list[bool]) -> torch.Tensor:
    """Return the advantages [completions, turns] of one group, the reward paid in the turn that decides."""
    estimator, options = ESTIMATORS[name]
    rewards = torch.tensor([right], dtype=torch.float64)
    turn_rewards = torch.zeros(1, len(right), TURNS, dtype=torch.float64)
    turn_rewards[..., DECISIVE - 1] = rewards
    turns = torch.arange(TURNS).expand(1, len(right), TURNS)
    offered = {"turn_rewards": turn_rewards, "turns": turns, "states": turns, "mask": torch.ones_like(turns)}
    found = estimate(estimator, rewards, offered, **options)[0]
    return found if found.dim() == 2 else found[:, None].expand(-1, TURNS)


def shares(name: str, success: float = 0.25, completions: int = 6) -> list[float]:
    """Return the share of the expected squared advantage that falls on each turn, over all groups."""
    mass = torch.zeros(TURNS, dtype=torch.float64)
    for right in itertools.product([True, False], repeat=completions):
        weight = success ** sum(right) * (1 - success) ** (completions - sum(right))
        mass += weight * by_turn(name, list(right)).square().sum(0)
    return (mass / mass.sum()).tolist()


def exact() -> Exact:
    return {name: [round(x, 10) for x in shares(name)] for name in ESTIMATORS}


# Trained

DOORS, GROUP, STEPS = 4, 16, 180
EPISODES = DOORS * GROUP
"""Of a step."""
DIGITS = random.Random(0).sample("0123456789", DOORS)
NOISE, WINDOW, GOAL, LAST = 4, 10, 0.9, 20
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": EPISODES,
    "num_generations": GROUP,
    "max_completion_length": 64,
    "learning_rate": 3e-4,
}
KEYS = [(name, seed) for name in ESTIMATORS for seed in range(5)]
REWARD = "rewards/environment/mean"


def door(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"door {number}"}]


def chatter(seed: int, size: int) -> list[dict[str, Any]]:
    """Return conversations of random digits: one in the turn that decides, `NOISE` in the others."""
    draw = random.Random(seed)
    rows = []
    for _ in range(size):
        completion = []
        for turn in range(1, TURNS + 1):
            digits = "".join(draw.choices("0123456789", k=1 if turn == DECISIVE else NOISE))
            completion += [{"role": "assistant", "content": digits}, {"role": "user", "content": str(turn)}]
        rows.append({"prompt": door(draw.randrange(DOORS)), "completion": completion[:-1]})
    return rows


def train(name: str, seed: int) -> Run:
    import toy

    from grpo_ext import Conversation, Step
    from grpo_ext.quickstart.model import Lesson, ensure_model

    class Doors(Conversation):
        """An environment of five turns; the third decides the reward."""

        in_process = True

        def reset(self, row):
            self.digit, self.turn = row["solution"], 0

        def step(self, message):
            self.turn += 1
            paid = float(message["content"] == self.digit) if self.turn == DECISIVE else None
            return Step(str(self.turn), paid, self.turn == TURNS)

    toy.quiet()
    folder = str(ensure_model(seed, lesson=Lesson("doors", [], chatter, steps=150)))
    rows = [{"prompt": door(i), "solution": DIGITS[i]} for i in range(DOORS)]
    estimator, options = ESTIMATORS[name]
    settings = SETTINGS | {"advantage_estimator": estimator, "advantage_kwargs": options, "seed": seed}
    trainer = toy.train(folder, rows, [], settings, environments=[Doors])
    return {"curve": toy.curve(trainer, REWARD, 3)}


# Page


def episodes(curve: list[float]) -> int | None:
    """Return the episodes until `GOAL` of those of `WINDOW` steps in a row succeed."""
    steps = (s for s in range(WINDOW, len(curve) + 1) if statistics.mean(curve[s - WINDOW : s]) >= GOAL)
    return next((s * EPISODES for s in steps), None)


def success(runs: list[Run], name: str, last: int = STEPS) -> list[float]:
    """Return the share of episodes that succeed in the last steps, by seed."""
    return [statistics.mean(run["curve"][-last:]) for run in of(runs, name)]


def gained(runs: list[Run], name: str, last: int = STEPS) -> list[float]:
    """Return the success of `name` less that of `group`, by seed."""
    pairs = zip(success(runs, name, last), success(runs, "group", last), strict=True)
    return [one - other for one, other in pairs]


def judge(exact: Exact, runs: list[Run]) -> Verdict:
    better = {name: interval(gained(runs, name))[1] > 0 for name in ESTIMATORS if name != "group"}
    focused = exact["gigpo"][DECISIVE - 1] > exact["group"][DECISIVE - 1]
    word = HOLDS if focused and better["gigpo"] else ONLY_IF if better["turn_return, gamma 0"] else FAILS
    parts = ", ".join(f"{shown(gained(runs, name), 2)} (`{name}`)" for name in better)
    ends = ", ".join(f"{shown(gained(runs, name, LAST), 2)} (`{name}`)" for name in better)
    why = (
        f"Of the squared advantages {exact['group'][DECISIVE - 1]:.0%} fall on the turn that decides under `group`, "
        f"{exact['gigpo'][DECISIVE - 1]:.0%} under `gigpo`, {exact['turn_return, gamma 0'][DECISIVE - 1]:.0%} under "
        f"`turn_return` with gamma 0. Share of episodes that succeed, less that of `group`: {parts} over all {STEPS} "
        f"steps, {ends} in the last {LAST}."
    )
    if word == ONLY_IF:
        why += " It shows here only where earlier turns do not share the reward of the one that earned it."
    return Verdict(word, why)


def table(exact: Exact, runs: list[Run]) -> str:
    def until_goal(name: str) -> str:
        return ", ".join(str(episodes(run["curve"]) or f"over {STEPS * EPISODES}") for run in of(runs, name))

    rows = [
        [
            *(f"`{name}`", *(f"{share:.1%}" for share in exact[name])),
            *(shown(success(runs, name), 2), shown(success(runs, name, LAST), 2), until_goal(name)),
        ]
        for name in ESTIMATORS
    ]
    turns = (f"turn {t}" for t in range(1, TURNS + 1))
    header = ["advantages", *turns, "success, all steps", f"last {LAST}", f"episodes until {GOAL:.0%}"]
    title = "Share of the expected squared advantage on each turn (exact), and of episodes that succeed (trained):"
    return f"{title}\n\n{markdown(header, rows)}"


def draw(figure: Any, exact: Exact, runs: list[Run]) -> None:
    axis = figure.add_subplot(1, 1, 1)
    for i, name in enumerate(ESTIMATORS):
        for run in of(runs, name):
            curve = run["curve"]
            smooth = [statistics.mean(curve[max(0, k - WINDOW) : k]) for k in range(1, len(curve) + 1)]
            label = name if run["key"][-1] == 0 else None
            axis.plot([EPISODES * k for k in range(1, len(smooth) + 1)], smooth, color=f"C{i}", label=label)
    axis.axhline(GOAL, color="grey", linewidth=0.8, linestyle="--")
    axis.set(xlabel="episodes", ylabel=f"share that succeed, of {WINDOW} steps", ylim=(0, 1.03))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


CLAIM = Claim(
    name="turns",
    title="Advantages by turn learns faster than one advantage for the episode",
    paper="GiGPO, arXiv:2505.10978, from its abstract and the authors' code; `turn_return` is ours",
    statement=(
        "An advantage of the whole episode treats good and bad turns alike. GiGPO adds to it an advantage of the "
        "step, among turns of the group that began in the same state, and so learns tasks of several turns better "
        "than GRPO. We add: a return of turns with gamma 0 is better still where a turn is rewarded at once."
    ),
    experiment=(
        f"The prompt names one of {DOORS} doors; in the third of {TURNS} turns the model writes a digit, and only "
        f"this one counts: the door's digit is rewarded with 1 at once. In the other turns it writes {NOISE} digits, "
        "which are noise. The model knows digits but not the doors. Exact: the share of squared advantages on each "
        f"turn, over all groups of 6, success .25. Trained: {STEPS} steps of {EPISODES} episodes, groups of {GROUP}, "
        "learning rate 3e-4. `gigpo` has its default gamma of .95. That gamma 0 learns this task sooner than `group` "
        "was known from three other seeds; `gigpo` and gamma 1 were not. Shorter runs (80 steps, 2 digits of noise, "
        "learning rate 1e-3) showed no difference beyond the seeds."
    ),
    failure=(
        f"`gigpo` does not succeed more often than `group` over all {STEPS} steps (the interval of the difference by "
        "seed reaches 0). If only `turn_return` with gamma 0 does, the claim holds only in some cases."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=KEYS,
    train=train,
)
