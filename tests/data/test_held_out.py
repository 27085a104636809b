"""Rows held out for evaluation share no prompt with training rows; where a user's own splits do, they are counted."""

import dataclasses
import json
import logging

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import DatasetMixtureConfig

from grpo_ext.commands.check import plan
from grpo_ext.data.config import DataConfig
from grpo_ext.data.held_out import hold_out, shared_prompts
from grpo_ext.data.loading import load_datasets
from grpo_ext.data.mixture import load_mixture
from grpo_ext.errors import ConfigError, DataError
from grpo_ext.recipe.loading import rows_of
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from support import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def chat(text, **more):
    return [{"role": "user", "content": text, **more}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


TEN_PROMPTS = [{"prompt": f"p{i % 10}", "solution": str(i)} for i in range(100)]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=3, max_size=30), st.integers(1, 29), st.integers(0, 3))
def test_no_prompt_is_on_both_sides_and_no_row_is_lost(prompts, number, seed):
    """Not more rows than asked for, but where the rarest prompt has more."""
    rows = Dataset.from_list([{"prompt": str(p), "row": i} for i, p in enumerate(prompts)])
    if number >= len(prompts) or len(set(prompts)) == 1:
        with pytest.raises(DataError, match=r"test_size=0\.5"):
            hold_out(rows, number, seed, setting="test_size", value=0.5)
        return
    train, test = hold_out(rows, number, seed, setting="test_size", value=0.5)
    assert not set(train["prompt"]) & set(test["prompt"])
    assert sorted([*train["row"], *test["row"]]) == list(range(len(prompts)))
    assert 1 <= len(test) <= max(number, min(map(prompts.count, prompts)))
    assert test[:] == hold_out(rows, number, seed, setting="test_size", value=0.5)[1][:]


def test_rows_with_prompts_of_their_own_are_split_as_ever():
    rows = Dataset.from_list([{"prompt": str(i)} for i in range(20)])
    _, test = hold_out(rows, 5, 3, setting="test_size", value=5)
    assert test[:] == rows.train_test_split(test_size=5, seed=3)["test"][:]


def test_test_size_keeps_the_rows_of_a_prompt_together(tmp_path, caplog):
    name = write(tmp_path / "a.jsonl", TEN_PROMPTS)
    with caplog.at_level(logging.WARNING):
        train, test = load_datasets(name, DataConfig(test_size=0.25), eval_needed=True)
    assert (len(train), len(test)) == (80, 20)
    assert not set(train["prompt"]) & set(test["prompt"])
    assert "test_size=0.25: 20 of 100 rows are held out, those of 2 of 10 prompts" in caplog.text
    rows, held = load_datasets(name, DataConfig(test_size=0.25), eval_needed=True, by_prompt=False)
    assert (len(rows), len(held)) == (75, 25)


@pytest.mark.parametrize("column", ["prompt", "question"])
def test_a_mixture_of_a_dataset_with_itself_shares_no_prompt_either(tmp_path, column):
    name = write(tmp_path / "a.jsonl", [{column: f"p{i}"} for i in range(40)])
    mixture = DatasetMixtureConfig(datasets=[{"path": name}, {"path": name}], test_split_size=0.25)
    split = load_mixture(mixture, DataConfig())
    assert not set(split["train"][column]) & set(split["test"][column])
    assert (len(split["train"]), len(split["test"])) == (60, 20)


@pytest.mark.parametrize("held_out", [Dataset.from_list, list])
def test_shared_prompts_are_counted(held_out):
    """A message has keys that are None where another one has them."""
    train = Dataset.from_list([{"prompt": chat("a", name="x")}, {"prompt": chat("b")}])
    rows = [{"prompt": chat("b")}, {"prompt": chat("c")}, {"prompt": chat("b")}]
    [warning] = shared_prompts(train, held_out(rows), "x")
    assert warning.startswith("2 of the 3 rows of x have a prompt that is also trained on")
    assert shared_prompts(train, held_out(rows[1:2])) == []


def test_prompts_with_images_are_other_tasks():
    rows = Dataset.from_list([{"prompt": "What is it?", "image": str(i)} for i in range(8)])
    train, test = hold_out(rows, 2, 0, setting="test_size", value=2)
    assert (len(train), len(test)) == (6, 2)
    assert shared_prompts(train, test) == []


@pytest.mark.parametrize("environments", [False, True])
def test_check_counts_prompts_of_both_splits_and_of_evaluation_sets(tmp_path, environments):
    """The prompt of a game does not say which game it is."""
    (tmp_path / "set").mkdir()
    rows = [{"prompt": chat(f"{i} + {i}?"), "solution": str(2 * i)} for i in range(16)]
    write(tmp_path / "set" / "train.jsonl", rows)
    write(tmp_path / "set" / "test.jsonl", [*rows[:5], {"prompt": chat("new"), "solution": "1"}])
    recipe = tiny.TRAINING | {
        "model_name_or_path": "quickstart",
        "reward_funcs": ["accuracy"],
        "eval_strategy": "steps",
    }
    recipe |= {"dataset_name": str(tmp_path / "set"), "output_dir": str(tmp_path / "out")}
    recipe |= {"eval_strategy": "steps", "eval_steps": 1}
    recipe |= {"eval_sets": [{"name": "again", "dataset_name": str(tmp_path / "set" / "test.jsonl")}]}
    if environments:
        recipe |= {"environments": ["guess"], "reward_funcs": ["format"]}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    preflight = Preflight()
    told = " ".join(
        line for _, line in plan(load_recipe(["--config", str(tmp_path / "r.yaml")], preflight), preflight)["Warnings"]
    )
    assert ("5 of the 6 rows of the evaluation data have a prompt" in told) != environments
    assert ("5 of the 6 rows of eval_sets: again have a prompt" in told) != environments


@pytest.mark.parametrize(("entry", "rows"), [({"dataset_name": "{folder}/a.jsonl"}, 10), ({"split": "extra"}, 6)])
def test_an_evaluation_set_has_all_of_its_rows(tmp_path, entry, rows):
    """`test_size` holds rows out of the training data alone."""
    (tmp_path / "set").mkdir()
    for name, count in (("set/train", 20), ("set/extra", 6), ("a", 10)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": chat(f"{name}{i}"), "solution": "1"} for i in range(count)])
    recipe = tiny.TRAINING | {"model_name_or_path": "quickstart", "reward_funcs": ["accuracy"], "test_size": 0.2}
    recipe |= {"dataset_name": str(tmp_path / "set"), "output_dir": str(tmp_path / "out")}
    recipe |= {"eval_sets": [{"name": "x", **{key: text.format(folder=tmp_path) for key, text in entry.items()}}]}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    loaded = load_recipe(["--config", str(tmp_path / "r.yaml")])
    assert len(rows_of(loaded.eval_sets[0], loaded, None)) == rows
    with pytest.raises(DataError, match=r"source_column='solutoin': no such column.*'solution'"):
        rows_of(dataclasses.replace(loaded.eval_sets[0], source_column="solutoin"), loaded, None)


HARD = {"name": "hard", "dataset_name": "reasoning_gym/chain_sum"}
LEVEL = {"min_terms": 5, "max_terms": 6, "size": 24}


@pytest.mark.extra("tasks")
def test_an_evaluation_set_is_another_level_of_the_trained_task(tmp_path):
    """It has as many rows as its size says, of seeds that training never reaches; train names the trained ones."""
    import reasoning_gym

    entries = [
        HARD | {"dataset_kwargs": LEVEL},
        HARD | {"name": "seen", "dataset_kwargs": LEVEL | {"size": 5}, "split": "train"},
        HARD | {"name": "again", "dataset_kwargs": LEVEL, "split": "test", "limit": 7},
        {"name": "other", "dataset_name": "reasoning_gym/basic_arithmetic"},
        {"name": "adds", "dataset_name": "quickstart/addition", "dataset_kwargs": {"eval_size": 6}},
    ]
    recipe = tiny.TRAINING | {"model_name_or_path": "quickstart", "reward_funcs": ["reasoning_gym"], "beta": 0.0}
    recipe |= {"dataset_name": "reasoning_gym/chain_sum", "dataset_kwargs": {"max_terms": 3, "size": 40}}
    recipe |= {"eval_sets": entries, "output_dir": str(tmp_path / "out"), "test_size": 8}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    preflight = Preflight()
    loaded = load_recipe(["--config", str(tmp_path / "r.yaml")], preflight)
    hard, seen, again, other, adds = ([*rows_of(chosen, loaded, None)] for chosen in loaded.eval_sets)
    assert [*map(len, (hard, seen, again, other, adds))] == [24, 5, 7, 500, 6]
    assert again == hard[:7]
    assert all(row["prompt"][0]["content"].count("+") + row["prompt"][0]["content"].count("-") >= 4 for row in hard)
    for split, first in (("test", hard), ("train", seen)):
        seed = 2**30 if split == "test" else 0
        drawn = reasoning_gym.create_dataset("chain_sum", **{**LEVEL, "seed": seed})[0]["question"]
        assert first[0]["prompt"][0]["content"] == drawn
    assert not preflight.notes


@pytest.mark.extra("tasks")
@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"split": "validation"}, r"hard: split='validation': .* makes only 'train' and 'test'. Unset split"),
        ({"test_size": 5}, r"test_size=5: a set has all rows of its own data"),
        ({"dataset_kwargs": {"max_term": 3}}, r"dataset_kwargs.max_term=3.*'max_terms'"),
    ],
)
def test_check_refuses_an_evaluation_set_that_could_not_be_made(tmp_path, entry, told):
    recipe = tiny.TRAINING | {"model_name_or_path": "quickstart", "reward_funcs": ["reasoning_gym"]}
    recipe |= {"dataset_name": "reasoning_gym/chain_sum", "dataset_kwargs": {"size": 40}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe | {"eval_sets": [HARD | entry]}))
    with pytest.raises(ConfigError, match=told):
        load_recipe(["--config", str(tmp_path / "r.yaml")], Preflight())


def test_a_test_split_that_is_named_and_not_there_is_refused_beside_test_size(tmp_path):
    name = write(tmp_path / "train.jsonl", TEN_PROMPTS)
    with pytest.raises(DataError, match=r"dataset_test_split='tset'.*Remove dataset_test_split"):
        load_datasets(name, DataConfig(test_size=0.2), test_split="tset", eval_needed=True)
