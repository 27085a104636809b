"""Every row of the table of losses in plain Python: value and gradient of a batch in which all its branches occur."""

import json
import math
from statistics import mean, pstdev, variance

import pytest
import torch

from grpo_ext.objective.losses import losses
from support.pure import L_MAX, loss_and_gradient, objective, rows

# A, log-probabilities, log-ratios to the sampler; None stands under the mask
COMPLETIONS = [
    (1.3, [-0.5, -1.2, -2.0, -0.1], [0.1, 0.33, -0.5, 0.0]),
    (-0.7, [-0.9, -3.0, None, -1.6], [0.1, 3.0, None, -0.6]),  # a ratio of 20
    (1.1, [-3.0, -1.0], [1.7, 0.5]),  # beyond a cap of 5
    (-0.9, [-0.05], [0.8]),
    (0.8, [-1.0, -0.6, None], [1e-4, 5e-4, None]),  # within GSPO's clip
    (0.8, [None, -1.0, -0.7], [None, 4e-4, 6e-4]),  # beyond GSPO's, within LUSPO's
    (-0.8, [-1.0, -0.5], [-4e-4, -3e-4]),  # the same from below
    (1.2, [-1.0, -0.5], [3e-3, 4e-3]),  # beyond LUSPO's
    (-1.2, [-1.0, -0.5], [-3e-3, -2e-3]),  # the same from below
    (0.6, [-0.4, -0.3, -0.2], [1.2, 1.1, 0.9]),  # S = 24 > 11
    (-0.6, [-1.4, -1.3, -1.2], [-1.0, -1.1, -0.45]),  # pi falls by .42, .55, .17
    (0.0, [-0.4, -1.3], [0.5, -0.5]),
    (1.0, [None, None], [None, None]),
]
LIVE = [
    (a, [p for p in logps if p is not None], [x for x in ratios if x is not None])
    for a, logps, ratios in COMPLETIONS
    if any(p is not None for p in logps)
]
B = len(LIVE)
N = sum(len(logps) for _, logps, _ in LIVE)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def ppo(r, a, low=0.2, high=0.2, delta=math.inf):
    """-min(min(r, delta) A, clip(r) A), and -r A where it is alive."""
    value = -min(min(r, delta) * a, min(max(r, 1 - low), 1 + high) * a)
    dead = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) or (a < 0 and r > delta)
    return value, 0.0 if dead else -r * a


def token_ppo(a, logps, x, **options):
    return [list(z) for z in zip(*(ppo(math.exp(y), a, **options) for y in x), strict=True)]


def sequence_ppo(a, logps, x, **options):
    """The same loss on every token; each token has 1/n of the gradient of the geometric mean, n times over."""
    value, gradient = ppo(math.exp(sum(x) / len(x)), a, **options)
    return [value] * len(x), [gradient] * len(x)


def product_ppo(a, logps, x, **options):
    """The same loss on every token, the whole gradient on every token; n times over."""
    value, gradient = ppo(math.exp(sum(x)), a, **options)
    return [value] * len(x), [gradient * len(x)] * len(x)


def reinforce(a, logps, x):
    return [-a] * len(x), [-a] * len(x)


def weighted_log_likelihood(weight):
    """-w A l with a constant w: the gradient is -w A."""

    def terms(a, logps, x, **options):
        w = weight(a, logps, x, **options)
        return [-v * a * p for v, p in zip(w, logps, strict=True)], [-v * a for v in w]

    return terms


@weighted_log_likelihood
def cispo(a, logps, x, cap=5.0):
    return [min(math.exp(y), cap) for y in x]


@weighted_log_likelihood
def vespo(a, logps, x, k_pos=2, lambda_pos=3, k_neg=3, lambda_neg=2):
    k, lam = (k_pos, lambda_pos) if a >= 0 else (k_neg, lambda_neg)
    s = math.exp(sum(x))
    return [math.exp(lam) * s**k * math.exp(-lam * s)] * len(x)


@weighted_log_likelihood
def topr(a, logps, x):
    return [1.0 if a >= 0 else min(math.exp(sum(x)), 1.0)] * len(x)


def sapo(a, logps, x, pos=1.0, neg=1.05):
    tau = pos if a > 0 else neg
    gates = [sigmoid(tau * (math.exp(y) - 1)) for y in x]
    gradient = [-4 * g * (1 - g) * math.exp(y) * a for g, y in zip(gates, x, strict=True)]
    return [-4 / tau * g * a for g in gates], gradient


def gmpo(a, logps, x, low=0.4, high=0.4):
    cut = [min(y, high) if a > 0 else max(y, -low) for y in x]
    rho = math.exp(sum(cut) / len(x))
    return [-rho * a] * len(x), [-rho * a * (c == y) for c, y in zip(cut, x, strict=True)]


def dppo(a, logps, x, low=0.2, high=0.2):
    shifts = [math.exp(p) - math.exp(p - y) for p, y in zip(logps, x, strict=True)]
    dropped = [(a > 0 and s > high) or (a < 0 and s < -low) for s in shifts]
    out = [0.0 if d else -math.exp(y) * a for d, y in zip(dropped, x, strict=True)]
    return out, out


def dppo_kl(a, logps, x, low=0.05, high=0.05):
    out = []
    for p, y in zip(logps, x, strict=True):
        new, old = math.exp(p), math.exp(p - y)
        kl = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
        dropped = (a > 0 and new > old and kl > high) or (a < 0 and new < old and kl > low)
        out.append(0.0 if dropped else -math.exp(y) * a)
    return out, out


def dro(a, logps, x, tau=1.0):
    total = sum(x)
    return [tau / 2 * total**2 / len(x) - a * p for p in logps], [tau * total - a] * len(x)


def p3o(a, logps, x):
    r = [math.exp(y) for y in x]
    e = sum(r) ** 2 / (len(r) * sum(v * v for v in r))
    value = [(1 - e) * (math.exp(-y) - 1 + y) - min(v, e) * a * p for v, y, p in zip(r, x, logps, strict=True)]
    return value, [(1 - e) * (1 - math.exp(-y)) - min(v, e) * a for v, y in zip(r, x, strict=True)]


MARKED = (-0.5, -3.0, -0.6)
"""Log-probabilities of the tokens that a surrogate of marks treats apart."""


def kl_cov(a, logps, x, coef=1.0):
    signs = [(y > 0) - (y < 0) if p in MARKED else 0 for p, y in zip(logps, x, strict=True)]
    value = [coef * s * y - math.exp(y) * a for s, y in zip(signs, x, strict=True)]
    return value, [coef * s - math.exp(y) * a for s, y in zip(signs, x, strict=True)]


def clip_cov(a, logps, x, low=1.0, high=1.0):
    value, gradient = token_ppo(a, logps, x, low=low, high=high)
    kept = [p not in MARKED for p in logps]
    return [v * k for v, k in zip(value, kept, strict=True)], [g * k for g, k in zip(gradient, kept, strict=True)]


# aggregation -> the weight of each of the n token losses of a completion
WEIGHTS = {
    "sequence mean of token means": lambda n: 1 / (n * B),
    "token mean": lambda n: 1 / N,
    "sequence mean of token sums": lambda n: 1 / B,
    "sequence mean of token sums over L_max": lambda n: 1 / (B * L_MAX),
}
# row -> losses and gradients of a completion's tokens, options, aggregation: the row's paper, read once more
BY_HAND = {
    "grpo": (token_ppo, {"low": 0.2, "high": 0.2}, "sequence mean of token means"),
    "deepseek_v3": (product_ppo, {"low": 10, "high": 10}, "sequence mean of token means"),
    "dr_grpo": (token_ppo, {"low": 0.2, "high": 0.2}, "sequence mean of token sums over L_max"),
    "bnpo": (token_ppo, {"low": 0.2, "high": 0.2}, "token mean"),  # one micro-batch
    "beta_bnpo": (token_ppo, {"low": 0.2, "high": 0.28, "delta": 10}, "sequence mean of token sums"),
    "dapo": (token_ppo, {"low": 0.2, "high": 0.28}, "token mean"),
    "gspo": (sequence_ppo, {"low": 3e-4, "high": 4e-4}, "sequence mean of token means"),
    "cispo": (cispo, {"cap": 5.0}, "token mean"),
    "sapo": (sapo, {}, "sequence mean of token means"),
    "luspo": (sequence_ppo, {"low": 2e-3, "high": 2.5e-3}, "sequence mean of token sums"),
    "vespo": (vespo, {}, "token mean"),
    "minimind": (reinforce, {}, "sequence mean of token means"),
    "minimind_cispo": (cispo, {"cap": 5.0}, "sequence mean of token means"),
    "rloo": (reinforce, {}, "sequence mean of token sums"),
    "reinforce_pp": (token_ppo, {"low": 0.2, "high": 0.2}, "token mean"),
    "reinforce_pp_baseline": (token_ppo, {"low": 0.2, "high": 0.2}, "token mean"),
    "gmpo": (gmpo, {}, "sequence mean of token means"),
    "topr": (topr, {}, "sequence mean of token sums"),
    "dppo": (dppo, {}, "token mean"),
    "maxrl": (token_ppo, {"low": 0.2, "high": 0.2}, "token mean"),
    "dppo_kl": (dppo_kl, {}, "token mean"),
    "dro": (dro, {}, "sequence mean of token sums"),
    "p3o": (p3o, {}, "token mean"),
    "kl_cov": (kl_cov, {}, "token mean"),
    "clip_cov": (clip_cov, {}, "token mean"),
    "gtpo": (reinforce, {}, "sequence mean of token means"),
    "tpo": (reinforce, {}, "sequence mean of token sums"),
}
USUAL = ("k3", "loss", "group", {}, "sum_then_normalize")
# row -> KL estimator, its place, advantage, its options, combination where they are not the usual ones
OTHER_AXES = dict.fromkeys(BY_HAND, USUAL) | {
    "deepseek_v3": ("sequence_k3", *USUAL[1:]),
    "dr_grpo": ("k3", "loss", "none", *USUAL[3:]),
    "beta_bnpo": ("k3", "loss", "beta", {}, "average_advantages"),
    "minimind": ("k3", "loss", "minimind", *USUAL[3:]),
    "minimind_cispo": ("k3", "loss", "group", {"ddof": 0}, "sum_then_normalize"),
    "rloo": ("k1", "reward", "loo", *USUAL[3:]),
    "reinforce_pp": ("k1", "reward", "reinforce_pp", *USUAL[3:]),
    "reinforce_pp_baseline": ("k2", "loss", "reinforce_pp_baseline", *USUAL[3:]),
    "topr": ("k3", "loss", "none", *USUAL[3:]),
    "maxrl": ("k3", "loss", "maxrl", *USUAL[3:]),
    "dro": ("k3", "loss", "none", *USUAL[3:]),
    "gtpo": ("k3", "loss", "gtpo", *USUAL[3:]),
    "tpo": ("k3", "loss", "tpo", *USUAL[3:]),
}
UNEQUAL = {"epsilon": 0.15, "epsilon_high": 0.35}
OVERRIDDEN = [
    ("grpo", UNEQUAL, {"low": 0.15, "high": 0.35}),
    ("grpo", {"epsilon": 0.15}, {"low": 0.15, "high": 0.15}),  # TRL: epsilon_high follows epsilon
    ("grpo", UNEQUAL | {"delta": 1.5}, {"low": 0.15, "high": 0.35, "delta": 1.5}),
    ("dapo", UNEQUAL, {"low": 0.15, "high": 0.35}),
    ("dapo", {"epsilon_high": 0.5}, {"low": 0.2, "high": 0.5}),
    ("sapo", {"sapo_temperature_pos": 1.3, "sapo_temperature_neg": 0.7}, {"pos": 1.3, "neg": 0.7}),
    (
        "vespo",
        {"vespo_k_pos": 2.5, "vespo_lambda_pos": 1.5, "vespo_k_neg": 0.5, "vespo_lambda_neg": 0.8},
        {"k_pos": 2.5, "lambda_pos": 1.5, "k_neg": 0.5, "lambda_neg": 0.8},
    ),
    ("gspo", UNEQUAL, {"low": 0.15, "high": 0.35}),
    ("deepseek_v3", UNEQUAL, {"low": 0.15, "high": 0.35}),
    ("cispo", {"epsilon_high": 1.3}, {"cap": 1.3}),
    ("gmpo", UNEQUAL, {"low": 0.15, "high": 0.35}),
    ("dppo", UNEQUAL, {"low": 0.15, "high": 0.35}),
    ("dppo_kl", {"epsilon": 0.01, "epsilon_high": 0.2}, {"low": 0.01, "high": 0.2}),
    ("dro", {"loss_kwargs": {"tau": 0.3}}, {"tau": 0.3}),
    ("kl_cov", {"loss_kwargs": {"kl_coef": 0.3}}, {"coef": 0.3}),
    ("clip_cov", UNEQUAL, {"low": 0.15, "high": 0.35}),
]


def inputs(dtype, garbage=math.nan):
    """The completions as a batch; the reference is .4, -.2, .1, .3 away from the policy."""

    def padded(values):
        values = [garbage if v is None else v for v in values]
        return values + [garbage] * (4 - len(values))

    logps = torch.tensor([padded(logps) for _, logps, _ in COMPLETIONS], dtype=torch.float64)
    ratios = torch.tensor([padded(x) for _, _, x in COMPLETIONS], dtype=torch.float64)
    out = {
        "per_token_logps": logps,
        "old_per_token_logps": logps - ratios,
        "ref_per_token_logps": logps + torch.tensor([0.4, -0.2, 0.1, 0.3], dtype=torch.float64),
        "advantages": torch.tensor([a for a, _, _ in COMPLETIONS], dtype=torch.float64),
        "marks": torch.isin(logps, torch.tensor(MARKED, dtype=torch.float64)) | logps.isnan(),
    }
    return {name: value.to(dtype) for name, value in out.items()} | {"mask": (~logps.isnan()).long()}


def expected(terms, options, aggregation):
    """Loss, and its gradients at the active tokens."""
    value, gradient = 0.0, []
    for a, logps, x in LIVE:
        weight = WEIGHTS[aggregation](len(x))
        token_values, token_gradients = terms(a, logps, x, **options)
        value += weight * sum(token_values)
        gradient += [weight * g for g in token_gradients]
    return value, gradient


def check(name, settings, options, dtype, tolerance):
    terms, _, aggregation = BY_HAND[name]
    given = inputs(dtype)
    loss, gradient = loss_and_gradient(objective(name, **settings), given)
    active = given["mask"].bool()
    value, at_active = expected(terms, options, aggregation)
    assert loss.dtype == gradient.dtype == dtype
    assert loss.item() == pytest.approx(value, rel=tolerance)
    assert gradient[active].tolist() == pytest.approx(at_active, rel=tolerance, abs=tolerance / 100)
    assert (gradient[~active] == 0).all()


DTYPES = [(torch.float64, 1e-10), (torch.float32, 3e-5)]


def test_every_row_of_the_package_has_a_reference_here():
    rows_of_the_package = {row.paper: name for name, row in losses.items() if isinstance(row.surrogate, str)}
    assert {losses[name].paper for name in BY_HAND} == set(rows_of_the_package)
    assert losses["deepseek_math"] is losses["grpo"]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("name", BY_HAND)
def test_a_row_equals_the_formula_of_its_paper(name, dtype, tolerance):
    check(name, {}, BY_HAND[name][1], dtype, tolerance)


@pytest.mark.parametrize(("name", "settings", "options"), OVERRIDDEN)
def test_a_row_with_clip_bounds_of_the_recipe(name, settings, options):
    check(name, settings, options, torch.float64, 1e-10)


@pytest.mark.parametrize("name", BY_HAND)
def test_kl_advantage_and_combination_of_a_row(name):
    row = losses[name]
    axes = (row.kl, row.kl_placement, row.advantage, dict(row.advantage_kwargs), row.combination)
    assert axes == OTHER_AXES[name]
    assert row.formula
    assert row.ratio in row.levels


# KL in the loss


def token_k3(d):
    return [math.expm1(x) - x for x in d], [1 - math.exp(x) for x in d]


def sequence_k3(d):
    """The same on every token, the whole gradient on every token; n times over, as in `product_ppo`."""
    total = sum(d)
    return [math.expm1(total) - total] * len(d), [(1 - math.exp(total)) * len(d)] * len(d)


@pytest.mark.parametrize(
    ("name", "kl", "aggregation"),
    [
        ("grpo", token_k3, "sequence mean of token means"),
        ("deepseek_v3", sequence_k3, "sequence mean of token means"),
        ("dapo", token_k3, "token mean"),
        ("dr_grpo", token_k3, "sequence mean of token sums over L_max"),
        ("minimind", token_k3, "sequence mean of token means"),
    ],
)
def test_the_kl_is_aggregated_as_the_loss_is(name, kl, aggregation):
    given = inputs(torch.float64)
    plain, gradient = loss_and_gradient(objective(name), given)
    penalised, penalised_gradient = loss_and_gradient(objective(name, beta=0.25), given)
    value, at_active = 0.0, []
    for _, logps, _ in COMPLETIONS:
        d = [x for p, x in zip(logps, [0.4, -0.2, 0.1, 0.3], strict=False) if p is not None]
        if d:
            token_values, token_gradients = kl(d)
            value += 0.25 * WEIGHTS[aggregation](len(d)) * sum(token_values)
            at_active += [0.25 * WEIGHTS[aggregation](len(d)) * g for g in token_gradients]
    assert (penalised - plain).item() == pytest.approx(value, rel=1e-10)
    difference = (penalised_gradient - gradient)[given["mask"].bool()].tolist()
    assert difference == pytest.approx(at_active, rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_kl_in_the_reward_is_not_in_the_loss(name):
    penalised = objective(name, beta=0.25)
    assert penalised.kl_in_reward
    assert not penalised.kl_in_loss
    assert torch.equal(
        loss_and_gradient(penalised, inputs(torch.float64))[1],
        loss_and_gradient(objective(name), inputs(torch.float64))[1],
    )


# The objective as a whole


def test_without_old_log_probabilities_the_ratio_is_1():
    given = inputs(torch.float64)
    fresh = {k: v for k, v in given.items() if k != "old_per_token_logps"}
    same = given | {"old_per_token_logps": given["per_token_logps"]}
    for name in BY_HAND:
        pair = [loss_and_gradient(objective(name), x)[1] for x in (fresh, same)]
        assert torch.equal(*pair), name
        assert pair[0].abs().max() > 0, name


def test_advantages_may_differ_from_token_to_token():
    """The gradient of a token is that of a batch in which its advantage is everyone's."""
    given = rows(inputs(torch.float64), slice(0, 3))
    per_token = torch.tensor([[1.0, -1.0, 0.5, 2.0], [1.0, -2.0, math.nan, 0.5], [1.0, -1.0, math.nan, math.nan]])
    _, gradient = loss_and_gradient(objective("grpo"), given | {"advantages": per_token.double()})
    for i, t in given["mask"].nonzero().tolist():
        _, alone = loss_and_gradient(objective("grpo"), given | {"advantages": per_token[:, t].double().nan_to_num()})
        assert gradient[i, t].item() == pytest.approx(alone[i, t].item(), rel=1e-12), (i, t)


@pytest.mark.parametrize("name", BY_HAND)
def test_an_objective_describes_and_saves_its_axes(name):
    settled = objective(name, beta=0.5)
    line = settled.describe()
    assert line.startswith(f"{name}: {losses[name].surrogate}(")
    assert f"advantage {losses[name].advantage}(" in line
    assert f"beta=0.5 {losses[name].kl} in the {losses[name].kl_placement}" in line
    assert losses[name].aggregation in line
    saved = json.loads(json.dumps(settled.to_dict()))
    assert saved["loss_type"] == name
    assert saved["beta"] == 0.5
    assert saved["paper"] == losses[name].paper
    assert "no KL" in objective(name).describe()


def test_an_objective_uses_the_estimator_and_the_combination_it_names():
    settled = objective("beta_bnpo", advantage_kwargs={"cap": 0.5})
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    history = torch.tensor([[0.25, 0.5, 0.375], [0.75, 0.75, 0.75]], dtype=torch.float64)
    logged = []
    out = settled.advantages(rewards, torch.ones(2).double(), history, lambda *x: logged.append(x))
    # 1/pdf > .5 throughout: the cap holds, A = .5 (r - p) for each function, then the mean of the two
    assert out.tolist() == [[0.125, -0.125], [0.125, -0.125]]
    # each function's fit sees its own column of the history
    for (name, alpha), ps in zip(logged[::3], [[0.25, 0.75, 0.5, 1.0], [0.5, 0.75, 0.0, 0.5]], strict=True):
        m, v = mean(ps), variance(ps)
        assert name == "advantages/beta_alpha"
        assert alpha == pytest.approx(1 + m * (m * (1 - m) / v - 1) / 3, rel=1e-12)


def test_kl_lowers_the_total_of_each_completion_unless_its_estimator_places_it_itself():
    """A completion without an active token has no total, so that its group is as if it were not there."""
    rewards = torch.tensor([[[1.0, 3.0], [0.0, 2.0], [5.0, 5.0]]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    mask = torch.tensor([[[1, 1], [1, 0], [0, 0]]])
    kl = torch.tensor([[[0.25, -0.75], [2.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    rloo, plain = objective("rloo", beta=0.2), objective("reinforce_pp", beta=0.2)
    lowered = rloo.less_kl(rewards, weights, mask, kl)
    assert lowered[0, :, 0].tolist() == pytest.approx([2.5 + 0.1, 1.0 - 0.4, math.nan], nan_ok=True)
    whole = plain.less_kl(rewards, weights, mask, kl)
    assert whole[0, :2, 0].tolist() == [2.5, 1.0]
    assert whole[0, 2].isnan().all()
    out = rloo.advantages(lowered, torch.ones(1).double(), mask=mask, kl=kl)
    assert out[0].tolist() == pytest.approx([2.0, -2.0, 0.0])
    out = plain.advantages(whole, torch.ones(1).double(), mask=mask, kl=kl)
    returns = [2.5 - 0.2 * (0.25 - 0.75), 2.5 + 0.2 * 0.75, 1.0 - 0.4]
    expected = [(r - mean(returns)) / pstdev(returns) for r in returns]
    assert out[0].flatten().tolist() == pytest.approx([*expected, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "settings", "one_term", "additive", "sees_tokens"),
    [
        ("grpo", {}, False, True, False),
        ("deepseek_v3", {}, True, True, False),
        ("gmpo", {}, True, True, False),
        ("bnpo", {}, False, False, False),
        ("rloo", {"beta": 0.1}, False, True, True),
        ("rloo", {}, False, True, False),
        ("reinforce_pp_baseline", {}, False, True, True),
    ],
)
def test_properties_of_an_objective_that_the_trainer_reads(name, settings, one_term, additive, sees_tokens):
    settled = objective(name, **settings)
    assert (settled.one_term, settled.additive, settled.sees_tokens) == (one_term, additive, sees_tokens)


def test_missing_rewards_are_renormalized_or_0():
    rewards = torch.tensor([[[1.0, 1.0], [1.0, math.nan]]], dtype=torch.float64)
    weights = torch.ones(2).double()
    assert objective("dr_grpo").advantages(rewards, weights).tolist() == [[0.0, 0.0]]
    assert objective("dr_grpo", missing_rewards="zero").advantages(rewards, weights).tolist() == [[0.5, -0.5]]


def test_support_pure_resolves_as_the_config_does(tmp_path):
    from grpo_ext import GRPOExtConfig

    common = {"beta": 0.04, "max_completion_length": L_MAX}
    for name in BY_HAND:
        config = GRPOExtConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, loss_type=name, **common)
        assert config.objective == objective(name, **common), name
