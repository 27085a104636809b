"""Scripts in processes of their own: alone, or as two ranks on a CPU, by accelerate's launcher or as it does it."""

import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from support.forks import TRAINER, WITH_DEEPSPEED, Fork, exit_codes, forks

CONFIG = Path(__file__).parents[2] / "recipes" / "accelerate_configs" / "cpu_ddp.yaml"
PATIENCE = 1200
"""Seconds that a process may take: room for a machine three times slower than ours that is busy besides."""
DEEPSPEED = os.environ.get("GRPO_EXT_DEEPSPEED", "")
"""Folder in which only processes that train by it find DeepSpeed: others would import it wherever they could."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def on_cpu(name: str, folder: Path, *, processes: int = 2, **changed) -> Path:
    """A packaged launch configuration for CPU processes, with settings of its engine `changed`."""
    config = yaml.safe_load((CONFIG.parent / f"{name}.yaml").read_text())
    for section in ("fsdp_config", "deepspeed_config"):
        if section in config:
            config[section] |= changed
    zero = "deepspeed_config" in config  # which DS_ACCELERATOR tells of the CPU, and `use_cpu` would switch off
    path = folder / f"{name}_on_cpu.yaml"
    on = {"use_cpu": not zero, "mixed_precision": "no", "num_processes": processes}
    path.write_text(yaml.safe_dump(config | on))
    return path


def launcher(config: Path = CONFIG) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]


def run(command: list[str], **environment: str) -> str:
    env = os.environ | ENVIRONMENT | environment
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def rank_environments(config: Path) -> list[dict[str, str]]:
    """What `accelerate launch --config_file CONFIG` tells each process of one machine."""
    asked = ["--config_file", str(config), "--main_process_port", free_port(), "a script"]
    args, defaults, mixed = _validate_launch_command(launch_command_parser().parse_args(asked))
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *["mixed_precision"] * mixed]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, told = prepare_deepspeed_cmd_env(args)
    else:
        told = prepare_multi_gpu_env(args)
    count = str(args.num_processes)
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": args.master_port}
    told |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return [told | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(args.num_processes)]


def forked(
    *line: object,
    config: Path | None = None,
    modules: tuple[str, ...] = TRAINER,
    cwd: Path | str = ".",
    **environment: str,
) -> subprocess.CompletedProcess:
    """`python LINE` in a fork that has imported `modules`, or in one for each rank of a launch configuration.

    A configuration of DeepSpeed has forks of its own, for others would see what they have imported.
    """
    each = [os.environ] if config is None else rank_environments(config)
    zero = config is not None and "deepspeed_config" in config.read_text()
    told = with_deepspeed() if zero else {}
    origin = forks(*(WITH_DEEPSPEED if zero else modules), **told)
    with tempfile.NamedTemporaryFile("r") as said:
        start = partial(Fork, origin, list(map(str, line)), folder=os.path.abspath(cwd), said=said.name)
        codes = exit_codes([start(one | ENVIRONMENT | told | environment) for one in each], PATIENCE)
        return subprocess.CompletedProcess(line, next(filter(None, codes), 0), said.read(), "")


def run_forked(*line: object, **options) -> str:
    """As `forked`, of a run that must not fail; what it said."""
    done = forked(*line, **options)
    assert done.returncode == 0, done.stdout[-9000:]
    return done.stdout


def start_forked(
    line: list[str],
    said: Path,
    *,
    config: Path | None = None,
    modules: tuple[str, ...] = TRAINER,
    **environment: str,
) -> list[Fork]:
    """`python LINE` as a `Popen` for each rank of a launch configuration, for what watches or kills processes."""
    each = [os.environ] if config is None else rank_environments(config)
    return [Fork(forks(*modules), line, one | ENVIRONMENT | environment, os.getcwd(), str(said)) for one in each]


def with_deepspeed() -> dict[str, str]:
    """What processes need to train by DeepSpeed on a CPU: its folder, and ninja for its one compiled part."""
    path = [*([DEEPSPEED] if DEEPSPEED else []), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        "PATH": os.pathsep.join(programs),
    }


def has_deepspeed() -> bool:
    return (Path(DEEPSPEED) / "deepspeed").is_dir() if DEEPSPEED else find_spec("deepspeed") is not None


def needs_deepspeed(engine: str) -> None:
    """Skip the test of an engine of DeepSpeed where that is not installed, unless it is required."""
    if engine.startswith("zero") and not has_deepspeed():
        if os.environ.get("GRPO_EXT_REQUIRE_DEEPSPEED") == "1":
            pytest.fail("DeepSpeed is not installed, and is required here")
        pytest.skip("DeepSpeed is not installed")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def machines(folder: Path, *command: str) -> None:
    """Run a script by two launchers on this host, each told that it is one of two machines (docs/launching.md)."""
    two = *launcher()[1:], "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"
    port = "--main_process_port", free_port(), "--machine_rank"
    said = [folder / f"machine_{rank}" for rank in (0, 1)]
    launched = [start_forked([*two, *port, str(rank), *command], said[rank])[0] for rank in (0, 1)]
    try:
        codes = [machine.wait(PATIENCE) for machine in launched]
    finally:
        for machine in launched:
            machine.kill()
    assert codes == [0, 0], "\n".join(text.read_text()[-3000:] for text in said)
