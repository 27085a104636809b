"""Estimators that see tokens, and the marks of a surrogate, against loops in plain Python."""

import cmath
import math
from statistics import mean, pstdev

import pytest
import torch

from grpo_ext.objective.covariance import clip_cov_marks, covariances, highest
from grpo_ext.objective.estimate import estimate
from grpo_ext.objective.token_advantages import prefix_weights
from support.pure import loss_and_gradient, objective

DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
NAN = math.nan
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, NAN, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
# ids; None stands under the mask
IDS = [
    [[7, 1, 2, 9, 4, None], [7, 1, 3, 4, None, None], [7, 5, 2, None, 9, 4], [8, 1, 2, 4, None, None]],
    [[7, 1, 4, None, None, None], [7, 1, 4, None, None, None], [7, 2, 4, None, None, None], [7, None, 2, 4, 4, None]],
    [[7, 1, 4, None, None, None]] * 4,
]


def active(i, j):
    return [t for t, token in enumerate(IDS[i][j]) if token is not None]


MASK = torch.tensor([[[int(x is not None) for x in row] for row in group] for group in IDS])
TOKENS = torch.tensor([[[99 if x is None else x for x in row] for row in group] for group in IDS])


def numbers(seed, low, high):
    """Values [groups][completions][time], NaN where no token is active."""
    g = torch.Generator().manual_seed(seed)
    values = low + (high - low) * torch.rand(MASK.shape, generator=g, dtype=torch.float64)
    return torch.where(MASK.bool(), values, NAN)


def run(name, dtype=torch.float64, **offered):
    options = {key: offered.pop(key) for key in list(offered) if not isinstance(offered[key], torch.Tensor)}
    offered = {key: x.to(dtype) if x.is_floating_point() else x for key, x in offered.items()}
    return estimate(name, torch.tensor(REWARDS, dtype=dtype), {"mask": MASK, **offered}, **options)


def scored(group):
    return [r for r in group if not math.isnan(r)]


# GTPO


def run_length(i, j, side, backward):
    """Tokens of the run that completion (i, j) begins, or ends, with."""

    def places(k):
        return [IDS[i][k][t] for t in (reversed(active(i, k)) if backward else active(i, k))]

    others = [places(k) for k in range(4) if side[k] * side[j] < 0]
    for length, token in enumerate(places(j)):
        if not any(len(other) > length and other[length] == token for other in others):
            return length
    return len(places(j))


def ref_gtpo(entropies, weight=2.0, coef=0.1, limit=0.6931471805599453):
    out = torch.zeros(MASK.shape, dtype=torch.float64)
    for i, group in enumerate(REWARDS):
        centre = mean(scored(group))
        side = [0 if math.isnan(r) else (r > centre) - (r < centre) for r in group]
        for j, r in enumerate(group):
            at, h = active(i, j), mean(entropies[i][j][t] for t in active(i, j))
            if math.isnan(r) or len(set(scored(group))) == 1 or (limit is not None and h > limit):
                continue
            begins, ends = (run_length(i, j, side, backward) for backward in (False, True))
            for place, t in enumerate(at):
                runs = (place < begins) + (len(at) - place <= ends)
                factor = 1 if not runs else weight**runs if side[j] > 0 else 0
                out[i, j, t] = (r - centre - coef * h) * factor
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"conflict_weight": 3.0, "entropy_coef": 0.4, "entropy_limit": 0.6}, {"entropy_limit": None}]
)
def test_gtpo_equals_its_definition(options, dtype, tolerance):
    entropies = numbers(0, 0.2, 1.2)
    names = {"conflict_weight": "weight", "entropy_coef": "coef", "entropy_limit": "limit"}
    expected = ref_gtpo(entropies.tolist(), **{names[key]: value for key, value in options.items()})
    out = run("gtpo", dtype, completion_ids=TOKENS, entropies=entropies, **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=tolerance, atol=tolerance)


def test_gtpo_by_hand():
    """Places count active tokens, from the first and from the last; the second completion of a conflict may change."""
    out = run("gtpo", completion_ids=TOKENS, entropies=torch.zeros(MASK.shape).double())[0]
    assert out[0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 0.0]  # all of it begins a wrong one, 2 9 4 ends one
    assert out[1].tolist() == [0.0, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert out[2].tolist() == [0.0, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert out[3].tolist() == [0.5, 0.5, 0.5, 1.0, 0.0, 0.0]


# Target PO


def ref_tpo(logps, eta=1.0):
    out = torch.zeros(3, 4, dtype=torch.float64)
    for i, group in enumerate(REWARDS):
        centre, spread = mean(scored(group)), pstdev(scored(group))
        total = [sum(logps[i][j][t] for t in active(i, j)) for j in range(4)]
        p = [0.0 if math.isnan(r) else math.exp(s) for r, s in zip(group, total, strict=True)]
        u = [0.0 if math.isnan(r) or spread == 0 else (r - centre) / spread for r in group]
        q = [x * math.exp(v / eta) for x, v in zip(p, u, strict=True)]
        for j in range(4):
            out[i, j] = len(scored(group)) * (q[j] / sum(q) - p[j] / sum(p))
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("options", [{}, {"eta": 0.4}])
def test_tpo_equals_its_definition(options, dtype, tolerance):
    logps = numbers(1, -1.5, -0.2)
    out = run("tpo", dtype, per_token_logps=logps, **options)
    assert out.dtype == dtype
    torch.testing.assert_close(out, ref_tpo(logps.tolist(), **options).to(dtype), rtol=tolerance, atol=tolerance)


def test_the_gradient_of_tpo_is_that_of_the_cross_entropy_to_its_target():
    """-(1/P) sum_i q_i log p_i over P prompts, q fixed, differentiated by a complex step in each token."""
    logps, step = numbers(1, -1.5, -0.2), 1e-30
    advantages = run("tpo", per_token_logps=logps).flatten()
    inputs = {"per_token_logps": logps.flatten(0, 1), "advantages": advantages, "mask": MASK.flatten(0, 1)}
    _, gradient = loss_and_gradient(objective("tpo"), inputs)
    q = torch.tensor([[x / 4 for x in row] for row in ref_tpo(logps.tolist()).tolist()])
    for i, j, t in MASK.nonzero().tolist():
        group, count = REWARDS[i], len(scored(REWARDS[i]))
        members = [k for k in range(4) if not math.isnan(group[k])]
        total = {k: sum(logps[i, k, s].item() for s in active(i, k)) for k in members}
        plain = [math.exp(total[k]) for k in members]
        p = {k: x / sum(plain) for k, x in zip(members, plain, strict=True)}
        q = {k: p[k] + advantages[4 * i + k].item() / count for k in members}
        moved = {k: cmath.exp(complex(total[k], step * (k == j))) for k in members}
        loss = -sum(q[k] * cmath.log(moved[k] / sum(moved.values())) for k in members)
        # a group that is not scored whole has fewer members, each of which weighs more
        weight = 1 / 12 * count
        assert gradient[4 * i + j, t].item() == pytest.approx(weight * loss.imag / step, rel=1e-10, abs=1e-12)


def test_a_completion_without_an_active_token_takes_no_part_in_tpo():
    logps, mask = numbers(1, -1.5, -0.2), MASK.clone()
    mask[0, 1] = 0
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    out = estimate("tpo", rewards, {"mask": mask, "per_token_logps": logps})
    rewards[0, 1] = NAN
    assert torch.equal(out, estimate("tpo", rewards, {"mask": MASK, "per_token_logps": logps}))
    assert out[0].abs().max() > 0.1


# IW-OPD


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("gamma", [0.5, 0.0, 1.3])
def test_iw_opd_equals_its_definition(gamma, dtype, tolerance):
    teacher, old = numbers(2, -2, -0.1), numbers(3, -2, -0.1)
    expected = torch.zeros(MASK.shape, dtype=torch.float64)
    for i, group in enumerate(REWARDS):
        for j, r in enumerate(group):
            gaps = [(teacher[i, j, t] - old[i, j, t]).item() for t in active(i, j)]
            for place, (t, gap) in enumerate(zip(active(i, j), gaps, strict=True)):
                before = sum(map(abs, gaps[:place])) / sum(map(abs, gaps))
                expected[i, j, t] = 0.0 if math.isnan(r) else (1 + gamma * (1 - before)) * gap
    out = run("iw_opd", dtype, ref_per_token_logps=teacher, old_per_token_logps=old, gamma=gamma)
    torch.testing.assert_close(out, expected.to(dtype), rtol=tolerance, atol=tolerance)


def test_prefix_weights_by_hand():
    gaps = torch.tensor([[1.0, -3.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0]]).double()
    assert prefix_weights(gaps, 0.5).tolist() == [[1.5, 1.4375, 1.25, 1.25], [1.5] * 4]


# Marks


ADVANTAGES = [[1.4, -0.5, -0.5, 1.1], [0.2, 0.0, 0.6, -0.8], [0.0, 0.0, 0.0, 0.0]]


def ref_covariances(logps, advantages):
    tokens = [(i, j, t) for i in range(3) for j in range(4) for t in active(i, j)]
    a, p = mean(advantages[i][j][t] for i, j, t in tokens), mean(logps[i][j][t] for i, j, t in tokens)
    return {(i, j, t): (advantages[i][j][t] - a) * (logps[i][j][t] - p) for i, j, t in tokens}


@pytest.mark.parametrize("by_token", [False, True])
def test_kl_cov_marks_the_tokens_with_the_highest_covariance(by_token):
    logps, advantages = numbers(4, -3, -0.1), torch.tensor(ADVANTAGES).double()
    wide = advantages[..., None] * (torch.arange(1, 7) if by_token else torch.ones(6))
    expected = ref_covariances(logps.tolist(), wide.tolist())
    found = covariances(wide if by_token else advantages, logps, MASK)
    for place in MASK.nonzero().tolist():
        assert found[tuple(place)].item() == pytest.approx(expected[tuple(place)], rel=1e-10, abs=1e-14)
    assert (found[MASK == 0] == 0).all()
    for share, count in ((0.2, int(0.2 * MASK.sum())), (1e-6, 1)):
        marks = highest(wide if by_token else advantages, logps, MASK, share=share)
        best = sorted(expected, key=expected.__getitem__, reverse=True)[:count]
        assert sorted(map(tuple, marks.nonzero().tolist())) == sorted(best)


def test_no_token_is_marked_where_nothing_varies():
    logps = numbers(4, -3, -0.1)
    for marks in (highest, clip_cov_marks):
        assert not marks(torch.zeros(3, 4).double(), logps, MASK, completion_ids=TOKENS).any()


def test_clip_cov_draws_from_its_band_and_the_draw_follows_the_tokens():
    g = torch.Generator().manual_seed(0)
    shape, ids = (40, 8, 20), torch.randint(0, 50, (40, 8, 20), generator=g)
    logps = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    advantages = torch.randn(shape[:2], generator=g, dtype=torch.float64)
    mask = (torch.arange(20) < torch.randint(5, 21, shape[:2], generator=g)[..., None]).long()
    options = {"share": 0.02, "cov_low": 0.3, "cov_high": 1.5}
    marks = clip_cov_marks(advantages, logps, mask, ids, **options)
    c = covariances(advantages, logps, mask)
    among = (c > 0.3) & (c < 1.5) & mask.bool()
    count = int(0.02 * mask.sum())
    assert not (marks & ~among).any()
    assert marks.sum() == count < among.sum() / 4
    shares = [(marks[:20].sum() / count).item(), (marks[..., :5].sum() / count).item()]
    assert shares == pytest.approx(
        [(among[:20].sum() / among.sum()).item(), (among[..., :5].sum() / among.sum()).item()], abs=0.15
    )
    order = torch.randperm(40, generator=g)
    again = clip_cov_marks(advantages[order], logps[order], mask[order], ids[order], **options)
    assert torch.equal(again, marks[order])
    other = clip_cov_marks(advantages, logps, mask, ids + 1, **options)
    assert not torch.equal(other, marks)
    dirty = [torch.where(mask.bool(), x, garbage) for x, garbage in ((logps, NAN), (ids, 7))]
    assert torch.equal(clip_cov_marks(advantages, dirty[0], mask, dirty[1], **options), marks)
    every = clip_cov_marks(advantages, logps, mask, ids, **options | {"share": 1.0})
    assert torch.equal(every, among)
