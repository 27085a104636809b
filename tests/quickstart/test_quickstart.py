import random
import re
import threading

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from grpo_ext.quickstart import model as quickstart_model
from grpo_ext.quickstart import report, task
from grpo_ext.quickstart.evaluate import Evaluation, Sample, greedy_accuracy
from grpo_ext.quickstart.model import TAGS, build_model, build_tokenizer, ensure_model

SPLITS = ("train", "validation", "held_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ensure_model(0, tmp_path_factory.mktemp("cache"), steps=3)
    torch.set_num_threads(threads)


# The task.


def test_no_problem_or_its_mirror_is_in_two_splits():
    pairs = [{frozenset(pair) for pair in task.problems(split)} for split in SPLITS]
    assert len(set.union(*pairs)) == sum(map(len, pairs))
    assert all(len(found) > 900 for found in pairs)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("split", ["validation", "held_out"])
def test_load_keeps_evaluation_problems_out_of_training_whatever_the_seed(seed, split):
    train, evaluation = task.load(seed=seed, eval_split=split, eval_size=None)
    reference = task.load(seed=3, size=5, eval_split=split, eval_size=None)[1]
    questions = [{row["prompt"][0]["content"] for row in dataset} for dataset in (train, evaluation, reference)]
    assert not questions[0] & questions[1]
    assert questions[1] == questions[2]


def test_the_seed_shuffles_the_training_problems_only():
    first, again, other = (task.load(size=50, seed=seed)[0]["solution"] for seed in (0, 0, 1))
    assert first == again != other


def test_every_demonstration_is_right():
    for a, b in (pair for split in SPLITS for pair in task.problems(split)):
        text = task.demonstration(a, b)
        assert task.FORMAT.fullmatch(text)
        assert int(task.ANSWER.search(text)[1]) == a + b
        for x, y, z in re.findall(r"(\d+)\+(\d+)=(\d+)", text):
            assert int(x) + int(y) == int(z)


def test_a_demonstration_word_for_word():
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


@pytest.mark.parametrize(
    "wrong", [{"task": "subtraction"}, {"size": 0}, {"size": 10**6}, {"eval_size": -1}, {"eval_split": "train"}]
)
def test_load_refuses_what_it_cannot_give(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        task.load(**wrong)


# The model.


def test_tokenizer_round_trips_and_keeps_tags_whole(folder):
    text = task.demonstration(478, 585) + " free text, too: {it's} ~\n\n  <thin> "
    for tokenizer in (build_tokenizer(), AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder)):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert all(len(tokenizer(tag)["input_ids"]) == 1 for tag in (*TAGS, "\n", "<eos>", "<pad>"))
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
    loaded.train()
    result = greedy_accuracy(loaded, tokenizer, task.load(eval_size=5)[1], batch_size=2, max_new_tokens=4)
    assert loaded.training
    assert len(result.samples) == 5
    assert result.accuracy == 0.0


def test_the_cache_is_used_and_keyed(folder, monkeypatch):
    monkeypatch.setattr(quickstart_model, "warm_up", lambda *_, **__: pytest.fail("trained again"))
    assert ensure_model(0, folder.parent, steps=3) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        ensure_model(1, folder.parent, steps=3)
    monkeypatch.setenv("GRPO_EXT_CACHE", str(folder.parent))
    assert ensure_model(0, steps=3) == folder


def test_a_warm_up_joins_no_process_group(tmp_path, monkeypatch):
    """The first of several processes trains it, and the others are not there."""
    monkeypatch.setattr(PartialState, "__init__", lambda *_, **__: pytest.fail("joined"))
    assert ensure_model(0, tmp_path, steps=1).is_dir()


def test_two_builders_at_once_agree_and_leave_nothing_behind(tmp_path, monkeypatch):
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


# Measuring and reporting.


@pytest.mark.parametrize(
    ("completion", "formatted", "correct"),
    [
        ("<think>\n1+2=3\n</think>\n<answer>\n3\n</answer>", True, True),
        ("<think>\n1+2=3\n</think>\n<answer>\n33\n</answer>", True, False),
        ("<answer>\n3\n</answer>", False, True),
        ("3", False, False),
    ],
)
def test_a_sample_is_judged(completion, formatted, correct):
    sample = Sample("1+2=", completion, "3")
    assert (sample.formatted, sample.correct) == (formatted, correct)


def test_no_problems_is_an_error(folder):
    tokenizer = build_tokenizer()
    with pytest.raises(ValueError, match="at least one problem"):
        greedy_accuracy(build_model(tokenizer), tokenizer, [])


def test_report_shows_before_and_after(tmp_path):
    wrong, right = (Sample("5+7=", f"<think>\n</think>\n<answer>\n{n}\n</answer>", "12") for n in (2, 12))
    log = [
        {"step": s, "reward": s / 10, "rewards/accuracy/mean": s / 10, "completions/mean_length": 30 + s}
        for s in (5, 10)
    ]
    measured = report.Run(
        Evaluation(0.25, [wrong, right], 1.0),
        Evaluation(0.975, [right, right], 1.0),
        [*log, {"step": 10}],
        "grpo: clip",
        {"warm-up": 20.0, "GRPO": 61.0},
        "outputs/demo/model",
    )
    page = report.write_report(tmp_path / "new", measured).read_text()
    for expected in ("25.0%", "97.5%", "grpo: clip", "81 s", "outputs/demo/model", "&lt;answer&gt;<br>2<br>"):
        assert expected in page
    assert page.index("❌") < page.index("✅")
    assert (tmp_path / "new" / "curves.png").stat().st_size > 10_000

    figure = report.curves(measured)
    figure.draw_without_rendering()
    keys = [(axes, axes.get_legend()) for axes in figure.axes if axes.get_legend()]
    assert len(keys) == 2
    assert all(key.get_window_extent().y1 < axes.get_window_extent().y0 for axes, key in keys)  # on no line
