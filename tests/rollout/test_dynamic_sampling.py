"""Dynamic sampling: which groups are refilled, with what, on whom, and that TRL then sees one ordinary batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import IterableDataset

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.errors import ConfigError
from grpo_ext.rollout.dynamic_sampling import (
    Batch,
    DynamicSampler,
    FreshPrompts,
    groups_to_draw,
    judge_problems,
    judged,
    replacements,
)
from grpo_ext.rollout.rollout_batch import Generated, RolloutBatch
from support import tiny
from support.processes import CONFIG, run_forked
from support.trainers import build, number, record

NAN = float("nan")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


# Decisions.


def test_a_group_is_judged_by_the_reward_that_is_named():
    accuracy = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, NAN], [NAN, NAN]])
    style = torch.tensor([[0.1, 0.2], [0.3, 0.3], [0.5, 0.5], [0.5, 0.6], [0.1, 0.2]])
    rewards = torch.stack([accuracy, style], dim=-1).double()

    def dead(by):
        return judged(rewards, ["accuracy", "style"], by).tolist()

    assert dead("accuracy") == [True, False, True, True, True]
    assert dead("style") == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("dead", "generations", "processes", "groups"),
    [(1, 4, 1, 1), (3, 4, 2, 3), (1, 3, 2, 2), (3, 4, 8, 4), (5, 6, 4, 6), (7, 1, 4, 8)],
)
def test_every_process_has_an_equal_share_of_the_fresh_completions(dead, generations, processes, groups):
    assert groups_to_draw(dead, generations, processes) == groups
    assert groups * generations % processes == 0


def test_dead_groups_are_replaced_in_order_until_either_side_runs_out():
    assert replacements([True, False, True, True], [True, False, False]) == {0: 1, 2: 2}
    assert replacements([False, True], [False, False]) == {1: 0}
    assert replacements([True], [True]) == {}


def test_log_probabilities_of_a_rollout_function_may_be_arrays():
    made = Generated([[1]], [[2, 3]], None, ["a"], [np.zeros(2)], {}, None, [])
    batch = Batch.of(RolloutBatch([{}], (), ["a"], made, rewards=torch.zeros(1, 1), turn_rewards=[[None]], logged={}))
    assert batch.rollouts().generated.logprobs[0].tolist() == [0.0, 0.0]


def test_fresh_prompts_visit_every_row_once_an_epoch_and_resume_anywhere():
    whole = FreshPrompts(7, seed=3).draw(21)
    for epoch in range(3):
        assert sorted(whole[7 * epoch :][:7]) == list(range(7))
    assert whole[:7] != whole[7:14]
    assert FreshPrompts(7, seed=4).draw(21) != whole
    resumed = FreshPrompts(7, seed=3)
    resumed.drawn = 10
    assert resumed.draw(11) == whole[10:]
    assert FreshPrompts(3, seed=3, shuffled=False).draw(7) == [0, 1, 2, 0, 1, 2, 0]


# In the trainer.


def odd_only(prompts, completions, **_):
    """Completions of an odd prompt score by their length, those of an even prompt all the same."""
    return [len(c) + 0.01 * c.count("a") if number(p) % 2 else 1.0 for p, c in zip(prompts, completions, strict=True)]


def never(completions, **_):
    return [1.0] * len(completions)


def place(completions, log_extra, solution, **_):
    """Different everywhere; logs a column, which has to follow its row."""
    log_extra("place", solution)
    return [0.1 * i for i in range(len(completions))]


def test_the_batch_that_trains_has_no_dead_group(model_path, tmp_path):
    settings = {"dynamic_sampling": "odd_only", "dynamic_sampling_max_rounds": 20, "steps_per_generation": 2}
    settings |= {"gradient_accumulation_steps": 2, "log_completions": False}
    trainer = record(model_path, tmp_path, [odd_only, place], **settings)
    trainer.train()
    for output in trainer.outputs:
        assert output["advantages"].shape == (16,)
        prompts = trainer.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        assert all(number(p) % 2 for p in prompts)
        assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 16, 4))
        assert (output["advantages"].view(4, 4).abs().sum(dim=1) > 0).all()
        lengths = output["completion_mask"].sum(dim=1)
        assert output["completion_ids"].shape[1] == lengths.max()
    logs, last = trainer._logs, trainer.outputs[-1]
    assert len(logs["prompt"]) == 16
    assert list(logs["extra"]["place"]) == [str(number(p)) for p in logs["prompt"]]
    assert logs["rewards"]["odd_only"] == pytest.approx(
        [len(c) + 0.01 * c.count("a") for c in logs["completion"]], abs=1e-5
    )
    assert torch.tensor(list(logs["advantages"])) == pytest.approx(last["advantages"], abs=1e-6)
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert log["dynamic_sampling/kept_groups"] == 4
    assert log["dynamic_sampling/rounds"] >= 1
    assert 0 < log["dynamic_sampling/waste"] < 1
    assert log["advantages/zero_variance_groups"] == 0


@pytest.mark.parametrize("estimator", ["batch", "loo"])
def test_advantages_are_those_of_the_merged_batch(estimator, model_path, tmp_path):
    settings = {"dynamic_sampling": "odd_only", "dynamic_sampling_max_rounds": 20, "advantage_estimator": estimator}
    trainer = record(model_path, tmp_path, [odd_only], loss_type="grpo", max_steps=1, **settings)
    trainer.train()
    rewards = torch.tensor(list(trainer._logs["rewards"]["odd_only"])).double().view(2, 4, 1)
    weights = torch.ones(1).double()
    expected = trainer.objective.advantages(rewards, weights, None, lambda *_: None).flatten()
    torch.testing.assert_close(trainer.outputs[0]["advantages"].double(), expected, atol=1e-4, rtol=1e-4)


def test_after_the_last_round_the_batch_is_trained_as_it_is(model_path, tmp_path):
    trainer = record(
        model_path, tmp_path, [never], dynamic_sampling="reward", dynamic_sampling_max_rounds=2, max_steps=1
    )
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert log["dynamic_sampling/rounds"] == 2
    assert log["dynamic_sampling/kept_groups"] == 0
    assert log["dynamic_sampling/waste"] == pytest.approx(2 / 3)
    assert not trainer.outputs[0]["advantages"].any()
    assert trainer.collector.dynamic.prompts.drawn == 4


def test_fresh_prompts_come_in_the_datasets_order_where_the_recipe_does_not_shuffle(model_path, tmp_path):
    settings = {"dynamic_sampling": "never", "dynamic_sampling_max_rounds": 2, "max_steps": 1}
    trainer = build(model_path, tmp_path, [never], rows=64, shuffle_dataset=False, **settings)
    asked, rollouts = [], trainer.collector.rollouts
    trainer.collector.rollouts = lambda rows, *more: (
        asked.append([row["prompt"] for row in rows[::4]]) or rollouts(rows, *more)
    )
    trainer.train()
    prompts = list(trainer.train_dataset["prompt"])
    assert asked == [prompts[:2], prompts[:2], prompts[2:4]]  # the batch, then two rounds from the first row on


def test_a_batch_without_dead_groups_is_left_alone(model_path, tmp_path):
    """Same draws, same weights as without dynamic sampling."""
    ends = []
    for by in (None, "place"):
        trainer = record(model_path, tmp_path, [place], dynamic_sampling=by)
        trainer.train()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*ends)
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert log["dynamic_sampling/rounds"] == log["dynamic_sampling/waste"] == 0


def test_evaluation_scores_the_rows_it_was_given(model_path, tmp_path):
    trainer = record(model_path, tmp_path, [never], dynamic_sampling="never")
    trainer.eval_dataset = tiny.prompts(8)
    trainer.evaluate()
    assert trainer.collector.dynamic.prompts.drawn == 0


def test_a_resumed_run_goes_on_where_the_fresh_prompts_were(model_path, tmp_path):
    settings = {"dynamic_sampling": "never", "dynamic_sampling_max_rounds": 1, "save_strategy": "steps"}
    trainer = record(model_path, tmp_path, [never], **settings, save_steps=1)
    trainer.train()
    assert torch.load(tmp_path / "checkpoint-1" / "run_state_0.pt", weights_only=True)["drawn"] == 2
    resumed = record(model_path, tmp_path, [never], **settings, save_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.collector.dynamic.prompts.drawn == trainer.collector.dynamic.prompts.drawn == 4


# What cannot work.


def test_an_unknown_reward_is_refused(model_path, tmp_path):
    with pytest.raises(ConfigError, match=r"dynamic_sampling='lenght'.*Did you mean 'length'"):
        build(model_path, tmp_path, dynamic_sampling="lenght")
    assert list(judge_problems("reward", ["a"])) == list(judge_problems(None, [])) == []


def test_a_stream_cannot_be_drawn_from(model_path, tmp_path):
    rows = IterableDataset.from_generator(lambda: iter(tiny.prompts(16)))
    args = GRPOExtConfig(output_dir=str(tmp_path), dynamic_sampling="length", **tiny.TRAINING)
    with pytest.raises(ConfigError, match="IterableDataset"):
        GRPOExtTrainer(model_path, [tiny.length], args, rows, processing_class=tiny.tokenizer())


def test_tools_are_refused(tmp_path):
    args = GRPOExtConfig(output_dir=str(tmp_path), dynamic_sampling="length", **tiny.TRAINING)
    with pytest.raises(ConfigError, match="tools"):
        DynamicSampler(args, tiny.prompts(), ["length"], 4, stateful=True, accelerator=Accelerator())


# Two processes.


@pytest.mark.slow
def test_two_processes_settle_on_one_batch(model_path, tmp_path):
    """Groups of 8 over two devices of 12 rows: one group spans both; rows move between the processes."""
    script = Path(__file__).parents[1] / "trainer" / "distributed" / "ranks.py"
    run_forked(script, "dynamic", model_path, tmp_path, config=CONFIG)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for step in range(2):
        rows = [row for rank in ranks for row in rank["rows"][step]]
        assert len(rows) == 24
        for group in (rows[i : i + 8] for i in (0, 8, 16)):
            assert len({prompt for prompt, *_ in group}) == 1
            assert number(group[0][0]) % 3 == 1
            scores = torch.tensor([score for *_, score, _ in group])
            advantages = torch.tensor([advantage for *_, advantage in group])
            expected = (scores - scores.mean()) / (scores.std() + 1e-4)
            torch.testing.assert_close(advantages, expected, atol=1e-3, rtol=1e-3)
    assert ranks[0]["drawn"] == ranks[1]["drawn"] > 0
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
