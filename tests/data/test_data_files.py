"""Local files: no value is altered on the way, and what cannot be read is named by file, line and column."""

import json
import re

import pytest
from datasets import Dataset, load_from_disk

from grpo_ext.data.config import DataConfig
from grpo_ext.data.loading import load_datasets
from grpo_ext.data.python_data import prompt_problems
from grpo_ext.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def load(name, *, streaming=False, split="train", **settings):
    config = DataConfig(**settings)
    return load_datasets(str(name), config, train_split=split, streaming=streaming, eval_needed=False)[0]


def refusal(name, **settings):
    with pytest.raises(DataError) as caught:
        list(load(name, **settings))  # a stream fails when it is read
    return str(caught.value)


BOTH = pytest.mark.parametrize("streaming", [False, True])


# --- values ----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_dates_stay_text(tmp_path, streaming, suffix):
    rows = [{"prompt": "2023-01-05", "solution": "2023-01-05", "days": ["2023-01-05T10:00:00"]}] * 2
    (tmp_path / f"d.{suffix}").write_text(json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)))
    assert list(load(tmp_path / f"d.{suffix}", streaming=streaming)) == rows


@BOTH
@pytest.mark.parametrize(
    ("written", "answers"),
    [
        (["9007199254740993", "1.5", "null"], ["9007199254740993", "1.5", None]),
        (["7", "1.25", "3.0"], ["7", "1.25", "3"]),
    ],
)
def test_numeric_answers_become_text(tmp_path, streaming, written, answers):
    name = write(tmp_path / "n.jsonl", *(f'{{"prompt": "a", "answer": {number}}}' for number in written))
    assert [row["solution"] for row in load(name, streaming=streaming)] == answers


@BOTH
@pytest.mark.parametrize("column", ["solution", "answer"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_an_answer_that_is_no_number_is_refused(tmp_path, streaming, column, number):
    lines = [f'{{"prompt": "a", "{column}": {value}}}' for value in ("1.5", number)]
    name = write(tmp_path / "n.jsonl", *lines)
    value = float(number.replace("Infinity", "inf"))
    assert f"{name}, line 2, column {column!r}: {value!r} is not an answer" in refusal(name, streaming=streaming)


@BOTH
def test_other_columns_keep_what_arrow_has_no_type_for(tmp_path, streaming):
    rows = [
        {"prompt": "a", "id": 18446744073709551615, "meta": {"x": 1}, "empty": {}, "score": 1, "late": None},
        {"prompt": "b", "id": 3, "meta": {"x": "5"}, "empty": {}, "score": 0.5, "late": [1]},
    ]
    name = write(tmp_path / "m.jsonl", *map(json.dumps, rows))
    assert list(load(name, streaming=streaming)) == rows
    mapped = [{**row, "prompt": row["prompt"][1]["content"]} for row in load(name, system_prompt="S")]
    assert mapped == rows


def test_a_dataset_of_json_can_be_saved_and_mapped(tmp_path):
    name = write(tmp_path / "m.jsonl", '{"question": "a", "m": {}, "n": [1, "x"]}')
    load(name).save_to_disk(tmp_path / "saved")
    row = load_from_disk(tmp_path / "saved")[0]
    assert (row["m"], row["n"], row["prompt"][0]["content"]) == ({}, [1, "x"], "a")


def test_a_column_may_be_seen_first_far_into_the_file(tmp_path):
    name = write(tmp_path / "f.jsonl", *['{"prompt": "a"}'] * 1500, '{"prompt": "b", "late": "x"}')
    assert load(name)["late"][1498:] == [None, None, "x"]
    message = refusal(name, streaming=True)
    assert f"{name}, line 1501, column 'late': not in the first 1000 rows" in message


@pytest.mark.parametrize(
    ("spec", "chosen"), [("train[2:4]", [2, 3]), ("train[:20%]", [0, 1]), ("train[8:]+train[:1]", [8, 9, 0])]
)
def test_slices(tmp_path, spec, chosen):
    name = write(tmp_path / "s.jsonl", *(f'{{"prompt": "p", "i": {i}}}' for i in range(10)))
    assert list(load(name, split=spec)["i"]) == chosen
    assert "a stream has no slices. Name the split 'train'" in refusal(name, split=spec, streaming=True)


# --- places ----------------------------------------------------------------------------------------------------

GOOD = '{"prompt": "a", "answer": "1"}'
DEEP = f'{{"prompt": "a", "answer": {"[" * 2000}{"]" * 2000}}}'


@BOTH
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (DEEP, ': \'{"prompt": "a", "answer": [[['),
        ('{"prompt": "a", "n": ' + "1" * 5000 + "}", "cannot be read (Exceeds the limit"),
        ("{", ": broken JSON '{'"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, streaming, line, reason):
    name = write(tmp_path / "b.jsonl", GOOD, "", line, GOOD)
    message = refusal(name, streaming=streaming)
    assert message.startswith(f"{name}, line 3")
    assert reason in message


def test_a_document_names_row_and_column(tmp_path):
    name = write(tmp_path / "b.json", f"[{GOOD},", '{"prompt": "a", "answer": 1}]')
    assert f"{name}, row 1 (from 0), column 'answer': a number 1, but text in" in refusal(name)
    assert "more than 100 deep" in refusal(write(tmp_path / "d.json", f"[{DEEP}]"))


def test_brackets_in_text_are_not_depth_and_pairs_are_whole(tmp_path):
    name = write(tmp_path / "t.jsonl", json.dumps({"prompt": "[" * 500 + '"\\', "solution": "😀"}))
    assert load(name)[0] == {"prompt": "[" * 500 + '"\\', "solution": "😀"}


@BOTH
@pytest.mark.parametrize("layout", ["data.jsonl", "sub/data.jsonl", "train/data.jsonl"])
def test_files_not_named_after_the_split_are_checked_too(tmp_path, streaming, layout):
    name = write(tmp_path / "set" / layout, GOOD, '{"prompt": "2023-01-05", "answer": "2"}')
    rows = list(load(tmp_path / "set", streaming=streaming))
    assert [row["prompt"] for row in rows] == ["a", "2023-01-05"]
    write(name, GOOD, "{")
    assert f"{name}, line 2: broken JSON" in refusal(tmp_path / "set", streaming=streaming)
    assert "split tset: no such split. Known: train." in refusal(tmp_path / "set", split="tset")


def test_a_readme_that_lays_out_the_splits_is_followed(tmp_path):
    write(tmp_path / "set" / "a.jsonl", '{"prompt": "a"}')
    write(tmp_path / "set" / "b.jsonl", '{"prompt": "b"}')
    lines = (
        "---",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        "    path: b.jsonl",
        "---",
    )
    write(tmp_path / "set" / "README.md", *lines)
    assert list(load(tmp_path / "set")["prompt"]) == ["b"]


def test_the_file_of_a_parquet_row_is_named(tmp_path):
    for number, prompts in enumerate((["a", "b"], [], ["c", ""])):
        file = tmp_path / "set" / f"train-{number}.parquet"
        file.parent.mkdir(exist_ok=True)
        Dataset.from_dict({"prompt": prompts}).to_parquet(file)
    assert f"{tmp_path / 'set' / 'train-2.parquet'}, row 1 (from 0), column 'prompt'" in refusal(tmp_path / "set")
    assert re.findall(r"train-\d", refusal(tmp_path / "set")) == ["train-2"]


def test_an_empty_parquet_file_is_refused(tmp_path):
    Dataset.from_dict({"prompt": []}).to_parquet(tmp_path / "e.parquet")
    assert f"{tmp_path / 'e.parquet'}: no rows" in refusal(tmp_path / "e.parquet")


@BOTH
def test_a_csv_column_named_twice_is_refused(tmp_path, streaming):
    name = write(tmp_path / "t.csv", "prompt,solution,solution", "a,1,2")
    reason = f"{name}, line 1, column 'solution': 2 columns of that name"
    assert reason in refusal(name, streaming=streaming)


def test_the_csv_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "l.csv"
    path.write_bytes(b"prompt,answer\na,\xe9\n")
    assert f"{path}, line 2: not UTF-8 (invalid continuation byte at byte 2)" in refusal(path)
    path.write_bytes(b"pr\xe9mpt,answer\na,b\n")
    assert f"{path}, line 1: not UTF-8" in refusal(path)


@pytest.mark.parametrize("name", ["e.jsonl", "e.json", "e.csv"])
def test_an_empty_stream_is_refused(tmp_path, name):
    assert "no rows" in refusal(write(tmp_path / name), streaming=True)


def test_a_csv_stream_that_breaks_half_way_names_the_dataset(tmp_path):
    name = write(tmp_path / "b.csv", "prompt,answer", "a,1", "b,2,3,4")
    assert f"{name}, split train: cannot be loaded: ParserError" in refusal(name, streaming=True)


# --- splits and rows that cannot be used -----------------------------------------------------------------------


@pytest.mark.parametrize("split", ["trian", "test", "trian[:2]"])
def test_a_single_file_has_one_split(tmp_path, split):
    name = write(tmp_path / "rows.jsonl", '{"prompt": "a"}', '{"prompt": "b"}')
    with pytest.raises(DataError, match=rf"split {re.escape(split)}: no such split, rows.jsonl being one file"):
        load(name, split=split)
    assert [len(load(name, split=named)) for named in ("train", "rows", "train[:1]")] == [2, 2, 1]


def test_a_saved_dataset_has_one_split_and_no_slices(tmp_path):
    Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]).save_to_disk(tmp_path / "saved")
    assert len(load(tmp_path / "saved")) == 2
    with pytest.raises(DataError, match="split trian: no such split, the folder holding one dataset"):
        load(tmp_path / "saved", split="trian")
    with pytest.raises(DataError, match=r"has no slices\. Name the split 'train'"):
        load(tmp_path / "saved", split="train[:1]")


CHATS = [[{"role": "user", "content": f"{i}?"}] for i in range(3)]


@BOTH
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("system_prompt", [None, "S"])
def test_conversations_written_as_json_text_are_parsed(tmp_path, kind, streaming, system_prompt):
    rows = Dataset.from_list([{"prompt": json.dumps(chat, indent=1), "level": 1} for chat in CHATS])
    getattr(rows, {"jsonl": "to_json"}.get(kind, f"to_{kind}"))(tmp_path / f"rows.{kind}")
    found = [
        row["prompt"] for row in load(tmp_path / f"rows.{kind}", streaming=streaming, system_prompt=system_prompt)
    ]
    system = [{"role": "system", "content": "S"}] if system_prompt else []
    assert found == [system + chat for chat in CHATS]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (str(CHATS[0]), "is a conversation written as text, but not as JSON"),
        (json.dumps([{"role": "user"}]), "message 1 (user) has no 'content'"),
        ('[{"role": "user", "content": }]', "not as JSON"),
    ],
)
def test_other_text_of_conversations_is_refused(tmp_path, prompt, reason):
    assert reason in refusal(write(tmp_path / "rows.jsonl", json.dumps({"prompt": prompt})))


def test_conversations_as_json_text_are_refused_where_a_dataset_is_given_in_python():
    given = Dataset.from_list([{"prompt": json.dumps(chat)} for chat in CHATS])
    [problem] = prompt_problems(given, "train_dataset")
    assert problem.field == "train_dataset, row 0 (from 0), column 'prompt'"
    assert "is a conversation written as JSON text. Give the list itself, json.loads(text)" in str(problem)


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        *("[1, 2, 3] sorted?", '[{"role": "x"}] is what?', "[]", "[{'a': 1}]"),
        '[{"content": "a review", "stars": 5}]',
        "[{'content': 'a review', 'stars': 5}]",
        '[{"role": "engineer", "name": "Ada"}, {"role": "user", "name": "Bob"}]',
        '[{"role": "user", "content": "a"}, 7]',
    ],
)
def test_text_in_brackets_stays_text(tmp_path, text, streaming):
    [row] = load(write(tmp_path / "rows.jsonl", json.dumps({"prompt": text})), streaming=streaming)
    assert row["prompt"] == text


@BOTH
def test_a_conversation_that_the_model_is_to_read_is_the_content_of_a_message(tmp_path, streaming):
    chat = [{"role": "user", "content": json.dumps(CHATS[0])}]
    [row] = load(write(tmp_path / "rows.jsonl", json.dumps({"prompt": chat})), streaming=streaming)
    assert row["prompt"] == chat


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_bad_rows_are_dropped_and_counted(tmp_path, kind, caplog):
    rows = Dataset.from_dict({"prompt": ["a", "", None, "b"], "answer": ["1", "2", "3", None]})
    getattr(rows, "to_json" if kind == "jsonl" else "to_csv")(tmp_path / f"rows.{kind}")
    name = tmp_path / f"rows.{kind}"
    assert "`on_bad_row: drop` trains without malformed rows" in refusal(name)
    assert [row["prompt"] for row in load(name, on_bad_row="drop")] == ["a", "b"]
    assert "2 of 4 rows are malformed: dropped. The first:" in caplog.text
    assert f"{name}, line {2 if kind == 'jsonl' else 3}, column 'prompt': " in caplog.text
    assert [row["prompt"] for row in load(name, on_bad_row="drop", answer_column="answer")] == ["a"]
    assert [row["prompt"] for row in load(name, on_bad_row="drop", streaming=True)] == ["a", "b"]


def test_rows_that_are_all_bad_are_an_error_and_so_is_a_broken_line(tmp_path):
    assert "empty prompt" in refusal(write(tmp_path / "a.jsonl", '{"prompt": ""}'), on_bad_row="drop")
    assert "line 2: " in refusal(write(tmp_path / "b.jsonl", '{"prompt": "a"}', "{"), on_bad_row="drop")
    assert "on_bad_row='ignore': not one of its values" in refusal(tmp_path / "a.jsonl", on_bad_row="ignore")


def test_a_bad_row_is_named_by_its_line_also_where_pass_rates_were_filtered(tmp_path):
    rows = [{"prompt": text, "pass_rate": rate} for text, rate in (("a", 0.0), ("b", 0.5), ("", 0.5))]
    name = write(tmp_path / "rows.jsonl", *map(json.dumps, rows))
    assert f"{name}, line 3, column 'prompt': empty prompt" in refusal(name, min_pass_rate=0.1)
