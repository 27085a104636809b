"""Peak memory of a step whose micro-batches have a number of rows, or of tokens: `python benchmarks/token_limits.py`.

A ragged batch on a CPU: four prompts of 24 to 384 tokens, each with eight completions of 4 to 256 tokens. The peak
is that of the tensors that torch allocates over all forwards and backwards of the step, by its profiler: gradients and
activations. The gradient of pieces is compared with that of the whole micro-batch. Writes results/token_limits.json.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from grpo_ext.packing.micro_batches import MicroBatch, regroup, rows_of
from grpo_ext.packing.pieces import TokenLimit
from memory_estimate import peak
from shared_prefix import Side, Work

RESULT = Path(__file__).parent / "results" / "token_limits.json"
PROMPTS = (24, 64, 160, 384)
LENGTHS = (  # easy prompts have short answers, and each group has a long one
    (4, 5, 6, 7, 9, 11, 15, 60),
    (12, 15, 20, 24, 30, 36, 45, 150),
    (30, 45, 55, 65, 75, 90, 120, 256),
    (8, 20, 40, 60, 100, 150, 200, 256),
)
LONGEST = max(map(max, LENGTHS))
WORK = Work("ragged", PROMPTS[-1], LENGTHS[0], 0.0, vocabulary=1000, hidden=128, layers=3)
LIMITS: tuple[dict[str, int], ...] = (
    {"rows": 32}, {"rows": 16}, {"rows": 8}, {"rows": 4}, {"rows": 2}, {"tokens": 1600}, {"tokens": 1000},
    {"tokens": 700},
)  # fmt: skip
"""Sizes of micro-batches: in rows, or whole ones with `micro_batch_tokens`."""


def batch() -> MicroBatch:
    """All rows of the step, padded, in a random order."""
    g = torch.Generator().manual_seed(0)
    lengths, prompts = torch.tensor(LENGTHS).flatten(), torch.tensor(PROMPTS).repeat_interleave(8)
    ids = torch.randint(3, WORK.vocabulary, (len(PROMPTS), PROMPTS[-1]), generator=g).repeat_interleave(8, dim=0)
    rows = {
        "prompt_ids": ids,
        "prompt_mask": (torch.arange(PROMPTS[-1]) >= PROMPTS[-1] - prompts[:, None]).long(),
        "completion_ids": torch.randint(3, WORK.vocabulary, (32, LONGEST), generator=g),
        "completion_mask": (torch.arange(LONGEST) < lengths[:, None]).long(),
        "advantages": torch.randn(32, generator=g),
    }
    order = torch.randperm(32, generator=g)
    made = {name: value[order] for name, value in rows.items()}
    return MicroBatch(**made, num_items_in_batch=lengths.sum())  # type: ignore[typeddict-item]


class Measured:
    """A trainer that makes the step by one limit after another."""

    def __init__(self) -> None:
        self.trainer = Side("grpo-ext", WORK, "cpu", shared_prefix="true").trainer
        self.trainer.sharing.checked = True
        self.computed: list[int] = []
        self.trainer.model.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, args: Any, kwargs: dict[str, Any]) -> None:
        self.computed.append((args[0] if args else kwargs["input_ids"]).numel())

    def step(self, rows: int = 32, tokens: int | None = None) -> tuple[dict[str, Any], Tensor]:
        """Return the figures of all micro-batches of the step, and its gradient."""
        trainer = self.trainer
        trainer._scorer.limit = None if tokens is None else TokenLimit(tokens, trainer.sharing)
        trainer.model.zero_grad()
        self.computed.clear()
        everything = batch()
        parts = [rows_of(everything, torch.arange(first, first + rows)) for first in range(0, 32, rows)]
        parts = regroup(parts, len(parts))
        trainer.current_gradient_accumulation_steps = len(parts)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for part in parts:
                trainer._compute_loss(trainer.model, part).backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        figures = {"forwards": len(self.computed), "most_tokens": max(self.computed)}
        return figures | {"peak_mib": round(peak(profiled) / 2**20, 1)}, gradient


def main() -> None:
    """Measure each limit, and write the results."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    measured = Measured()
    made = [(limit, *measured.step(**limit)) for limit in LIMITS]
    known, rows = made[0][2], []
    for limit, line, gradient in made:
        off = {"off": ((gradient - known).norm() / known.norm()).item()} if "tokens" in limit else {}
        rows.append(limit | line | off)
    print(*rows, sep="\n", flush=True)
    about = {"torch": torch.__version__}
    RESULT.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
