"""vLLM is imported when an engine is made, also one of stock TRL's, and no sooner."""

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
from trl.generation import VLLMGeneration, vllm_generation
try:
    VLLMGeneration()
except TypeError:  # of its arguments
    print("vllm" in sys.modules, vllm_generation.LLM.__module__)
"""


def printed(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout.split()


@needs_vllm
def test_a_run_without_an_engine_imports_no_vllm():
    assert printed(UNUSED) == ["False"]


@needs_vllm
@pytest.mark.slow
def test_an_engine_of_stock_trls_finds_it():
    assert printed(STOCK) == ["True", "vllm.entrypoints.llm"]
