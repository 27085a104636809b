"""What a run records for a diagnosis: values worked out by hand, and in a run that samples by itself."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from grpo_ext.trainer.diagnosis.positions import DEPTHS, FIRST_TURN, LATER_TURNS
from grpo_ext.trainer.diagnosis.recording import (
    FIGURES,
    ROWS,
    SAMPLER_LOGPS,
    Watching,
    log_rows,
    log_weights,
    row_record,
    token_figures,
)
from grpo_ext.trainer.loss_terms import Figures, LossFigures
from support import tiny
from support.figures import Alone
from support.trainers import build


def means(figures: dict) -> dict[str, float]:
    sums = {name: ((values * mask).sum().item(), mask.sum().item()) for name, (values, mask) in figures.items()}
    return {name: total / count for name, (total, count) in sums.items() if count}


def test_a_sampler_is_compared_token_by_token():
    policy = torch.full((2, 6), -1.0)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    off = torch.tensor([[0.1, 0.1, 0.2, -0.2, 0.3, 0.3], [0.1, 0.2, 0.3, 9.0, 9.0, 9.0]])
    inputs = {"old_per_token_logps": policy, SAMPLER_LOGPS: policy + off}
    found = means(token_figures(inputs, torch.zeros(2, 6), mask, mask))
    assert found["sampling/mismatch"] == found["sampling/mismatch_from_0"] == pytest.approx(1.8 / 9)
    assert found["sampling/bias"] == pytest.approx(1.4 / 9)
    weights = [math.exp(-x) - 1 for x in (0.1, 0.1, 0.2, -0.2, 0.3, 0.3, 0.1, 0.2, 0.3)]
    assert found["sampling/chi2"] == pytest.approx(sum(w * w for w in weights) / 9, rel=1e-5)
    assert not [name for name in found if name.endswith(("_from_128", "_turn", "_turns"))]


def test_tokens_without_a_log_probability_and_rows_not_computed_do_not_count():
    policy, sampler = torch.zeros(2, 2), torch.tensor([[0.5, math.nan], [7.0, 7.0]])
    inputs = {"old_per_token_logps": policy, "sampling_per_token_logps": sampler}
    mask, computed = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert means(token_figures(inputs, torch.zeros(2, 2), mask, computed))["sampling/mismatch"] == 0.5


def test_a_ratio_has_its_chi2():
    log_ratio = torch.tensor([[0.0], [math.log(1.5)]])
    values, _ = token_figures({}, log_ratio, torch.ones(2, 3), torch.ones(2, 3))["ratio/chi2"]
    assert values.flatten().tolist() == pytest.approx([0.0, 0.25])


def sizes(parts) -> dict[str, float]:
    """Effective sample sizes of micro-batches: inputs, tensors, rows that were computed."""
    figures, metrics = Figures(), defaultdict(list)
    for inputs, tensors, active in parts:
        mask = tensors["mask"]
        means, weights = {"tokens": (torch.ones_like(mask), mask)}, log_weights(inputs, tensors, active)
        figures.add(LossFigures(means, None, mask, weights))
    figures.log(metrics, Alone())
    return {name: value for name, (value,) in metrics.items() if "ess" in name}


POLICY = torch.tensor([[0.5, -0.2, 9.0], [0.1, 0.4, -0.3], [7.0, 7.0, 7.0], [5.0, 5.0, 5.0]]).double()
SAMPLER = torch.tensor([[0.1, 0.2, 9.0], [0.0, math.nan, 0.1], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).double()
LIVE = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
"""The third row is not computed, the fourth has no active token."""


def micro_batch(rows: slice):
    inputs = {"old_per_token_logps": POLICY[rows], SAMPLER_LOGPS: SAMPLER[rows]}
    tensors = {"mask": LIVE[rows], "per_token_logps": POLICY[rows] + 0.1, "old_per_token_logps": POLICY[rows]}
    return inputs, tensors, torch.tensor([True, True, False, True])[rows]


@pytest.mark.parametrize("parts", [[slice(0, 4)], [slice(0, 1), slice(1, 4)], [slice(2, 4), slice(1, 2), slice(0, 1)]])
def test_an_effective_sample_size_is_that_of_whole_completions_in_any_micro_batches(parts):
    found = sizes([micro_batch(rows) for rows in parts])
    for name, logs in {
        "sampling/ess_completions": (0.5 - 0.1 - 0.2 - 0.2, 0.1 - 0.0 - 0.3 - 0.1),
        "ratio/ess_completions": (2 * 0.1, 3 * 0.1),
    }.items():
        weights = [math.exp(log) for log in logs]
        assert found[name] == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)), rel=1e-6), name


@pytest.mark.parametrize("apart", [1.0, -1.0])
def test_the_weights_of_long_completions_do_not_overflow(apart):
    """e^4096 is beyond float64; of two such weights the larger one is all of the estimate, of equal ones none is."""
    off = torch.tensor([[0.0], [apart], [apart]]).expand(3, 4096)
    tensors = {"mask": torch.ones(3, 4096), "per_token_logps": off, "old_per_token_logps": torch.zeros(3, 4096)}
    assert sizes([({}, tensors, None)]) == {"ratio/ess_completions": pytest.approx(2 / 3 if apart > 0 else 1 / 3)}


def test_a_step_without_a_computed_completion_has_no_effective_sample_size():
    inputs, tensors, _ = micro_batch(slice(0, 4))
    assert sizes([(inputs, tensors, torch.zeros(4).bool())]) == {}


IDS = torch.tensor([[5, 6, 1, 0], [5, 6, 1, 0], [5, 7, 8, 1], [6, 1, 0, 0], [6, 1, 0, 0], [9, 9, 9, 9]])
LENGTHS = [3, 3, 4, 2, 2, 4]
REWARDS = torch.tensor([[0.0, 3.0], [1.0, 3.0], [2.0, 4.0], [1.0, 2.0], [1.0, 2.0], [1.0, 4.0]])


def rows(advantages, mask=None, rewards=REWARDS) -> dict[str, float]:
    """Figures of six rows in two groups, spread over two micro-batches that hold them in another order."""
    drawn = [ids[:length].tolist() for ids, length in zip(IDS, LENGTHS, strict=True)]
    record = row_record(rewards, rewards[:, 0], drawn, 0, 3)
    mask = (torch.arange(4) < torch.tensor(LENGTHS)[:, None]).long() if mask is None else mask
    batch = {ROWS: record, "advantages": torch.tensor(advantages), "completion_mask": mask}
    parts = [{name: value[order] for name, value in batch.items()} for order in ([4, 0, 2], [5, 1, 3])]
    metrics = defaultdict(list)
    log_rows(parts, ["a", "b"], metrics, Alone())
    return {name: value for name, (value,) in metrics.items()}


def test_rows_are_measured_as_they_train():
    found = rows([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert found["advantages/of_reward"] == pytest.approx(1.0)
    assert found["rewards/a/of_advantage"] == pytest.approx(1.0)
    # b, less its group's mean: -1/3 -1/3 2/3 | -2/3 -2/3 4/3; lengths the same: they go together
    assert found["rewards/b/of_length"] == pytest.approx(1.0)
    assert found["rewards/b/of_advantage"] == pytest.approx(1.0 / math.sqrt(2.0 * (6 / 9 + 24 / 9)))
    assert found["groups/distinct"] == pytest.approx(2 / 3)
    assert (found["completions/length_above"], found["completions/length_below"]) == (4.0, 3.0)
    assert found["rewards/same_text_differs"] == pytest.approx(0.5)  # the first two of the four that have a twin
    assert found["completions/mask_misplaced"] == found["completions/skipped"] == 0.0


def test_advantages_of_other_rows_and_of_tokens_show():
    assert rows([1.0, 0.0, -1.0, 0.0, 0.0, 0.0])["advantages/of_reward"] == pytest.approx(-1.0)
    of_tokens = [[a, a, a, a] for a in (-1.0, 0.0, 1.0, 0.0, 0.0, 0.0)]
    assert rows(of_tokens)["advantages/of_reward"] == pytest.approx(1.0)


def test_an_environments_tokens_do_not_dilute_the_advantage_of_a_row():
    """Advantages go with the reward; of rows 0 and 2 most tokens are the environment's, with an advantage of 0."""
    rewards = torch.tensor([[1.0], [0.9], [-0.9], [-1.0]])
    tool_mask = torch.tensor([[1] + [0] * 9, [1] * 10] * 2)
    batch = {
        ROWS: row_record(rewards, rewards[:, 0], [[i] * 10 for i in range(4)], 0, 4),
        "advantages": rewards * tool_mask,
        "completion_mask": torch.ones(4, 10, dtype=torch.long),
        "tool_mask": tool_mask,
    }
    metrics = defaultdict(list)
    log_rows([batch], ["a"], metrics, Alone())
    assert metrics["advantages/of_reward"] == [pytest.approx(1.0)]
    assert metrics["rewards/a/of_advantage"] == [pytest.approx(1.0)]
    assert metrics["completions/mask_misplaced"] == [0.0]


def test_credit_by_turn_is_not_compared_with_the_total():
    """With gamma 0 a short last turn decides, and the mean advantage of a row goes with anything but its total."""
    batch = {
        ROWS: row_record(REWARDS, REWARDS[:, 0], [[i] * n for i, n in enumerate(LENGTHS)], 0, 3),
        "advantages": torch.randn(6, 4),
        "completion_mask": torch.ones(6, 4, dtype=torch.long),
    }
    metrics = defaultdict(list)
    log_rows([batch], ["a", "b"], metrics, Alone(), by_turn=True)
    assert not [name for name in metrics if name.endswith(("of_reward", "of_advantage"))]
    assert "rewards/a/of_length" in metrics


@pytest.mark.parametrize(
    ("change", "misplaced", "skipped"),
    [
        (lambda mask: mask.index_fill(1, torch.tensor([0]), 0), 1.0, 0.0),
        (lambda mask: torch.nn.functional.pad(mask[:, 1:], (0, 1)), 1.0, 0.0),
        (lambda mask: torch.nn.functional.pad(mask[:, :-1], (1, 0)), 1.0, 0.0),
        (lambda mask: mask.index_fill(0, torch.tensor([1, 2]), 0), 0.0, 2 / 6),
    ],
)
def test_misplaced_masks_and_skipped_completions_are_counted(change, misplaced, skipped):
    mask = (torch.arange(4) < torch.tensor(LENGTHS)[:, None]).long()
    found = rows([0.0] * 6, change(mask))
    assert found["completions/mask_misplaced"] == pytest.approx(misplaced)
    assert found["completions/skipped"] == pytest.approx(skipped)


def test_a_reward_without_any_score_leaves_the_other_figures():
    rewards = REWARDS.index_fill(1, torch.tensor([1]), math.nan)
    found = rows([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0], rewards=rewards)
    assert "rewards/b/of_length" not in found
    assert found["advantages/of_reward"] == pytest.approx(1.0)


def test_an_unscored_twin_does_not_count_as_another_reward():
    rewards = REWARDS.index_put((torch.tensor([4]), torch.tensor([0])), torch.tensor(math.nan))
    found = rows([0.0] * 6, rewards=rewards)
    assert found["rewards/same_text_differs"] == pytest.approx(2 / 3)  # the first two of the three


def test_the_change_of_the_weights_is_that_of_the_steps_that_are_logged():
    """Whoever makes the step: the optimizer, or an engine in its backward."""
    model, metrics = torch.nn.Linear(3, 2), defaultdict(list)
    state = SimpleNamespace(global_step=0, logging_steps=2, log_history=[], is_world_process_zero=True)
    watching = Watching(metrics)
    watching.on_train_begin(None, state, None, model=model)
    for factor in (3.0, 1.25, 0.5, 0.9):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        watching.on_optimizer_step(None, state, None)
        state.global_step += 1
    assert metrics["weights/change"] == pytest.approx([0.25, 0.1])


def test_a_step_that_moves_one_of_two_factors_changes_weights():
    """As of an adapter, of which one factor of each layer rests in the first step."""
    model, metrics = torch.nn.ParameterList([torch.ones(2) for _ in range(32)]), defaultdict(list)
    state = SimpleNamespace(global_step=0, logging_steps=1, log_history=[], is_world_process_zero=True)
    watching = Watching(metrics)
    watching.on_train_begin(None, state, None, model=model)
    with torch.no_grad():
        for factor in list(model)[1::2]:
            factor.mul_(2.0)
    watching.on_optimizer_step(None, state, None)
    assert metrics["weights/change"][0] > 0.1


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({}, "auto"),
        ({"num_iterations": 2, "gradient_accumulation_steps": 2}, "auto"),
        ({}, "generate"),  # transformers' own
    ],
)
def test_a_run_that_samples_by_itself_is_its_own_sampler(settings, engine, tmp_path):
    own = {"rollout_engine": engine, "temperature": 0.7, "learning_rate": 0.05}
    trainer = build(tiny.model(), tmp_path, max_steps=4, **own, **settings)
    trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    assert len(log) == (2 if settings else 4)  # a generation is logged with its first step
    for row in log:
        if "sampling/mismatch" in row:
            assert row["sampling/mismatch"] < 1e-5
            assert row["sampling/ess"] == pytest.approx(1.0)
            assert row["sampling/ess_completions"] == pytest.approx(1.0)
    assert any("sampling/mismatch" in row for row in log)
    moved = [row["ratio/chi2"] for row in trainer.state.log_history if "ratio/chi2" in row]
    assert (max(moved) > 0.1) == bool(settings)
    sizes = [row["ratio/ess_completions"] for row in trainer.state.log_history if "ratio/ess_completions" in row]
    assert (min(sizes) < 0.9) == bool(settings)
    logged = {name for row in log for name in row}
    elsewhere = {"rewards/same_text_differs", *list(DEPTHS)[1:], FIRST_TURN, LATER_TURNS}
    assert {name for name in FIGURES if "<" not in name} - logged <= elsewhere
    assert {"grad_norm/embeddings", "grad_norm/layers_first"} <= log[0].keys()
    of_length = "rewards/length/of_length"
    assert min(row[of_length] for row in log if of_length in row) > 0.5
    blocks = [value for name, value in log[0].items() if name.startswith("grad_norm/")]
    assert math.hypot(*blocks) == pytest.approx(log[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("settings", "off"), [({"loss_defaults": "trl"}, True), ({}, False)])
@pytest.mark.parametrize("engine", ["grouped", "generate"])
def test_truncated_sampling_shows_in_what_the_sampler_drew_unless_the_policy_is_scored_alike(
    settings, off, engine, tmp_path
):
    trainer = build(tiny.model(), tmp_path, max_steps=1, top_k=3, rollout_engine=engine, **settings)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["sampling/mismatch"] > 0.1 if off else row["sampling/mismatch"] < 1e-5
    if off:
        assert row["sampling/bias"] == pytest.approx(row["sampling/mismatch"], rel=1e-3)
