"""Mixtures of experts share prompts with the router's auxiliary loss and with every way to multiply experts."""

import pytest
import torch
from test_architectures import COMPLETION, padded
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.packing.dropout import switch_dropout_off
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.layout import pack
from grpo_ext.packing.obstacles import obstacles
from support import architectures
from support.float64 import float64_throughout

BALANCED = [
    "ernie4_5_moe",
    "flex_olmo",
    "hy_v3",
    "laguna",
    "mellum",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
]
"""With an auxiliary loss that TRL's LM head can compute: it reads `num_experts` from the config."""
OTHERS = ["dots1", "glm4_moe", "solar_open"]
WAYS = {"eager": 2e-6, "batched_mm": 2e-6, "grouped_mm": 1e-4}
"""Tolerance of each `experts_implementation`: routers round to float32, and torch multiplies groups in it only."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*BALANCED, *OTHERS])
@pytest.mark.cases(14)
def test_value_gradient_and_auxiliary_loss_are_those_of_stock_s_plain_forward(family, way):
    model = architectures.model(family).to(torch.float32 if way == "grouped_mm" else torch.float64)
    model.set_experts_implementation(way)
    switch_dropout_off(model)
    assert next(obstacles(model), None) is None
    options = {"output_router_logits": True} if family in BALANCED else {}
    ids, mask = padded([(9, [7, 3, 5, 5]), (4, [2, 6]), (6, [4])])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-COMPLETION] = -100
    layout = pack(ids.numpy(), mask.numpy(), COMPLETION, whole=bool(options))
    factors = torch.randn(ids.shape[0], COMPLETION, generator=torch.Generator().manual_seed(1)).to(model.dtype)

    def gradients(logps, aux):
        model.zero_grad()
        ((factors * logps).sum() + (10 * aux if options else 0)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with float64_throughout():
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        stock = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **options)
        expected = stock.log_probs[:, -COMPLETION:], stock.aux_loss if options else None
        wanted = gradients(*expected)
        logps, _, aux = log_probs(model, model, ids, layout, COMPLETION, **options)
        found = gradients(logps, aux)
    assert (logps - expected[0]).abs().max() < WAYS[way]
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < WAYS[way] * max(1.0, gradient.abs().max()), name
    if options:
        assert aux.item() == pytest.approx(expected[1].item(), abs=WAYS[way])
        short = log_probs(model, model, ids, pack(ids.numpy(), mask.numpy(), COMPLETION), COMPLETION, **options)[2]
        assert abs(short.item() - aux.item()) > 1e-3  # without tokens that predict no label
