"""Which settings may change when a run resumes; a key without a row in the table of settings is refused."""

import dataclasses
import json

import pytest
from datasets import Dataset, IterableDataset

from grpo_ext import ConfigError, GRPOExtConfig
from grpo_ext.config.setting import Change
from grpo_ext.data.config import DataConfig
from grpo_ext.data.loading import load_datasets
from grpo_ext.recipe.parts import PARTS
from grpo_ext.trainer.checkpoints.identity import SECRET, Changes, changes, data_digest, model_digest, plain, record_of
from support import seeing, tiny
from support.trainers import build


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    return record_of(GRPOExtConfig(str(folder), **tiny.TRAINING), model=tiny.save(folder / "model"))


def test_no_secret_is_written_down(tmp_path):
    record = record_of(GRPOExtConfig(str(tmp_path), hub_token="hf_secret", **tiny.TRAINING))
    assert "hf_secret" not in json.dumps(record)
    assert "hub_token" in SECRET


EFFECTS = {
    "save_steps": Change.NOTHING,
    "rewards.accuracy.timeout": Change.NOTHING,
    "version.torch": Change.NOTHING,
    "use_cpu": Change.ROUNDING,
    "max_steps": Change.LENGTH,
    "gradient_accumulation_steps": Change.SPLIT,
    "model_name_or_path": Change.NOTHING,  # the weights are the same
    "learning_rate": Change.ANOTHER_RUN,
    "generation_batch_size": Change.ANOTHER_RUN,
    "a_key_that_no_table_has": Change.ANOTHER_RUN,
}


@pytest.mark.parametrize("key", EFFECTS)
def test_a_change_of_a_setting_has_the_effect_of_its_kind(key, record):
    found = changes({**record, key: "there"}, {**record, key: "here"}).by_effect
    assert [effect for effect, texts in found.items() if texts] == [EFFECTS[key]]
    [text] = found[EFFECTS[key]]
    assert key in text
    assert "'there'" in text
    assert "'here'" in text
    if EFFECTS[key] is not Change.ANOTHER_RUN:
        assert any(key in sentence for sentence in Changes(found).sentences())


REFUSED = {
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


def test_all_refused_changes_are_named_at_once_with_the_ways_out(tmp_path):
    here = record_of(GRPOExtConfig(str(tmp_path), **(tiny.TRAINING | REFUSED)))
    there = record_of(GRPOExtConfig(str(tmp_path), **tiny.TRAINING))
    refusal = str(changes(there, here).refusal("out/checkpoint-4"))
    for key, value in REFUSED.items():
        assert f"{key}: {there[key]!r} there, {value!r} here" in refusal
    assert "objective." not in refusal
    for way in ("another output_dir", "model_name_or_path: out/checkpoint-4", "--resume_from_checkpoint never"):
        assert way in refusal


def test_another_split_of_the_same_rows_is_allowed_and_of_others_is_not(record):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "world_size": 2}
    found = changes(record, {**record, **sizes})
    assert (len(found.by_effect[Change.SPLIT]), found.refused) == (2, [])
    assert "an optimizer step has the same rows" in " ".join(found.sentences()).lower()
    found = changes(record, {**record, **sizes, "rows_per_step": 16})
    assert {text.partition(":")[0] for text in found.refused} >= {"rows_per_step", "world_size"}
    found = changes(record, {**record, "steps_per_generation": 2, "generation_batch_size": 16})
    assert found.by_effect[Change.SPLIT] == []
    assert len(found.refused) == 2


def test_a_loss_that_means_something_else_in_this_version_is_refused(record):
    found = changes(record, {**record, "objective.aggregation": "elsewhere"})
    assert [text.partition(":")[0] for text in found.refused] == ["objective.aggregation"]


def test_added_and_removed_rewards_are_refused_but_not_their_timeouts(record):
    one = {**record, "of_recipe": True, "rewards.a.weight": 1.0, "rewards.a.timeout": 60.0}
    assert changes(one, {**one, "rewards.a.timeout": 5.0}).refused == []
    assert changes(one, {**one, "rewards.b.weight": 1.0}).refused == ["rewards.b.weight: None there, 1.0 here"]
    assert changes({**one, "rewards.b.weight": 1.0}, one).refused == ["rewards.b.weight: 1.0 there, None here"]


def test_a_trainer_without_a_recipe_may_resume_the_run_of_one(record):
    """It has no record of rewards and data settings."""
    recipes = {**record, "of_recipe": True, "rewards.a.weight": 1.0, "system_prompt": "think"}
    assert changes(recipes, record).refused == []


def test_another_base_model_of_the_same_shape_is_refused(record, tmp_path):
    one, other = tiny.save(tmp_path / "one"), tiny.save(tmp_path / "other", seed=1)
    assert model_digest(one) != model_digest(other)
    assert model_digest(one) == record["model"]
    here = {**record, "model": model_digest(other)}
    assert changes(record, here).refused == [f"model: {record['model']!r} there, {here['model']!r} here"]
    assert changes(record, {**record, "model": None}).refused == []


def test_the_same_model_may_have_another_name(record):
    moved = {"model_name_or_path": "elsewhere"}
    assert changes({**record, "model_name_or_path": "here"}, {**record, **moved}).refused == []
    assert changes({**record, "model_name_or_path": "here", "model": None}, {**record, **moved}).refused


def test_the_digest_of_a_dataset_depends_on_its_rows():
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


@pytest.mark.parametrize("column", ["image", "images"])
def test_images_are_those_of_their_files_wherever_these_are(column, tmp_path):
    digests = []
    for name, seed in (("one", 0), ("moved", 0), ("changed", 1)):
        folder = tmp_path / name
        folder.mkdir()
        seeing.picture(seed).save(folder / "a.png")
        prompt, shown = [{"role": "user", "content": "a"}], ["a.png"] if column == "images" else "a.png"
        (folder / "data.jsonl").write_text(json.dumps({"prompt": prompt, column: shown}) + "\n")
        digests.append(data_digest(load_datasets(str(folder / "data.jsonl"), DataConfig(), eval_needed=False)[0]))
    assert digests[0] == digests[1] != digests[2]


STEPS = {"save_strategy": "steps", "save_steps": 1}


def test_a_trainer_without_a_recipe_is_compared_with_the_checkpoint(tmp_path, caplog):
    model = tiny.save(tmp_path / "model")
    build(model, tmp_path / "out", max_steps=2, **STEPS).train()
    with pytest.raises(ConfigError, match=r"checkpoint-2: it is of another run: learning_rate: 0\.001 there"):
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


def test_a_checkpoint_of_a_version_without_a_key_counts_as_of_its_default():
    """For the keys of all parts of a recipe: a setting that a version adds must not end the runs of the last one."""
    rows = {f.name: f for part in PARTS for f in dataclasses.fields(part) if f.init}
    for key in rows.keys() - SECRET - {"reward_funcs", "reward_weights", "output_dir"}:
        default = rows[key]
        value = default.default if default.default_factory is dataclasses.MISSING else default.default_factory()
        here = {"of_recipe": True, key: plain(value)}
        assert changes({"of_recipe": True}, here).refused == [], key
        assert changes(here, {"of_recipe": True}).refused == [], key
        other = {**here, key: "another"}
        assert vars(changes({"of_recipe": True}, other)) != vars(changes({"of_recipe": True}, here)), key


def with_token(record, token):
    return {**record, "model_init_kwargs": {"token": token} if token else None}


@pytest.mark.parametrize(("there", "here"), [("a", "b"), ("a", None), (None, "b")])
def test_a_token_may_change_appear_or_disappear(there, here, record):
    """Also against a record of a version that wrote tokens."""
    assert changes(with_token(record, there), with_token(record, here)) == Changes()
    kept = {"model_init_kwargs": {"token": there, "rope_theta": 1.0}}
    found = changes({**record, **kept}, with_token(record, here))
    assert len(found.refused) == 1
    assert f"'{there}'" not in found.refused[0]


@pytest.mark.parametrize("value", [None, False, True])
def test_a_setting_of_another_version_counts_only_where_it_is_on(value, record):
    """One that transformers has added may be None by default, and False after its own checks."""
    with_it = {**record, "a_setting_of_transformers": value}
    refused = [changes(record, with_it).refused, changes(with_it, record).refused]
    assert [len(found) for found in refused] == ([1, 1] if value else [0, 0])
