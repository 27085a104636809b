"""Where in completions sampler and policy differ: by depth and turn, in any micro-batches, and in faulty runs."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step
from grpo_ext.objective.trajectory import Trajectory, Turn, batch
from grpo_ext.rollout.rollout_batch import Generated
from grpo_ext.rollout.trajectories import parents_of
from grpo_ext.trainer.batches import padded
from grpo_ext.trainer.diagnosis.positions import DEPTHS, FIRST_TURN, LATER_TURNS, by_place, depths, later_turns
from grpo_ext.trainer.diagnosis.rules import diagnose
from grpo_ext.trainer.loss_terms import Figures, LossFigures
from support import tiny, trainers
from support.figures import Alone


def test_a_turn_is_a_run_of_tokens_that_the_policy_wrote():
    written = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0], [0] * 8])
    assert later_turns(written).tolist() == [[0, 0, 0, 1, 0, 0, 1, 1], [0] * 8, [0, 0, 0, 1, 0, 0, 0, 0], [0] * 8]


def test_depth_and_turn_of_rewritten_contexts_are_those_of_the_context():
    """Of four turns the second begins behind the prompt again, the third behind the first, the last in the prompt."""
    turns = [Turn([5, 6, 7], [1, 2]), Turn([5, 6, 7], [3, 4, 9]), Turn([5, 6, 7, 1, 2, 8], [9]), Turn([5, 8], [4])]
    trajectory = Trajectory(turns)
    rows = batch([trajectory], {9})
    parents = parents_of([trajectory], len(rows.completion_ids[0]))
    assert rows.completion_ids == [[1, 2, 3, 4, 9, 8, 9, 8, 4, 9]]
    assert depths(parents).tolist() == [[0, 1, 0, 1, 2, 2, 3, 0, 0, 0]]
    assert later_turns(torch.tensor(rows.tool_mask), parents).tolist() == [[0, 0, 1, 1, 1, 0, 1, 0, 1, 0]]
    made = Generated([[5, 6, 7]], rows.completion_ids, rows.tool_mask, [], [[0.0] * 10], {}, None, [])
    found = padded(made, 0, None, torch.device("cpu"), {7}, [trajectory])
    assert found["later_turns"].tolist() == [[0, 0, 1, 1, 1, 0, 1, 0, 1, 0]]
    assert (found["parents"] == parents).all()


def test_tokens_in_a_chain_are_counted_by_column():
    off, chain = torch.rand(1, 300), torch.arange(-1, 299)[None]
    by_column, by_parent = (by_place(off, off > 0, None, parents) for parents in (None, chain))
    for (values, known), (others, of_them) in zip(by_column.values(), by_parent.values(), strict=True):
        assert values[known].tolist() == others[of_them].tolist()


def test_a_generation_keeps_its_turns_whatever_leaves_the_mask_later():
    made = Generated([[5], [5]], [[7, 8, 9, 3, 1], [7]], [[1, 1, 0, 1, 1], [1]], [], [[0.0] * 5, [0.0]], {}, None, [])
    for ends in (None, {9}):  # no row ends with a 9, so that none trains
        batch = padded(made, 0, None, torch.device("cpu"), ends)
        assert batch["later_turns"].tolist() == [[0, 0, 0, 1, 1], [0] * 5]
    assert not batch["tool_mask"].any()
    assert "later_turns" not in padded(made._replace(tool_mask=None), 0, None, torch.device("cpu"))


LENGTHS, ENDS = (1030, 129, 128, 40), (30, 100)
"""Tokens of rows, of which the first has a second turn from the place at which the tool's tokens end."""
OFF = {"sampling/mismatch_from_0": 1.0, "sampling/mismatch_from_128": 2.0, "sampling/mismatch_from_1k": 4.0}


def off_by_depth() -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of 1, 2 and 4 by depth, and the tokens that count: all but the tool's, and one without a value."""
    place = torch.arange(max(LENGTHS)).expand(4, -1)
    known = (place < torch.tensor(LENGTHS)[:, None]).index_fill(1, torch.tensor([3]), False)
    known[0, slice(*ENDS)] = False
    return 1.0 + (place >= 128) + 2.0 * (place >= 1024), known


def logged(parts: list[torch.Tensor]) -> dict[str, float]:
    """Figures of rows in micro-batches of their own width, as a step logs them."""
    (values, known), figures, metrics = off_by_depth(), Figures(), defaultdict(list)
    later = torch.zeros_like(known)
    later[0, ENDS[1] :] = True
    for rows in parts:
        width = max(LENGTHS[i] for i in rows.tolist())
        mask = known[rows, :width]
        figures.add(LossFigures(by_place(values[rows, :width], mask, later[rows, :width]), None, mask, {}))
    figures.log(metrics, Alone())
    return {name: value for name, (value,) in metrics.items()}


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 2], [1, 0]], [[2, 3, 1], [0]]])
def test_depth_and_turn_are_the_same_in_any_micro_batches(parts):
    """Of the first row 29 tokens are of its first turn; of its later ones 28 are at depth 0, 896 deeper, 6 deepest."""
    found = logged([torch.tensor(rows) for rows in parts])
    later = {FIRST_TURN: 1.0, LATER_TURNS: (28 * 1.0 + 896 * 2.0 + 6 * 4.0) / 930}
    assert found == pytest.approx(OFF | later)


@pytest.mark.parametrize(("width", "names"), [(128, 1), (129, 2), (1024, 2), (1025, 3), (65537, 5)])
def test_depths_that_no_completion_reaches_are_not_logged(width, names):
    figures, metrics, known = Figures(), defaultdict(list), torch.ones(1, width, dtype=torch.bool)
    figures.add(LossFigures(by_place(torch.ones(1, width), known, None), None, known, {}))
    figures.log(metrics, Alone())
    assert list(metrics) == list(DEPTHS)[:names]


class Chat(Conversation):
    """Answers each of four turns with a word."""

    def reset(self, row):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        return Step("on", float(len(message) % 3), self.turns == 4)


def deep(row: list[int]) -> list[bool]:
    return [place >= 128 for place in range(len(row))]


def later(row: list[int]) -> list[bool]:
    """True behind the first token of a tool."""
    return [0 in row[:place] for place in range(len(row))]


class Faulty(GRPOExtTrainer):
    """A sampler whose log-probabilities are wrong in turn by +-0.5 nats where `wrong` is true of a row's tool mask."""

    wrong = None

    def _generate(self, prompts):
        made = list(super()._generate(prompts))
        for mask, logps in zip(made[2], made[4], strict=True):
            for place, off in enumerate(self.wrong(mask) if self.wrong else ()):
                logps[place] += mask[place] * off * 0.5 * math.copysign(1, place % 2 - 0.5)
        return tuple(made)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "name"), [(deep, "drift by depth"), (later, "drift by turn"), (None, None)])
@pytest.mark.cases(1)
def test_a_sampler_that_is_wrong_at_a_place_is_named_with_the_place(wrong, name, tmp_path):
    settings = {"beta": 0.0, "max_steps": 3, "max_completion_length": 160, "per_device_train_batch_size": 4}
    args = GRPOExtConfig(output_dir=str(tmp_path), **(tiny.TRAINING | settings))
    rows = [{"prompt": [{"role": "user", "content": f"play {i}"}]} for i in range(16)]
    played = {"processing_class": tiny.tokenizer(), "environments": [{"path": Chat, "isolate": False}]}
    trainer = Faulty(tiny.model(max_position_embeddings=256), None, args, rows, **played)
    trainer.wrong = wrong
    trainer.train()
    log = trainer.state.log_history
    assert {"sampling/mismatch_from_128", FIRST_TURN, LATER_TURNS} <= log[0].keys()
    assert [f.rule.name for f in diagnose(log)] == ([name] if name else [])


def wrong_in_later_turns(prompts, trainer):
    """Trajectories with rewritten contexts; the sampler is a half too sure of each token behind the first turn."""
    rows = trainers.scripted_trajectories(prompts, trainer)["trajectories"]
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {"trajectories": [replace(made, turns=wrongly(model, made.turns)) for made in rows]}


@torch.no_grad()
def wrongly(model, turns):
    """Turns with the policy's log-probabilities in their own contexts, raised by a half behind the first turn.

    A turn whose context ends with the first one's tokens goes on with it: nobody has answered in between.
    """
    found, first = [], []
    for turn in turns:
        ids = torch.tensor([turn.context + turn.sampled])
        logps = model(ids).logits[0, len(turn.context) - 1 : -1].log_softmax(-1)
        exact = logps.gather(-1, ids[0, len(turn.context) :, None])[:, 0]
        later = bool(first) and turn.context not in first
        found.append(replace(turn, logprobs=(exact + 0.5 * later).tolist()))
        first += [] if later else [turn.context + turn.sampled]
    return found


@pytest.mark.parametrize("shared", ["true", "false"])
def test_a_run_with_rewritten_contexts_logs_in_which_turns_the_sampler_is_wrong(shared, tmp_path):
    trainer = trainers.build(
        tiny.model(), tmp_path, rollout=wrong_in_later_turns, shared_prefix=shared, temperature=1.0, max_steps=2
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if FIRST_TURN in log]
    assert len(logs) == 2
    for log in logs:
        assert log[FIRST_TURN] < 1e-6
        assert log[LATER_TURNS] == pytest.approx(0.5, abs=1e-6)
