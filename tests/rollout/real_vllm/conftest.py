"""All tests here are marked `vllm`."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from support import tiny
from support.vllm_runs import HEADS, Server


def pytest_itemcollected(item):
    item.add_marker("vllm")


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True, **HEADS)


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False, **HEADS)


@pytest.fixture(scope="module")  # a later file of the same worker may count its processes
def served(tmp_path_factory, tied, request):
    real = getattr(request.module, "REAL_COMMAND", False)
    server = Server(tmp_path_factory.mktemp("server"), tied, forked=not real)
    server.start()
    server.wait()
    yield server
    assert server.stop() == 0
    assert "Stopping vLLM" in server.log.read_text()
    assert not server.engine_processes_alive()
