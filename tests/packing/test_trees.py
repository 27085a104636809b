"""One trajectory, one gradient: as a packed tree, as plain rows, as a row for each turn, in any micro-batches."""

import random
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch
from transformers import MistralConfig
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.objective.aggregation import StepTotals, step_totals
from grpo_ext.objective.kl import kl_estimators
from grpo_ext.objective.losses import losses
from grpo_ext.objective.trajectory import Trajectory, Turn
from grpo_ext.packing import micro_batches as batching
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.policy import PrefixSharing
from grpo_ext.packing.tree import is_plain, pack_tree, plain_rows
from support import rewritten, tiny
from support.float64 import float64_throughout
from support.pure import loss, objective

TRAJECTORIES = rewritten.groups()
ROWS = [name for i, name in enumerate(losses) if losses[name] not in list(losses.values())[:i]]
IN_LOSS = {"kl_placement": "loss", "kl_estimator": "k3"}
LOSSES = [
    *((name, {"beta": 0.3} | (IN_LOSS if losses[name].kl_placement == "reward" else {})) for name in ROWS),
    *(("grpo", {"beta": 0.3, "kl_estimator": kl}) for kl in kl_estimators),
]


def network(dtype=torch.float64, **settings):
    """In float32 with the weights that models begin with: sharper ones amplify rounding, whatever the rows."""
    model = tiny.model(dtype=dtype, initializer_range=0.3 if dtype == torch.float64 else 0.02, **settings)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model


def plain(model):
    """TRL's forward, from logits."""

    def forward(ids, mask, completion):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -completion - 1 : -1]
        log_p = torch.log_softmax(logits / 0.7, dim=-1)
        return log_p.gather(-1, ids[:, -completion:, None])[..., 0], -(log_p.exp() * log_p).sum(-1), None

    return forward


def packed(model):
    return lambda ids, layout, completion, **_: log_probs(model, model, ids, layout, completion)


def scores(model, trajectories, setting, rows=None):
    """Log-probabilities and entropies [trajectories, time]."""
    ids, mask, parents, _ = map(torch.tensor, rewritten.padded(trajectories))
    sharing = PrefixSharing(setting, model)
    forwards = plain(model), packed(model)
    columns = parents.shape[1]
    return sharing.scores(*forwards, ids, mask, columns, rows or len(ids), True, False, parents)[:2]


def by_turn(model, trajectories):
    """The same of what was sampled, from a row for each turn, computed alone."""
    parents = rewritten.padded(trajectories)[2]
    found = [[torch.zeros(parents.shape, dtype=model.dtype)[i] for i in range(len(parents))] for _ in range(2)]
    for i, made in enumerate(trajectories):
        of = torch.tensor([*made.tree.turns, *[-1] * (parents.shape[1] - len(made.tree.turns))])
        for number, turn in enumerate(made.turns):
            row = torch.tensor([turn.context + turn.sampled])
            for values, new in zip(found, plain(model)(row, torch.ones_like(row), len(turn.sampled)), strict=False):
                values[i] = values[i].masked_scatter(of == number, new[0])
    return [torch.stack(values) for values in found]


def fixed(sampled, dtype):
    """What a loss takes beside the policy's log-probabilities, off policy, with an advantage for each token."""
    g = torch.Generator().manual_seed(1)
    shape = sampled.shape
    noise = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) * 0.2 for _ in range(2)]
    advantages = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    return noise, advantages, torch.tensor(sampled)


def gradient(settled, model, logps, known, given, totals=None):
    (old, ref), advantages, mask = given
    inputs = {
        "per_token_logps": logps,
        "old_per_token_logps": known + old,
        "ref_per_token_logps": known + ref,
        "advantages": advantages,
        "mask": mask,
    }
    parts = torch.autograd.grad(loss(settled, inputs, totals), list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@float64_throughout()
def test_every_loss_has_one_gradient_whatever_rows_a_trajectory_takes():
    model = network()
    ways = {
        "tree": scores(model, TRAJECTORIES, "true")[0],
        "plain rows": scores(model, TRAJECTORIES, "false")[0],
        "a row for each turn": by_turn(model, TRAJECTORIES)[0],
        "trees, two at a time": scores(model, TRAJECTORIES, "true", rows=2)[0],
    }
    given = fixed(rewritten.padded(TRAJECTORIES)[-1], torch.float64)
    active = given[-1].bool()
    known = ways["plain rows"].detach()
    for values in ways.values():
        assert (values - known)[active].abs().max() < 1e-12
    plain = ways.pop("plain rows")
    for (name, settings), way in zip(LOSSES, cycle(ways)):
        settled = objective(name, **settings)
        expected = gradient(settled, model, plain, known, given)
        assert expected.norm() > 1e-3, name
        assert off(gradient(settled, model, ways[way], known, given), expected) < 1e-12, (name, settings, way)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 13])
@float64_throughout()
def test_a_window_counts_the_tokens_of_a_context_wherever_they_are_packed(window):
    model = network(kind=MistralConfig, sliding_window=window)
    tree, rows = scores(model, TRAJECTORIES, "true"), by_turn(model, TRAJECTORIES)
    active = torch.tensor(rewritten.padded(TRAJECTORIES)[-1]).bool()
    weights = torch.randn(2, *active.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * active
    for found, expected in zip(tree, rows, strict=True):
        assert (found - expected)[active].abs().max() < 1e-12
    slopes = [torch.autograd.grad((weights * torch.stack(x)).sum(), [*model.parameters()]) for x in (tree, rows)]
    for found, expected in zip(*slopes, strict=True):
        assert (found - expected).abs().max() < 1e-11 * max(1.0, expected.abs().max())


def test_in_float32_it_is_the_same_to_rounding():
    model = network(torch.float32)
    tree, rows = (scores(model, TRAJECTORIES, setting)[0] for setting in ("true", "false"))
    given, known = fixed(rewritten.padded(TRAJECTORIES)[-1], torch.float32), rows.detach()
    for name in ("grpo", "gspo", "dapo"):
        expected = gradient(objective(name), model, rows, known, given)
        assert off(gradient(objective(name), model, tree, known, given), expected) < 1e-5, name


@float64_throughout()
def test_entropies_and_their_gradient_too():
    model = network()
    found = [scores(model, TRAJECTORIES, setting)[1] for setting in ("true", "false")] + [
        by_turn(model, TRAJECTORIES)[1]
    ]
    active = torch.tensor(rewritten.padded(TRAJECTORIES)[-1]).bool()
    weight = torch.randn(active.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * active
    gradients = [torch.autograd.grad((weight * x).sum(), list(model.parameters()))[3] for x in found]
    for values, slope in zip(found[1:], gradients[1:], strict=True):
        assert (values - found[0])[active].abs().max() < 1e-12
        assert (slope - gradients[0]).abs().max() < 1e-12


@float64_throughout()
def test_micro_batches_add_up():
    """A trajectory is in one of them whole, as it is one row."""
    model, order = network(), [5, 0, 6, 3, 1, 7, 2, 4]
    sampled = rewritten.padded(TRAJECTORIES)[-1]
    given = (old, ref), advantages, mask = fixed(sampled, torch.float64)
    whole = scores(model, TRAJECTORIES, "true")[0]
    totals = step_totals([mask])
    for name in ROWS:
        settled = objective(name)
        if not settled.additive:
            continue
        expected, found = gradient(settled, model, whole, whole.detach(), given), 0.0
        for begin, end in pairwise([0, 3, 4, 8]):
            rows = order[begin:end]
            logps = scores(model, [TRAJECTORIES[i] for i in rows], "true")[0]
            width = logps.shape[1]
            part = (old[rows, :width], ref[rows, :width]), advantages[rows, :width], mask[rows, :width]
            found = found + gradient(settled, model, logps, logps.detach(), part, StepTotals(*totals))
        assert off(found, expected) < 1e-12, name


@float64_throughout()
def test_a_growing_conversation_gives_the_same_scores_however_it_is_cut():
    """One trajectory as one row, as two, as one for each turn: contexts that extend, and the same ids apart."""
    model, r = network(), random.Random(3)
    turns, context = [], rewritten.ids(r, 6)
    for _ in range(5):
        turns.append(Turn(context, rewritten.ids(r, 3)))
        context = context + turns[-1].sampled + rewritten.ids(r, 2)
    made = [Trajectory(turns)]
    ids, mask, parents, sampled = rewritten.padded(made)
    assert is_plain(parents, mask[:, -parents.shape[1] :])
    assert len(made[0].rows()) == 1
    one = scores(model, made, "false")[0]
    every = by_turn(model, made)[0]
    cut = made[0].tree.turns.index(3)  # the row as far as the second turn has it, and the whole of it
    first = plain(model)(torch.tensor(ids[:, : 6 + cut]), torch.ones(1, 6 + cut).long(), cut)[0]
    halves = torch.cat([first, one[:, cut:]], dim=1)
    given = fixed(sampled, torch.float64)
    for name in ROWS:
        expected = gradient(objective(name), model, one, one.detach(), given)
        for values in (every, halves):
            assert off(gradient(objective(name), model, values, one.detach(), given), expected) < 1e-12, name


# What is computed.


def unique(trajectories):
    """Distinct beginnings of all contexts with what was sampled, and of them those that something follows."""
    ways = [turn.context + turn.sampled for made in trajectories for turn in made.turns]
    every = {tuple(way[: n + 1]) for way in ways for n in range(len(way))}
    return every, {way[:-1] for way in every} - {()}


def test_the_forward_computes_the_distinct_tokens_of_the_tree():
    ids, mask, parents, _ = rewritten.padded(TRAJECTORIES)
    every, followed = unique(TRAJECTORIES)
    layout, whole = pack_tree(ids, mask, parents), pack_tree(ids, mask, parents, whole=True)
    assert whole.tokens == len(every)
    assert layout.tokens == len(followed)
    [rows], _ = plain_rows(ids, mask, parents)
    assert rows.mask.sum() > 1.5 * layout.tokens
    for packing in (layout, whole):
        covered = [t for run in packing.segments.runs for t in range(run.start, run.stop)]
        assert covered == list(range(packing.tokens))
        assert packing.weight.min() >= 1
    assert whole.weight.sum() == mask.sum()


def test_deep_trees_have_a_level_for_each_branch():
    prompt, turns, context = [5, 6, 7], [], [5, 6, 7]
    for n in range(6):  # each turn is tried twice, and the second goes on
        turns += [Turn(context, [10 + n]), Turn(context, [20 + n, 30])]
        context = [*context, 20 + n, 30]
    ids, mask, parents, _ = rewritten.padded([Trajectory(turns, truncated=True)])
    layout = pack_tree(ids, mask, parents, whole=True)
    assert [len(level) for level in layout.segments.levels] == [1] * 6
    assert layout.position.max() == len(prompt) + 11


def test_rows_without_tokens_are_left_out_of_a_tree():
    ids, mask, parents, _ = rewritten.padded(TRAJECTORIES)
    alone = mask.copy()
    alone[1:, -parents.shape[1] :] = 0
    assert pack_tree(ids, alone, parents).tokens == len(unique(TRAJECTORIES[:1])[1])
    alone[0, -parents.shape[1] :] = 0
    assert pack_tree(ids, alone, parents) is None


def test_rows_without_an_advantage_are_left_out_of_a_tree():
    model = network(torch.float32)
    ids, mask, parents, _ = (torch.tensor(x) for x in rewritten.padded(TRAJECTORIES))
    start = ids.shape[1] - parents.shape[1]
    inputs = {
        "prompt_ids": ids[:, :start],
        "prompt_mask": mask[:, :start],
        "completion_ids": ids[:, start:],
        "completion_mask": mask[:, start:],
        "parents": parents,
    }
    sharing = PrefixSharing("true", model)

    def forward(batch):
        joined = [torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask")]
        columns = batch["completion_ids"].shape[1]
        forwards = plain(model), packed(model)
        return sharing.scores(*forwards, *joined, columns, len(joined[0]), True, False, batch.get("parents"))

    every = forward(inputs)[0]
    for active in ([1, 0, 0, 1, 1, 0, 1, 0], [0] * 8):
        active = torch.tensor(active).bool()
        found = batching.of_active_rows(forward, inputs, active)[0]
        real = mask[active][:, start:].bool()
        assert (found[active] - every[active])[real].abs().max() < 1e-4 if active.any() else not found.any()
        assert not found[~active].any()


def test_micro_batches_are_arranged_with_their_parents():
    ids, mask, parents, _ = (torch.tensor(x) for x in rewritten.padded(TRAJECTORIES))
    start = ids.shape[1] - parents.shape[1]
    batch = {
        "prompt_ids": ids[:, :start],
        "prompt_mask": mask[:, :start],
        "completion_ids": ids[:, start:],
        "completion_mask": mask[:, start:],
        "parents": parents,
        "advantages": torch.arange(1.0, 9.0),
    }
    parts = [{name: x[i : i + 2] for name, x in batch.items()} for i in (0, 2, 4, 6)]
    for part in batching.regroup(parts, 4):
        assert part["parents"].shape == part["completion_ids"].shape
        rows = (part["advantages"] - 1).long()
        active = part["completion_mask"].bool()
        width = active.shape[1]
        assert torch.equal(part["parents"][active], parents[rows, :width][active])


@pytest.mark.parametrize("size", [None, 1, 2, 8])
def test_plain_rows_are_those_of_the_trajectory(size):
    ids, mask, parents, _ = rewritten.padded(TRAJECTORIES)
    batches, places = plain_rows(ids, mask, parents, size)
    found = [
        row[active.astype(bool)].tolist() for b in batches for row, active in zip(b.input_ids, b.mask, strict=True)
    ]
    assert sorted(found) == sorted(row for made in TRAJECTORIES for row in made.rows())
    start = ids.shape[1] - parents.shape[1]
    placed = places >= 0
    flat = np.concatenate([b.input_ids[:, -b.completion :].reshape(-1) for b in batches])
    assert (flat[places[placed]] == ids[:, start:][placed]).all()
    predicted = parents >= -mask[:, :start].sum(axis=1)[:, None]  # all but a row's first
    assert not predicted.all()
    assert np.array_equal(placed, predicted & (mask[:, start:] > 0))


def stripped(turns=30):
    """A trajectory whose template strips what was thought in each turn before."""
    r, made, context = random.Random(5), [], [5, 6, 7]
    for _ in range(turns):
        made.append(Turn(context, [*rewritten.ids(r, 4), 35]))
        context = [*context, 35, *rewritten.ids(r, 2)]
    return Trajectory(made, truncated=True)


@float64_throughout()
def test_no_forward_of_contexts_has_more_positions_than_the_micro_batch_may():
    """Thirty contexts of two trajectories: as many positions in a forward as two of the longest contexts have."""
    model, made = network(), [stripped(), rewritten.groups()[0]]
    ids, mask, parents, sampled = map(torch.tensor, rewritten.padded(made))
    sharing, shapes = PrefixSharing("false", model), []

    def forward(ids, mask, completion):
        shapes.append(tuple(ids.shape))
        return plain(model)(ids, mask, completion)

    def scored(agreed=None):
        sharing.agreed = agreed
        return sharing.scores(forward, None, ids, mask, parents.shape[1], 2, True, False, parents)[0]

    logps = scored()
    longest = max(len(row) for one in made for row in one.rows()) + 3  # and the padding of prompts
    assert len(shapes) >= 10
    assert max(rows * width for rows, width in shapes) <= 2 * longest
    assert sum(rows * width for rows, width in shapes) < 1.3 * sum(len(row) for one in made for row in one.rows())
    alone = len(shapes)
    expected = by_turn(model, made)[0]
    assert (logps - expected)[sampled.bool()].abs().max() < 1e-12
    waited = scored(lambda count: count + 3)  # of another process
    assert len(shapes) == 2 * alone + 3
    weight = torch.randn(logps.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * sampled
    slopes = [torch.autograd.grad((weight * x).sum(), list(model.parameters())) for x in (logps, waited, expected)]
    for one, two, three in zip(*slopes, strict=True):
        assert torch.equal(one, two)
        assert (one - three).abs().max() < 1e-12
