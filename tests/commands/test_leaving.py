"""A signal while a reward or an environment does not answer: the last whole step is saved, and nothing is lost."""

import json
import os
import time

import pytest
import yaml

from grpo_ext.environments import loop
from grpo_ext.errors import RunInterrupted
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rewards.workers import pool
from grpo_ext.train import train
from support import interrupted, tiny

MOST = 60
"""Seconds until a run has ended, on a busy machine; what hangs does so for 120."""


KINDS = {
    "a reward": {"reward_funcs": [{"func": "support.slow_rewards:hangs_once", "isolate": True}]},
    "an environment": {
        "environments": [{"path": "support.worlds:HangsOnce"}],
        "environment_waves": "turn",
        "reward_funcs": [{"func": "support.interrupted:spread"}],
    },
}
ASKED = {"a reward": {"HANGS_IN_STEP": "4"}, "an environment": {"HANGS_IN_GAME": "28"}}


def run(kind, model, folder, monkeypatch, **asked):
    folder.mkdir(exist_ok=True)
    rows = ({"prompt": [{"role": "user", "content": f"a{i}:"}]} for i in range(6))
    values = tiny.TRAINING | KINDS[kind]
    values |= {"model_name_or_path": model, "output_dir": str(folder / "out"), "reward_workers": 1}
    values |= {"max_steps": 6, "logging_steps": 3, "save_strategy": "steps", "save_steps": 2, "num_iterations": 1}
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values | {"dataset_name": str(folder / "rows.jsonl")}))
    for name, value in ({"TRAINER": str(os.getpid()), "GAMES_BEGUN": str(folder / "games")} | asked).items():
        monkeypatch.setenv(name, value)
    return train(load_recipe(["--config", str(folder / "recipe.yaml")]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(1)
def test_a_run_leaves_what_hangs_and_ends_at_the_same_bits(kind, tmp_path, monkeypatch, caplog):
    model = tmp_path / "model"
    tiny.save(model, max_position_embeddings=1024)
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(loop, "GRACE_SECONDS", 0.5)
    whole = run(kind, str(model), tmp_path / "whole", monkeypatch)
    began = time.monotonic()
    with pytest.raises(RunInterrupted, match="saved checkpoint-"):
        run(kind, str(model), tmp_path / "stopped", monkeypatch, **ASKED[kind])
    assert time.monotonic() - began < MOST
    assert interrupted.logged(run(kind, str(model), tmp_path / "stopped", monkeypatch)) == interrupted.logged(whole)
