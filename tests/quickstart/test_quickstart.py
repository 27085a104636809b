import os
import random
import re
import threading

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from grpo_ext.caches import use_writable_caches
from grpo_ext.commands import demo
from grpo_ext.errors import ConfigError
from grpo_ext.quickstart import model as quickstart_model
from grpo_ext.quickstart import task
from grpo_ext.quickstart.cache import building, cached
from grpo_ext.quickstart.model import ANSWER_TAGS, build_model, build_tokenizer, ensure_model
from support.commands import command

SPLITS = ("train", "validation", "held_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ensure_model(0, tmp_path_factory.mktemp("cache"), steps=3)
    torch.set_num_threads(threads)


# The task.


def test_no_problem_or_its_mirror_is_in_two_splits():
    pairs = [{frozenset(pair) for pair in task.addition_pairs(split)} for split in SPLITS]
    assert len(set.union(*pairs)) == sum(map(len, pairs))
    assert all(len(found) > 900 for found in pairs)


@pytest.mark.cases(1)
@pytest.mark.parametrize("split", ["validation", "held_out"])
def test_the_seed_shuffles_training_problems_only_and_splits_are_disjoint(split):
    loaded = [task.load(seed=seed, eval_split=split, eval_size=None) for seed in (0, 0, 7)]
    first, again, other = (train["solution"] for train, _ in loaded)
    assert first == again != other
    for train, evaluation in loaded:
        questions = [{row["prompt"][0]["content"] for row in dataset} for dataset in (train, evaluation)]
        assert not questions[0] & questions[1]
        assert evaluation["solution"] == loaded[0][1]["solution"]


def test_every_demonstration_is_right():
    for a, b in (pair for split in SPLITS for pair in task.addition_pairs(split)):
        text = task.demonstration(a, b)
        assert task.COMPLETION_FORMAT.fullmatch(text)
        assert int(task.ANSWER.search(text)[1]) == a + b
        for x, y, z in re.findall(r"(\d+)\+(\d+)=(\d+)", text):
            assert int(x) + int(y) == int(z)


def test_a_demonstration_by_hand():
    expected = "<think>\n8+5=13\n7+8=15\n15+1=16\n4+5=9\n9+1=10\n</think>\n<answer>\n1063\n</answer>"
    assert task.demonstration(478, 585) == expected


def test_a_forgotten_carry_is_the_careless_teachers_only_mistake():
    forgets = iter([True, False])
    text = task.demonstration(478, 585, forgets=lambda: next(forgets))
    assert text == "<think>\n8+5=13\n7+8=15\n4+5=9\n9+1=10\n</think>\n<answer>\n1053\n</answer>"
    draw = random.Random(0)
    wrong = sum(
        task.careless_demonstration(19 + 100, 105 + i % 5, draw) != task.demonstration(119, 105 + i % 5)
        for i in range(2000)
    )
    assert wrong / 2000 == pytest.approx(task.FORGETFULNESS, abs=0.04)  # one carry in each


# The model.


def test_tokenizer_round_trips_and_keeps_tags_whole(folder):
    text = task.demonstration(478, 585) + " free text, too: {it's} ~\n\n  <thin> "
    for tokenizer in (build_tokenizer(), AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder)):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert all(len(tokenizer(tag)["input_ids"]) == 1 for tag in (*ANSWER_TAGS, "\n", "<eos>", "<pad>"))
        assert tokenizer.unk_token_id not in ids


def test_chat_template_ends_the_completion_with_eos():
    tokenizer = build_tokenizer()
    prompt = [{"role": "user", "content": "1+2="}]
    opened = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": "3"}], tokenize=False)
    assert (opened, whole) == ("<user>1+2=<assistant>", "<user>1+2=<assistant>3<eos>")


def test_model_is_small_and_decided_by_its_seed():
    tokenizer = build_tokenizer()
    one, same, other = (build_model(tokenizer, seed).get_input_embeddings().weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 3e5 < build_model(tokenizer).num_parameters() < 1e6


def test_the_saved_folder_loads_and_generates(folder):
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    fresh = build_model(tokenizer, 0)
    assert not torch.equal(loaded.get_input_embeddings().weight, fresh.get_input_embeddings().weight)  # it was trained
    ids = tokenizer("1+2=", return_tensors="pt")
    assert loaded.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] <= ids["input_ids"].shape[1] + 4


def test_a_model_is_cached_by_seed(folder, monkeypatch):
    monkeypatch.setattr(quickstart_model, "warm_up", lambda *_, **__: pytest.fail("trained again"))
    assert ensure_model(0, folder.parent, steps=3) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        ensure_model(1, folder.parent, steps=3)
    monkeypatch.setenv("GRPO_EXT_CACHE", str(folder.parent))
    assert ensure_model(0, steps=3) == folder


def test_a_warm_up_joins_no_process_group_and_is_announced(tmp_path, monkeypatch, caplog):
    """The first of several processes trains it, and the others are not there."""
    monkeypatch.setattr(PartialState, "__init__", lambda *_, **__: pytest.fail("joined"))
    assert ensure_model(0, tmp_path, steps=1).is_dir()
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("Training the quickstart's model for addition, once: 1 steps on the CPU, about a minute.")


def test_two_processes_at_once_share_one_folder(tmp_path, monkeypatch):
    together = threading.Barrier(2, timeout=300)

    def slow_warm_up(directory, seed, *, steps, lesson):
        directory.mkdir()
        (directory / "model").write_text("weights")
        together.wait()

    monkeypatch.setattr(quickstart_model, "warm_up", slow_warm_up)
    found = []
    threads = [threading.Thread(target=lambda: found.append(ensure_model(0, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert list(tmp_path.iterdir()) == [found[0]]


def test_without_a_home_folder_models_are_kept_in_one_of_the_user_for_temporary_files(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "environ", {**os.environ, "HF_HUB_CACHE": "named"})
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GRPO_EXT_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cached("m") == tmp_path / "xdg" / "grpo_ext" / "m"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    own = tmp_path / f"grpo_ext-{os.getuid()}"
    assert cached("m") == own / "m"
    use_writable_caches()
    assert os.environ["HF_DATASETS_CACHE"] == str(own / "datasets")
    assert os.environ["HF_HUB_CACHE"] == "named"
    own.chmod(0o777)
    with pytest.raises(ConfigError, match=r"GRPO_EXT_CACHE: .*that only this user can write"):
        cached("m")
    own.rename(tmp_path / "elsewhere").chmod(0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="GRPO_EXT_CACHE"):
        cached("m")
    monkeypatch.setenv("GRPO_EXT_CACHE", str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match=r"GRPO_EXT_CACHE='.*/file/x': it cannot be written"):
        cached("m")
    monkeypatch.setenv("GRPO_EXT_CACHE", str(tmp_path))
    monkeypatch.setattr("grpo_ext.quickstart.cache.writable", lambda *_: False)
    assert cached("elsewhere") == tmp_path / "elsewhere"  # it is there: nothing has to be written


def test_what_a_killed_warm_up_left_is_removed_and_what_a_running_one_builds_is_not(tmp_path):
    (tmp_path / ".building-killed").mkdir()
    (tmp_path / ".building-killed" / "model").touch()
    with building(tmp_path) as first, building(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first, second}
    assert [*tmp_path.iterdir()] == []


# The demo.


@pytest.mark.slow
def test_the_demo_trains_evaluates_and_reports(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "ensure_model", lambda seed: folder)
    small = ("--max_steps", 2, "--logging_steps", 1, "--dataset_kwargs", '{"eval_size": 8}', "--reward_workers", 0)
    for _ in range(2):  # a second demo starts again
        assert command("demo", "--output_dir", tmp_path / "demo", *small) == 0
        assert "Did it learn? Not shown: held_out avg@1 stayed from 0 " in capsys.readouterr().out
    assert "Did it learn?" in (tmp_path / "demo" / "report.html").read_text()
    results = (tmp_path / "demo" / "evaluation" / "held_out").glob("step_?.json")
    assert {path.name for path in results} == {"step_0.json", "step_2.json"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "demo").num_parameters() < 1e6
