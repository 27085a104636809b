"""vLLM is imported when an engine is made, also by a stock trainer of the same process, and not before."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from support.processes import PATIENCE

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
UNUSED = "import sys, grpo_ext.train; print('vllm' in sys.modules)"
STOCK = """
import sys
from grpo_ext import GRPOExtTrainer
from trl.trainer import grpo_trainer
print("vllm" in sys.modules)
try:
    grpo_trainer.VLLMGeneration()
except TypeError:  # of its arguments
    from trl.generation import VLLMGeneration, vllm_generation
    print(vllm_generation.LLM.__module__, VLLMGeneration.__module__)
"""


@needs_vllm
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (UNUSED, ["False"]),
        pytest.param(
            STOCK, ["False", "vllm.entrypoints.llm", "trl.generation.vllm_generation"], marks=pytest.mark.slow
        ),
    ],
    ids=["unused", "stock"],
)
def test_vllm_is_imported_when_an_engine_is_made(code, printed):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert run.stdout.split() == printed
