"""NaN and inf, wherever they arise, are found before the optimizer sees them."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from grpo_ext.errors import NonFiniteError
from grpo_ext.train import main
from grpo_ext.trainer.nan_report import LARGEST_WEIGHT, BadTensor, ObservedBatch, in_order, overflowed
from grpo_ext.trainer.nonfinite import IN_A_ROW, KEPT
from grpo_ext.trainer.setup import widen_trained
from support import poisoned, tiny
from support.dealt import dealing
from support.trainers import build, scripted_rollout, weights


@pytest.fixture(scope="module")
def clean(model_path, tmp_path_factory):
    """Weights of every step of a run in which nothing fails."""
    folder = tmp_path_factory.mktemp("clean")
    trainer = poisoned.build(model_path, folder)
    trainer.train()
    return {i: load_file(folder / f"checkpoint-{i}" / "model.safetensors") for i in range(1, 5)}


def same(these, those) -> bool:
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in those)


def state(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}


WHERE = {  # place: what the message says of it
    "loss": "{value} in the loss of micro-batch {m} on rank 0, in no particular row",
    "gradient": f"{{value}} in the gradient of {poisoned.PARAMETER}",
    "logps": "{value} in log-probabilities of micro-batch {m} on rank 0, row 1 (the first begins '",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("place", "value", "step"),
    [("loss", math.nan, 1), ("loss", math.inf, 2), ("gradient", math.inf, 2), ("logps", math.nan, 4)],
)
def test_the_run_stops_before_the_step_and_names_what_was_first(place, value, step, model_path, tmp_path, clean):
    m = 1 + step % 2
    trainer = poisoned.build(model_path, tmp_path).arm(place, value=value, step=step, micro_batch=m)
    before = state(trainer)
    with pytest.raises(NonFiniteError) as stopped:
        trainer.train()
    shown = WHERE[place].format(value="inf" if value == math.inf else "nan", m=m)
    assert str(stopped.value).startswith(f"Step {step} of 4: {shown}"), stopped.value
    assert f"{tmp_path}/failures/step_{step}" in str(stopped.value)
    expected = clean[step - 1] if step > 1 else before
    assert same({k: v for k, v in state(trainer).items() if k in expected}, expected)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{i}" for i in range(1, step)}
    for i in range(1, step):
        assert same(load_file(tmp_path / f"checkpoint-{i}" / "model.safetensors"), clean[i])
    kept = torch.load(tmp_path / "failures" / f"step_{step}" / "rank_0.pt")
    assert kept["step"] == step
    assert len(kept["micro_batches"]) == 2
    assert {"completion_ids", "advantages", "per_token_logps", "loss"} <= kept["micro_batches"][0].keys()
    assert kept["parameters"] == ([poisoned.PARAMETER] if place == "gradient" else kept["parameters"])
    assert "torch.load" in (tmp_path / "failures" / f"step_{step}" / "README.txt").read_text()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("place", "max_grad_norm"), [("loss", 0.0), ("gradient", 0.0), ("gradient", 1e-3), ("logps", 1e-3)]
)
def test_a_skipped_step_moves_neither_weights_nor_moments(place, max_grad_norm, model_path, tmp_path):
    settings = {"on_nonfinite": "skip", "max_grad_norm": max_grad_norm}
    trainer = poisoned.build(model_path, tmp_path, **settings).arm(place, step=2)
    trainer.train()
    there = {i: tmp_path / f"checkpoint-{i}" for i in range(1, 5)}
    files = {i: load_file(path / "model.safetensors") for i, path in there.items()}
    assert same(files[1], files[2])
    assert not same(files[2], files[3])
    moments = [torch.load(there[i] / "optimizer.pt")["state"] for i in (1, 2)]
    assert all(torch.equal(moments[0][p][k], moments[1][p][k]) for p in moments[0] for k in moments[0][p])
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["nonfinite/skipped_steps"] for entry in log] == [0, 1, 0, 0]
    assert [math.isfinite(entry["loss"]) for entry in log] == [True, place == "gradient", True, True]
    assert math.isfinite(log[1]["grad_norm"]) == (place == "logps")  # whose gradient the overwriting has cut off
    assert all(math.isfinite(w) for w in weights(trainer.model).tolist())


def test_without_a_fault_the_guard_changes_no_bit(model_path, tmp_path, clean, monkeypatch):
    """The clip is torch's own two halves: stock transformers' comes to the same bits."""
    from trl import GRPOTrainer

    from grpo_ext.trainer.lifecycle import Lifecycle

    for name in ("_clip_grad_norm", "_get_grad_norm", "compute_loss"):
        monkeypatch.setattr(Lifecycle, name, getattr(GRPOTrainer, name))
    trainer = poisoned.build(model_path, tmp_path)
    trainer.train()
    assert same({k: v for k, v in state(trainer).items() if k in clean[4]}, clean[4])


def test_after_a_skipped_step_the_next_log_is_finite(model_path, tmp_path):
    settings = {"on_nonfinite": "skip", "logging_steps": 2, "max_steps": 6}
    trainer = poisoned.build(model_path, tmp_path, **settings).arm("loss", step=3)
    output = trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [math.isnan(entry["loss"]) for entry in log] == [False, True, False]
    assert [entry["nonfinite/skipped_steps"] for entry in log] == [0, 1, 0]
    assert math.isfinite(output.training_loss)


def test_three_skipped_steps_in_a_row_stop_the_run(model_path, tmp_path):
    steps = range(2, 2 + IN_A_ROW)
    trainer = poisoned.build(model_path, tmp_path, on_nonfinite="skip", max_steps=8).arm("loss", also=steps)
    with pytest.raises(NonFiniteError, match=r"Step 4 of 8: .*3rd step in a row that is skipped"):
        trainer.train()


def test_two_skipped_steps_in_a_row_do_not_stop_the_run(model_path, tmp_path, capsys):
    trainer = poisoned.build(model_path, tmp_path, on_nonfinite="skip", max_steps=6).arm("loss", also=(3, 5))
    trainer.train()
    assert "3 of 6 steps were skipped for NaN or inf" in capsys.readouterr().out


def test_at_most_ten_batches_are_kept(model_path, tmp_path):
    steps = [step for step in range(2, 40) if step % 3]
    settings = {"on_nonfinite": "skip", "max_steps": 20, "save_strategy": "no"}
    poisoned.build(model_path, tmp_path, **settings).arm("loss", also=steps).train()
    assert len(list((tmp_path / "failures").iterdir())) == KEPT < sum(step <= 20 for step in steps)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_reward_stops_the_run(value, model_path, tmp_path):
    rewards = [poisoned.bad_reward(value, at=3)]
    trainer = poisoned.build(model_path, tmp_path, rewards)
    with pytest.raises(NonFiniteError) as stopped:
        trainer.train()
    assert str(stopped.value).startswith("Step 3 of 4: inf returned by reward 'judged' on rank 0, row 1 (")
    kept = torch.load(tmp_path / "failures" / "step_3" / "rank_0.pt")
    assert not math.isfinite(kept["rewards"][1, 0])
    assert len(kept["completions"]) == 16
    assert (tmp_path / "checkpoint-2").exists()


def test_with_skip_an_infinite_reward_counts_as_not_scored(model_path, tmp_path, caplog):
    def run(value, folder):
        trainer = poisoned.build(model_path, folder, [poisoned.bad_reward(value, at=3)], on_nonfinite="skip")
        trainer.train()
        return weights(trainer.model)

    assert torch.equal(run(math.inf, tmp_path / "bad"), run(None, tmp_path / "none"))
    assert "returned by reward 'judged' on rank 0, row 1" in caplog.text
    assert "count as not scored by it" in caplog.text
    assert not (tmp_path / "bad" / "failures").exists()


def test_none_and_nan_mean_not_scored(model_path, tmp_path, caplog):
    """A TRL user writes np.nan for what cannot be scored; it stopped the run."""
    trained = []
    for value in (None, math.nan):
        trainer = poisoned.build(model_path, tmp_path / str(value), [poisoned.bad_reward(value, at=3)])
        trainer.train()
        assert trainer.state.global_step == 4
        assert not (tmp_path / str(value) / "failures").exists()
        trained.append(weights(trainer.model))
    assert torch.equal(*trained)
    assert "reward 'judged' returned NaN for 1 of 16 completions. NaN counts as None" in caplog.text
    shares = [entry.get("rewards/judged/nan_frac") for entry in trainer.state.log_history if "loss" in entry]
    assert [share for share in shares if share is not None] == [1 / 16]


def test_a_full_disk_does_not_hide_the_fault(model_path, tmp_path):
    (tmp_path / "failures").write_text("in the way")
    trainer = poisoned.build(model_path, tmp_path).arm("loss")
    with pytest.raises(NonFiniteError, match=r"nan in the loss .* could not be saved to .*rank_0\.pt"):
        trainer.train()


def test_masked_tokens_may_be_nonfinite(model_path, tmp_path, clean):
    """A log-probability of -inf behind the end of a completion has no part in the loss."""

    class Padded(poisoned.Poisoned):
        def _scores(self, model, inputs, active):
            logps, *rest = super()._scores(model, inputs, active)
            return logps.masked_fill(inputs["completion_mask"] == 0, -math.inf), *rest

    trainer = poisoned.build(model_path, tmp_path)
    trainer.__class__ = Padded
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.slow
def test_a_poisoned_last_step_of_a_recipe_ends_with_2_and_saves_no_model(
    quickstart_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        "grpo_ext.train.GRPOExtTrainer",
        type("P", (poisoned.Poisoned,), {"place": "loss", "step": 2, "micro_batch": 1}),
    )
    argv = ["--config", "quickstart/grpo", "--max_steps", "2", "--output_dir", str(tmp_path), "--save_steps", "1"]
    with pytest.raises(SystemExit) as left:
        main([*argv, "--report_to", "none", "--model_name_or_path", quickstart_model, *tiny.FEW])
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert "Step 2 of 2: nan in the loss" in printed.err
    assert "Model saved" not in printed.out
    assert not (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["global_step"] == 1


def test_a_step_that_overflows_is_not_saved(model_path, tmp_path):
    """Finite gradients, and a rate at which the weights become infinite."""
    trainer = poisoned.build(model_path, tmp_path, learning_rate=3e38, weight_decay=100.0)
    with pytest.raises(NonFiniteError, match=r"After step 1 of 4 the weights .* the step was too large"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("settings", [{}, {"off_policy_mask_threshold": 1.0}, {"on_nonfinite": "skip"}], ids=str)
def test_a_token_that_the_sampler_could_not_score_does_not_stop_the_run(settings, tmp_path):
    """TRL makes NaN of None, and counts such a token as unchanged in the ratio and in the off-policy mask."""

    def rollout(prompts, trainer):
        made = scripted_rollout(prompts, trainer)
        known = [[-1.0] * (len(ids) - 1) for ids in made["completion_ids"]]
        return made | {"logprobs": [[None, *row] for row in known]}

    one = build(tiny.model(), tmp_path, rollout=rollout, max_steps=1, **settings)
    one.train()
    assert torch.isfinite(weights(one.model)).all()
    assert all(entry.get("nonfinite/skipped_steps", 0) == 0 for entry in one.state.log_history)


def test_a_ratio_that_is_nan_is_still_found():
    mask = torch.ones(2, 3)
    inputs = {"completion_mask": mask, "sampling_per_token_logps": mask * math.nan, "importance_sampling_ratio": mask}
    assert not ObservedBatch(inputs).bad()
    assert ObservedBatch(inputs | {"importance_sampling_ratio": mask * math.nan}).bad()


@pytest.mark.parametrize(("value", "step"), [(math.nan, 0), (math.inf, 1), (1e30, 1)])
def test_weights_that_overflowed_are_named_before_they_sample(step, value, model_path, tmp_path):
    """Nothing is saved in between, so the rollout is the first to meet them."""
    settings = {"save_strategy": "no", "steps_per_generation": 2}
    trainer = poisoned.build(model_path, tmp_path, **settings)

    class Overflows(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            with torch.no_grad():
                dict(model.named_parameters())[poisoned.PARAMETER][0, 0] = value

    if step:
        trainer.add_callback(Overflows())
    else:
        Overflows().on_step_end(None, None, None, trainer.model)
    with pytest.raises(NonFiniteError) as stopped:
        trainer.train()
    assert poisoned.PARAMETER in str(stopped.value)
    assert ("After step 1 of 4" if step else "before the first step") in str(stopped.value)


@pytest.mark.parametrize("plays", [False, True])
def test_logits_that_overflow_are_named_with_the_largest_weight(plays, model_path, tmp_path):
    """Every weight is finite, and far too large; with environments each row draws from random numbers of its own."""
    trainer = dealing(tmp_path, max_steps=1) if plays else build(model_path, tmp_path, max_steps=1)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "layers.0" in name:
                parameter.mul_(1e16)
    with pytest.raises(
        NonFiniteError, match=r"no completion can be sampled\. Its largest weight is \S*e\+1., in model"
    ):
        trainer.train()


def test_a_gradient_whose_parameter_is_known_comes_first():
    """A shard of rank 0 may hold none of the parameter that is bad in rank 1's."""
    found = [BadTensor("gradient", 0), BadTensor("gradient", 1, name="layers.0.mlp"), BadTensor("loss", 1)]
    assert sorted(found, key=in_order) == [found[2], found[1], found[0]]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2 * LARGEST_WEIGHT])
def test_the_first_weight_that_overflowed_is_named(kind, value):
    weights = [("a", torch.ones(2, dtype=kind)), ("b", torch.tensor([1.0, value]).to(kind)), ("c", torch.ones(0))]
    assert overflowed(weights) == "b"
    assert overflowed([weights[0], weights[2]]) is None


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_frozen_base_in_fp8_is_no_error(kind):
    """torch has no norm of such a tensor."""
    weights = [("base", torch.ones(2).to(kind)), ("packed", torch.ones(2, dtype=torch.uint8))]
    assert overflowed(weights) is None
    assert overflowed([*weights, ("adapter", torch.tensor(float("inf")))]) == "adapter"


def test_a_run_in_fp16_keeps_trained_weights_in_float32():
    """TRL makes the adapter of a quantized model bfloat16, whose gradients fp16's scaler is not made for."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, dtype=torch.bfloat16), torch.nn.Linear(2, 2).half()])
    frozen = torch.nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
    widen_trained(model.append(frozen))
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.float16, torch.bfloat16]
