"""Scripts in processes of their own: alone, or as two ranks on a CPU by accelerate."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

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


def machines(*command: str) -> None:
    """Run a script by two launchers on this host, each told that it is one of two machines (docs/launching.md)."""
    port, env = free_port(), os.environ | ENVIRONMENT
    launched = [
        subprocess.Popen(
            [
                *launcher(),
                *("--num_machines", "2", "--num_processes", "2", "--machine_rank", rank),
                *("--main_process_ip", "127.0.0.1", "--main_process_port", port),
                *command,
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [machine.communicate(timeout=PATIENCE)[0] for machine in launched]
    finally:
        for machine in launched:
            machine.kill()
    assert [machine.returncode for machine in launched] == [0, 0], "\n".join(text[-3000:] for text in said)
