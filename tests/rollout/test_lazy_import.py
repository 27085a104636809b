"""vLLM is imported when an engine is made, also by a stock trainer of the same process, and not before."""

import subprocess
import sys

import pytest

from support.processes import PATIENCE

PROGRAM = """
import sys
from grpo_ext.commands.cli import run
code = run(["check", "--config", "quickstart/grpo", "--use_vllm", "true"])
print("checked", code, "vllm" in sys.modules, "trl.trainer.grpo_trainer" in sys.modules)
import grpo_ext.train
from grpo_ext import GRPOExtTrainer
from trl.trainer import grpo_trainer
print("imported", "vllm" in sys.modules)
try:
    grpo_trainer.VLLMGeneration()
except TypeError:  # of its arguments
    from trl.generation import VLLMGeneration, vllm_generation
    print("made", vllm_generation.LLM.__module__, VLLMGeneration.__module__)
"""


@pytest.mark.vllm
def test_vllm_is_imported_when_an_engine_is_made():
    """A check of a recipe imports no trainer either."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=True)
    said = [line for line in run.stdout.splitlines() if line.startswith(("checked", "imported", "made"))]
    assert said == [
        "checked 0 False False",
        "imported False",
        "made vllm.entrypoints.llm trl.generation.vllm_generation",
    ]
