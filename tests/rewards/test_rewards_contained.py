"""Whatever a reward, its columns or the machine does wrong costs completions; nothing raises on one process alone."""

import asyncio
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_rewards_runtime import BATCH, spec

import faulty
from grpo_ext.errors import RewardError
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.composition import parse
from grpo_ext.rewards.containment import contained
from grpo_ext.rewards.signatures import asks
from grpo_ext.rewards.workers import pool
from processes import PATIENCE

BOTH = pytest.mark.parametrize("workers", [1, 0])


def score(runtime, completions=BATCH, **columns) -> list:
    """Values of the only reward, in this process also of an async one."""
    values = runtime.functions[0](prompts=[""] * len(completions), completions=list(completions), **columns)
    return asyncio.run(values) if inspect.isawaitable(values) else values


# Values.


@BOTH
@pytest.mark.parametrize(
    ("fault", "reason"), [("huge", "int too large to convert to float"), ("stubborn", "no number")]
)
def test_what_cannot_become_a_float_costs_itself(fault, reason, workers, runtime, caplog):
    assert score(runtime(spec(fault), workers=workers)) == [1.0, 1.0, None, 1.0]
    assert reason in caplog.text


@BOTH
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"clip": (0.5, 2.0)}, [1.0, 1.0, 0.0, 1.0]),
        ({"clip": (-2.0, -0.5), "scale": -1.0}, [-1.0, -1.0, 0.0, -1.0]),
    ],
)
def test_the_zero_of_a_failure_is_not_clipped(settings, expected, workers, runtime):
    metrics = {}
    rewards = runtime(spec("choke", on_error="zero", **settings), workers=workers)
    assert score(rewards, log_metric=metrics.__setitem__) == expected
    assert metrics["rewards/choke/clipped_frac"] == 0.0


@BOTH
def test_whatever_a_function_returns_is_a_number_or_told(workers, runtime, caplog):
    specs = [replace(spec("returns", kwargs={"what": what}), name=what) for what in faulty.RETURNED]
    functions = runtime(*specs, workers=workers).functions
    batch = {"prompts": [""] * 2, "completions": ["good"] * 2}
    for function, (what, (_, expected, words)) in zip(functions, faulty.RETURNED.items(), strict=True):
        assert function(**batch) == expected, what
        told = [
            record.message for record in caplog.records if f"reward {what!r} (faulty:returns) failed" in record.message
        ]
        assert [words in message for message in told] == [True] * bool(words)
        assert all(f"row {expected.index(None)}, the first: 'good'" in message for message in told)


# Columns.


@BOTH
def test_a_column_that_a_reward_does_not_ask_for_is_not_sent(workers, runtime):
    rewards = runtime(spec("choke"), workers=workers)
    assert score(rewards, ["good"] * 3, column=[lambda: 0] * 3) == [1.0] * 3


def test_which_arguments_a_function_may_look_at():
    assert [asks(faulty.historic, name) for name in ("completions", "trainer_state", "solution")] == [
        True,
        True,
        False,
    ]
    assert [asks(faulty.curious, name) for name in ("completions", "solution")] == [True, True]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ([lambda: 0] * 4, "'column' cannot be sent to a worker process (PicklingError"),
        ([faulty.Tree("a", "b")] * 4, "'column' cannot be read in a worker process (TypeError"),
    ],
)
@pytest.mark.parametrize("on_error", ["none", "raise"])
def test_a_column_that_does_not_reach_the_worker_is_named(column, reason, on_error, runtime, caplog):
    rewards = runtime(spec("curious", on_error=on_error), workers=1)
    if on_error == "raise":
        with pytest.raises(RewardError) as caught:
            score(rewards, column=column)
        assert reason in str(caught.value)
        return
    assert score(rewards, column=column) == [None] * 4
    assert reason in caplog.text
    assert score(rewards) == [3.0] * 4  # prompts and two callbacks, in a worker that is still there


def test_a_class_of_main_is_named_too(tmp_path):
    """It was told as a death by SIGKILL."""
    code = (
        "import logging, sys; logging.basicConfig(stream=sys.stdout)\n"
        "from grpo_ext.rewards.composition import RewardSpec\n"
        "from grpo_ext.rewards.runtime import Runtime\n"
        "class Mine: pass\n"
        "print(Runtime([RewardSpec('c', 'faulty:curious')], workers=1).functions[0](completions=['x'], k=[Mine()]))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.path.dirname(faulty.__file__), *sys.path]))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE)
    assert "[None]" in done.stdout
    assert "'k' cannot be read in a worker process (AttributeError" in done.stdout


@BOTH
def test_when_looks_at_columns_of_any_type(workers, runtime):
    arrays = [np.zeros(2), None, np.ones(3), ""]
    assert score(runtime(spec("none", when="k"), workers=workers), ["good"] * 4, k=arrays) == [1.0, None, 1.0, None]


@BOTH
def test_the_trainers_state_is_there_as_far_as_it_can_be_sent(workers, runtime):
    state = SimpleNamespace(global_step=3, log_history=[{"loss": 0.25}], callback=lambda: 0)
    assert score(runtime(spec("historic"), workers=workers), trainer_state=state) == [0.25] * 4


@BOTH
def test_what_a_reward_logs_stands_beside_its_rows(workers, runtime):
    extras = {}
    rewards = runtime(spec("annotated", when="k"), workers=workers)
    assert score(rewards, ["a", "b", "c"], k=[1, None, 2], log_extra=extras.__setitem__) == [1.0, None, 1.0]
    assert extras == {"text": ["a", None, "c"]}


# Calls.


@BOTH
@pytest.mark.parametrize("name", ["choke", "choke_later", "short"])
def test_a_failed_call_is_split(name, workers, runtime, caplog):
    assert score(runtime(spec(name), workers=workers)) == [1.0, 1.0, None, 1.0]
    [record] = caplog.records
    assert "first: 'bad'" in record.message


def test_splitting_in_this_process_takes_bounded_time(runtime, caplog):
    assert score(runtime(spec("choke", timeout=1e-9), workers=0), ["good", "bad"]) == [None, None]
    assert "no time was left" in caplog.text


@BOTH
@pytest.mark.parametrize("name", ["flaky", "flaky_later"])
def test_retries_are_made_wherever_it_is_scored(name, workers, runtime, tmp_path, caplog):
    kwargs = {"marker": str(tmp_path / "marker")}
    assert score(runtime(spec(name, kwargs=kwargs, retries=2), workers=workers)) == [3.0] * 4
    assert not caplog.records


@pytest.mark.parametrize("name", ["flaky", "flaky_later"])
def test_a_column_never_becomes_an_option_silently(name, runtime):
    with pytest.raises(ValueError, match="'marker' has the name of an option"):
        score(runtime(spec(name), workers=0), marker=["a"] * 4)


@pytest.mark.parametrize(
    ("entry", "cure"),
    [
        ({"name": "remote", "kwargs": {"url": "http://x", "protocol": "score"}}, "Put it into kwargs"),
        ({"name": "reward_model", "kwargs": {"model": "some/model"}}, "Remove it"),
    ],
)
def test_a_timeout_that_nothing_applies_is_refused(entry, cure):
    assert parse([entry])[1] == []
    specs, [problem] = parse([entry | {"timeout": 5}])
    assert specs == []
    assert "timeout=5" in problem
    assert "nothing can be stopped" in problem
    assert cure in problem


# Workers and their machine.


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_worker_that_stops_reading_is_replaced(size, runtime, monkeypatch):
    monkeypatch.setattr(pool, "LOADING_SECONDS", 5.0)
    rewards = runtime(spec("doze", timeout=1.0), workers=1)
    assert score(rewards, ["stop"], big=["x"]) == [1.0]
    time.sleep(0.5)
    start = time.monotonic()
    assert score(rewards, ["a", "b"], big=["x" * size, "yy"]) == [size, 2.0]
    assert time.monotonic() - start < 60


def test_a_worker_that_hangs_before_it_reads_is_given_up(runtime, monkeypatch):
    monkeypatch.setattr(pool, "LOADING_SECONDS", 0.5)
    monkeypatch.setattr(pool, "WORKER", "import time; time.sleep(1e6)")
    assert score(runtime(spec("doze", timeout=0.5), workers=1), ["a"], big=["x" * (1 << 20)]) == [None]


def test_a_worker_that_cannot_start_is_no_endless_loop(runtime, monkeypatch, caplog):
    monkeypatch.setattr(pool, "WORKER", "raise SystemExit(3)")
    assert score(runtime(spec("doze"), workers=1), ["a"], big=["x" * (1 << 20)]) == [None]
    assert "exit code 3" in caplog.text


def test_a_machine_without_room_for_a_process_fails_the_batch(runtime, monkeypatch, tmp_path, caplog):
    def refuse(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pool.subprocess, "Popen", refuse)
    before = os.listdir("/dev/fd")
    assert score(runtime(spec("none"), spec("text"), workers=1)) == [None] * 4
    assert "no more processes" in caplog.text
    assert len(os.listdir("/dev/fd")) == len(before)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_workers_temporary_files_go_with_it(runtime, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    rewards = runtime(spec("litter", timeout=0.5), workers=1)
    assert score(rewards, ["a"]) == [None]
    assert list(tmp_path.iterdir()) == []


# What is kept of failures.


@BOTH
def test_rows_that_cannot_be_saved_end_nothing(workers, runtime, tmp_path, caplog):
    (tmp_path / "file").touch()
    rewards = runtime(spec("choke"), workers=workers, failures=tmp_path / "file" / "folder")
    assert score(rewards) == [1.0, 1.0, None, 1.0]
    assert "the parser choked" in caplog.text
    assert "not saved to" in caplog.text


def test_a_column_that_json_cannot_hold_is_saved_as_text(runtime, tmp_path):
    score(runtime(spec("choke"), workers=0, failures=tmp_path), grid=[{(0, 1): 2}] * 4, answer=["a"] * 4)
    [saved] = tmp_path.glob("*.jsonl")
    row = json.loads(saved.read_text())
    assert (row["grid"], row["answer"], row["completion"]) == ("{(0, 1): 2}", "a", "bad")


# Functions that are no components.


@pytest.mark.parametrize(
    ("values", "reason"),
    [([10**400] * 2, "int too large"), (["a"] * 2, "'a', which is no number"), ([1.0], "1 values for 2")],
)
def test_a_plain_function_is_contained_with_its_values(values, reason):
    errors = []
    reward = contained(lambda completions, **_: values, errors, {})
    assert reward(completions=["a", "b"]) == [None, None]
    assert reason in errors[0]
    rows = {}
    for given in ((1, None, math.nan), iter([True, None, -math.inf]), torch.tensor([1.0, 2.0, math.nan])):
        first = contained(lambda completions, given=given, **_: given, errors, rows)(completions=["a"] * 3)[0]
        assert first == 1.0
        assert rows == {"<lambda>": [2]}


def test_a_reward_that_no_row_can_be_scored_by_is_told():
    entries = [
        {"name": "accuracy", "when": "solutoin"},
        "format",
        "multiple_choice",
        {"name": "tags", "when": "level"},
    ]
    specs, problems = parse(entries)
    assert problems == []
    found = list(absences(specs, ["prompt", "answer", "level"]))
    assert [sentence.split(".")[0] for sentence in found] == [
        "reward 'accuracy' scores nothing: the training data has no column 'solution'",
        "reward 'accuracy' scores nothing: the training data has no column 'solutoin'",
        "reward 'multiple_choice' scores nothing: the training data has no column 'solution'",
    ]
    assert list(absences(specs[1:], ["prompt", "solution", "level"])) == []
