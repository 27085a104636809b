"""Whatever a reward, its columns or the machine does wrong costs completions; nothing raises on one process alone."""

import asyncio
import inspect
import json
import math
import os
import random
import signal
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_rewards_runtime import BATCH, spec

from grpo_ext import child_processes
from grpo_ext.errors import RewardError
from grpo_ext.rewards.columns import absences
from grpo_ext.rewards.composition import parse_rewards
from grpo_ext.rewards.scorers import OwnFunction
from grpo_ext.rewards.workers import pool
from support import faulty
from support.processes import PATIENCE

BOTH = pytest.mark.parametrize("workers", [1, 0])


def score(runtime, completions=BATCH, **columns) -> list:
    """Values of the only reward, in this process also of an async one."""
    values = runtime.functions[0](prompts=[""] * len(completions), completions=list(completions), **columns)
    return asyncio.run(values) if inspect.isawaitable(values) else values


# Values.


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
    rewards = runtime(spec("choke", on_error="zero", independent=True, **settings), workers=workers)
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
            record.message
            for record in caplog.records
            if f"reward {what!r} (support.faulty:returns) failed" in record.message
        ]
        assert [words in message for message in told] == [True] * bool(words)
        assert all(f"row {expected.index(None)}, the first: 'good'" in message for message in told)


# Columns.


@BOTH
def test_a_column_that_a_reward_does_not_ask_for_is_not_sent(workers, runtime):
    rewards = runtime(spec("choke"), workers=workers)
    assert score(rewards, ["good"] * 3, column=[lambda: 0] * 3) == [1.0] * 3


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
@pytest.mark.parametrize(("name", "lost"), [("choke", 1), ("choke_later", 1), ("crowded", 0)])
def test_a_failed_call_is_split_where_scores_are_independent(name, lost, workers, runtime, caplog):
    metrics = {}
    rewards = runtime(spec(name, independent=True), workers=workers)
    assert score(rewards, log_metric=metrics.__setitem__) == [1.0, 1.0, None if lost else 1.0, 1.0]
    [record] = caplog.records
    assert ("first: 'bad'" in record.message) == lost
    assert "4 completions were scored one by one, since their call failed: " in record.message
    assert (metrics[f"rewards/{name}/errors"], metrics[f"rewards/{name}/rescored"]) == (lost, 4)


@BOTH
@pytest.mark.parametrize(("on_error", "value"), [("none", None), ("zero", 0.0)])
def test_a_reward_that_compares_its_batch_never_becomes_another_one(on_error, value, workers, runtime, caplog):
    """It gave each of the others 1.0 once one completion was not JSON."""
    metrics = {}
    rewards = runtime(spec("novelty", on_error=on_error), workers=workers)
    assert score(rewards, ['"a"', '"a"', '"b"', '"a"']) == [1 / 3, 1 / 3, 1.0, 1 / 3]
    assert score(rewards, ['"a"', '"a"', "bad", '"a"'], log_metric=metrics.__setitem__) == [value] * 4
    [record] = caplog.records
    assert "reward 'novelty' (support.faulty:novelty) failed on 4 of 4 completions" in record.message
    assert "JSONDecodeError" in record.message
    assert "set independent: true" in record.message
    assert (metrics["rewards/novelty/errors"], metrics["rewards/novelty/rescored"]) == (4, 0)


@pytest.mark.cases(2)
@BOTH
@pytest.mark.parametrize("on_error", ["zero", "raise"])
def test_what_is_not_one_value_per_completion_is_an_error(on_error, workers, runtime):
    """A list of one value was taken for the first of as many calls as there are completions."""
    settings = {"on_error": on_error, "independent": on_error == "zero"}
    specs = [
        replace(spec("returns", kwargs={"what": what}, **settings), name=what.replace(" ", "_"))
        for what in faulty.MISSHAPEN
    ]
    rewards = runtime(*specs, workers=workers)
    batch = {"prompts": [""] * 2, "completions": ["good"] * 2}
    errors = [function.scores(batch).error for function in rewards.functions]
    for error, entry, (_, words) in zip(errors, specs, faulty.MISSHAPEN.values(), strict=True):
        assert f"reward {entry.name!r} (support.faulty:returns)" in error
        assert words in error


@BOTH
def test_nan_counts_as_none_is_counted_and_reported_once(workers, runtime, caplog):
    metrics = {}
    rewards = runtime(spec("nan", on_error="raise"), workers=workers)
    for _ in range(2):
        assert score(rewards, log_metric=metrics.__setitem__) == [1.0, 1.0, None, 1.0]
    [record] = caplog.records
    assert "reward 'nan' returned NaN for 1 of 4 completions" in record.message
    assert metrics["rewards/nan/nan_frac"] == metrics["rewards/nan/none_frac"] == 0.25
    assert metrics["rewards/nan/errors"] == 0


def test_splitting_in_this_process_takes_bounded_time(runtime, caplog):
    assert score(runtime(spec("choke", timeout=1e-9, independent=True), workers=0), ["good", "bad"]) == [None, None]
    assert "no time was left" in caplog.text


@BOTH
@pytest.mark.parametrize("name", ["flaky", "flaky_later"])
def test_retries_are_made_wherever_it_is_scored(name, workers, runtime, tmp_path, caplog):
    kwargs = {"marker": str(tmp_path / "marker")}
    assert score(runtime(spec(name, kwargs=kwargs, retries=2), workers=workers)) == [3.0] * 4
    assert not caplog.records


@pytest.mark.parametrize(
    ("entry", "cure"),
    [
        ({"name": "remote", "kwargs": {"url": "http://x", "protocol": "score"}}, "Put it into kwargs"),
        ({"name": "reward_model", "kwargs": {"model": "some/model"}}, "Remove it"),
    ],
)
def test_a_timeout_that_nothing_applies_is_refused(entry, cure):
    assert parse_rewards([entry])[1] == []
    specs, [problem] = parse_rewards([entry | {"timeout": 5}])
    assert specs == []
    assert (problem.field, problem.value) == ("reward_funcs[0].timeout", 5)
    assert cure in problem.cure


# Workers and their machine.


@pytest.mark.slow
def test_a_worker_that_stops_reading_is_replaced(runtime, monkeypatch):
    """It is waited for through both limits, in which the next one has to load and score on a busy machine."""
    monkeypatch.setattr(child_processes, "LOADING_SECONDS", 20.0)
    rewards = runtime(spec("doze", timeout=10.0, independent=True), workers=1)
    assert score(rewards, ["stop"], big=["x"]) == [1.0]
    time.sleep(0.5)
    assert score(rewards, ["a", "b"], big=["x" * (1 << 20), "yy"]) == [1 << 20, 2.0]


@pytest.mark.parametrize(
    ("program", "reason"),
    [("import time; time.sleep(1e6)", "did not answer"), ("raise SystemExit(3)", "exit code 3")],
)
def test_a_worker_that_never_reads_is_given_up(program, reason, runtime, monkeypatch, caplog):
    monkeypatch.setattr(child_processes, "LOADING_SECONDS", 0.5 if "sleep" in program else PATIENCE)
    monkeypatch.setattr(pool, "PROGRAM", program)
    assert score(runtime(spec("doze", timeout=0.5), workers=1), ["a"], big=["x" * (1 << 20)]) == [None]
    assert reason in caplog.text


def test_a_machine_without_room_for_a_process_fails_the_batch(runtime, monkeypatch, tmp_path, caplog):
    def refuse(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(child_processes.subprocess, "Popen", refuse)
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
    entry = spec("choke", independent=True)
    rewards = runtime(entry, workers=workers, failures=tmp_path / "file" / "folder")
    assert score(rewards) == [1.0, 1.0, None, 1.0]
    assert "the parser choked" in caplog.text
    assert "not saved to" in caplog.text


def test_a_column_that_json_cannot_hold_is_saved_as_text(runtime, tmp_path):
    entry = spec("choke", independent=True)
    score(runtime(entry, workers=0, failures=tmp_path), grid=[{(0, 1): 2}] * 4, answer=["a"] * 4)
    [saved] = tmp_path.glob("*.jsonl")
    row = json.loads(saved.read_text())
    assert (row["grid"], row["answer"], row["completion"]) == ("{(0, 1): 2}", "a", "bad")


# Functions that are no components.


@pytest.mark.parametrize(
    ("values", "reason"),
    [([10**400] * 2, "int too large"), (["a"] * 2, "'a', which is not a number"), ([1.0], "1 values for 2")],
)
def test_a_plain_function_is_contained_with_its_values(values, reason):
    reward = OwnFunction(lambda completions, **_: values)
    scores = reward.scores({"completions": ["a", "b"]})
    assert (reward.__name__, scores.values) == ("<lambda>", [None, None])
    assert reason in scores.error
    for given in ((1, None, math.inf), iter([True, None, -math.inf]), torch.tensor([1.0, 2.0, math.inf])):
        first, _, last = (
            OwnFunction(lambda completions, given=given, **_: given).scores({"completions": ["a"] * 3}).values
        )
        assert first == 1.0
        assert math.isinf(last)


@pytest.mark.parametrize("later", [False, True])
def test_nan_of_a_plain_function_counts_as_none_as_in_trl(later, caplog):
    batches = [[1.0, 2.0], [1.0, np.nan], [np.nan, np.nan], [1.0, 2.0]]

    def function(completions, **_):
        return batches.pop(0)

    async def function_later(completions, **_):
        return batches.pop(0)

    reward = OwnFunction(function_later if later else function)
    scored = [reward.scores({"completions": ["a", "b"]}) for _ in range(4)]
    assert [scores.values for scores in scored] == [[1.0, 2.0], [1.0, None], [None, None], [1.0, 2.0]]
    assert [one for scores in scored for one in scores.metrics] == [
        (f"rewards/{reward.__name__}/nan_frac", share) for share in (0.5, 1.0, 0.0)
    ]
    [record] = caplog.records
    assert "returned NaN for 1 of 2 completions" in record.message


# What a function raises that is not an Exception.


class Stop(BaseException):
    """As those of pytest.fail and of math-verify's time limit."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Stop("enough")])
@pytest.mark.parametrize("where", ["call", "value", "coroutine"])
def test_no_exception_of_a_function_leaves_it(error, where, runtime, monkeypatch, caplog):
    monkeypatch.setattr(faulty, "ERROR", error)
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # as while a run trains
    try:
        entry = spec(f"raises_in_{where}", isolate=False)
        assert score(runtime(entry), ["good", "bad"]) == [1.0 if where == "value" else None, None]
        reward, columns = OwnFunction(entry.callable), {"completions": ["good", "bad"]}
        scores = reward.scores(columns)
        assert (scores.values, bool(scores.error)) == ([None, None], True)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert type(error).__name__ in caplog.text


def test_ctrl_c_is_not_contained_where_it_raises(runtime, monkeypatch):
    monkeypatch.setattr(faulty, "ERROR", KeyboardInterrupt())
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has none
    try:
        for where in ("call", "value"):
            with pytest.raises(KeyboardInterrupt):
                score(runtime(spec(f"raises_in_{where}", isolate=False)), ["bad"])
    finally:
        signal.signal(signal.SIGINT, handler)


# What workers answer, and from what they draw.


@pytest.mark.cases(2)
@pytest.mark.parametrize("body", [b"\x80\x04", b'{"a": 1}', b"[" * 200_000, b'["scored", 1, 2]', b'["what"]', None])
def test_nothing_that_a_function_writes_to_its_pipe_is_executed_or_ends_the_run(body, runtime, tmp_path, caplog):
    """It was read as a pickle, which runs whatever its author likes."""
    body = faulty.pickle_that_makes(tmp_path / "made") if body is None else body
    rewards = runtime(spec("forges", kwargs={"body": body}), workers=1)
    assert score(rewards, ["bad"]) == [None]
    assert "it sent something that is not an answer" in caplog.text
    assert not (tmp_path / "made").exists()
    assert score(rewards, ["good"]) == [1.0]


def test_an_answer_beyond_the_limit_is_not_read(runtime, monkeypatch, caplog):
    monkeypatch.setattr(child_processes, "LARGEST_ANSWER", 1000)
    assert score(runtime(spec("annotated"), workers=1), ["x" * 1000]) == [None]
    assert "at most 1000 are read" in caplog.text


def test_the_copy_of_a_process_that_forks_does_not_answer(runtime):
    """Its answer was taken for that of the next batch, and so on until the end."""
    rewards = runtime(spec("forks"), workers=1)
    assert [score(rewards, ["x" * n] * 2) for n in (1, 2, 3)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def draws(runtime, seed, step=0, batch=BATCH, before=()):
    rewards = runtime(spec("draws"), spec("draws_lazily"), seed=seed)
    for earlier in before:
        rewards.functions[0](completions=earlier)
    columns = {"completions": list(batch), "trainer_state": SimpleNamespace(global_step=step)}
    return [function(**columns) for function in rewards.functions]


def test_what_a_reward_draws_is_a_function_of_seed_step_and_batch(runtime):
    """Otherwise a recipe with such a reward is not a function of its seed, and does not resume bit for bit."""
    random.seed(5)
    state = random.getstate()
    first = draws(runtime, 0)
    assert draws(runtime, 0, before=[["else"]]) == first  # as after a resume
    assert (
        len(set(map(str, [*first, *draws(runtime, 1), *draws(runtime, 0, step=1), *draws(runtime, 0, batch="ab")])))
        == 8
    )
    assert random.getstate() == state


def test_equal_completions_that_are_scored_one_by_one_do_not_draw_the_same(runtime):
    rewards = runtime(spec("draws_alone", independent=True), workers=2)
    values = score(rewards, ["same"] * 4)
    assert len(set(values)) == 4
    assert score(runtime(spec("draws_alone", independent=True), workers=1), ["same"] * 4) == values


def test_a_function_stays_in_one_worker_with_what_it_keeps(runtime):
    """Three counters in two workers gave 1, 1, 2; 2, 3, 3; 4, 4, 5."""
    rewards = runtime(
        *(replace(spec("counts"), name=name) for name in "abc"), spec("tags", function="tags"), workers=2
    )
    seen = []
    for call in range(3):
        batch = [f"{call}"] * 4
        seen.append([function(prompts=batch, completions=batch)[0] for function in rewards.functions[:3]])
    assert [[values[1] for values in seen], [values[0] + values[2] for values in seen]] == [[1, 2, 3], [3, 7, 11]]


def test_a_reward_that_no_row_can_be_scored_by_is_told():
    entries = [
        {"name": "accuracy", "when": "solutoin"},
        "format",
        "multiple_choice",
        {"name": "tags", "when": "level"},
    ]
    specs, problems = parse_rewards(entries)
    assert problems == []
    found = list(absences(specs, ["prompt", "answer", "level"]))
    assert [(problem.value, problem.reason.split("no column ")[1]) for problem in found] == [
        ("accuracy", "'solution'"),
        ("accuracy", "'solutoin'"),
        ("multiple_choice", "'solution'"),
    ]
    assert list(absences(specs[1:], ["prompt", "solution", "level"])) == []
