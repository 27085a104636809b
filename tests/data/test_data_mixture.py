"""The key `datasets`: checked, loaded without altering a value, and put together as TRL does."""

import json
import re

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import DatasetMixtureConfig, get_dataset

from grpo_ext.data.config import DataConfig
from grpo_ext.data.mixture import check_mixture, is_local, load_mixture
from grpo_ext.errors import DataError
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import datasets_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def mixture(*entries, **settings):
    return DatasetMixtureConfig(datasets=[{"path": "./a.jsonl", **entry} for entry in entries], **settings)


@pytest.fixture
def files(tmp_path):
    for name in "ab":
        lines = (f'{{"prompt": "{name}{i}", "solution": "2023-01-0{i + 1}", "more": {i}}}\n' for i in range(6))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        rows = [{"prompt": f"{name}{i}"} for i in range(6)]
        Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")


@pytest.mark.parametrize(
    ("entry", "settings", "reason"),
    [
        ({"path": 5}, {}, "datasets[0].path=5: a whole number where text is expected"),
        ({"path": "./nope"}, {}, "datasets[0].path='./nope': no such file or folder"),
        ({"path": '[{"path": "x"}]'}, {}, "a mixture cannot be given on the command line"),
        ({"columns": 5}, {}, "columns=5: a whole number where a list of names is expected"),
        ({"columns": [5]}, {}, "columns=[5]: a list where a list of names"),
        ({"split": None}, {}, "datasets[0].split=None: null where text"),
        ({"name": 3}, {}, "datasets[0].name=3: a whole number where text"),
        ({"data_files": 3}, {}, "datasets[0].data_files=3: a whole number where"),
        ({"fraction": -1}, {}, "fraction=-1: must be above 0"),
        ({"fraction": 1}, {"streaming": True}, "fraction=1 with streaming=True"),
        ({}, {"test_split_size": -1}, "test_split_size=-1: must be a fraction"),
        ({}, {"test_split_size": 5.5}, "test_split_size=5.5: must be"),
        ({}, {"test_split_size": 0.5, "streaming": True}, "test_split_size=0.5 with streaming=True"),
    ],
)
def test_a_mixture_is_checked_before_it_is_loaded(files, entry, settings, reason):
    with pytest.raises(DataError, match=re.escape(reason)) as caught:
        check_mixture(mixture(entry, **settings))
    assert "\n" not in str(caught.value)


def test_fractions_are_for_all_or_none(files):
    with pytest.raises(DataError, match=r"datasets\[1\].fraction=None"):
        check_mixture(mixture({"fraction": 0.5}, {}))


@pytest.mark.parametrize("streaming", [False, True])
def test_values_of_a_mixture_are_not_altered(files, streaming):
    entries = [{}, {"path": "json", "data_files": "b.jsonl"}]
    given = mixture(*entries, streaming=streaming)
    rows = list(load_mixture(given, DataConfig())["train"])
    assert is_local(given)
    assert [row["prompt"] for row in rows] == [f"{name}{i}" for name in "ab" for i in range(6)]
    assert [row["solution"] for row in rows] == [f"2023-01-0{i + 1}" for i in range(6)] * 2


@pytest.mark.parametrize("fractions", [(None, None), (1, 3), (0.5, 0.5)])
def test_datasets_are_put_together_as_trl_does(files, fractions):
    entries = [
        {"path": "parquet", "data_files": f"{name}.parquet", "columns": ["prompt"], "fraction": fraction}
        for name, fraction in zip("ab", fractions, strict=True)
    ]
    ours, theirs = load_mixture(mixture(*entries), DataConfig()), get_dataset(mixture(*entries))
    assert ours["train"][:] == theirs["train"][:]


@pytest.mark.parametrize(("size", "held_out"), [(0.25, 3), (5, 5), (5.0, 5)])
def test_the_split_is_the_same_in_every_process(files, size, held_out):
    first, second = (
        load_mixture(mixture({}, {"path": "./b.jsonl"}, test_split_size=size), DataConfig()) for _ in "12"
    )
    assert (len(first["train"]), len(first["test"])) == (12 - held_out, held_out)
    assert first["test"][:] == second["test"][:]


@pytest.mark.parametrize(
    ("entries", "settings", "reason"),
    [
        ([{"columns": ["prompt", "nope"]}], {}, "datasets[0] (./a.jsonl), columns: 'nope' is not a column"),
        ([{"split": "nope"}, {}], {}, "./a.jsonl, split nope: no such split, a.jsonl being one file"),
        ([{}], {"test_split_size": 6}, "holds out 6 of 6 rows"),
        ([{"path": "json", "data_files": "none.jsonl"}], {}, "datasets[0] (json), split train: cannot be loaded"),
    ],
)
def test_problems_that_loading_finds_are_named(files, entries, settings, reason):
    with pytest.raises(DataError, match=re.escape(reason)):
        load_mixture(mixture(*entries, **settings), DataConfig())


@pytest.mark.parametrize("source", [{"dataset_name": "./long.jsonl"}, {"datasets": [{"path": "./long.jsonl"}]}])
def test_a_recipe_measures_prompts_with_its_template_options(tmp_path, source):
    (tmp_path / "long.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}]}\n' * 2)
    settings = {
        "model_name_or_path": "quickstart",
        "reward_funcs": ["format"],
        "max_prompt_length": 9,
        "use_cpu": True,
    }
    settings |= {"num_generations": 2, "per_device_train_batch_size": 2, "bf16": False, "report_to": "none", **source}
    (tmp_path / "r.yaml").write_text(json.dumps(settings))
    argv = ["--config", str(tmp_path / "r.yaml"), "--chat_template_kwargs", '{"words": 9}']
    with pytest.raises(DataError, match="the shortest prompt has 10 tokens"):
        datasets_of(load_recipe(argv), Tokens())
    assert len(datasets_of(load_recipe(argv[:2]), Tokens())[0]) == 2


class Tokens(PreTrainedTokenizerBase):
    """A tokenizer whose template writes one token and `words` more."""

    def __init__(self):
        pass

    def apply_chat_template(self, messages, *, words=0, **_):
        return {"input_ids": [0] * (1 + words)}


def test_datasets_of_a_mixture_may_have_different_column_names(tmp_path):
    for name, row in (("a", {"question": "1 + 1", "answer": "2"}), ("b", {"problem": "2 + 2", "gold": "4"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    entries = [{"path": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    whole = load_mixture(mixture(*entries), DataConfig())["train"]
    assert (whole["question"][:], whole["solution"][:]) == (["1 + 1", "2 + 2"], ["2", "4"])  # a message each
    same = load_mixture(mixture(entries[0], entries[0]), DataConfig())["train"]
    assert same.column_names == ["question", "answer"]  # nothing to bring under one name


def test_prompts_of_a_mixture_are_all_messages_or_all_text(tmp_path):
    message = [{"role": "user", "content": "1 + 1"}]
    for name, row in (("text", {"prompt": "1 + 1"}), ("chat", {"prompt": message}), ("asked", {"question": "2 + 2"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    chat, text, asked = ({"path": str(tmp_path / f"{name}.jsonl")} for name in ("chat", "text", "asked"))
    whole = load_mixture(mixture(chat, asked), DataConfig())["train"]
    assert [row[0]["content"] for row in whole["prompt"]] == ["1 + 1", "2 + 2"]
    with pytest.raises(DataError, match="text in 'prompt' would go to the model as it stands, and in 'question' as a"):
        load_mixture(mixture(text, asked), DataConfig())
    whole = load_mixture(mixture(text, asked), DataConfig(system_prompt="Add."))["train"]
    assert whole["prompt"][:] == ["1 + 1", "2 + 2"]


def test_all_problems_of_a_mixture_are_reported_at_once(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "b.jsonl").write_text("{\n")
    entries = [{"path": str(tmp_path / "a.jsonl"), "columns": ["nope"]}, {"path": str(tmp_path / "b.jsonl")}]
    with pytest.raises(DataError) as caught:
        load_mixture(mixture(*entries), DataConfig())
    assert all(words in str(caught.value) for words in ("'nope'", "line 1: broken"))


@pytest.mark.parametrize(
    ("most", "fractions", "taken"),
    [
        (6, (None, None), {"a": 3, "b": 3}),
        (4, (1, 3), {"a": 1, "b": 3}),
        (7, (None, None), {"a": 4, "b": 3}),
        (99, (None, None), {"a": 6, "b": 6}),
    ],
)
def test_max_samples_takes_from_each_dataset_its_share(files, most, fractions, taken):
    entries = [{"path": f"./{n}.jsonl", "fraction": f} for n, f in zip("ab", fractions, strict=True)]
    rows = load_mixture(mixture(*entries), DataConfig(max_samples=most))["train"]["prompt"]
    assert list(rows) == [f"{name}{i}" for name, count in taken.items() for i in range(count)]


def test_max_samples_that_leaves_a_dataset_out_is_refused(files):
    given = mixture({"fraction": 1}, {"path": "./b.jsonl", "fraction": 5})
    with pytest.raises(DataError, match=r"max_samples=2: no row of datasets\[0\].*Set max_samples: 7"):
        load_mixture(given, DataConfig(max_samples=2))


def test_a_fraction_that_leaves_a_dataset_out_is_refused(files):
    given = mixture({"fraction": 1}, {"path": "./b.jsonl", "fraction": 0.01})
    with pytest.raises(DataError, match=r"datasets\[1\].fraction=0.01: no row of ./b.jsonl would be left"):
        load_mixture(given, DataConfig())


def test_max_samples_of_several_streams_is_refused(files):
    with pytest.raises(DataError, match="max_samples=3 with streaming=True"):
        load_mixture(mixture({}, {"path": "./b.jsonl"}, streaming=True), DataConfig(max_samples=3))
    assert load_mixture(mixture({}, streaming=True), DataConfig(max_samples=3))
