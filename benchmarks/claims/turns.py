"""Credit by turn: GiGPO and returns of turns, in a task of five turns of which one decides."""

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

DOORS, GROUP, STEPS = 4, 16, 80
EPISODES = DOORS * GROUP
"""Of a step."""
DIGITS = random.Random(0).sample("0123456789", DOORS)
NOISE, WINDOW, SMOOTH = 2, 20, 5
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": EPISODES,
    "num_generations": GROUP,
    "max_completion_length": 48,
    "learning_rate": 1e-3,
}
KEYS = [(name, seed) for name in ESTIMATORS for seed in range(5)]
REWARD = "rewards/environment/mean"


def demonstrate(draw: random.Random) -> tuple[str, str]:
    """Return random digits: one in the turn that decides, `NOISE` in the others."""
    said = ["".join(draw.choices("0123456789", k=1 if t == DECISIVE else NOISE)) for t in range(1, TURNS + 1)]
    between = [f"<eos><user>{turn}<assistant>" for turn in range(1, TURNS)]
    text = "".join(a + b for a, b in zip(said, [*between, ""], strict=True))
    return f"<user>door {draw.randrange(DOORS)}<assistant>", text


def train(name: str, seed: int) -> Run:
    import toy

    from grpo_ext import Conversation, Step

    class Doors(Conversation):
        """An environment of five turns; the third decides the reward."""

        in_process = True

        def reset(self, row):
            self.digit, self.turn = row["solution"], 0

        def step(self, message):
            self.turn += 1
            paid = float(message["content"] == self.digit) if self.turn == DECISIVE else None
            return Step(str(self.turn), paid, self.turn == TURNS)

    folder = toy.warm("turns", seed, demonstrate)
    rows = [{"prompt": [{"role": "user", "content": f"door {i}"}], "solution": DIGITS[i]} for i in range(DOORS)]
    estimator, options = ESTIMATORS[name]
    settings = SETTINGS | {"advantage_estimator": estimator, "advantage_kwargs": options, "seed": seed}
    trainer = toy.train(folder, rows, [], settings, environments=[Doors])
    return {"curve": toy.curve(trainer, REWARD, 3)}


# Page


def success(runs: list[Run], name: str) -> list[float]:
    """Return the share of episodes that succeed in the last `WINDOW` steps, by seed."""
    return [statistics.mean(run["curve"][-WINDOW:]) for run in of(runs, name)]


def gained(runs: list[Run], name: str) -> list[float]:
    """Return the success of `name` less that of `group`, by seed."""
    return [one - other for one, other in zip(success(runs, name), success(runs, "group"), strict=True)]


def judge(exact: Exact, runs: list[Run]) -> Verdict:
    better = {name: interval(gained(runs, name))[1] > 0 for name in ESTIMATORS if name != "group"}
    focused = exact["gigpo"][DECISIVE - 1] > exact["group"][DECISIVE - 1]
    word = HOLDS if focused and better["gigpo"] else ONLY_IF if better["turn_return, gamma 0"] else FAILS
    parts = ", ".join(f"{shown(gained(runs, name), 2)} (`{name}`)" for name in better)
    why = (
        f"Of the squared advantages {exact['group'][DECISIVE - 1]:.0%} fall on the turn that decides under `group`, "
        f"{exact['gigpo'][DECISIVE - 1]:.0%} under `gigpo`, {exact['turn_return, gamma 0'][DECISIVE - 1]:.0%} under "
        f"`turn_return` with gamma 0. Success in the last {WINDOW} of {STEPS} steps, less that of `group`: {parts}."
    )
    if word == ONLY_IF:
        why += " Credit by turn pays here only if later turns do not share the reward of the turn that earned it."
    return Verdict(word, why)


def table(exact: Exact, runs: list[Run]) -> str:
    rows = [
        [f"`{name}`", *(f"{share:.1%}" for share in exact[name]), shown(success(runs, name), 2)] for name in ESTIMATORS
    ]
    header = ["advantages", *(f"turn {t}" for t in range(1, TURNS + 1)), "success"]
    title = f"Share of the expected squared advantage on each turn (exact), and success in the last {WINDOW} steps:"
    return f"{title}\n\n{markdown(header, rows)}"


def draw(figure: Any, exact: Exact, runs: list[Run]) -> None:
    axis = figure.add_subplot(1, 1, 1)
    for i, name in enumerate(ESTIMATORS):
        for run in of(runs, name):
            curve = run["curve"]
            smooth = [statistics.mean(curve[max(0, k - SMOOTH) : k]) for k in range(1, len(curve) + 1)]
            label = name if run["key"][-1] == 0 else None
            axis.plot([EPISODES * k for k in range(1, len(smooth) + 1)], smooth, color=f"C{i}", label=label)
    axis.set(xlabel="episodes", ylabel=f"share that succeed, of {SMOOTH} steps", ylim=(0, 1.03))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


CLAIM = Claim(
    name="turns",
    title="Credit by turn learns faster than one advantage for the episode",
    paper="GiGPO, arXiv:2505.10978, from its abstract and the authors' code; `turn_return` is ours",
    statement=(
        "An advantage of the whole episode treats good and bad turns alike. GiGPO adds to it an advantage of the "
        "step, among turns of the group that began in the same state, and so learns tasks of several turns better "
        "than GRPO. We add: a return of turns with gamma 0 is better still where a turn is rewarded at once."
    ),
    experiment=(
        f"The prompt names one of {DOORS} doors; in the third of {TURNS} turns the model writes a digit, and only "
        f"this one counts: the door's digit is rewarded with 1 at once. In the other turns it writes {NOISE} digits, "
        "which are noise. Exact: the share of squared advantages on each turn, over all groups of 6, success .25. "
        f"Trained: {STEPS} steps of {EPISODES} episodes, learning rate 1e-3. `gigpo` has its default gamma of .95. "
        "In a pilot (seed 100) no run arrived at 90 % within these steps, and at twice the learning rate `group` "
        "collapsed, so success at the end is compared in place of episodes until a goal. The longer runs of "
        "[turn_credit.md](turn_credit.md) count those."
    ),
    failure=(
        "`gigpo` does not succeed more often than `group` (the interval of the difference by seed reaches 0). If "
        "only `turn_return` with gamma 0 does, the claim holds only in some cases."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=KEYS,
    train=train,
)
