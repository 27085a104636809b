"""Recurrent layers over packed rows: each segment starts from the state of its own parent, and from no other's."""

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.packing import recurrent
from grpo_ext.packing.attention import ForeignAttention
from grpo_ext.packing.dropout import switch_dropout_off
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.obstacles import Forward, obstacles
from grpo_ext.packing.policy import PrefixSharing
from support import architectures
from support.float64 import float64_in

COMPLETION = 9
EACH = ("falcon_h1", "lfm2", "qwen3_next")
"""Mamba 2 beside attention, short convolutions, and the gated delta rule."""
PARENTS = torch.tensor(
    [
        [-1, 0, 0, 2, 2, 4, 4, 6, -1],  # 0, 2 and 4 are segments of one token, each after the one before
        [-1, 0, 1, 2, 1, 4, -1, 6, 7],
        [-1, 0, 1, 2, 3, 4, 5, 6, 7],
        [-3, 0, 1, -3, 3, 3, 3, 6, 7],  # branches within the prompt
        [-1, 0, 1, 2, 3, 4, 5, 6, 7],
    ]
)
LENGTHS = (9, 7, 1, 9, 5)
"""Of the completions; the third has one token, and the last has a prompt of its own."""


def batch():
    """Padded rows of two prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, architectures.VOCABULARY, (2, 6), generator=generator)
    own = torch.randint(3, architectures.VOCABULARY, (5, COMPLETION), generator=generator)
    ids = torch.cat([prompts[torch.tensor([0, 0, 0, 0, 1])], own], dim=1)
    mask = (torch.arange(6 + COMPLETION) < 6 + torch.tensor(LENGTHS)[:, None]).long()
    mask[4, :2] = 0
    return ids * mask, mask


def network(model_type):
    model = architectures.model(model_type)
    switch_dropout_off(model)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    return model


def scores(model, setting, ids, mask, parents=None):
    """Log-probabilities [rows, completion] by `shared_prefix: setting`."""

    def plain(ids, mask, completion):
        log_p = model(input_ids=ids, attention_mask=mask).logits[:, -completion - 1 : -1].log_softmax(-1)
        return log_p.gather(-1, ids[:, -completion:, None])[..., 0], None, None

    def packed(ids, layout, completion, **extra):
        return log_probs(model, model, ids, layout, completion, **extra)

    sharing = PrefixSharing(setting, model)
    assert sharing.possible == (setting == "true"), sharing.reason
    found = sharing.scores(plain, packed, ids, mask, COMPLETION, len(ids), False, False, parents)[0]
    return found * mask[:, -COMPLETION:]


def gradient(model, logps):
    factors = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1), dtype=logps.dtype)
    model.zero_grad()
    (factors * logps).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name] - values).abs().max() < 1e-10 * max(1.0, values.abs().max()), name


@pytest.mark.cases(4)
@pytest.mark.parametrize("model_type", architectures.RECURRENT)
def test_branches_of_a_tree_start_from_their_parent(model_type):
    model, (ids, mask) = network(model_type), batch()
    with float64_in(model):
        expected, found = (scores(model, setting, ids, mask, PARENTS) for setting in ("false", "true"))
        assert (found - expected).abs().max() < 1e-10
        assert_equal_gradients(gradient(model, found), gradient(model, expected))


@pytest.mark.parametrize("model_type", EACH)
@pytest.mark.parametrize("parents", [None, PARENTS], ids=["rows", "trees"])
def test_no_state_reaches_another_row(model_type, parents):
    """Other tokens in a row, or another prompt, change the scores of that row only."""
    model, (ids, mask) = network(model_type), batch()
    with torch.no_grad():
        before = scores(model, "true", ids, mask, parents)
        for row, columns in ((1, slice(6, None)), (4, slice(2, None))):
            other = ids.clone()
            other[row, columns] = (3 + (other[row, columns] + 7) % 40) * mask[row, columns]
            change = (scores(model, "true", other, mask, parents) - before).abs().amax(dim=1)
            assert change[row] > 0.01
            change[row] = 0
            assert change.max() < 1e-6


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_type", EACH)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same_segments(model_type, reentrant):
    model, (ids, mask) = network(model_type), batch()
    expected = gradient(model, scores(model, "true", ids, mask, PARENTS))
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal_gradients(gradient(model, scores(model, "true", ids, mask, PARENTS)), expected)
    assert not [layer for layer in model.modules() if recurrent.is_recurrent(layer) and "forward" in vars(layer)]


def test_the_weights_of_the_auxiliary_loss_are_no_mask():
    model, (ids, mask) = network("qwen3_next"), batch()
    labels = ids.masked_fill(mask == 0, -100)
    layout = PrefixSharing("true", model).layout(ids, mask, COMPLETION, whole=True)
    with torch.no_grad(), float64_in(model):
        options = {"fused_lm_head": True, "output_router_logits": True}
        stock = model(ids, attention_mask=mask, labels=labels, **options).aux_loss
        ours = log_probs(model, model, ids, layout, COMPLETION, output_router_logits=True)[2]
    assert ours.item() == pytest.approx(stock.item(), abs=1e-10)


def test_a_layer_without_its_segments_is_refused():
    """Also where nothing passes them on, as in a model that calls its layers by itself."""
    model, (ids, mask) = network("qwen3_next"), batch()
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != recurrent.LAYOUT}), with_kwargs=True
    )
    with pytest.raises(ForeignAttention, match="Qwen3NextGatedDeltaNet is called without the segments"):
        scores(model, "true", ids, mask)


def forgotten(state, parents):
    recurrent.LinearAttentionLayer.__init__(state)
    state.record_past = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("model_type", ["nemotron_h", "qwen3_next"])
def test_the_check_of_the_first_forward_misses_no_state(model_type, dtype, carries, monkeypatch):
    """Nor does it take rounding for one; Nemotron-H has no positions whose shift would show its rounding."""
    model = network(model_type).to(dtype)
    if not carries:
        monkeypatch.setattr(recurrent.State, "__init__", forgotten)

    def plain(ids, mask, completion):
        log_p = model(input_ids=ids, attention_mask=mask).logits[:, -completion - 1 : -1].float().log_softmax(-1)
        return log_p.gather(-1, ids[:, -completion:, None])[..., 0], None, None

    sharing = PrefixSharing("auto", model)
    sharing.check(plain, lambda *args: log_probs(model, model, *args), model, torch.device("cpu"))
    assert sharing.possible == carries, sharing.reason


def test_a_biased_projection_lets_padding_into_the_convolution():
    """transformers' padded forward is not that of a row by itself then, so nothing could be compared with it."""
    settings = architectures.config("lfm2")
    settings.conv_bias = True
    model, (ids, mask) = architectures.model("lfm2", settings), batch()
    with torch.no_grad():
        padded = model(input_ids=ids[4:], attention_mask=mask[4:]).logits[:, 2:]
        alone = model(input_ids=ids[4:, 2:], attention_mask=mask[4:, 2:]).logits
    assert (padded - alone).abs().max() > 0.01
    for use in (Forward.LOSS, Forward.ROLLOUT):
        assert "in_proj lets padding" in next(obstacles(model, use))
