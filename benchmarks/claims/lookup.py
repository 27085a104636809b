"""A task whose pass rates are set by the warm-up: keys and their answers, one character, learned by heart.

All figures of a model are exact: the probability of a completion is read off, not sampled.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import toy
from transformers import PreTrainedModel, TrainerCallback

ANSWERS = "0123456789"
KEYS = [f"{a}{b}=" for a in "abcd" for b in "pqrs"]
RATES = (0.5, 0.1, 0.02, 0.005)
"""Share of right answers among the demonstrations of the keys 0, 4, 8 ..., of 1, 5, 9 ... and so on."""


def solutions(seed: int) -> list[str]:
    """Return the right answer of each key."""
    return random.Random(f"solutions {seed}").choices(ANSWERS, k=len(KEYS))


def warm(seed: int) -> str:
    """Return the folder of a model that answers as often right as `RATES` say, as far as it learns them."""
    right = solutions(seed)

    def demonstrate(draw: random.Random) -> tuple[str, str]:
        i = draw.randrange(len(KEYS))
        wrong = [a for a in ANSWERS if a != right[i]]
        return KEYS[i], right[i] if draw.random() < RATES[i % len(RATES)] else draw.choice(wrong)

    return toy.warm("lookup", seed, demonstrate, 300)


def exactly(completions: Sequence[str], solution: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for the solution, else 0."""
    return [float(made == right) for made, right in zip(completions, solution, strict=True)]


@torch.no_grad()
def distributions(model: PreTrainedModel, keys: Sequence[str]) -> list[list[float]]:
    """Return the probability of each answer, its end included, for each key."""
    batch = toy._batch([(key, answer) for key in keys for answer in ANSWERS])
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    taken = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(labels >= 0, taken, 0.0).sum(1).exp().view(len(keys), -1).tolist()


class Watch(TrainerCallback):
    """Keeps figures of the model before training and after every fifth step."""

    def __init__(self, figures: Callable[[PreTrainedModel], list[float]]) -> None:
        self.figures = figures
        self.seen: list[list[float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Look at the warm model."""
        self.seen.append([round(x, 4) for x in self.figures(model)])

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Look at every fifth step."""
        if state.global_step % 5 == 0:
            self.seen.append([round(x, 4) for x in self.figures(model)])


def train(
    seed: int,
    rows: Sequence[dict[str, str]],
    estimator: dict[str, Any],
    steps: int,
    figures: Callable[[PreTrainedModel], list[float]],
) -> list[list[float]]:
    """Train on rows with an advantage estimator, everything else that of `grpo`; return what `figures` saw."""
    watch = Watch(figures)
    settings = {"loss_type": "grpo", "max_completion_length": 2, "per_device_train_batch_size": 128}
    settings |= {"num_generations": 16, "max_steps": steps, "seed": seed}
    toy.train(warm(seed), rows, [exactly], settings | estimator, [watch])
    return watch.seen
