"""`micro_batch_tokens`: no forward computes more tokens, and the gradient is that of whole micro-batches."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.errors import ConfigError
from grpo_ext.objective.aggregation import aggregations
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.packing.policy import PrefixSharing
from grpo_ext.packing.token_budget import TokenBudget, within_budget
from support import rewritten, seeing, tiny
from support.float64 import FLOAT64, float64_throughout
from support.pure import objective
from support.trainers import build, scripted_rollout, scripted_trajectories, unit_interval, weights

ROWS = [name for i, name in enumerate(losses) if losses[name] not in list(losses.values())[:i]]
LOCAL = {name for name in ROWS if losses[name].aggregation == "micro-batch-token-mean"}
ONE_STEP = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "per_device_train_batch_size": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


def ragged(seed: int, rows: int = 24, trees: bool = False):
    """Ids, mask, columns of completions and parents of groups of four, padded on both sides."""
    if trees:
        ids, mask, parents, _ = map(torch.tensor, rewritten.padded(rewritten.groups(seed, rows // 4)))
        return ids, mask, parents.shape[1], parents
    g = np.random.default_rng(seed)
    asked, answered = g.integers(1, 12, rows // 4).repeat(4), g.integers(0, 20, rows)
    columns = np.arange(12 + 20)
    mask = (columns >= 12 - asked[:, None]) & (columns < 12 + answered[:, None])
    ids = g.integers(3, 40, (rows, 32))
    ids[:, :12] = ids[::4, :12].repeat(4, axis=0)
    order = g.permutation(rows)
    return torch.tensor(ids * mask)[order], torch.tensor(mask).long()[order], 20, None


BODY = 1_600_000
"""Weights of a model for which packing these batches hardly pays."""


def computed(sharing, ids, mask, completion, parents):
    """Tokens that the scorer's forwards of a batch compute."""
    seen = []

    def plain(part, active, columns, **_):
        seen.append(part.numel())
        return torch.zeros(len(part), columns), None, None

    def packed(part, layout, columns, **_):
        seen.append(layout.tokens)
        return torch.zeros(len(part), columns), None, None

    sharing.scores(plain, packed, ids, mask, completion, len(ids), False, False, parents)
    return sum(seen)


@pytest.mark.parametrize("trees", [False, True], ids=["rows", "trees"])
@pytest.mark.parametrize("setting", ["true", "auto", "auto, near the margin", "false"])
def test_a_piece_computes_at_most_the_limit_unless_it_is_one_row(setting, trees):
    sharing = PrefixSharing(setting.partition(",")[0], tiny.model())
    if "margin" in setting:  # of these batches some are worth packing, and some are no longer once they are trimmed
        sharing.size = replace(sharing.size, body=BODY)
    for seed, most in [(0, 1), (1, 30), (2, 60), (3, 61), (4, 200), (5, 10_000)]:
        batch = ids, mask, completion, parents = ragged(seed, trees=trees)
        pieces = TokenBudget(most, sharing).cut(*batch)
        assert sorted(torch.cat(pieces).tolist()) == list(range(len(ids)))
        whole = computed(sharing, *batch)
        assert (len(pieces) == 1) == (whole <= most)
        assert len(pieces) < len(ids) or most == 1
        for rows in pieces:
            left = int(mask[rows].any(dim=0).int().argmax()) if sharing.possible else 0
            right = max(1, int(mask[rows, -completion:].sum(dim=1).max()))
            columns = slice(left, ids.shape[1] - completion + right)
            of_rows = None if parents is None else parents[rows, :right]
            part = ids[rows, columns], mask[rows, columns], right, of_rows
            assert len(rows) == 1 or computed(sharing, *part) <= most
            assert len(TokenBudget(most, sharing).cut(*part)) == 1  # old log-probabilities and the loss cut alike


@pytest.mark.parametrize("length", [1, 9])
def test_all_processes_make_the_same_collectives_in_the_same_order(length):
    """Without a gradient: the number of forwards first, then those that each forward holds."""
    calls, sharing = [], PrefixSharing("false", tiny.model())

    def agreed(name, number):
        calls.append(name)
        return 4 if name == "limit" else number

    sharing.agreed = partial(agreed, "sharing")
    mask = torch.ones(4, 14, dtype=torch.long)
    mask[:, 4 + length :] = 0
    score = partial(
        sharing.scores,
        lambda ids, mask, completion, **_: (torch.zeros(len(ids), completion), None, None),
        None,
        compute_entropy=False,
        compute_aux_loss=False,
    )
    with torch.no_grad():
        within_budget(
            TokenBudget(30, sharing, partial(agreed, "limit")),
            score,
            torch.ones_like(mask),
            mask,
            10,
            None,
            None,
            None,
        )
    assert calls == ["limit", *["sharing"] * 4]


def watched(trainer):
    """Rows and computed tokens of every forward of the model and its reference."""
    found = []
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            model.model.register_forward_pre_hook(
                lambda _, args, kwargs: found.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
            )
    return found


@float64_throughout()
def after(path, tmp_path, rollout=scripted_rollout, steps=2, rewards=(unit_interval,), **settings):
    trainer = build(path, tmp_path, rewards, 32, rollout=rollout, **(ONE_STEP | settings | FLOAT64), max_steps=steps)
    trainer.sharing.checked = True  # its forwards are not the loss's
    trainer.forwards = watched(trainer)
    trainer.train()
    return trainer


def silent(completions, **_):
    return [0.5 if i // 4 % 2 else i % 4 / 4 for i in range(len(completions))]


def by_turn(trajectory, **_):
    return [[turn.reward for turn in made.turns] for made in trajectory]


CASES = {
    "shared": {"shared_prefix": "true"},
    "plain": {"shared_prefix": "false"},
    "silent": {"shared_prefix": "true", "rewards": (silent,)},
    "silent, plain": {"shared_prefix": "false", "rewards": (silent,)},
    "reference, bonus, two steps": {
        "shared_prefix": "true",
        **{"beta": 0.05, "entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 2.64},
        **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    },
    "old policy": {"num_iterations": 2, "steps_per_generation": 2, "steps": 4, "off_policy_mask_threshold": 0.5},
    "stock": {"loss_defaults": "trl", "loss_type": "dapo", "beta": 0.05},
    "trees": {
        "shared_prefix": "true",
        **{"rollout": scripted_trajectories, "beta": 0.05},
        **{"rewards": (unit_interval, by_turn), "advantage_estimator": "gigpo"},
    },
    "trees as rows": {"shared_prefix": "false", "rollout": scripted_trajectories},
    "sampling supports": {"top_p": 0.8, "rollout": None},
    "checkpointed": {"gradient_checkpointing": True},
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", CASES)
def test_steps_metrics_and_bounds(case, path, tmp_path):
    """Weights after some steps, and every figure of them, are those of whole micro-batches."""
    settings, most = {"loss_type": "grpo"} | CASES[case], 40  # the comparisons at the start take at most 38
    whole, cut = (after(path, tmp_path, micro_batch_tokens=limit, **settings) for limit in (None, most))
    assert (weights(whole.model) - weights(tiny.load(path, torch.float64))).abs().max() > 1e-4
    assert (weights(whole.model) - weights(cut.model)).abs().max() < 1e-12
    timed = ("time", "per_second", "runtime")
    for one, other in zip(whole.state.log_history, cut.state.log_history, strict=True):
        found = {k: v for k, v in one.items() if isinstance(v, float) and not any(word in k for word in timed)}
        assert found == pytest.approx({k: other[k] for k in found}, rel=1e-9, abs=1e-12, nan_ok=True)
    if settings.get("rollout", scripted_rollout) is not None:  # sampled tokens are not counted
        assert max(rows * width for rows, width in whole.forwards) > most
        assert all(rows * width <= most or rows == 1 for rows, width in cut.forwards)


@pytest.fixture(scope="module")
def one_batch(path, tmp_path_factory):
    """A trainer with a micro-batch of every tensor that a loss may read."""
    folder = tmp_path_factory.mktemp("run")
    trainer = after(
        path, folder, steps=1, beta=0.05, loss_type="deepseek_v3", micro_batch_tokens=30, kl_placement="loss"
    )
    inputs, g = trainer._buffered_inputs[0], torch.Generator().manual_seed(0)
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + 0.3 * torch.randn(
        inputs["old_per_token_logps"].shape, generator=g, dtype=torch.float64
    )
    return trainer, inputs


IN_LOSS = {"beta": 0.05, "kl_placement": "loss"}
TERMS = [
    *((name, settings) for name in ROWS if name not in LOCAL for settings in ({}, IN_LOSS)),
    *(("grpo", IN_LOSS | {"kl_estimator": kl}) for kl in kl_estimators),
    *(("grpo", {"loss_aggregation": name}) for name in aggregations if aggregations.traits(name).additive),
]


@pytest.mark.cases(25)
@pytest.mark.parametrize(("name", "settings"), TERMS)
@float64_throughout()
def test_every_loss_has_one_gradient(name, settings, one_batch):
    trainer, inputs = one_batch
    AcceleratorState(cpu=True, _from_accelerator=True)  # that of all trainers, which a refused configuration empties
    trainer.objective = objective(name, **settings)
    gradients = []
    limit = trainer._scorer.limit
    for trainer._scorer.limit in (None, limit):
        trainer.model.zero_grad()
        trainer._compute_loss(trainer.model, inputs).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert gradients[0].abs().max() > 1e-6
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12 * max(1.0, gradients[0].abs().max())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_type": sorted(LOCAL)[0]}, "depends on which rows are in a micro-batch"),
        ({"top_entropy_quantile": 0.5}, "the quantile is over the tokens of a micro-batch"),
        ({"loss_defaults": "trl", "loss_type": "grpo", "entropy_coef": 0.01}, "a mean over a micro-batch"),
        ({"optim": "lomo"}, "before the last piece is computed"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0"),
    ],
)
def test_what_needs_whole_micro_batches_is_refused(settings, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        GRPOExtConfig(str(tmp_path), **(tiny.TRAINING | {"micro_batch_tokens": 64} | settings))


def test_images_are_refused(path, tmp_path):
    seeing.picture(0).save(tmp_path / "a.png")
    prompt = [{"role": "user", "content": "a:"}]
    rows = [{"prompt": prompt, "image": str(tmp_path / "a.png")}] * 16
    args = GRPOExtConfig(str(tmp_path), **tiny.TRAINING, micro_batch_tokens=64)
    with pytest.raises(ConfigError, match="rows with images are not cut by tokens yet"):
        GRPOExtTrainer(path, [unit_interval], args, rows, processing_class=tiny.tokenizer())
