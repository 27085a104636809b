"""`GRPOExtTrainer` as a notebook has it: rewards by name, rows as they come, mistakes before anything is loaded."""

import json
import math
import re
from functools import partial

import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import BitsAndBytesConfig, LlamaForSequenceClassification, Mxfp4Config, QuantoConfig
from transformers.integrations import integration_utils

from grpo_ext import ConfigError, GRPOExtConfig, GRPOExtTrainer, child_processes
from grpo_ext.errors import RewardError
from grpo_ext.trainer.callbacks import Progress, ProgressBar, clock, line
from grpo_ext.trainer.setup import quantized_problems
from support import tiny
from support.interrupted import without_clocks

ROWS = [{"prompt": f"{'abcdefgh'[i % 8]}{i}:", "solution": str(i)} for i in range(16)]
SETTINGS = tiny.TRAINING | {"max_steps": 1}


def digits(completions, *, most: float = 8.0, **_):
    return [min(1.0, sum(c.isdigit() for c in text) / most) for text in completions]


def trainer(tmp_path, rewards, rows=ROWS, workers=0, model=None, **settings):
    args = settings.pop("args", None) or GRPOExtConfig(str(tmp_path / "out"), **(SETTINGS | settings))
    return GRPOExtTrainer(
        model or tiny.model(), rewards, args, rows, processing_class=tiny.tokenizer(), reward_workers=workers
    )


def test_names_mappings_and_functions_with_their_weights(tmp_path):
    mixed = [
        {"name": "soft_overlong", "weight": 0.2, "kwargs": {"max_length": 8, "buffer": 4}},
        digits,
        {"name": "two", "func": digits, "weight": 0.5, "kwargs": {"most": 2.0}, "clip": [0, 0.5]},
        "test_python_api:half",
    ]
    args = GRPOExtConfig(str(tmp_path / "out"), **SETTINGS)
    for _ in range(2):  # a cell is run again, with the same args
        one = trainer(tmp_path, mixed, args=args)
        assert one.reward_func_names == ["soft_overlong", "digits", "two", "half"]
        assert one.reward_weights.tolist() == pytest.approx([0.2, 1.0, 0.5, 1.0])
    assert args.reward_weights is None
    one.train()
    log = one.state.log_history[0]
    parts = {name: log[f"rewards/{name}/mean"] for name in one.reward_func_names}
    assert log["reward"] == pytest.approx(
        0.2 * parts["soft_overlong"] + parts["digits"] + 0.5 * parts["two"] + parts["half"], abs=1e-5
    )
    assert 0 <= parts["two"] <= 0.5
    assert parts["half"] == 0.5


def half(completions, **_):
    return [0.5] * len(completions)


def test_weights_of_the_config_reach_what_is_named(tmp_path):
    one = trainer(tmp_path, ["test_python_api:half", digits], reward_weights=[3.0, 0.25])
    assert one.reward_weights.tolist() == [3.0, 0.25]
    assert one.collector.rewards.scorers["half"].weight(0, 1) == 3.0


def test_a_single_reward_may_be_a_name_or_a_partial(tmp_path):
    assert trainer(tmp_path, "test_python_api:half").reward_func_names == ["half"]
    assert trainer(tmp_path, partial(digits, most=3)).reward_func_names == ["digits"]


def test_a_reward_model_by_its_folder_or_loaded(tmp_path):
    config = tiny.model().config
    config.num_labels = 1
    torch.manual_seed(0)
    judge = LlamaForSequenceClassification(config)
    judge.save_pretrained(tmp_path / "judge")
    tiny.tokenizer().save_pretrained(tmp_path / "judge")
    values = []
    for given in (str(tmp_path / "judge"), LlamaForSequenceClassification.from_pretrained(tmp_path / "judge")):
        one = trainer(tmp_path, [given, {"func": digits, "weight": 0.5}])
        assert one.reward_func_names == ["judge", "digits"]
        one.train()
        values.append(one.state.log_history[0]["rewards/judge/mean"])
    assert values[0] == values[1] != 0


def test_workers_end_with_training_and_begin_again(tmp_path):
    one = trainer(tmp_path, ["tags"], workers=1)
    for _ in range(2):
        one.train()
        assert one.state.log_history[0]["rewards/tags/mean"] == 0.0
        assert one.state.log_history[0]["rewards/tags/errors"] == 0
        assert not child_processes._children


def generator():
    yield from ROWS


RAGGED = [*ROWS[:15], {"prompt": "z:", "level": 3}]


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        (ROWS, ["prompt", "solution"]),
        (tuple(ROWS), ["prompt", "solution"]),
        (pd.DataFrame(ROWS, index=range(5, 21)), ["prompt", "solution"]),
        (generator, ["prompt", "solution"]),
        (generator(), ["prompt", "solution"]),
        (RAGGED, ["prompt", "solution", "level"]),
        (Dataset.from_list(ROWS), ["prompt", "solution"]),
    ],
    ids=["list", "tuple", "frame", "generator function", "generator", "ragged", "Dataset"],
)
def test_rows_as_they_come(given, columns, tmp_path):
    found = trainer(tmp_path, digits, given).train_dataset
    assert found.column_names == columns
    assert found["prompt"][:15] == [row["prompt"] for row in ROWS[:15]]
    assert found["solution"][14:] == (["14", None] if given is RAGGED else ["14", "15"])


def test_evaluation_data_by_name(tmp_path):
    args = GRPOExtConfig(str(tmp_path), **SETTINGS, eval_strategy="steps", eval_steps=1)
    both = {"one": ROWS, "two": pd.DataFrame(ROWS)}
    one = GRPOExtTrainer(tiny.model(), digits, args, ROWS, both, tiny.tokenizer())
    assert {name: len(rows) for name, rows in one.eval_dataset.items()} == {"one": 16, "two": 16}


def no_columns(completions):
    return [0.0] * len(completions)


MISTAKES = [
    ({"rewards": ["acuracy"]}, ["reward_funcs[0]='acuracy': unknown reward", "'accuracy'"]),
    ({"rewards": []}, ["reward_funcs=[]: no source of rewards"]),
    ({"rewards": [no_columns]}, ["reward_funcs[0]='no_columns': it does not take **kwargs", "Add **kwargs"]),
    ({"rewards": [{"func": digits, "timeout": 3}]}, ["scored in this process", "'my_module:name'"]),
    ({"rewards": [digits, {"func": digits}]}, ["have the log name 'digits'"]),
    ({"rewards": [{"func": torch.nn.Linear(1, 1)}]}, ["List the model itself"]),
    ({"rewards": [digits], "reward_weights": [1.0, 2.0]}, ["2 weights for 1 rewards"]),
    ({"rewards": [{"func": digits, "weight": 2.0}], "reward_weights": [1.0]}, ["Keep one of the two"]),
    (
        {"rows": [{"question": "1+1=", "answer": "2"}] * 8},
        ["no column 'prompt', only 'question', 'answer'", "{'question': 'prompt', 'answer': 'solution'}"],
    ),
    ({"rows": [{"text": "1+1="}] * 8}, ["no column 'prompt', only 'text'. Add it"]),
    ({"rows": [*ROWS, {"solution": "3"}]}, ["train_dataset, row 16 (from 0)", "null prompt"]),
    ({"rows": [*ROWS, "1+1="]}, ["row 16 (from 0): '1+1='"]),
    ({"rows": [{"prompt": "a", "solution": 1}, {"prompt": "b", "solution": "x"}]}, ["table"]),
    ({"rows": "data.csv"}, ["train_dataset: 'data.csv'"]),
    ({"rewards": ["nothing"], "rows": [{"text": ""}] * 8}, ["2 problems", "'prompt'", "'nothing'"]),
    ({"rewards": ["accuracy"], "rows": [{"prompt": "a"}] * 8}, ["it cannot score any row", "no column 'solution'"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "told"), MISTAKES, ids=[str(told[-1]) for _, told in MISTAKES])
def test_mistakes_are_reported_before_the_model_is_loaded(given, told, tmp_path):
    given = {"rewards": [digits], **given}
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, given.pop("rewards"), model="no/such-model", **given)
    assert [words for words in told if words not in str(error.value)] == []


def test_missing_packages_of_a_tracker_and_an_optimizer_are_two_problems(tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    monkeypatch.setattr("transformers.trainer_optimizer.is_galore_torch_available", lambda: False)
    settings = {"report_to": ["wandb"], "optim": "galore_adamw", "optim_target_modules": ["q_proj"]}
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, digits, model="no/such-model", **settings)
    assert [problem.field for problem in error.value.problems] == ["report_to", "optim"]


def test_a_tracker_that_does_not_exist_is_refused_before_weights_are_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"report_to=\['wandbb'\]: wandbb is not supported, only .*wandb"):
        trainer(tmp_path, digits, model="no/such-model", report_to=["wandbb"])


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda n: [1.0] * (n - 1), "returned 7 values for 8 completions"),
        (lambda n: 1.0, "it returned 1.0, which is not a list. Return a list of one number"),
        (lambda n: ["1"] * n, "it returned '1', which is not a number"),
        (lambda n: None, "it returned None"),
    ],
    ids=["length", "number", "text", "nothing"],
)
def test_a_reward_of_the_wrong_kind_ends_the_run_before_its_first_step(returned, told, tmp_path):
    def wrong(completions, **_):
        return returned(len(completions))

    one = trainer(tmp_path, wrong)
    with pytest.raises(RewardError) as error:
        one.train()
    assert told in str(error.value)
    assert "'wrong'" in str(error.value)
    assert one.state.global_step == 0


# What is shown, and what is kept.


def test_a_line_of_a_step_and_no_dict(tmp_path, capsys):
    one = trainer(tmp_path, [digits, tiny.length], max_steps=2, beta=0.1)
    one.train()
    out = capsys.readouterr().out
    number = r"-?[\d.]+(e[+-]\d+)?"
    for step in (1, 2):
        parts = rf"\(digits {number}, length {number}\)   kl {number}   entropy {number}   length {number}"
        end = r"   [\d,]+ tokens/s" + (r"   \d:\d\d left" if step == 1 else "")
        assert_line(out, rf"step {step}/2   reward {number}   {parts}{end}")
    assert_line(out, r"step 2/2   trained in \d:\d\d")
    assert "'reward'" not in out


def assert_line(out, pattern):
    assert [text for text in out.splitlines() if re.fullmatch(pattern, text)], (pattern, out)


@pytest.mark.parametrize(
    ("terminal", "disable_tqdm", "bar"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_bar_on_a_terminal_unless_it_is_switched_off(terminal, disable_tqdm, bar, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    one = trainer(tmp_path, digits, disable_tqdm=disable_tqdm)
    [progress] = [c for c in one.callback_handler.callbacks if isinstance(c, Progress)]
    assert isinstance(progress, ProgressBar) is bar
    one.train()
    shown = capsys.readouterr()
    assert ("1/1 [" in shown.err) == bar
    assert shown.out.count("   reward ") == 1


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ({"reward": 0.5, "rewards/one/mean": 0.5}, "step  5/60   reward 0.50   1:05 left"),
        (
            {"reward": None, "rewards/a/mean": None, "rewards/b/mean": 1e-5},
            "step  5/60   reward None   (a None, b 1.0e-05)   1:05 left",
        ),
        ({"reward": math.nan, "kl": 12345.0, "grad_norm": 1}, "step  5/60   reward nan   kl 1.2e+04   1:05 left"),
        ({"eval_loss": 0.1, "eval_reward": 2.0, "eval_kl": 0.0}, "step  5/60   eval   reward 2.00   kl 0.00"),
        ({"train_runtime": 7265.0, "train_loss": 0.1}, "step  5/60   trained in 2:01:05"),
        ({"train_runtime": 5.0, "reward": 0.5, "kl": 0.2}, "step  5/60   trained in 0:05   reward 0.50   kl 0.20"),
        ({"reward": 1, "tokens_per_second": 12345.6}, "step  5/60   reward 1.00   12,346 tokens/s   1:05 left"),
        ({"mine": 3, "epoch": 0.1}, "step  5/60   mine 3.00"),
        ({"eval_t/pass@2": 0.5, "eval_t/pass@2_low": 0.1, "eval_t/tokens": 9}, "step  5/60   eval_t/pass@2 0.50"),
        ({"loss": 0.5, "entropy": 2, "time/rollout": 0.0}, "step  5/60   loss 0.50   entropy 2.00   1:05 left"),
        (
            {"reward": 1, "environments/a/turns": 2.5, "environments/a/failed": 0.0},
            "step  5/60   reward 1.00   turns 2.50   1:05 left",
        ),
        (
            {"reward": 1, "environments/a/turns": 2, "environments/b/turns": 3, "environments/b/failed": 0.25},
            "step  5/60   reward 1.00   a turns 2.00   b turns 3.00   b failed 0.25   1:05 left",
        ),
    ],
)  # fmt: skip
def test_progress_lines(logs, expected):
    assert line(logs, 5, 60, 65.0) == expected
    assert clock(59.6) == "1:00"


def rows_of(folder) -> list[dict]:
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(row, parse_constant=no_constant) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_metrics_file_is_the_history_also_after_a_resume(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tmp_path, digits, **settings)
    whole.train()
    first = rows_of(tmp_path / "out")
    assert [row["step"] for row in first] == [1, 2, 3, 4, 4]
    assert first[0]["reward"] == whole.state.log_history[0]["reward"]
    with open(tmp_path / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')  # a kill
    again = trainer(tmp_path, digits, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    resumed = rows_of(tmp_path / "out")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 4]
    assert without_clocks(first) == without_clocks(resumed)
    trainer(tmp_path, digits).train()
    assert [row["step"] for row in rows_of(tmp_path / "out")] == [1, 1]


def test_nan_and_inf_are_null_in_the_metrics_file(tmp_path):
    one = trainer(tmp_path, digits)
    one.log({"good": 1.0, "bad": math.nan, "worse": -math.inf, "tensor": torch.tensor(2.0), "word": "x", "none": None})
    [row] = rows_of(tmp_path / "out")
    assert row == {"good": 1.0, "bad": None, "worse": None, "tensor": 2.0, "word": "x", "none": None, "step": 0} | (
        {"epoch": row["epoch"]} if "epoch" in row else {}
    )


def test_a_run_goes_on_without_a_metrics_file_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    one = trainer(tmp_path, digits)
    one.train()
    assert one.state.global_step == 1
    assert "metrics.jsonl could not be written" in caplog.text


def test_a_stream_without_columns_is_taken_as_it_is(tmp_path, caplog):
    stream = IterableDataset.from_generator(generator)
    one = trainer(tmp_path, ["test_python_api:half"], stream)
    assert one.train_dataset is not None
    assert "cannot score any row" not in caplog.text


@pytest.mark.parametrize("said_by", ["quantization_config", "model"])
def test_quantized_weights_are_refused_with_vllm(tmp_path, said_by):
    """vLLM would be sent their packed bytes; but not those that a config dequantizes, or bitsandbytes'."""
    model, given = tiny.model(), {}
    if said_by == "model":
        model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    else:
        given = {"quantization_config": QuantoConfig(weights="int8")}
    args = GRPOExtConfig(str(tmp_path), **tiny.TRAINING, use_vllm=True, vllm_mode="server")
    with pytest.raises(ConfigError, match="packed weights of the quantized layers"):
        GRPOExtTrainer(model, tiny.count_a, args, tiny.prompts(), **given)
    for unpacked in (Mxfp4Config(dequantize=True), BitsAndBytesConfig(load_in_4bit=True)):
        assert list(quantized_problems(args, model, unpacked)) == [*quantized_problems(args, model, None)]
    args.use_vllm = False
    assert list(quantized_problems(args, model, given.get("quantization_config"))) == []
