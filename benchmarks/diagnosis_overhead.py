"""Cost of the diagnosis and of its metrics during training: `make bench`.

Two trainers with the same weights take the same optimizer steps (rollout, rewards, loss, backward, clip, update, log)
from the same seeds in turn, one that records and one that does not, in one process and on one thread; the ratio of
each pair is kept, the median reported. Times are CPU seconds. `share` is the share of a step that the recording takes;
every step is logged, which is the most expensive case. Writes results/diagnosis_overhead.json.
"""

import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from step_overhead import RESULT as SIBLING
from step_overhead import Lap, compared, share_of_a_step, timed

import torch  # isort: skip

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.rollout.decoding import _Batch
from grpo_ext.trainer import crediting, grpo_trainer, loss, loss_terms, nonfinite
from grpo_ext.trainer.diagnosis.recording import Watching

RESULT = SIBLING.with_name("diagnosis_overhead.json")
RECORDING: dict[str, tuple[Any, str, Any]] = {
    "tokens": (loss_terms, "token_figures", {}),
    "completions": (loss, "log_weights", {}),
    "chi2": (loss, "add_ess", None),
    "row": (crediting, "row_record", None),
    "rows": (grpo_trainer, "log_rows", None),
    "gradient": (nonfinite, "gradient_figures", {}),
    "weights": (Watching, "on_optimizer_step", None),
    "log": (Watching, "on_log", None),
}
"""What records: where it is called from, and what stands there on the side that does not."""


def choose_alone(batch: _Batch, logits: torch.Tensor, log: None) -> torch.Tensor:
    """`_Batch.choose` of a sampler that keeps no log-probabilities."""
    scores = batch.processors(batch.ids[:, : batch.length], logits)
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1)[:, 0]


class Step(Lap):
    """A trainer that makes one whole optimizer step at a time, as transformers' loop does, and logs it."""

    def __init__(self, *args: Any, records: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.records, self.trainer.state.logging_steps = records, 1
        self.own: list[float] = []
        callbacks = self.trainer.callback_handler.callbacks
        self.watching = next(callback for callback in callbacks if isinstance(callback, Watching))
        self.watching.on_train_begin(self.trainer.args, self.trainer.state, None, model=self.trainer.model)

    def __call__(self, seed: int) -> float:
        with ExitStack() as patched:
            for place, name, nothing in RECORDING.values():
                method = timed(getattr(place, name), self.own) if self.records else lambda *_, n=nothing, **__: n
                patched.enter_context(patch.object(place, name, method))
            if not self.records:
                patched.enter_context(patch.object(_Batch, "choose", choose_alone))
            return self._step(seed)

    def _step(self, seed: int) -> float:
        trainer, state, batch = self.trainer, self.trainer.state, next(self.batches)
        torch.manual_seed(seed)
        start = time.process_time()
        trainer.training_step(trainer.model, batch, None)
        trainer._clip_grad_norm(trainer.model)
        trainer.optimizer.step()
        self.watching.on_optimizer_step(trainer.args, state, None)
        trainer.model.zero_grad()
        state.log_history.append({n: sum(v) / len(v) for n, v in trainer._metrics["train"].items()} | {"step": seed})
        trainer._metrics["train"].clear()
        self.watching.on_log(trainer.args, state, None)
        return time.process_time() - start


def compare(hidden: int, layers: int, pairs: int) -> dict:
    """One size of model."""
    shape = GRPOExtTrainer, GRPOExtConfig, "grpo", hidden, layers
    without, recording = Step(*shape, records=False), Step(*shape, records=True)
    for seed in range(3):
        without(seed), recording(seed)
    recording.own.clear()
    return compared(without, recording, pairs, "recording", recording.own)


if __name__ == "__main__":
    share_of_a_step(compare, RESULT, __doc__)
