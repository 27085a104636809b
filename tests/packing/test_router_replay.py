"""Router replay: given experts with the present router's gates, exact in value and gradient, or refused by name."""

import itertools

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.packing.obstacles import obstacles
from grpo_ext.packing.routes import ROUTES, padded, replay_obstacle, routers_of
from grpo_ext.rollout.collected import Collected
from support import architectures, experts
from support.trainers import build

COMPLETION = 5
GROUPS = [(6, [5, 3, 4]), (3, [2, 5]), (4, [1])]
"""Lengths of prompts, and of the completions of each."""


def rows_of(network):
    """Padded rows whose tokens have experts that no router chose; the rows of a prompt agree on it."""
    g = torch.Generator().manual_seed(0)
    routers, width = routers_of(network), max(p for p, _ in GROUPS)
    count, chosen = routers[0].count, network.config.get_text_config().num_experts_per_tok
    ids, masks, routes = [], [], []

    def drawn(tokens):
        scores = torch.rand(tokens, len(routers), count, generator=g)
        return scores.topk(chosen).indices.short()

    for length, completions in GROUPS:
        prompt, of_prompt = torch.randint(3, 40, (length,), generator=g), drawn(length)
        for n in completions:
            own = torch.randint(3, 40, (n,), generator=g)
            row = torch.zeros(width + COMPLETION, dtype=torch.long)
            row[width - length : width + n] = torch.cat([prompt, own])
            live = torch.arange(len(row))
            masks.append(((live >= width - length) & (live < width + n)).long())
            ids.append(row)
            routes.append(torch.cat([of_prompt, drawn(n - 1)]))
    order = torch.randperm(len(ids), generator=g).tolist()
    return torch.stack([ids[i] for i in order]), torch.stack([masks[i] for i in order]), [routes[i] for i in order]


def gradients(network, logps, entropies):
    factors = torch.randn(2, *logps.shape, generator=torch.Generator().manual_seed(1)).to(logps.dtype)
    network.zero_grad()
    (factors[0] * logps + factors[1] * entropies).sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def explicit(network, family, ids, mask, routes):
    """Scores by the model's logits, its routers replaced by a written formula."""
    flat = padded(routes, mask, COMPLETION).flatten(0, 1)
    flat = torch.where(flat >= 0, flat, torch.arange(flat.shape[-1], dtype=torch.int16))
    with experts.sent_to(network, family, flat):
        log_p = network(input_ids=ids, attention_mask=mask).logits[:, -COMPLETION - 1 : -1].log_softmax(-1)
        live = mask[:, -COMPLETION:].bool()
        logps = log_p.gather(-1, ids[:, -COMPLETION:, None])[..., 0] * live
        entropies = -(log_p.exp() * log_p).sum(-1) * live
        return logps.detach(), gradients(network, logps, entropies)


@pytest.mark.parametrize("family", experts.GATES)
def test_given_experts_get_the_gates_of_the_model_s_own_formula(family, tmp_path):
    network = architectures.model(family)
    ids, mask, routes = rows_of(network)
    expected, wanted = explicit(network, family, ids, mask, routes)
    for sharing in ("false", *(("true",) if next(obstacles(network), None) is None else ())):
        trainer = build(network, tmp_path, shared_prefix=sharing, temperature=1.0, router_aux_loss_coef=0.0)
        for size, checkpointing in ((None, False), (2, True)):
            if checkpointing:
                network.train().gradient_checkpointing_enable({"use_reentrant": False})
            rows = ids, mask, COMPLETION, size
            logps, entropies, _ = trainer._scorer.tokens(network, *rows, compute_entropy=True, routes=routes)
            found = gradients(network, logps, entropies)
            network.gradient_checkpointing_disable()
            assert (logps - expected).abs().max() < 1e-5
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                assert (found[name] - gradient).abs().max() < 1e-5 * max(1.0, gradient.abs().max()), name
    with torch.no_grad():
        assert (trainer._scorer.tokens(network, ids, mask, COMPLETION)[0] - expected).abs().max() > 1e-3


# Enumeration.

VOCABULARY, LENGTH = 5, 3


def enumerated(network):
    """All completions of one prompt: ids [rows, prompt and completion]."""
    rows = itertools.product(range(VOCABULARY), repeat=LENGTH)
    return torch.tensor([[3, 4, 2, *row] for row in rows])


@pytest.mark.parametrize("sharing", ["true", "false"])
def test_the_gradient_under_replay_is_the_true_one_in_expectation(sharing, tmp_path):
    """sum_y mu(y) (pi / mu)(y) R(y) grad log pi(y) is grad E_pi[R], pi with the routes of the sampler mu."""
    sampler, policy = (experts.model(seed, torch.float64, vocab_size=VOCABULARY) for seed in (1, 2))
    ids = enumerated(policy)
    prompts, completions = ids[:, :-LENGTH].tolist(), ids[:, -LENGTH:].tolist()
    reward = torch.randn(len(ids), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    add_fused_lm_head(sampler, temperature=1.0, outputs=("log_probs", "entropy"))
    with experts.in_float64():
        scorer = build(policy, tmp_path, shared_prefix=sharing)._scorer
        routes = scorer.routes(sampler, prompts, completions, 50)
        given = padded(routes, torch.ones_like(ids), LENGTH).flatten(0, 1)
        given = torch.where(given >= 0, given, torch.arange(2, dtype=torch.int16))

        def directly():
            with experts.sent_to(policy, "qwen3_moe", given):
                log_p = policy(input_ids=ids).logits[:, -LENGTH - 1 : -1].log_softmax(-1)
            return log_p.gather(-1, ids[:, -LENGTH:, None])[..., 0].sum(dim=1).exp()

        def score(network, **replayed):
            return scorer.tokens(network, ids, torch.ones_like(ids), LENGTH, **replayed)[0]

        parameters = list(policy.parameters())
        true = torch.autograd.grad((directly() * reward).sum(), parameters, allow_unused=True)
        logps, drawn = score(policy, **{ROUTES: routes}), score(sampler).detach()
        weight = drawn.sum(dim=1).exp() * (logps - drawn).sum(dim=1).exp().detach()
        found = torch.autograd.grad((weight * reward * logps.sum(dim=1)).sum(), parameters, allow_unused=True)
        for ours, theirs in zip(found, true, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours - theirs).abs().max() < 1e-10
        assert weight.sum().item() == pytest.approx(1, abs=1e-10)
        assert (score(policy).detach().sum(dim=1).exp() - directly()).abs().max() > 1e-4

        gate = policy.model.layers[0].mlp.gate.weight
        place = [p is gate for p in parameters].index(True)
        direction = torch.randn(gate.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        ends = []
        with torch.no_grad():
            for step in (1e-5, -1e-5):
                gate.add_(direction, alpha=step)
                ends.append((score(policy, **{ROUTES: routes}).sum(dim=1).exp() * reward).sum())
                gate.sub_(direction, alpha=step)
        slope = (true[place] * direction).sum()
        assert ((ends[0] - ends[1]) / 2e-5 - slope).abs() < 1e-6
        assert slope.abs() > 1e-3


def test_rows_whose_prompts_took_other_routes_share_no_forward(tmp_path):
    network = architectures.model("qwen3_moe")
    ids, mask, routes = rows_of(network)
    trainer = build(network, tmp_path, shared_prefix="true", router_aux_loss_coef=0.0)
    longest = [i for i, row in enumerate(mask) if row[:-COMPLETION].sum() == 6]
    routes[longest[0]] = routes[longest[0]].roll(1, dims=2)  # the same experts in another order
    routes[longest[1]] = routes[longest[1]].flip(0)
    expected, _ = explicit(network, "qwen3_moe", ids, mask, routes)
    with torch.no_grad():
        found = trainer._scorer.tokens(network, ids, mask, COMPLETION, routes=routes)[0]
    assert (found - expected).abs().max() < 1e-5


def test_a_row_with_fewer_routes_than_tokens_is_refused(tmp_path):
    network = architectures.model("qwen3_moe")
    ids, mask, routes = rows_of(network)
    routes[2] = routes[2][:-1]
    scorer = build(network, tmp_path, router_aux_loss_coef=0.0)._scorer
    with pytest.raises(ValueError, match="routes for"):
        scorer.tokens(network, ids, mask, COMPLETION, routes=routes)


# Where a model is refused.

REPLAYED = [
    "afmoe",
    "axk1",
    "axk2",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "inkling_text",
    "kimi_linear",
    "laguna",
    "lfm2_moe",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "solar_open",
]
REFUSED = {
    "has experts without a router that is known": "aria_text jetmoe longcat_flash",
    "does not choose its experts by one topk": "dbrx deepseek_v4 jamba phimoe zaya",
    "do not get given routes, each with a weight": "llama4 llama4_text",
}
"""What is said of the other mixtures of experts of transformers 5.17."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_mixture_of_experts_replays_exactly_or_is_refused_by_name():
    refused = {name: words for words, names in REFUSED.items() for name in names.split()}
    for name in architectures.CAUSAL:
        if name in architectures.NOT_BUILT:
            continue
        found = replay_obstacle(architectures.model(name)) or ""
        if found.endswith("has no experts"):
            continue
        assert name in refused or name in REPLAYED, f"{name} is new: {found!r}"
        assert refused.get(name, "") in found
        assert (name in refused) == bool(found), name


def test_a_router_that_reads_more_than_its_choice_is_refused():
    """The values of an expert outside a router's groups would be masked."""
    network = architectures.model("deepseek_v2")
    config = network.config
    assert replay_obstacle(network) is None
    groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    grouped = type(network)(type(config)(**{**config.to_dict(), **groups}))
    assert "each with a weight" in replay_obstacle(grouped)


# What the engines record.


@pytest.mark.parametrize("engine", ["grouped", "generate"])
def test_the_recorded_routes_are_those_of_a_forward_over_the_whole_row(engine, tmp_path):
    trainer = build(experts.model(), tmp_path, rollout_engine=engine, router_replay="rollout")
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9, 10], [9, 10], [11], [5, 6, 7, 8], [11], [9, 10]]
    plain = build(experts.model(), tmp_path, rollout_engine=engine)
    completions = []
    for one in (plain, trainer):
        torch.manual_seed(0)
        with one._filling(Collected([])) as collected:
            completions.append(one._generate_single_turn(prompts, None, {}, 4)[0])
    assert completions[0] == completions[1]
    assert len({len(ids) for ids in completions[1]}) > 1
    expected = trainer._scorer.routes(trainer.model, prompts, completions[1], 8)
    for found, wanted in zip(collected.routes, expected, strict=True):
        assert torch.equal(found, wanted)
