"""What every row of the table, every estimator and every aggregation must obey; a new entry is tested as it comes.

Rows are asked with and without KL: `beta` and an estimator in turn.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import StepTotals, aggregations, step_totals
from grpo_ext.objective.combinations import combinations
from grpo_ext.objective.estimate import estimate
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.objective.objective import TENSORS, TOKEN_INPUTS
from grpo_ext.objective.options import asked_for, option_defaults
from support.pure import L_MAX, batch, loss, loss_and_gradient, objective, rows

ROWS = [name for i, name in enumerate(losses) if losses[name] not in list(losses.values())[:i]]  # no second names
WITH_KL = [*((name, {}) for name in ROWS), *(("grpo", {"beta": 0.3, "kl_estimator": kl}) for kl in kl_estimators)]
WITH_KL += [("deepseek_v3", {"beta": 0.3}), ("gspo", {"beta": 0.3}), ("luspo", {"beta": 0.3})]
IDS = [f"{name}{'+' if settings else ''}{settings.get('kl_estimator', '')}" for name, settings in WITH_KL]
every_row = pytest.mark.parametrize("name", ROWS)
every_loss = pytest.mark.parametrize(("name", "settings"), WITH_KL, ids=IDS)
LOCAL = "micro-batch-token-mean"
QUICK = settings(max_examples=25, deadline=None, derandomize=True)


def assert_same(one, other, tolerance=1e-11):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def padded(inputs: dict, left: int, right: int, fill: float) -> dict:
    """`inputs` with `left` and `right` columns more, full of `fill` and masked."""
    wide = [name for name, value in inputs.items() if value.dim() == 2]
    out = dict(inputs)
    for name in wide:
        value = inputs[name]
        columns = [value.new_full((len(value), n), 0 if name == "mask" else fill) for n in (left, right)]
        out[name] = torch.cat([columns[0], value, columns[1]], dim=1)
    return out


# On policy


def expected_weights(settled, mask, per_completion) -> torch.Tensor:
    """Weight of each token's -A by the aggregation, counted in plain Python."""
    active = mask.tolist()
    n = [sum(row) for row in active]
    completions, tokens = sum(x > 0 for x in n), sum(n)
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(active):
        for t, alive in enumerate(row):
            weight = {
                "seq-mean-token-mean": 1 / (completions * max(n[i], 1)),
                "token-mean": 1 / tokens,
                "seq-mean-token-sum": 1 / completions,
                "seq-mean-token-sum-norm": 1 / (completions * L_MAX),
                LOCAL: 1 / tokens,
            }[settled.aggregation]
            # one term for the whole completion, in which each token's log-ratio counts in full: no 1/n
            out[i, t] = alive * weight * (n[i] if settled.ratio == "product" and per_completion else 1)
    return out


@every_row
def test_on_policy_the_gradient_is_minus_the_advantage(name):
    settled, inputs = objective(name), batch()
    inputs["old_per_token_logps"] = inputs["per_token_logps"].clone()
    _, gradient = loss_and_gradient(settled, inputs)
    per_token_loss = settled.surrogate_loss(settled.tensors(inputs["per_token_logps"], inputs, inputs["mask"]))
    weights = expected_weights(settled, inputs["mask"], per_completion=per_token_loss.shape[1] == 1)
    expected = -inputs["advantages"][:, None] * weights
    assert_same([gradient], [expected], 1e-12)


@pytest.mark.parametrize("kl", kl_estimators)
def test_at_the_reference_the_kl_is_0_and_only_k1_has_a_gradient(kl):
    inputs = batch()
    inputs["ref_per_token_logps"] = inputs["per_token_logps"].clone()
    plain = loss_and_gradient(objective("grpo"), inputs)
    penalised = loss_and_gradient(objective("grpo", beta=0.5, kl_estimator=kl), inputs)
    assert torch.equal(penalised[0], plain[0])
    assert torch.equal(penalised[1], plain[1]) is (kl != "k1")


# Padding and garbage


@every_loss
def test_extra_padding_changes_nothing(name, settings):
    settled, inputs = objective(name, **settings), batch()
    plain, gradient = loss_and_gradient(settled, inputs)
    for left, right in [(0, 3), (2, 1)]:
        wide, wide_gradient = loss_and_gradient(settled, padded(inputs, left, right, -1.0))
        assert_same([wide, wide_gradient[:, left : left + 5]], [plain, gradient], 1e-13)
        assert (wide_gradient[:, :left] == 0).all()
        assert (wide_gradient[:, left + 5 :] == 0).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@every_loss
def test_garbage_under_the_mask_changes_nothing(name, settings, garbage):
    settled = objective(name, **settings)
    for dtype in (torch.float64, torch.float32):
        inputs = batch(dtype, sampler=True)
        inputs["advantages"] = inputs["advantages"][:, None] * torch.linspace(0.5, 1.5, 5, dtype=dtype)
        dead = inputs["mask"] == 0
        clean = {k: v if k == "mask" else v.masked_fill(dead, 0.25) for k, v in inputs.items()}
        dirty = {k: v if k == "mask" else v.masked_fill(dead, garbage) for k, v in inputs.items()}
        plain, gradient = loss_and_gradient(settled, clean)
        loss_, dirty_gradient = loss_and_gradient(settled, dirty)
        assert plain.isfinite()
        assert torch.equal(loss_, plain)
        assert torch.equal(dirty_gradient, gradient)
        assert (dirty_gradient[dead] == 0).all()
    for one in set(clean) - {"mask"}:
        assert torch.equal(loss_and_gradient(settled, clean | {one: dirty[one]})[1], gradient), one


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_tensors_for_a_surrogate_are_clean_under_the_mask(garbage):
    inputs = batch(sampler=True)
    inputs["advantages"] = inputs["advantages"][:, None].expand(8, 5)
    dead = inputs["mask"] == 0
    dirty = {k: v if k == "mask" else v.masked_fill(dead, garbage) for k, v in inputs.items()}
    offered = objective("kl_cov", beta=0.1).tensors(dirty["per_token_logps"], dirty, inputs["mask"])
    assert {*TENSORS, "log_ref_ratio"} == set(offered)
    for name, values in offered.items():
        assert (values[dead] == (1 if name == "importance_sampling_ratio" else 0)).all(), name
        assert values.isfinite().all(), name


@every_row
def test_a_completion_without_tokens_changes_nothing_else(name):
    settled, inputs = objective(name, beta=0.2, **in_loss(name)), batch()
    alive = inputs["mask"].any(dim=-1)
    assert not alive.all()
    with_it, without = loss_and_gradient(settled, inputs), loss_and_gradient(settled, rows(inputs, alive))
    assert_same([with_it[0], with_it[1][alive]], without, 1e-13)


def in_loss(name: str) -> dict:
    """For rows whose KL belongs in the reward: an estimator that means something in the loss."""
    return {"kl_placement": "loss", "kl_estimator": "k3"} if losses[name].kl_placement == "reward" else {}


# Splits


def split_gradient(settled, inputs, processes):
    """Gradient of a step whose rows are spread over processes and, in each, over micro-batches of their own width."""
    masks = [[inputs["mask"][micro] for micro in process] for process in processes]
    totals = StepTotals(*(sum(parts) for parts in zip(*map(step_totals, masks), strict=True)))
    value, gradient = 0.0, torch.zeros_like(inputs["per_token_logps"])
    for i, micro in enumerate(itertools.chain(*processes)):
        share, local = loss_and_gradient(settled, padded(rows(inputs, micro), 0, i % 3, math.nan), totals)
        value, gradient[micro] = value + share, local[:, :5]
    return value, gradient


def split(order: list[int], processes: int, micro_batches: int) -> list[list[list[int]]]:
    """`order` dealt in equal parts."""
    size = len(order) // (processes * micro_batches)
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return [parts[i : i + micro_batches] for i in range(0, len(parts), micro_batches)]


SPLITS = [(1, 2), (2, 1), (2, 2), (1, 8), (4, 1)]


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [*((name, losses[name].aggregation) for name in ROWS), *(("grpo", a) for a in aggregations)],
)
def test_any_split_of_a_step_gives_the_same_gradient(name, aggregation):
    settled = objective(name, loss_aggregation=aggregation)
    inputs = batch()
    whole, gradient = split_gradient(settled, inputs, [[list(range(8))]])
    assert_same([whole, gradient], loss_and_gradient(settled, inputs))
    same = []
    for i, (processes, micro_batches) in enumerate(SPLITS):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(i)).tolist()
        value, spread = split_gradient(settled, inputs, split(order, processes, micro_batches))
        same.append((spread - gradient).abs().max() < 1e-13 and (value - whole).abs() < 1e-12)
    assert all(same) is (aggregation != LOCAL)


@QUICK
@given(data=st.data())
def test_any_uneven_split_of_a_step_gives_the_same_gradient(data):
    name = data.draw(st.sampled_from([name for name in ROWS if losses[name].aggregation != LOCAL]))
    order = data.draw(st.permutations(range(8)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 7), max_size=4)))
    parts = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, 8])]
    where = data.draw(st.integers(0, len(parts) - 1))
    processes = [p for p in (parts[:where], parts[where:]) if p]
    settled, inputs = objective(name), batch()
    assert_same(split_gradient(settled, inputs, processes), loss_and_gradient(settled, inputs))


# Advantages

OPTIONS = {"pass_at_k": {"k": 2}}
BOUNDED = ("maxrl", "beta", "bernoulli", "pass_at_k")  # need [0, 1]: no shift by a constant
OF_ALL_GROUPS = ("batch", "reinforce_pp")  # compare the raw rewards of all groups: shift with them all
NAN = math.nan
GROUPS = torch.tensor(
    [[1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 1], [NAN, 0, 1, 1], [0, 1, NAN, NAN], [0, 0, 0, 0], [1, 1, 1, 0]]
).double()  # 0 or 1: every estimator takes them
every_estimator = pytest.mark.parametrize("estimator", estimators)


def declaring(trait):
    """The estimators that declare a trait: the law holds for them."""
    return [name for name in estimators if getattr(estimators.traits(name), trait)]


every_group_baseline = pytest.mark.parametrize("estimator", declaring("group_baseline"))


def tokens_of(groups, completions, seed=0, time=5):
    """What an estimator sees of the tokens of groups: ragged, with a hole, three ids, entropies around ln 2."""
    g = torch.Generator().manual_seed(seed)
    shape = groups, completions, time

    def uniform(low, high):
        return low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)

    mask = (torch.arange(time) < torch.randint(1, time + 1, shape[:2], generator=g)[..., None]).long()
    mask[..., 1] *= torch.randint(0, 2, shape[:2], generator=g)
    logps = {name: uniform(-2, -0.1) for name in TOKEN_INPUTS if name.endswith("logps")}
    ids = torch.randint(0, 3, shape, generator=g)
    return {"mask": mask, "completion_mask": mask, "completion_ids": ids, "entropies": uniform(0, 1), **logps}


def advantages(estimator, groups, tokens=None, **more):
    """By an estimator under the rules of all, which sees tokens if it asks for any."""
    seen = set(asked_for(estimators[estimator])) & set(TOKEN_INPUTS) - {"mask", "completion_mask"}
    offered = (tokens or tokens_of(*groups.shape)) if seen else {}
    return estimate(estimator, groups, offered, **(OPTIONS.get(estimator, {}) | more))


def settings_of(combination):
    return {"missing": "renormalize"} if "missing" in option_defaults(combinations[combination]) else {}


def combined(combination, estimator, rewards, weights=(1.0, 0.5), tokens=None):
    def bound(values, column):
        return advantages(estimator, values, tokens)

    weights = torch.tensor(weights, dtype=rewards.dtype)
    if combination == "sum_then_normalize" and estimator in BOUNDED:  # the total must stay 0 or 1
        weights = torch.tensor([1.0, 0.0], dtype=rewards.dtype)
    return combinations[combination](rewards, weights, bound, **settings_of(combination))


TWO = torch.stack([GROUPS, GROUPS.roll(1, 0).flip(1)], dim=-1)


def pairs(names):
    """Combinations with estimators, but for one that centres totals and an advantage by token: a config refuses it."""
    by_token = ("normalize_then_sum", declaring("per_token"))
    every = itertools.product(combinations, names)
    return pytest.mark.parametrize(
        ("combination", "estimator"), [(c, e) for c, e in every if c != by_token[0] or e not in by_token[1]]
    )


every_pair = pairs(estimators)


@every_pair
def test_permuting_permutes_combined_advantages(combination, estimator):
    tokens = tokens_of(*TWO.shape[:2])
    out = combined(combination, estimator, TWO, tokens=tokens)
    assert out.abs().max() > 0.1
    groups, completions = [3, 0, 6, 1, 5, 2, 4], [2, 0, 3, 1]
    for index in (groups, (slice(None), completions)):
        alike = {name: values[index] for name, values in tokens.items()}
        assert_same([combined(combination, estimator, TWO[index], tokens=alike)], [out[index]], 1e-12)


@pytest.mark.parametrize("estimator", [name for name in estimators if name not in BOUNDED])
def test_a_constant_added_to_a_groups_rewards_changes_nothing(estimator):
    shift = torch.arange(len(GROUPS)).double()[:, None] - 2
    if estimator in OF_ALL_GROUPS:
        assert (advantages(estimator, GROUPS + shift) - advantages(estimator, GROUPS)).abs().max() > 0.1
        shift = torch.full_like(shift, 4)
    assert_same([advantages(estimator, GROUPS + shift)], [advantages(estimator, GROUPS)], 1e-12)


LEVEL = [[0.1] * 7, [0.7] * 7, [1 / 3] * 7]
FAR = [[1e6 + 0.1] * 7, [-1e6 - 0.3] * 7, [3e-8] * 7]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("groups", [LEVEL, FAR], ids=["level", "far"])
@every_group_baseline
def test_a_group_without_variance_gets_exact_zeros(estimator, groups, dtype):
    if estimator in BOUNDED and (groups is FAR or estimator == "pass_at_k"):
        groups = [[1.0] * 7, [0.0] * 7]
    signal = torch.tensor([[1, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0]], dtype=dtype)
    silent = torch.tensor(groups, dtype=dtype)
    gaps = silent.clone()
    gaps[:, ::2] = NAN
    for rewards in (silent, gaps, torch.cat([silent, signal]), torch.cat([gaps, signal])):
        out = advantages(estimator, rewards)
        assert (out[: len(silent)] == 0).all()
        assert out.dtype == dtype
        assert out.isfinite().all()
    assert out[len(silent) :].flatten(1).any(dim=1).all()  # some member: a median's own advantage is 0


@pytest.mark.parametrize("estimator", declaring("sums_to_zero"))
def test_the_advantages_of_a_group_sum_to_0(estimator):
    rewards = torch.cat([GROUPS, GROUPS.nan_to_num() * torch.linspace(0.1, 1, 4).double()])
    rewards = GROUPS if estimator in BOUNDED else rewards
    out = advantages(estimator, rewards)
    assert out.abs().max() > 0.1
    assert out.sum(dim=1).abs().max() < 1e-12 * out.abs().sum()


@pytest.mark.parametrize("estimator", declaring("per_token"))
@pytest.mark.parametrize("garbage", [NAN, math.inf, 1e30])
def test_advantages_by_token_are_0_under_the_mask_and_see_nothing_there(estimator, garbage):
    tokens = tokens_of(*GROUPS.shape)
    dead = tokens["mask"] == 0
    out = advantages(estimator, GROUPS, tokens)
    assert out.shape == dead.shape
    assert (out[dead] == 0).all()
    assert out.abs().max() > 0.1
    dirty = {k: v.masked_fill(dead, garbage) if v.is_floating_point() else v for k, v in tokens.items()}
    dirty["completion_ids"] = tokens["completion_ids"].masked_fill(dead, 7)
    assert torch.equal(advantages(estimator, GROUPS, dirty), out)
    tail = [torch.cat([v, torch.full_like(v[..., :2], 0)], dim=-1) for v in tokens.values()]
    assert torch.equal(advantages(estimator, GROUPS, dict(zip(tokens, tail, strict=True)))[..., :5], out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pairs(declaring("group_baseline"))
def test_a_group_without_variance_gets_exact_zeros_combined(combination, estimator, dtype):
    rewards = TWO.to(dtype).clone()
    level = 1.0 if estimator in BOUNDED else 0.1
    rewards[1] = torch.tensor([level, level])
    rewards[4] = NAN
    out = combined(combination, estimator, rewards)
    assert out.dtype == dtype
    assert (out[1] == 0).all()
    assert (out[4] == 0).all()
    assert out.isfinite().all()
    assert out.abs().max() > 0.1


@every_pair
def test_a_completion_without_any_score_does_not_change_the_others(combination, estimator):
    whole = TWO[[0, 1, 6]]
    gap = torch.full((3, 1, 2), NAN).double()
    tokens, others = tokens_of(3, 5), [0, 2, 3, 4]
    out = combined(combination, estimator, torch.cat([whole[:, :1], gap, whole[:, 1:]], dim=1), tokens=tokens)
    assert (out[:, 1] == 0).all()
    tokens = {name: values[:, others] for name, values in tokens.items()}
    assert_same([out[:, others]], [combined(combination, estimator, whole, tokens=tokens)], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@every_group_baseline
def test_fewer_than_two_scored_give_0(estimator, dtype):
    alone = torch.tensor([[NAN, 1, NAN], [NAN, NAN, NAN], [0, NAN, NAN]], dtype=dtype)
    out = advantages(estimator, torch.cat([alone, torch.tensor([[1, 0, NAN]], dtype=dtype)]))
    assert (out[:3] == 0).all()
    for rewards in (alone, alone[:1], torch.full((2, 3), NAN, dtype=dtype)):
        assert not advantages(estimator, rewards).any()


@every_pair
def test_a_batch_without_any_score_gives_zeros(combination, estimator):
    out = combined(combination, estimator, torch.full((2, 3, 2), NAN).double())
    assert not out.any()


REWARDS = st.lists(
    st.lists(
        st.sampled_from([0.0, 1e-30, 1e-9, 0.1, 1 / 3, 0.1 + 0.2, 0.3, 0.999999999, 1.0, NAN]), min_size=4, max_size=4
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@every_estimator
@QUICK
@given(groups=REWARDS)
def test_no_rewards_make_an_advantage_infinite_or_nan(estimator, dtype, groups):
    rewards = torch.tensor(groups, dtype=dtype)
    rewards = torch.where(rewards.isnan(), rewards, rewards.round()) if estimator == "pass_at_k" else rewards
    out = advantages(estimator, rewards)
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert (out[rewards.isnan()] == 0).all()


# Limits


@pytest.mark.parametrize("name", [name for name in ROWS if len(losses[name].levels) > 1])
def test_with_one_token_all_ratio_levels_agree(name):
    inputs = {k: v[:, :1] if v.dim() == 2 else v for k, v in batch(spread=0.6).items()}
    options = {} if losses[name].surrogate in ("sapo", "cispo") else {"epsilon": 0.2, "epsilon_high": 0.3}
    token, sequence, product = (
        loss_and_gradient(objective(name, importance_sampling_level=level, **options), inputs)
        for level in ("token", "sequence", "product")
    )
    assert_same(token, sequence, 1e-14)
    assert_same(token, product, 1e-14)
    assert_same([token[1]], [token[1]])
    assert token[1].abs().max() > 0


def test_with_wide_bounds_grpo_equals_dppo_and_has_the_gradient_of_cispo():
    inputs, wide = batch(spread=0.6), {"epsilon": 50.0, "epsilon_high": 50.0}
    dapo, dppo = (loss_and_gradient(objective(n, **wide), inputs) for n in ("dapo", "dppo"))
    assert_same(dapo, dppo, 1e-14)
    _, cispo = loss_and_gradient(objective("cispo", epsilon_high=1e9), inputs)
    assert_same([cispo], [dapo[1]], 1e-14)


# No gradient but in the policy


@every_loss
def test_no_gradient_into_old_or_reference_log_probabilities_or_advantages(name, settings):
    inputs = {k: v if k == "mask" else v.clone().requires_grad_() for k, v in batch(sampler=True).items()}
    loss(objective(name, **settings), inputs).backward()
    fixed = set(inputs) - {"mask", "per_token_logps"}
    assert len(fixed) == 4
    assert all(inputs[key].grad is None for key in fixed)
    assert inputs["per_token_logps"].grad.abs().max() > 0


# Hazards of arithmetic


@pytest.mark.parametrize("shift", [100.0, -100.0])
@every_loss
def test_log_ratios_of_100_leave_loss_and_gradient_finite(name, settings, shift):
    """Whole completions and single tokens, for every sign of the advantage, in float32."""
    settled, inputs = objective(name, **settings), batch(torch.float32)
    references = [0.0, 100.0, -100.0] if settled.kl_in_loss else [0.0]
    for advantage, extent, reference in itertools.product([1.5, -1.5, 0.0], [5, 1], references):
        moved = dict(inputs, advantages=torch.full((8,), advantage))
        for key, far in (("old_per_token_logps", -shift), ("ref_per_token_logps", reference)):
            moved[key] = inputs["per_token_logps"].clone()
            moved[key][:, :extent] += far
        value, gradient = loss_and_gradient(settled, moved)
        assert value.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("reference", [100.0, -100.0])
@pytest.mark.parametrize("kl", kl_estimators)
def test_every_row_with_every_kl_is_finite_far_from_the_reference(kl, reference):
    for name in ROWS:
        inputs = batch(torch.float32, spread=50.0)
        inputs["ref_per_token_logps"] = inputs["per_token_logps"] + reference
        settled = objective(name, beta=0.1, kl_estimator=kl, kl_placement="loss")
        value, gradient = loss_and_gradient(settled, inputs)
        assert value.isfinite(), name
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@every_loss
def test_the_loss_keeps_the_dtype_of_its_inputs(name, settings, dtype):
    settled, inputs = objective(name, **settings), batch(dtype, sampler=True)
    tensors = settled.tensors(inputs["per_token_logps"], inputs, inputs["mask"])
    assert all(v.dtype == dtype for k, v in tensors.items() if k != "mask")
    assert settled.surrogate_loss(tensors).dtype == dtype
    if settled.kl_in_loss:
        assert settled.kl_penalty(tensors).dtype == dtype
    value, gradient = loss_and_gradient(settled, inputs)
    assert value.dtype == gradient.dtype == dtype
    exact = loss_and_gradient(settled, {k: v if k == "mask" else v.double() for k, v in inputs.items()})
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    assert_same([value.double(), gradient.double()], exact, tolerance)


@every_row
def test_bfloat16_is_computed_in_float32(name):
    inputs = batch(torch.bfloat16)
    value, gradient = loss_and_gradient(objective(name), inputs | {"advantages": inputs["advantages"].float()})
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert gradient.abs().max() > 0
    exact, _ = loss_and_gradient(
        objective(name), {k: v if k == "mask" else v.double() for k, v in inputs.items()}
    )  # differences of log-probabilities are not taken in bfloat16
    assert value.item() == pytest.approx(exact.item(), rel=1e-5, abs=1e-6)
