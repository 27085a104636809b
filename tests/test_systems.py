"""What other systems lack (Windows: POSIX; Apple's GPU: numbers of 64 bits), and what light commands do without."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.commands.arguments import COMMANDS
from grpo_ext.recipe.parsing import load_recipe
from support import tiny
from support.trainers import build


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


def test_apples_gpu_is_not_refused(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert not GRPOExtConfig(report_to="none", bf16=False).use_cpu


class Wide(TorchDispatchMode):
    """Notes operations that return float64."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.found |= {function for x in tree_leaves(result) if getattr(x, "dtype", None) == torch.float64}
        return result


@pytest.mark.parametrize("widest", [torch.float64, torch.float32])
def test_the_device_computes_in_no_wider_numbers_than_it_has(widest, tmp_path, monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith("grpo_ext") and "widest" in vars(module):
            monkeypatch.setattr(module, "widest", lambda device: widest)
    trainer = build(tiny.model(), tmp_path, max_steps=3, num_iterations=2, beta=0.1, evaluated=tiny.prompts(4))
    wide = Wide()

    def watched(function):
        def inside(*args, **kwargs):
            with wide:
                return function(*args, **kwargs)

        return inside

    for of, name in ((trainer, "_compute_loss"), (trainer, "_logps"), (trainer.collector.policy, "sample")):
        monkeypatch.setattr(of, name, watched(getattr(of, name)))
    trainer.train()
    trainer.evaluate()
    of_rows = {x.dtype for x in tree_leaves(trainer._generation.micro_batches) if torch.is_tensor(x)}
    assert bool(wide.found) is (torch.float64 in of_rows) is (widest == torch.float64)
