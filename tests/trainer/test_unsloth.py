"""unsloth replaces the classes that ours derive from: refused with the reason, whichever is imported first."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from grpo_ext.errors import ConfigError
from support import tiny, unsloth_stand_in
from support.trainers import build, unit_interval

AFTER = """
import sys, warnings
sys.path.insert(0, {tests!r})
from support import unsloth_stand_in
unsloth_stand_in.install()
from grpo_ext import ConfigError, GRPOExtTrainer
assert "UnslothGRPOTrainer" in [kind.__name__ for kind in GRPOExtTrainer.__mro__]
from support import tiny
from support.trainers import build, unit_interval
try:
    build(tiny.model(), {folder!r}, [unit_interval])
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (unsloth_stand_in.replace_classes, r"unsloth=.imported.: it has replaced trl.GRPOTrainer, trl.GRPOConfig"),
        (unsloth_stand_in.replace_methods, r"it has replaced Trainer.__init__, Trainer._inner_training_loop"),
        (lambda put: unsloth_stand_in.replace_forward(LlamaForCausalLM, put), "LlamaForCausalLM.forward"),
    ],
    ids=["classes", "methods", "forward"],
)
def test_imported_later_it_is_refused(replace, words, monkeypatch, tmp_path):
    replace(monkeypatch.setattr)
    with pytest.raises(ConfigError, match=words) as refused:
        build(tiny.model(), tmp_path, [unit_interval])
    assert "Do not import unsloth in this process" in str(refused.value)


@pytest.mark.slow
def test_imported_before_it_is_refused(tmp_path):
    code = AFTER.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "unsloth='imported': it has replaced trl.GRPOTrainer, trl.GRPOConfig" in done.stdout, done.stderr[-2000:]
