"""Replayed routes: given experts with the present router's gates, exact in value and gradient, or refused by name."""

from contextlib import contextmanager

import pytest
import torch

from grpo_ext.packing.routes import mixtures_of, no_routes, padded, replay_obstacle, routed
from grpo_ext.packing.sampling_support import encoded
from grpo_ext.packing.token_budget import TokenBudget
from support import architectures, experts, tiny
from support.float64 import float64_in, float64_throughout
from support.trainers import build

COMPLETION = 5
LENGTHS = [(6, 5), (3, 2), (6, 3), (4, 1), (3, 5), (6, 4)]
"""Tokens of the prompt and of the completion of each row."""
EXACT = 1e-12


@contextmanager
def in_float64(network):
    with float64_throughout(), float64_in(network):
        yield


def rows_of(network):
    """Padded rows whose tokens have experts that no router chose."""
    g = torch.Generator().manual_seed(0)
    mixtures, width = mixtures_of(network), max(p for p, _ in LENGTHS)
    count = next(iter(mixtures.values())).experts.num_experts
    shape = len(network.base_model.layers), count
    ids, mask = torch.zeros(2, len(LENGTHS), width + COMPLETION, dtype=torch.long)
    routes = []
    for row, (prompt, completion) in enumerate(LENGTHS):
        live = slice(width - prompt, width + completion)
        ids[row, live], mask[row, live] = torch.randint(3, 40, (prompt + completion,), generator=g), 1
        scores = torch.rand(prompt + completion - 1, *shape, generator=g)
        routes.append(scores.topk(2).indices.to(torch.uint8))
    return ids, mask, routes


def gradients(network, logps, entropies):
    factors = torch.randn(2, *logps.shape, generator=torch.Generator().manual_seed(1)).double()
    network.zero_grad()
    (factors[0] * logps + factors[1] * entropies).sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def explicit(network, family, ids, mask, routes, kept=None):
    """Scores by the model's logits, its routers replaced by a written formula."""
    flat = padded(routes, mask, COMPLETION).flatten(0, 1)
    flat = torch.where(flat >= 0, flat, torch.arange(2, dtype=torch.int16))  # of padding: nobody sees it
    with experts.sent_to(network, family, flat):
        logits = network(input_ids=ids, attention_mask=mask).logits[:, -COMPLETION - 1 : -1]
        logits = logits if kept is None else logits.masked_fill(~kept, -1e30)
        log_p, live = logits.log_softmax(-1), mask[:, -COMPLETION:].bool()
        logps = log_p.gather(-1, ids[:, -COMPLETION:, None])[..., 0] * live
        entropies = -(log_p.exp() * log_p).sum(-1) * live
        return logps.detach(), gradients(network, logps, entropies)


def assert_same(found, wanted):
    assert (found[0] - wanted[0]).abs().max() < EXACT
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).abs().max() < EXACT * max(1.0, gradient.abs().max()), name


def scored(scorer, network, ids, mask, size=None, **given):
    logps, entropies, _ = scorer.tokens(network, ids, mask, COMPLETION, size, compute_entropy=True, **given)
    return logps.detach(), gradients(network, logps, entropies)


@pytest.mark.parametrize("family", experts.GATES)
def test_given_experts_get_the_gates_of_the_model_s_own_formula(family, tmp_path):
    """In rows of any padding and split, within a budget of tokens, and where checkpointing recomputes layers."""
    network = architectures.model(family)
    ids, mask, routes = rows_of(network)
    with in_float64(network):
        scorer = build(network, tmp_path, shared_prefix="false", temperature=1.0, router_aux_loss_coef=0.0)._scorer
        wanted = explicit(network, family, ids, mask, routes)
        for size in (None, 1, 4):
            assert_same(scored(scorer, network, ids, mask, size, routes=routes), wanted)
        wider = [torch.nn.functional.pad(x, (3, 0)) for x in (ids, mask)]
        assert_same(scored(scorer, network, *wider, routes=routes), wanted)
        scorer.limit = TokenBudget(25, scorer.sharing)
        assert_same(scored(scorer, network, ids, mask, routes=routes), wanted)
        scorer.limit = None
        network.train().gradient_checkpointing_enable({"use_reentrant": False})
        assert_same(scored(scorer, network, ids, mask, routes=routes), wanted)
        network.gradient_checkpointing_disable()
        assert (scored(scorer, network.eval(), ids, mask)[0] - wanted[0]).abs().max() > 1e-3
        assert any("gate" in name or "router" in name for name, g in wanted[1].items() if g.abs().max() > 1e-6)


def test_the_router_s_own_routes_change_nothing_to_the_bit(tmp_path):
    network = architectures.model("qwen3_moe")
    ids, mask, _ = rows_of(network)
    scorer = build(network, tmp_path, shared_prefix="false", router_aux_loss_coef=0.0)._scorer
    routes = [experts.chosen(network, row[live.bool()].tolist()) for row, live in zip(ids, mask, strict=True)]
    before, after = (scored(scorer, network, ids, mask, **given) for given in ({}, {"routes": routes}))
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][name], gradient) for name, gradient in after[1].items())
    changed, count = scorer.routes_changed()
    assert (changed, count) == (0, 4 * (mask.sum() - len(mask)))
    others = [(row + 1) % 4 for row in routes]
    scored(scorer, network, ids, mask, routes=others)
    assert scorer.routes_changed()[0] > 0.5


def test_tokens_that_a_truncated_sampler_left_out_count_beside_given_routes(tmp_path):
    network = architectures.model("mixtral")
    ids, mask, routes = rows_of(network)
    kept, sets = torch.zeros(*ids.shape, network.config.vocab_size, dtype=torch.bool), []
    kept[..., ::2] = True
    kept = kept[:, -COMPLETION:].scatter(-1, ids[:, -COMPLETION:, None], True)
    for row, live in zip(kept, mask[:, -COMPLETION:], strict=True):
        own = row[: int(live.sum())]
        sets.append(encoded(own.sum(dim=1).int(), own.nonzero()[:, 1]))
    with in_float64(network):
        scorer = build(network, tmp_path, shared_prefix="false", temperature=1.0)._scorer
        wanted = explicit(network, "mixtral", ids, mask, routes, kept)
        assert_same(scored(scorer, network, ids, mask, routes=routes, sampling_supports=sets), wanted)


def test_routes_that_do_not_fit_the_rows_are_refused(tmp_path):
    network = architectures.model("qwen3_moe")
    ids, mask, routes = rows_of(network)
    scorer = build(network, tmp_path, shared_prefix="false", router_aux_loss_coef=0.0)._scorer

    def score(given):
        return scorer.tokens(network, ids, mask, COMPLETION, routes=given)

    with pytest.raises(ValueError, match="9 routes for 11 tokens of row 0"):
        score([routes[0][:-1], *routes[1:]])
    with pytest.raises(RuntimeError, match=r"replay_routes: .* experts where layer 0 chooses"):
        score([row[..., :1] for row in routes])
    longer = score([torch.cat([row, row[:1]]) for row in routes])[0]
    torch.testing.assert_close(longer, score(routes)[0])  # of a completion that is cut in the loss
    with pytest.raises(ValueError, match="rewritten contexts"):
        scorer.tokens(network, ids, mask, COMPLETION, routes=routes, parents=torch.zeros(6, 5, dtype=torch.long))


# Where a model is refused.

REFUSED = {
    "have experts of unknown form": "aria_text dbrx llama4 llama4_text longcat_flash",
    "do not get given routes, each with a weight": "deepseek_v4 jetmoe phimoe zaya",
}
"""What is said of the mixtures of experts of transformers 5.17 that cannot replay routes."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_mixture_of_experts_gets_given_routes_or_is_refused_by_name():
    refused = {name: words for words, names in REFUSED.items() for name in names.split()}
    replayed = 0
    for name in set(architectures.CAUSAL) - set(architectures.NOT_BUILT):
        found = replay_obstacle(architectures.model(name)) or ""
        if not found.endswith("has no experts"):
            assert refused.get(name, "") in found, found
            assert (name in refused) == bool(found), f"{name}: {found}"
            replayed += not found
    assert replayed >= 43


def test_a_router_that_masks_what_it_does_not_choose_is_refused():
    """The values of an expert outside a router's groups would be masked."""
    network = architectures.model("deepseek_v2")
    assert replay_obstacle(network) is None
    groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    grouped = type(network)(type(network.config)(**{**network.config.to_dict(), **groups}))
    assert "each with a weight" in replay_obstacle(grouped)


def test_a_model_whose_layers_get_no_further_arguments_is_refused(monkeypatch):
    network = architectures.model("qwen3_moe")

    def forward(
        input_ids, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, use_cache=None
    ):
        """Never entered: it takes no further arguments."""

    monkeypatch.setattr(network.model, "forward", forward)
    assert "does not hand routes to its layers" in replay_obstacle(network)


def test_a_dense_model_has_no_routes():
    assert no_routes(tiny.model()) == replay_obstacle(tiny.model()) == "LlamaForCausalLM has no experts"


def test_afterwards_a_forward_is_the_model_s_own_also_behind_an_error():
    network = architectures.model("qwen3_moe")
    ids = torch.arange(3, 9)[None]
    before = network(input_ids=ids).logits
    with routed(network, lambda layer, own: (own + 1) % 4):
        assert not torch.equal(network(input_ids=ids).logits, before)
    assert torch.equal(network(input_ids=ids).logits, before)

    def wrong(layer, own):
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"), routed(network, wrong):
        network(input_ids=ids)
    assert torch.equal(network(input_ids=ids).logits, before)
