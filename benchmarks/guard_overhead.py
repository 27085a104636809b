"""Cost of the NaN guard in a run without NaN: `make bench`.

Two trainers with the same weights take the same optimizer steps (rollout, rewards, loss, backward, clip, update)
from the same seeds in turn, one with the guard and one with stock transformers' clip and filter of the logged loss,
in one process and on one thread; the ratio of each pair is kept, the median reported. Times are CPU seconds. `share`
is the share of a step that the guard takes. Writes results/guard_overhead.json.
"""

import time

from step_overhead import RESULT as SIBLING
from step_overhead import Lap, compared, share_of_a_step, timed

import torch  # isort: skip
from trl import GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer

RESULT = SIBLING.with_name("guard_overhead.json")


class Unguarded(GRPOExtTrainer):
    """Without the guard's part in a step."""

    compute_loss = GRPOTrainer.compute_loss
    _clip_grad_norm = GRPOTrainer._clip_grad_norm
    _get_grad_norm = GRPOTrainer._get_grad_norm


class Step(Lap):
    """A trainer that makes one whole optimizer step at a time, as transformers' loop does."""

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


def compare(hidden: int, layers: int, pairs: int) -> dict:
    without = Step(Unguarded, GRPOExtConfig, "grpo", hidden, layers, logging_nan_inf_filter=True)
    guarded = Step(GRPOExtTrainer, GRPOExtConfig, "grpo", hidden, layers)
    for seed in range(3):
        without(seed), guarded(seed)
    own: list[float] = []
    guard = guarded.trainer._guard
    for name in ("note", "watch", "_settle"):
        setattr(guard, name, timed(getattr(guard, name), own))
    return compared(without, guarded, pairs, "guarded", own)


if __name__ == "__main__":
    share_of_a_step(compare, RESULT, __doc__)
