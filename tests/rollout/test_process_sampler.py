"""A process beside the trainer samples what the trainer's own would with the same random numbers, bit for bit."""

import os
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import SamplerLost
from grpo_ext.rollout.decoding import padded
from grpo_ext.rollout.process.child import built
from grpo_ext.rollout.process.memory_file import MemoryFile, load
from grpo_ext.rollout.process.messages import ModelSpec
from grpo_ext.rollout.process.policy import process_sampler
from grpo_ext.rollout.prompt_cache import Unsupported
from grpo_ext.rollout.seeds import uniform_numbers
from grpo_ext.rollout.transformers_engine import GroupedEngine
from grpo_ext.rollout.vllm.weights import Rounding, effective_weights
from support import tiny
from support.processes import PATIENCE, start_forked
from support.trainers import build

pytestmark = pytest.mark.usefixtures("forked_samplers")
CONTEXTS = [[5, 6, 7], [5, 6, 7], [9, 8], [9, 8], [4], [4]]
TOKENS = 24


def trainer_of(model, tmp_path, **settings):
    settings = {"rollout_engine": "process", "max_completion_length": TOKENS} | settings
    return build(model, tmp_path, **settings)


def streams(seed=0):
    return [np.random.default_rng((seed, row)) for row in range(len(CONTEXTS))]


def sampled(sampler, version, limits=None, seed=0):
    return sampler.sample(version, CONTEXTS, limits or [TOKENS] * len(CONTEXTS), streams(seed))


@torch.no_grad()
def in_process(trainer, model=None, seed=0):
    """The same by the grouped engine in this process: tokens, log-probabilities and sampling supports of each row."""
    model, limits = model or trainer.model, [TOKENS] * len(CONTEXTS)
    engine = GroupedEngine(required=True, with_support=bool(trainer.args.top_k))
    numbers = torch.from_numpy(uniform_numbers(streams(seed), limits, len(limits), TOKENS))
    ids, mask = padded(CONTEXTS, 0, None)
    model.train()
    given = {"input_ids": ids, "attention_mask": mask, "generation_config": trainer.generation_config}
    output, made = engine.generate(model, numbers, **given)
    rows = [row[: row.index(1) + 1] if 1 in row else row for row in output[:, ids.shape[1] :].tolist()]
    logps = [its[: len(row)] for its, row in zip(made.logps[-1].tolist(), rows, strict=True)]
    return rows, logps, made.supports(rows)


def assert_same(found, expected):
    rows, logps, kept = expected
    assert [row.ids for row in found] == rows
    assert [row.logps for row in found] == logps
    assert len({len(row) for row in rows}) > 1
    if kept:
        assert all(torch.equal(row.support, sets) for row, sets in zip(found, kept, strict=True))
    else:
        assert all(row.support is None for row in found)


def children():
    return [child for child in psutil.Process().children() if "rollout.process.child" in " ".join(child.cmdline())]


@pytest.fixture
def sampler_of():
    """Samplers of trainers, closed at the end of the test."""
    made = []

    def start(trainer):
        made.append(process_sampler(trainer, trainer.args))
        return made[-1]

    yield start
    for sampler in made:
        sampler.close()
    assert not children()


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


# The same bits.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"top_k": 12, "temperature": 0.8}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"cast_lm_head_to_fp32": True}),
        (torch.float32, {"bf16": True}),
    ],
    ids=["float32, sampling supports", "bfloat16", "bfloat16, head in float32", "mixed precision"],
)
@pytest.mark.cases(2)
def test_each_version_samples_what_the_policy_would_in_its_own_process(dtype, settings, tmp_path, sampler_of):
    """Two versions are alive at once; requests go from one to the other. The model's own options have no part."""
    trainer = trainer_of(tiny.model(dtype=dtype), tmp_path, learning_rate=0.0, max_steps=1, **settings)
    trainer.train()  # the forward is then as accelerate has prepared it
    sampler, expected = sampler_of(trainer), {}
    for version in (3, 4):
        expected[version] = in_process(trainer)
        with temporarily(trainer.model.generation_config, no_repeat_ngram_size=1):
            sampler.publish(version)
        change(trainer.model)
    for version in (4, 3, 3, 4):
        assert_same(sampled(sampler, version), expected[version])
    assert expected[3][0] != expected[4][0]
    sampler.forget(4)
    assert sampler.versions == {3}
    assert_same(sampled(sampler, 3), expected[3])


ADAPTERS = {
    "LoRA": {},
    "DoRA of tied ends": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_policy_with_adapters_is_sampled_by_its_effective_weights(name, tmp_path, sampler_of):
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | ADAPTERS[name]
    policy = get_peft_model(tiny.model(), LoraConfig(**settings, init_lora_weights=False))
    trainer, bare = trainer_of(policy, tmp_path), tiny.model(seed=1)
    bare.load_state_dict(dict(effective_weights(trainer.model, torch.float32, Rounding())))
    sampler = sampler_of(trainer)
    sampler.publish(0)
    assert_same(sampled(sampler, 0), in_process(trainer, bare))


@pytest.mark.slow
def test_each_row_ends_at_its_own_limit(tmp_path, sampler_of):
    trainer = trainer_of(tiny.model(eos_token_id=40), tmp_path)
    sampler, limits = sampler_of(trainer), [1, 24, 5, 3, 24, 2]
    sampler.publish(0)
    long, cut = sampled(sampler, 0), sampled(sampler, 0, limits)
    assert [row.ids for row in cut] == [row.ids[:limit] for row, limit in zip(long, limits, strict=True)]
    assert [len(row.logps) for row in cut] == [len(row.ids) for row in cut]


# What fails.


def endless(tmp_path):
    """A trainer whose completions are as long as they may be."""
    without_end = {"loss_defaults": "trl", "generation_kwargs": {"suppress_tokens": [tiny.WORDS.index("<eos>")]}}
    return trainer_of(tiny.model(), tmp_path, **without_end)


@pytest.mark.slow
def test_a_request_whose_process_is_killed_is_asked_again_once(tmp_path, sampler_of, caplog):
    sampler, limits = sampler_of(endless(tmp_path)), [1, 1500, 2, 3, 4, 5]
    sampler.publish(0)
    sampled(sampler, 0)  # it has started
    killing = threading.Timer(0.3, lambda: children()[0].kill())
    killing.start()
    found = sampled(sampler, 0, limits)
    killing.join()
    assert "it was killed by SIGKILL. It is started and asked again." in caplog.text
    assert found == sampled(sampler, 0, limits)


@pytest.mark.slow
def test_a_process_that_dies_twice_is_one_error_with_its_reason(tmp_path, sampler_of):
    trainer = trainer_of(tiny.model(), tmp_path)
    sampler = sampler_of(trainer)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(torch.nan)
    sampler.publish(0)
    with pytest.raises(SamplerLost, match=r"failed twice: .*picked.*probability tensor contains either `inf`, `nan`"):
        sampled(sampler, 0)
    assert not children()


@pytest.mark.slow
def test_closing_ends_a_request_of_another_thread(tmp_path, sampler_of):
    trainer = endless(tmp_path)
    sampler = sampler_of(trainer)
    sampler.publish(0)
    sampled(sampler, 0)
    closing = threading.Timer(0.5, sampler.close)
    closing.start()
    with pytest.raises(SamplerLost, match="was closed"):
        sampler.sample(0, [[5, 6, 7]] * 8, [20000] * 8, [np.random.default_rng(row) for row in range(8)])
    closing.join()
    sampler.publish(0)  # a second call of `train` begins again
    assert len(sampled(sampler, 0)) == len(CONTEXTS)


@pytest.mark.slow
def test_what_cannot_be_decoded_exactly_is_refused_with_the_reason(tmp_path, sampler_of):
    trainer = trainer_of(tiny.model(), tmp_path)
    trainer.generation_config.num_beams = 2  # which settings refuse
    sampler = sampler_of(trainer)
    sampler.publish(0)
    with pytest.raises(Unsupported, match=r"rollout_engine='process': the generation mode is beam.*engine: auto"):
        sampled(sampler, 0)


ORPHAN = """
import os, signal, sys
sys.path[:0] = {path!r}
from support import tiny
from support.processes import PATIENCE, start_forked
from rollout.test_process_sampler import CONTEXTS, children, endless, streams
from grpo_ext.rollout.process.policy import process_sampler

if __name__ == "__main__":
    trainer = endless({folder!r})
    sampler = process_sampler(trainer, trainer.args)
    sampler.publish(0)
    sampler.sample(0, CONTEXTS, [4] * len(CONTEXTS), streams())
    print("child", children()[0].pid, flush=True)
    sampler.sample(0, CONTEXTS, [100000] * len(CONTEXTS), streams())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_the_process_ends_with_the_trainer(number, tmp_path):
    script = tmp_path / "orphan.py"
    path = [os.path.dirname(os.path.dirname(__file__))]
    script.write_text(ORPHAN.format(path=path, folder=str(tmp_path)))
    [trainer] = start_forked([str(script)], said := tmp_path / "said")
    deadline = time.monotonic() + PATIENCE
    while not said.exists() or not (found := re.search(r"^child (\d+)\n", said.read_text(), re.MULTILINE)):
        assert trainer.poll() is None, said.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pid = int(found[1])
    time.sleep(0.5)
    trainer.send_signal(number)
    trainer.wait(60)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


# Weights.


def test_a_file_in_memory_holds_weights_and_buffers_of_any_dtype():
    policy, other = tiny.model(dtype=torch.bfloat16), tiny.model(seed=1)
    policy.register_buffer("scale", torch.tensor(3.0))
    other.register_buffer("scale", torch.tensor(0.0))
    file = MemoryFile()
    for _ in range(2):  # the second time over the first
        change(policy)
        table = file.write([*policy.named_parameters(), *policy.named_buffers()])
        load(other, table, file.descriptor)
    assert all(place.offset % 64 == 0 for place in table)
    for ours, theirs in zip(policy.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    file.close()


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_of_the_process_takes_the_weights_of_the_policy(tied):
    policy, file = tiny.model(tie_word_embeddings=tied), MemoryFile()
    spec = ModelSpec(type(policy), policy.config, policy.generation_config, None, None)
    model = built(spec, torch.device("cpu"))
    weights = dict(effective_weights(policy, torch.float32, Rounding()))
    load(model, file.write((weights | dict(policy.named_buffers())).items()), file.descriptor)
    ids = torch.tensor([CONTEXTS[0]])
    assert torch.equal(model(ids).logits, policy.eval()(ids).logits)
    file.close()


def test_weights_of_another_model_are_refused():
    file, model = MemoryFile(), tiny.model()
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    for wrong in (
        named | {"extra": torch.ones(1)},
        {name: value for name, value in named.items() if name != "lm_head.weight"},
        named | {"lm_head.weight": torch.ones(2, 2)},
    ):
        with pytest.raises(ValueError, match=r"not those of a LlamaForCausalLM .* from its config: (extra|lm_head)"):
            load(model, file.write(wrong.items()), file.descriptor)
    file.close()
