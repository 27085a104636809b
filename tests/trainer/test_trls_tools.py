"""TRL's tools, environments and rollout functions with a model that calls tools, through the hooks that TRL calls.

Nothing of a trainer is replaced. Each script is one of stock TRL, and runs on it beside ours.
"""

import copy

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.config.vllm import tool_problems
from support import tiny, tool_caller, worlds

KINDS = {"stock": (GRPOTrainer, GRPOConfig), "ours": (GRPOExtTrainer, GRPOExtConfig)}
SETTINGS = tiny.TRAINING | {"max_completion_length": 120, "max_tool_calling_iterations": 2}
ANSWER = "\n<|im_start|>user\n<tool_response>\n11\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


class Paid(worlds.Counter):
    """An environment with a reward of its own."""


class Unpaid(worlds.Counter):
    """One without, which the reward functions score."""

    get_reward = None


def answers(completions, **_):
    """Differs between most answers of tools."""
    told = [[message["content"] for message in one if message["role"] == "tool"] for one in completions]
    return [sum(map(ord, "".join(one))) % 97 / 97 for one in told]


async def last_length(completions, **_):
    return [len(one[-1]["content"] or "") / 10 for one in completions]


async def counts(environments, **_):
    return [float(one.count) for one in environments]


def played(prompts, trainer):
    """A rollout function that samples a turn, calls the tool itself, and samples another."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)

    def sampled(ids):
        made = model.generate(torch.tensor([ids]), do_sample=True, max_new_tokens=12, pad_token_id=0)[0, len(ids) :]
        return made.tolist()

    found = {"prompt_ids": [], "completion_ids": [], "logprobs": None, "env_mask": [], "called": []}
    for prompt in prompts:
        asked = tokenizer.apply_chat_template(
            prompt, tools=tool_caller.TOOLS[0], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        first = sampled(asked)
        answer = tokenizer(ANSWER)["input_ids"]
        last = sampled(asked + first + answer)
        found["prompt_ids"].append(asked)
        found["completion_ids"].append(first + answer + last)
        found["env_mask"].append([1] * len(first) + [0] * len(answer) + [1] * len(last))
        found["called"].append("<tool_call>" in tokenizer.decode(first))
    return found


def paid_by_column(called, **_):
    return [float(one) + i % 3 for i, one in enumerate(called)]


SCRIPTS = {
    "functions": ([answers, last_length], {"tools": list(tool_caller.TOOLS[0])}),
    "one environment with its own reward": ([], {"environment_factory": Paid}),
    "one environment beside a function": ([counts], {"environment_factory": Unpaid}),
    "environments by name": (
        [answers],
        {"environment_factory": {"paid": Paid, "unpaid": Unpaid}, "tools": [tool_caller.wait]},
    ),
    "a rollout function": ([paid_by_column], {"rollout_func": played}),
}


def trained(kind, script, folder, **settings):
    """Two steps, and what each generation was trained on."""
    rewards, rollouts = SCRIPTS[script]
    trainer_class, config = KINDS[kind]
    model, tokenizer = map(copy.deepcopy, tool_caller.taught())
    rows = {"prompt": [[{"role": "user", "content": "count"}]] * 8, "start": list(range(8))}
    if "name" in script:
        rows["environment"] = ["paid", "unpaid"] * 4
    args = config(str(folder), **(SETTINGS | settings))
    trainer = trainer_class(model, rewards, args, Dataset.from_dict(rows), processing_class=tokenizer, **rollouts)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    moved = [not torch.equal(p, q) for p, q in zip(before, trainer.model.parameters(), strict=True)]
    return trainer, trainer.state.log_history[0], any(moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_trls_trains_a_model_that_calls_tools(script, kind, tmp_path):
    trainer, log, moved = trained(kind, script, tmp_path)
    assert moved
    assert all(log[f"rewards/{name}/mean"] == log[f"rewards/{name}/mean"] for name in trainer.reward_func_names)
    if script != "a rollout function":
        assert log["tools/call_frequency"] > 0.5
        assert log["tools/failure_frequency"] < 1
    rows = trainer._buffered_inputs
    mask, ids = (torch.cat([batch[name] for batch in rows]) for name in ("tool_mask", "completion_ids"))
    shown = [trainer.processing_class.decode(row[taken == 0]) for row, taken in zip(ids, mask, strict=True)]
    assert any("<tool_response>" in text for text in shown)
    assert not any("<tool_call>" in text for text in shown)


def test_answers_of_tools_have_no_part_in_the_loss(tmp_path):
    """Their tokens' log-probabilities get no gradient; what was sampled behind them does, unless it was clipped."""
    trainer, _, _ = trained("ours", "functions", tmp_path, max_steps=1)
    [batch] = trainer._buffered_inputs
    model, seen = trainer.model, []
    score = trainer._scorer.micro_batch

    def scored(*args, **kwargs):
        scores = score(*args, **kwargs)
        seen.append(scores[0])
        scores[0].retain_grad()
        return scores

    trainer._scorer.micro_batch = scored
    batch["advantages"] = torch.ones_like(batch["advantages"])
    trainer._compute_loss(model, batch).backward()
    touched, sampled = seen[0].grad != 0, (batch["tool_mask"] * batch["completion_mask"]).bool()
    assert not touched[~sampled].any()
    behind = (batch["tool_mask"] == 0).cumsum(dim=1) > 0
    assert touched[sampled & behind].any()


@pytest.mark.parametrize(("size", "problems"), [(1, 0), (2, 1)])
def test_tools_are_refused_where_processes_share_an_engine(size, problems, tmp_path):
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": size}
    args = GRPOExtConfig(str(tmp_path), **(tiny.TRAINING | settings))
    found = [*tool_problems(args, {"tools": [worlds.add], "environment_factory": None})]
    assert [problem.field for problem in found] == ["tools"] * problems
