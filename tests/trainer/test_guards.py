"""Defects of stock TRL 1.16 that a run with grpo-ext does not meet. Each test fails on stock TRL."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from grpo_ext import ConfigError, GRPOExtConfig, GRPOExtTrainer
from grpo_ext.rollout.trajectories import completed
from support import tiny
from support.trainers import build, scripted_rollout


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


def test_the_reference_is_a_copy_of_the_instance_handed_in(model_path, tmp_path):
    """Stock TRL reloads it from disk: KL .22 at step 0 for a policy changed in memory."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    trainer = build(model, tmp_path, beta=0.1, loss_type="grpo", max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())


def test_the_reference_of_a_model_that_was_trained_before_is_no_alias(model_path, tmp_path):
    """TRL's fused head stays on an instance; the plain forward of a copy would run the policy's own weights."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    build(model, tmp_path, loss_type="grpo", max_steps=1).train()
    trainer = build(model, tmp_path, beta=0.1, loss_type="grpo", max_steps=3, learning_rate=0.02)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = trainer.ref_model(input_ids=ids).logits
    trainer.train()
    log = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert log[0] == pytest.approx(0.0, abs=1e-6)
    assert log[-1] > 1e-4
    assert torch.equal(trainer.ref_model(input_ids=ids).logits, before)


@pytest.mark.parametrize(("disable", "clipped"), [(None, False), (False, True)])
def test_dropout_is_off_in_rollouts_and_loss(disable, clipped, model_path, tmp_path, caplog):
    """With dropout on, ratios differ from 1 although nothing was learned."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    settings = {"loss_type": "grpo", "learning_rate": 0.0, "num_iterations": 2, "max_steps": 2, "epsilon": 1e-4}
    trainer = build(model_path, tmp_path, peft_config=lora, disable_dropout=disable, **settings)
    trainer.train()
    seen = max(entry.get("clip_ratio/region_mean", 0) for entry in trainer.state.log_history)
    assert (seen > 0) == clipped
    assert ("dropout is active" in caplog.text) == clipped


def test_a_dataset_smaller_than_one_generation_is_refused(model_path, tmp_path):
    """Stock TRL trains 0 steps and reports success."""
    with pytest.raises(ConfigError, match=r"1 rows are fewer than the 2 prompts .* 8 / num_generations 4.*Add rows"):
        build(model_path, tmp_path, rows=1)


def test_columns_that_collide_with_trls_are_refused(model_path, tmp_path):
    dataset = Dataset.from_list([{"prompt": "a1:", "trainer_state": "x"}] * 16)
    args = GRPOExtConfig(output_dir=str(tmp_path), **tiny.TRAINING)
    with pytest.raises(ConfigError, match="trainer_state"):
        GRPOExtTrainer(model_path, [tiny.length], args, dataset, processing_class=tiny.tokenizer())


def test_evaluate_checks_that_batches_hold_whole_groups(model_path, tmp_path):
    trainer = build(model_path, tmp_path, per_device_eval_batch_size=6)
    with pytest.raises(ConfigError, match=r"per_device_eval_batch_size=6.*4 or 8"):
        trainer.evaluate(tiny.prompts(4))


def test_an_empty_completion_does_not_crash(model_path, tmp_path):
    def rollout(prompts, trainer):
        output = scripted_rollout(prompts, trainer)
        output["completion_ids"][1] = []
        return output

    trainer = build(model_path, tmp_path, rollout=rollout, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.state.log_history[0]["completions/min_length"] == 1


def test_empty_completions_get_an_unknown_log_probability():
    rollout = completed(lambda prompts, trainer: {"completion_ids": [[], [5]], "logprobs": [[], [-0.1]]}, {1}, 1)
    filled = rollout([], None)
    assert filled == {"completion_ids": [[1], [5]], "logprobs": [[None], [-0.1]]}


def test_a_plain_grpo_config_is_refused(model_path, tmp_path):
    with pytest.raises(TypeError, match="GRPOExtConfig"):
        GRPOExtTrainer(model_path, [tiny.length], GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), tiny.prompts())
