"""`grpo-ext score`: a recipe's rewards and advantages on a file of completions."""

import contextlib
import dataclasses
import datetime
import json
import math
from decimal import Decimal

import pytest
import torch
import yaml
from PIL import Image

from grpo_ext import ConfigError
from grpo_ext.commands.score import shown_rows
from grpo_ext.config.launch import planned_processes
from grpo_ext.data.completions import check_row, read_completions, write_completions
from grpo_ext.data.config import DataConfig
from grpo_ext.data.loading import load_datasets
from grpo_ext.errors import DataError
from grpo_ext.recipe import scoring
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.scoring import explain, grouped, score_rows, summary
from grpo_ext.rewards.composition import parse_rewards
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.train import train
from support import tiny
from support.commands import command

pytestmark = pytest.mark.usefixtures("few_rows")
ROWS = [
    {"prompt": "1+1=", "completion": "<think>\nx\n</think>\n<answer>\n2\n</answer>", "solution": "2"},
    {"prompt": "2+2=", "completion": "<answer>4</answer>", "solution": "4"},
    {"prompt": "1+1=", "completion": "<answer>3</answer>", "solution": "2"},
    {"prompt": "1+1=", "completion": "so it is 2", "solution": "2"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "completions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")
    return path


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(["--config", "quickstart/dr_grpo"])


@pytest.fixture
def scored(recipe, file):
    runtime = Runtime(recipe.rewards, workers=1)
    yield score_rows(recipe, read_completions(file), runtime)
    runtime.close()


def test_a_recipe_whose_environments_alone_pay_is_refused(file, capsys):
    assert command("score", "--config", "quickstart/guess", "--file", file) == 2
    assert "reward_funcs=None: the recipe has none: its environments pay" in capsys.readouterr().err


def test_rewards_total_and_advantages(scored):
    assert scored.rewards == {
        "accuracy": [1.0, 1.0, 0.0, 1.0],
        "format": [1.0, 0.0, 0.0, 0.0],
        "tags": [1.0, 0.5, 0.5, 0.0],
    }
    assert scored.total == pytest.approx([2.0, 1.25, 0.25, 1.0])
    mean = (2.0 + 0.25 + 1.0) / 3  # of the group that rows 0, 2 and 3 form
    assert scored.advantages == pytest.approx([2.0 - mean, 0.0, 0.25 - mean, 1.0 - mean])


def test_summary_and_explanation(scored, recipe):
    table = {line[0]: line[1:] for line in summary(scored)}
    assert table["accuracy"][:6] == ("0.750", "0.500", "0.000", "1.000", "0", "0")
    assert table["total"][0] == "1.125"
    pieces = dict(explain(scored, 2, recipe))
    assert pieces["completion"] == "<answer>3</answer>"
    assert pieces["tags"].startswith("0.5 x 0.5")
    assert pieces["total"] == "0.2500"


def test_a_row_that_no_reward_scores_has_no_advantage(recipe):
    values = torch.tensor([[1.0], [math.nan], [0.0]], dtype=torch.float64)
    total, advantages = grouped(recipe.training.objective, values, torch.ones(1).double(), ["a", "a", "a"])
    assert total.isnan().tolist() == [False, True, False]
    assert advantages.tolist() == [0.5, 0.0, -0.5]


GOOD = json.dumps(ROWS[0])
UNREADABLE = {
    "missing column": (f'{GOOD}\n{{"prompt": "a"}}', "line 2, column 'completion'"),
    "broken JSON": (f"{GOOD}\n{{broken", "line 2: broken JSON"),
    "not an object": (f"{GOOD}\n[]", "line 2: [] is not a JSON object"),
    "not UTF-8": (b"\xff\xfe{}", "line 1: not UTF-8"),
    **{
        f"{column}={value!r}": (json.dumps(ROWS[0] | {column: value}), f"line 1, column {column!r}")
        for column, value in (
            *(("completion", 2), ("completion", ["a"]), ("prompt", {"role": "user"})),
            *((name, 1) for name in ("log_metric", "log_extra", "trainer_state")),
        )
    },
    "no file": (None, "cannot be read"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_row_is_named_by_file_line_and_column(case, tmp_path, capsys):
    content, reason = UNREADABLE[case]
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert command("score", "--config", "quickstart/grpo", "--file", path) == 2
    error = capsys.readouterr().err
    assert "bad.jsonl" in error
    assert reason in error


def test_only_a_newline_ends_a_row(tmp_path):
    rows = [ROWS[0] | {"completion": "a\u2028b\u2029c\x85d"}, ROWS[1] | {"completion": [{"content": "x"}]}]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode("utf-8-sig"))
    assert read_completions(path) == rows


async def waits(completions, **_):
    return [float(len(completion)) for completion in completions]


def overwrites(completions, log_extra, **_):
    log_extra("solution", ["9"] * len(completions))
    return [0.0] * len(completions)


def takes_an_option(completions, *, solution="", **_):
    return [0.0] * len(completions)


def scored_by(tmp_path, *entries):
    specs, problems = parse_rewards(entries)
    assert problems == []
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[1]))
    recipe = load_recipe(["--config", "quickstart/dr_grpo"])
    recipe = dataclasses.replace(recipe, rewards=specs)
    with contextlib.closing(Runtime(specs, workers=0)) as runtime:
        scored = score_rows(recipe, read_completions(path), runtime)
    return scored, dict(explain(scored, 0, recipe))


@pytest.mark.parametrize(
    ("entry", "name", "piece"),
    [
        ("accuracy", "accuracy", "1.0 x 1"),
        ({"name": "accuracy", "weight": 0.5, "kwargs": {"read": "tag"}}, "accuracy", "1.0 x 0.5   (read='tag')"),
        ({"name": "right", "func": "accuracy"}, "right", "1.0 x 1   (accuracy)"),
        ({"name": "accuracy", "weight_schedule": [[0, 0.25], [5, 0.5]]}, "accuracy", "1.0 x 0.25"),
        (
            {"name": "boxes", "func": "format", "kwargs": {"style": "boxed"}},
            "boxes",
            "0.0 x 1   (format, style='boxed')",
        ),
    ],
)
def test_the_explanation_shows_value_weight_and_options(entry, name, piece, tmp_path):
    _, pieces = scored_by(tmp_path, entry)
    assert pieces[name] == piece


def test_rewards_may_be_async_and_do_not_see_what_others_log(tmp_path):
    scored, _ = scored_by(tmp_path, f"{__name__}:waits", f"{__name__}:overwrites", "accuracy")
    assert scored.rewards == {"waits": [18.0], "overwrites": [0.0], "accuracy": [1.0]}


def test_a_column_with_the_name_of_an_option_is_named(tmp_path):
    with pytest.raises(ConfigError, match="column 'solution': it has the name of an option"):
        scored_by(tmp_path, f"{__name__}:takes_an_option")


def test_the_command(file, capsys):
    arguments = ["score", "--config", "quickstart/grpo", "--file", str(file), "--reward_workers", "0"]
    assert command(*arguments) == 0
    assert "accuracy" in capsys.readouterr().out
    assert command(*arguments, "--explain", "9") == 2
    assert "--explain=9: no such row. Give 0 to 3." in capsys.readouterr().err


@pytest.mark.slow
def test_logged_completions_of_a_run_are_scored_again(tmp_path, monkeypatch, capsys):
    """A run with log_completions, then the folder of the run, a recipe without model and data, a file of it all."""
    values = {"model_name_or_path": tiny.save(tmp_path / "model"), "dataset_name": "quickstart/addition"}
    values |= {**tiny.TRAINING, "output_dir": str(tmp_path / "run"), "log_completions": True, "reward_workers": 1}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(values | {"reward_funcs": ["accuracy", "format"]}))
    train(load_recipe(["--config", str(tmp_path / "train.yaml")]))
    (tmp_path / "score.yaml").write_text("reward_funcs: [accuracy, {name: tags, weight: 0.5}]\n")
    rows = read_completions(tmp_path / "run")
    assert len(rows) == 16  # two steps of eight
    assert {"step", "prompt", "completion", "solution", "gold_parsed", "answer_parsed", "accuracy"} <= rows[0].keys()
    assert rows[0]["solution"] == rows[0]["gold_parsed"]
    config = ["--config", str(tmp_path / "score.yaml"), "--reward_workers", "0"]
    for written in (tmp_path / "scored.parquet", tmp_path / "scored.jsonl"):
        assert command("score", "--file", tmp_path / "run", "--output", written, *config) == 0
        again = read_completions(written)
        assert [row["rewards/accuracy"] for row in again] == [row["accuracy"] for row in rows]
        assert [row["reward"] for row in again] == [
            row["rewards/accuracy"] + 0.5 * row["rewards/tags"] for row in again
        ]
        assert command("score", "--file", written, "--explain", "3", *config) == 0
        said = capsys.readouterr().out
        assert "answer_parsed" in said
        assert (said.count("\n  advantage "), said.count("rewards/tags")) == (1, 0)
        dataset, _ = load_datasets(str(written), DataConfig(), eval_needed=False)
        assert dataset[0]["solution"] == rows[0]["solution"]


def test_answers_are_parsed_as_in_training(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "?", "completion": "5", "answer": text} for text in ("so\n#### 1,005", "7", 5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "r.yaml").write_text("reward_funcs: [accuracy]\nanswer_format: gsm8k\n")
    with planned_processes(None):
        recipe = load_recipe(["--config", str(tmp_path / "r.yaml")], rewards_only=True)
    assert [row["solution"] for row in read_completions(path, recipe.data)] == ["1005", "7", "5"]


def test_mistakes_of_the_command_line_and_missing_columns_are_reported(file, tmp_path, capsys):
    config = ["--config", "quickstart/grpo", "--file", str(file)]
    (tmp_path / "empty").mkdir()
    assert command("score", "--config", "quickstart/grpo", "--file", tmp_path / "empty") == 2
    assert "log_completions: true" in capsys.readouterr().err
    file.write_text(json.dumps({"prompt": "?", "completion": "5"}))
    assert command("score", *config, "--reward_workers", "0") == 0
    assert "reward='accuracy': it cannot score any row" in capsys.readouterr().err
    assert command("score", *config, "--output", tmp_path / "out.csv") == 2
    assert "ends in .jsonl or .parquet" in capsys.readouterr().err
    assert command("score", *config, "--output", tmp_path / "none" / "out.jsonl") == 2
    assert "no folder" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"column 'completion'.*Write a \.jsonl file"):
        write_completions(tmp_path / "o.parquet", [{"completion": "a"}, {"completion": [{"content": "a"}]}])


def test_columns_of_other_types_than_jsons_are_written_or_refused_at_once(tmp_path):
    row = {"prompt": "a", "completion": "b", "day": datetime.date(2026, 1, 2), "price": Decimal("1.50")}
    path = tmp_path / "o.jsonl"
    check_row(path, row)
    write_completions(path, [row])
    assert json.loads(path.read_text()) == {"prompt": "a", "completion": "b", "day": "2026-01-02", "price": "1.50"}
    for name in ("o.jsonl", "o.parquet"):
        with pytest.raises(DataError, match=r"column 'image': \.\w+ cannot hold a Image"):
            check_row(tmp_path / name, {"prompt": "a", "image": Image.new("RGB", (2, 2))})


def test_of_many_rows_the_best_and_the_worst_are_shown():
    numbers, title = shown_rows([float(i % 50) for i in range(100)] + [math.nan])
    assert sorted(i % 50 for i in numbers) == [0, 0, 1, 1, 2, 47, 48, 48, 49, 49]
    assert "5 best and 5 worst" in title
    assert shown_rows([1.0, math.nan]) == ([0, 1], "Rows")


def test_rows_of_two_steps_are_two_groups_and_batches_are_joined(recipe, monkeypatch):
    monkeypatch.setattr(scoring, "BATCH", 3)
    rows = [row | {"step": step} for step in (1, 2) for row in ROWS if row["prompt"] == "1+1="]
    with contextlib.closing(Runtime(recipe.rewards, workers=0)) as runtime:
        scored = score_rows(recipe, [*rows, ROWS[1]], runtime)
    assert scored.rewards["accuracy"] == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert scored.advantages[:3] == scored.advantages[3:6]
    assert scored.extras["answer_parsed"] == ["2", "3", "2", "2", "3", "2", "4"]
    assert summary(scored)[0][6] == "0"
