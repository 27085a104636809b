"""Scripts in forks of a process that has imported what they need: they start at once, where Python takes 8 seconds.

`forks.py DESCRIPTOR MODULE...` imports the modules, and forks for whoever asks at the other end of the socket.
"""

import atexit
import gc
import os
import socket
import subprocess
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(TESTS)

from support.becoming import ROOM, Origin, serve

GRACE = 20.0
"""Seconds that the others have to end once a fork has failed, as under a launcher."""
TRAINER = ("datasets", "peft", "transformers.trainer", "grpo_ext.trainer.grpo_trainer")  # the last without vLLM
WITH_DEEPSPEED = ("deepspeed", *TRAINER)
WITH_VLLM = (*TRAINER, "vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker", "support.forked_vllm")


class Fork(subprocess.Popen):
    """`python LINE` as a fork of a process that has imported some modules, in a session of its own.

    It ignores none of the signals that a shell may have the tests ignore.
    """

    def __init__(self, origin: Origin, line: list[str], environment: dict[str, str], folder: str, said: str) -> None:
        self.origin = origin
        with open(said, "ab") as output:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            super().__init__([sys.executable, *line], **pipes, env=environment, cwd=folder, start_new_session=True)

    def _execute_child(self, args, *rest):
        self.origin.execute(self, args[1:], rest, ignored=[])


def forks(*modules: str, **environment: str) -> Origin:
    """A process that has imported some modules, and forks; one for all tests of this process."""
    return started(modules, tuple(environment.items()))


@cache
def started(modules: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> Origin:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    line = [sys.executable, __file__, str(theirs.fileno()), *modules, ROOM]
    env = os.environ | dict(environment) | {"ROOM": ROOM}
    process = subprocess.Popen(line, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
    theirs.close()
    atexit.register(process.kill)
    return Origin(ours)


def exit_codes(ranks: list[Fork], patience: float) -> list[int]:
    """Negative for a signal; soon after one has failed, the others are killed."""
    until = time.monotonic() + patience
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            until = min(until, time.monotonic() + GRACE)
        if time.monotonic() >= until:
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    return codes


if __name__ == "__main__":
    os.dup2(2, 1)
    for module in sys.argv[2:-1]:
        import_module(module)
    gc.freeze()  # a collection in a fork would copy all of the memory
    serve(socket.socket(fileno=int(sys.argv[1])))
