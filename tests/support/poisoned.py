"""Trainers of a tiny model into which NaN or inf is put at one place of one micro-batch, on one rank."""

import torch

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from support import tiny
from support.trainers import scripted_rollout

PLACES = ("loss", "gradient", "logps", "rewards")
SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "loss_type": "grpo",
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "learning_rate": 0.02,
}
"""Windows of two steps of two micro-batches."""
PARAMETER = "model.layers.0.mlp.up_proj.weight"


class Poisoned(GRPOExtTrainer):
    """Poisons micro-batch `micro_batch` of step `step`, both from 1, on `rank`; further steps by `also`."""

    place, value, step, micro_batch, rank, also = "", torch.nan, 2, 1, 0, ()

    def poison(self, place: str) -> bool:
        steps = {self.step, *self.also}
        here = place == self.place and self.accelerator.process_index == self.rank and self.model.training
        micro_batch = self._step % self.args.gradient_accumulation_steps + 1
        return here and self.state.global_step + 1 in steps and micro_batch == self.micro_batch

    def arm(self, place, **where):
        self.place = place
        vars(self).update(where)
        parameter = dict(self.model.named_parameters())[PARAMETER]
        parameter.register_hook(self._hook)
        return self

    def _hook(self, gradient):
        if self.poison("gradient"):
            gradient = gradient.clone()
            gradient[0, 0] = self.value
        return gradient

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        return loss * self.value if self.poison("loss") else loss

    def _scores(self, model, inputs, active):
        logps, *rest = super()._scores(model, inputs, active)
        if self.poison("logps") and torch.is_grad_enabled():
            logps = logps.clone()
            logps[1, 0] = self.value
        return logps, *rest


def bad_reward(value, rank=0, at=2):
    """A reward that gives `value` to its row 1 at optimizer step `at`, or where a generation of that step is made."""

    def judged(completions, trainer_state, **_):
        import os

        scores = [float(len(c) % 5) for c in completions]
        if trainer_state.global_step + 1 == at and int(os.environ.get("RANK", 0)) == rank:
            scores[1] = value
        return scores

    return judged


def build(model, folder, rewards=(tiny.count_a,), **settings):
    args = GRPOExtConfig(output_dir=str(folder), **(tiny.TRAINING | SETTINGS | settings))
    return Poisoned(
        model, list(rewards), args, tiny.prompts(64), processing_class=tiny.tokenizer(), rollout_func=scripted_rollout
    )
