"""Products of weights in blocks: the bits of torch's own, in the layers whose forward is torch's own."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from grpo_ext.rollout import blocked_weights
from grpo_ext.rollout.blocked_weights import WORTH, blocked
from grpo_ext.rollout.decoding import decode
from grpo_ext.rollout.support_log import SamplerRecord
from support import tiny

can_block = pytest.mark.skipif(not blocked_weights.can_block(), reason="this CPU has no products in bfloat16")


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def generated(model: nn.Module, seed: int, *, mixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled ids of two prompts and four completions of each, and their log-probabilities."""
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, len(tiny.WORDS), (2, 6), generator=draws).repeat_interleave(4, 0)
    drawn, uniforms = SamplerRecord(log=None), torch.rand(8, 24, dtype=torch.float64, generator=draws)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=True,
            custom_generate=partial(decode, record=drawn, uniforms=uniforms),
        )
    return found, drawn.logps[0]


@can_block
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(896, 896), (896, 128), (4864, 896), (67, 65), (5, 1000), (1000, 5)])
def test_products_are_the_same_to_the_bit(inputs, outputs, bias):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    for rows in (1, 2, 5, 16, 31, 64, 257):
        states = torch.randn(rows, 1, inputs)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = layer(states)
            with blocked(layer, 16, WORTH):
                assert replaced(layer) == [""]
                found = layer(states)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(found, expected)


@pytest.mark.cases(8)
@can_block
@pytest.mark.parametrize("precision", ["mixed", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_generation_draws_the_same_tokens(seed, lora, precision, monkeypatch):
    sizes = {"hidden_size": 96, "intermediate_size": 200, "initializer_range": 0.1}
    model = tiny.model(seed, torch.float32 if precision == "mixed" else torch.bfloat16, **sizes).eval()
    if lora:
        model = get_peft_model(model, LoraConfig(r=48, target_modules="all-linear", init_lora_weights=False)).eval()
    found = []
    for blocks in (True, False):
        monkeypatch.setattr(blocked_weights, "WORTH", 1 if blocks else 10**9)
        found.append(generated(model, seed, mixed=precision == "mixed"))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert replaced(model) == []


def test_other_layers_are_left_alone():
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(99, 99, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.float64)])
    model.extend([Own(99, 99, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16)])
    model.append(nn.Linear(99, 99, dtype=torch.bfloat16))
    model[5].forward = own = model[5].forward
    with blocked(model, 16, WORTH):
        assert replaced(model) == ["5"]
        assert model[5].forward is own
    assert model[5].forward is own


@can_block
def test_a_weight_that_a_quantisation_packs_is_left_alone():
    class Packed(torch.Tensor):
        pass

    layer = nn.Linear(99, 99, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed), requires_grad=False)
    with blocked(layer, 16, WORTH):
        assert replaced(layer) == []


@can_block
def test_a_bias_is_added_as_torch_adds_it_to_a_slice():
    layer, states = nn.Linear(96, 200, dtype=torch.bfloat16), torch.randn(4, 3, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        stock = [layer(states), layer(states[:, -1:])]
        with blocked(layer, 4, WORTH):
            found = [layer(states), layer(states[:, -1:])]
    assert all(map(torch.equal, found, stock))


@can_block
def test_a_layer_that_a_model_computes_in_float32_stays_so():
    layer, states = nn.Linear(96, 200), torch.randn(4, 96)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), blocked(layer, 4, WORTH):
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(layer(states), nn.functional.linear(states, layer.weight, layer.bias))
        assert layer(states).dtype == torch.bfloat16


@can_block
@pytest.mark.parametrize("whole", [False, True])
def test_a_model_with_a_compiled_part_is_left_alone(whole):
    inner, outer = nn.Linear(96, 96, dtype=torch.bfloat16), nn.Linear(96, 96, dtype=torch.bfloat16)
    if whole:
        inner = torch.compile(inner)
    else:
        inner.compile()
    with blocked(nn.Sequential(inner, outer), 4, WORTH):
        assert replaced(outer) == []


@can_block
def test_short_completions_are_not_worth_it():
    layer = nn.Linear(99, 99, dtype=torch.bfloat16)
    with blocked(layer, 16, WORTH - 1):
        assert replaced(layer) == []


@can_block
def test_the_forward_is_back_after_an_error():
    layer = nn.Linear(99, 99, dtype=torch.bfloat16)
    with pytest.raises(KeyError), blocked(layer, 16, WORTH):
        raise KeyError
    assert replaced(layer) == []
