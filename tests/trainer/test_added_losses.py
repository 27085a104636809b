"""Losses beside the policy's on a real tiny model: their values, gradients, rows, teachers and resumes."""

import itertools

import pytest
import torch
from peft import LoraConfig
from trl import ModelConfig

from grpo_ext import GRPOExtConfig
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.model_checks import inspect_policy
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from support import adapted, tiny
from support.float64 import FLOAT64, float64_throughout
from support.trainers import build, unit_interval, weights

STEP = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "seed": 3, **FLOAT64}
HINT = "{prompt}{solution}="
KINDS = {
    "reverse_kl": {"type": "reverse_kl", "weight": 0.7},
    "jsd": {"type": "jsd", "weight": 1.3, "beta": 0.3, "clip": 0.02},
    "opsd": {"type": "jsd", "name": "opsd", "teacher": "initial", "teacher_prompt": HINT},
    "hinted": {"type": "reverse_kl", "name": "hinted", "teacher": "initial", "teacher_prompt": HINT},
    "cross_entropy": {"type": "cross_entropy", "column": "solution", "weight": 0.4},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("teacher"), seed=5, hidden_size=16)


def entries(teacher, *names, **more):
    return [
        {"teacher": teacher, **KINDS[n], **more} if n in ("reverse_kl", "jsd") else {**KINDS[n], **more} for n in names
    ]


def moved(model, tmp_path, losses, **settings):
    """The change of the weights in one step of SGD with a rate of 1: minus the gradient."""
    settings = STEP | {"beta": 0.0, "losses": losses or None} | settings
    trainer = build(model, tmp_path, [unit_interval], **settings)
    before = weights(trainer.model)
    trainer.train()
    return weights(trainer.model) - before


@float64_throughout()
def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients(model_path, teacher, tmp_path):
    alone = {name: moved(model_path, tmp_path, entries(teacher, name)) for name in KINDS}
    policy = moved(model_path, tmp_path, [])
    every = moved(model_path, tmp_path, entries(teacher, *KINDS))
    total = policy + sum(change - policy for change in alone.values())
    assert min((change - policy).abs().max() for change in alone.values()) > 1e-5
    assert (every - total).abs().max() < 1e-12 * max(1.0, every.abs().max())


@pytest.mark.cases(3)
@float64_throughout()
@pytest.mark.parametrize(("split", "shared"), itertools.product([(8, 1), (4, 2), (2, 4)], ["true", "false"]), ids=str)
def test_the_gradient_does_not_depend_on_split_and_packing(split, shared, model_path, teacher, tmp_path):
    rows, accumulation = split
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    expected = moved(model_path, tmp_path, entries(teacher, *KINDS), shared_prefix="false")
    found = moved(model_path, tmp_path, entries(teacher, *KINDS), shared_prefix=shared, **settings)
    assert (found - expected).abs().max() < 1e-12 * max(1.0, expected.abs().max())


@float64_throughout()
def test_each_loss_is_the_mean_over_its_own_tokens(model_path, teacher, tmp_path):
    """Against whole logits of each row by itself."""
    trainer = build(model_path, tmp_path, [unit_interval], **STEP, losses=entries(teacher, *KINDS))
    rows, prepare = [], trainer._prepare_inputs

    def spy(batch):
        rows.extend(batch)
        found = prepare(batch)
        seen.update(found)
        return found

    seen: dict = {}
    trainer._prepare_inputs = spy
    trainer.train()
    policy, other = (tiny.load(path, torch.float64) for path in (model_path, teacher))
    tokenizer, totals = tiny.tokenizer(), {name: [0.0, 0] for name in KINDS}
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(seen["prompt_ids"], seen["prompt_mask"], strict=True)]
    answers = {row["prompt"]: row["solution"] for row in rows}

    def log_p(model, prompt, completion):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)

    def add(name, values):
        totals[name][0] += values.detach().sum().item()
        totals[name][1] += len(values)

    demonstrated = set()
    for prompt, ids, mask in zip(prompts, seen["completion_ids"], seen["completion_mask"], strict=True):
        completion = ids[mask.bool()].tolist()
        text = tokenizer.decode(prompt).replace(" ", "")
        solution = answers[text]
        p, q = log_p(policy, prompt, completion), log_p(other, prompt, completion)
        hinted = log_p(policy, tokenizer(HINT.format(prompt=text, solution=solution))["input_ids"], completion)
        at = torch.tensor(completion)[:, None]
        for name, to in (("reverse_kl", q), ("hinted", hinted)):
            d = (to - p).gather(1, at)[:, 0]
            add(name, d.exp() - d - 1)
        for name, to, beta, clip in (("jsd", q, 0.3, 0.02), ("opsd", hinted, 0.5, torch.inf)):
            m = (beta * to.exp() + (1 - beta) * p.exp()).log()
            entries_ = beta * to.exp() * (to - m) + (1 - beta) * p.exp() * (p - m)
            add(name, entries_.clamp(max=clip).sum(-1))
        if text not in demonstrated:
            demonstrated.add(text)
            demonstration = [*tokenizer(solution)["input_ids"], tokenizer.eos_token_id]
            add("cross_entropy", -log_p(policy, prompt, demonstration).gather(1, torch.tensor(demonstration)[:, None]))
    logged = trainer.state.log_history[0]
    for name, (total, count) in totals.items():
        assert logged[f"losses/{name}"] == pytest.approx(total / count, rel=1e-9), name


@float64_throughout()
def test_rows_of_one_loss_do_not_change_another(model_path, teacher, tmp_path):
    """A filter of one loss leaves the gradient of the others, and rows that are left out count in no denominator."""
    few = entries(teacher, "jsd", where={"solution": ["0", "1"]})
    apart = moved(model_path, tmp_path, few) + moved(model_path, tmp_path, entries(teacher, "reverse_kl"))
    both = moved(model_path, tmp_path, [*few, *entries(teacher, "reverse_kl")])
    assert (apart - moved(model_path, tmp_path, []) - both).abs().max() < 1e-12
    none = moved(model_path, tmp_path, entries(teacher, "jsd", where={"solution": "none"}))
    assert torch.equal(none, moved(model_path, tmp_path, []))


def test_an_adapter_needs_no_second_model(model_path, tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])
    losses = [KINDS["opsd"], {"type": "reverse_kl"}]
    trainer = build(model_path, tmp_path, [unit_interval], peft_config=adapter, losses=losses, learning_rate=0.05)
    assert {id(teacher.model) for teacher in trainer._added.teachers.values()} == {id(trainer.model)}
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["losses/reverse_kl"] == 0.0
    assert second["losses/reverse_kl"] > 1e-6


def test_a_policy_without_a_reward_learns_from_a_teacher(model_path, tmp_path):
    """Rewards of 0 have no advantages: the added loss alone trains."""
    teacher = tiny.save(tmp_path / "teacher", seed=5)
    losses = [{"type": "jsd", "teacher": teacher}]
    settings = {"losses": losses, "max_steps": 30, "learning_rate": 1e-2}
    trainer = build(model_path, tmp_path / "run", [lambda completions, **_: [0.0] * len(completions)], **settings)
    trainer.train()
    values = [row["losses/jsd"] for row in trainer.state.log_history if "losses/jsd" in row]
    assert sum(values[-3:]) < 0.7 * sum(values[:3])


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({"type": "jsd"}, "where a list or text is expected"),
        ([{"weight": 1.0}], "type"),
        ([{"type": "kl"}], "no such loss"),
        ([{"type": "jsd", "kl_estimator": "k3"}], "no such key"),
        ([{"type": "jsd", "beta": 1.5}], "must be from 0 to 1"),
        ([{"type": "reverse_kl", "kl_estimator": "k1"}], "not one of its values"),
        ([{"type": "reverse_kl", "teacher_prompt": "{solution}"}], "no {prompt}"),
        ([{"type": "reverse_kl"}, {"type": "reverse_kl"}], "two losses"),
        ([{"type": "cross_entropy", "weight_schedule": "linear"}], "weight_schedule"),
    ],
)
def test_what_is_refused(losses, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        GRPOExtConfig(output_dir=str(tmp_path), losses=losses, use_cpu=True, bf16=False)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([{"type": "jsd", "gamma": 1}], ["no such key"]),
        ([{"type": "jsd"}, {"type": "cross_entropy"}], ["prompts as plain", "prompts as plain", "'demonstration'"]),
    ],
)
def test_check_tells_of_losses_what_training_would(losses, words, model_path, tmp_path):
    played = {"environments": ["guess"], "reward_funcs": None, "losses": losses, "max_completion_length": 30}
    argv = adapted.write_recipe(tmp_path, model_path, tmp_path / "run", **played)
    with pytest.raises(ConfigError) as refused:
        load_recipe(argv, Preflight())
    found = [problem for problem in map(str, refused.value.problems) if problem.startswith("losses[")]
    assert len(found) == len(words)
    assert all(expected in problem for expected, problem in zip(words, found, strict=True)), found


def test_a_column_that_the_data_have_not_is_refused(model_path, tmp_path):
    with pytest.raises(ConfigError, match="no column 'demonstration'"):
        build(model_path, tmp_path, losses=[{"type": "cross_entropy"}])


def test_a_teacher_with_other_tokens_is_refused(model_path, tmp_path):
    folder = tiny.save(tmp_path / "teacher")
    other = tiny.tokenizer()
    other.add_tokens(["a", "other"])
    core = other.backend_tokenizer.to_str().replace('"q"', '"Q"')
    (tmp_path / "teacher" / "tokenizer.json").write_text(core)
    losses = [{"type": "reverse_kl", "teacher": folder}]
    with pytest.raises(ConfigError, match="does not give 'q'"):
        build(model_path, tmp_path, losses=losses)
    _, problems = inspected(model_path, losses)
    assert ["does not give 'q'" in problem.reason for problem in problems] == [True]


def inspected(model_path, losses, **settings):
    args = GRPOExtConfig("unused", **tiny.TRAINING | {"losses": losses} | settings)
    return inspect_policy(ModelConfig(model_name_or_path=model_path), args)


def test_a_teacher_is_looked_at_before_a_model_is_loaded(model_path, teacher, tmp_path):
    _, (problem,) = inspected(model_path, [{"type": "jsd", "teacher": str(tmp_path)}])
    assert problem.field == "losses.teacher"
    size, policy = (sum(p.numel() for p in tiny.load(path).parameters()) for path in (teacher, model_path))
    assert inspected(model_path, [{"type": "jsd", "teacher": teacher}])[0].taught == size
    initial = [{"type": "jsd", "teacher": "initial"}]
    assert inspected(model_path, initial)[0].taught == policy
    assert inspected(model_path, initial, beta=0.1)[0].taught == 0


def test_a_teacher_scores_over_the_tokens_that_the_sampler_kept(model_path, tmp_path):
    """The policy before training is at no distance from itself, over the whole vocabulary and over a part of it."""
    losses = [{"type": kind, "teacher": "initial"} for kind in ("reverse_kl", "jsd")]
    trainer = build(model_path, tmp_path, [unit_interval], **STEP | {"max_steps": 2, "top_p": 0.7, "losses": losses})
    trainer.train()
    for name in ("losses/reverse_kl", "losses/jsd"):
        first, second = (row[name] for row in trainer.state.log_history[:2])
        assert abs(first) < 1e-12 < second


def test_a_resumed_run_ends_with_the_same_bits(model_path, teacher, tmp_path):
    settings = {"losses": entries(teacher, *KINDS), "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    settings |= {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    whole = build(model_path, tmp_path, [unit_interval], **settings)
    whole.train()
    again = build(model_path, tmp_path, [unit_interval], **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(weights(whole.model), weights(again.model))


def test_rewards_may_all_have_the_weight_0_beside_another_loss(tmp_path):
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "reward_weights": [0.0]}
    GRPOExtConfig(losses=[{"type": "reverse_kl"}], **settings)
    with pytest.raises(ConfigError, match="weight 0"):
        GRPOExtConfig(**settings)
