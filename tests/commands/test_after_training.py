"""`grpo-ext try`, `merge` and `sample` on runs, adapters and models."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model

from grpo_ext import ConfigError
from grpo_ext.commands import runs
from grpo_ext.commands.chat import Speaker
from grpo_ext.commands.merge import merge
from grpo_ext.commands.runs import Trained, find_trained
from grpo_ext.commands.sample import pass_rate
from grpo_ext.data.completions import read_completions
from grpo_ext.recipe.loading import datasets_of, load_policy
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.train import train
from support import adapted, painters, seeing, tiny
from support.commands import command
from support.float64 import float64_throughout

IDS = torch.arange(40)[None]
SETTINGS = {
    "system_prompt": "be brief.",
    "temperature": 0.7,
    "top_k": 5,
    "generation_kwargs": {"no_repeat_ngram_size": 2},
    "reward_funcs": ["accuracy", {"name": "s", "func": "support.tiny:spread"}],
    "save_strategy": "steps",
    "save_steps": 1,
    "learning_rate": 0.05,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A base, an SFT adapter, a run that has trained it further, and one of the whole base on plain text."""
    folder = tmp_path_factory.mktemp("project")
    tiny.save(folder / "base")
    adapted.sft(str(folder / "base"), str(folder / "sft"))
    return folder


@pytest.fixture(scope="module")
def chat(project):
    argv = adapted.write_recipe(project, str(project / "sft"), project / "chat", **SETTINGS)
    return train(load_recipe(argv))


@pytest.fixture(scope="module")
def text(project):
    return train(load_recipe(adapted.write_recipe(project, str(project / "base"), project / "text")))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


# What is found.


def test_runs_checkpoints_models_and_hub_ids_are_found(chat, project, tmp_path, monkeypatch):
    assert find_trained(str(project / "chat")).model == str(project / "chat")
    assert find_trained(str(project / "chat")).record["temperature"] == 0.7
    assert find_trained(str(project / "chat" / "checkpoint-1")).record["temperature"] == 0.7
    shutil.copytree(project / "chat" / "checkpoint-1", tmp_path / "unfinished" / "checkpoint-1")
    assert find_trained(str(tmp_path / "unfinished")).model == str(tmp_path / "unfinished" / "checkpoint-1")
    assert find_trained(str(project / "base")) == Trained(str(project / "base"), {})
    monkeypatch.setattr(runs, "has_file", lambda name, file: (name, file) == ("org/model", "config.json"))
    assert find_trained("org/model") == Trained("org/model", {})
    with pytest.raises(ConfigError, match="RUN='outputs/gone': no such folder here"):
        find_trained("outputs/gone")


@pytest.mark.parametrize(("name", "expected"), [("./gone", "no such folder"), ("{tmp}", "holds neither a model")])
@pytest.mark.parametrize("what", ["try", "merge"])
def test_a_folder_without_a_model_is_refused(what, name, expected, tmp_path, capsys):
    assert command(what, name.format(tmp=tmp_path), *(["--prompt", "a"] if what == "try" else [])) == 2
    assert expected in capsys.readouterr().err


# Asked as in training.


@pytest.mark.parametrize("run", ["chat", "text"])
def test_a_question_and_its_sampling_are_those_of_training(run, request, project):
    trainer, trained = request.getfixturevalue(run), find_trained(str(project / run))
    tokenizer = trainer.processing_class
    row = trainer.train_dataset[3]
    asked, _, _ = trainer._tokenize_prompts([row["prompt"]])
    question = row["prompt"] if run == "text" else row["prompt"][-1]["content"]
    assert trained.encode(question, tokenizer)["input_ids"].tolist() == asked
    speaker = Speaker(trained.model, trained, tokenizer)
    of_training = {key: value for key, value in trainer.generation_kwargs.items() if value is not None}
    assert speaker.sampling == {key: of_training[key] for key in speaker.sampling}
    assert of_training.keys() - speaker.sampling.keys() == {"pad_token_id"}


def test_compare_shows_the_answer_before_training_too(chat, project, capsys):
    trained, tokenizer = find_trained(str(project / "chat")), chat.processing_class
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
    after, before = (
        Speaker(model, trained, tokenizer, **greedy).answer("c2:") for model in (trained.model, trained.before)
    )
    assert after != before
    assert trained.before == str(project / "sft")
    assert command("try", project / "chat", "--prompt", "c2:", "--greedy") == 0
    assert capsys.readouterr().out == f"{after}\n"
    assert command("try", project / "chat", "--prompt", "c2:", "--greedy", "--compare") == 0
    words = capsys.readouterr().out.split()
    assert {"before:", "after:"} <= set(words)
    assert all(letter in words for letter in f"{before} {after}".split())


def test_piped_questions_are_answered_reproducibly_by_seed(chat, project, capsys, monkeypatch):
    answers = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a1:\n\nb2:\n"))
        assert command("try", project / "chat", "--seed", "3", "--max_new_tokens", "4") == 0
        answers.append(capsys.readouterr().out.splitlines())
    assert answers[0] == answers[1]
    assert len(answers[0]) == 2
    assert max(map(len, answers[0])) <= 4 * 2  # a token is a letter, and the tiny tokenizer puts a space between


def test_compare_needs_the_record_of_a_run(project, capsys):
    assert command("try", project / "base", "--prompt", "a", "--compare") == 2
    assert "its base is not on record" in capsys.readouterr().err


# Merged.


@pytest.mark.parametrize("run", ["sft", "chat"])
def test_a_merged_model_is_adapter_and_base(run, chat, project, tmp_path):
    """In float64 throughout, so that what is left is the rounding of the sums to float32."""
    difference, largest = merge(find_trained(str(project / run)), tmp_path / "merged")
    assert difference < 1e-6 * largest
    adapter = PeftModel.from_pretrained(tiny.load(str(project / "base")), str(project / run)).double()
    assert len({path.stat().st_mode for path in (tmp_path / "merged").glob("*.*")}) == 1  # the umask's
    merged = tiny.load(str(tmp_path / "merged")).double()
    assert not hasattr(merged, "peft_config")
    with float64_throughout():
        expected = logits(adapter)
        assert (logits(merged) - expected).abs().max() < 1e-6 * expected.abs().max()
        with adapter.disable_adapter():
            assert (logits(merged) - logits(adapter)).abs().max() > 1e-2
    sums = adapter.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, sums[name], rtol=0, atol=1e-6)


def test_a_merged_run_is_asked_like_the_run(chat, project, capsys):
    assert command("merge", project / "chat", "--dtype", "bfloat16", "--output", project / "half") == 0
    assert "Logits differ" in capsys.readouterr().out
    half = load_policy(str(project / "half"), tiny.tokenizer(), dtype="auto")
    assert next(half.parameters()).dtype == torch.bfloat16
    assert command("merge", project / "chat") == 0
    assert "written in float32" in capsys.readouterr().out
    for run in ("chat", "chat-merged"):
        assert command("try", project / run, "--prompt", "c2:", "--greedy") == 0
    once, again = capsys.readouterr().out.splitlines()
    assert once == again


def test_merge_refuses_plain_and_quantized_models_and_full_folders(project, tmp_path, capsys):
    assert command("merge", project / "base") == 2
    assert "is a plain model already" in capsys.readouterr().err
    assert command("merge", project / "sft", "--output", project / "base") == 2
    assert "it is not empty" in capsys.readouterr().err
    shutil.copytree(project / "base", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    shutil.copytree(project / "sft", tmp_path / "sft")
    adapter = json.loads((tmp_path / "sft" / "adapter_config.json").read_text())
    (tmp_path / "sft" / "adapter_config.json").write_text(
        json.dumps(adapter | {"base_model_name_or_path": str(tmp_path / "base")})
    )
    assert command("merge", tmp_path / "sft") == 2
    assert "is quantized" in capsys.readouterr().err
    assert not (tmp_path / "sft-merged").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_merged_model_with_other_logits_is_deleted(dtype, tmp_path):
    """An adapter of an embedding that is tied to the LM head: merged, it changes the head too."""
    tiny.save(tmp_path / "tied", tie_word_embeddings=True)
    lora = LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False)
    get_peft_model(tiny.load(str(tmp_path / "tied")), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="so it was not kept"):
        merge(find_trained(str(tmp_path / "adapter")), tmp_path / "merged", dtype)
    assert not (tmp_path / "merged").exists()


# Sampled.


def test_samples_are_scored_and_their_prompts_train(chat, project, tmp_path, capsys):
    lines = [{"problem": f"{c}{i}:", "answer": f"x #### {i}"} for i, c in enumerate("abcdefgh")]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = SETTINGS | {"dataset_name": str(data), "answer_format": "gsm8k", "save_strategy": "no"}
    argv = adapted.write_recipe(tmp_path, str(project / "base"), tmp_path / "run", **settings)
    file = tmp_path / "out.parquet"
    of_two = settings | {"num_processes": 2, "per_device_train_batch_size": 2}  # which one process could not train
    launched = adapted.write_recipe(tmp_path, str(project / "base"), tmp_path / "two", **of_two)
    asked = ("sample", *launched, "--model", project / "chat", "--num", "3", "--output", file, "--pass_by", "s")
    assert command(*asked) == 0
    assert "8 prompts x 3 completions" in capsys.readouterr().out
    rows = read_completions(file)
    assert len(rows) == 24
    spread = tiny.spread([row["completion"] for row in rows])
    assert [row["rewards/s"] for row in rows] == pytest.approx(spread)
    assert [row["reward"] for row in rows] == pytest.approx(
        [s + row["rewards/accuracy"] for s, row in zip(spread, rows, strict=True)]
    )
    assert [row["solution"] for row in rows[::3]] == [str(i) for i in range(8)]
    assert rows[0]["prompt"][0] == {"role": "system", "content": "be brief."}

    rates = [sum(spread[i : i + 3]) / 3 for i in range(0, 24, 3)]
    prompts = str(tmp_path / "out_prompts.parquet")
    middle = (min(rates) + max(rates)) / 2
    trained = load_recipe([*argv, "--dataset_name", prompts, "--min_pass_rate", str(middle), "--output_dir", "x"])
    kept, _ = datasets_of(trained, None)
    above = [i for i, rate in enumerate(rates) if rate >= middle]
    assert [row["solution"] for row in kept] == [str(i) for i in above]
    assert [row["prompt"] for row in kept] == [rows[3 * i]["prompt"] for i in above]


def test_conversations_with_an_environment_are_sampled(project, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"problem": "{i}:", "answer": "{i}"}}\n' for i in range(1, 9)))
    played = {"reward_funcs": None, "environments": [{"name": "guess", "kwargs": {"high": 9, "guesses": 2}}]}
    whole = {"top_k": 0, "generation_kwargs": None}  # environments do not pass on what a truncated sampler kept
    settings = SETTINGS | played | whole | {"dataset_name": str(data), "max_completion_length": 60}
    argv = adapted.write_recipe(tmp_path, str(project / "base"), tmp_path / "run", **settings)
    file = tmp_path / "out.jsonl"
    assert command("sample", *argv, "--num", "2", "--output", file) == 0
    assert "the mean of environment" in capsys.readouterr().out
    rows = read_completions(file)
    turns = [sum(message["role"] == "assistant" for message in row["completion"]) for row in rows]
    assert [len(row["turn_rewards"]) for row in rows] == turns
    assert {row["failure"] for row in rows} == {None}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A model of images and text."""
    folder = tmp_path_factory.mktemp("seen")
    model = seeing.model("llava", dtype=torch.float32, max_position_embeddings=512)
    seeing.prefer(model, 1, 3.0)  # so that turns are short
    for part in (model, seeing.processor("llava")):
        part.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["paths", "bytes"])
def test_prompts_with_images_are_sampled_and_their_images_are_read_again(kind, seen, tmp_path, capsys):
    data = tmp_path / "data.parquet"
    pictures = [[seeing.picture(i + n) for n in range(i % 3)] for i in range(4)]
    for i, one in enumerate(pictures):
        for n, picture in enumerate(one):
            picture.save(tmp_path / f"{i}{n}.png")
    files = [[tmp_path / f"{i}{n}.png" for n in range(i % 3)] for i in range(4)]
    stored = [[f.name if kind == "paths" else {"bytes": f.read_bytes(), "path": None} for f in row] for row in files]
    rows = [{"prompt": [{"role": "user", "content": f"{i}:"}], "images": one} for i, one in enumerate(stored)]
    Dataset.from_list(rows).to_parquet(data)
    settings = {"dataset_name": str(data), "reward_funcs": [{"name": "s", "func": "support.tiny:spread"}]}
    argv = adapted.write_recipe(tmp_path, str(seen), tmp_path / "run", **settings)
    if kind == "bytes":
        assert command("sample", *argv, "--num", "2", "--output", tmp_path / "out.jsonl") == 2
        assert "column 'images': .jsonl cannot hold a list. Write a .parquet file" in capsys.readouterr().err
    for suffix in ("parquet", "jsonl")[: 2 if kind == "paths" else 1]:
        assert command("sample", *argv, "--num", "2", "--output", tmp_path / f"out.{suffix}") == 0
        again = load_recipe([*argv, "--dataset_name", str(tmp_path / f"out_prompts.{suffix}"), "--output_dir", "x"])
        kept, _ = datasets_of(again, None)
        found = {row["prompt"][0]["content"]: [one.tobytes() for one in row["images"]] for row in kept}
        assert found == {f"{i}:": [one.tobytes() for one in row] for i, row in enumerate(pictures)}


@pytest.mark.filterwarnings("ignore")
def test_conversations_that_show_images_are_sampled(seen, tmp_path):
    data, file = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(f'{{"prompt": [{{"role": "user", "content": "{i}:"}}]}}\n' for i in range(4)))
    played = {"reward_funcs": None, "environments": [f"{painters.__file__}:Gallery"], "max_completion_length": 80}
    argv = adapted.write_recipe(tmp_path, str(seen), tmp_path / "run", **played, dataset_name=str(data))
    assert command("sample", *argv, "--num", "2", "--output", file) == 0
    shown = [message["content"] for row in read_completions(file) for message in row["completion"]]
    assert "[image 56x56]" in shown


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU takes bf16")
def test_a_recipe_without_a_precision_is_sampled_where_it_trains(project, tmp_path):
    argv = adapted.write_recipe(tmp_path, str(project / "base"), tmp_path / "run", use_cpu=False, bf16=None)
    assert command("sample", *argv, "--num", "2", "--max_samples", "2", "--output", tmp_path / "out.jsonl") == 0


def test_a_pass_rate_leaves_out_what_could_not_be_scored():
    rows = [{"rewards/a": value} for value in (1.0, float("nan"), 0.0, 0.0, float("nan"))]
    assert pass_rate(rows, "a") == pytest.approx(1 / 3)
    assert pass_rate(rows[1:2], "a") is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--num", "0"], "--num=0"),
        (["--output", "x.txt"], "x.txt"),
        (["--pass_by", "acuracy"], "Did you mean 'accuracy'"),
        (["--model", "./gone"], "no such folder"),
        (["--temperatur", "1"], "temperatur"),
    ],
)
def test_mistakes_of_sample_are_reported(given, expected, project, tmp_path, capsys):
    argv = adapted.write_recipe(tmp_path, str(project / "base"), tmp_path / "run", reward_funcs=["accuracy"])
    assert command("sample", *argv, "--output", tmp_path / "x.jsonl", *given) == 2
    assert expected in capsys.readouterr().err


def test_sample_does_not_replace_what_the_recipe_reads(project, tmp_path, capsys):
    data = tmp_path / "x_prompts.jsonl"
    data.write_text('{"problem": "1:", "answer": "1"}\n' * 8)
    argv = adapted.write_recipe(tmp_path, str(project / "base"), tmp_path / "run", dataset_name=str(data))
    assert command("sample", *argv, "--output", tmp_path / "x.jsonl") == 2
    assert "it would replace x_prompts.jsonl, the recipe's dataset_name" in capsys.readouterr().err
    assert data.read_text().count("problem") == 8


def test_the_recipes_chat_options_reach_the_template(project):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'x' if loud else 'y' }}"
    trained = Trained("m", {"conversational": True, "chat_template_kwargs": {"loud": True}})
    assert tokenizer.decode(trained.encode("a", tokenizer)["input_ids"][0]).endswith("x")


def test_the_page_loads_what_a_run_has_left(text, project, tmp_path, monkeypatch):
    """Its recipes name files that only a run leaves, so that they are loaded here."""
    page = (Path(__file__).parents[2] / "docs" / "after_training.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "outputs").mkdir()
    for name, there in (("run", project / "text"), ("sft", project / "sft"), ("run-merged", project / "base")):
        (tmp_path / "outputs" / name).symlink_to(there)
    (tmp_path / "samples_prompts.jsonl").write_text('{"prompt": "a", "solution": "1", "pass_rate": 0.5}\n')
    [program] = re.findall(r"^```python.*?\n(.*?)^```", page, re.M | re.S)
    exec(program, loaded := {})
    assert loaded["model"].config.hidden_size == 32
    recipes = re.findall(r"^```yaml.*?\n(.*?)^```", page, re.M | re.S)
    assert len(recipes) == 3
    argv = adapted.write_recipe(tmp_path, str(project / "base"), tmp_path / "shown")
    for shown in recipes:
        keys = [word for key, value in yaml.safe_load(shown).items() for word in (f"--{key}", str(value))]
        load_recipe([*argv, *keys])
