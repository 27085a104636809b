"""Cost of what is recorded for a diagnosis, and of the diagnosis while a run trains: `make bench`.

Two trainers with the same weights take the same optimizer steps (rollout, rewards, loss, backward, clip, update, log)
from the same seeds in turn, one that records and one that does not, in one process and on one thread; the ratio of
each pair is kept, the median reported. Seconds are the processor's, so that a busy machine does not count. `share` is
what the recording's own lines take of a step; every step is logged, which is the dearest there is. Writes
results/doctor_overhead.json.
"""

import argparse
import json
import logging
import platform
import statistics
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from step_overhead import RESULT as SIBLING
from step_overhead import Lap, paired

import torch  # isort: skip
import transformers
import trl

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.rollout.transformers_engine import _Batch
from grpo_ext.trainer import grpo_trainer, metrics, nonfinite
from grpo_ext.trainer.diagnosis.watching import Watching

RESULT = SIBLING.with_name("doctor_overhead.json")
PAIRS = 60
RECORDING: dict[str, tuple[Any, str, Any]] = {
    "tokens": (metrics, "token_figures", {}),
    "chi2": (grpo_trainer, "add_ess", None),
    "row": (grpo_trainer, "row_record", None),
    "rows": (grpo_trainer, "log_rows", None),
    "gradient": (nonfinite, "gradient_figures", {}),
    "before": (Watching, "on_pre_optimizer_step", None),
    "after": (Watching, "on_optimizer_step", None),
    "log": (Watching, "on_log", None),
}
"""What records: where it is called from, and what stands there on the side that does not."""


def choose_alone(batch: _Batch, logits: torch.Tensor) -> torch.Tensor:
    """`_Batch.choose` of a sampler that keeps no log-probabilities."""
    scores = batch.processors(batch.ids[:, : batch.length], logits)
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1)[:, 0]


class Step(Lap):
    """A trainer that is asked for one whole optimizer step at a time, as transformers' loop makes it, and logs it."""

    def __init__(self, *args: Any, records: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.records, self.trainer.state.logging_steps = records, 1
        self.own: list[float] = []
        callbacks = self.trainer.callback_handler.callbacks
        self.watching = next(callback for callback in callbacks if isinstance(callback, Watching))

    def __call__(self, seed: int) -> float:
        with ExitStack() as patched:
            for place, name, nothing in RECORDING.values():
                method = self._timed(getattr(place, name)) if self.records else lambda *_, n=nothing, **__: n
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
        self.watching.on_pre_optimizer_step(trainer.args, state, None, model=trainer.model)
        trainer.optimizer.step()
        self.watching.on_optimizer_step(trainer.args, state, None, model=trainer.model)
        trainer.model.zero_grad()
        state.log_history.append({n: sum(v) / len(v) for n, v in trainer._metrics["train"].items()} | {"step": seed})
        trainer._metrics["train"].clear()
        self.watching.on_log(trainer.args, state, None)
        return time.process_time() - start

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.own.append(time.process_time() - start)

        return call


def compare(hidden: int, layers: int, pairs: int) -> dict:
    """One size of model."""
    shape = GRPOExtTrainer, GRPOExtConfig, "grpo", hidden, layers
    without, recording = Step(*shape, records=False), Step(*shape, records=True)
    for seed in range(3):
        without(seed), recording(seed)
    recording.own.clear()
    times, ratios = paired(without, recording, pairs)
    return {
        "hidden": hidden,
        "layers": layers,
        "pairs": pairs,
        "without_seconds": statistics.median(t for t, _ in times),
        "recording_seconds": statistics.median(t for _, t in times),
        "share": sum(recording.own) / sum(t for _, t in times),
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
