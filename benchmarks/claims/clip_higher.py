"""DAPO's clip-higher: a higher upper clip keeps entropy and leaves room for rare tokens."""

import math
import random
import statistics
from typing import Any

import torch
from claim import FAILS, HOLDS, ONLY_IF, Claim, Exact, Run, Verdict, interval, markdown, of, shown
from torch import Tensor

from grpo_ext.objective.estimate import estimate
from grpo_ext.objective.surrogates import surrogates

EPSILONS = [0.2, 0.28, 10.0]
"""The values of epsilon_high; the last never clips."""
GROUP, UPDATES, RATES = 8, 16, (1.0, 4.0)
RARE = [0.01, 0.05, 0.1, 0.3, 0.6, 0.9]


def mean_advantages(success: float, group: int = GROUP) -> tuple[float, float]:
    """Return the expected advantage of a right and of a wrong completion of `group`, by `estimate`."""
    right = wrong = 0.0
    for others in range(group):
        weight = math.comb(group - 1, others) * success**others * (1 - success) ** (group - 1 - others)
        for first in (1.0, 0.0):
            rewards = torch.tensor([[first] + [1.0] * others + [0.0] * (group - 1 - others)], dtype=torch.float64)
            value = weight * estimate("group", rewards)[0, 0].item()
            right, wrong = (right + value, wrong) if first else (right, wrong + value)
    return right, wrong


def generation(logits: Tensor, rewarded: Tensor, epsilon_high: float, rate: float, updates: int = UPDATES) -> Tensor:
    """Return the logits after `updates` steps on the expected clipped loss of one generation of one-token answers."""
    old = logits.log_softmax(-1).detach()
    right, wrong = mean_advantages(old[rewarded].exp().sum().item())
    advantages = torch.where(rewarded, right, wrong).to(torch.float64)
    for _ in range(updates):
        leaf = logits.clone().requires_grad_()
        log_ratio = leaf.log_softmax(-1) - old
        loss = surrogates["clip"](log_ratio[None], advantages[None], epsilon_low=0.2, epsilon_high=epsilon_high)
        (slope,) = torch.autograd.grad((old.exp() * loss[0]).sum(), leaf)
        logits = logits - rate * slope
    return logits


def entropy(logits: Tensor) -> float:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum().item()


def policy(*probabilities: float, wrong: int = 6) -> tuple[Tensor, Tensor]:
    """Return logits and which tokens are right: `probabilities`. Of the rest, one wrong token has half."""
    rest = 1 - sum(probabilities)
    tail = [rest / 2] + [rest / 2 / (wrong - 1)] * (wrong - 1)
    logits = torch.tensor([*probabilities, *tail], dtype=torch.float64).log()
    return logits, torch.arange(len(logits)) < len(probabilities)


def growth(probability: float, epsilon_high: float, rate: float) -> float:
    """Return the ratio that the probability of the only right token reaches in one generation."""
    logits, rewarded = policy(probability)
    return generation(logits, rewarded, epsilon_high, rate).softmax(-1)[0].item() / probability


def course(epsilon_high: float, rate: float, generations: int = 30) -> dict[str, list[float]]:
    """Return success, entropy and the rarest right token's probability, where three tokens are right."""
    logits, rewarded = policy(0.2, 0.05, 0.01)
    found: dict[str, list[float]] = {"success": [], "entropy": [], "rarest": []}
    for _ in range(generations):
        now = logits.softmax(-1)
        found["success"].append(round(now[rewarded].sum().item(), 5))
        found["entropy"].append(round(entropy(logits), 5))
        found["rarest"].append(round(now[2].item(), 6))
        logits = generation(logits, rewarded, epsilon_high, rate)
    return found


def exact() -> Exact:
    return {
        "growth": {
            f"{rate:g}": {f"{p:g}": [round(growth(p, e, rate), 4) for e in EPSILONS] for p in RARE} for rate in RATES
        },
        "course": {f"{rate:g}": {f"{e:g}": course(e, rate) for e in EPSILONS} for rate in RATES},
    }


# Trained

PROMPTS = "abcdefgh"
ANSWERS = {p: str(1 + i) for i, p in enumerate(PROMPTS)}
"""The digit of each prompt; the model prefers 0, which is wrong for all."""
STEPS, ITERATIONS, ATTEMPTS, WINDOW = 160, 8, 64, 5
SETTINGS: dict[str, Any] = {
    "loss_type": "dapo",
    "num_iterations": ITERATIONS,
    "max_steps": STEPS,
    "learning_rate": 5e-4,
    "max_completion_length": 2,
}
TRAINED = EPSILONS[:2]
KEYS = [(epsilon, seed) for epsilon in TRAINED for seed in range(5)]


def demonstrate(draw: random.Random) -> tuple[str, str]:
    return draw.choice(PROMPTS), "0" if draw.random() < 0.7 else draw.choice("123456789")


def right(prompts, completions, **_) -> list[float]:
    return [float(text == ANSWERS[p]) for p, text in zip(prompts, completions, strict=True)]


def pass_rate(solved: int, attempts: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n - c, k) / C(n, k)."""
    return 1 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def train(epsilon_high: float, seed: int) -> Run:
    import toy
    from transformers import TrainerCallback

    ids = torch.tensor(toy.TOKENIZER(list(PROMPTS))["input_ids"])
    entropies, rewards = [], []

    class Watch(TrainerCallback):
        """Keeps the entropy of the answer after each generation, over all prompts."""

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step % ITERATIONS == 0:
                with torch.no_grad():
                    entropies.append(entropy(model(input_ids=ids).logits[:, -1].double()) / len(ids))

    def watched(prompts, completions, **_):
        found = right(prompts, completions)
        rewards.append(statistics.mean(found))
        return found

    folder = toy.warm("clip_higher", seed, demonstrate)
    settings = SETTINGS | {"epsilon_high": epsilon_high, "seed": seed}
    trainer = toy.train(folder, [{"prompt": p} for p in PROMPTS], [watched], settings, [Watch()])
    texts = toy.sample(trainer.model, PROMPTS, ATTEMPTS, seed, limit=2)
    solved = [one.count(ANSWERS[p]) for p, one in zip(PROMPTS, texts, strict=True)]
    return {
        "entropy": round(statistics.mean(entropies[-WINDOW:]), 4),
        "clipped high": round(statistics.mean(toy.curve(trainer, "clip_ratio/high_mean")), 4),
        **{f"pass@{k}": round(statistics.mean(pass_rate(c, ATTEMPTS, k) for c in solved), 4) for k in (1, 16)},
        "curves": {
            name: [round(x, 3) for x in curve] for name, curve in {"entropy": entropies, "reward": rewards}.items()
        },
    }


# Page


def figures(runs: list[Run], epsilon_high: float, name: str) -> list[float]:
    return [run[name] for run in of(runs, epsilon_high)]


def gain(runs: list[Run], name: str) -> list[float]:
    """Return the figure at epsilon_high = 0.28 less that at 0.2, by seed."""
    return [one - other for one, other in zip(figures(runs, 0.28, name), figures(runs, 0.2, name), strict=True)]


def entropies(exact: Exact, rate: str, generations: int = 6) -> list[float]:
    """Return the entropy of the enumerated policy after some generations, for each epsilon."""
    return [exact["course"][rate][f"{e:g}"]["entropy"][generations] for e in EPSILONS]


def judge(exact: Exact, runs: list[Run]) -> Verdict:
    signs = [at[1] > at[0] for at in (entropies(exact, rate) for rate in exact["course"])]
    better = {name: interval(gain(runs, name))[1] > 0 for name in ("entropy", "pass@16")}
    word = HOLDS if all(signs) and all(better.values()) else ONLY_IF if any(signs) and better["entropy"] else FAILS
    why = (
        f"Trained, {ITERATIONS} updates per generation: epsilon_high .28 less .2 is {shown(gain(runs, 'entropy'))} in "
        f"entropy and {shown(gain(runs, 'pass@16'))} in pass@16. Exact: with small updates a generation lets a right "
        f"token of probability .01 grow by {exact['growth']['1']['0.01'][0]:.2f} under .2 and by "
        f"{exact['growth']['1']['0.01'][1]:.2f} under .28"
    )
    if not all(signs):
        why += (
            "; with updates so large that the first one passes both borders the two do the same, and the entropy is "
            "not higher"
        )
    border, free = entropies(exact, "1")[0], entropies(exact, "1")[2]
    why += (
        f". Without any upper border the exact entropy falls fastest: {free:.2f} after 6 generations, not {border:.2f}"
    )
    return Verdict(word, why + ".")


def table(exact: Exact, runs: list[Run]) -> str:
    header = ["probability", *(f"rate {rate}: {e:g}" for rate in exact["growth"] for e in EPSILONS)]
    rows = [[f"{p:g}", *(f"{value:.2f}" for at in exact["growth"].values() for value in at[f"{p:g}"])] for p in RARE]
    lines = [
        f"Exact: factor by which the probability of the only right token grows in one generation of {UPDATES} "
        "updates, by learning rate and epsilon_high.",
        "",
        markdown(header, rows),
        "",
        "Exact: entropy after 6 generations where three tokens are right, with probabilities .2, .05 and .01.",
        "",
        markdown(
            ["rate", *(f"epsilon_high {e:g}" for e in EPSILONS)],
            [[rate, *(f"{value:.3f}" for value in entropies(exact, rate))] for rate in exact["course"]],
        ),
        "",
        f"Trained: entropy of the answer after the last {WINDOW} of {STEPS // ITERATIONS} generations, share of "
        "tokens clipped from above, and pass@k.",
        "",
    ]
    names = ["entropy", "clipped high", "pass@1", "pass@16"]
    rows = [[f"{e:g}", *(shown(figures(runs, e, name)) for name in names)] for e in TRAINED]
    return "\n".join([*lines, markdown(["epsilon_high", *names], rows)])


def draw(figure: Any, exact: Exact, runs: list[Run]) -> None:
    axis = figure.add_subplot(1, 2, 1)
    for i, epsilon in enumerate(EPSILONS):
        for rate, style in zip(exact["course"], ("-", "--"), strict=True):
            curve = exact["course"][rate][f"{epsilon:g}"]["entropy"]
            axis.plot(curve, style, color=f"C{i}", label=f"{epsilon:g}, rate {rate}")
    axis.set(xlabel="generation", ylabel="entropy", title="exact, three right tokens")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    axis = figure.add_subplot(1, 2, 2)
    for i, epsilon in enumerate(TRAINED):
        for run in of(runs, epsilon):
            label = f"epsilon_high {epsilon:g}" if run["key"][-1] == 0 else None
            axis.plot(run["curves"]["entropy"], color=f"C{i}", linewidth=1, label=label)
    axis.set(xlabel="generation", ylabel="entropy", title="trained, a line for each seed")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


CLAIM = Claim(
    name="clip_higher",
    title="A higher upper clip keeps entropy",
    paper="DAPO, arXiv:2503.14476",
    statement=(
        "The upper clip of PPO holds back tokens that are rare and right: one of probability .01 can rise to .012 "
        "only, one of .9 is not held back at all. So entropy collapses. With the upper border at .28 and the lower "
        "one left at .2 the policy keeps a higher entropy and gives more diverse samples."
    ),
    experiment=(
        f"Exact: a policy of one token, groups of {GROUP}, expected advantages by enumeration, {UPDATES} gradient "
        "steps on the expected loss of each generation, at two learning rates. Trained: 8 prompts with one right "
        f"digit each, which the model writes 1 time in 30 at first (it prefers a wrong one); `dapo`, {ITERATIONS} "
        f"updates for each generation, {STEPS} updates, learning rate 5e-4; pass@k from {ATTEMPTS} samples of each "
        "prompt."
    ),
    failure=(
        "The entropy at the end is not higher under .28 than under .2 (the interval of the difference by seed "
        "reaches 0), or the exact entropy after 6 generations is not higher at any rate. If the entropy is higher, "
        "but pass@16 is not, or not at every rate, the claim holds only in some cases."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=KEYS,
    train=train,
)
