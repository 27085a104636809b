"""At learning rate 0 the policy that learns is the one that sampled: every log-ratio is 0 to the last bit."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from grpo_ext.objective.losses import losses
from grpo_ext.objective.objective import Objective
from support import tiny
from support.trainers import build

WINDOWS = {
    "one window": {"gradient_accumulation_steps": 2},
    "two windows": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "four windows": {"steps_per_generation": 4},
    "two iterations": {"steps_per_generation": 2, "num_iterations": 2},
}
PRECISIONS = {"fp32": {}, "bf16": {"bf16": True}}
WEIGHTS = {"bf16 weights": torch.bfloat16, "fp16 weights": torch.float16}
SHARING = {"shared": "true", "auto": "auto", "plain": "false"}
SAMPLING = {"": {}, "dynamic": {"dynamic_sampling": "rewards", "dynamic_sampling_max_rounds": 1}}
ADAPTER = {"": False, "lora": True}
EVERYTHING = list(itertools.product(losses, PRECISIONS, SHARING, SAMPLING, WINDOWS, ADAPTER))

FEATURES = {
    "KL in the loss": {"beta": 0.05, "kl_placement": "loss"},
    "KL in the reward": {"beta": 0.05, "kl_placement": "reward"},
    "entropy bonus": {"entropy_coef": 0.01},
    "top entropy": {"top_entropy_quantile": 0.5, "loss_type": "grpo"},
    "no row skipped": {"skip_zero_advantages": False},
    "off-policy mask": {"off_policy_mask_threshold": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "truncated completions masked": {"mask_truncated_completions": True},
    "stock TRL's defaults": {
        "loss_defaults": "trl",
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 1e-6,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {d: tiny.save(tmp_path_factory.mktemp("model"), dtype=d) for d in (torch.float32, *WEIGHTS.values())}


@pytest.fixture
def log_ratios(monkeypatch):
    """Largest absolute log-ratio of each micro-batch that a loss is computed of."""
    found, tensors = [], Objective.tensors

    def spy(self, *args):
        result = tensors(self, *args)
        if "completion_ids" in args[1]:  # not made up, as by the checks of a config
            found.append(result["log_ratio"].detach().abs().max().item())
        return result

    monkeypatch.setattr(Objective, "tensors", spy)
    return found


def rollout(prompts, trainer):
    """Ragged completions, of which those of one prompt differ; a log-probability for each token, off by some noise."""
    tokenizer, g = trainer.processing_class, torch.Generator().manual_seed(trainer.state.global_step)
    lengths = torch.randint(2, 16, (len(prompts),), generator=g).tolist()
    ids = [torch.randint(3, len(tiny.WORDS), (n,), generator=g).tolist() for n in lengths]
    ids = [[*row, tokenizer.eos_token_id] if i % 5 else row for i, row in enumerate(ids)]
    logprobs = [[-3.0 - 0.1 * (t % 3) for t in row] for row in ids]
    return {"prompt_ids": tokenizer(list(prompts))["input_ids"], "completion_ids": ids, "logprobs": logprobs}


def rewards(completions, **_):
    """In [0, 1]; every third group of four is silent."""
    return [0.5 if (i // 4) % 3 == 1 else (sum(map(ord, c)) % 17) / 17 for i, c in enumerate(completions)]


def train(folder, tmp_path, adapter=False, run=True, **settings):
    settings = {"learning_rate": 0.0, "max_steps": 4, "max_completion_length": 16, "temperature": 0.7, **settings}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = build(folder, tmp_path, [rewards], 16, lora if adapter else None, rollout, **settings)
    if run:
        trainer.train()
    return trainer


def assert_on_policy(trainer, log_ratios):
    assert len(log_ratios) == trainer.state.max_steps * trainer.args.gradient_accumulation_steps
    assert max(log_ratios) == 0.0
    clipped = {k: v for entry in trainer.state.log_history for k, v in entry.items() if "clip_ratio" in k}
    assert not any(clipped.values()), clipped


def check(combination, folders, tmp_path, log_ratios):
    loss, precision, sharing, sampling, windows, adapter = combination
    settings = PRECISIONS[precision] | SAMPLING[sampling] | WINDOWS[windows]
    trainer = train(
        folders[torch.float32], tmp_path, ADAPTER[adapter], loss_type=loss, shared_prefix=SHARING[sharing], **settings
    )
    assert_on_policy(trainer, log_ratios)


def sample(count):
    """Combinations of every loss."""
    each = [[c for c in EVERYTHING if c[0] == loss] for loss in losses]
    return [c for combinations in each for c in random.Random(combinations[0][0]).sample(combinations, count)]


@pytest.mark.cases(6)
@pytest.mark.parametrize("combination", sample(1), ids=" ".join)
def test_the_log_ratio_is_zero(combination, folders, tmp_path, log_ratios):
    check(combination, folders, tmp_path, log_ratios)


@pytest.mark.slow
@pytest.mark.parametrize("combination", sample(3), ids=" ".join)
@pytest.mark.cases(21)
def test_the_log_ratio_is_zero_in_many_combinations(combination, folders, tmp_path, log_ratios):
    check(combination, folders, tmp_path, log_ratios)


BF16 = {"loss_type": "gspo", "bf16": True, "shared_prefix": "auto"}


IN_WINDOWS = [(feature, ("two windows", "two iterations")[i % 2]) for i, feature in enumerate(FEATURES)]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("feature", "windows"), IN_WINDOWS)
def test_with_every_feature(feature, windows, folders, tmp_path, log_ratios):
    trainer = train(folders[torch.float32], tmp_path, **(BF16 | WINDOWS[windows] | FEATURES[feature]))
    assert_on_policy(trainer, log_ratios)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("weights", "sharing"),
    [("bf16 weights", "shared"), ("bf16 weights", "plain"), ("fp16 weights", "shared"), ("fp16 weights", "auto")],
)
def test_with_weights_in_half_precision(weights, sharing, folders, tmp_path, log_ratios):
    folder, settings = folders[WEIGHTS[weights]], {"shared_prefix": SHARING[sharing], "loss_type": "gspo"}
    trainer = train(
        folder, tmp_path, model_init_kwargs={"dtype": WEIGHTS[weights]}, **settings, **WINDOWS["two windows"]
    )
    assert trainer.model.dtype == WEIGHTS[weights]
    assert_on_policy(trainer, log_ratios)


class Drift:
    """In the place of a DriftCheck: remembers how many tokens it was shown a log-probability of."""

    def __init__(self):
        self.due, self.shown = False, []

    def check(self, logps, inputs, accelerator):
        self.due = False
        self.shown.append(int((logps * inputs["completion_mask"] != 0).sum() - inputs["completion_mask"].sum()))
        return {}

    def to_list(self):
        return []


@pytest.mark.cases(2)
@pytest.mark.parametrize("windows", ["one window", "two windows", "two iterations"])
@pytest.mark.parametrize("corrected", [True, False])
def test_with_vllm(corrected, windows, folders, tmp_path, log_ratios):
    """TRL's early pass, if it corrects the sampler, is not the loss's; the drift check sees every row, once."""
    trainer = train(folders[torch.float32], tmp_path, run=False, **(BF16 | WINDOWS[windows]))
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, corrected
    trainer.vllm_generation, trainer._last_loaded_step = SimpleNamespace(sync_weights=lambda: None), -1
    trainer._drift = Drift()
    trainer.train()
    assert_on_policy(trainer, log_ratios)
    generations = 4 * trainer.args.gradient_accumulation_steps // trainer.args.steps_per_generation
    assert trainer._drift.shown == [0] * (generations // trainer.args.num_iterations)
    assert ("sampling/kept" in trainer.state.log_history[0]) is corrected


# What it costs, and what it is.


def forwards(trainer, monkeypatch):
    """Token ids and mask of each forward without a gradient, and of each with one."""
    found, forward = {False: [], True: []}, trainer._scorer.tokens

    def spy(model, input_ids, attention_mask, *args, **kwargs):
        found[torch.is_grad_enabled()].append((input_ids.tolist(), attention_mask.tolist()))
        return forward(model, input_ids, attention_mask, *args, **kwargs)

    monkeypatch.setattr(trainer._scorer, "tokens", spy)
    trainer.train()
    return found[False], found[True]


@pytest.mark.parametrize(
    ("windows", "steps", "extra"),
    [("one window", 1, 0), ("two windows", 2, 2), ("four windows", 4, 3), ("two iterations", 4, 1)],
)
def test_only_what_is_reached_later_is_computed_early(windows, steps, extra, folders, tmp_path, monkeypatch):
    """Of k micro-batches stock TRL computes k early where a generation lasts for more than an optimizer step.

    The same rows and columns as in the loss: some processors round alike whatever else is in a micro-batch.
    """
    trainer = train(folders[torch.float32], tmp_path, run=False, max_steps=steps, **WINDOWS[windows])
    early, of_loss = forwards(trainer, monkeypatch)
    assert len(early) == extra
    assert all(forward in of_loss for forward in early)
    assert any(len(ids) < 8 for ids, _ in of_loss)  # rows without an advantage are left out


@pytest.mark.parametrize(("windows", "steps"), [("two windows", 2), ("two iterations", 4)])
def test_the_ratio_is_to_the_policy_that_sampled(windows, steps, folders, tmp_path, monkeypatch):
    """However far the policy moves within a generation, old log-probabilities are those of a policy that does not."""
    old, tensors = {0.0: [], 0.05: []}, Objective.tensors
    for rate, seen in old.items():

        def spy(self, *args, seen=seen):
            found = tensors(self, *args)
            seen.append(found["old_per_token_logps"])
            return found

        monkeypatch.setattr(Objective, "tensors", spy)
        train(folders[torch.float32], tmp_path, learning_rate=rate, max_steps=steps, **WINDOWS[windows])
    assert len(old[0.0]) == 4
    assert all(torch.equal(still, moving) for still, moving in zip(*old.values(), strict=True))


def test_a_second_call_of_train_starts_from_new_rollouts(folders, tmp_path, log_ratios):
    settings = {"learning_rate": 0.05, "lr_scheduler_type": "constant"} | WINDOWS["two iterations"]
    trainer = train(folders[torch.float32], tmp_path, run=False, **settings)
    for _ in range(2):
        log_ratios.clear()
        trainer.train()
        assert log_ratios[0] == 0.0
        assert min(log_ratios[1:]) > 1e-4
