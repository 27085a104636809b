"""The plan of a generation whose chunks arrive one by one, and the denominators that are known last."""

import random
from itertools import pairwise

import pytest
import torch

from grpo_ext.objective.aggregation import StepTotals
from grpo_ext.packing.micro_batches import MicroBatch, joined
from grpo_ext.trainer.arriving import Arriving, Plan, correction
from grpo_ext.trainer.batches import Generation


def random_plans(count=300):
    r = random.Random(1)
    for _ in range(count):
        size, group, window, steps = r.choice([1, 2, 3, 4, 6]), r.choice([2, 3, 4]), r.randint(1, 6), r.randint(1, 3)
        rows = size * window * steps
        chunk = group * r.randint(1, 3)
        order = r.sample(range(rows), rows)
        yield order, size, window, chunk, Plan.of(order, size, window, chunk)


def test_a_step_keeps_the_rows_that_it_has_without_overlap():
    for order, size, window, _, plan in random_plans():
        for i, step in enumerate(plan.steps):
            assert sorted(row for batch in step for row in batch) == sorted(
                order[i * size * window :][: size * window]
            )
            assert {len(batch) for batch in step} == {size}


def test_a_micro_batch_needs_the_chunks_of_its_rows_and_no_later_one():
    for *_, chunk, plan in random_plans():
        for batch, needed in zip(plan.steps[0], plan.needed, strict=True):
            arrived = {row for rows in plan.chunks[:needed] for row in rows}
            assert set(batch) <= arrived
            assert not set(batch) <= {row for row in arrived if row < (needed - 1) * chunk}
        assert all(a <= b for a, b in pairwise(plan.needed))


def test_later_steps_keep_the_order_of_a_generation_without_overlap():
    for order, size, window, _, plan in random_plans():
        later = [row for step in plan.steps[1:] for batch in step for row in batch]
        assert later == order[size * window :]


class Scored:
    """Chunks whose rows hold their own number, of lengths that differ; notes when each is taken."""

    def __init__(self, plan):
        self.plan, self.events = plan, []

    def __call__(self, i):
        rows = torch.tensor(self.plan.chunks[i])
        self.events.append(i)
        ids = rows[:, None].repeat(1, 1 + i)
        ones = torch.ones_like(ids)
        return MicroBatch(
            prompt_ids=ids, prompt_mask=ones, completion_ids=ids, completion_mask=ones, advantages=rows.double()
        )


def test_chunks_are_taken_in_order_each_once_and_no_earlier_than_a_micro_batch_needs_them():
    for *_, plan in random_plans(60):
        scored = Scored(plan)
        batches = [MicroBatch() for step in plan.steps for _ in step]
        finish = lambda scored=scored: scored.events.append("finished")  # noqa: E731
        arriving = Arriving(plan, Generation(batches), scored, lambda batches: batches, finish)
        for place, needed in enumerate(plan.needed):
            arriving.await_micro_batch(place)
            last = place == len(plan.needed) - 1
            taken = [event for event in scored.events if event != "finished"]
            assert taken == [*range(len(plan.chunks) if last else needed)]
            assert batches[place]["advantages"].tolist() == plan.steps[0][place]
        assert scored.events == [*range(len(plan.chunks)), "finished"]
        rows = [row for step in plan.steps for batch in step for row in batch]
        assert torch.cat([batch["advantages"] for batch in batches]).tolist() == rows


def test_rows_of_different_lengths_are_joined_with_prompts_at_the_right_and_completions_at_the_left():
    def batch(prompt, completion):
        ids = torch.arange(1, 1 + prompt)[None], torch.arange(1, 1 + completion)[None]
        return MicroBatch(
            prompt_ids=ids[0],
            prompt_mask=torch.ones_like(ids[0]),
            completion_ids=ids[1],
            completion_mask=torch.ones_like(ids[1]),
            importance_sampling_ratio=torch.full((1, 1), 0.5),
            kept_tokens=[torch.tensor([prompt])],
        )

    both = joined([batch(1, 3), batch(2, 1)])
    assert both["prompt_ids"].tolist() == [[0, 1], [1, 2]]
    assert both["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert both["completion_ids"].tolist() == [[1, 2, 3], [1, 0, 0]]
    assert both["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert both["importance_sampling_ratio"].tolist() == [[0.5], [0.5]]  # one for a completion: no time to pad
    assert [x.tolist() for x in both["kept_tokens"]] == [[1], [2]]


@pytest.mark.parametrize(("aggregation", "factor"), [("token-mean", 80 / 30), ("seq-mean-token-mean", 8 / 5)])
def test_a_gradient_is_corrected_by_the_denominator_of_its_aggregation(aggregation, factor):
    assumed = StepTotals(*torch.tensor([80, 8, 4]))
    assert correction(aggregation, assumed, StepTotals(*torch.tensor([30, 5, 4]))) == factor  # not that of float32
    assert correction(aggregation, assumed, StepTotals(*torch.tensor([0, 0, 4]))) > 0  # nothing live: 0 stays 0
