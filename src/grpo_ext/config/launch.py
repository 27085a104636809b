"""The number of processes of this launch, or of one that is only planned, and whether all were started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from grpo_ext.errors import ABSENT, ConfigError, Problem

ASKED = "GRPO_EXT_NUM_PROCESSES"
"""Environment variable with the number of processes that `grpo-ext train` asked the launcher for."""

EXIT_CODE_FILE = "GRPO_EXT_EXIT_CODE_FILE"
"""Environment variable with the file in which a launched process leaves its exit code for `grpo-ext train`."""

COMMAND = "GRPO_EXT_COMMAND"
"""Environment variable with the pid of the `grpo-ext train` that started the launcher."""


def write_exit_code(code: int, *, first: bool = False) -> None:
    """Write this process's exit code for `grpo-ext train`: a launcher's own is always 1.

    With `first` a code that is there already stays.
    """
    if EXIT_CODE_FILE in os.environ:
        file = Path(os.environ[EXIT_CODE_FILE])
        with suppress(OSError):  # the command, and its temporary folder, may be gone
            if not (first and file.exists()):
                file.write_text(str(code))


_PLANNED: ContextVar[int | None] = ContextVar("planned processes", default=None)  # None: this launch is not planned
_ELSEWHERE: ContextVar[bool] = ContextVar("planned for another machine", default=False)


@contextmanager
def planned_processes(count: int | None, *, here: bool = False) -> Iterator[None]:
    """Check and plan for a launch of `count` processes (None: of this one's), on another machine unless `here`."""
    tokens = _PLANNED.set(count or world_size()), _ELSEWHERE.set(not here)
    try:
        yield
    finally:
        _PLANNED.reset(tokens[0])
        _ELSEWHERE.reset(tokens[1])


def planning() -> bool:
    """Return whether a launch is only being planned."""
    return _PLANNED.get() is not None


def elsewhere() -> bool:
    """Return whether the launch being planned is another machine's."""
    return _ELSEWHERE.get()


def world_size() -> int:
    """Return the processes of this launch, as torchrun, accelerate or MPI announce them, or of the planned one."""
    return _PLANNED.get() or _announced("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE") or 1


def rank() -> int:
    """Return the rank of this process in the launch."""
    return _announced("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK") or 0


def local_rank() -> int | None:
    """Return the rank of this process on its machine; None where it is not announced."""
    return _announced("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def local_world_size() -> int:
    """Return the number of processes of this launch on this machine."""
    names = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
    return _announced(*names) or 1


def _announced(*names: str) -> int | None:
    """Return the first of the variables that holds a number: torchrun's, then MPI's, in accelerate's order."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)


_CURE = (
    "Use a launch that starts them: --accelerate_config cpu_ddp on a CPU, ddp on GPUs (or torchrun "
    "--nproc_per_node), or ask for the number that is started."
)


def check_announced() -> None:
    """Refuse a launch that has not started the processes that were asked for.

    Raises:
        ConfigError: fewer or more than `grpo-ext train` or `accelerate launch` was asked for.
    """
    announced, started = os.environ.get(ASKED), world_size()
    if announced is not None and announced != str(started):
        reason = f"the launch has {started}, and would train another batch"
        raise ConfigError([Problem("num_processes", int(announced), reason, _CURE)])
    if started == 1 and _lost_by_accelerate():
        reason = "accelerate launch was asked for several and started one, as it does without GPUs"
        raise ConfigError([Problem("num_processes", ABSENT, reason, _CURE)])


def _lost_by_accelerate() -> bool:
    """Return whether `accelerate launch` gave this process an address to meet others at, but started only it."""
    if not os.environ.keys() >= {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}:
        return False
    import psutil  # here, because reward workers import this module and start often

    with suppress(psutil.Error):  # the parent's environment has the address if it is the user's
        return "MASTER_ADDR" not in psutil.Process(os.getppid()).environ()
    return False


def check_joined(count: int) -> None:
    """Refuse processes that were announced but train separately, such as those of mpirun on GPUs.

    Raises:
        ConfigError: `count`, the processes that train together, is not `world_size()`.
    """
    if count != world_size():
        reason = f"the environment announces them, but {count} train together"
        raise ConfigError([Problem("num_processes", world_size(), reason, _CURE)])
