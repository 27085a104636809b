"""The correction of a sampler that is not the policy: values by hand, an enumerable model, and the kept gradient."""

import itertools
import math

import pytest
import torch

from grpo_ext.objective.sampler_correction import (
    DEFAULT,
    SamplerRule,
    bernoulli_kl,
    corrected,
    second_moment_cut,
    trl_rule,
)

LOG = torch.tensor([0.5, 2.0, 4.0, 1.0], dtype=torch.float64).log()
POLICY = torch.stack([LOG, LOG.flip(0)]) - 3
SAMPLER = torch.full((2, 4), -3.0, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
KEEP, TAIL = {"action": "mask"}, {"level": "max", "action": "mask"}


@pytest.mark.parametrize(
    ("rules", "weights"),
    [
        ([], [[1], [1]]),
        ([{}], [[0.5, 2, 4, 1], [1, 4, 2, 0.5]]),
        ([{"upper": 2.0}], [[0.5, 2, 2, 1], [1, 2, 2, 0.5]]),
        ([{"lower": 0.8, "upper": 2.0}], [[0.8, 2, 2, 1], [1, 2, 2, 0.8]]),
        ([{"lower": 0.6, "upper": 3.0, **KEEP}], [[0, 2, 0, 1], [1, 0, 2, 0]]),
        ([{"upper": 2.0, "normalize": True}], [[7 / 20, 1.4, 1.4, 1], [0.7, 1.4, 1.4, 0.35]]),
        (
            [{"upper": 3.0, "normalize": True, "action": "reject"}],
            [[5 / 12, 5 / 3, 0, 1], [5 / 6, 0, 5 / 3, 5 / 12]],
        ),
        ([{"level": "sequence"}], [[4], [4]]),
        ([{"level": "sequence", "upper": 3.0}], [[3], [3]]),
        ([{"level": "sequence", "upper": 3.0, **KEEP}], [[0], [0]]),
        ([{"level": "geometric"}], [[4 ** (1 / 3)], [4 ** (1 / 4)]]),
        ([{"level": "geometric", "upper": 1.5, **KEEP}], [[0], [4 ** (1 / 4)]]),
        ([{"level": "geometric", "normalize": True}], [[1.0576982], [0.9423018]]),
        ([{"statistic": "k1", "lower": -1.0, **KEEP}], [[1, 1, 0, 1], [1, 0, 1, 1]]),
        ([{"statistic": "k2", "upper": 0.3, **KEEP}], [[1, 1, 0, 1], [1, 0, 1, 1]]),
        ([{"statistic": "k3", "upper": 1.0, **KEEP}], [[1, 1, 0, 1], [1, 0, 1, 1]]),
        ([{"level": "sequence", "statistic": "k3", "upper": 2.1, **KEEP}], [[0], [0]]),
        ([{"level": "geometric", "statistic": "k2", "upper": 0.4, **KEEP}], [[0], [1]]),
        ([{"statistic": "k2", "upper": 1.0, **TAIL}], [[1], [1]]),
        ([{"statistic": "k2", "upper": 0.9, **TAIL}], [[0], [0]]),
        ([{"statistic": "m2", "upper": 0.4, **KEEP}], [[1, 1, 0, 1], [1, 0, 1, 1]]),
        (
            [{"upper": 2.0}, {"level": "geometric", "statistic": "k1", "lower": -0.4, "action": "reject"}],
            [[0, 0, 0, 1], [1, 2, 2, 0.5]],
        ),
    ],
)
def test_weights_worked_out_by_hand(rules, weights):
    found = corrected([SamplerRule(**rule) for rule in rules], POLICY, SAMPLER, MASK)
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-6, atol=0)


def test_only_rejected_tokens_leave_the_denominators():
    for action, counted in (("mask", MASK), ("reject", torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]))):
        assert corrected([SamplerRule(upper=3.0, action=action)], POLICY, SAMPLER, MASK).counted.equal(counted.bool())


def test_a_token_that_the_sampler_did_not_score_counts_as_its_own():
    sampler = SAMPLER.clone()
    sampler[0, 2] = math.nan
    rules = [SamplerRule(level="sequence"), SamplerRule(statistic="binary_kl", upper=1e-9, action="mask")]
    found = corrected(rules, POLICY, sampler, MASK)
    torch.testing.assert_close(found.weights[0], torch.tensor([0, 0, 1, 1], dtype=torch.float64))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("statistic", ["ratio", "k1", "k2", "k3", "binary_kl", "m2"])
def test_garbage_under_the_mask_changes_nothing(statistic, garbage):
    action = "truncate" if statistic == "ratio" else "mask"
    rules = [SamplerRule(statistic=statistic, upper=1.5, action=action), SamplerRule(level="max", **NEVER)]
    dirty = torch.where(MASK.bool(), SAMPLER, garbage)
    found, expected = corrected(rules, POLICY, dirty, MASK), corrected(rules, POLICY, SAMPLER, MASK)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0)
    dirty = torch.where(MASK.bool(), POLICY, garbage)
    torch.testing.assert_close(corrected(rules, dirty, SAMPLER, MASK).weights, expected.weights, rtol=0, atol=0)


NEVER = {"statistic": "k2", "upper": 1e9, "action": "mask"}


def test_infinite_differences_give_finite_weights():
    sampler = torch.tensor([[-math.inf, 0.0], [-1.0, -1.0]], dtype=torch.float32)
    policy = torch.tensor([[-1.0, -math.inf], [-200.0, 0.0]], dtype=torch.float32)
    for level in ("token", "sequence", "geometric"):
        found = corrected([SamplerRule(level=level)], policy, sampler, torch.ones(2, 2))
        assert found.weights.isfinite().all()


def test_second_moment_cut_keeps_the_most_squares_whose_mean_is_within_the_bound():
    squares = torch.tensor([0.0, 9.0, 1.0, 4.0], dtype=torch.float64)
    assert [second_moment_cut(squares, bound) for bound in (0.0, 0.5, 1.7, 3.5, math.inf)] == [0.0, 1.0, 4.0, 9.0, 9.0]
    assert second_moment_cut(squares + 1, 0.5) == second_moment_cut(squares[:0], 1.0) == -1.0


def test_equal_squares_leave_together_so_that_the_mean_is_within_the_bound():
    squares = torch.tensor([4.0, 0.0, 4.0, 0.0, 4.0], dtype=torch.float64)
    assert [second_moment_cut(squares, bound) for bound in (2.3, 2.4)] == [0.0, 4.0]


def test_bernoulli_kl_is_the_divergence_of_drawing_the_token_or_not():
    p, q = (torch.tensor([values], dtype=torch.float64) for values in ([0.9, 0.5, 1e-30], [0.5, 0.9, 0.5]))
    expected = [0.9 * math.log(1.8) + 0.1 * math.log(0.2), 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5), math.log(2)]
    torch.testing.assert_close(bernoulli_kl(p.log(), q.log()), torch.tensor([expected], dtype=torch.float64))
    certain = torch.zeros(1, 1, dtype=torch.float64)
    assert bernoulli_kl(certain, certain).item() == 0
    assert bernoulli_kl(certain, certain - math.inf).isfinite()


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("rule", [{"upper": 1.5, "normalize": True}, {"statistic": "m2", "upper": 0.02, **KEEP}])
def test_weights_of_a_generation_do_not_depend_on_its_split_over_processes(rule, parts):
    g = torch.Generator().manual_seed(0)
    policy, sampler = (0.3 * torch.randn(10, 7, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(10, 7, generator=g) < 0.7
    whole = corrected([SamplerRule(**rule)], policy, sampler, mask).weights
    pieces = list(zip(policy.chunk(parts), sampler.chunk(parts), mask.chunk(parts), strict=True))
    local = []  # what each process gives to the collective

    for own in pieces:
        corrected([SamplerRule(**rule)], *own, gather=lambda values: local.append(values) or values)
    found = [corrected([SamplerRule(**rule)], *own, gather=lambda _: torch.cat(local)).weights for own in pieces]
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-14, atol=0)


# TRL's names.


def trls_weights(mode, low, high, policy, sampler, mask):
    """Weights as TRL documents them: the ratio at a level, cut to the bounds or 0 outside of them."""
    d = torch.nan_to_num((policy - sampler) * mask, nan=0.0)
    ratio = (d.sum(-1, keepdim=True) if mode.startswith("sequence") else d).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    outside = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.7, None), (0.7, 1.3)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_trls_names_give_trls_weights_to_the_last_bit(mode, bounds):
    g = torch.Generator().manual_seed(0)
    policy, sampler = (0.4 * torch.randn(50, 9, generator=g) - 2 for _ in range(2))
    sampler[3, 4] = math.nan
    mask = (torch.arange(9) < torch.randint(1, 10, (50, 1), generator=g)).long()
    found = corrected([trl_rule(mode, *bounds)], policy, sampler, mask).weights
    expected = trls_weights(mode, *bounds, policy, sampler, mask)
    assert found.shape == expected.shape
    active = mask.bool() if mode.startswith("token") else torch.ones(50, 1, dtype=torch.bool)
    assert found[active].equal(expected[active])
    assert ((found != 1) & active).any()


# An enumerable model: 5 tokens, completions of 3, the next token given the one before it.

V, T = 5, 3
IDS = torch.tensor(list(itertools.product(range(V), repeat=T)))
REWARDS = torch.randn(len(IDS), generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def logits(seed):
    """Logits [previous token or start, next token]."""
    return torch.randn(V + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probs(model):
    before = torch.cat([torch.full_like(IDS[:, :1], V), IDS[:, :-1]], dim=1)
    return model.log_softmax(dim=-1)[before].gather(2, IDS[..., None]).squeeze(2)


def gradient(model, probabilities, weights):
    """Expectation under `probabilities` of the corrected policy gradient, sum_t w R grad log pi(y_t)."""
    model = model.clone().requires_grad_()
    loss = (probabilities[:, None] * weights.expand(-1, T) * REWARDS[:, None] * log_probs(model)).sum()
    return torch.autograd.grad(loss, model)[0]


def bias(*rules, noise=0.3):
    return bias_of([SamplerRule(**rule) for rule in rules], noise)


def bias_of(rules, noise):
    """Relative error of the expected gradient, by enumeration of all completions."""
    policy, sampler = logits(0), logits(0) + noise * logits(1)
    logps, drawn = log_probs(policy), log_probs(sampler)
    truth = gradient(policy, logps.sum(1).exp(), torch.ones(len(IDS), 1, dtype=torch.float64))
    weights = corrected(rules, logps, drawn, torch.ones_like(IDS)).weights
    return ((gradient(policy, drawn.sum(1).exp(), weights) - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("noise", [0.03, 0.3, 1.0])
def test_the_product_ratio_alone_is_unbiased(noise):
    assert bias({"level": "sequence"}, noise=noise) < 1e-12
    assert bias({"level": "sequence", "upper": 1e6, **KEEP}, noise=noise) < 1e-12
    assert min(bias(noise=noise), bias({}, noise=noise), bias({"level": "geometric"}, noise=noise)) > 1e-4


def test_token_ratios_are_less_biased_than_no_correction_and_a_bound_that_never_acts_adds_nothing():
    for noise in (0.03, 0.3):
        assert bias({}, noise=noise) < 0.7 * bias(noise=noise)
    assert bias({"upper": 2.0}, noise=0.03) == bias({}, noise=0.03)


# Length.


def gradient_left(rules, deviation, tokens, rows=128):
    """Mean weight of tokens whose sampler is off by normal noise, counted as the policy would draw them.

    The expectation under the sampler of w f is that under the policy of w f / S, S the ratio of the completion (of the
    token, for weights of tokens): a sum that few samples describe.
    """
    g = torch.Generator().manual_seed(tokens)
    d = deviation * torch.randn(rows, tokens, generator=g) + deviation**2 / 2
    found = corrected(rules, d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool)).weights
    ratio = d.exp() if found.shape == d.shape else d.sum(dim=1, keepdim=True).exp()
    return (found / ratio).mean().item()


LENGTHS = [512, 2048, 8192, 16384]


@pytest.mark.parametrize("deviation", [0.01, 0.02, 0.05])
def test_the_default_leaves_long_completions_their_gradient(deviation):
    left = [gradient_left(DEFAULT, deviation, tokens, rows=32) for tokens in LENGTHS]
    assert max(left) - min(left) < 0.05
    assert min(left) > 0.95


@pytest.mark.parametrize("deviation", [0.01, 0.02, 0.05])
def test_stocks_product_with_a_bound_leaves_what_the_closed_form_says(deviation):
    for tokens in LENGTHS:
        spread = deviation * math.sqrt(tokens)
        expected = torch.special.ndtr(torch.tensor((math.log(3) - spread**2 / 2) / spread)).item()
        found = gradient_left([trl_rule("sequence_mask", None, 3.0)], deviation, tokens)
        assert found == pytest.approx(expected, abs=0.15)  # three deviations of 128 rows
