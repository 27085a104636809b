"""Rows chosen by the pass rate that `grpo-ext sample` has measured."""

import logging

import pytest
from datasets import Dataset

from grpo_ext.data.config import DataConfig, value_problems
from grpo_ext.data.prepare import Split, prepare
from grpo_ext.errors import DataError

RATES = [0.0, 0.1, None, 0.5, 0.9, 1.0]
ROWS = Dataset.from_list([{"question": f"q{i}", "answer": str(i), "pass_rate": rate} for i, rate in enumerate(RATES)])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"min_pass_rate": 0.1, "max_pass_rate": 0.9}, [1, 3, 4]),
        ({"min_pass_rate": 0.2}, [3, 4, 5]),
        ({"max_pass_rate": 0.0}, [0]),
        ({"min_pass_rate": 0, "max_pass_rate": 1}, [0, 1, 3, 4, 5]),
        ({"max_pass_rate": 0.9, "max_samples": 4}, [0, 1, 3]),
    ],
)
def test_rows_within_the_bounds_are_kept_bounds_included(bounds, kept, streamed):
    rows = prepare(Split(ROWS.to_iterable_dataset() if streamed else ROWS), DataConfig(**bounds))
    assert [row["solution"] for row in rows] == [str(i) for i in kept]


def test_the_number_of_kept_rows_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        prepare(Split(ROWS, "rows.jsonl"), DataConfig(min_pass_rate=0.1, max_pass_rate=0.9))
    assert "rows.jsonl: 3 of 6 rows have a pass_rate from 0.1 to 0.9." in caplog.text


@pytest.mark.parametrize(
    ("rows", "bounds", "expected"),
    [
        (ROWS.remove_columns("pass_rate"), {"min_pass_rate": 0.1}, "dataset has no column pass_rate"),
        (ROWS, {"min_pass_rate": 0.6, "max_pass_rate": 0.8}, "a pass_rate from 0.6 to 0.8. Widen"),
    ],
)
def test_data_without_pass_rates_in_the_bounds_are_refused(rows, bounds, expected):
    with pytest.raises(DataError, match=expected):
        prepare(Split(rows), DataConfig(**bounds))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"min_pass_rate": 1.5}, "min_pass_rate=1.5: must be from 0 to 1"),
        ({"max_pass_rate": "half"}, "max_pass_rate='half': text where a number is expected"),
        ({"max_pass_rate": True}, "max_pass_rate=True: a yes or no where"),
        ({"min_pass_rate": float("nan")}, "min_pass_rate=nan: not finite"),
        ({"min_pass_rate": 0.9, "max_pass_rate": 0.1}, "min_pass_rate=0.9 with max_pass_rate=0.1: the range is empty"),
    ],
)
def test_unusable_bounds_are_refused(bounds, expected):
    [problem] = value_problems(DataConfig(**bounds))
    assert expected in str(problem)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_pass_rate_that_is_text_is_named(streamed):
    rows = Dataset.from_dict({"prompt": ["a", "b"], "pass_rate": ["0.5", None]})
    with pytest.raises(DataError, match=r"row 0 \(from 0\), column 'pass_rate': '0.5' is text"):
        list(prepare(Split(rows.to_iterable_dataset() if streamed else rows), DataConfig(min_pass_rate=0.1)))
