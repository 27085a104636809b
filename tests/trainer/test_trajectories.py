"""Trajectories in training: the same step however their rows are computed, and credit where turns earned it."""

import math
from dataclasses import replace

import pytest
import torch

from grpo_ext.errors import RewardError
from grpo_ext.objective.estimate import estimate
from grpo_ext.objective.trajectory import Trajectory, Turn, batch
from grpo_ext.rollout.trajectories import completed
from support import tiny
from support.float64 import FLOAT64, float64_throughout
from support.trainers import build, scripted_trajectories, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


def by_turn(trajectory, **_):
    return [[turn.reward for turn in made.turns] for made in trajectory]


@float64_throughout()
def trained(model, tmp_path, rewards=(tiny.count_a, by_turn), rollout=scripted_trajectories, **settings):
    settings = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0} | FLOAT64 | settings
    trainer = build(model, tmp_path, rewards, rollout=rollout, **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.05, "entropy_coef": 0.01, "advantage_estimator": "gigpo"},
        {"loss_type": "rloo", "beta": 0.1, "advantage_estimator": "turn_return", "mask_truncated_completions": True},
        {"loss_type": "gspo", "num_iterations": 2, "advantage_estimator": "turn_return"},
    ],
    ids=["reference and entropy", "KL in the reward", "old policy"],
)
def test_a_step_is_the_same_as_a_tree_as_plain_rows_and_in_micro_batches(settings, model, tmp_path):
    ends = []
    for how in (
        {"shared_prefix": "true"},
        {"shared_prefix": "false"},
        {"shared_prefix": "true", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ):
        trainer = trained(model, tmp_path, **settings, **how)
        ends.append(weights(trainer.model))
        if "beta" in settings:  # the reference, which is the policy still, was asked in the same contexts
            assert abs(trainer.state.log_history[0]["kl"]) < 1e-12
    assert (ends[0] - weights(tiny.load(model))).abs().max() > 1e-3
    for end in ends[1:]:
        assert (end - ends[0]).abs().max() < 1e-12


def growing(prompts, trainer):
    """Conversations whose contexts only grow."""
    made = []
    for prompt in trainer.processing_class(list(prompts))["input_ids"]:
        turns = []
        for n in range(3):
            sampled = [3 + (7 * len(made) + 5 * n + k) % 30 for k in range(2 + n)]
            turns.append(Turn(prompt, sampled + [1] * (n == 2)))
            prompt = prompt + sampled + [20, 21]
        made.append(Trajectory(turns))
    return {"trajectories": made}


def as_lists(prompts, trainer):
    rows = batch(growing(prompts, trainer)["trajectories"], {1})
    return {
        "prompt_ids": rows.prompt_ids,
        "completion_ids": rows.completion_ids,
        "logprobs": None,
        "env_mask": rows.tool_mask,
    }


@pytest.mark.parametrize("shared", ["true", "false"])
def test_a_plain_conversation_trains_as_its_lists_do(shared, model, tmp_path):
    ends = [
        weights(trained(model, tmp_path, [tiny.count_a], rollout, shared_prefix=shared).model)
        for rollout in (growing, as_lists)
    ]
    assert torch.equal(*ends)


def test_advantages_of_turns_are_on_the_tokens_of_these_turns(model, tmp_path, monkeypatch):
    trainer = build(
        model, tmp_path, [tiny.count_a, by_turn], rollout=scripted_trajectories, advantage_estimator="gigpo"
    )
    made, rollout = [], trainer.rollout_func
    monkeypatch.setattr(trainer, "rollout_func", lambda *given: made.append(rollout(*given)) or made[-1])
    trainer.model.train()
    output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    [rolled] = made
    trajectories = rolled["trajectory"]
    texts = trainer.processing_class.batch_decode(rolled["completion_ids"], skip_special_tokens=True)
    longest = max(len(t.turns) for t in trajectories)
    earned = torch.full((len(texts), longest), math.nan, dtype=torch.float64)
    states, width = torch.full((len(texts), longest), -1), output["completion_ids"].shape[1]
    turns, numbers = torch.full((len(texts), width), -1), {}
    for i, t in enumerate(trajectories):
        earned[i, : len(t.turns)] = torch.tensor([turn.reward for turn in t.turns])
        states[i, : len(t.turns)] = torch.tensor([numbers.setdefault(s, len(numbers)) for s in t.tree.states])
        turns[i, : len(t.tree.turns)] = torch.tensor(t.tree.turns)
    total = torch.tensor(tiny.count_a(texts)).double() + earned.nansum(1)
    offered = {"turn_rewards": earned, "turns": turns, "states": states, "mask": (turns >= 0).long()}
    offered = {name: tensor.view(-1, 4, tensor.shape[1]) for name, tensor in offered.items()}
    expected = estimate("gigpo", total.view(-1, 4), offered).flatten(0, 1)
    assert expected.abs().max() > 0.5
    assert (output["advantages"] - expected).abs().max() < 1e-5
    assert torch.equal(output["tool_mask"].bool() & output["completion_mask"].bool(), turns >= 0)


def test_dynamic_sampling_keeps_per_turn_rewards_with_their_rows(model, tmp_path, monkeypatch):
    """Rows are put together anew, each with its trajectory and its turns' rewards."""
    seen = {}

    def odd(trajectory, prompts, **_):
        found = by_turn(trajectory)
        found = [f if int(p[1:-1]) % 2 else [0.0] * len(f) for f, p in zip(found, prompts, strict=True)]
        seen.update({id(made): (made, earned) for made, earned in zip(trajectory, found, strict=True)})
        return found

    trainer = build(
        model,
        tmp_path,
        [odd],
        rows=64,
        rollout=scripted_trajectories,
        advantage_estimator="turn_return",
        dynamic_sampling="odd",
        dynamic_sampling_max_rounds=8,
        max_steps=1,
    )
    checked = []
    tokens = trainer._advantages.tokens

    def spy(collected, seen_tokens, group):
        for row, (earned,) in zip(collected.trajectories, collected.turn_rewards, strict=True):
            assert seen[id(row)] == (row, earned)
            checked.append(any(earned))
        return tokens(collected, seen_tokens, group)

    monkeypatch.setattr(trainer._advantages, "tokens", spy)
    trainer.train()
    assert len(checked) >= 8
    assert any(checked)
    assert trainer.state.log_history[0]["dynamic_sampling/rounds"] > 0


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda trajectory, **_: [[1.0] * 9 for _ in trajectory], r"9 rewards for a trajectory of \d turns"),
        (lambda trajectory, **_: [["no"] * len(t.turns) for t in trajectory], "a number for each turn"),
    ],
)
def test_per_turn_rewards_of_the_wrong_shape_are_errors(reward, words, model, tmp_path):
    with pytest.raises(RewardError, match=words):
        trained(model, tmp_path, [reward], max_steps=1)


def test_a_missing_trajectory_is_an_error(model, tmp_path):
    def short(prompts, trainer):
        return {"trajectories": growing(prompts, trainer)["trajectories"][1:]}

    with pytest.raises(ValueError, match="7 trajectories for 8 prompts"):
        trained(model, tmp_path, [tiny.count_a], short)


def told(prompts, trainer):
    output = growing(prompts, trainer)
    return {
        "trajectories": [
            Trajectory(t.turns, truncated=i == 0, messages=[{"role": "assistant", "content": f"said {i}"}])
            for i, t in enumerate(output["trajectories"])
        ]
    }


def test_rewards_see_messages_and_what_was_cut_counts_as_such(model, tmp_path):
    seen = []

    def watching(completions, **_):
        seen.extend(completions)
        return [float(i % 3) for i in range(len(completions))]

    trainer = trained(model, tmp_path, [watching], told, max_steps=1, mask_truncated_completions=True)
    assert seen[1] == [{"role": "assistant", "content": "said 1"}]
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 1 / 8
    inputs = trainer._buffered_inputs[0]
    assert sum(row.sum() == 0 for row in inputs["completion_mask"]) == 1


def test_a_row_without_messages_is_seen_as_its_text_and_the_others_keep_theirs(model, tmp_path):
    seen, texts = [], []

    def watching(completions, completion_ids, **_):
        seen.extend(completions)
        texts.extend(tiny.tokenizer().batch_decode(completion_ids, skip_special_tokens=True))
        return [float(i % 3) for i in range(len(completions))]

    def one_without(prompts, trainer):
        trajectories = told(prompts, trainer)["trajectories"]
        return {"trajectories": [replace(trajectories[0], messages=[]), *trajectories[1:]]}

    trained(model, tmp_path, [watching], one_without, max_steps=1)
    assert seen[0] == texts[0]
    assert seen[1:] == [[{"role": "assistant", "content": f"said {i}"}] for i in range(1, 8)]


def test_where_no_context_is_rewritten_a_batch_has_no_parents(model, tmp_path):
    assert "parents" not in trained(model, tmp_path, [tiny.count_a], growing, max_steps=1)._buffered_inputs[0]
    assert "parents" in trained(model, tmp_path, max_steps=1)._buffered_inputs[0]


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        ([[[-1.0], [-1.0]], [-1.0]], r"logprobs of completion 0 has \[-1.0\] among them"),
        ([[-1.0, -1.0], [[-1.0]]], r"logprobs of completion 1 has \[-1.0\] among them"),
        ([[-1.0], [-1.0]], "logprobs of completion 0 has 1 values for 2 tokens"),
        ([[-1.0, "x"], [-1.0]], "logprobs of completion 0 has 'x' among them"),
    ],
)
def test_log_probabilities_of_a_rollout_func_are_one_number_for_each_token(logprobs, words):
    def rollout(prompts, trainer=None):
        return {"prompt_ids": [[1], [1]], "completion_ids": [[5, 6], [7]], "logprobs": logprobs}

    with pytest.raises(ValueError, match=words):
        completed(rollout, {2}, 2)(["a", "b"])


@pytest.mark.parametrize("logprobs", [None, [[-1.0, None], [0]], [None, None], [[-1.0, -2.0], [float("nan")]]])
def test_log_probabilities_that_are_not_known_are_left_to_trl(logprobs):
    output = {"prompt_ids": [[1], [1]], "completion_ids": [[5, 6], [7]], "logprobs": logprobs}
    assert completed(lambda prompts: output, {2}, 2)(["a", "b"]) is output
