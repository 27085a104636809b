"""Surrogates token by token: values and gradients worked out by hand, with unequal options."""

import math

import pytest
import torch

from grpo_ext.objective.losses import losses
from grpo_ext.objective.options import bind
from grpo_ext.objective.surrogates import cispo_metrics, clip_conflict, surrogates, vespo_metrics, vespo_weight

DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
e = math.e


def run(
    name, log_ratio, advantage, *, logps=None, dtype=torch.float64, at="token", sampler=None, mask=None, **options
):
    """Loss per token and the gradient of its sum in l, for one completion with these token log-ratios."""
    row = torch.tensor([log_ratio], dtype=dtype)
    start = torch.tensor([logps], dtype=dtype) if logps else torch.full_like(row, -1.5)
    leaf, old = start.clone().requires_grad_(), start - row
    level = leaf - old if at == "token" else (leaf - old).sum(-1, keepdim=True)
    offered = {
        "log_ratio": level,
        "advantages": torch.tensor([[advantage]], dtype=dtype),
        "per_token_logps": leaf,
        "old_per_token_logps": old,
        "mask": torch.tensor([mask or [1] * len(log_ratio)]),
        "importance_sampling_ratio": None if sampler is None else torch.tensor([sampler], dtype=dtype),
    }
    out = bind(surrogates[name], offered)(**options)
    out.sum().backward()
    assert out.dtype == dtype
    return out.detach()[0].tolist(), leaf.grad[0].tolist()


REGIONS = {row.surrogate: regions for row in losses.values() if (regions := row.whole().clip_regions)}


def regions(name, log_ratio, advantage, logps=-1.5, **options):
    ratio = torch.tensor([log_ratio], dtype=torch.float64)
    offered = {
        "log_ratio": ratio,
        "advantages": torch.full((1, 1), advantage, dtype=torch.float64),
        "per_token_logps": torch.full_like(ratio, logps),
        "old_per_token_logps": logps - ratio,
    }
    low, high = bind(REGIONS[name], offered)(**options)
    return low[0].tolist(), high[0].tolist()


# clip


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -1.3 * 2, 0.0),  # above, A > 0: cut
        (1.0, -2.0, e * 2, e * 2),  # above, A < 0: alive
        (-1.0, 2.0, -2 / e, -2 / e),  # below, A > 0: alive
        (-1.0, -2.0, 0.9 * 2, 0.0),  # below, A < 0: cut
        (0.05, 2.0, -2 * math.exp(0.05), -2 * math.exp(0.05)),
        (-0.05, -2.0, 2 * math.exp(-0.05), 2 * math.exp(-0.05)),
        (1.0, 0.0, 0.0, 0.0),
        (-1.0, 0.0, 0.0, 0.0),
    ],
)
def test_clip_at_its_four_corners(log_ratio, advantage, loss, gradient, dtype, tolerance):
    out, grad = run("clip", [log_ratio], advantage, dtype=dtype, epsilon_low=0.1, epsilon_high=0.3)
    assert out == pytest.approx([loss], rel=tolerance)
    assert grad == pytest.approx([gradient], rel=tolerance)


@pytest.mark.parametrize("advantage", [1.7, -1.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("log_ratio", [0.25, -0.25, 0.5, -0.5, 0.0])
def test_a_ratio_exactly_on_a_clip_bound_has_a_gradient(log_ratio, advantage, dtype):
    ratio = torch.tensor(log_ratio, dtype=dtype).exp().item()
    options = {"epsilon_low": 1 - ratio} if ratio < 1 else {"epsilon_high": ratio - 1}
    border = 1 - options["epsilon_low"] if ratio < 1 else 1 + options["epsilon_high"]
    assert border == ratio  # subtraction near 1 is exact
    out, grad = run("clip", [log_ratio], advantage, dtype=dtype, **options)
    assert grad == out == pytest.approx([-ratio * advantage], rel=1e-7)


def test_a_ratio_just_beyond_a_clip_bound_has_no_gradient():
    _, grad = run("clip", [0.25 + 1e-9], 1.0, epsilon_high=math.exp(0.25) - 1)
    assert grad == [0.0]
    _, grad = run("clip", [-0.25 - 1e-9], -1.0, epsilon_low=1 - math.exp(-0.25))
    assert grad == [0.0]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (1.0, -2.0, 1.5 * 2, 0.0),  # above delta, A < 0: capped
        (math.log(1.4), -2.0, 2.8, 2.8),  # between 1 + epsilon_high and delta, A < 0: alive
        (math.log(1.2), 2.0, -2.4, -2.4),
        (1.0, 2.0, -2.6, 0.0),  # A > 0: the clip, as without delta
        (-1.0, -2.0, 1.8, 0.0),
    ],
)
def test_delta_caps_negative_advantages_only(log_ratio, advantage, loss, gradient):
    out, grad = run("clip", [log_ratio], advantage, epsilon_low=0.1, epsilon_high=0.3, delta=1.5)
    assert out == pytest.approx([loss], rel=1e-12)
    assert grad == pytest.approx([gradient], rel=1e-12)


def test_a_ratio_exactly_at_delta_has_a_gradient():
    delta = torch.tensor(1.0, dtype=torch.float64).exp().item()
    _, grad = run("clip", [1.0], -2.0, delta=delta)
    assert grad == pytest.approx([2 * e], rel=1e-12)


# The others: options unequal, tokens on both sides of every threshold


def phi(log_s, k, lam):
    return math.exp(lam) * math.exp(log_s) ** k * math.exp(-lam * math.exp(log_s))


RATIOS = [-1.0, -0.05, 0.0, 0.4, 2.0]
r = [math.exp(x) for x in RATIOS]


def near(values):
    return pytest.approx(values, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(("advantage", "k", "lam"), [(1.7, 2, 3), (0.0, 2, 3), (-0.6, 3, 2)])
def test_vespo_defaults_and_its_value_of_1_on_policy(advantage, k, lam):
    def weight(x):
        log_ratio, a = (torch.tensor([y], dtype=torch.float64) for y in (x, [advantage]))
        return vespo_weight(log_ratio, a, torch.ones(1, len(x)))

    assert weight([0.1, 0.2]).item() == pytest.approx(phi(0.3, k, lam), rel=1e-12)
    assert weight([0.0, 0.0]).item() == 1.0


@pytest.mark.parametrize(
    ("log_ratio", "log_s"),
    [
        ([-20.0, -20.0], math.log(1e-8)),  # from below
        ([-20.0, 3.0], -17.0),
        ([20.0, -18.0], 2.0),
    ],
)
def test_vespo_keeps_the_sum_of_log_ratios_in_its_range(log_ratio, log_s):
    x = torch.tensor([log_ratio], dtype=torch.float64)
    weight = vespo_weight(x, torch.ones(1, 1).double(), torch.ones(1, 2), k_pos=0.5, lambda_pos=0.5)
    assert weight.item() == pytest.approx(phi(log_s, 0.5, 0.5), rel=1e-12)


def test_vespo_is_0_not_nan_for_an_enormous_ratio():
    x = torch.full((1, 4), 20.0)
    assert vespo_weight(x, torch.ones(1, 1), torch.ones(1, 4)).item() == 0.0


@pytest.mark.parametrize("sampler", [[0.8, 1.1, 1.0], [0.88]])
def test_vespo_takes_the_samplers_correction_into_the_ratio(sampler):
    weight = phi(0.1 - 0.2 + 0.3 + math.log(0.88), 2, 3)
    _, grad = run("vespo", [0.1, -0.2, 0.3], 1.0, sampler=sampler)
    assert grad == near([-weight] * 3)


@pytest.mark.parametrize(
    ("advantage", "p", "p_old", "dropped"),
    [
        (2.0, 0.70, 0.39, True),  # up by .31 > .3
        (2.0, 0.69, 0.40, False),
        (2.0, 0.10, 0.90, False),  # against A: never dropped
        (-2.0, 0.39, 0.50, True),  # down by .11 > .1
        (-2.0, 0.41, 0.50, False),
        (-2.0, 0.90, 0.10, False),
        (2.0, 1e-3, 1e-5, False),  # a ratio of 100, but no shift of probability
    ],
)
def test_dppo_drops_by_the_shift_of_probability(advantage, p, p_old, dropped):
    options = {"epsilon_low": 0.1, "epsilon_high": 0.3}
    out, grad = run("dppo", [math.log(p / p_old)], advantage, logps=[math.log(p)], **options)
    expected = 0.0 if dropped else -p / p_old * advantage
    assert out == grad == near([expected])


@pytest.mark.parametrize(
    ("advantage", "p", "p_old", "dropped"),
    [
        (2.0, 0.9, 0.7, True),  # KL .7 log(7/9) + .3 log 3 = .154 > .1
        (2.0, 0.8, 0.7, False),  # .028
        (2.0, 0.1, 0.9, False),  # against A: never dropped
        (-2.0, 0.6, 0.7, True),  # .7 log(7/6) + .3 log(3/4) = .0216 > .02
        (-2.0, 0.65, 0.7, False),  # .0056
        (2.0, 1e-3, 1e-5, False),  # a ratio of 100, but .001
    ],
)
def test_dppo_drops_by_the_kl_of_drawing_the_token_or_not(advantage, p, p_old, dropped):
    options = {"epsilon_low": 0.02, "epsilon_high": 0.1, "divergence": "kl"}
    out, grad = run("dppo", [math.log(p / p_old)], advantage, logps=[math.log(p)], **options)
    assert out == grad == near([0.0 if dropped else -p / p_old * advantage])


@pytest.mark.parametrize("advantage", [1.7, -0.6, 0.0])
def test_the_gradient_of_dro_is_that_of_its_squared_error(advantage):
    """(A - tau log S)^2 / (2 tau), differentiated by a complex step, which has no rounding error."""
    tau, logps = 0.3, [-0.5, -1.2, -2.0]
    log_ratio = [0.4, -0.1, 0.8]
    _, grad = run("dro", log_ratio, advantage, logps=logps, tau=tau)
    step = 1e-30
    error = (advantage - tau * complex(sum(log_ratio), step)) ** 2 / (2 * tau)
    assert grad == near([error.imag / step] * 3)


@pytest.mark.parametrize("advantage", [1.7, -0.6, 0.0])
def test_p3o_is_a_policy_gradient_where_ratios_are_equal_and_a_pull_where_one_dominates(advantage):
    _, grad = run("p3o", [0.4, 0.4, 0.4], advantage)
    assert grad == near([-advantage] * 3)  # a ratio above 1 is cut to 1
    _, grad = run("p3o", [-0.4, -0.4], advantage)
    assert grad == near([-advantage * math.exp(-0.4)] * 2)
    ratios = [0.0, 0.0, 0.0, 6.0]
    e = (3 + math.exp(6)) ** 2 / (4 * (3 + math.exp(12)))
    _, grad = run("p3o", ratios, advantage)
    assert e < 0.26
    assert grad == near([-e * advantage] * 3 + [-e * advantage + (1 - e) * (1 - math.exp(-6))])


# Clip regions: what the metrics count


@pytest.mark.parametrize(
    ("name", "advantage", "options", "low", "high"),
    [
        ("clip", 1.0, {"epsilon_low": 0.01, "epsilon_high": 0.6}, [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
        ("clip", -1.0, {"epsilon_low": 0.01, "epsilon_high": 0.6}, [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]),
        ("clip", 0.0, {}, [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
        ("gmpo", 1.0, {"epsilon_low": 0.5, "epsilon_high": 0.3}, [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]),
        ("gmpo", -1.0, {"epsilon_low": 0.04, "epsilon_high": 0.3}, [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]),
        # pi = e^-1.5 = .223 after, pi_old = pi / r: shifts -.384, -.011, 0, .074, .193
        ("dppo", 1.0, {"epsilon_low": 0.01, "epsilon_high": 0.1}, [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
        ("dppo", -1.0, {"epsilon_low": 0.01, "epsilon_high": 0.1}, [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]),
        ("clip_cov", 1.0, {"epsilon_low": 0.01, "epsilon_high": 0.6}, [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
        ("clip_cov", -1.0, {"epsilon_low": 0.01, "epsilon_high": 0.6}, [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_clip_regions(name, advantage, options, low, high):
    assert regions(name, RATIOS, advantage, **options) == (list(map(bool, low)), list(map(bool, high)))


@pytest.mark.parametrize(("delta", "refused"), [(None, False), (1.25, True), (1.28, False), (10.0, False)])
def test_a_cap_below_the_clip_is_refused(delta, refused):
    problem = clip_conflict(epsilon_low=0.2, epsilon_high=0.28, delta=delta)
    assert (problem is not None) is refused
    assert problem is None or "delta=1.25 is below 1 + epsilon_high = 1.28" in problem


@pytest.mark.parametrize(("advantage", "held_back"), [(1.0, [0, 0, 0, 1, 1]), (-1.0, [0] * 5), (0.0, [0] * 5)])
def test_cispo_logs_the_tokens_that_its_cap_limits(advantage, held_back):
    out = cispo_metrics(torch.tensor([RATIOS]), torch.full((1, 1), advantage), epsilon_high=1.4)
    assert {name: values.tolist() for name, values in out.items()} == {"cispo_clip_ratio": [held_back]}


def test_vespo_logs_its_weight():
    x, options = (
        torch.tensor([[0.1, 0.2]]).double(),
        {"k_pos": 2.5, "lambda_pos": 1.5, "k_neg": 0.5, "lambda_neg": 0.8},
    )
    (out,) = vespo_metrics(x, torch.ones(1, 1).double(), torch.ones(1, 2), **options).values()
    assert out.tolist() == [[pytest.approx(phi(0.3, 2.5, 1.5))]]


def test_every_surrogate_has_a_reference_here():
    here = {"clip", "reinforce", "cispo", "sapo", "vespo", "gmpo", "topr", "dppo", "dro", "p3o", "kl_cov", "clip_cov"}
    assert {name for name in surrogates if surrogates[name].__module__.startswith("grpo_ext")} == here
    assert set(REGIONS) == {"clip", "gmpo", "dppo", "clip_cov"}
