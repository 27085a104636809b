"""Shared by all tests: one thread, no hub, shapes checked at call time, and a tiny real model."""

import functools
import os
from importlib import metadata

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
metadata.metadata, metadata.version = map(
    functools.cache, (metadata.metadata, metadata.version)
)  # read by each trainer

from jaxtyping import install_import_hook

install_import_hook(["grpo_ext.registry", "grpo_ext.objective"], "beartype.beartype")

import gc
import signal
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support.extras import OnlyTestExtra, need

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background jobs, and their children, ignore it
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

ROOT = Path(__file__).parent.parent
LONGEST = ("real_vllm/test_server_death", "commands/test_stopping", "real_vllm/test_server", "trainer/test_ahead")
LONGEST += ("distributed/test_splits", "real_vllm/test_environments", "real_vllm/test_colocate", "test_resume_on_two")
"""Ends of the files that take minutes, the longest first."""


def pytest_addoption(parser):
    parser.addoption("--only-test-extra", action="store_true", help="hide what `make test` does not install")
    parser.addoption("--done", type=Path, help="leave out the tests that this file names, and add those that pass")


def pytest_configure(config):
    if config.getoption("only_test_extra"):
        OnlyTestExtra.install()
    # third-party noise that "warnings as errors" must not trip over
    for message in (
        "ignore:.*gradient_checkpointing.*deprecated:FutureWarning",
        "ignore:.*pin_memory.*:UserWarning",
        "ignore:Could not find a config file:UserWarning",  # peft 0.20, of a model that has no name
        "ignore::DeprecationWarning",
        "ignore:.*lr_scheduler.step.*:UserWarning",
        "ignore::ResourceWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ):
        config.addinivalue_line("filterwarnings", message)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Of a function marked `cases(n)` n cases, evenly spread, are quick; the others are slow."""
    made = yield
    for marker in getattr(obj, "pytestmark", ()) if isinstance(made, list) else ():
        if marker.name == "cases":
            [kept] = marker.args
            quick = {round(i * (len(made) - 1) / max(1, kept - 1)) for i in range(kept)}
            for item in (item for i, item in enumerate(made) if i not in quick):
                item.add_marker("slow")
                item.add_marker("further")
    return made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Files with long tests first, so that no process is left with one of them when the others have nothing to do."""
    if (done := config.getoption("done")) and done.exists():
        known = {*done.read_text().splitlines()}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
        items[:] = [item for item in items if item.nodeid not in known]
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("vllm")}
    tests = Counter(item.path for item in items)

    def place(path: Path) -> int:
        return next((i for i, end in enumerate(LONGEST) if str(path).endswith(f"{end}.py")), len(LONGEST))

    items.sort(key=lambda item: (place(item.path), item.path not in long, -tests[item.path], item.path))


def pytest_runtest_setup(item):
    if item.get_closest_marker("vllm") and find_spec("vllm") is None and not os.environ.get("GRPO_EXT_REQUIRE_VLLM"):
        pytest.skip("vLLM is not installed: make install-vllm installs its CPU build")
    for marker in item.iter_markers("extra"):
        need(*marker.args)


PASSED: list[str] = []


def pytest_sessionfinish(session):
    if (done := session.config.getoption("done")) and "PYTEST_XDIST_WORKER" not in os.environ:
        with done.open("a") as file:
            file.writelines(f"{name}\n" for name in PASSED)


def pytest_runtest_logreport(report):
    """A failure is told at once: a run that is cut off never comes to its summary."""
    if report.passed and report.when == "call":
        PASSED.append(report.nodeid)
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}", flush=True)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Each training collects garbage, which takes a quarter of a second until what was imported is set aside."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet_logging():
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*")


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder of GSM8K, which a checkout may have beside it."""
    for parent in ROOT.parents:
        folder = parent / "shared" / "data" / "gsm8k"
        if folder.exists():
            return folder
    pytest.skip("GSM8K is not beside this checkout")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> str:
    """Folder of a tiny model that answers at random."""
    from support import tiny

    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory) -> str:
    """The quickstart's model, hardly warmed up."""
    from grpo_ext.quickstart.model import ensure_model

    return str(ensure_model(directory=tmp_path_factory.mktemp("cache"), steps=2))


@pytest.fixture
def few_rows(monkeypatch):
    """Let `quickstart/addition` have 64 rows in this process, where it has 7,979."""
    from grpo_ext.quickstart import task

    load = task.load

    @functools.wraps(load)
    def few(**options):
        return load(**{"size": 64, "eval_size": 16} | options)

    monkeypatch.setattr(task, "load", few)


@pytest.fixture
def forked_samplers():
    """The processes that sample completions are forks, which start at once."""
    from support.forks import TRAINER, forks

    undo = forks(*TRAINER).start_python(lambda line: line[0] == "-c")
    yield
    undo()


@pytest.fixture
def runtime():
    """Makes rewards ready to score, and ends their workers."""
    from grpo_ext.rewards.runtime import Runtime

    opened = []

    def make(*specs, workers=2, **settings):
        opened.append(Runtime(specs, workers=workers, **settings))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
