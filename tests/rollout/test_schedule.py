"""Windows are sampled by weights of one exact age, each once, in order, without a deadlock."""

import random

import pytest

from grpo_ext.rollout.schedule import Orders, Schedule

RUNS = 100_000


class Worker:
    """A sampler with one thread, which works when it likes, and keeps the weights that were published."""

    def __init__(self, chance, first):
        self.chance, self.last = chance, first - 1
        self.weights, self.queue, self.done = {}, [], {}
        self.most = 0

    def obey(self, orders, now):
        for version in orders.forget:
            assert self.weights.pop(version, None) is not None, "no such weights"
        if orders.publish is not None:
            assert orders.publish not in self.weights
            self.weights[orders.publish] = now
        assert list(orders.submit) == list(range(self.last + 1, self.last + 1 + len(orders.submit))), "out of order"
        self.last += len(orders.submit)
        self.queue += [(generation, orders.publish) for generation in orders.submit]
        self.most = max(self.most, len(self.weights))

    def work(self, until=None):
        """Sample as long as the queue lasts and chance wills it, or until a generation is done."""
        while self.queue and (until not in self.done if until is not None else self.chance() < 0.5):
            generation, version = self.queue.pop(0)
            assert version in self.weights, "no such weights"
            self.done[generation] = self.weights[version]


def train(ahead, generations, first, finished, chance, make=Schedule):
    """Train a run; return for each generation the age of the weights that sampled it; None: of a checkpoint."""
    in_flight = {generation: generation - ahead for generation in range(first, first + finished)}
    plan, worker, ages = make(ahead, generations, first, in_flight), Worker(chance, first + finished), {}
    for generation in range(first, generations):
        worker.obey(plan.before(generation), now=generation)
        worker.work(until=generation)
        known = first <= generation < first + finished
        assert known or generation in worker.done, "deadlock: it was never submitted"
        assert known or plan.version(generation) in worker.weights, "no such weights for replacements"
        assert not known or plan.version(generation) == generation - ahead
        ages[generation] = None if known else generation - worker.done[generation]
        worker.obey(plan.after(generation), now=generation)
        worker.work()
    assert not worker.queue, "sampled for nothing"
    assert not worker.weights, "never forgotten"
    assert worker.most <= max(ahead, 1)
    return ages


def check(ahead, generations, first, finished, chance, make=Schedule):
    ages = train(ahead, generations, first, finished, chance, make)
    assert list(ages) == list(range(first, generations))
    for generation, age in ages.items():
        if generation >= first + finished:
            assert age == min(ahead, generation - first), (ahead, generations, first, finished, generation)


def schedules(runs, seed=0):
    r = random.Random(seed)
    for _ in range(runs):
        ahead, first = r.randint(1, 5), r.randint(0, 7)
        generations = first + r.randint(1, 9)
        yield ahead, generations, first, min(r.choice((0, ahead)), generations - first), r.random


@pytest.mark.parametrize("runs", [2_000, pytest.param(RUNS, marks=pytest.mark.slow)])
def test_each_window_is_sampled_once_in_order_by_weights_that_are_k_windows_old(runs):
    for one in schedules(runs):
        check(*one)


def test_the_table_of_two_windows_ahead():
    plan, found = Schedule(2, 5), []
    for generation in range(5):
        found.append((plan.before(generation), plan.after(generation)))
    assert found == [
        (Orders((), 0, range(0, 3)), Orders([])),
        (Orders(), Orders([], 1, range(3, 4))),
        (Orders(), Orders([0], 2, range(4, 5))),
        (Orders(), Orders([1])),
        (Orders(), Orders([2])),
    ]


def test_weights_of_a_checkpoint_are_forgotten_when_no_window_needs_them():
    plan = Schedule(2, 9, 4, {4: 2, 5: 3}, [2, 3])
    assert plan.after(4) == Orders([2], 4, range(6, 7))
    assert plan.after(5) == Orders([3], 5, range(7, 8))


def test_windows_that_a_checkpoint_has_lost_are_sampled_when_the_next_one_begins():
    assert train(3, 20, 10, 1, random.random)[12] == 2
    assert train(3, 20, 10, 1, random.random)[13] == 3


class Older(Schedule):
    """Submits a generation later than it should."""

    def _submit(self, generation):
        self.ahead, ahead = self.ahead - 1, self.ahead
        orders = super()._submit(generation)
        self.ahead = ahead
        return orders


def changed(change):
    """A schedule whose orders after a generation are changed."""

    class Changed(Schedule):
        def after(self, generation):
            return change(super().after(generation), self)

    return Changed


def early(orders, plan):
    rest = [version for version in plan._published if version != orders.publish]
    return Orders([*orders.forget, *rest[:1]], orders.publish, orders.submit)


BROKEN = {
    "age": (Older, "assert|never submitted"),
    "twice": (changed(lambda o, _: Orders(o.forget, o.publish, [*o.submit, *o.submit])), "out of order"),
    "order": (changed(lambda o, _: Orders(o.forget, o.publish, [n + 1 for n in o.submit])), "out of order"),
    "all": (changed(lambda o, _: Orders(o.forget)), "never submitted"),
    "end": (
        lambda ahead, generations, first, in_flight: Schedule(ahead, generations + 1, first, in_flight),
        "for nothing|never",
    ),
    "forgotten": (changed(lambda o, _: Orders((), o.publish, o.submit)), "never forgotten"),
    "too early": (changed(early), "no such weights"),
}


@pytest.mark.parametrize(("broken", "words"), BROKEN.values(), ids=BROKEN)
def test_each_law_fails_when_it_is_broken(broken, words):
    def check_all():
        for one in schedules(500):
            check(*one, make=broken)

    with pytest.raises(AssertionError, match=words):
        check_all()
