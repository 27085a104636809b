"""Advantages that differ by token: each token trains with its own, in every loss, or `check` refuses the pair."""

from types import SimpleNamespace

import pytest
import torch

from grpo_ext.config.dry_run import dry_run_problems
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.credit import mixes_tokens
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.objective.objective import resolve
from support.pure import UNSET, batch, loss_and_gradient, objective

ROWS = [name for i, name in enumerate(losses) if losses[name] not in list(losses.values())[:i]]
PAIRS = [(name, level) for name in ROWS for level in losses[name].levels]
REFUSED = {("gmpo", "token")}
"""One term for a whole completion."""
every_pair = pytest.mark.parametrize(("name", "level"), PAIRS)
every_trained_pair = pytest.mark.parametrize(("name", "level"), [pair for pair in PAIRS if pair not in REFUSED])
SPREADS = {"inside the clip of a token": 0.3, "beyond the bound of a log-ratio": 30.0, "of gspo's order": 1e-3}
every_spread = pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)


def own_token_advantages(rewards, mask):
    """Later tokens earn more."""
    return (rewards - rewards.mean())[..., None] * mask.cumsum(dim=-1) * mask


def own_completion_advantages(rewards, mask):
    """Looks at tokens, and returns one number for a completion."""
    return (rewards - rewards.mean()) * mask.sum(dim=-1)


def whole_completion(log_ratio, advantages):
    """A loss that averages advantages over a completion and does not declare it."""
    return -(log_ratio.exp() * advantages).mean(dim=1, keepdim=True) * advantages.mean(dim=1, keepdim=True)


def narrow(per_token_logps, advantages):
    """A loss that was written for one advantage a completion."""
    return -per_token_logps * advantages.view(len(per_token_logps), 1)


OWN = {f.__name__: f"{__name__}:{f.__name__}" for f in (own_token_advantages, own_completion_advantages)}
GIVES_TOKENS = {
    **{name: (name in ("turn_return", "gigpo") or estimators.traits(name).per_token, {}) for name in estimators},
    "reinforce_pp, KL in the reward": (
        True,
        {"advantage_estimator": "reinforce_pp", "beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
    ),
    "reinforce_pp, KL in the loss": (
        False,
        {"advantage_estimator": "reinforce_pp", "beta": 0.1, "kl_placement": "loss", "kl_estimator": "k2"},
    ),
    OWN["own_token_advantages"]: (True, {}),
    OWN["own_completion_advantages"]: (False, {}),
}


def problems(name: str, **settings) -> list[str]:
    """Return the problems that `check` finds in the functions of a recipe."""
    config = {"loss_defaults": "paper", "beta": 0.0, "max_completion_length": 7, **dict.fromkeys(UNSET)}
    config |= {"num_generations": 4, "samples_otherwise": False, "multi_objective_aggregation": "sum_then_normalize"}
    given = SimpleNamespace(**config | {"loss_type": name} | settings)
    given.objective = resolve(given)
    return [str(problem) for problem in dry_run_problems(given)]


@pytest.mark.cases(12)
@every_pair
def test_a_pair_of_loss_and_estimator_is_refused_where_tokens_share_their_advantages(name, level):
    for estimator, (by_token, settings) in GIVES_TOKENS.items():
        settings = {"advantage_estimator": estimator, "importance_sampling_level": level} | settings
        found = problems(name, **settings)
        if not by_token or (name, level) not in REFUSED:
            assert found == [], estimator
            continue
        (problem,) = found
        assert problem.startswith(f"advantage_estimator={settings['advantage_estimator']!r}: it gives each token")
        assert f"loss_type={name!r}" in problem
        assert "Set a loss with a term for each token" in problem


@every_pair
def test_a_tokens_gradient_depends_on_its_own_advantage_only(name, level):
    settled = objective(name, importance_sampling_level=level)
    assert mixes_tokens(settled) is ((name, level) in REFUSED)
    assert mixes_tokens(settled, torch.tensor([[0.5], [2.0]])) is ((name, level) in REFUSED)


def by_token(inputs: dict) -> dict:
    """The batch with advantages of both signs and zeros inside each completion."""
    factors = torch.tensor([[1.0, -0.5, 2.0, 0.0, -1.5]], dtype=torch.float64)
    base = inputs["advantages"][:, None].where(inputs["advantages"][:, None] != 0, 0.5)
    return inputs | {"advantages": base * factors}


@pytest.mark.cases(45)
@every_spread
@every_trained_pair
def test_a_token_trains_as_if_its_whole_completion_had_its_advantage(name, level, spread):
    """So clipping is decided by the token's own sign, and constant advantages give the loss of the completion."""
    settled, inputs = objective(name, importance_sampling_level=level), by_token(batch(spread=spread))
    value, gradient = loss_and_gradient(settled, inputs)
    values = []
    for token in range(5):
        constant = inputs | {"advantages": inputs["advantages"][:, token]}
        expected_value, expected = loss_and_gradient(settled, constant)
        torch.testing.assert_close(gradient[:, token], expected[:, token], rtol=1e-12, atol=1e-12)
        as_tokens = constant | {"advantages": constant["advantages"][:, None].expand(8, 5).contiguous()}
        same_value, same = loss_and_gradient(settled, as_tokens)
        torch.testing.assert_close(same_value, expected_value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(same, expected, rtol=1e-12, atol=1e-12)
        values.append(expected_value)
    assert gradient.isfinite().all()
    if spread < 1:
        assert gradient.abs().max() > 1e-3
        assert len({round(float(v), 9) for v in (value, *values)}) > 2


def turns(time: int = 5) -> dict:
    """Two groups of four completions of two turns, whose turns earn differently, and the KL of their tokens."""
    g = torch.Generator().manual_seed(3)
    mask = batch()["mask"].view(2, 4, time)
    number = (torch.arange(time) >= 2).long().expand(2, 4, time)
    return {
        "mask": mask,
        "turns": torch.where(mask.bool(), number, -1),
        "states": torch.randint(0, 2, (2, 4, 2), generator=g),
        "turn_rewards": torch.randn(2, 4, 1, 2, generator=g, dtype=torch.float64),
    }


SUMMED = {"multi_objective_aggregation": "sum_then_normalize"}
KL_IN_REWARD = {"beta": 0.5, "kl_placement": "reward", "kl_estimator": "k1"}
ESTIMATED = {
    "turn_return": {"advantage_estimator": "turn_return"},
    "gigpo": {"advantage_estimator": "gigpo"},
    "reinforce_pp": {"advantage_estimator": "reinforce_pp", **KL_IN_REWARD},
    "own": {"advantage_estimator": OWN["own_token_advantages"]},
}


@pytest.mark.cases(60)
@pytest.mark.parametrize("estimator", ESTIMATED)
@every_trained_pair
def test_an_advantage_per_token_reaches_its_token(name, level, estimator):
    """Just off policy, inside every clip: a gradient is minus the token's advantage, times its ratio and weight."""
    settled = objective(name, importance_sampling_level=level, **SUMMED | ESTIMATED[estimator])
    inputs = batch()
    tokens = turns()
    if estimator == "reinforce_pp":
        kl = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * tokens["mask"]
        tokens = {"mask": tokens["mask"], "kl": kl}
    elif estimator == "own":
        tokens = {"mask": tokens["mask"]}
    rewards = torch.tensor([[1.0, 0.0, 0.5, 2.0], [0.0, 3.0, 1.0, 1.0]], dtype=torch.float64)[..., None]
    advantages = settled.advantages(rewards, torch.ones(1).double(), **tokens).flatten(0, 1)
    assert advantages.shape == (8, 5)
    assert any(len(set(row[m.bool()].tolist())) > 1 for row, m in zip(advantages, inputs["mask"], strict=True))
    inputs["old_per_token_logps"] = inputs["per_token_logps"] + 1e-9 * torch.arange(5)
    _, gradient = loss_and_gradient(settled, inputs | {"advantages": advantages})
    weights = loss_and_gradient(settled, inputs | {"advantages": torch.ones(8).double()})[1]
    torch.testing.assert_close(gradient, weights * advantages, rtol=1e-6, atol=1e-9)
    assert gradient.abs().max() > 1e-2


def test_the_kl_of_a_completion_does_not_depend_on_the_shape_of_the_advantages():
    for kl in kl_estimators:
        settled = objective("gspo", beta=0.3, kl_estimator=kl, kl_placement="loss")
        inputs = batch()
        of_completions = loss_and_gradient(settled, inputs)
        of_tokens = inputs["advantages"][:, None].expand(8, 5).contiguous()
        torch.testing.assert_close(
            loss_and_gradient(settled, inputs | {"advantages": of_tokens}), of_completions, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(
    ("function", "words"),
    [(whole_completion, "also depends on the advantages of the completion's other tokens"), (narrow, "RuntimeError")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_users_loss_that_mixes_tokens_is_refused_with_token_advantages(function, words):
    (problem,) = problems(f"{__name__}:{function.__name__}", advantage_estimator="turn_return")
    assert words in problem
    assert problems(f"{__name__}:{function.__name__}", advantage_estimator="group") == []
