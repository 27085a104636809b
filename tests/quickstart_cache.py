"""Processes of tests that train the quickstart model share one copy of it: built once, kept for the next session."""

import os
import tempfile
from pathlib import Path


def environment() -> dict[str, str]:
    """Environment of such a process, without what would lead it to this checkout."""
    folder = Path(tempfile.gettempdir()) / f"grpo-ext-tests-{os.getuid()}"
    env = {"GRPO_EXT_CACHE": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    env.pop("PYTHONPATH", None)
    return env
