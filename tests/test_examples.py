"""The examples: run as scripts, used by path, and their values worked out by hand."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from grpo_ext import GRPOExtConfig
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.losses import find
from grpo_ext.quickstart.model import LESSONS, ensure_model
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.rewards.composition import parse_rewards
from grpo_ext.train import train
from support.processes import run_forked
from support.tiny import FEW
from support.trainers import build

ROOT = Path(__file__).parent.parent
HERE = {"custom_environment": ("--environments", '[{"path": "custom_environment:AskAgain", "isolate": false}]')}
"""What runs in the trainer's process here, as rewards do: each process of theirs would import the trainer."""
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("custom_*.py"))


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_as_a_script(name, quickstart_model, tmp_path):
    own = ("--max_steps", "1", "--model_name_or_path", quickstart_model, "--output_dir", "out", *HERE.get(name, ()))
    said = run_forked(ROOT / "examples" / f"{name}.py", *FEW, *own, "--reward_workers", "0", cwd=tmp_path)
    assert "Model saved to out." in said
    assert (tmp_path / "out" / "model.safetensors").exists()
    axis = {"custom_loss": "custom_loss:spo: spo(width=0.2)", "custom_advantage": "advantage custom_advantage:wins()"}
    assert axis.get(name, "") in said
    assert bool(re.search(r"step 1/1 +trained in \S+ +reward \S+ +\(digits ", said)) == (name == "custom_reward")
    assert "rewards/accuracy/mean" not in said  # the dict of all figures is in the file
    rows = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "reward" in row] == [1]


@pytest.mark.slow
def test_the_agent_trains_as_it_is(tmp_path):
    lines = (ROOT / "examples" / "agent.py").read_text().splitlines()
    assert len(lines) < 40
    options = {"run": [sys.executable, str(ROOT / "examples" / "agent.py"), "{solution}"]}
    entries = json.dumps([{"name": "command", "max_turns": 5, "kwargs": options}])
    few = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1, "eval_strategy": "no"}
    few |= {"eval_on_start": False}
    warm = ensure_model(0, tmp_path / "cache", steps=2, lesson=LESSONS["quickstart/guess"])
    few |= {"save_strategy": "no", "output_dir": tmp_path, "environments": entries, "model_name_or_path": warm}
    words = [word for name, value in few.items() for word in (f"--{name}", str(value))]
    [log, *_] = train(load_recipe(["--config", "quickstart/agent", *words])).state.log_history
    assert log["environments/command/failed"] == 0
    assert 1 <= log["environments/command/turns"] <= 5
    assert log["rewards/environment/mean"] in (0, 0.25, 0.5, 0.75, 1)


def test_the_loss_from_a_recipe():
    config = GRPOExtConfig(
        "out", loss_type="examples.custom_loss:spo", loss_kwargs={"width": 0.3}, use_cpu=True, bf16=False
    )
    assert config.objective.options == {"width": 0.3}
    assert config.objective.aggregation == "seq-mean-token-mean"
    assert config.objective.row.paper == "SPO, arXiv:2401.16025"


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_the_loss_is_least_where_clipping_would_start(advantage):
    spo = find("examples.custom_loss:spo").function
    edge = 1 + math.copysign(0.3, advantage)
    log_ratio = torch.tensor([[0.0, math.log(edge)]], requires_grad=True)
    loss = spo(log_ratio, torch.full((1, 2), advantage), width=0.3)
    loss.sum().backward()
    assert loss.tolist()[0] == pytest.approx([-advantage, -edge * advantage + 1.5 * 0.09 / 0.6], rel=1e-5)
    assert log_ratio.grad.tolist()[0] == pytest.approx([-advantage, 0.0], abs=1e-5)


def test_the_advantage_by_hand():
    wins = estimators["examples.custom_advantage:wins"]
    rewards = torch.tensor([[0.0, 1.0, 1.0, 9.0], [3.0, math.nan, 1.0, 2.0], [5.0] * 4, [7.0, *[math.nan] * 3]])
    expected = [[-1.0, 0.0, 0.0, 1.0], [1.0, 0.0, -1.0, 0.0], [0.0] * 4, [0.0] * 4]
    assert wins(rewards).tolist() == expected
    assert wins(rewards, margin=1.0)[1].tolist() == [0.5, 0.0, -0.5, 0.0]


@pytest.mark.parametrize("name", ["first_uses", "longer_sums_count_more", "surprising"])
def test_an_advantage_beyond_the_rewards_trains(name, model_path, tmp_path):
    settings = {"advantage_estimator": f"examples.token_advantages:{name}", "max_steps": 1}
    trainer = build(model_path, tmp_path, **settings)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_advantages_beyond_the_rewards_by_hand():
    first, longer, surprising = (
        estimators[f"examples.token_advantages:{name}"]
        for name in ("first_uses", "longer_sums_count_more", "surprising")
    )
    rewards, mask = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1, 1, 1], [1, 1, 0]]])
    ids = torch.tensor([[[7, 8, 7], [9, 9, 0]]])
    assert first(rewards, ids, mask).tolist() == [[[0.5, 0.5, 0.0], [-0.5, 0.0, 0.0]]]
    assert longer(rewards, {"solution": ["579"]}).tolist() == [[1.5, -1.5]]
    halves = torch.full((1, 2, 3), math.log(0.25))
    assert surprising(rewards, halves, mask).tolist() == [[[0.375] * 3, [-0.375, -0.375, 0.0]]]


def test_the_reward_by_hand():
    entry = {"name": "digits", "func": "examples.custom_reward:digits", "weight": 0.5, "kwargs": {"tag": "sum"}}
    specs, problems = parse_rewards([entry, "accuracy"])
    assert problems == []
    assert [spec.name for spec in specs] == ["digits", "accuracy"]
    from examples.custom_reward import digits

    texts = ["<sum>\n579\n</sum>", "<sum>9</sum>", "<sum>1579</sum>", "579", "<sum>579</sum>"]
    gold = ["579", "579", "579", "579", ""]
    assert digits(texts, gold, tag="sum", prompts=None) == [1.0, pytest.approx(1 / 3), 0.75, 0.0, None]


def test_the_environment_by_hand():
    from examples.custom_environment import AskAgain

    game = AskAgain(attempts=3)
    game.reset({"prompt": [{"role": "user", "content": "12+34="}], "solution": "46"})
    said = [{"role": "assistant", "content": f"<answer>\n{answer}\n</answer>"} for answer in (45, 46)]
    assert game.step(said[0]) == ("12+34=", 0.0, False, False)
    assert game.step(said[1])[1:3] == (0.5, True)
