"""`kill -9` anywhere, again and again: the run ends at the bits of one that was never killed. KILLS=30 for more."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from support import tiny
from support.forks import Fork
from support.interrupted import without_clocks
from support.noted import windows_scored
from support.processes import CONFIG, PATIENCE, start_forked

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("KILLS", "2"))
STEPS = 4 * KILLS


AHEAD = {"rollout_engine": "process", "rollout_ahead": 2, "steps_per_generation": 1}
RUNS = {"in turn": (1, {}), "ahead": (1, AHEAD), "ahead, two processes": (2, AHEAD)}
"""Processes and further settings."""


@pytest.fixture(scope="module")
def recipe(request, tmp_path_factory):
    """Generations of two steps, a reward whose weight moves, dynamic sampling, and a log of every third step."""
    folder = tmp_path_factory.mktemp("kills")
    processes, further = RUNS[request.param]
    values = tiny.TRAINING | {
        "model_name_or_path": tiny.save(folder / "model", max_position_embeddings=1024),
        "dataset_name": "quickstart/addition",
        "reward_funcs": [
            {
                "name": "spread",
                "func": "support.noted:spread",
                "weight": 1.0,
                "weight_schedule": {"kind": "linear", "to": 0.2},
            },
            {"name": "again", "func": "support.tiny:spread"},
        ],
        "reward_workers": 0,
        "dynamic_sampling": "reward",
        "steps_per_generation": 2,
        "logging_steps": 3,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
    }
    values["per_device_train_batch_size"] //= processes
    (folder / f"{processes}.yaml").write_text(yaml.safe_dump(values | further))
    return folder / f"{processes}.yaml"


def start(recipe: Path, output: Path) -> list[Fork]:
    """The trainers; what they print goes into a file beside their output."""
    line = ["-m", "grpo_ext.train", "--config", str(recipe), "--output_dir", str(output)]
    config = None if recipe.stem == "1" else CONFIG
    noted = output.with_name(f"{output.name}-from-{newest(output)}")
    path = os.pathsep.join([str(Path(tiny.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return start_forked(line, printed(output), config=config, PYTHONPATH=path, NOTED=str(noted))


def printed(output: Path) -> Path:
    return output.with_name(f"{output.name}-printed")


def newest(output: Path) -> int:
    return max((int(path.name.partition("-")[2]) for path in output.glob("checkpoint-*")), default=0)


def wait(condition, trainers: list[Fork]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition() and trainers[0].poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def half_way(saving: Path, trainers: list[Fork]) -> None:
    """Somewhere between a checkpoint's first file and its last."""
    wait(saving.exists, trainers)
    time.sleep(random.uniform(0, 0.04))


def killed(recipe: Path, output: Path, moment) -> None:
    """Start, let it go on by a step or two, wait for the `moment`, kill."""
    trainers, before = start(recipe, output), newest(output)
    wait(lambda: newest(output) > before + random.randint(0, 1), trainers)
    moment(trainers)
    for one in trainers:  # at once: what samples beside them ends with them
        one.kill()
    said = printed(output).read_text()
    assert {one.wait() for one in trainers} <= {-signal.SIGKILL, 0}, said[-3000:]
    assert "Traceback" not in said, said[-3000:]


def ended(recipe: Path, output: Path) -> tuple[dict, list[str]]:
    """Weights and log of the run, which is let go on to its end."""
    assert {one.wait(PATIENCE) for one in start(recipe, output)} == {0}, printed(output).read_text()[-3000:]
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    return load_file(output / "model.safetensors"), without_clocks(state["log_history"])


@pytest.fixture(scope="module")
def never_killed(recipe):
    return ended(recipe, recipe.parent / "whole")


def assert_nothing_of_a_checkpoint_is_sampled_again(whole: Path, out: Path) -> None:
    """A process that resumes from step s takes the windows in flight from the checkpoint: s + K is its first."""
    for rank in ("0", "1"):
        for path in whole.parent.glob(f"whole-from-0-{rank}-*.jsonl"):
            order = [prompts for _, prompts in windows_scored(path)]
            assert len(order) == STEPS
            runs = [*out.parent.glob(f"out-from-*-{rank}-*.jsonl")]
            assert runs
            for started in runs:
                resumed_from = int(started.name.split("-")[2])
                found = [(step, order.index(prompts)) for step, prompts in windows_scored(started)]
                first = resumed_from + AHEAD["rollout_ahead"] if resumed_from else 0
                assert [window for _, window in found] == [*range(first, first + len(found))]
                assert all(step == max(0, window - AHEAD["rollout_ahead"]) for step, window in found)


@pytest.mark.parametrize("recipe", RUNS, indirect=True)
def test_a_run_killed_repeatedly_ends_at_the_same_bits(recipe, never_killed, tmp_path, request):
    """Anywhere, and in the middle of a save, in turn."""
    random.seed(0)
    saving = tmp_path / "out" / "_saving"
    for kill in range(KILLS):
        if kill % 2:
            killed(recipe, tmp_path / "out", lambda trainers: half_way(saving, trainers))
            print(f"left half done: {sorted(p.name for p in saving.glob('*/*'))}")
        else:
            killed(recipe, tmp_path / "out", lambda _: time.sleep(random.uniform(0, 0.4)))
    weights, log = ended(recipe, tmp_path / "out")
    if "ahead" in str(request.node.callspec.id):
        assert_nothing_of_a_checkpoint_is_sampled_again(recipe.parent / "whole", tmp_path / "out")
    assert log == never_killed[1]
    assert weights.keys() == never_killed[0].keys()
    assert all((weights[name] == tensor).all() for name, tensor in never_killed[0].items())
