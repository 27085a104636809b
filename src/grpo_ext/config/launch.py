"""Processes of this launch, or of one that is only planned; and whether as many came as were asked for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from grpo_ext.errors import ConfigError

ASKED = "GRPO_EXT_NUM_PROCESSES"
"""Environment variable by which `grpo-ext train` tells the processes that it starts how many they should be."""

EXIT_CODE_FILE = "GRPO_EXT_EXIT_CODE_FILE"
"""Environment variable by which `grpo-ext train` learns with what code a process ended that a launcher started."""

COMMAND = "GRPO_EXT_COMMAND"
"""Environment variable that holds the pid of the `grpo-ext train` that started the launcher."""


def write_exit_code(code: int) -> None:
    """Write the code that this process ends with for `grpo-ext train`: a launcher's own is always 1."""
    if EXIT_CODE_FILE in os.environ:
        with suppress(OSError):  # the command, and its temporary folder, may be gone
            Path(os.environ[EXIT_CODE_FILE]).write_text(str(code))


_PLANNED: ContextVar[int | None] = ContextVar("planned processes", default=None)  # None: this launch is no plan
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
    """Whether a launch is only being planned."""
    return _PLANNED.get() is not None


def elsewhere() -> bool:
    """Whether the launch being planned is another machine's."""
    return _ELSEWHERE.get()


def world_size() -> int:
    """Processes of this launch, as torchrun, accelerate or MPI announce them, or of the one being planned."""
    return _PLANNED.get() or _announced("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE") or 1


def rank() -> int:
    """This process among all of the launch."""
    return _announced("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK") or 0


def local_rank() -> int | None:
    """This process among those of its machine; None where nobody says."""
    return _announced("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


def local_world_size() -> int:
    """Processes of this launch on this machine."""
    names = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
    return _announced(*names) or 1


def _announced(*names: str) -> int | None:
    """The first of the variables that holds a number: torchrun's, then those of MPI, in accelerate's order."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)


_CURE = (
    "Name a launch that starts them: --accelerate_config cpu_ddp on a CPU, ddp on GPUs (or torchrun "
    "--nproc_per_node), or ask for the number that comes."
)


def check_announced() -> None:
    """Refuse a launch whose processes did not come.

    Raises:
        ConfigError: fewer or more than `grpo-ext train`, or than `accelerate launch`, was asked for.
    """
    asked, came = os.environ.get(ASKED), world_size()
    if asked is not None and asked != str(came):
        raise ConfigError([f"num_processes={asked}: the launch has {came}, and would train another batch. {_CURE}"])
    if came == 1 and _lost_by_accelerate():
        raise ConfigError(
            [f"num_processes: accelerate launch was asked for several, and started one, as without GPUs. {_CURE}"]
        )


def _lost_by_accelerate() -> bool:
    """Whether `accelerate launch` gave this process the address at which several meet, but started it alone."""
    if not os.environ.keys() >= {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}:
        return False
    import psutil  # here, because reward workers import this module and start often

    with suppress(psutil.Error):  # whose environment says whether the address is accelerate's or the user's
        return "MASTER_ADDR" not in psutil.Process(os.getppid()).environ()
    return False


def check_joined(count: int) -> None:
    """Refuse processes that were announced but train each by itself, such as those of mpirun on GPUs.

    Raises:
        ConfigError: `count`, the processes that train together, is not `world_size()`.
    """
    if count != world_size():
        raise ConfigError([f"num_processes={world_size()} by the environment, but {count} train together. {_CURE}"])
