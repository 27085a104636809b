"""A launched process whose quickstart model is hardly warmed up: `hardly_warm.py MODULE [ARGS]` runs the module."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from grpo_ext.quickstart.model import ADDITION_MODEL, LESSONS
from support.fsdp_on_cpu import make_fsdp_real

if __name__ == "__main__":
    LESSONS[ADDITION_MODEL] = LESSONS[ADDITION_MODEL]._replace(steps=2)
    make_fsdp_real()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
