"""Attention of one new token whose query heads share key heads."""

import contextlib

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_ext.rollout import grouped_queries
from support import tiny

ROWS, HEADS, KEY_HEADS, KEYS, SIZE = 3, 6, 2, 9, 8


@pytest.mark.parametrize("queries", [1, 4], ids=["one token", "several"])
@pytest.mark.parametrize("mask", ["none", "of rows", "additive", "of heads"])
@pytest.mark.parametrize("key_heads", [KEY_HEADS, HEADS, 1])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_computes_what_transformers_computes(queries, mask, key_heads, scaling):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // key_heads
    query = torch.randn(ROWS, HEADS, queries, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, ROWS, key_heads, KEYS, SIZE, dtype=torch.float64)
    seen = torch.rand(ROWS, HEADS if mask == "of heads" else 1, queries, KEYS) < 0.7
    seen[..., -1] = True
    if mask == "additive":
        seen = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
    given = (module, query, key, value, None if mask == "none" else seen)
    found, _ = grouped_queries.attention(*given, scaling=scaling)
    expected, _ = sdpa_attention_forward(*given, scaling=scaling)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("padding", [1, 0], ids=["rows of two lengths", "of one"])
def test_keys_are_not_copied_for_each_query_head(padding, monkeypatch):
    heads = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, *args, **kwargs):
        heads.append((query.shape[1:3], key.shape[1]))
        return stock(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = tiny.model()
    ids = torch.tensor([[0 if padding else 4, 5, 6], [7, 8, 9]])
    cache = model(ids, attention_mask=(ids > 0).long()).past_key_values
    heads.clear()
    with grouped_queries.selected(model):
        mask = torch.tensor([[1 - padding, 1, 1, 1], [1, 1, 1, 1]])
        model(ids[:, -1:], attention_mask=mask, past_key_values=cache)
    config = model.config
    shared = config.num_attention_heads // config.num_key_value_heads
    assert heads == [((config.num_key_value_heads, shared), config.num_key_value_heads)] * config.num_hidden_layers


@pytest.mark.parametrize("chosen", ["sdpa", "eager"])
def test_the_models_own_attention_is_back_afterwards(chosen):
    model = tiny.model()
    model.set_attn_implementation(chosen)
    with contextlib.suppress(ZeroDivisionError), grouped_queries.selected(model):
        inside = model.config._attn_implementation
        raise ZeroDivisionError
    assert inside == (grouped_queries.NAME if chosen == "sdpa" else "eager")
    assert model.config._attn_implementation == chosen
