"""Rows that look at a whole generation, or at its age, in training."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_ahead import trained as ahead_of_training
from transformers import TrainerCallback

from grpo_ext.objective.covariance import highest
from grpo_ext.objective.sampler_correction import interpolated
from grpo_ext.trainer.loss import Loss
from support import tiny
from support.trainers import build, scripted_rollout, weights

ROWS = ("dppo_kl", "dro", "p3o", "kl_cov", "clip_cov", "gtpo", "tpo")
CASES = {row: {"loss_type": row} for row in ROWS}
EVERY_ENTROPY = {"advantage_kwargs": {"entropy_limit": None}}  # an untrained model's is above ln 2
CASES["gtpo"] |= EVERY_ENTROPY
CASES["iw_opd"] = {"loss_type": "dapo", "advantage_estimator": "iw_opd", "beta": 0.1}
TWO_STEPS = {"steps_per_generation": 2, "max_steps": 4, "learning_rate": 0.05}


class Apart(TrainerCallback):
    """Moves the policy away from its reference, which is its teacher, behind the first generation."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", CASES)
def test_each_trains(case, model_path, tmp_path):
    trainer = build(model_path, tmp_path, rollout=scripted_rollout, **TWO_STEPS, **CASES[case])
    if case == "iw_opd":
        trainer.add_callback(Apart())
    before = weights(trainer.model)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 4
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps[2 * (case == "iw_opd") :])
    assert (weights(trainer.model) - before).norm() > 1e-4


SPLITS = {
    "whole": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "prompts not shared": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "shared_prefix": "false",
    },
}


@pytest.mark.parametrize("row", ["kl_cov", "clip_cov", "p3o", "gtpo", "tpo"])
def test_a_step_does_not_depend_on_its_split(row, tmp_path):
    kwargs = {"kl_cov": {"share": 0.2}, "clip_cov": {"share": 0.2, "cov_low": 0.0}}
    settings = CASES[row] | {"loss_kwargs": kwargs.get(row), "max_steps": 2, "learning_rate": 0.1, "optim": "sgd"}
    before, found = weights(tiny.model()), {}
    for name, split in SPLITS.items():
        steps = {"steps_per_generation": 2 * split["gradient_accumulation_steps"]}
        trainer = build(tiny.model(), tmp_path, rollout=scripted_rollout, **settings, **split, **steps)
        trainer.train()
        found[name] = weights(trainer.model) - before
    assert found["whole"].norm() > 1e-3
    for change in found.values():
        assert (change - found["whole"]).norm() < 1e-3 * change.norm()


def test_the_marks_are_those_of_the_whole_generation(model_path, tmp_path):
    settings = {"loss_type": "kl_cov", "loss_kwargs": {"share": 0.1}, "steps_per_generation": 4, "max_steps": 4}
    trainer = build(model_path, tmp_path, rollout=scripted_rollout, **settings)
    outputs, scored = [], trainer._generate_and_score_completions
    logps, policy = [], trainer._policy_before_training

    trainer._generate_and_score_completions = lambda *args: outputs.append(scored(*args)) or outputs[-1]
    trainer._policy_before_training = lambda *args: logps.append(policy(*args)) or logps[-1]
    trainer.train()
    batch, (before, _) = outputs[0], logps[0]
    groups = [x.unflatten(0, (-1, 4)) for x in (batch["advantages"], before, batch["completion_mask"])]
    expected = highest(*groups, share=0.1).flatten(0, 1)
    assert torch.equal(batch["marks"], expected)
    assert expected.sum() == int(0.1 * batch["completion_mask"].sum()) > 1
    trained_on = sum(int(micro["marks"].sum()) for micro in trainer._generation.micro_batches)
    assert trained_on == int(outputs[-1]["marks"].sum()) > 0


# A-3PO


def test_interpolated_log_probabilities_by_hand():
    policy, sampler = torch.tensor([[-1.0, -2.0]]).double(), torch.tensor([[-3.0, -1.0]]).double()
    assert interpolated(policy, sampler, 0.25).tolist() == [[-2.5, -1.25]]
    args = SimpleNamespace(old_logps="interpolated", samples_otherwise=True)
    loss = Loss(None, args, None)
    old, batch = torch.full((1, 2), -7.0).double(), {"sampling_per_token_logps": torch.tensor([[-3.0, math.nan]])}
    assert loss.denominators(old, batch, 0.25, policy).tolist() == [[-2.5, -7.0]]
    assert loss.denominators(old, batch, 0.0, policy).tolist() == [[-3.0, -7.0]]


def test_the_policy_before_training_lies_between_by_optimizer_steps(tmp_path):
    """v_prox - v_mu = 2 K updates of windows behind, v - v_prox = 0 or 1 within a window."""
    shares, compute = [], Loss.__call__

    def noting(self, scores, part, totals, at):
        shares.append(at.proximal)
        return compute(self, scores, part, totals, at)

    settings = {"num_iterations": 2, "max_steps": 8, "old_logps": "interpolated"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loss, "__call__", noting)
        ahead_of_training(tmp_path, 2, **settings)
    expected = [0, 0, 1, 2 / 3, 1, 4 / 5, 1, 4 / 5]  # windows sampled 0, 1, 2 and 2 windows before they train
    assert shares[::2] == shares[1::2] == pytest.approx(expected)


def test_with_one_update_a_generation_it_is_the_correction_without_its_forward(tmp_path):
    runs = {}
    for old in ("recomputed", "interpolated"):
        trainer = ahead_of_training(tmp_path, 2, old_logps=old)
        runs[old] = weights(trainer.model) - weights(tiny.model())
    assert runs["recomputed"].norm() > 1e-2
    assert (runs["interpolated"] - runs["recomputed"]).norm() < 1e-3 * runs["recomputed"].norm()
