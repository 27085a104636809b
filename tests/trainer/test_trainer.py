"""GRPOExtTrainer on a real tiny model: denominators, advantages, terms that TRL's loss honours, checkpoints."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.trainer.loss_terms import high_entropy_mask
from support import tiny
from support.float64 import FLOAT64, float64_throughout
from support.trainers import binary, build, scripted_rollout, unit_interval, weights

# The loss.


SPLITS = {"8x1": (8, 1), "2x4": (2, 4)}


@pytest.mark.cases(3)
@float64_throughout()
@pytest.mark.parametrize(
    "name",
    ["dapo", "dr_grpo", "deepseek_v3", "beta_bnpo", "gmpo", "rloo", "reinforce_pp", "minimind"],
)
def test_gradient_does_not_depend_on_the_split(name, model_path, tmp_path):
    """One SGD step from the same completions, a truncated one among them, however they are split."""
    ends = {}
    for split, (rows, accumulation) in SPLITS.items():
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
        settings |= {"mask_truncated_completions": True, "beta": 0.05, "entropy_coef": 0.01}
        settings |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 1}
        settings |= {"loss_type": name, "seed": 3, **FLOAT64}
        trainer = build(model_path, tmp_path, [unit_interval], rollout=scripted_rollout, **settings)
        trainer.train()
        ends[split] = weights(trainer.model)
    moved = (ends["8x1"] - weights(AutoModelForCausalLM.from_pretrained(model_path))).abs().max()
    assert moved > 1e-5
    for split in SPLITS:
        assert (ends[split] - ends["8x1"]).abs().max() < 1e-9 * max(1.0, moved), split


def test_bnpo_depends_on_the_split_and_warns(model_path, tmp_path, caplog):
    ends = []
    for rows, accumulation in ((8, 1), (2, 4)):
        settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "max_steps": 1}
        settings |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "loss_type": "bnpo"}
        trainer = build(model_path, tmp_path, [unit_interval], rollout=scripted_rollout, **settings)
        trainer.train()
        ends.append(weights(trainer.model))
    assert (ends[0] - ends[1]).abs().max() > 1e-5
    assert "'dapo' does not" in caplog.text


def test_denominators_with_several_optimizer_steps_per_generation(model_path, tmp_path):
    """Stock TRL scales the tokens of the generation to a window; here each window has its own exact count."""
    trainer = build(
        model_path,
        tmp_path,
        rollout=scripted_rollout,
        loss_type="dapo",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
    )
    seen = []
    compute = trainer._compute_loss

    def spy(model, inputs):
        totals = trainer._totals(inputs, inputs["completion_mask"], "train")
        seen.append((int(inputs["completion_mask"].sum()), float(totals.tokens)))
        return compute(model, inputs)

    trainer._compute_loss = spy
    trainer.train()
    assert len(seen) == 4
    for first, second in (seen[0:2], seen[2:4]):
        assert first[1] == second[1] == first[0] + second[0]
    assert seen[0][1] != seen[2][1]


def test_truncated_rows_leave_the_denominator(model_path, tmp_path):
    trainer = build(
        model_path, tmp_path, rollout=scripted_rollout, loss_type="grpo", mask_truncated_completions=True, max_steps=1
    )
    trainer.train()
    active = sum(int(batch["completion_mask"].any(dim=1).sum()) for batch in trainer._buffered_inputs)
    assert active < 8
    assert [int(t.sequences) for t in trainer._generation.totals] == [active]


def test_top_entropy_mask_above_the_limit_of_torch_quantile(model_path, tmp_path):
    trainer = build(model_path, tmp_path)
    n = 2**24 + 10
    entropies = torch.rand(1, n)
    mask = high_entropy_mask(trainer.accelerator, entropies, torch.ones(1, n), 0.8)
    assert abs(mask.float().mean().item() - 0.2) < 1e-3


def test_mixture_of_experts_aux_loss_is_stock_trls(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tiny.WORDS), hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, router_aux_loss_coef=0.5, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    step = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 1}  # Adam magnifies rounding
    ends = []
    for cls, args_cls, extra in (
        (GRPOTrainer, GRPOConfig, {}),
        (GRPOExtTrainer, GRPOExtConfig, {"loss_defaults": "trl"}),
    ):
        args = args_cls(output_dir=str(tmp_path), **(tiny.TRAINING | step | {"loss_type": "dapo", **extra}))
        trainer = cls(str(tmp_path / "moe"), [tiny.count_a], args, tiny.prompts(), processing_class=tiny.tokenizer())
        trainer.train()
        assert trainer.state.log_history[0]["aux_loss"] > 0
        ends.append(weights(trainer.model))
    assert (ends[0] - weights(Qwen3MoeForCausalLM.from_pretrained(tmp_path / "moe"))).abs().max() > 1e-3
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


# Advantages.


@pytest.mark.parametrize(("name", "reward"), [("beta_bnpo", binary), ("minimind", tiny.length), ("rloo", tiny.length)])
def test_the_logged_advantages_are_those_that_train(name, reward, model_path, tmp_path):
    trainer = build(model_path, tmp_path, [reward], rollout=scripted_rollout, loss_type=name, max_steps=1)
    trainer.train()
    trained = torch.cat([batch["advantages"] for batch in trainer._buffered_inputs])
    logged = torch.tensor(list(trainer._logs["advantages"]))
    assert sorted(trained.tolist()) == pytest.approx(sorted(logged.tolist()))
    rewards = torch.tensor(list(trainer._logs["rewards"][reward.__name__]), dtype=torch.float64).view(-1, 4)
    expected = trainer.objective.advantages(rewards[..., None], torch.ones(1, dtype=torch.float64)).flatten()
    assert logged.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert expected.abs().max() > 0.1


def test_beta_parameters_are_logged_and_the_window_survives_a_checkpoint(model_path, tmp_path):
    settings = {"loss_type": "beta_bnpo", "advantage_kwargs": {"window": 3}, "save_strategy": "steps", "save_steps": 1}
    first = build(model_path, tmp_path, [unit_interval], max_steps=2, **settings)
    first.train()
    entry = first.state.log_history[0]
    assert {"advantages/beta_alpha", "advantages/beta_beta", "advantages/beta_degenerate"} <= set(entry)
    assert len(first._advantages.group_means.batches) == 2
    saved = json.loads((tmp_path / "checkpoint-2" / "objective.json").read_text())
    assert saved["loss_type"] == "beta_bnpo"
    assert saved["advantage_kwargs"] == {"window": 3}

    second = build(model_path, tmp_path, [unit_interval], max_steps=3, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.state.global_step == 3
    assert len(second._advantages.group_means.batches) == 2
    torch.testing.assert_close(second._advantages.group_means.batches[0], first._advantages.group_means.batches[1])


def test_partial_none_is_left_out_of_the_weighted_sum(model_path, tmp_path):
    """Stock TRL counts it as a reward of 0."""

    def sometimes(completions, **_):
        return [None if i % 2 else 4.0 for i in range(len(completions))]

    def always(completions, **_):
        return [4.0] * len(completions)

    trainer = build(model_path, tmp_path, [always, sometimes], loss_type="grpo", max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == pytest.approx(8.0)
    assert trainer.state.log_history[0]["advantages/zero_variance_groups"] == 1.0
    assert trainer.state.log_history[0]["groups/all_right"] == 1.0
    assert set(trainer._logs["advantages"]) == {0.0}
    stock = build(model_path, tmp_path, [always, sometimes], loss_type="grpo", max_steps=1, missing_rewards="zero")
    stock.train()
    assert stock.state.log_history[0]["reward"] == pytest.approx(6.0)


def test_evaluation_uses_its_own_number_of_generations(model_path, tmp_path):
    remembers = {"loss_type": "beta_bnpo", "advantage_kwargs": {"window": 9}}
    trainer = build(model_path, tmp_path, rewards=[binary], num_generations_eval=2, max_steps=2, **remembers)
    trainer.train()
    assert len(trainer._advantages.group_means.batches) == 2
    metrics = trainer.evaluate(tiny.prompts(4))
    assert math.isfinite(metrics["eval_loss"])
    assert len(trainer._advantages.group_means.batches) == 2  # an evaluation joins no baseline of training


# The sampler.


def test_without_sampler_log_probabilities_there_is_no_drift_check(model_path, tmp_path):
    trainer = build(model_path, tmp_path, rollout=scripted_rollout, max_steps=1)
    trainer._drift = SimpleNamespace(due=False, to_list=list)  # where a trainer with vLLM has a DriftCheck
    trainer.train()
    assert trainer.state.global_step == 1
    assert not trainer._drift.due


# PEFT.


@pytest.fixture
def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.3)


def test_lora_trains_adapters_against_the_base_model(model_path, tmp_path, lora):
    trainer = build(
        model_path, tmp_path, peft_config=lora, beta=0.1, loss_type="grpo", max_steps=3, learning_rate=0.05
    )
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "kl" in entry]
    assert log[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert log[-1]["kl"] > 1e-5
    for name, parameter in trainer.model.named_parameters():
        if "lora" not in name:
            assert torch.equal(parameter, base[name]), name
    assert any(p.abs().max() > 0 for n, p in trainer.model.named_parameters() if "lora_B" in n)

    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "saved"))
    ids = torch.tensor([[5, 6, 7, 8]])
    trainer.model.eval()
    expected = trainer.model.get_base_model()(input_ids=ids).logits
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_pretrained_adapter_is_its_own_reference(model_path, tmp_path, lora):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    trainer = build(model, tmp_path, beta=0.1, loss_type="grpo", max_steps=1)
    assert isinstance(trainer.model, PeftModel)
    assert set(trainer.model.peft_config) == {"default"}
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_saved_model_loads_with_plain_transformers(model_path, tmp_path):
    trainer = build(model_path, tmp_path, loss_type="dr_grpo")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "saved"))
    assert torch.equal(weights(loaded), weights(trainer.model))
