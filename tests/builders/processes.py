"""Scripts in processes of their own: alone, or as two ranks on a CPU by accelerate."""

import os
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "recipes" / "accelerate_configs" / "cpu_ddp.yaml"
PATIENCE = 1200
"""Seconds that a process may take: room for a machine three times slower than ours that is busy besides."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def launcher(config: Path = CONFIG) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]


def run(command: list[str], **environment: str) -> str:
    env = os.environ | ENVIRONMENT | environment
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr
