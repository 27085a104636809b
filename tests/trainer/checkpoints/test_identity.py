"""What may change when a run goes on: one table, and every key that is not in it is refused."""

import dataclasses
import json

import pytest
from datasets import Dataset, IterableDataset

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.recipe.parts import PARTS
from grpo_ext.trainer.checkpoints.identity import (
    HARMLESS,
    LENGTH,
    NAMES,
    ROUNDING,
    SECRET,
    SPLIT,
    Changes,
    changes,
    data_digest,
    model_digest,
    plain,
    record_of,
)
from support import tiny
from support.trainers import build

KEYS = {f.name for part in PARTS for f in dataclasses.fields(part) if f.init}
TABLES = {"harmless": HARMLESS, "rounding": ROUNDING, "length": LENGTH, "split": SPLIT, "names": NAMES}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    return record_of(GRPOExtConfig(str(folder), **tiny.TRAINING), model=tiny.save(folder / "model"))


def test_the_table_names_keys_that_exist_and_each_once():
    assert set().union(*TABLES.values()) - KEYS - {"dataloader_multiprocessing_context"} == {"world_size"}
    assert sum(map(len, TABLES.values())) == len(set().union(*TABLES.values()))


def test_no_secret_is_written_down(tmp_path):
    record = record_of(GRPOExtConfig(str(tmp_path), hub_token="hf_secret", **tiny.TRAINING))
    assert "hf_secret" not in json.dumps(record)
    assert "hub_token" in SECRET


def test_nothing_changed_is_nothing_said(record):
    found = changes(record, json.loads(json.dumps(record)))
    assert list(found.sentences()) == []
    assert found.harmful == []


@pytest.mark.parametrize("key", sorted(KEYS - SECRET - {"reward_funcs"}))
def test_every_key_is_honoured_with_a_word_or_refused(key, record):
    found = changes({**record, key: "there"}, {**record, key: "here"})
    listed = {name: getattr(found, name) for name in ("harmless", "rounding", "length", "split", "harmful")}
    kind = next((name for name, table in TABLES.items() if key in table), "harmful")
    kind = {"names": "harmless"}.get(kind, kind)
    if key == "generation_batch_size":
        kind = "harmful"
    assert [name for name, texts in listed.items() if texts] == [kind]
    assert key in listed[kind][0]
    assert "'there'" in listed[kind][0]
    assert "'here'" in listed[kind][0]
    if kind != "harmful":
        assert any(key in sentence for sentence in found.sentences())


HARMFUL = {
    "learning_rate": 0.5,
    "seed": 8,
    "temperature": 0.7,
    "num_generations": 2,
    "max_completion_length": 9,
    "optim": "sgd",
    "loss_type": "dr_grpo",
    "beta": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.5,
    "num_iterations": 2,
}


def test_what_was_silently_accepted_is_refused_all_at_once(tmp_path):
    here = record_of(GRPOExtConfig(str(tmp_path), **(tiny.TRAINING | HARMFUL)))
    there = record_of(GRPOExtConfig(str(tmp_path), **tiny.TRAINING))
    refusal = str(changes(there, here).refusal("out/checkpoint-4"))
    for key, value in HARMFUL.items():
        assert f"{key}: {there[key]!r} there, {value!r} here" in refusal
    assert "objective." not in refusal
    for way in ("another output_dir", "model_name_or_path: out/checkpoint-4", "--resume_from_checkpoint never"):
        assert way in refusal


def test_another_split_of_the_same_rows_is_allowed_and_of_others_is_not(record):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "world_size": 2}
    found = changes(record, {**record, **sizes})
    assert (len(found.split), found.harmful) == (2, [])
    assert "an optimizer step has the same rows" in " ".join(found.sentences()).lower()
    found = changes(record, {**record, **sizes, "rows_per_step": 16})
    assert {text.partition(":")[0] for text in found.harmful} >= {"rows_per_step", "world_size"}
    found = changes(record, {**record, "steps_per_generation": 2, "generation_batch_size": 16})
    assert found.split == []
    assert len(found.harmful) == 2


def test_another_table_of_losses_is_noticed(record):
    found = changes(record, {**record, "objective.aggregation": "elsewhere"})
    assert [text.partition(":")[0] for text in found.harmful] == ["objective.aggregation"]


def test_rewards_that_come_and_go_are_refused_and_their_patience_is_not(record):
    one = {**record, "of_recipe": True, "rewards.a.weight": 1.0, "rewards.a.timeout": 60.0}
    assert changes(one, {**one, "rewards.a.timeout": 5.0}).harmful == []
    assert changes(one, {**one, "rewards.b.weight": 1.0}).harmful == ["rewards.b.weight: None there, 1.0 here"]
    assert changes({**one, "rewards.b.weight": 1.0}, one).harmful == ["rewards.b.weight: 1.0 there, None here"]


def test_a_key_that_only_a_later_version_knows_counts_as_its_default(record):
    elder = {key: value for key, value in record.items() if key != "dynamic_sampling_max_rounds"}
    assert changes(elder, record).harmful == []
    assert changes(elder, {**record, "dynamic_sampling_max_rounds": 9}).harmful


def test_a_trainer_may_go_on_where_a_recipe_was(record):
    """Of rewards and data settings it knows nothing."""
    recipes = {**record, "of_recipe": True, "rewards.a.weight": 1.0, "system_prompt": "think"}
    assert changes(recipes, record).harmful == []


def test_another_base_model_of_the_same_shape(record, tmp_path):
    one, other = tiny.save(tmp_path / "one"), tiny.save(tmp_path / "other", seed=1)
    assert model_digest(one) != model_digest(other)
    assert model_digest(one) == record["model"]
    here = {**record, "model": model_digest(other)}
    assert changes(record, here).harmful == [f"model: {record['model']!r} there, {here['model']!r} here"]
    assert changes(record, {**record, "model": None}).harmful == []


def test_the_model_may_have_moved_but_not_have_become_another(record):
    moved = {"model_name_or_path": "elsewhere"}
    assert changes({**record, "model_name_or_path": "here"}, {**record, **moved}).harmful == []
    assert changes({**record, "model_name_or_path": "here", "model": None}, {**record, **moved}).harmful


def test_data_is_known_by_its_rows():
    rows = [{"prompt": f"{i}", "solution": i} for i in range(1000)]
    same, shorter = Dataset.from_list(rows), Dataset.from_list(rows[:-1])
    swapped = Dataset.from_list([*rows[:-1], {"prompt": "x", "solution": 0}])
    other = Dataset.from_list(rows).shuffle(seed=0)
    digests = [data_digest(data) for data in (same, shorter, swapped, other)]
    assert len(set(digests)) == 4
    assert data_digest(Dataset.from_list(rows)) == digests[0]
    assert digests[0].startswith("1000 rows, ")
    assert data_digest(Dataset.from_list(rows[:3])).startswith("3 rows, ")
    assert data_digest(IterableDataset.from_generator(lambda: iter(rows))) is None


STEPS = {"save_strategy": "steps", "save_steps": 1}


def test_a_trainer_without_a_recipe_is_compared_too(tmp_path, caplog):
    model = tiny.save(tmp_path / "model")
    build(model, tmp_path / "out", max_steps=2, **STEPS).train()
    with pytest.raises(ConfigError, match=r"checkpoint-2 is of another run: learning_rate: 0\.001 there, 0\.002 here"):
        build(model, tmp_path / "out", max_steps=4, learning_rate=0.002, **STEPS).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match="data: '16 rows"):
        build(model, tmp_path / "out", rows=15, max_steps=4, **STEPS).train(resume_from_checkpoint=True)
    assert caplog.text == ""
    trainer = build(model, tmp_path / "out", max_steps=5, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert "Changed since: save_steps 1 -> 2." in caplog.text
    assert "max_steps 2 -> 5. The learning-rate schedule runs to the new end" in caplog.text
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (1, 2, 4, 5)
    ]


def test_true_without_a_checkpoint_is_an_error_as_in_transformers(tmp_path):
    trainer = build(tiny.save(tmp_path / "model"), tmp_path / "out", max_steps=1)
    with pytest.raises(ValueError, match=r"no checkpoint in .*out"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("key", sorted(KEYS - SECRET - {"reward_funcs", "reward_weights", "output_dir"}))
def test_a_checkpoint_of_a_version_without_a_key_counts_as_of_its_default(key, tmp_path):
    """For the keys of all parts of a recipe: a setting that a version adds must not end the runs of the last one."""
    [part] = [part for part in PARTS if key in {f.name for f in dataclasses.fields(part)}][-1:]
    default = {f.name: f for f in dataclasses.fields(part)}[key]
    value = default.default if default.default_factory is dataclasses.MISSING else default.default_factory()
    here = {"of_recipe": True, key: plain(value)}
    assert changes({"of_recipe": True}, here).harmful == []
    assert changes(here, {"of_recipe": True}).harmful == []
    other = {**here, key: "another"}
    assert vars(changes({"of_recipe": True}, other)) != vars(changes({"of_recipe": True}, here))


def with_token(record, token):
    return {**record, "model_init_kwargs": {"token": token} if token else None}


@pytest.mark.parametrize(("there", "here"), [("a", "b"), ("a", None), (None, "b")])
def test_a_token_may_change_come_and_go(there, here, record):
    """Also against a record of a version that wrote it down."""
    assert changes(with_token(record, there), with_token(record, here)) == Changes()
    kept = {"model_init_kwargs": {"token": there, "rope_theta": 1.0}}
    found = changes({**record, **kept}, with_token(record, here))
    assert len(found.harmful) == 1
    assert f"'{there}'" not in found.harmful[0]
