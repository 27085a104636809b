"""The correction of the sampler in training: weights and rejections travel with their rows, and length is seen."""

import math

import pytest
import torch

from grpo_ext import ConfigError
from grpo_ext.objective.sampler_correction import trl_rule
from grpo_ext.trainer.diagnosis.rules import diagnose
from support import tiny
from support.interrupted import without_clocks
from support.mismatched import ROWS, RULES, NoServer, rollout, trained
from support.trainers import build, weights

SPLITS = {
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "accumulated, prompts not shared": {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "shared_prefix": "false",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.cases(2)
def test_the_step_does_not_depend_on_its_split(rule, tmp_path):
    before = weights(tiny.model())
    settings = {"sampler_correction": RULES[rule], "skip_zero_advantages": False}
    whole = trained(tmp_path, per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, **settings)
    change = weights(whole.model) - before
    assert change.norm() > 1e-4
    for split in SPLITS.values():
        found = weights(trained(tmp_path, **settings, **split).model) - before
        assert (found - change).norm() < 1e-4 * change.norm()


@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_rejected_completions_leave_the_denominators_and_masked_ones_stay(loss, tmp_path):
    before, steps = weights(tiny.model()), {}
    for action in ("mask", "reject"):
        rule = {"level": "geometric", "statistic": "k1", "upper": 1.0, "action": action}
        trainer = trained(
            tmp_path, loss_type=loss, sampler_correction=rule, per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1, skip_zero_advantages=False,
        )  # fmt: skip
        steps[action] = weights(trainer.model) - before
        (inputs,) = trainer._generation.micro_batches
    kept = inputs["importance_sampling_ratio"][:, 0] > 0
    assert 0 < kept.sum() < ROWS
    lengths = inputs["completion_mask"].sum(dim=1)
    assert (inputs["tool_mask"].sum(dim=1) > 0).equal(kept)  # `completion_mask` is what the model reads
    share = lengths[kept].sum() / lengths.sum() if loss == "dapo" else kept.sum() / ROWS
    torch.testing.assert_close(steps["reject"] * share, steps["mask"], rtol=1e-3, atol=1e-7)


def test_without_another_sampler_the_old_policy_is_the_ratios_denominator(tmp_path):
    logs = []
    for old in ("recomputed", "sampler", "interpolated"):
        settings = {"max_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 8}
        trainer = build(tiny.model(), tmp_path, rows=16, rollout=rollout, old_logps=old, learning_rate=0.1, **settings)
        trainer.train()
        logs.append(trainer.state.log_history)
    assert without_clocks(logs[0]) == without_clocks(logs[1]) == without_clocks(logs[2])
    assert logs[1][1]["ratio/chi2"] > 0.1


@pytest.mark.parametrize("knows", [True, False])
def test_the_samplers_log_probabilities_are_the_ratios_denominator_without_another_forward(knows, tmp_path):
    """But of a batch of the second step that has a token whose log-probability the sampler does not know."""

    def scored(prompts, trainer):
        made = rollout(prompts, trainer)
        return made | {"logprobs": [[-1.0 if x != x and knows else x for x in row] for row in made["logprobs"]]}

    calls, losses = {}, {}
    for old in ("recomputed", "sampler", "interpolated"):
        settings = {"max_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 8, "epsilon": 10.0}
        trainer = build(tiny.model(), tmp_path, rows=16, rollout=scored, old_logps=old, learning_rate=0.1, **settings)
        trainer.use_vllm = trainer.args.use_vllm = True
        trainer.vllm_generation, trainer._last_loaded_step = NoServer(), -1
        forward, calls[old] = trainer._scorer.tokens, []

        def count(*args, forward=forward, grads=calls[old], **kwargs):
            grads.append(torch.is_grad_enabled())
            return forward(*args, **kwargs)

        trainer._scorer.tokens = count
        trainer.train()
        losses[old] = [entry.get("loss") for entry in trainer.state.log_history]
    assert calls["recomputed"].count(False) == 2  # the correction has one of its own
    assert calls["sampler"].count(False) == calls["interpolated"].count(False) == (0 if knows else 1)
    assert losses["sampler"] == losses["interpolated"] != losses["recomputed"]  # a sampler of no age
    log = trainer.state.log_history[0]
    assert log["ratio/chi2"] > 0.1
    assert log["sampling/mismatch"] > 0.1
    assert "sampling/kept" not in log


@pytest.mark.parametrize("settings", [{}, {"old_logps": "sampler"}], ids=["corrected", "old_logps"])
def test_a_rollout_function_that_leaves_out_log_probabilities_is_refused_where_the_loss_needs_them(settings, tmp_path):
    def silent(prompts, trainer):
        return {**rollout(prompts, trainer), "logprobs": None}

    with pytest.raises(ConfigError, match=r"rollout_func: it returned no logprobs.* Return vLLM's"):
        trained(tmp_path, silent, **settings)
    trained(tmp_path, silent, vllm_importance_sampling_correction=False)


# Length.


def noisy(deviation, longest):
    """A sampler whose logits are the model's own but for fixed noise; one token in twenty ends."""

    @torch.no_grad()
    def draw(prompts, trainer):
        tokenizer = trainer.processing_class
        asked = tokenizer(list(prompts))["input_ids"]
        g = torch.Generator().manual_seed(trainer.state.global_step)
        table = deviation * torch.randn(len(tiny.WORDS), len(tiny.WORDS), generator=torch.Generator().manual_seed(7))
        ids, logprobs = [], []
        for row in asked:
            own, scores = torch.tensor([row]), []
            for _ in range(longest):
                logits = trainer.model(own).logits[0, -1] / trainer.temperature + table[own[0, -1]]
                token = torch.multinomial(logits.softmax(-1), 1, generator=g)
                scores.append(logits.log_softmax(-1)[token].item())
                own = torch.cat([own, token[None]], dim=1)
                if token.item() == tokenizer.eos_token_id:
                    break
            ids.append(own[0, len(row) :].tolist())
            logprobs.append(scores)
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": logprobs}

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.cases(1)
def test_a_real_run_shows_which_correction_drops_long_completions(stock, tmp_path):
    settings = {"vllm_importance_sampling_mode": "sequence_mask"} if stock else {}
    trainer = trained(
        tmp_path, noisy(0.4, 60), max_steps=4, max_completion_length=60, per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2, steps_per_generation=2, learning_rate=0.0, **settings,
    )  # fmt: skip
    log = [row for row in trainer.state.log_history if "reward" in row]
    assert {"sampling/kept", "sampling/kept_medium", "sampling/mismatch_kl", "sampling/ess"} <= log[0].keys()
    assert not any(name.startswith("sampling/sampling_logp") for name in log[0])
    named = [finding.rule.name for finding in diagnose(log)]
    assert ("long completions dropped" in named) is stock
    if not stock:
        assert min(row["sampling/kept_long"] for row in log) > 0.9


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_an_evaluation_compares_sampler_and_policy_only_over_the_same_tokens(top_p, tmp_path):
    """In an evaluation the policy's log-probabilities are over the vocabulary, the sampler's over what top_p kept."""
    trainer = trained(tmp_path, evaluated=tiny.prompts(ROWS), loss_type="grpo")
    trainer.args.top_p = top_p
    found = trainer.evaluate()
    assert any(name.startswith("eval_sampling/") for name in found) == (top_p == 1.0)
    assert math.isfinite(found["eval_loss"])


def test_trls_names_become_its_weights(tmp_path):
    names = {"mode": "token_mask", "clip_min": 0.5, "clip_max": 3.0}
    trainer = trained(tmp_path, **{f"vllm_importance_sampling_{name}": value for name, value in names.items()})
    assert trainer.args.sampler_rules == (trl_rule("token_mask", 0.5, 3.0),)
    log = trainer.state.log_history[0]
    assert 0 <= log["sampling/importance_sampling_ratio/min"] < log["sampling/importance_sampling_ratio/max"] <= 3.0
