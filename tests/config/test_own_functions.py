"""Functions of a user's own: all that a packaged one may have, and refused in `check` where the run would fail."""

import sys

import pytest
import torch

from grpo_ext import GRPOExtConfig
from grpo_ext.config import dry_run
from grpo_ext.config.warnings import warnings
from grpo_ext.errors import ConfigError
from grpo_ext.objective.advantages import estimators
from grpo_ext.objective.aggregation import StepTotals, aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False, "num_generations": 4}
REGISTRIES = (losses, estimators, aggregations, kl_estimators)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write the user's module; what it registers is taken back afterwards."""
    before = [dict(registry._entries) for registry in REGISTRIES]
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> None:
        monkeypatch.delitem(sys.modules, "own", raising=False)
        (tmp_path / "own.py").write_text(f"import torch\nimport grpo_ext\n{text}")

    yield write
    sys.modules.pop("own", None)
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry._entries.clear()
        registry._entries.update(entries)


def config(**settings) -> GRPOExtConfig:
    return GRPOExtConfig(**CPU | settings)


LOSS, ADVANTAGE, KL, AGGREGATION = (
    {"loss_type": "own:f"},
    {"advantage_estimator": "own:f", "loss_type": "grpo"},
    {"kl_estimator": "own:f", "loss_type": "grpo", "beta": 0.1},
    {"loss_aggregation": "own:f", "loss_type": "grpo"},
)
BROKEN = {
    "a name that is none": (
        "def f(log_ratios, advantages): return -log_ratios.exp() * advantages",
        LOSS,
        ["loss_type='own:f': it asks for 'log_ratios', which is not one of its inputs", "Did you mean 'log_ratio'?"],
    ),
    "an option before the star": (
        "def f(per_token_logps, advantages, width=0.2): return -per_token_logps * advantages",
        LOSS,
        ["asks for 'width'", "after the star"],
    ),
    "a sum": (
        "def f(per_token_logps, advantages): return -(per_token_logps * advantages).sum()",
        LOSS,
        ["loss_type='own:f': it returned [] for 2 completions of 3 tokens", "[2, 3] or [2, 1]"],
    ),
    "no gradient": (
        "def f(per_token_logps, advantages): return -per_token_logps.detach() * advantages",
        LOSS,
        ["loss_type='own:f': it has no gradient in per_token_logps"],
    ),
    "a bug": (
        "def f(per_token_logps, advantages): return per_token_logps @ advantages.T.T.T",
        LOSS,
        ["loss_type='own:f': it raised RuntimeError", "Correct the function"],
    ),
    "an input changed in place": (
        "def f(log_ratio, advantages):\n    log_ratio += 1\n    return -log_ratio.exp() * advantages",
        LOSS,
        ["loss_type='own:f': it changes its input 'log_ratio' in place", "Write log_ratio = log_ratio + ..."],
    ),
    "a KL's input changed in place": (
        "def f(log_ref_ratio): return log_ref_ratio.neg_()",
        KL,
        ["kl_estimator='own:f': it changes its input 'log_ref_ratio' in place"],
    ),
    "clip regions of another shape": (
        "@grpo_ext.register_loss('f', clip_regions=lambda mask: (mask.sum(), mask.sum()))\n"
        "def f(per_token_logps, advantages): return -per_token_logps * advantages",
        LOSS,
        ["loss_type='own:f': clip_regions returned []"],
    ),
    "a metric of another shape": (
        "@grpo_ext.register_loss('f', metrics=lambda mask: {'mine': mask.sum(dim=1)})\n"
        "def f(per_token_logps, advantages): return -per_token_logps * advantages",
        LOSS,
        ["loss_type='own:f': metrics, 'mine', returned [2]"],
    ),
    "one advantage a group": (
        "def f(rewards): return rewards.mean(dim=1)",
        ADVANTAGE,
        ["advantage_estimator='own:f': it returned [2] for rewards [2, 4]", "[groups, completions]"],
    ),
    "a loss per completion": (
        "def f(loss, mask, totals): return loss.sum(dim=1)",
        AGGREGATION,
        ["loss_aggregation='own:f': it returned [2]", "Return a tensor []."],
    ),
    "an option of the wrong type": (
        "def f(loss, mask, totals, *, decay: float): return loss.sum()",
        AGGREGATION | {"loss_aggregation_kwargs": {"decay": "slow"}},
        ["loss_aggregation_kwargs.decay='slow': text where a number is expected"],
    ),
    "the field's option": (
        "def f(loss, mask, totals, *, max_completion_length: int): return loss.sum()",
        AGGREGATION | {"loss_aggregation_kwargs": {"max_completion_length": 3}},
        ["Set the field max_completion_length instead"],
    ),
    "bounds of one's own": (
        "from typing import Annotated\nfrom grpo_ext.objective.options import Within\n"
        "def f(rewards, *, share: Annotated[float, Within(least=0.0, most=1.0, because='it is one')] = 0.5):\n"
        "    return rewards - share",
        ADVANTAGE | {"advantage_kwargs": {"share": 1.5}},
        ["advantage_kwargs.share=1.5: must be from 0 to 1: it is one. Correct it; the default is 0.5."],
    ),
    "a group too small for an option of one's own": (
        "@grpo_ext.register_advantage('f', outnumbered='pairs')\ndef f(rewards, *, pairs: int = 4): return rewards",
        ADVANTAGE,
        ["advantage_kwargs.pairs=4", "num_generations=4"],
    ),
    "rewards that are lowered by the KL": (
        "@grpo_ext.register_advantage('f', unit_rewards=True)\ndef f(rewards): return rewards",
        ADVANTAGE | {"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
        ["advantage_estimator='own:f': this estimator needs rewards in [0, 1]"],
    ),
    "options that contradict each other": (
        "@grpo_ext.register_loss('f', conflict=lambda *, a, b: 'a < b. Swap them.' if a < b else None)\n"
        "def f(per_token_logps, advantages, *, a=1.0, b=0.5): return -per_token_logps * advantages",
        LOSS | {"loss_kwargs": {"b": 2.0}},
        ["a < b. Swap them."],
    ),
    "one term for a completion": (
        "@grpo_ext.register_loss('f', per_completion=True)\n"
        "def f(per_token_logps, advantages): return -(per_token_logps * advantages).sum(dim=1, keepdim=True)",
        LOSS | {"top_entropy_quantile": 0.5},
        ["top_entropy_quantile=0.5", "one term for a whole completion"],
    ),
    "advantages of tokens in a packaged loss with one term for a completion": (
        "def f(rewards, mask): return rewards[..., None] * mask",
        {"advantage_estimator": "own:f", "loss_type": "gmpo"},
        ["advantage_estimator='own:f': it gives each token an advantage, but with loss_type='gmpo'", "grpo or gspo"],
    ),
    "advantages of tokens in a loss that takes their mean": (
        "@grpo_ext.register_loss('f')\n"
        "def f(log_ratio, advantages): return -log_ratio.exp() * advantages.mean(dim=1, keepdim=True)",
        LOSS | {"advantage_estimator": "turn_return"},
        ["advantage_estimator='turn_return': it gives each token an advantage, but with loss_type='own:f'"],
    ),
    "a sampler's correction it cannot take": (
        "@grpo_ext.register_loss('f', sampler_levels=('sequence',))\n"
        "def f(per_token_logps, advantages): return -per_token_logps * advantages",
        LOSS | {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
        ["vllm_importance_sampling_mode='token_mask'", "Set 'sequence_truncate' or 'sequence_mask'"],
    ),
    "a field of another loss": (
        "def f(per_token_logps, advantages): return -per_token_logps * advantages",
        LOSS | {"sapo_temperature_pos": 0.5},
        ["sapo_temperature_pos=0.5", "only loss_type 'sapo' reads it"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_would_fail_after_the_first_rollouts_fails_at_once(name, own):
    source, settings, words = BROKEN[name]
    own(source)
    with pytest.raises(ConfigError) as error:
        config(**settings)
    (problem,) = map(str, error.value.problems)
    for word in words:
        assert word in problem


def test_options_of_ones_own_are_not_bound_by_the_names_of_packaged_ones(own):
    own(
        "def f(rewards, *, window: str = 'hann', k: int = -3, ddof: int = 7, eps: float = 0.0, clamp: float = 0.0,\n"
        "      reward_range: list[float] = []):\n"
        "    return rewards"
    )
    mine = {"k": -4, "ddof": 9, "eps": -1.0, "clamp": -2.0, "window": "flat", "reward_range": [3.0, 1.0]}
    objective = config(**ADVANTAGE, advantage_kwargs=mine).objective
    assert objective.advantage_kwargs == mine
    assert objective.remembered_batches == 0


def test_a_loss_with_one_bound_takes_epsilon(own):
    own("def f(log_ratio, advantages, *, epsilon_low: float = 0.2): return -log_ratio.exp() * advantages")
    assert config(**LOSS, epsilon=0.1).objective.options == {"epsilon_low": 0.1}


def test_history_is_as_long_as_the_estimators_own_default_says(own):
    own("def f(rewards, history, *, window: int = 3): return rewards")
    assert config(**ADVANTAGE).objective.remembered_batches == 2
    assert config(**ADVANTAGE, advantage_kwargs={"window": 5}).objective.remembered_batches == 4
    assert config(advantage_estimator="beta").objective.remembered_batches == 0


def test_an_aggregation_has_options(own):
    own("def f(loss, mask, totals, *, decay: float = 0.5): return decay * loss.sum() / totals.tokens")
    given = config(**AGGREGATION, loss_aggregation_kwargs={"decay": 0.25}).objective
    loss, mask = torch.ones(1, 2), torch.ones(1, 2)
    totals = StepTotals(torch.tensor(2.0), torch.tensor(1.0), torch.tensor(1.0))
    assert given.aggregate(loss, mask, totals).item() == 0.25
    assert config(**AGGREGATION).objective.aggregate(loss, mask, totals).item() == 0.5
    as_text = config(**AGGREGATION, loss_aggregation_kwargs='{"decay": 0.25}').objective
    assert as_text.aggregation_kwargs == {"decay": 0.25}
    assert given.to_dict()["aggregation_kwargs"] == {"decay": 0.25}


def test_a_loss_of_ones_own_has_all_that_a_packaged_one_may_have(own):
    own(
        "def cut(log_ratio, *, reach): return log_ratio < -reach, log_ratio > reach\n"
        "def figures(log_ratio, *, reach): return {'mine/spread': log_ratio.abs() / reach}\n"
        "@grpo_ext.register_loss('f', fields={'reach': 'sapo_temperature_pos'}, clip_regions=cut, metrics=figures,\n"
        "                        zero_without_advantage=True, off_policy=False)\n"
        "def f(log_ratio, advantages, *, reach: float = 9.0): return -log_ratio.exp() * advantages / reach"
    )
    mine = config(**LOSS, sapo_temperature_pos=0.5).objective
    assert mine.options == {"reach": 0.5}
    tensors = {"log_ratio": torch.tensor([[1.0, -2.0, 0.1]])}
    low, high = mine.clip_regions(tensors)
    assert (low.tolist(), high.tolist()) == ([[False, True, False]], [[True, False, False]])
    assert mine.metrics(tensors)["mine/spread"].tolist() == [[2.0, 4.0, pytest.approx(0.2)]]


@pytest.mark.parametrize("name", ["rloo", "minimind", "own:f"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_iterations": 3}, "num_iterations=3: "),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, "steps_per_generation=4: "),
        ({"steps_per_generation": 2, "num_iterations": 2}, "num_iterations=2 with steps_per_generation=2: "),
        ({"gradient_accumulation_steps": 2}, None),
    ],
)
def test_a_loss_without_a_ratio_says_when_it_is_off_policy(name, settings, told, own):
    own(
        "@grpo_ext.register_loss('f', off_policy=False)\n"
        "def f(per_token_logps, advantages): return -per_token_logps * advantages"
    )
    found = [w for w in map(str, warnings(config(loss_type=name, **settings))) if "off-policy" in w]
    assert [w.startswith(told) for w in found] == ([] if told is None else [True])
    assert not [w for w in map(str, warnings(config(loss_type="grpo", **settings))) if "off-policy" in w]


def test_an_estimator_that_one_none_would_stop_is_warned_of(own):
    own("def f(rewards): return rewards - rewards.mean(dim=1, keepdim=True)")
    (warning,) = [w for w in map(str, warnings(config(**ADVANTAGE))) if "None" in w]
    assert "advantage_estimator='own:f': an advantage of nan for the rewards [1.0, 0.0, 0.0, nan]" in warning
    own("def f(rewards): return rewards - rewards.nanmean(dim=1, keepdim=True)")
    assert not [w for w in map(str, warnings(config(**ADVANTAGE))) if "None" in w]


@pytest.mark.parametrize(
    "settings",
    [*({"loss_type": n} for n in losses), *({"advantage_estimator": n} for n in ("beta", "turn_return", "gigpo"))],
)
def test_what_is_packaged_passes(settings, monkeypatch):
    monkeypatch.setattr(dry_run, "_has_own", lambda objective: True)
    extra = {} if settings.get("loss_type") == "maxrl" else {"beta": 0.1}
    assert not [w for w in map(str, warnings(config(**settings, **extra))) if "None" in w]
    own_range = {"advantage_kwargs": {"reward_range": [2.0, 3.0]}}
    config(advantage_estimator="beta", **own_range)  # undefined for the rewards of the rehearsal
