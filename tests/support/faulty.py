"""Rewards that go wrong on the completion "bad" (on rank FAULT_RANK where that is set), each in its own way."""

import ctypes
import json
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time


def _is_bad(completion) -> bool:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    rank = os.environ.get("RANK", "0")
    return text.replace(" ", "") == "bad" and rank == os.environ.get("FAULT_RANK", rank)


def _on_bad(act):
    """A reward that gives 1.0, and for a bad completion what `act` does."""

    def reward(completions, **_):
        return [act() if _is_bad(completion) else 1.0 for completion in completions]

    reward.__name__ = act.__name__
    return reward


@_on_bad
def loop():
    while True:
        pass


@_on_bad
def choke():
    raise RuntimeError("the parser choked")


sleep = _on_bad(lambda: time.sleep(1e6))
hang = _on_bad(lambda: ctypes.PyDLL(None).sleep(100_000))  # in C, without giving the GIL back
leave = _on_bad(lambda: os._exit(1))
segfault = _on_bad(lambda: ctypes.string_at(0))
hog = _on_bad(lambda: float(len(bytearray(20 * 2**30))))
text = _on_bad(lambda: "seven")
nan = _on_bad(lambda: float("nan"))
inf = _on_bad(lambda: float("inf"))
none = _on_bad(lambda: None)


def short(completions, **_):
    """One value too few whenever a bad completion is there."""
    return [1.0 for completion in completions if not _is_bad(completion)]


def returns(completions, *, what: str, **_):
    """Whatever a user's function may return for two completions."""
    import numpy
    import torch

    return (RETURNED | MISSHAPEN)[what][0](numpy, torch)


CURE = "Return a finite number, or None where it cannot be scored"
LIST = "which is not a list. Return a list of one number or None per completion."
RETURNED = {
    "numpy": (lambda numpy, torch: numpy.array([1, 0.5], dtype="float32"), [1.0, 0.5], ""),
    "a tensor": (lambda numpy, torch: torch.tensor([1.0, 0.5]), [1.0, 0.5], ""),
    "tensors": (lambda numpy, torch: [torch.tensor(1.0), torch.tensor([0.5])], [1.0, 0.5], ""),
    "bools": (lambda numpy, torch: (True, numpy.False_), [1.0, 0.0], ""),
    "a generator": (lambda numpy, torch: (x for x in (1, None)), [1.0, None], ""),
    "text": (lambda numpy, torch: ["1.0", 0.5], [None, 0.5], f"it returned '1.0', which is not a number. {CURE}"),
    "a list": (lambda numpy, torch: [[1.0], 0.5], [None, 0.5], "which is not a number"),
    "nan": (lambda numpy, torch: [1.0, numpy.float64("nan")], [1.0, None], ""),
    "huge": (lambda numpy, torch: [10**400, 1], [None, 1.0], "int too large to convert to float"),
    "stubborn": (lambda numpy, torch: [Stubborn(), 1.0], [None, 1.0], "not a number"),
    "-inf": (lambda numpy, torch: [-float("inf"), 0.5], [None, 0.5], f"it returned -inf. {CURE}"),
}
"""Name -> what is returned, what it is worth, what the log says."""
MISSHAPEN = {
    "too many": (lambda numpy, torch: [1.0] * 3, "3 values for 2 completions. Return one number or None for each"),
    "too few": (lambda numpy, torch: [1.0], "1 values for 2 completions. Return one number or None for each"),
    "nothing": (lambda numpy, torch: None, f"it returned None, {LIST}"),
    "a number": (lambda numpy, torch: 1.0, f"it returned 1.0, {LIST}"),
    "one text": (lambda numpy, torch: "10", f"it returned '10', {LIST}"),
    "a mapping": (lambda numpy, torch: {"a": 1.0}, LIST),
    "a scalar": (lambda numpy, torch: torch.tensor(1.0), f"it returned tensor(1.), {LIST}"),
}
"""Name -> what is returned where one value per completion is due, what the error says."""

FAULTS = {
    "loop": ("timeout", "did not answer within"),
    "sleep": ("timeout", "did not answer within"),
    "hang": ("timeout", "did not answer within"),
    "choke": ("error", "the parser choked"),
    "leave": ("error", "exit code 1"),
    "segfault": ("error", "SIGSEGV"),
    "hog": ("error", "MemoryError"),
    "text": ("error", "'seven', which is not a number"),
    "inf": ("error", "returned inf"),
}
"""Name -> what it counts as, and what the log says of it."""


# Rewards that use what TRL's protocol offers.


def talkative(completions, log_extra, log_metric, trainer_state, **_):
    log_extra("length", [len(c) for c in completions])
    log_metric("longest", max(map(len, completions)))
    return [float(trainer_state.global_step)] * len(completions)


async def patient(completions, **_):
    import asyncio

    await asyncio.sleep(0.01)
    return [2.0] * len(completions)


def pid(completions, **_):
    return [float(os.getpid())] * len(completions)


def flaky(completions, *, marker: str, **_):
    """Fails the first time it is called."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        raise ConnectionError("try again")
    return [3.0] * len(completions)


def numbers(completions, number, **_):
    return [float(n) for n in number]


def letters(completions, **_):
    """A spread of ordinary values."""
    return [len(str(completion)) % 5 / 5 for completion in completions]


# Values that are no numbers, and say so loudly.


class Stubborn:
    """Neither a number nor a text."""

    def __float__(self):
        raise ValueError("only one element has a number")

    __repr__ = __float__


class Tree(Exception):
    """A column whose class cannot be rebuilt from its pickle."""

    def __init__(self, left, right):
        super().__init__(f"{left}{right}")


# Rewards that look at their columns, and that leave something behind.


def curious(completions, **columns):
    return [float(len(columns))] * len(completions)


def historic(completions, trainer_state, **_):
    return [trainer_state.log_history[-1]["loss"]] * len(completions)


def annotated(completions, log_extra, **_):
    log_extra("text", list(completions))
    return [1.0] * len(completions)


def doze(completions, big, **_):
    """Scores, and then stops its process for good."""
    if "stop" in completions:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return [float(len(text)) for text in big]


def litter(completions, **_):
    folder = tempfile.mkdtemp()
    open(os.path.join(folder, "file"), "w").close()
    os.chmod(folder, 0)
    time.sleep(1e6)


async def flaky_later(completions, *, marker: str, **columns):
    return flaky(completions, marker=marker, **columns)


async def choke_later(completions, **columns):
    return choke(completions, **columns)


# Rewards that compare the completions of a batch, and such as fail on a batch only.


def novelty(completions, **_):
    """1 / how often an answer occurs in the batch."""
    answers = [json.loads(completion) for completion in completions]
    return [1 / answers.count(answer) for answer in answers]


def crowded(completions, **_):
    if len(completions) > 1:
        raise RuntimeError("more than it can take")
    return [1.0]


# Rewards that raise what is not an Exception.

ERROR: BaseException = RuntimeError()


class Ending:
    def __float__(self):
        raise ERROR


def raises_in_call(completions, **_):
    raise ERROR


def raises_in_value(completions, **_):
    return [Ending() if _is_bad(completion) else 1.0 for completion in completions]


async def raises_in_coroutine(completions, **_):
    raise ERROR


# Rewards that write to the socket of their worker.


class Made:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def pickle_that_makes(path) -> bytes:
    """A pickle that creates a file where it is read."""
    return pickle.dumps(Made(path))


def forges(completions, *, body: bytes, **_):
    if any(map(_is_bad, completions)):
        os.write(int(sys.argv[1]), len(body).to_bytes(8, "little") + body)
        time.sleep(1e6)
    return [1.0] * len(completions)


def forks(completions, **_):
    """Come back twice, as after a careless `os.fork`."""
    os.fork()
    return [float(len(text)) for text in completions]


# Rewards that draw numbers, and that count their calls.


def draws(completions, **_):
    return [random.random() + random.choice([0, 1]) for _ in completions]


def draws_lazily(completions, **_):
    import numpy

    return numpy.random.rand(len(completions)).tolist()


_calls = 0


def counts(completions, **_):
    global _calls
    _calls += 1
    return [_calls] * len(completions)


def draws_alone(completions, **_):
    return [value + random.random() for value in crowded(completions)]
