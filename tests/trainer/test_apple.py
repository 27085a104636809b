"""Training on a device without numbers of 64 bits, as Apple's GPU is one."""

import math
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig

from grpo_ext.objective.losses import losses
from support import apple, tiny, trainers

VARIANTS: dict[str, dict[str, Any]] = {
    "reference": {"beta": 0.1},
    "generate": {"rollout_engine": "generate", "shared_prefix": "false"},
    "trl": {"loss_defaults": "trl"},
    "two updates": {"num_iterations": 2, "gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
    "drawn again": {"dynamic_sampling": "reward"},
    "truncated distribution": {"top_p": 0.9, "top_k": 5},
    "by turn": {"rollout": trainers.scripted_trajectories},
    "logged": {"log_completions": True, "num_completions_to_print": 0, "mask_truncated_completions": True},
    "entropy": {"top_entropy_quantile": 0.5},
}


@pytest.fixture
def device(monkeypatch):
    """The device, and no state of another one before and after."""
    _forget()
    with apple.apple(monkeypatch):
        yield torch.device(apple.NAME)
    _forget()


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_the_device_refuses_what_apple_s_gpu_refuses(device):
    there = torch.tensor([1.0, 2.0], device=device)
    assert there.device == device
    with pytest.raises(TypeError, match="64 bits"):
        there.double()
    with pytest.raises(RuntimeError, match="two devices"):
        there + torch.ones(2)
    assert (there + 1).cpu().double().tolist() == [2.0, 3.0]


def trained(tmp_path, **settings):
    trainer = trainers.build(tiny.model(), tmp_path, use_cpu=False, **settings)
    trainer.train()
    assert trainer.accelerator.device.type == apple.NAME
    assert all(isinstance(p.data, apple.OnApple) for p in trainer.model.parameters())
    return trainer


def moved(trainer) -> bool:
    """Whether every logged loss is finite, and a step had a gradient."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return all(math.isfinite(step["loss"]) for step in steps) and any(step["grad_norm"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("loss", sorted(losses))
@pytest.mark.cases(7)
def test_each_loss_trains(loss, device, tmp_path):
    kwargs = {"entropy_limit": None} if loss == "gtpo" else {}  # an untrained model's entropy is above it
    settings = {"loss_type": loss, "advantage_kwargs": kwargs, "max_steps": 1}
    assert moved(trained(tmp_path, rewards=(trainers.unit_interval,), **settings))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.cases(5)
def test_settings_train(variant, device, tmp_path):
    assert moved(trained(tmp_path, **VARIANTS[variant]))


@pytest.mark.slow
def test_an_adapter_trains_and_is_evaluated(device, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear")
    evaluated = {"evaluated": tiny.prompts(4), "eval_strategy": "steps", "eval_steps": 1}
    trainer = trained(tmp_path, peft_config=lora, **evaluated)
    assert moved(trainer)
    assert "eval_reward" in trainer.state.log_history[-2]
