"""The sampling support of conversations, agents, tools and images reaches the loss: its ratio is over these tokens."""

import copy

import pytest
import torch
from datasets import Dataset

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.packing.sampling_support import SUPPORTS, decoded
from support import agents, seeing, tiny, tool_caller
from support.trainers import weights

CUTS = {"top_p": {"top_p": 0.7}, "top_k": {"top_k": 5, "temperature": 0.8}, "min_p": {"min_p": 0.1}}
GUESS = {"name": "guess", "kwargs": {"high": 9, "guesses": 3}, "max_turns": 4}
BRANCHES = {"path": f"{agents.__file__}:branches"}
CHATS = [{"prompt": [{"role": "user", "content": f"guess {i}:"}], "solution": str(i % 9 + 1)} for i in range(16)]
ROUNDING = 1e-5
PLAIN = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


class Recorder(GRPOExtTrainer):
    """Keeps the supports of each generation, and what was sampled."""

    def _generate_and_score_completions(self, inputs):
        self.output = super()._generate_and_score_completions(inputs)
        return self.output


def config(folder, **settings):
    return GRPOExtConfig(str(folder), **(tiny.TRAINING | {"max_completion_length": 40} | settings))


def with_environment(folder, entry, **settings):
    parts = tiny.model(), [answers], config(folder, **settings), CHATS
    return Recorder(*parts, processing_class=tiny.tokenizer(), environments=[entry])


def with_tools(folder, **settings):
    model, tokenizer = map(copy.deepcopy, tool_caller.taught())
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "count"}]] * 8})
    args = config(folder, **{"max_completion_length": 120, "max_tool_calling_iterations": 2} | settings)
    return Recorder(model, [answers], args, rows, processing_class=tokenizer, tools=list(tool_caller.TOOLS[0]))


def with_images(folder, **settings):
    model = seeing.model("llava", dtype=torch.float32)
    args, data = config(folder, **{"max_completion_length": 8} | settings), seeing.rows((1, 2, 0, 1))
    return Recorder(model, [tiny.spread], args, data, processing_class=seeing.processor("llava"))


def answers(completions, **_):
    return [sum(map(ord, str(one))) % 97 / 97 for one in completions]


KINDS = {
    "conversation": lambda *given, **settings: with_environment(*given, GUESS, **settings),
    "agent": lambda *given, **settings: with_environment(*given, BRANCHES, **settings),
    "tools": with_tools,
    "images": with_images,
}


def sizes(trainer):
    """The number of tokens that could be drawn at each place of a generation, 0 where it is the whole vocabulary."""
    output = trainer.output
    sampled = output["completion_mask"] * output.get("tool_mask", torch.ones_like(output["completion_mask"]))
    counts = torch.zeros_like(sampled)
    for row, sets in zip(counts, output[SUPPORTS], strict=True):
        of_row, _ = decoded(sets)
        row[: len(of_row)] = torch.where(of_row < 0, of_row + 10**6, of_row)
    return counts, sampled.bool()


SLOW = [
    pytest.param(kind, cut, "process", marks=pytest.mark.slow) for kind in ("conversation", "agent") for cut in CUTS
]
EACH = [(kind, cut, engine) for kind in KINDS for cut in CUTS for engine in ("auto", "generate")]


@pytest.mark.cases(6)
@pytest.mark.parametrize(("kind", "cut", "engine"), [*EACH, *SLOW])
def test_the_policy_agrees_with_its_sampler_over_the_support(kind, cut, engine, tmp_path):
    trainer = KINDS[kind](tmp_path, **CUTS[cut], rollout_engine=engine, learning_rate=0.0)
    trainer.train()
    logged = [row["sampling/mismatch"] for row in trainer.state.log_history if "sampling/mismatch" in row]
    assert logged
    assert max(logged) < ROUNDING
    counts, sampled = sizes(trainer)
    assert not counts[~sampled].any()
    assert (counts[sampled] != 0).float().mean() > 0.5
    if cut == "top_k":
        assert (counts[sampled] == 5).all()


@pytest.mark.parametrize("kind", ["conversation", pytest.param("agent", marks=pytest.mark.slow), "tools"])
def test_the_weights_do_not_depend_on_sharing_or_the_split(kind, tmp_path):
    ends = []
    splits = [{"shared_prefix": "true"}, {"shared_prefix": "false"}, {"shared_prefix": "true"} | HALVES]
    splits += [{"shared_prefix": "false", "micro_batch_tokens": 300}]
    for i, split in enumerate(splits):
        trainer = KINDS[kind](tmp_path / str(i), top_p=0.7, **PLAIN | split)
        before = weights(trainer.model)
        trainer.train()
        ends.append(weights(trainer.model))
    assert max((end - ends[0]).abs().max() for end in ends) < ROUNDING
    assert (ends[0] - before).abs().max() > 1e-4
