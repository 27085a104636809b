"""The tokens that a sampler kept: recorded by transformers' engines, returned by vLLM, and passed on to the loss."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_ext import ConfigError
from grpo_ext.packing.sampling_support import SamplingSupport
from grpo_ext.rollout.support_log import encoded_lists
from grpo_ext.rollout.transformers_engine import GroupedEngine
from grpo_ext.rollout.vllm.requester import read, returned_supports
from support import tiny
from support.trainers import build, weights

WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "generate"])
@pytest.mark.parametrize(
    "options", [{"top_p": 0.7}, {"temperature": 0.6, "top_k": 4}, {"temperature": 2.0, "min_p": 0.05}], ids=str
)
def test_an_engine_records_what_transformers_keeps(options, grouped):
    model, new = tiny.model().train(), 6
    prompts = torch.tensor([[0, 5, 9], [7, 5, 9], [0, 5, 9], [8, 8, 8]])
    mask = (prompts != 0).long()
    config = GenerationConfig(do_sample=True, max_new_tokens=new, pad_token_id=0, eos_token_id=1, top_k=0)
    config.update(**options)
    engine = GroupedEngine(with_support=True)
    engine.refusal = "" if grouped else "a test"
    torch.manual_seed(0)
    ids, drawn = engine.generate(model, input_ids=prompts, attention_mask=mask, generation_config=config)
    rows = [[*row[:end], 1] if (end := row.index(1) if 1 in row else -1) >= 0 else row for row in ids[:, 3:].tolist()]
    support = SamplingSupport.of(drawn.supports(rows), new, ids.device)
    sets = support.left_out(slice(None), len(tiny.WORDS)).view(4, new, -1)
    lengths = torch.cat([mask, torch.ones_like(ids[:, 3:])], dim=1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=lengths, position_ids=lengths.cumsum(1) - 1).logits[:, 2:-1]
    warp = LogitsProcessorList([WARPERS[name](value) for name, value in sorted(options.items(), key=_order)])
    for row, completion in enumerate(rows):
        for t, token in enumerate(completion):
            expected = warp(ids[row : row + 1], logits[row : row + 1, t].clone())[0] == -torch.inf
            assert torch.equal(sets[row, t], expected)
            assert not expected[token]


def _order(option):
    return list(WARPERS).index(option[0])


def test_the_tokens_that_vllm_kept_have_a_log_probability():
    inf = float("inf")
    logprobs, tokens = [[-0.1, -2.0, -inf], [-0.7, -0.7, -9999.0]], [[4, 2, 0], [3, 4, 1]]
    sets = returned_supports(logprobs, tokens, 3)
    assert sets == [[4, 2], [3, 4]]
    assert encoded_lists(sets).tolist() == [2, 2, 2, 4, 2, 3, 4]
    assert read([2, 3], logprobs, tokens, bound=None).logps == [-2.0, -0.7]
    with pytest.raises(RuntimeError, match=r"vLLM kept 3 tokens or more.*Lower top_k"):
        returned_supports([[-1.0, -1.0, -1.0]], [[0, 1, 2]], 3)
    assert returned_supports([[-1.0, -1.0, -1.0]], [[0, 1, 2]], 0) == [[0, 1, 2]]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.7, "num_iterations": 2, "beta": 0.1, "entropy_coef": 0.01},
        {"top_k": 5, "temperature": 0.7, "rollout_engine": "generate", "mask_truncated_completions": True},
        {"min_p": 0.1, "loss_type": "grpo"},
    ],
    ids=["top_p", "top_k", "min_p"],
)
def test_the_weights_do_not_depend_on_sharing_or_the_split(settings, tmp_path):
    ends = []
    splits = ({"shared_prefix": "true"}, {"shared_prefix": "false"}, {"shared_prefix": "true", **HALVES})
    for i, split in enumerate(splits):
        trainer = build(tiny.model(), tmp_path / str(i), **PLAIN | settings | split)
        trainer.train()
        ends.append(weights(trainer.model))
        logs = [row for row in trainer.state.log_history if "sampling/mismatch" in row]
        assert all(row["sampling/mismatch"] < 1e-5 for row in logs)
        assert logs  # of generate's draws too
    assert max((end - ends[0]).abs().max() for end in ends) < 1e-5
    assert (ends[0] - weights(tiny.model())).abs().max() > 1e-3


PLAIN = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def test_a_trainer_with_tools_or_a_rollout_function_refuses_a_truncated_sampler(tmp_path):
    with pytest.raises(ConfigError, match=r"top_p=0.7: .*rollout_func does not pass them on. Remove rollout_func."):
        build(tiny.model(), tmp_path, rollout=lambda prompts, trainer: {}, top_p=0.7)
