"""What other systems lack (Windows: POSIX; MPS: numbers of 64 bits), and what light commands do without."""

import subprocess
import sys

import pytest

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.commands.arguments import COMMANDS
from grpo_ext.config.launch import planned_processes
from grpo_ext.recipe.parsing import load_recipe


def fresh(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()[-1]


HEAVY = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "vllm", "numpy")
TOLD_BY_CLI = [[name, "--help"] for name in COMMANDS]
LISTS = [["--help"], ["--version"], ["recipes"], ["losses"], ["rewards"], ["env"]]


def test_a_command_that_only_tells_loads_nothing_heavy():
    program = f"""
import sys
from grpo_ext.commands.cli import main
wrong = []
for argv in {[*LISTS, *TOLD_BY_CLI]!r}:
    try:
        main(argv)
    except SystemExit as end:
        heavy = [name for name in {HEAVY!r} if name in sys.modules]
        wrong += [(argv, end.code, heavy)] if end.code or heavy else []
print(wrong)
"""
    assert fresh(program) == "[]"


@pytest.mark.slow
def test_modules_of_posix_are_imported_where_they_are_needed():
    """All but the programs that run inside the sandbox, which is Linux's alone."""
    program = """
import builtins, importlib, pkgutil, grpo_ext

def without_posix(name, globals=None, *args, real=builtins.__import__, **named):
    if name in ("fcntl", "grp", "pwd", "resource", "termios") and (globals or {})["__name__"].startswith("grpo_ext"):
        raise ModuleNotFoundError(f"No module named {name!r}")
    return real(name, globals, *args, **named)

builtins.__import__ = without_posix
for module in pkgutil.walk_packages(grpo_ext.__path__, "grpo_ext."):
    if not module.name.endswith(("sandbox_child", "verifier_child", "vllm.engine")):  # the last needs an extra
        importlib.import_module(module.name)
print("all")
"""
    assert fresh(program) == "all"


def test_windows_has_no_reward_workers(monkeypatch):
    monkeypatch.setattr("grpo_ext.recipe.checks.sys.platform", "win32")
    with pytest.raises(ConfigError, match=r"^1 problem.*\n.*reward_workers=None: Windows .* Set reward_workers: 0"):
        load_recipe(["--config", "quickstart/grpo"])
    assert load_recipe(["--config", "quickstart/grpo", "--reward_workers", "0"]).script.reward_workers == 0


def test_mps_is_refused_for_want_of_float64(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    settings = {"report_to": "none", "bf16": False}
    with pytest.raises(ConfigError, match=r"^1 problem.*\n.*use_cpu=False: .* MPS, .* Set use_cpu: true"):
        GRPOExtConfig(**settings)
    GRPOExtConfig(**settings, use_cpu=True)
    with planned_processes(1):
        GRPOExtConfig(**settings)
