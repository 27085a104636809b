"""Advantage estimators against plain Python (exact `statistics`, scipy's Beta, enumerated subsets) and by hand.

A reward of None below is a completion that could not be scored; it is NaN in the tensors.
"""

import itertools
import math
from statistics import fmean, mean, pstdev, stdev, variance

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_distribution

from grpo_ext.config.warnings import share_of_groups
from grpo_ext.objective.advantages import estimators, group_means, zero_variance
from grpo_ext.objective.combinations import combinations, weighted_total, weighted_turns
from grpo_ext.objective.estimate import estimate

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def tensor(groups, dtype=torch.float64):
    def number(x):
        return [number(y) for y in x] if isinstance(x, (list, tuple)) else math.nan if x is None else float(x)

    return torch.tensor(number(groups), dtype=dtype)


def advantages(name, rewards, history=None, log_metric=None, mask=None, kl_rewards=None, **options):
    """By an estimator under the rules of all."""
    offered = {"history": history, "log_metric": log_metric, "mask": mask, "kl_rewards": kl_rewards}
    return estimate(name, rewards, offered, **options)


def active(group):
    return [r for r in group if r is not None]


def silent(group):
    return len(active(group)) < 2 or max(active(group)) == min(active(group))


def fill(groups, value):
    """`value(group, r)` for every scorable completion of a group with a signal, else 0."""
    return [[0.0 if r is None or silent(g) else value(g, r) for r in g] for g in groups]


def flat(groups):
    return [x for g in groups for x in g]


# The definitions once more, in plain Python


def ref_group(groups, ddof=1, eps=1e-4):
    std = stdev if ddof else pstdev
    return fill(groups, lambda g, r: (r - mean(active(g))) / (std(active(g)) + eps))


def ref_none(groups):
    return fill(groups, lambda g, r: r - mean(active(g)))


def ref_batch(groups, ddof=1, eps=1e-4):
    everything = active(flat(groups))
    return fill(groups, lambda g, r: (r - mean(active(g))) / ((stdev if ddof else pstdev)(everything) + eps))


def ref_loo(groups):
    return fill(groups, lambda g, r: r - (sum(active(g)) - r) / (len(active(g)) - 1))  # minus the mean of the others


def whitened(groups, tokens, ddof, floor):
    """(r - mean) / std over tokens, of which completion (i, j) has tokens[i][j]; None where unscorable."""
    counted = [r for g, counts in zip(groups, tokens, strict=True) for r, n in zip(g, counts, strict=True)
               for _ in range(0 if r is None else n)]  # fmt: skip
    if len(set(counted)) < 2:
        return [[0.0 for _ in g] for g in groups]
    centre, scale = mean(counted), max((stdev if ddof else pstdev)(counted), floor)
    return [[0.0 if r is None else (r - centre) / scale for r in g] for g in groups]


def ref_reinforce_pp(groups, tokens=None, ddof=0, floor=1e-4):
    return whitened(groups, tokens or [[1] * len(g) for g in groups], ddof, floor)


def ref_reinforce_pp_baseline(groups, tokens=None, ddof=0, floor=1e-4):
    centred = [[None if r is None else 0.0 if silent(g) else r - mean(active(g)) for r in g] for g in groups]
    out = whitened(centred, tokens or [[1] * len(g) for g in groups], ddof, floor)
    return [[0.0 if silent(g) else a for a in o] for g, o in zip(groups, out, strict=True)]


def ref_maxrl(groups, eps=1e-6):
    return fill(groups, lambda g, r: (r - mean(active(g))) / (mean(active(g)) + eps))


def ref_minimind(groups, clamp=10.0, eps=1e-4, batch_eps=1e-8):
    first = [[max(-clamp, min(clamp, a)) for a in g] for g in ref_group(groups, eps=eps)]
    pairs = [list(zip(*pair, strict=True)) for pair in zip(groups, first, strict=True)]
    scored = [a for r, a in flat(pairs) if r is not None]
    centre, scale = mean(scored), stdev(scored) + batch_eps
    second = [[None if r is None else (a - centre) / scale for r, a in g] for g in pairs]
    return [[0.0 if a is None or silent(g) else a for a in s] for g, s in zip(groups, second, strict=True)]


def moments(ps):
    """The authors' a and b of a Beta with the mean and variance (ddof 1) of ps; None where there is no such thing."""
    if len(ps) < 2 or max(ps) == min(ps):
        return None
    m, v = fmean(ps), variance(ps)
    c = m * (1 - m) / v - 1
    return c * m, c * (1 - m)


def ref_beta(groups, history=(), low=0.0, high=1.0, cap=1e6):
    unit = [[None if r is None else (r - low) / (high - low) for r in g] for g in groups]
    ps = [(p - low) / (high - low) for p in history] + [fmean(active(g)) for g in unit if active(g)]
    a, b = moments(ps) or (0.0, 0.0)
    shape = max(1 + a / 3, 1), max(1 + b / 3, 1)
    return fill(
        unit, lambda g, r: (r - mean(active(g))) * min(1 / beta_distribution.pdf(mean(active(g)), *shape), cap)
    )


def ref_bernoulli(groups, eps=1e-4):
    ps = [fmean(active(g)) for g in groups if active(g)]
    a, b = moments(ps) or (1.0, 1.0)
    a, b = (a, b) if min(a, b) > 0 else (1.0, 1.0)

    def value(g, r):
        mu = (a + sum(active(g))) / (a + b + len(active(g)))
        return (r - mu) / math.sqrt(mu * (1 - mu) + eps)

    return fill(groups, value)


def pass_rate(rewards, k):
    """Share of the subsets of k completions that hold a success."""
    subsets = list(itertools.combinations(rewards, k))
    return sum(max(s) for s in subsets) / len(subsets)


def ref_pass_at_k(groups, k=2):
    def value(group, index):
        rewards = active(group)
        others = rewards[:index] + rewards[index + 1 :]
        return len(rewards) * (pass_rate(rewards, k) - pass_rate(others, k)) if len(others) >= k else 0.0

    out = []
    for g in groups:
        values = iter([] if silent(g) else [value(g, i) for i in range(len(active(g)))])
        out.append([0.0 if r is None or silent(g) else next(values) for r in g])
    return out


REFERENCES = {
    "group": ref_group,
    "none": ref_none,
    "batch": ref_batch,
    "loo": ref_loo,
    "reinforce_pp": ref_reinforce_pp,
    "reinforce_pp_baseline": ref_reinforce_pp_baseline,
    "maxrl": ref_maxrl,
    "minimind": ref_minimind,
    "beta": ref_beta,
    "bernoulli": ref_bernoulli,
    "pass_at_k": ref_pass_at_k,
    "turn_return": lambda groups, gamma=1.0, **options: ref_group(groups, **options),
    "gigpo": lambda groups, step_weight=1.0, **options: [
        [(1 + step_weight) * a for a in row] for row in ref_group(groups, **options)
    ],
}
"""The last two for completions of one turn; `test_turn_advantages` has the others."""
MIXED = [
    [0.1, 0.7, 0.4, 1.0],
    [0.0, 0.0, 0.3, None],
    [0.5, 0.5, 0.5, 0.5],
    [None, 0.2, None, 0.9],
    [None, 0.8, None, None],
]
BINARY = [[1, 0, 0, 1], [0, 0, 1, None], [1, 1, 1, 1], [None, 0, None, 1], [None, 1, None, None], [1, 1, 1, 0]]
CASES = [
    ("group", {}, MIXED),
    ("group", {"ddof": 0, "eps": 0.02}, MIXED),
    ("none", {}, MIXED),
    ("batch", {}, MIXED),
    ("batch", {"ddof": 0, "eps": 0.02}, MIXED),
    ("loo", {}, MIXED),
    ("reinforce_pp", {}, MIXED),
    ("reinforce_pp", {"ddof": 1}, MIXED),
    ("reinforce_pp_baseline", {}, MIXED),
    ("reinforce_pp_baseline", {"ddof": 1}, MIXED),
    ("maxrl", {}, MIXED),
    ("maxrl", {"eps": 0.02}, MIXED),
    ("minimind", {}, MIXED),
    ("minimind", {"clamp": 0.8, "eps": 0.02, "batch_eps": 0.3}, MIXED),
    ("beta", {}, MIXED),
    ("bernoulli", {}, MIXED),
    ("bernoulli", {"eps": 0.02}, BINARY),
    ("turn_return", {"gamma": 0.5, "eps": 0.02}, MIXED),
    ("gigpo", {"step_weight": 0.5}, MIXED),
    ("pass_at_k", {}, BINARY),
    ("pass_at_k", {"k": 1}, BINARY),
    ("pass_at_k", {"k": 3}, [[1, 0, 0, 1, 0], [0, 0, 1, None, 0], [None, 0, None, 1, 1], [0, 1, 0, 0, 0]]),
]


def test_every_estimator_has_a_reference_here():
    """But for those that see tokens, in `test_token_advantages`."""
    modules = {name: estimators[name].__module__ for name in estimators}
    of_rewards = [name for name, its in modules.items() if not its.endswith("token_advantages")]
    assert {name for name in of_rewards if modules[name].startswith("grpo_ext")} == set(REFERENCES)
    assert {case[0] for case in CASES} == set(REFERENCES)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("name", "options", "groups"), CASES)
def test_estimator_equals_its_definition(name, options, groups, dtype, tolerance):
    out = advantages(name, tensor(groups, dtype), **options)
    assert out.dtype == dtype
    expected = tensor(REFERENCES[name](groups, **options), dtype)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def batches(values):
    """Some groups of as many rewards each, any of them missing."""
    group = st.integers(2, 5).map(lambda g: st.lists(st.one_of(st.none(), values, values), min_size=g, max_size=g))
    return group.flatmap(lambda g: st.lists(g, min_size=1, max_size=4))


EIGHTHS = st.integers(0, 8).map(lambda n: n / 8)  # ties happen, and equal numbers have equal sums
BITS = st.integers(0, 1).map(float)


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", REFERENCES)
@QUICK
@given(data=st.data())
def test_estimator_equals_its_definition_for_random_rewards(name, data):
    groups = data.draw(batches(BITS if name == "pass_at_k" else EIGHTHS))
    expected = tensor([[0.0] * len(g) for g in groups])
    if not all(silent(g) for g in groups) or not estimators.traits(name).group_baseline:
        expected = tensor(REFERENCES[name](groups))
    torch.testing.assert_close(advantages(name, tensor(groups)), expected, rtol=1e-9, atol=1e-9)


# By hand


def test_rewards_of_a_group_without_signal_do_not_change_the_others():
    """In float32 the mean of seven times 1000000.1 is off by more than a reward."""
    signal = [1.0, 0, 1, 1, 0, 0, 0]
    far, near = (torch.tensor([[level] * 7, signal]) for level in (1e6 + 0.1, 0.0))
    for name in ("minimind", "reinforce_pp_baseline"):
        torch.testing.assert_close(advantages(name, far)[1], advantages(name, near)[1], rtol=1e-5, atol=0)


# REINFORCE++


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_does_not_whiten_rounding(name):
    assert advantages(name, tensor([[0.3, 0.1 + 0.2], [0.3, 0.3]])).abs().max() < 1e-11
    assert advantages(name, tensor([[0.0, 1e-30]], torch.float32)).isfinite().all()
    assert advantages(name, tensor([[0, 1]]), floor=2.0)[0].tolist() == [-0.25, 0.25]
    assert advantages(name, tensor([[0.7] * 3] * 3)).eq(0).all()  # whose mean is not .7


def ref_returns(rewards, mask, kl, beta):
    """Return of each active token, backwards as the recursion goes; None where the completion has no reward."""
    out = []
    for r, active_tokens, k in zip(rewards, mask, kl, strict=True):
        running, row = r, []
        for m, x in reversed(list(zip(active_tokens, k, strict=True))):
            if r is not None and m:
                running -= beta * x
            row.append(running if m and r is not None else None)
        out.append(row[::-1])
    return out


@QUICK
@given(data=st.data())
def test_reinforce_pp_whitens_the_returns_of_active_tokens(data):
    """Against the recursion R_t = -beta KL_t + R_(t+1), with holes of tools and completions nobody scored."""
    groups, size, time, beta = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4)), 4, 0.3
    count = groups * size
    rewards = data.draw(st.lists(st.one_of(st.none(), EIGHTHS), min_size=count, max_size=count))
    mask = data.draw(
        st.lists(st.lists(st.integers(0, 1), min_size=time, max_size=time), min_size=count, max_size=count)
    )
    numbers = st.floats(-2, 2).map(lambda x: round(x, 3))
    kl = data.draw(st.lists(st.lists(numbers, min_size=time, max_size=time), min_size=count, max_size=count))
    returns = ref_returns(rewards, mask, kl, beta)
    counted = [x for row in returns for x in row if x is not None]
    expected = [[0.0] * time for _ in range(count)]
    if len(set(counted)) > 1:
        centre, scale = fmean(counted), max(pstdev(counted), 1e-4)
        expected = [[0.0 if x is None else (x - centre) / scale for x in row] for row in returns]
    active_mask = torch.tensor(mask).view(groups, size, time)
    out = advantages(
        "reinforce_pp",
        tensor(rewards).view(groups, size),
        mask=active_mask,
        kl_rewards=-beta * tensor(kl).view(groups, size, time) * active_mask,
    )
    torch.testing.assert_close(out.view(count, time), tensor(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_reinforce_pp_counts_a_completion_on_each_of_its_active_tokens(name, ddof):
    mask = torch.tensor([[[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 1]]]).repeat(len(MIXED), 1, 1)
    mask[1, 0] = 0
    out = advantages(name, tensor(MIXED), mask=mask, ddof=ddof)
    expected = REFERENCES[name](MIXED, tokens=mask.sum(-1).tolist(), ddof=ddof)
    torch.testing.assert_close(out, tensor(expected), rtol=1e-10, atol=1e-12)
    assert (out - advantages(name, tensor(MIXED), ddof=ddof)).abs().max() > 0.01
    assert advantages(name, tensor(MIXED), mask=0 * mask).eq(0).all()  # all of them truncated and masked


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_gradient_of_pass_at_k(k):
    """E[(1/G) sum_i A_i d log pi(r_i) / dp], over all outcomes, is d/dp (1 - (1 - p)^k) = k (1 - p)^(k - 1)."""
    p, n, total = 0.3, 5, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        probability = math.prod(p if r else 1 - p for r in outcome)
        scores = tensor([1 / p if r else -1 / (1 - p) for r in outcome])
        total += probability * (advantages("pass_at_k", tensor([outcome]), k=k)[0] * scores).mean().item()
    assert total == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-9)


# BNPO


def logged(groups, **kwargs):
    metrics = {}
    out = advantages("beta", tensor(groups), log_metric=metrics.__setitem__, **kwargs)
    prefix = "advantages/beta_"
    return out, [metrics[prefix + name] for name in ("alpha", "beta", "degenerate")]


def test_bnpo_with_alpha_beta_1_is_reinforce_with_a_mean_baseline():
    groups = [[0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]  # m (1 - m) < v: the moments fall below 1
    out, (a, b, degenerate) = logged(groups)
    assert (a, b, degenerate) == (1.0, 1.0, 0.0)
    torch.testing.assert_close(out, advantages("none", tensor(groups)), rtol=1e-12, atol=1e-15)


def test_bnpo_with_alpha_beta_3_2_is_pi_8_grpo_with_the_population_std():
    groups = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]  # p = 1/4, 1/2, 3/4: v = 1/16, c = 3, a = b = 3/2
    out, (a, b, degenerate) = logged(groups)
    assert (a, b, degenerate) == pytest.approx((1.5, 1.5, 0.0), rel=1e-12)
    grpo = advantages("group", tensor(groups), ddof=0, eps=0.0)
    torch.testing.assert_close(out, math.pi / 8 * grpo, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 0], [0, 0]],
        [[1, 1], [1, 1]],
        [[0, 1], [1, 0]],  # equal p: no variance
        [[0, 1]],
        [[0, 1], [None, None]],  # one prompt that can be scored
        [[None, None]],
    ],
)
def test_bnpo_logs_a_degenerate_fit_and_uses_alpha_beta_1(groups):
    out, (a, b, degenerate) = logged(groups)
    assert (a, b, degenerate) == (1.0, 1.0, 1.0)
    torch.testing.assert_close(out, advantages("none", tensor(groups)), rtol=0, atol=1e-15)


def test_bnpo_caps_the_factor():
    crowd = [[0.5, 0.5]] * 60 + [[0.49, 0.51]]
    outlier = [[0.9, 0.94]]  # in the far tail of a narrow Beta
    out, (a, _, _) = logged(crowd + outlier)
    assert 1 / beta_distribution.pdf(0.92, a, a) > 1e6
    assert out[-1].tolist() == pytest.approx([-0.02e6, 0.02e6], rel=1e-9)
    out, _ = logged(crowd + outlier, cap=7.0)
    assert out[-1].tolist() == pytest.approx([-0.14, 0.14], rel=1e-9)


def test_bnpo_maps_rewards_to_the_unit_interval_first():
    groups = [[-1.0, 2.0, 0.5, 2.0], [3.0, -1.0, 0.0, 1.0], [0.5, 0.6, -0.7, 3.0]]
    out = advantages("beta", tensor(groups), reward_range=[-1.0, 3.0])
    torch.testing.assert_close(out, tensor(ref_beta(groups, low=-1.0, high=3.0)), rtol=1e-10, atol=1e-10)
    unit = advantages("beta", (tensor(groups) + 1) / 4)
    torch.testing.assert_close(out, unit, rtol=1e-12, atol=1e-12)


def test_bnpo_fits_the_window_but_keeps_each_groups_own_baseline():
    groups, history = [[1, 0, 0, 0], [1, 1, 0, 0]], [0.75, math.nan, 0.5, 1.0]
    out, (a, b, _) = logged(groups, history=tensor(history))
    known = [p for p in history if not math.isnan(p)]
    torch.testing.assert_close(out, tensor(ref_beta(groups, known)), rtol=1e-10, atol=1e-10)
    expected = moments([*known, 0.25, 0.5])
    assert (a, b) == pytest.approx([1 + x / 3 for x in expected], rel=1e-12)
    alone, _ = logged(groups)
    assert (alone - out).abs().max() > 0.01
    half, _ = logged([[0.5, 0, 0, 0], [0.5, 0.5, 0, 0]], history=tensor(history) / 2, reward_range=[0.0, 0.5])
    torch.testing.assert_close(half, out, rtol=1e-12, atol=1e-12)


def test_bnpo_at_a_mean_that_rounds_to_1_is_finite():
    almost = 1 - 2**-53
    groups = [[1.0, 1.0, 1.0, almost], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    out, (a, b, _) = logged(groups)
    assert (a, b) == (1.0, 1.0)
    assert group_means(tensor(groups))[0].item() == 1.0
    assert out.isfinite().all()


def test_bernoulli_differs_from_bnpo_by_prior_and_posterior():
    """mu = (a + sum r) / (a + b + G) with the Beta of the batch's p: here a = b = 3/2."""
    groups = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    metrics = {}
    out = advantages("bernoulli", tensor(groups), None, metrics.__setitem__, eps=0.0)
    mu = (1.5 + 1) / (3 + 4)
    assert metrics == pytest.approx({"advantages/bernoulli_alpha": 1.5, "advantages/bernoulli_beta": 1.5})
    assert out[0, 0].item() == pytest.approx((1 - mu) / math.sqrt(mu * (1 - mu)), rel=1e-12)
    assert out[1].tolist() == pytest.approx([1, 1, -1, -1], rel=1e-12)
    past = advantages("bernoulli", tensor(groups[:1]), tensor([0.5, 0.75]), eps=0.0)
    torch.testing.assert_close(past, out[:1], rtol=1e-12, atol=0)
    wide = advantages("bernoulli", 2 * tensor(groups) - 1, reward_range=[-1.0, 1.0], eps=0.0)
    torch.testing.assert_close(wide, out, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "rewards", "options", "message"),
    [
        ("maxrl", [[0, 1.5]], {}, r"advantage_estimator=maxrl: a reward of 1\.5 lies outside \[0, 1\].*Rescale"),
        ("maxrl", [[-0.5, 1]], {}, r"a reward of -0\.5 lies outside"),
        ("beta", [[0, 1.5]], {}, r"advantage_estimator=beta: a reward of 1\.5.*reward_range is \[0\.0, 1\.0\]"),
        ("bernoulli", [[0, 3]], {"reward_range": [0.0, 2.0]}, r"a reward of 1\.5 .*reward_range is \[0\.0, 2\.0\]"),
        ("pass_at_k", [[0, 0.5]], {}, r"advantage_estimator=pass_at_k: a reward of 0\.5 is neither 0 nor 1"),
    ],
)
def test_rewards_an_estimator_is_not_defined_for_are_refused(name, rewards, options, message):
    with pytest.raises(ValueError, match=message):
        advantages(name, tensor(rewards), **options)


def in_float32(weights):
    return torch.tensor(weights).double()


@pytest.mark.parametrize("weights", [[0.2, 0.8], [0.15, 0.85], [0.2, 0.2, 0.6], [1 / 3] * 3])
@pytest.mark.parametrize("name", ["maxrl", "beta", "bernoulli", "pass_at_k"])
def test_a_sum_that_rounding_puts_beyond_1_counts_as_1(name, weights):
    rewards = tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    sums = weighted_total(rewards[..., None].expand(-1, -1, len(weights)), in_float32(weights), missing="zero")
    found = advantages(name, sums)
    torch.testing.assert_close(found, advantages(name, rewards), rtol=1e-6, atol=1e-6)


def test_a_reward_at_the_end_of_its_range_in_float32():
    rewards = torch.tensor([[1.1, 0.0, 0.0], [1.1, 1.1, 0.0]])
    found = advantages("beta", rewards.double(), reward_range=[0.0, 1.1])
    torch.testing.assert_close(found, advantages("beta", (rewards > 0).double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("missing", ["zero", "renormalize"])
def test_totals_that_differ_by_rounding_are_equal(missing):
    rewards, weights = tensor([[[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]] * 2]), in_float32([0.1, 0.2, 0.3])
    total = weighted_total(rewards, weights, missing=missing)
    assert len(set((rewards * weights).sum(-1).flatten().tolist())) == 2
    assert zero_variance(total).all()
    assert (
        combinations["sum_then_normalize"](rewards, weights, lambda r, _: advantages("minimind", r), missing=missing)
        .eq(0)
        .all()
    )
    apart = weighted_total(tensor([[[1.0], [1.0 + 3e-6]]]), tensor([1.0]), missing=missing)
    assert apart[0].tolist() == [1.0, 1.0 + 3e-6]


def test_ddof_above_the_number_of_rewards_gives_zero():
    rewards = tensor([[1.0, 0.0, None, None], [1.0, 0.0, 0.5, None]])
    assert advantages("group", rewards, ddof=2)[0].tolist() == [0.0] * 4
    assert advantages("group", rewards, ddof=3).eq(0).all()


def test_average_advantages_without_a_weight_is_0():
    rewards = tensor([[[1.0], [0.0]]])
    assert combinations["average_advantages"](rewards, tensor([0.0]), lambda r, _: advantages("none", r)).eq(0).all()


def test_zero_variance_and_group_means():
    groups = tensor([[0.1, 0.1, None], [0.1, 0.2, None], [None, 3, None], [None, None, None]])
    assert zero_variance(groups).tolist() == [True, False, True, True]
    means = group_means(groups)
    assert means[:3].tolist() == pytest.approx([0.1, 0.15, 3.0])
    assert means[3].isnan()


# Several reward functions

REWARDS = [  # two groups of three completions, three functions each
    [[1.0, 0.2, 5.0], [0.0, 0.9, 6.0], [1.0, None, 1.0]],
    [[0.0, 0.4, 2.0], [None, None, None], [1.0, 0.1, None]],
]
WEIGHTS = [1.0, -0.5, 0.25]


def column(k, rewards=REWARDS):
    return [[completion[k] for completion in group] for group in rewards]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("renormalize", [[2.15, 1.05, 1 + 0.25], [0.3, None, 1 * 1.25 / 1 - 0.05]]),
        ("zero", [[2.15, 1.05, 1.25], [0.3, None, 0.95]]),
    ],
)
def test_weighted_total(missing, expected):
    out = weighted_total(tensor(REWARDS), tensor(WEIGHTS), missing=missing)
    torch.testing.assert_close(out, tensor(expected), rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("missing", ["renormalize", "zero"])
def test_a_missing_penalty_does_not_raise_a_total_above_the_best(missing):
    """Rewards in [0, 1] of weights 1, -.5 and -.25: no total leaves [-.75, 1], whatever is missing."""
    values = [0.0, 0.3, 1.0, None]
    every = tensor([[list(row) for row in itertools.product(values, repeat=3)]])
    total = weighted_total(every, tensor([1.0, -0.5, -0.25]), missing=missing)
    known = total[~total.isnan()]
    assert len(known) == 4**3 - 1
    assert (known.min().item(), known.max().item()) == (pytest.approx(-0.75), pytest.approx(1.0))
    turns = weighted_turns(every[..., None], every, tensor([1.0, -0.5, -0.25]), missing=missing)[..., 0]
    torch.testing.assert_close(turns, total, equal_nan=True)


def test_a_function_of_weight_0_does_not_score():
    out = weighted_total(tensor([[[1.0, 7.0], [None, 7.0]]]), tensor([2.0, 0.0]), missing="renormalize")
    torch.testing.assert_close(out, tensor([[2.0, None]]), rtol=0, atol=0, equal_nan=True)
    out = weighted_total(tensor([[[1.0, 7.0], [None, 7.0]]]), tensor([2.0, 0.0]), missing="zero")
    assert out.tolist() == [[2.0, 0.0]]


def estimator(rewards, k):
    return advantages("group", rewards, ddof=0, eps=0.01)


def combine(name, dtype, rewards=REWARDS, weights=WEIGHTS, **options):
    return combinations[name](tensor(rewards, dtype), tensor(weights, dtype), estimator, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("missing", ["renormalize", "zero"])
def test_sum_then_normalize(missing, dtype, tolerance):
    total = weighted_total(tensor(REWARDS), tensor(WEIGHTS), missing=missing).tolist()
    total = [[None if math.isnan(r) else r for r in g] for g in total]
    out = combine("sum_then_normalize", dtype, missing=missing)
    torch.testing.assert_close(out, tensor(ref_group(total, 0, 0.01), dtype), rtol=tolerance, atol=tolerance)


def weighted_advantages():
    """sum_k w_k A_k, None where no function scored the completion."""
    columns = [ref_group(column(k), 0, 0.01) for k in range(3)]
    return [
        [
            None if all(r is None for r in REWARDS[i][j]) else sum(WEIGHTS[k] * columns[k][i][j] for k in range(3))
            for j in range(3)
        ]
        for i in range(2)
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_group_trains_for_pass_at_k_if_k_are_wrong_and_one_is_right(k):
    outcomes = list(itertools.product((0.0, 1.0), repeat=5))
    trains = [advantages("pass_at_k", tensor([outcome]), k=k).abs().max().item() > 0 for outcome in outcomes]
    assert trains == [1 <= sum(outcome) <= 5 - k for outcome in outcomes]
    assert share_of_groups(5, k, 0.5) == pytest.approx(sum(trains) / 32)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_normalize_then_sum_equals_gdpo(dtype, tolerance):
    sums = weighted_advantages()
    centre, scale = mean(active(flat(sums))), stdev(active(flat(sums)))
    for eps in (1e-4, 0.3):
        expected = [[0.0 if a is None else (a - centre) / (scale + eps) for a in g] for g in sums]
        out = combine("normalize_then_sum", dtype, eps=eps)
        torch.testing.assert_close(out, tensor(expected, dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_average_advantages_equals_its_definition(dtype, tolerance):
    expected = [[0.0 if a is None else a / 1.75 for a in g] for g in weighted_advantages()]
    out = combine("average_advantages", dtype)
    torch.testing.assert_close(out, tensor(expected, dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_gdpo_does_not_scale_rounding_up_and_ignores_the_scale_of_weights(scale):
    noise = [[[0.0, 0.3], [1e-7, 0.3]], [[0.1, 0.2], [0.1, 0.2]]]
    group = estimators["group"]
    out = combinations["normalize_then_sum"](tensor(noise), tensor([scale, scale]), lambda r, k: group(r))
    assert 0 < out.abs().max() < 1e-3 * scale
    signal = [[[0.5, 0.3], [0.9, 0.3]], [[0.1, 0.2], [0.1, 0.2]]]
    out = combinations["normalize_then_sum"](tensor(signal), tensor([scale, scale]), lambda r, k: group(r), eps=0.0)
    assert out.flatten().tolist() == pytest.approx([-(1.5**0.5), 1.5**0.5, 0, 0], rel=1e-12)
    watched = [[[0.0, 0.3], [1e-7, 0.9]], [[0.1, 0.2], [0.1, 0.2]]]  # the spread is in a function of weight 0
    out = combinations["normalize_then_sum"](tensor(watched), tensor([scale, 0.0]), lambda r, k: group(r))
    assert 0 < out.abs().max() < 1e-3 * scale


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("signal", [False, True])
def test_gdpo_has_no_advantage_where_rewards_cancel(spread, eps, signal):
    """They cancel but for the rounding of 1 - r to float32, which the division by their std enlarges."""
    rewards = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    rewards = 0.5 + spread * (rewards - 0.5)
    columns = torch.stack([rewards, 1 - rewards, torch.full_like(rewards, 0.2)], dim=-1)
    if signal:  # in another group
        columns[2, :, 1] = columns[2, :, 0]
    for dtype in (torch.float32, torch.float64):
        out = combinations["normalize_then_sum"](
            columns.to(dtype), torch.ones(3, dtype=dtype), lambda r, k: estimate("group", r, eps=eps), eps=eps
        )
        assert out[:2].abs().max() == 0
        assert (out[2].abs().max().item() > 1) is signal


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("level", [0.3, 1000.0])
def test_gdpo_keeps_the_signal_of_one_reward_beside_the_rounding_of_another(level, eps):
    rounding = torch.tensor([level, level]).nextafter(torch.tensor([level, 2 * level])).repeat(4)
    signal = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    columns = torch.stack([torch.stack([rounding, torch.arange(8.0)]), torch.stack([signal, signal])], dim=-1)
    out = combinations["normalize_then_sum"](
        columns.double(), torch.ones(2).double(), lambda r, k: estimate("group", r, eps=eps), eps=eps
    )
    assert out[0][signal > 0].min() > 0.5 > -0.5 > out[0][signal == 0].max()


def test_gdpo_keeps_a_small_difference_between_opposite_rewards():
    columns = torch.tensor([[[0.5, 0.5], [0.6, 0.4], [0.7, 0.3 + 1e-4]]]).double()
    out = combinations["normalize_then_sum"](columns, torch.ones(2).double(), lambda r, k: estimators["group"](r))
    assert out.unique().numel() == 3
