"""How many processes there are, which one this is, and whether as many came as were asked for."""

import itertools
import os
import subprocess
import sys

import pytest
from accelerate.utils.environment import get_cpu_distributed_information

from grpo_ext.config import launch
from grpo_ext.errors import ConfigError
from support.processes import ENVIRONMENT

LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "Intel MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "MVAPICH": (
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher has left a word in the environment."""
    for name in (*itertools.chain(*LAUNCHERS.values()), launch.ASKED, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def seen() -> tuple[int, int, int, int | None]:
    return launch.world_size(), launch.rank(), launch.local_world_size(), launch.local_rank()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_understood(launcher, monkeypatch):
    for name, value in zip(LAUNCHERS[launcher], "6523", strict=True):
        monkeypatch.setenv(name, value)
    assert seen() == (6, 5, 2, 3)


def test_a_process_alone_is_the_first_of_one():
    assert seen() == (1, 0, 1, None)


@pytest.mark.parametrize("first", LAUNCHERS)
@pytest.mark.parametrize("second", LAUNCHERS)
def test_launchers_one_inside_the_other_are_read_as_accelerate_does(first, second, monkeypatch):
    for number, names in enumerate((LAUNCHERS[first], LAUNCHERS[second])):
        for name in names:
            monkeypatch.setenv(name, str(3 + number))
    theirs = get_cpu_distributed_information()
    assert seen() == (theirs.world_size, theirs.rank, theirs.local_world_size, theirs.local_rank)


@pytest.mark.parametrize(("asked", "came"), [("2", "1"), ("2", "4"), ("1", "2")])
def test_processes_that_did_not_come_are_told_with_their_number(asked, came, monkeypatch):
    monkeypatch.setenv(launch.ASKED, asked)
    monkeypatch.setenv("WORLD_SIZE", came)
    with pytest.raises(ConfigError, match=rf"num_processes={asked}: the launch has {came}.* --accelerate_config"):
        launch.check_announced()
    monkeypatch.setenv("WORLD_SIZE", asked)
    launch.check_announced()


def test_processes_that_train_apart_are_refused(monkeypatch):
    """As those of mpirun on GPUs, which accelerate does not join."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="num_processes=4: the environment announces them, but 1 train together"):
        launch.check_joined(1)
    launch.check_joined(4)


def python(program: str, *launcher: str, **environment: str) -> subprocess.Popen:
    env = os.environ | ENVIRONMENT | environment
    return subprocess.Popen([*launcher, program], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "address", "refused"), [("2", None, True), ("1", "10.0.0.1", False)])
def test_accelerate_that_started_one_of_two_is_caught(processes, address, refused, tmp_path):
    """`accelerate launch --cpu` starts one, however many are asked for; the user's own address says nothing."""
    script = tmp_path / "check.py"
    script.write_text("from grpo_ext.config.launch import check_announced\ncheck_announced()\nprint('alone, rightly')")
    cluster = {} if address is None else {"MASTER_ADDR": address, "MASTER_PORT": "1234"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", processes]
    out, _ = python(str(script), *command, **cluster).communicate(timeout=300)
    assert ("accelerate launch was asked for several and started one" in out) == refused
    assert ("alone, rightly" in out) != refused


@pytest.mark.slow
def test_processes_of_mpi_plan_the_batch_of_them_all():
    program = """
from accelerate import PartialState
from grpo_ext import GRPOExtConfig
config = GRPOExtConfig(use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=4, num_generations=8)
print(f"{config.generation_batch_size} of {PartialState().num_processes}")
PartialState().wait_for_everyone()  # one that leaves early breaks the other's connection
PartialState().destroy_process_group()
"""
    from torch.distributed import TCPStore

    port = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # free again when it is let go of
    names = LAUNCHERS["Open MPI"]
    two = [
        dict(zip(names, ("2", str(rank), "2", str(rank)), strict=True))
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(2)
    ]
    running = [python(program, sys.executable, "-c", **environment) for environment in two]
    for process in running:
        out, _ = process.communicate(timeout=300)
        assert "8 of 2" in out, out
