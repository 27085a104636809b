"""Cost of looking for NaN and inf where there is none: `make bench`.

Two trainers with the same weights take the same optimizer steps (rollout, rewards, loss, backward, clip, update)
from the same seeds in turn, one with the guard and one with stock transformers' clip and filter of the logged loss,
in one process and on one thread; the ratio of each pair is kept, the median reported. Seconds are the processor's, so
that a busy machine does not count. `share` is what the guard's own lines take of a step. Writes
results/guard_overhead.json.
"""

import argparse
import json
import logging
import platform
import statistics
import time

from step_overhead import RESULT as SIBLING
from step_overhead import Lap, paired

import torch  # isort: skip
import transformers
import trl
from trl import GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer

RESULT = SIBLING.with_name("guard_overhead.json")
PAIRS = 60


class Unguarded(GRPOExtTrainer):
    """Without the guard's part in a step."""

    compute_loss = GRPOTrainer.compute_loss
    _clip_grad_norm = GRPOTrainer._clip_grad_norm
    _get_grad_norm = GRPOTrainer._get_grad_norm


class Step(Lap):
    """A trainer that is asked for one whole optimizer step at a time, as transformers' loop makes it."""

    def __call__(self, seed: int) -> float:
        trainer, batch = self.trainer, next(self.batches)
        torch.manual_seed(seed)
        start = time.process_time()
        loss = trainer.training_step(trainer.model, batch, None)
        if trainer.args.logging_nan_inf_filter:
            bool(torch.isnan(loss) or torch.isinf(loss))
        trainer._get_grad_norm(trainer.model, trainer._clip_grad_norm(trainer.model))
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return time.process_time() - start


def timed(guard, *names: str) -> list[float]:
    """Seconds of each call of the guard's methods from now on."""
    seconds: list[float] = []

    def wrapped(method):
        def call(*args, **kwargs):
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.process_time() - start)

        return call

    for name in names:
        setattr(guard, name, wrapped(getattr(guard, name)))
    return seconds


def compare(hidden: int, layers: int, pairs: int) -> dict:
    without = Step(Unguarded, GRPOExtConfig, "grpo", hidden, layers, logging_nan_inf_filter=True)
    guarded = Step(GRPOExtTrainer, GRPOExtConfig, "grpo", hidden, layers)
    for seed in range(3):
        without(seed), guarded(seed)
    own = timed(guarded.trainer._guard, "note", "watch", "_settle")
    times, ratios = paired(without, guarded, pairs)
    return {
        "hidden": hidden,
        "layers": layers,
        "pairs": pairs,
        "without_seconds": statistics.median(t for t, _ in times),
        "guarded_seconds": statistics.median(t for _, t in times),
        "share": sum(own) / sum(t for _, t in times),
        **ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = [compare(hidden, layers, pairs) for hidden, layers in ((64, 2), (128, 4), (256, 4))]
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    RESULT.write_text(json.dumps({"machine": platform.machine(), **versions, "results": results}, indent=2) + "\n")
    for r in results:
        model = f"{r['layers']} x {r['hidden']}"
        print(f"{model}: {r['without_seconds']:.4f} s, ratio {r['ratio_median']:.4f}, own lines {r['share']:.4%}")


if __name__ == "__main__":
    main()
