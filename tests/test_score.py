"""`grpo-ext score`: a recipe's rewards and advantages on a file of completions."""

import json
import math

import pytest
import torch

from grpo_ext import ConfigError
from grpo_ext.cli import main
from grpo_ext.recipe import load_recipe
from grpo_ext.rewards import Runtime
from grpo_ext.score import explain, grouped, read_rows, score, summary

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
    yield score(recipe, read_rows(file), runtime)
    runtime.close()


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


@pytest.mark.parametrize(
    ("line", "expected"),
    [('{"prompt": "a"}', "line 2, column completion"), ("{broken", "line 2: not valid JSON"), ("[]", "column prompt")],
)
def test_a_malformed_row_names_file_line_and_column(line, expected, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_rows(path)
    assert "bad.jsonl" in str(caught.value)


def test_the_command(file, capsys):
    arguments = ["score", "--config", "quickstart/grpo", "--file", str(file), "--reward_workers", "0"]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert "accuracy" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--explain", "9"])
    assert end.value.code == 2
    assert "numbered 0 to 3" in capsys.readouterr().err
