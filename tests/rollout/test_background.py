"""A background thread works on requests in their order, and every one of them ends."""

import threading
import time

import pytest

from grpo_ext.rollout.background import Background, Closed
from grpo_ext.trainer.rollout_worker import Asked, BackgroundWorker


def test_requests_end_in_their_order():
    done = []
    background = Background(lambda number: done.append(number) or 10 * number)
    futures = [background.submit(number) for number in range(50)]
    assert [future.result(10) for future in futures] == [10 * number for number in range(50)]
    assert done == list(range(50))
    background.close()


def test_a_failure_is_that_of_its_request_and_the_next_is_worked_on():
    background = Background(lambda number: 1 / number)
    failing, sound = background.submit(0), background.submit(2)
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    assert sound.result(10) == 0.5
    background.close()


def test_waiting_ends_when_all_requests_have_ended_also_by_failure():
    begin, done = threading.Event(), []

    def work(number):
        begin.wait(10)
        done.append(number)
        raise ValueError(number)

    background = Background(work)
    for number in range(3):
        background.submit(number)
    threading.Timer(0.05, begin.set).start()
    background.wait()
    assert done == [0, 1, 2]
    background.close()


def test_closing_ends_the_request_in_work_and_fails_those_behind_it():
    begun, end = threading.Event(), threading.Event()

    def work(number):
        begun.set()
        end.wait(10)
        return number

    background = Background(work)
    first, second = background.submit(1), background.submit(2)
    begun.wait(10)
    threading.Timer(0.05, end.set).start()
    background.close()
    assert first.result(10) == 1
    for behind in (second, background.submit(3)):
        with pytest.raises(Closed):
            behind.result(10)


def test_closing_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("grpo_ext.rollout.background.LAST_SECONDS", 0.1)
    end = threading.Event()
    background = Background(lambda _: end.wait(30))
    background.submit(None)
    began = time.monotonic()
    background.close()
    assert time.monotonic() - began < 5
    end.set()


def test_generations_that_have_not_begun_fail_when_the_background_is_closed():
    begun, end = threading.Event(), threading.Event()

    class Waiting:
        def complete(self, request):
            begun.set()
            end.wait(10)
            raise ValueError("of the sampler")

        def score(self, columns):
            pytest.fail("there is nothing to score")

    background = BackgroundWorker(Waiting())
    submitted = [background.submit(Asked(request, None)) for request in "ab"]
    begun.wait(10)
    background.stop()
    end.set()
    background.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "grpo_ext background"]
    for future in (future for its in submitted for future in its):
        with pytest.raises((ValueError, Closed)):
            future.result(1)
