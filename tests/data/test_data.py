import dataclasses
import gc
import json
import logging
import re
import time
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.data import tasks
from grpo_ext.data.config import DataConfig, dataset_problems
from grpo_ext.data.loading import load_datasets
from grpo_ext.data.prepare import Split, prepare
from grpo_ext.data.rows import Plan, RowError, boxed_answer, check_columns, convert, gsm8k_answer
from grpo_ext.errors import DataError
from support.extras import need

ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i), "level": i} for i in range(10)]
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, *lines: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def write_jsonl(path: Path, rows) -> str:
    return write(path, *(json.dumps(row) for row in rows))


def load(name, *, eval_needed=False, streaming=False, **settings):
    return load_datasets(str(name), DataConfig(**settings), eval_needed=eval_needed, streaming=streaming)


def refusal(name, **settings) -> str:
    with pytest.raises(DataError) as caught:
        list(load(name, **settings)[0])  # a stream fails when it is read
    return str(caught.value)


def expected(rows=ROWS):
    return [[{"role": "user", "content": row["question"]}] for row in rows]


# --- files -----------------------------------------------------------------------------------------------------


def write_as(kind: str, folder: Path) -> Path:
    path = folder / f"data.{kind}"
    dataset = Dataset.from_list(ROWS)
    if kind == "parquet":
        dataset.to_parquet(path)
    elif kind == "csv":
        write(path, "question,answer,level", *(f"{r['question']},{r['answer']},{r['level']}" for r in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        write_jsonl(path, ROWS)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
# datasets leaves a csv file open after it has streamed it
@pytest.mark.filterwarnings(r"ignore:Exception ignored in.*data\.csv:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_of_each_kind_gives_the_same_rows(tmp_path, kind, streaming):
    train, evaluation = load(write_as(kind, tmp_path), streaming=streaming)
    rows = list(train)
    assert evaluation is None
    assert isinstance(train, IterableDataset) == streaming
    assert [row["prompt"] for row in rows] == expected()
    assert [row["solution"] for row in rows] == [row["answer"] for row in ROWS]
    assert [row["level"] for row in rows] == list(range(10))
    del train, rows
    gc.collect()  # so that the file is found open here and not in another test


def test_json_of_one_object_per_line_is_read_too(tmp_path):
    train, _ = load(write_jsonl(tmp_path / "lines.json", ROWS))
    assert list(train["prompt"]) == expected()


@pytest.mark.parametrize("layout", ["{split}.jsonl", "data/{split}.jsonl", "{split}-00000-of-00001.jsonl"])
def test_a_folder_gives_both_splits(tmp_path, layout):
    write_jsonl(tmp_path / "set" / layout.format(split="train"), ROWS[:7])
    write_jsonl(tmp_path / "set" / layout.format(split="test"), ROWS[7:])
    train, evaluation = load(tmp_path / "set", eval_needed=True)
    assert (list(train["prompt"]), list(evaluation["prompt"])) == (expected(ROWS[:7]), expected(ROWS[7:]))


def test_a_split_of_several_files_is_joined_and_its_lines_are_found(tmp_path):
    write_jsonl(tmp_path / "set" / "train-0.jsonl", ROWS[:4])
    bad = write_jsonl(tmp_path / "set" / "train-1.jsonl", [ROWS[4], {"question": " ", "answer": "1"}])
    write_jsonl(tmp_path / "set" / "training_notes.jsonl", [{"other": 1}])
    assert f"{bad}, line 2, column 'question': empty prompt ' '" in refusal(tmp_path / "set")
    write_jsonl(tmp_path / "set" / "train-1.jsonl", ROWS[4:])
    assert list(load(tmp_path / "set")[0]["prompt"]) == expected()


def test_a_folder_whose_split_mixes_kinds_is_refused(tmp_path):
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    write(tmp_path / "set" / "train.csv", "question,answer", "a,b")
    assert "split 'train' is made up of train.csv, train.jsonl" in refusal(tmp_path / "set")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_save_to_disk(tmp_path, streaming):
    whole = Dataset.from_list(ROWS)
    DatasetDict(train=whole.select(range(6)), test=whole.select(range(6, 10))).save_to_disk(tmp_path / "both")
    whole.save_to_disk(tmp_path / "one")
    train, evaluation = load(tmp_path / "both", eval_needed=True, streaming=streaming)
    assert [row["prompt"] for row in train] == expected(ROWS[:6])
    assert [row["prompt"] for row in evaluation] == expected(ROWS[6:])
    assert [row["prompt"] for row in load(tmp_path / "one", streaming=streaming)[0]] == expected()
    with pytest.raises(DataError, match=r"split tran: no such split\. Did you mean 'train'\?"):
        load_datasets(str(tmp_path / "both"), DataConfig(), train_split="tran", eval_needed=False)


def test_csv_keeps_answers_as_they_are_written(tmp_path):
    name = write(tmp_path / "a.csv", "question,answer,score", "q,007,1", "None,010,", '"a,\nb",1e5,3')
    train, _ = load(name, answer_column="answer")
    assert list(train["solution"]) == ["007", "010", "1e5"]
    assert [prompt[0]["content"] for prompt in train["prompt"]] == ["q", "None", "a,\nb"]
    assert list(train["score"]) == [1.0, None, 3.0]


# --- bad rows --------------------------------------------------------------------------------------------------

GOOD = '{"question": "a", "answer": "1"}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "b", oops}', "broken JSON"),
        ('["b"]', "is not a JSON object"),
        ('{"question": "", "answer": "1"}', "column 'question': empty prompt ''"),
        ('{"question": null, "answer": "1"}', "column 'question': null prompt"),
        ('{"answer": "1"}', "column 'question': null prompt"),
        (json.dumps({"question": "x" * 30_000_000}), "a prompt of 30,000,000 characters"),
        ('{"question": 7, "answer": "1"}', "column 'question': a number 7, but text in"),
        ('{"question": ["b"], "answer": "1"}', "column 'question': a list ['b'], but text in"),
        ('{"question": "b", "answer": 2}', "column 'answer': a number 2, but text in"),
        ('{"question": "b"}', "column 'answer': missing answer (None)"),
        ('{"question": "b", "answer": " "}', "column 'answer': missing answer (' ')"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, reason):
    name = write(tmp_path / "bad.jsonl", GOOD, "", GOOD, line, GOOD)
    message = refusal(name, answer_column="answer")
    assert f"{name}, line 4" in message
    assert reason in message
    assert message.count(f"{name}, line") == (2 if "but text in" in reason else 1)


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user", "content": "x" * 5_000_000}],
        [{"role": "user", "content": [{"type": "text", "text": "x" * 3_000_000}] * 2}],
        "[{'role': " + "'role':'user'" * 400_000,  # the pattern of a conversation was quadratic
    ],
)
def test_a_prompt_is_bounded_in_all_its_parts_and_in_time(prompt):
    begins = time.monotonic()
    with pytest.raises(RowError, match=r"a prompt of \d,\d{3},\d{3} characters"):
        convert({"prompt": prompt}, Plan("prompt"))
    assert time.monotonic() - begins < 10


def test_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"question": "\xe9"}\n')
    assert f"{path}, line 2: not UTF-8" in refusal(path)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([{"content": "x"}], "message 1 has no 'role'"),
        ([{"role": "user"}], "message 1 (user) has no 'content'"),
        (["hello"], "message 1 is 'hello'"),
        (3, "3 is neither text nor a list of messages"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path, prompt, reason):
    name = write_jsonl(tmp_path / "m.jsonl", [{"prompt": prompt}])
    assert f"{name}, line 1, column 'prompt': {reason}" in refusal(name)


def test_csv_lines_are_those_of_the_file(tmp_path):
    name = write(tmp_path / "c.csv", "prompt,answer", '"a', 'b",1', "", ",2", "d,3")
    assert re.search(rf"{name}, line 5, column 'prompt': (null|empty) prompt", refusal(name))  # as pandas reads it
    name = write(tmp_path / "d.csv", "prompt,answer", '"a', 'b",1', "x", '"c', 'd",2,3')
    assert re.findall(r"line (\d+): (\d) fields", refusal(name)) == [("4", "1"), ("5", "3")]
    name = write(tmp_path / "e.csv", "prompt,answer", "a,1", '"b,2')
    assert f"{name}, line 3: broken CSV" in refusal(name)


def test_broken_json_documents_are_named(tmp_path):
    name = write(tmp_path / "a.json", "[", GOOD + ",", '{"question": oops}', "]")
    assert f"{name}, line 3: broken JSON" in refusal(name)
    name = write(tmp_path / "b.json", f"[{GOOD}, {GOOD}, 5]")
    assert f"{name}, row 2 (from 0): 5 is not a JSON object" in refusal(name)
    name = write(tmp_path / "c.json", f'[{GOOD}, {{"question": ""}}]')
    assert f"{name}, row 1 (from 0), column 'question': empty prompt" in refusal(name)


def test_five_bad_rows_are_reported_and_all_are_counted(tmp_path):
    name = write_jsonl(tmp_path / "many.jsonl", [*ROWS, *[{"question": ""}] * 7])
    message = refusal(name)
    assert re.findall(r"line (\d+)", message) == ["11", "12", "13", "14", "15"]
    assert "7 of its 17 rows are malformed. Correct them all. `on_bad_row: drop`" in message
    name = write(tmp_path / "broken.jsonl", *["{"] * 7)
    assert re.findall(r"line (\d+)", refusal(name)) == ["1", "2", "3", "4", "5"]


def test_a_stream_names_the_line_when_it_gets_there(tmp_path):
    name = write(tmp_path / "s.jsonl", GOOD, "", '{"question": " ", "answer": "1"}')
    train, _ = load(name, streaming=True)
    rows = iter(train)
    assert next(rows)["solution"] == "1"
    with pytest.raises(DataError, match=re.escape(f"{name}, line 3, column 'question': empty prompt")):
        next(rows)


def test_other_sources_name_source_and_row(tmp_path):
    dataset = Dataset.from_dict({"prompt": ["a", "", "c"]})
    with pytest.raises(DataError, match=r"mixture, row 1 \(from 0\), column 'prompt': empty prompt"):
        prepare(Split(dataset, "mixture"), DataConfig())
    dataset.save_to_disk(tmp_path / "saved")
    assert f"{tmp_path / 'saved'}, split train, row 1 (from 0), column 'prompt'" in refusal(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "p.parquet")
    assert f"{tmp_path / 'p.parquet'}, row 1 (from 0), column 'prompt'" in refusal(tmp_path / "p.parquet")


@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize("name", ["e.jsonl", "e.json"])
def test_an_empty_file_is_refused(tmp_path, content, name):
    (tmp_path / name).write_text(content)
    assert str(tmp_path / name) in refusal(tmp_path / name)


def test_an_empty_dataset_is_refused(tmp_path):
    assert "no rows" in refusal(write(tmp_path / "e.csv", "prompt,answer"))
    with pytest.raises(DataError, match="mine: no rows"):
        prepare(Split(Dataset.from_dict({"prompt": []}), "mine"), DataConfig())


def test_a_broken_parquet_file_is_named(tmp_path):
    assert "p.parquet, split train: cannot be loaded" in refusal(write(tmp_path / "p.parquet", "PAR0"))


# --- preparation -----------------------------------------------------------------------------------------------


def test_a_standard_dataset_is_left_untouched():
    for prompts in (["a", "b"], [USER, USER]):
        dataset = Dataset.from_dict({"prompt": prompts, "solution": [1, None]})
        assert prepare(Split(dataset), DataConfig()) is dataset


@pytest.mark.parametrize(
    ("prompt", "settings", "result"),
    [
        ("Hi", {}, "Hi"),
        ("Hi", {"system_prompt": "S"}, [{"role": "system", "content": "S"}, *USER]),
        (USER, {"system_prompt": "S"}, [{"role": "system", "content": "S"}, *USER]),
        (
            [{"role": "system", "content": "own"}, *USER],
            {"system_prompt": "S"},
            [{"role": "system", "content": "own"}, *USER],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            {"system_prompt": "S"},
            [
                {"role": "system", "content": [{"type": "text", "text": "S"}]},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
        ),
    ],
)
def test_system_prompt(prompt, settings, result):
    assert prepare(Split(Dataset.from_dict({"prompt": [prompt]})), DataConfig(**settings))[0]["prompt"] == result


@pytest.mark.parametrize("column", ["question", "problem", "task"])
def test_a_question_column_becomes_a_conversational_prompt(column, caplog):
    caplog.set_level(logging.INFO, logger="grpo_ext")
    dataset = Dataset.from_dict({column: ["Hi"], "extra": [1]})
    config = DataConfig(prompt_column="task" if column == "task" else None)
    assert prepare(Split(dataset), config)[0] == {column: "Hi", "extra": 1, "prompt": USER}
    assert (f"column {column!r} is used as 'prompt'" in caplog.text) == (column != "task")


@pytest.mark.parametrize("column", ["answer", "final_answer", "gold", "truth"])
def test_an_answer_column_becomes_the_solution(column):
    dataset = Dataset.from_dict({"prompt": ["a", "b"], column: [7, 8]})
    config = DataConfig(answer_column="truth" if column == "truth" else None)
    prepared = prepare(Split(dataset), config)
    assert prepared[:] == {"prompt": ["a", "b"], column: [7, 8], "solution": ["7", "8"]}


def test_the_usual_columns_have_an_order(caplog):
    row = {"problem": "p", "question": "q", "answer": "a", "gold": "g", "solution": "s"}
    prepared = prepare(Split(Dataset.from_list([row])), DataConfig())[0]
    assert (prepared["prompt"][0]["content"], prepared["solution"]) == ("q", "s")
    prepared = prepare(Split(Dataset.from_list([row])), DataConfig(prompt_column="problem", answer_column="gold"))[0]
    assert (prepared["prompt"][0]["content"], prepared["solution"], prepared["answer"]) == ("p", "g", "a")
    assert "answer_column='gold' replaces the column 'solution'" in caplog.text


def test_gaps_in_an_answer_column_nobody_named_stay_gaps():
    prepared = prepare(Split(Dataset.from_dict({"prompt": ["a", "b"], "answer": [3, None]})), DataConfig())
    assert list(prepared["solution"]) == ["3", None]


@pytest.mark.parametrize(
    ("read", "text", "answer"),
    [
        (gsm8k_answer, "6*7 = 42\n#### 42", "42"),
        (gsm8k_answer, "#### 1 #### 1,080 ", "1080"),
        (gsm8k_answer, "#### -1,234,567.5", "-1234567.5"),
        (gsm8k_answer, "#### 1,2", "1,2"),
        (gsm8k_answer, "#### yes, 3", "yes, 3"),
        (boxed_answer, r"so \boxed{4}.", "4"),
        (boxed_answer, r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (boxed_answer, r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (boxed_answer, r"\boxed{ \left\{x\right. }", r"\left\{x\right."),
    ],
)
def test_answers_are_read_by_their_format(read, text, answer):
    assert read(text) == answer


@given(
    st.recursive(st.text("ab1 ", max_size=4), lambda inner: st.tuples(inner, inner).map(lambda t: f"{t[0]}{{{t[1]}}}"))
)
def test_any_balanced_content_comes_back_out_of_its_box(content):
    if content.strip():
        assert boxed_answer(f"x \\boxed{{{content}}} y}}") == content.strip()


@pytest.mark.parametrize(
    ("answer_format", "text", "reason"),
    [
        ("gsm8k", "42", "no text after '####' in '42'"),
        ("gsm8k", "42 ####", "no text after '####'"),
        ("boxed", "42", r"no filled \boxed{...} in '42'"),
        ("boxed", r"\boxed{4", r"no filled \boxed{...}"),
        ("boxed", r"\boxed{ }", r"no filled \boxed{...}"),
        ("boxed", None, "missing answer (None)"),
    ],
)
def test_an_answer_without_its_format_is_named(tmp_path, answer_format, text, reason):
    marked = {"prompt": "a", "solution": r"#### 1 \boxed{1}"}
    name = write_jsonl(tmp_path / "f.jsonl", [marked, {"prompt": "b", "solution": text}])
    message = refusal(name, answer_format=answer_format)
    assert f"{name}, line 2, column 'solution': {reason}" in message
    assert "line 1" not in message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt_column": "questoin"}, "prompt_column='questoin': not a column of mine. Did you mean 'question'?"),
        ({"answer_column": "answr"}, "answer_column='answr': not a column of mine. Did you mean 'answer'?"),
    ],
)
def test_a_missing_column_is_named(settings, reason):
    with pytest.raises(DataError, match=re.escape(reason)):
        prepare(Split(Dataset.from_list(ROWS), "mine"), DataConfig(**settings))


def test_no_usual_column_at_all():
    with pytest.raises(
        DataError, match=r"mine has none of the columns prompt, question, problem.*its columns: text, n"
    ):
        prepare(Split(Dataset.from_dict({"text": ["a"], "n": [1]}), "mine"), DataConfig())
    with pytest.raises(DataError, match="answer_format='boxed': no column of dataset holds answers"):
        prepare(Split(Dataset.from_dict({"prompt": ["a"]})), DataConfig(answer_format="boxed"))


RESERVED = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"]


@pytest.mark.parametrize("name", RESERVED)
def test_columns_that_collide_with_trl_are_refused(name, tmp_path):
    assert check_columns(["prompt", "solution", "completion", name]) == check_columns([name])
    assert f"column {name!r}: TRL passes its own" in str(check_columns([name])[0])
    path = write_jsonl(tmp_path / "c.jsonl", [{"prompt": "a", name: "x"}])
    for streaming in (False, True):
        assert f"Rename it, for example to 'dataset_{name}'" in refusal(path, streaming=streaming)


def test_reserved_names_are_what_trl_passes():
    import inspect

    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._calculate_rewards)
    assigned = re.findall(r'\breward_kwargs\["(\w+)"\] =', source)
    (call,) = set(re.findall(r"reward_func\(\s*(prompts=.*?)\*\*reward_kwargs", source, re.DOTALL))
    assert {*assigned, *re.findall(r"(\w+)=", call)} == set(RESERVED)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_reserved_name_may_be_the_prompt_column(tmp_path, streaming):
    path = write_jsonl(tmp_path / "c.jsonl", [{"prompts": "Hi"}])
    train, _ = load(path, prompt_column="prompts", streaming=streaming)
    assert list(train) == [{"prompt": USER}]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template=template)


@pytest.mark.parametrize("streaming", [False, True])
def test_long_prompts_are_dropped_whole(tokenizer, caplog, streaming):
    caplog.set_level(logging.INFO, logger="grpo_ext")
    prompts = [[{"role": "user", "content": "w " * n}] for n in range(1, 8)]  # n words, a role, a generation prompt
    dataset = Dataset.from_dict({"prompt": prompts})
    source = dataset.to_iterable_dataset() if streaming else dataset
    kept = prepare(Split(source), DataConfig(max_prompt_length=5), tokenizer)
    assert [row["prompt"] for row in kept] == prompts[:3]
    assert ("4 of 7 prompts are longer than 5 tokens" in caplog.text) == (not streaming)


def test_plain_prompts_are_measured_without_a_template(tokenizer):
    dataset = Dataset.from_dict({"prompt": ["w " * n for n in range(1, 8)]})
    assert len(prepare(Split(dataset), DataConfig(max_prompt_length=5), tokenizer)) == 5


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_are_measured_with_the_options_of_the_template(tmp_path, tokenizer, streaming):
    template = tokenizer.chat_template + "{% if thinking %} think hard{% endif %}"
    longer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, unk_token="?", chat_template=template)
    name = write_jsonl(tmp_path / "d.jsonl", [{"question": "w " * n} for n in range(1, 8)])
    for options, kept in (({}, 3), ({"thinking": False}, 3), ({"thinking": True}, 1)):
        train, _ = load_datasets(
            name,
            DataConfig(max_prompt_length=5),
            streaming=streaming,
            eval_needed=False,
            tokenizer=longer,
            template_kwargs=options,
        )
        assert len(list(train)) == kept


def test_a_length_that_leaves_nothing_is_refused(tokenizer, caplog):
    dataset = Dataset.from_dict({"prompt": [USER, USER]})
    with pytest.raises(DataError, match="drops all 2 rows of dataset; the shortest prompt has 3 tokens"):
        prepare(Split(dataset), DataConfig(max_prompt_length=2), tokenizer)
    assert len(prepare(Split(dataset), DataConfig(max_prompt_length=2))) == 2
    assert "max_prompt_length=2 is not applied: no tokenizer" in caplog.text


# --- sizes and splits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("test_size", "held_out"), [(0.25, 2), (3, 3), (1.0, 1), (0.01, 1)])
def test_rows_are_held_out_when_there_is_no_test_split(tmp_path, test_size, held_out):
    name = write_jsonl(tmp_path / "d.jsonl", ROWS)
    train, evaluation = load(name, eval_needed=True, test_size=test_size)
    assert len(evaluation) == held_out
    assert sorted([*train["level"], *evaluation["level"]]) == list(range(10))
    assert load(name, test_size=test_size)[1]["level"][:] == evaluation["level"][:]


def test_the_split_follows_its_seed(tmp_path):
    name = write_jsonl(tmp_path / "d.jsonl", ROWS)
    levels = [load(name, test_size=5, split_seed=seed)[1]["level"][:] for seed in (0, 0, 1)]
    assert levels[0] == levels[1] != levels[2]


def test_a_test_split_wins_over_test_size(tmp_path, caplog):
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS[:7])
    write_jsonl(tmp_path / "set" / "test.jsonl", ROWS[7:])
    train, evaluation = load(tmp_path / "set", eval_needed=True, test_size=2)
    assert (len(train), len(evaluation)) == (7, 3)
    assert "test_size=2 is not applied" in caplog.text


def test_evaluation_without_rows_for_it_is_refused(tmp_path):
    name = write_jsonl(tmp_path / "d.jsonl", ROWS)
    refused = refusal(name, eval_needed=True)
    assert "Set test_size: 0.1 to hold rows out. Or evaluate on other data" in refused
    assert "test_size=10: this holds out 10 of 10 rows" in refusal(name, eval_needed=True, test_size=10)
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    refused = refusal(tmp_path / "set", eval_needed=True)
    assert "dataset_test_split='test': evaluation needs this split" in refused
    assert "Set dataset_test_split to its name. Set test_size: 0.1" in refused


@pytest.mark.parametrize("streaming", [False, True])
def test_max_samples_takes_the_first_rows_of_each_split(tmp_path, streaming):
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "set" / "test.jsonl", ROWS[:2])
    train, evaluation = load(tmp_path / "set", eval_needed=True, max_samples=3, streaming=streaming)
    assert [row["level"] for row in train] == [0, 1, 2]
    assert [row["level"] for row in evaluation] == [0, 1]


# --- the hub ---------------------------------------------------------------------------------------------------


def test_other_names_go_to_the_hub(monkeypatch):
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options))
        if options["split"] == "test":
            raise ValueError("Unknown split \"test\". Should be one of ['train'].")
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    settings = DataConfig(test_size=4)
    train, evaluation = load_datasets("owner/name", settings, dataset_config="main", eval_needed=True)
    assert (len(train), len(evaluation)) == (6, 4)
    expected = [("owner/name", {"name": "main", "split": s, "streaming": False}) for s in ("train", "test")]
    assert calls == expected


def test_a_name_the_hub_cannot_give_is_named(monkeypatch):
    def load_dataset(path, **options):
        raise ConnectionError("offline")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert "owner/name, split train: cannot be loaded: ConnectionError: offline" in refusal("owner/name")


# --- procedural tasks ------------------------------------------------------------------------------------------

TASKS = ["chain_sum", "basic_arithmetic", "gcd", "prime_factorization", "graph_color", "mini_sudoku", "word_sorting"]


@pytest.mark.extra("tasks")
@pytest.mark.parametrize("task", TASKS)
def test_a_task_scores_its_own_answers_after_json(task):
    import reasoning_gym

    train, evaluation = load(f"reasoning_gym/{task}", eval_needed=True, dataset_kwargs={"size": 20, "seed": 5})
    assert (len(train), len(evaluation)) == (20, 2)
    for row in [*train, *evaluation]:
        entry = json.loads(row["reasoning_gym_entry"])
        score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        answer = json.dumps(entry["metadata"]["possible_answer"]) if task == "graph_color" else row["solution"]
        assert score(answer, entry) == 1.0
        assert score("0", entry) < 1.0
        assert row["prompt"] == [{"role": "user", "content": entry["question"]}]
    assert (train[0]["solution"] is None) == (task == "graph_color")


@pytest.mark.extra("tasks")
def test_a_task_is_the_same_on_every_rank():
    first, second = (load("reasoning_gym/gcd", eval_needed=True, dataset_kwargs={"size": 8}) for _ in range(2))
    assert [split[:] for split in first] == [split[:] for split in second]


@pytest.mark.extra("tasks")
def test_training_and_evaluation_of_a_task_are_disjoint(caplog):
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 60}
    train, evaluation = load("reasoning_gym/chain_sum", eval_needed=True, test_size=30, dataset_kwargs=small)
    trained, evaluated = ({prompt[0]["content"] for prompt in split["prompt"]} for split in (train, evaluation))
    assert len(train) == 60
    assert len(evaluated) == len(evaluation) == 30
    assert not trained & evaluated
    # what evaluation would draw first is in training too, so that the test can fail
    unfiltered = tasks._unseen_rows("chain_sum", {**small, "seed": 0}, set(), 30)
    assert {tasks._question(row) for row in unfiltered} & trained


@pytest.mark.extra("tasks")
def test_the_evaluation_of_a_task_does_not_move_with_the_training_size():
    evaluations = [
        load("reasoning_gym/chain_sum", test_size=5, dataset_kwargs={"size": size})[1]["prompt"][:] for size in (3, 12)
    ]
    assert evaluations[0] == evaluations[1]


@pytest.mark.extra("tasks")
def test_a_task_with_nothing_left_to_evaluate_on_is_refused(caplog):
    tiny = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 2}
    assert "none is left to evaluate on" in refusal(
        "reasoning_gym/gcd", eval_needed=True, dataset_kwargs={**tiny, "size": 50}
    )
    _, evaluation = load("reasoning_gym/gcd", test_size=50, dataset_kwargs={**tiny, "size": 1})
    assert 1 <= len(evaluation) <= 3
    assert "the task has few questions" in caplog.text


@pytest.mark.extra("tasks")
def test_a_task_that_json_breaks_is_refused():
    assert "reasoning_gym/rearc: its verifier scores the task's own answer 1.0 before and 0.05 after" in refusal(
        "reasoning_gym/rearc", dataset_kwargs={"size": 2}
    )


@pytest.mark.extra("tasks")
def test_a_mixture_of_tasks():
    specs = [{"name": "gcd", "config": {"max_value": 9}}, {"name": "lcm", "weight": 2.0}]
    train, _ = load("reasoning_gym/composite", dataset_kwargs={"datasets": specs, "size": 20})
    sources = {json.loads(entry)["metadata"]["source_dataset"] for entry in train["reasoning_gym_entry"]}
    assert sources == {"gcd", "lcm"}
    specs[1]["name"] = "lmc"
    assert "no such task. Did you mean 'lcm'?" in refusal(
        "reasoning_gym/composite", dataset_kwargs={"datasets": specs}
    )


@pytest.mark.extra("tasks")
def test_settings_reach_procedural_rows():
    train, _ = load("reasoning_gym/gcd", system_prompt="S", max_samples=3, dataset_kwargs='{"size": 9}')
    assert len(train) == 3
    assert train[0]["prompt"][0] == {"role": "system", "content": "S"}


def test_quickstart_is_delegated(monkeypatch):
    calls = []

    def task_load(*, size=None):
        calls.append(size)
        return tuple(Dataset.from_list([{"prompt": USER, "solution": s}]) for s in "12")

    monkeypatch.setattr("grpo_ext.quickstart.task.load", task_load)
    train, evaluation = load("quickstart/addition", eval_needed=True, dataset_kwargs={"size": 5})
    assert (calls, train["solution"][0], evaluation["solution"][0]) == ([5], "1", "2")
    assert load("quickstart/addition")[1] is None
    refused = refusal("quickstart/addition", dataset_kwargs={"sise": 5})
    assert "dataset_kwargs.sise=5: the quickstart has no such option. Did you mean 'size'?" in refused


# --- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("a/b", {"max_samples": 0}, "max_samples=0: must be 1 or more"),
        ("a/b", {"max_samples": 2.5}, "max_samples=2.5: a number with a fraction where a whole number is expected"),
        ("a/b", {"max_prompt_length": -1}, "max_prompt_length=-1"),
        ("a/b", {"split_seed": -1}, "split_seed=-1"),
        ("a/b", {"split_seed": None}, "split_seed=None"),
        ("a/b", {"test_size": 0}, "test_size=0: must be a fraction"),
        ("a/b", {"test_size": 1.5}, "test_size=1.5"),
        ("a/b", {"test_size": "many"}, "test_size='many'"),
        ("a/b", {"test_size": float("nan")}, "test_size=nan"),
        ("a/b", {"system_prompt": " "}, "system_prompt=' ': must be text"),
        ("a/b", {"prompt_column": 3}, "prompt_column=3: a whole number where text is expected"),
        ("a/b", {"answer_format": "gsmk8"}, "answer_format='gsmk8': not one of its values. Did you mean 'gsm8k'?"),
        ("a/b", {"answer_format": "xyz"}, "Known: boxed, gsm8k."),
        ("a/b", {"dataset_kwargs": {"size": 1}}, "'a/b' is not a procedural task"),
        (None, {"dataset_kwargs": {"size": 1}}, "'datasets' is not a procedural task"),
        ("", {}, "dataset_name='': must be a name or a path"),
        ("reasoning_gym/chain_summ", {}, "no such task. Did you mean 'chain_sum'"),
        (
            "reasoning_gym/chain_sum",
            {"dataset_kwargs": {"min_term": 2}},
            "dataset_kwargs.min_term=2: 'chain_sum' has no such option. Did you mean 'min_terms'",
        ),
        ("reasoning_gym/chain_sum", {"dataset_kwargs": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >="),
        (
            "reasoning_gym/chain_sum",
            {"dataset_kwargs": {"min_terms": "two"}},
            "min_terms='two': text where a whole number is expected",
        ),
        ("reasoning_gym/chain_sum", {"dataset_kwargs": {"size": 0}}, "size=0: must be 1 or more"),
        ("reasoning_gym/chain_sum", {"dataset_kwargs": {"seed": None}}, "dataset_kwargs.seed=None"),
        ("reasoning_gym/chain_sum", {"dataset_kwargs": "{min"}, "dataset_kwargs='{min': not JSON"),
        ("reasoning_gym/chain_sum", {"dataset_kwargs": "[1]"}, "dataset_kwargs=[1]: not a mapping"),
        ("reasoning_gym/chain_sum", {"answer_format": "boxed"}, "answer_format='boxed'"),
        ("reasoning_gym/chain_sum", {"prompt_column": "q"}, "makes its own columns"),
        *(
            ("reasoning_gym/chain_sum", {"dataset_kwargs": options}, reason)
            for options, reason in (
                ({"min_terms": 2.5}, "min_terms=2.5: a number with a fraction where a whole number is expected"),
                ({"min_terms": True}, "min_terms=True: a yes or no where"),
                ({"allow_negation": "no"}, "allow_negation='no': text where true or false is expected"),
                ({"allow_negation": 1}, "allow_negation=1: a whole number where true or false"),
            )
        ),
        *(
            ("quickstart/addition", {"dataset_kwargs": options}, reason)
            for options, reason in (
                ({"size": 100000}, "size=100000: must be from 1 to 7979"),
                ({"size": 0}, "size=0: must be from 1 to"),
                ({"size": True}, "size=True: a yes or no where"),
                ({"eval_size": 1.5}, "eval_size=1.5: a number with a fraction"),
                ({"eval_split": "foo"}, "eval_split='foo': not one of its values"),
                ({"eval_split": ["validation"]}, "eval_split=['validation']: a list where"),
                ({"seed": None}, "seed=None: null where"),
            )
        ),
        ("quickstart/addition", {"test_size": 5}, "brings its own evaluation split"),
        ("./nothing/here", {}, "dataset_name='./nothing/here': no such file or folder"),
        ("nothing.jsonl", {}, "dataset_name='nothing.jsonl': no such file or folder"),
    ],
)
def test_problems_are_seen_without_loading(name, settings, reason):
    if name and name.startswith("reasoning_gym/"):
        need("tasks")
    found = dataset_problems(DataConfig(**settings), name)
    assert len(found) == 1
    assert reason in str(found[0])


@dataclasses.dataclass
class Options:
    names: list[str]
    max_time: object = None
    size: int = 1
    seed: int | None = None
    p: float = 0.1
    top: int | None = 3


@pytest.mark.extra("tasks")
def test_options_of_the_declared_type_are_valid(monkeypatch):
    from reasoning_gym.factory import DATASETS

    quick = {"size": 5, "eval_size": None, "eval_split": "validation", "seed": 3}
    assert dataset_problems(DataConfig(dataset_kwargs=quick), "quickstart/addition") == []
    assert dataset_problems(DataConfig(dataset_kwargs={"allow_negation": True}), "reasoning_gym/chain_sum") == []
    monkeypatch.setattr("reasoning_gym.factory.DATASETS", {"t": (DATASETS["chain_sum"][0], Options)})
    for options in ({"p": 1}, {"p": 0.5}, {"max_time": "x"}, {"top": None}):  # an integer is a valid float
        assert dataset_problems(DataConfig(dataset_kwargs={"names": ["x"], **options}), "reasoning_gym/t") == []
    [problem] = dataset_problems(DataConfig(dataset_kwargs={"top": "x"}), "reasoning_gym/t")
    assert "top='x': text where a whole number is expected" in str(problem)


@pytest.mark.parametrize("name", ["quickstart/addition", "reasoning_gym/gcd"])
def test_a_task_has_no_other_splits(name):
    if name.startswith("reasoning_gym/"):
        need("tasks")
    for splits in ({"train_split": "nope"}, {"train_split": "train[:5]"}, {"test_split": "zip"}):
        ((key, value),) = splits.items()
        with pytest.raises(DataError, match=re.escape(f"dataset_{key}={value!r}: {name!r} makes only")):
            load_datasets(name, DataConfig(), eval_needed=False, **splits)


def test_problems_of_paths_and_streams(tmp_path):
    name = write_jsonl(tmp_path / "train.jsonl", ROWS)
    text = write(tmp_path / "notes.jsonlx", "x")
    for found, reason in (
        (dataset_problems(DataConfig(), str(tmp_path / "trian.jsonl")), "Did you mean 'train.jsonl' or"),
        (dataset_problems(DataConfig(), text), "files ending in '.jsonlx' cannot be read. Did you mean '.jsonl'"),
        (dataset_problems(DataConfig(), name, dataset_config="main"), "is one file. Unset dataset_config"),
        (dataset_problems(DataConfig(test_size=3), "a/b", streaming=True), "rows cannot be held out from a stream"),
        (dataset_problems(DataConfig(), "reasoning_gym/gcd", streaming=True), "is made in memory"),
    ):
        assert reason in str(found[0])
    assert dataset_problems(DataConfig(), name) == dataset_problems(DataConfig(), "a/b", streaming=True) == []


def test_all_problems_of_columns_splits_and_rows_are_reported_at_once(tmp_path):
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "set" / "test.jsonl", [{**ROWS[0], "question": ""}])
    lines = refusal(tmp_path / "set", eval_needed=True, prompt_column="questoin", answer_column="answr").splitlines()
    assert [line.partition("=")[0] for line in lines] == ["prompt_column", "answer_column"] * 2
    with pytest.raises(DataError) as caught:
        load_datasets(str(tmp_path / "set"), DataConfig(), eval_needed=True, train_split="nope")
    no_split, empty = map(str, caught.value.problems)
    assert "split nope: no such split" in no_split
    assert "empty prompt" in empty
