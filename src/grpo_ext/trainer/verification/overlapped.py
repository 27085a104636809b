"""Train a recipe with and without `overlap: step` in float64, to compare the weights.

Many models compute their norms in float32 whatever their dtype, and a gradient that is scaled later rounds otherwise
there. So the model is a small GPT-2, whose modules compute in float64, and a micro-batch has one row. What differs is
the order in which rows are trained, and the denominators, which are known at the end of a step only.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import GPT2Config

from grpo_ext.config.arguments import GRPOExtArguments
from grpo_ext.config.chunks import waits_for_all
from grpo_ext.packing.lm_head import labelled_positions_only
from grpo_ext.rollout.samplers import RowEnded, Sampled, Sampler
from grpo_ext.trainer.verification.small import EOS, ORDINARY, SILENT, VOCABULARY, save_small
from grpo_ext.trainer.verification.watched import Weights, trained_weights

ALLOWED = 1e-12
"""Largest difference of a weight that is rounding."""
CHUNKS = 3
"""Chunks of an optimizer step on each process."""
LONGEST = 6
"""Most tokens of a completion."""
_FILE = "overlap.json"


class FixedSampler:
    """Completions that depend on the prompt and the attempt only; reports the last row first."""

    def __init__(self) -> None:
        self.versions = frozenset[int]()

    def publish(self, version: int, weights: object = None) -> None:
        """Note the version; no weights are needed."""
        self.versions = frozenset({version})

    def copy_of(self, version: int) -> None:
        """Return None: there are no weights."""

    def sample(
        self,
        version: int,
        contexts: list[list[int]],
        limits: list[int],
        streams: Sequence[np.random.Generator],
        done: RowEnded | None = None,
    ) -> list[Sampled]:
        """Draw completions; every fifth is truncated, and those of some prompts have equal rewards."""
        made = [_drawn(context, stream) for context, stream in zip(contexts, streams, strict=True)]
        for row in reversed(range(len(made))):
            if done is not None:
                done(row, made[row])
        return made

    def forget(self, version: int) -> None:
        """Drop the version."""
        self.versions -= {version}

    def paused(self) -> nullcontext[None]:
        """Return an empty context."""
        return nullcontext()

    def close(self) -> None:
        """Drop all versions."""
        self.versions = frozenset()


def _drawn(context: list[int], stream: np.random.Generator) -> Sampled:
    ids = stream.integers(ORDINARY, VOCABULARY, int(stream.integers(1, LONGEST))).tolist()
    if context[-1] % 4 == 0:
        ids[0] = SILENT
    ids = ids if stream.integers(5) == 0 else [*ids, EOS]
    return Sampled(ids, [-1.0] * len(ids), None)


class FixedCompletions:
    """Mixin for a trainer that samples by `FixedSampler` beside its training."""

    _beside: Sampler | None

    def _set_up_rollouts(self) -> None:
        super()._set_up_rollouts()  # type: ignore[misc]
        self._beside = FixedSampler()

    def trained(self) -> Weights:
        """Train, and return the weights; call it on every process."""
        with labelled_positions_only(torch.device("cpu")):  # in float64 on a GPU too
            self.train()  # type: ignore[attr-defined]
        return trained_weights(self.accelerator.unwrap_model(self.model))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Overlapped:
    """The comparison of a run that overlaps with one that does not.

    Attributes:
        split: processes, rows and accumulation.
        difference: largest absolute difference of a weight.
        waits: why no row trains before all are scored; then there is nothing to compare.
    """

    split: str
    difference: float = 0.0
    waits: str = ""

    @classmethod
    def of(cls, recipe: GRPOExtArguments, trainer: Callable[..., FixedCompletions]) -> "Overlapped":
        """Compare on all processes.

        Args:
            recipe: settings of the recipe.
            trainer: makes a trainer of a small model, from the value of `overlap` and changed settings.
        """
        changes = shortened(recipe)
        split = f"{recipe.world_size} x 1 x {changes['gradient_accumulation_steps']}"
        if reason := next(waits_for_all(recipe), ""):
            return cls(split, waits=reason)
        overlapped: Any = trainer("step", **changes)
        if reason := next(overlapped._waiting_for_all(), ""):
            return cls(split, waits=reason)
        return cls(split, largest_difference(overlapped.trained(), trainer(None, **changes).trained()))

    @property
    def differs(self) -> bool:
        """Whether the difference is more than rounding."""
        return self.difference > ALLOWED

    def columns(self) -> tuple[str, str, str]:
        """Return split, difference and verdict in words."""
        if self.waits:
            return self.split, f"no row trains early: {self.waits}", "equal"
        return self.split, f"{self.difference:.1e} (weights, float64)", "DIFFERS" if self.differs else "equal"

    def write(self, folder: Path) -> None:
        """Write it on the first process."""
        if PartialState().is_main_process:
            (folder / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Overlapped | None":
        """Return what was written; None if nothing was."""
        file = folder / _FILE
        return cls(**json.loads(file.read_text())) if file.exists() else None


def save_model(folder: Path) -> None:
    """Write the small model and its tokenizer to `folder`."""
    GPT2Config().save_pretrained(folder / "large")
    save_small(str(folder / "large"), folder)


def shortened(recipe: GRPOExtArguments) -> dict[str, Any]:
    """Return changes of a recipe's settings by which a short run has several chunks."""
    windows = min(2, max(1, int(recipe.steps_per_generation or 1) // recipe.gradient_accumulation_steps))
    window = CHUNKS * int(recipe.num_generations or 1)
    return {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": window,
        "steps_per_generation": windows * window,
        "max_steps": min(6, 2 * windows * recipe.num_iterations),
        "max_grad_norm": recipe.max_grad_norm,  # gradients have their denominators before they are clipped
        "rollout_engine": "process",
        "shared_prefix": "false",
        "cache_implementation": None,
        "torch_compile": False,
        "model_init_kwargs": {"dtype": torch.float64},
    }


def largest_difference(weights: Weights, others: Weights) -> float:
    """Return the largest absolute difference of two runs' weights."""
    return max((weights[name].double() - others[name].double()).abs().max().item() for name in weights)
