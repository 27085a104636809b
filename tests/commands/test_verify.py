"""`grpo-ext verify`: its splits, its small models, and the whole of it on one and two processes."""

import re

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.commands import verify
from grpo_ext.errors import ConfigError
from grpo_ext.trainer import chunks
from grpo_ext.trainer.verification.overlapped import ALLOWED, FixedCompletions, Overlapped, save_model
from grpo_ext.trainer.verification.row_by_row import differences
from grpo_ext.trainer.verification.small import VOCABULARY, Rows, save_small, tokenizer
from support import tiny
from support.commands import command


@pytest.mark.parametrize(
    ("processes", "rows", "accumulation", "group"), [(1, 4, 4, 8), (2, 8, 64, 8), (8, 1, 2, 16), (3, 16, 1, 8)]
)
def test_splits_hold_the_same_whole_groups(processes, rows, accumulation, group):
    found = list(verify.splits(processes, rows, accumulation, group))
    sizes = {split.processes * split.rows * split.accumulation for split in found}
    assert len(sizes) == 1
    assert sizes.pop() % group == 0
    assert len({(split.rows, split.accumulation) for split in found}) == len(found)
    assert found[0].name == "the recipe's"


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, MixtralConfig, Gemma2Config, GPT2Config])
def test_a_small_model_is_of_the_same_class(config, tmp_path):
    config().save_pretrained(tmp_path / "large")
    save_small(str(tmp_path / "large"), tmp_path / "small")
    small = AutoConfig.from_pretrained(tmp_path / "small")
    assert type(small) is config
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").num_parameters() < 200_000


def test_a_model_whose_class_cannot_be_known_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model_name_or_path=.*its config.json cannot be read"):
        save_small(str(tmp_path / "nowhere"), tmp_path / "small")


def test_a_wrong_gradient_is_far_off():
    gradient = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    before, after = ({"w": torch.tensor(w, dtype=torch.float64)} for w in ([1.0, 1.0], [0.7, 0.6]))
    assert differences({"weights": [before, after]}, [gradient], 0.1) == [pytest.approx(0, abs=1e-12)]
    assert differences({"weights": [before, after]}, [{"w": gradient["w"] / 2}], 0.1) == [pytest.approx(1.0)]


class Fixed(FixedCompletions, GRPOExtTrainer):
    """A trainer with fixed completions."""


def compared(folder, **settings) -> Overlapped:
    """Compare short runs, as a launch of verify does."""
    save_model(folder / "small")

    def trainer(overlap, **changes):
        args = GRPOExtConfig(str(folder / "out"), **(OVERLAPS | changes), overlap=overlap)
        rewards = Rows(VOCABULARY, 4).reward_functions()
        prompts = [{"prompt": f"w{3 + i % 40}"} for i in range(64)]
        return Fixed(str(folder / "small"), rewards, args, prompts, processing_class=tokenizer())

    return Overlapped.of(GRPOExtConfig(str(folder), **(OVERLAPS | settings), overlap="step"), trainer)


OVERLAPS = {
    **tiny.TRAINING,
    **{"rollout_engine": "process", "num_generations": 4, "gradient_accumulation_steps": 8, "loss_type": "dapo"},
    **{"per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.05},
}


def test_an_overlapped_run_is_compared_up_to_rounding(tmp_path):
    found = compared(tmp_path)
    assert 0 < found.difference <= ALLOWED
    assert found.columns()[2] == "equal"


def test_a_wrong_denominator_of_an_overlapped_run_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "correction", lambda *_: 1.0)
    found = compared(tmp_path)
    assert found.differs
    assert found.columns()[2] == "DIFFERS"


def test_a_recipe_that_waits_for_all_rows_is_not_compared(tmp_path):
    found = compared(tmp_path, entropy_coef=0.01)
    assert (found.waits, found.difference) == ("the entropy bonus has a denominator of its own", 0.0)
    found.write(tmp_path)
    assert Overlapped.read(tmp_path) == found


RECIPE = """
dataset_name: reasoning_gym/chain_sum
dataset_kwargs: {min_terms: 2, max_terms: 2, size: 64, seed: 1}
reward_funcs: [{name: format, weight: 0.5}, accuracy]
use_cpu: true
bf16: false
num_generations: 8
max_completion_length: 8
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
"""


@pytest.fixture
def recipe(tmp_path):
    def write(settings: str) -> str:
        model = tiny.save(tmp_path / "model")
        path = tmp_path / "recipe.yaml"
        path.write_text(f"{RECIPE}model_name_or_path: {model}\noutput_dir: {tmp_path / 'out'}\n{settings}")
        return str(path)

    return write


def verified(capfd, *argv: str) -> tuple[int, dict[str, list[str]]]:
    code = command("verify", *argv)
    text = capfd.readouterr().out
    return code, {
        line.split("  ")[0].strip(): [line, *re.findall(r"equal|DIFFERS", line)] for line in text.splitlines()
    }


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_recipe_is_verified(processes, recipe, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    path = recipe("loss_type: dapo\nbeta: 0.04\nentropy_coef: 0.01\nmask_truncated_completions: true\n")
    code, lines = verified(capfd, "--config", path, "--num_processes", processes)
    for name in ("the recipe's", "one micro-batch", "row by row", "resumed"):
        assert lines[name][1:] == ["equal"], lines
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_recipe_that_overlaps_is_verified(processes, recipe, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    path = recipe("loss_type: dapo\noverlap: step\nrollout_engine: process\n")
    keys = ("--num_processes", processes, "--gradient_accumulation_steps", "8")
    code, lines = verified(capfd, "--config", path, *keys)
    assert lines["overlap: step"][1:] == ["equal"], lines
    assert "(weights, float64)" in lines["overlap: step"][0]
    assert code == 0


@pytest.mark.slow
def test_stock_denominators_are_found_out(recipe, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    code, lines = verified(
        capfd,
        "--config",
        recipe("loss_type: dapo\nloss_defaults: trl\nmask_truncated_completions: true\nentropy_coef: 0.01\n"),
    )
    assert code == 1
    assert lines["row by row"][1:] == ["DIFFERS"], lines
