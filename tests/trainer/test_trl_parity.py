"""With `loss_defaults: trl`, GRPOExtTrainer is stock TRL: same loss, same gradient, same metrics, same weights."""

import math

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.trainer.diagnosis.recording import FIGURES
from support import tiny
from support.float64 import FLOAT64, float64_throughout

LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"scale_rewards": "none"},
    "dapo": {},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "vespo": {},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}
VARIANTS = {
    "plain": {},
    "kl": {"beta": 0.1},
    "kl, no bias correction": {"beta": 0.1, "use_bias_correction_kl": False},
    "delta": {"delta": 1.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "tool mask": {},
    "entropy bonus": {"entropy_coef": 0.1},
    "adaptive entropy": {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 10.0},
    "top entropy": {"top_entropy_quantile": 0.4},
    "accumulation": {"gradient_accumulation_steps": 4},
    "generation over two steps": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "vllm sequence": {},
    "vllm token": {},
}


def build(cls, config_cls, path, tmp_path, dtype=torch.float64, **settings):
    args = config_cls(output_dir=str(tmp_path / cls.__name__), **(tiny.TRAINING | settings))
    return cls(
        model=path,
        reward_funcs=[tiny.count_a, tiny.length],
        args=args,
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
    )


def pair(path, tmp_path, **settings):
    ours = {"loss_defaults": "trl", **settings}
    settings = {k: v for k, v in settings.items() if k != "loss_defaults"}
    return (
        build(GRPOTrainer, GRPOConfig, path, tmp_path, **settings),
        build(GRPOExtTrainer, GRPOExtConfig, path, tmp_path, **ours),
    )


@pytest.fixture(scope="module")
def float64_model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model64"), dtype=torch.float64)


def batch(variant: str, rows: int = 8, prompt: int = 5, time: int = 8, seed: int = 3) -> dict:
    """Off-policy inputs as TRL's buffer holds them, with ragged completions and one that is masked altogether."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, len(tiny.WORDS), (rows, prompt + time), generator=g)
    lengths = torch.randint(2, time + 1, (rows,), generator=g)
    lengths[0] = time
    mask = (torch.arange(time) < lengths[:, None]).long()
    if variant == "accumulation":
        mask[1] = 0  # a truncated completion
    inputs = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=g, dtype=torch.float64),
        "num_items_in_batch": torch.tensor(3 * int(mask.sum()) + 1),
        "noise": 0.3 * torch.randn(rows, time, generator=g, dtype=torch.float64),
        "ref_noise": 0.3 * torch.randn(rows, time, generator=g, dtype=torch.float64),
    }
    if variant == "tool mask":
        inputs["tool_mask"] = (torch.rand(rows, time, generator=g) > 0.3).long()
    if variant.startswith("vllm"):
        width = 1 if variant.endswith("sequence") else time
        ratio = (0.3 * torch.randn(rows, width, generator=g, dtype=torch.float64)).exp().clamp(max=1.2)
        inputs["importance_sampling_ratio"] = ratio if width == 1 else torch.where(mask.bool(), ratio, 1.0)
        inputs["sampling_per_token_logps"] = inputs["noise"] * 0.5 - 3.0
    return inputs


def float64_forward(model, input_ids, attention_mask, logits_to_keep, **_):
    """Log-probabilities and entropies in float64 throughout; TRL's fused head computes in float32."""
    forward = type(model).forward  # the class's own, not the one that carries the fused head
    logits = forward(model, input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    log_probs = logits.log_softmax(dim=-1)
    assert log_probs.dtype == torch.float64
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1), entropies, None


def loss_and_gradient(trainer, inputs: dict, vllm: bool):
    """The trainer's own loss on `inputs`; old and reference log-probabilities are the model's, moved by noise."""
    inputs = dict(inputs)
    noise, ref_noise = inputs.pop("noise"), inputs.pop("ref_noise")
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.use_vllm = vllm
    if isinstance(trainer, GRPOExtTrainer):
        trainer._scorer.tokens = float64_forward
    else:
        trainer._get_per_token_logps_and_entropies = float64_forward
    trainer.model.train()
    trainer.model.zero_grad()
    with torch.no_grad():
        logps, _, _ = float64_forward(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
        )
    inputs["old_per_token_logps"] = logps + noise
    if trainer.beta:
        inputs["ref_per_token_logps"] = logps + ref_noise
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    return loss.item(), gradient, {k: list(v) for k, v in trainer._metrics["train"].items()}


@pytest.mark.cases(20)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_and_metrics_are_stock_trls(name, variant, float64_model, tmp_path):
    settings = {"loss_type": name, **FLOAT64, **LOSSES[name], **VARIANTS[variant]}
    vllm = variant.startswith("vllm")
    if variant == "delta" and name in ("cispo", "sapo", "vespo"):
        pytest.skip(f"{name} has no delta: refused at start-up")
    if vllm and name == "vespo" and variant.endswith("sequence"):
        pytest.skip("VESPO takes the correction per token: refused at start-up")
    if variant.endswith("token"):
        settings["vllm_importance_sampling_mode"] = "token_truncate"
    stock, ours = pair(float64_model, tmp_path, **settings)
    expected, expected_gradient, expected_metrics = loss_and_gradient(stock, batch(variant), vllm)
    loss, gradient, metrics = loss_and_gradient(ours, batch(variant), vllm)

    assert expected_gradient.abs().max() > 1e-6
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
    for key, values in expected_metrics.items():
        assert metrics[key] == pytest.approx(values, rel=1e-6, abs=1e-8, nan_ok=True), key
    assert set(metrics) - set(expected_metrics) <= {"log_ratio/clamped_frac", *FIGURES}


@pytest.mark.parametrize("name", LOSSES)
def test_evaluation_loss_is_stock_trls(name, float64_model, tmp_path):
    stock, ours = pair(float64_model, tmp_path, **{"loss_type": name, **LOSSES[name], "beta": 0.1})
    losses = []
    for trainer in (stock, ours):
        inputs = batch("plain")
        noise = inputs.pop("noise"), inputs.pop("ref_noise")
        trainer.model.eval()
        inputs["old_per_token_logps"], inputs["ref_per_token_logps"] = noise[0] - 3, noise[1] - 3
        with torch.no_grad():
            losses.append(trainer._compute_loss(trainer.model, inputs).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert math.isfinite(losses[0])


@pytest.mark.cases(2)
@float64_throughout()
@pytest.mark.parametrize("name", LOSSES)
def test_five_steps_end_at_the_same_weights(name, float64_model, tmp_path):
    settings = {"loss_type": name, **LOSSES[name], "max_steps": 5, "beta": 0.05, "gradient_accumulation_steps": 2}
    stock, ours = pair(float64_model, tmp_path, **settings, **FLOAT64)
    before = torch.cat([p.detach().flatten().clone() for p in stock.model.parameters()])
    logs = []
    for trainer in (stock, ours):
        torch.manual_seed(11)
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "reward" in entry])
    weights = [torch.cat([p.detach().flatten() for p in t.model.parameters()]) for t in (stock, ours)]
    assert (weights[0] - before).abs().max() > 1e-3
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-6)
    for theirs, mine in zip(*logs, strict=True):
        for key in set(theirs) - {"step_time"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
