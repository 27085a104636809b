"""Rewards composed and isolated: values, schedules, faults, protocol; real worker processes."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_ext.config.weight_schedule import schedule_problems, weight_at
from grpo_ext.errors import RewardError
from grpo_ext.rewards.calls import Calls
from grpo_ext.rewards.composition import RewardSpec, parse_rewards
from grpo_ext.rewards.outcomes import merged, read_value
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rewards.workers.pool import Outcome, Status
from support import faulty
from support.processes import PATIENCE

BATCH = ["good", "fine", "bad", "well"]


def spec(name: str, **settings) -> RewardSpec:
    return RewardSpec(name, settings.pop("function", f"support.faulty:{name}"), **settings)


def score(runtime: Runtime, completions=BATCH, **columns) -> dict[str, list]:
    completions = list(completions)
    return {
        f.__name__: f(prompts=[""] * len(completions), completions=completions, **columns) for f in runtime.functions
    }


# Faults.


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("fault", "on_error", "value"),
    [(fault, *(("none", None), ("zero", 0.0))[i % 2]) for i, fault in enumerate(faulty.FAULTS) if fault != "loop"],
)
def test_a_bad_completion_costs_itself_alone(fault, on_error, value, runtime, tmp_path, caplog):
    kind, reason = faulty.FAULTS[fault]
    metrics = {}
    patience = 2.5 if kind == "timeout" else 60.0  # of a good completion too, on a machine that is busy
    entry = spec(fault, on_error=on_error, timeout=patience, independent=True)
    rewards = runtime(entry, failures=tmp_path)
    assert score(rewards, log_metric=metrics.__setitem__) == {fault: [1.0, 1.0, value, 1.0]}
    assert metrics[f"rewards/{fault}/errors"] == 1
    assert metrics[f"rewards/{fault}/timeouts"] == (kind == "timeout")
    assert metrics[f"rewards/{fault}/rescored"] == (0 if fault in ("text", "inf") else 4)
    [record] = caplog.records
    assert f"'{fault}' (support.faulty:{fault})" in record.message
    assert reason in record.message
    assert "first: 'bad'" in record.message
    [saved] = tmp_path.glob("*.jsonl")
    row = json.loads(saved.read_text())
    assert (row["completion"], row["failed_reward"]) == ("bad", fault)
    assert score(rewards, ["good"]) == {fault: [1.0]}


@pytest.mark.parametrize("fault", ["sleep", "choke", "segfault"])
def test_raise_ends_at_once_and_names_the_culprit(fault, runtime):
    start = time.monotonic()
    with pytest.raises(RewardError, match=rf"'{fault}'.*first: 'good'") as caught:
        score(runtime(spec(fault, on_error="raise", timeout=1.0)))
    assert faulty.FAULTS[fault][1] in str(caught.value)
    assert time.monotonic() - start < 60


def test_none_is_a_value_and_no_failure(runtime, caplog):
    assert score(runtime(spec("none"))) == {"none": [1.0, 1.0, None, 1.0]}
    assert not caplog.records


def test_a_batch_of_hanging_completions_takes_bounded_time(runtime):
    start = time.monotonic()
    values = score(runtime(spec("sleep", timeout=1.5, independent=True)), ["bad"] * 40)["sleep"]
    assert values == [None] * 40
    assert time.monotonic() - start < 1.5 * 3 + 45  # not 40 timeouts; 45 s for starting workers on a busy machine


def test_nothing_is_left_behind(runtime):
    rewards = runtime(spec("pid"), spec("leave"), spec("sleep", timeout=0.2))
    worker = int(score(rewards)["pid"][0])
    assert worker != os.getpid()
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True).stdout
    assert "grpo_ext.rewards.workers.worker" not in children
    assert "<defunct>" not in children


def test_a_worker_dies_with_its_parent(tmp_path):
    code = (
        "import os, signal, sys; sys.path.insert(0, os.environ['TESTS'])\n"
        "from grpo_ext.rewards.composition import RewardSpec\n"
        "from grpo_ext.rewards.runtime import Runtime\n"
        "r = Runtime([RewardSpec('pid', 'support.faulty:pid')], workers=1)\n"
        "print(int(r.functions[0](completions=['x'])[0]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = os.environ | {"TESTS": str(Path(faulty.__file__).parents[1])}
    done = subprocess.run([os.sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL
    worker, deadline = int(done.stdout), time.monotonic() + 60
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}"), "the worker outlived its parent"


# Composition.


def test_components_of_every_kind_together(runtime):
    rewards = runtime(
        spec("tags", function="tags", weight=0.5),
        spec("numbers", scale=2.0, clip=(-3.0, 3.0)),
        spec("sometimes", function="support.faulty:patient", when="number"),
        spec("here", function="support.faulty:pid", isolate=False),
        spec("patient"),
    )
    columns = {"number": [1.0, -2.5, 7, 0.25]}
    metrics = {}
    values = score(rewards, ["<think>", "<answer></answer>", "", "x"], log_metric=metrics.__setitem__, **columns)
    assert values["tags"] == [0.25, 0.5, 0.0, 0.0]
    assert values["numbers"] == [2.0, -3.0, 3.0, 0.5]
    assert values["sometimes"] == [2.0] * 4
    assert values["here"] == [float(os.getpid())] * 4
    assert metrics["rewards/numbers/clipped_frac"] == 0.5
    assert {f"rewards/tags/{m}" for m in ("none_frac", "errors", "timeouts", "seconds")} <= set(metrics)


def test_rewards_of_turns_are_scaled_each_and_one_that_is_none_counts_as_0():
    given = [[0.5, 1.0], [0.5, None], [None, None], 2.0, [1.0]]
    scores = merged(spec("x", scale=3.0), [2] * 5, [Outcome(Status.SCORED, given, rows=[*range(5)])])
    assert scores.values == [4.5, 1.5, None, 6.0, None]
    assert scores.turns == [[1.5, 3.0], [1.5, 0.0], None, None, None]
    assert scores.failed == [(4, read_value([1.0], 2)[2])]


def test_a_failed_call_is_retried_and_then_scored_one_by_one():
    failed, scored = Outcome(Status.FAILED, reason="no", seconds=1.0), Outcome(Status.SCORED, [2.0], seconds=0.5)
    calls = Calls(spec("x", retries=1, independent=True), [[3, 4]])
    due = [list(calls.due)]
    while calls.due:
        calls.add([failed] if len(calls.due) == 1 else [scored, failed])
        due.append(calls.due)
    assert due == [[[3, 4]], [[3, 4]], [[3], [4]], []]
    assert [(o.rows, o.failure, o.after, o.seconds) for o in calls.outcomes] == [
        ([3], "", "no", 2.5),
        ([4], "no", "no", 1.0),
    ]


def test_when_leaves_rows_out_unscored(runtime):
    columns = {"number": [1.0, None, 3.0, ""]}
    assert score(runtime(spec("numbers", when="number")), **columns) == {"numbers": [1.0, None, 3.0, None]}
    assert score(runtime(spec("numbers", when="absent")), **columns) == {"numbers": [None] * 4}


def test_the_protocol_of_trl_reaches_into_the_worker(runtime):
    extras, metrics = {}, {}
    values = score(
        runtime(spec("talkative")),
        log_extra=extras.__setitem__,
        log_metric=metrics.__setitem__,
        trainer_state=SimpleNamespace(global_step=7, log_history=[object()]),
    )
    assert values == {"talkative": [7.0] * 4}
    assert extras == {"length": [4, 4, 3, 4]}
    assert metrics["longest"] == 4


def test_workers_score_in_parallel(runtime):
    """Our own rewards are spread over the workers, a user's function sees its batch whole."""
    rewards = runtime(spec("pid"), spec("other", function="support.faulty:pid"))
    values = score(rewards, ["x"] * 6)
    assert len(set(values["pid"])) == 1
    assert set(values["pid"]) != set(values["other"])


# Schedules.


@pytest.mark.parametrize(
    ("schedule", "weights"),
    [
        (None, [2.0, 2.0, 2.0]),
        ("constant", [2.0, 2.0, 2.0]),
        ({"kind": "linear", "to": 1.0}, [2.0, 1.5, 1.0]),
        ({"kind": "cosine", "to": 1.0}, [2.0, 1.5, 1.0]),
        ([[0, 4.0], [50, 5.0], [99, 6.0]], [4.0, 5.0, 6.0]),
        ([[50, 5.0]], [2.0, 5.0, 5.0]),
    ],
)
def test_weights_over_training(schedule, weights):
    assert list(schedule_problems(schedule)) == []
    assert [weight_at(2.0, schedule, step, 100) for step in (0, 50, 100)] == pytest.approx(weights)


def test_a_cosine_starts_and_ends_gently():
    w = [weight_at(1.0, {"kind": "cosine", "to": 0.0}, step, 100) for step in (0, 25, 75, 100)]
    assert w == pytest.approx([1.0, 0.85355339, 0.14644661, 0.0])


def test_a_full_entry():
    entry = {"name": "short", "func": "tags", "weight": 0.5, "weight_schedule": {"kind": "linear", "to": 0.0}}
    entry |= {"clip": [0, 1], "scale": 2, "when": "solution", "timeout": 5, "on_error": "zero", "retries": 2}
    [parsed], problems = parse_rewards([entry])
    assert problems == []
    assert parsed == RewardSpec(
        "short", "tags", 0.5, {}, {"kind": "linear", "to": 0.0}, 2, (0.0, 1.0), "solution", 5, "zero", 2, None
    )
