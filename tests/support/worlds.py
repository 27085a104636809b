"""Environments for tests: of both protocols, sound and with every fault; imported by path in their own processes."""

import ctypes
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from grpo_ext.environments.protocol import Conversation, Step

_RUN = [os.environ.get(name, "") for name in ("PYTEST_XDIST_TESTRUNUID", "PYTEST_XDIST_WORKER")]
LITTER = f"3599.{zlib.crc32(''.join(_RUN).encode())}"
"""Seconds that a process which is left behind sleeps; by them it is known among those of other runs."""

FAULTS = {
    "raises in reset": "raised",
    "raises in step": "raised",
    "leaves": "raised",
    "hangs": "timeout",
    "is killed": "died",
    "is killed by a signal without a name": "died",
    "exits": "died",
    "segfaults": "died",
    "eats memory": "raised",
    "says nothing known": "garbage",
    "says what is no text": "garbage",
    "pays no number": "garbage",
    "pays beyond all bounds": "garbage",
    "says too much": "garbage",
    "writes over its line": "garbage",
    "closes its line": "died",
    "leaves processes behind": "died",
    "forks itself": "died",
}
"""Each kind of fault, and the kind of failure that it is told as."""


class Faulty(Conversation):
    """Answers with a random number; in its second turn it does what the row's column `fault` says."""

    def reset(self, row):
        self.fault, self.turns = row["fault"], 0
        if self.fault == "raises in reset":
            raise RuntimeError("no world")

    def step(self, message):
        self.turns += 1
        if self.turns == 2 and self.fault:
            return self._fail()
        return Step(f"{self.turns}{random.randrange(10)}", 0.25, self.turns == 3)

    def _fail(self):
        if self.fault == "raises in step":
            raise RuntimeError("the world ended")
        if self.fault == "leaves":
            sys.exit(3)
        if self.fault == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        if self.fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "is killed by a signal without a name":
            os.kill(os.getpid(), signal.SIGRTMIN + 3)
        if self.fault == "exits":
            os._exit(3)
        if self.fault == "segfaults":
            ctypes.string_at(0)
        if self.fault == "eats memory":
            bytearray(64 << 30)
        if self.fault == "says too much":
            return Step("x" * 2**21)
        if self.fault == "says what is no text":
            return Step(b"\xff\xfe")
        if self.fault == "pays no number":
            return Step("a", float("nan"))
        if self.fault == "pays beyond all bounds":
            return Step("a", 10**400)
        if self.fault == "writes over its line":
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"\x04\0\0\0\0\0\0\0nope")
                except OSError:
                    continue
            time.sleep(3600)
        if self.fault == "closes its line":
            os.closerange(3, 64)
            time.sleep(3600)
        if self.fault == "leaves processes behind":
            subprocess.Popen(["setsid", "sh", "-c", f"setsid sleep {LITTER} & exec sleep {LITTER}"])
            time.sleep(0.2)
            os._exit(0)
        if self.fault == "forks itself":
            for _ in range(3):
                if not os.fork():
                    time.sleep(3600)
            os._exit(0)
        return 7


class FaultyOnTheSecond(Faulty):
    """On one of two processes, from its first turn on."""

    def reset(self, row):
        super().reset({"fault": row["fault"] if os.environ["RANK"] == "1" else None})
        self.turns = 1


class Slow(Conversation):
    """Takes as long as the row's `seconds`, one for each turn."""

    def reset(self, row):
        self.seconds = list(row["seconds"])

    def step(self, message):
        time.sleep(self.seconds.pop(0))
        return Step("on", 1.0, not self.seconds)


class Twin(Conversation):
    """Forks in its first turn, and both return from it."""

    def reset(self, row):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        if self.turns == 1:
            os.fork()
        return Step("on", 1.0, self.turns == 2)


class NeverLoaded(Slow):
    """What its episodes share never comes."""

    @classmethod
    def preload(cls):
        time.sleep(3600)


class KilledWhileImported(Slow):
    """Ends the process that its processes are forked from, with the signal of a machine that is out of memory."""

    @classmethod
    def preload(cls):
        os.kill(os.getpid(), signal.SIGKILL)


class Says(Conversation):
    """Answers what the row says."""

    def reset(self, row):
        self.row = row

    def step(self, message):
        return Step(self.row["observation"], afresh=self.row["afresh"])


class Wordy(Conversation):
    """Pays the number of its words."""

    def __init__(self, words):
        self.words = words

    def step(self, message):
        return Step(None, float(len(self.words)), True)


class Litters(Conversation):
    """Leaves a temporary file, and says where."""

    def step(self, message):
        return Step(tempfile.mkstemp()[1], 1.0, True)


class Crowded(Slow):
    """No second process can be forked where its processes are forked from."""

    @classmethod
    def preload(cls):
        fork, numbers = os.fork, itertools.count()

        def refused():
            if next(numbers) == 1:
                raise BlockingIOError("no more processes")
            return fork()

        os.fork = refused


class Meets(Conversation):
    """Waits in its first turn until `count` have arrived in `folder`, where it does itself in the turn `arrives`."""

    def reset(self, row):
        self.turn, self.row = 0, row

    def step(self, message):
        folder = Path(self.row["folder"])
        self.turn += 1
        if self.turn == self.row["arrives"]:
            (folder / str(self.row["place"])).touch()
        while self.turn == 1 and len(list(folder.iterdir())) < self.row["count"]:
            time.sleep(0.01)
        return Step("on", 1.0, self.turn == self.row["turns"])


class Counter:
    """TRL's protocol: methods are tools."""

    def reset(self, start=0, **row):
        self.count = start
        return f" from {start}"

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: What is added.
        """
        if number < 0:
            raise ValueError("only upwards")
        self.count += number
        return self.count

    async def look(self) -> str:
        """Look at the count."""
        return f"it is {self.count}"

    def get_reward(self):
        return float(self.count)


class Solved(Counter):
    """Its reset wants a column."""

    def reset(self, solution, **row):
        self.count = 0


class Strict(Counter):
    """Its reset takes no further columns."""

    def reset(self):
        self.count = 0


class Mute:
    def reset(self, **row):
        pass


class NoReset:
    def shout(self) -> str:
        """Shout."""
        return "!"


class NoStep(Conversation):
    pass


class NoDocstring(Mute):
    def shout(self, word: str) -> str:
        return word


class NoHint(Mute):
    def shout(self, word) -> str:
        """Shout.

        Args:
            word: What.
        """
        return word


def add(number: int) -> int:
    """Add one.

    Args:
        number: To what.
    """
    return number + 1


class HangsOnce(Conversation):
    """Two messages; the game that HANGS_IN_GAME counts ends the run and hangs, the first time."""

    def reset(self, row):
        self.left, sign = 2, os.environ["GAMES_BEGUN"]
        with open(sign, "ab") as file:
            file.write(b".")
        if os.path.getsize(sign) >= int(os.environ.get("HANGS_IN_GAME", 1e9)) and not os.path.exists(f"{sign}.hung"):
            Path(f"{sign}.hung").touch()
            os.kill(int(os.environ["TRAINER"]), signal.SIGTERM)
            time.sleep(120)

    def step(self, message):
        self.left -= 1
        return Step("on", len(message["content"]) % 7 / 7, not self.left)
