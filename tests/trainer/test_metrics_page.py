"""docs/metrics.md names what runs log, and nothing else."""

import re
from itertools import count
from pathlib import Path

import pytest

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step
from grpo_ext.trainer.diagnosis.positions import DEPTHS, FIRST_TURN, LATER_TURNS
from support import tiny
from support.trainers import unit_interval

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
LISTED = {name: row[-1].strip("` |") for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}
"""Names, and when they are logged."""
NOT_HERE = (
    *(
        "tools",
        "environment `command",
        "the drift check",
        "the drift check, with an adapter",
        "mixtures of experts",
        "replay_routes",
        "eval_sets",
    ),
)
"""What no run here has; tests of these look at their figures."""
OF_ACCURACY = {"accuracy/out_of_time", "accuracy/unread"}
BY_CHANCE = {"rewards/same_text_differs", *OF_ACCURACY, FIRST_TURN, LATER_TURNS, *list(DEPTHS)[1:]}
"""What a run logs where two completions of a group are the same, `accuracy` judges, or completions are long or of
several turns."""

RUNS = {
    "adaptive entropy": {"beta": 0.1, "use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 3.0},
    "cispo": {"loss_type": "cispo", "dynamic_sampling": "reward", "on_nonfinite": "skip"},
    "vespo": {"loss_type": "vespo", "advantage_estimator": "bernoulli"},
    "beta": {"loss_type": "beta_bnpo"},
    "p3o": {"loss_type": "p3o", "advantage_estimator": "gtpo"},
    "played": {"advantage_estimator": "gigpo"},
    "ahead": {"rollout_engine": "process", "rollout_ahead": 1, "max_steps": 2},
}


def known(name: str) -> list[str]:
    """The page's names that fit one that was logged; of `eval_<metric>` the metric is to be listed, too."""
    found = [
        p
        for p, when in LISTED.items()
        if when != "eval_sets" and re.fullmatch(re.sub("<[^>]+>", ".+", re.escape(p)), name)
    ]
    return [p for p in found if p != "eval_<metric>" or known(name.removeprefix("eval_"))]


class Breaking(Conversation):
    """Fails in every second attempt."""

    attempts = count()

    def reset(self, row):
        self.number = next(self.attempts)
        if self.number % 2:
            raise RuntimeError("no world")

    def step(self, message):
        return Step(done=True)

    def get_reward(self):
        return self.number


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> dict[str, set[str]]:
    """Names that each run logged."""
    names = {}
    for run, settings in RUNS.items():
        args = GRPOExtConfig(
            output_dir=str(tmp_path_factory.mktemp("run")),
            **tiny.TRAINING
            | {"max_steps": 1, "eval_strategy": "steps" if run == "adaptive entropy" else "no"}
            | settings,
        )
        rewards = [{"name": "mine", "func": unit_interval}] if run != "played" else []
        data = tiny.prompts(8)
        plays: dict = {} if run != "played" else {"environments": [{"path": Breaking}]}
        if plays:
            data = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in data]
        trainer = GRPOExtTrainer(tiny.model(), rewards, args, data, data, tiny.tokenizer(), reward_workers=0, **plays)
        trainer.train()
        names[run] = {name for row in trainer.state.log_history for name in row}
    return names


def test_every_name_that_is_logged_is_listed(logged):
    assert sorted(name for names in logged.values() for name in names if not known(name)) == []


def test_every_name_that_is_listed_is_logged(logged):
    everything = {p for names in logged.values() for name in names for p in known(name)} | BY_CHANCE
    assert sorted(name for name, when in LISTED.items() if name not in everything and when not in NOT_HERE) == []
    for run, names in logged.items():
        listed = {p for name in names for p in known(name)}
        assert [name for name, when in LISTED.items() if when == "always" and name not in listed] == [], run
