"""Aggregations by hand: values, weights of the single losses, and the denominators of a whole optimizer step."""

import math

import pytest
import torch

from grpo_ext.objective.aggregation import StepTotals, aggregations, step_totals, token_sums

LOSS = [[1.0, 2.0, 4.0], [8.0, math.nan, math.inf], [-3.0, 16.0, -math.inf], [math.nan, math.nan, math.nan]]
MASK = [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]  # 6 tokens in 3 active completions
TOTALS = StepTotals(torch.tensor(20.0), torch.tensor(10.0), torch.tensor(4.0))  # of the whole step
OPTIONS = {"seq-mean-token-sum-norm": {"max_completion_length": 5}}

# name -> (share of the step's loss, weight of each token)
BY_HAND = {
    "seq-mean-token-mean": ((7 / 3 + 8 + 13 / 2) / 10, [[1 / 30] * 3, [1 / 10, 0, 0], [1 / 20, 1 / 20, 0], [0] * 3]),
    "token-mean": ((7 + 8 + 13) / 20, [[1 / 20] * 3, [1 / 20, 0, 0], [1 / 20, 1 / 20, 0], [0] * 3]),
    "seq-mean-token-sum": ((7 + 8 + 13) / 10, [[1 / 10] * 3, [1 / 10, 0, 0], [1 / 10, 1 / 10, 0], [0] * 3]),
    "seq-mean-token-sum-norm": ((7 + 8 + 13) / 50, [[1 / 50] * 3, [1 / 50, 0, 0], [1 / 50, 1 / 50, 0], [0] * 3]),
    "micro-batch-token-mean": ((7 + 8 + 13) / 6 / 4, [[1 / 24] * 3, [1 / 24, 0, 0], [1 / 24, 1 / 24, 0], [0] * 3]),
}
# the same for one loss per completion, which stands on all of its active tokens
PER_COMPLETION = [[1.0], [2.0], [4.0], [math.nan]]
PER_COMPLETION_BY_HAND = {
    "seq-mean-token-mean": (1 + 2 + 4) / 10,
    "token-mean": (3 * 1 + 2 + 2 * 4) / 20,
    "seq-mean-token-sum": (3 * 1 + 2 + 2 * 4) / 10,
    "seq-mean-token-sum-norm": (3 * 1 + 2 + 2 * 4) / 50,
    "micro-batch-token-mean": (3 * 1 + 2 + 2 * 4) / 24,
}


def test_every_aggregation_has_a_reference_here():
    assert set(aggregations) == set(BY_HAND) == set(PER_COMPLETION_BY_HAND)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", BY_HAND)
def test_value_and_weights(name, dtype, tolerance):
    value, weights = BY_HAND[name]
    per_token = torch.tensor(LOSS, dtype=dtype, requires_grad=True)
    out = aggregations[name](per_token, torch.tensor(MASK), TOTALS, **OPTIONS.get(name, {}))
    out.backward()
    assert out.dtype == dtype
    assert out.item() == pytest.approx(value, rel=tolerance)
    expected = torch.tensor(weights, dtype=dtype)
    torch.testing.assert_close(per_token.grad, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", PER_COMPLETION_BY_HAND)
def test_a_loss_per_completion_counts_on_each_of_its_tokens(name):
    per_completion = torch.tensor(PER_COMPLETION, dtype=torch.float64)
    out = aggregations[name](per_completion, torch.tensor(MASK), TOTALS, **OPTIONS.get(name, {}))
    assert out.item() == pytest.approx(PER_COMPLETION_BY_HAND[name], rel=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_an_empty_mask_gives_0_without_nan(name):
    per_token = torch.full((2, 3), math.nan, requires_grad=True)
    mask = torch.zeros(2, 3)
    out = aggregations[name](per_token, mask, step_totals([mask]), **OPTIONS.get(name, {}))
    out.backward()
    assert out.item() == 0.0
    assert (per_token.grad == 0).all()


def test_step_totals_count_tokens_completions_and_passes():
    totals = step_totals([torch.tensor(MASK), torch.tensor([[1, 0], [0, 0]]), torch.zeros(1, 4)])
    assert [x.item() for x in totals] == [7.0, 4.0, 3.0]
    assert totals._fields == ("tokens", "sequences", "micro_batches")


def test_token_sums_skip_garbage():
    sums = token_sums(torch.tensor(LOSS), torch.tensor(MASK))
    assert sums.tolist() == [7.0, 8.0, 13.0, 0.0]
