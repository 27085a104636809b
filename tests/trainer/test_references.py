"""The reference is the model before training, for every adapter, and what is saved loads as what was trained."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import TrainerCallback

from grpo_ext import ConfigError
from grpo_ext.config.adapters import peft_problems
from grpo_ext.recipe.parsing import load_recipe
from grpo_ext.recipe.preflight import Preflight
from grpo_ext.train import build_trainer
from support import adapted as sft
from support import tiny, tuners
from support.trainers import build

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of some tuners

FIVE = {
    "beta": 0.1,
    "loss_type": "grpo",
    "max_steps": 5,
    "learning_rate": 0.02,
    "save_strategy": "steps",
    "save_steps": 5,
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def logps(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits[:, -6:].log_softmax(-1)


def trainer_of(way: str, name: str, folder: Path):
    """Return a trainer whose adapter is new, was trained before, or is the model of a recipe; and the policy."""
    base = str(folder / "base")
    if way == "new":
        model, config = tuners.prepared(name, base)
        trainer = build(model, folder / "out", peft_config=config, **FIVE)
        return trainer, logps(trainer.model)
    model = tuners.perturbed(tuners.adapted(base, name))
    policy = logps(model)
    if way == "trained":
        return build(model, folder / "out", **FIVE), policy
    model.save_pretrained(folder / "sft")
    tiny.tokenizer().save_pretrained(folder / "sft")
    argv = sft.write_recipe(folder, str(folder / "sft"), folder / "out", **FIVE)
    return build_trainer(load_recipe(argv, Preflight(data=False))), policy


REFUSED = {
    "lora pissa_niter_2": ("gets another policy", "gets another policy", "gets another policy"),
    "lora corda": ("cannot load what it saves", "cannot load what it saves", "cannot load this adapter"),
    "adaption prompt": ("cannot score",) * 3,
    "cpt": ("cannot score", "cannot score", "not to train it further"),
    "cartridge": (None, None, "not to train it further"),
    "p-tuning": (None, None, "not to train it further"),
    "prefix": (None, None, "not to train it further"),
    "prompt": (None, None, "not to train it further"),
    "lily": ("off the model's own forward",) * 3,  # its router mixes rows
    "pvera": ("draws its own noise",) * 3,
}
"""Words of the refusal of an adapter that is new, was trained before, or is the model of a recipe."""
if tuners.TOKENS_LOST:
    lost = ("generates without its virtual tokens",) * 2
    REFUSED |= dict.fromkeys(("cpt", "cartridge", "p-tuning", "prefix", "prompt"), (*lost, "not to train it further"))
WAYS = ("new", "trained", "recipe")
WHOLE_CENSUS = os.environ.get("GRPO_EXT_WHOLE_CENSUS")
PAIRS = [
    (name, way)
    for i, name in enumerate(tuners.TUNERS)
    for way in WAYS
    if way in ("new", WAYS[i % 3]) or name in REFUSED or WHOLE_CENSUS
]
"""Each tuner as a new one, and each of the other ways for every third; all that are refused; with the variable all."""


@pytest.mark.parametrize("release", [(5, 23), (5, 24)])
def test_virtual_tokens_are_refused_where_generation_loses_them(release, monkeypatch):
    monkeypatch.setattr("grpo_ext.config.adapters.release", lambda _: release)
    problems = [*peft_problems(tuners.TUNERS["prefix"]())]
    assert [problem.field for problem in problems] == ["peft_type"] * (release == (5, 24))
    assert not [*peft_problems(tuners.TUNERS["lora"]())]
    if problems:
        words = r"PEFT [\d.]+ under transformers [\d.]+ generates without its virtual tokens, as transformers renamed"
        cure = r"Install 'transformers<5\.24', or train a LoRA\."
        assert re.fullmatch(rf"peft_type='PREFIX_TUNING': {words} the cache\. {cure}", str(problems[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), PAIRS)
@pytest.mark.cases(38)
def test_every_tuner(name, way, tmp_path):
    tiny.save(tmp_path / "base")
    if (words := REFUSED.get(name, (None,) * 3)[WAYS.index(way)]) is not None:
        with pytest.raises(ConfigError, match=words) as error:
            trainer_of(way, name, tmp_path)[0].train()
        print(f"| {name} | {way} | refused: {error.value.problems[0]}")
        return
    trainer, policy = trainer_of(way, name, tmp_path)
    torch.testing.assert_close(logps(trainer.model), policy, rtol=0, atol=1e-5)
    trainer.train()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    with torch.no_grad(), trainer._initial.replacing(trainer.model):
        moved = (logps(trainer.model) - policy).abs().max().item()
    loaded = PeftModel.from_pretrained(tiny.load(str(tmp_path / "base")), str(tmp_path / "out" / "checkpoint-5"))
    apart = (logps(loaded) - logps(trainer.model)).abs().max().item()
    print(f"| {name} | {way} | {kl[0]:.0e} | {kl[-1]:.1e} | {moved:.0e} | {apart:.0e}")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert max(kl) > 1e-9
    assert moved == 0.0
    assert apart < 1e-5


def test_noise_in_a_forward_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neftune_noise_alpha=5\.0: each forward draws its own noise"):
        build(tiny.model(), tmp_path, neftune_noise_alpha=5.0)
    assert build(tiny.model(), tmp_path, neftune_noise_alpha=0.0).sharing.possible


def test_a_reference_that_is_another_model_is_refused_before_the_first_step(tmp_path):
    trainer = build(tiny.model(), tmp_path, **FIVE)
    with torch.no_grad():
        trainer.ref_model.lm_head.weight.mul_(1.1)
    with pytest.raises(ConfigError, match="model='LlamaForCausalLM': the reference is not the policy before"):
        trainer.train()
    assert trainer.state.global_step == 0


class Shares(TrainerCallback):
    """Gives the reference a weight of the policy, as an adapter that is not all switched off does."""

    def __init__(self):
        self.trainer = None

    def on_step_begin(self, *_, **__):
        self.trainer.ref_model.lm_head.weight = self.trainer.model.lm_head.weight


def test_a_reference_that_moves_is_refused_at_the_first_checkpoint(tmp_path):
    trainer = build(tiny.model(), tmp_path, **FIVE)
    trainer.add_callback(shares := Shares())
    shares.trainer = trainer
    with pytest.raises(ConfigError, match=r"the reference has moved since the start: .* nats"):
        trainer.train()
    assert not [*tmp_path.glob("checkpoint-*")]


def drawn_adapter(seed):
    """An adapter that does not start at zero, and is another one by each seed."""
    model = tiny.model()
    torch.manual_seed(seed)
    return get_peft_model(model, tuners.TUNERS["lora random"]())


def test_a_resumed_run_keeps_its_reference(tmp_path):
    first, again = (build(drawn_adapter(seed), tmp_path, **(FIVE | {"save_steps": 2})) for seed in (1, 2))
    first.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    kl = [[row["kl"] for row in one.state.log_history if "kl" in row] for one in (first, again)]
    assert kl[0] == kl[1]
    assert kl[0][-1] > 0


def test_a_resumed_run_compares_the_reference_with_its_own(tmp_path):
    """The trainer has looked at its reference before it reads that of the checkpoint."""

    def trainer(seed, **settings):
        settings = FIVE | {"save_steps": 2} | settings
        return build(drawn_adapter(seed), tmp_path, evaluated=tiny.prompts(4), **settings)

    trainer(1, max_steps=2).train()
    again = trainer(2)
    again.evaluate()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 5


@pytest.mark.parametrize("name", ["lily", "pvera"])
def test_a_new_adapter_that_computes_nothing_yet_is_refused_for_what_it_will(name, tmp_path):
    tiny.save(tmp_path / "base")
    trainer, policy = trainer_of("new", name, tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[name][0]):
        trainer.train()
    assert torch.equal(logps(trainer.model), policy)


# Too little memory.

SHORT = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("calls", "where"), [(1, "gpu"), (4, "cpu"), (5, "gpu"), (8, "cpu")])
def test_a_check_for_which_memory_is_too_little_is_left_out_with_one_warning(calls, where, tmp_path, caplog):
    """The first forwards of a run are those of its checks: five of the reference, five of scores, in that order."""
    trainer, made = build(tiny.model(), tmp_path, peft_config=tuners.TUNERS["lora"](), **FIVE), []
    stock = trainer._scorer.trl

    def short(*args, **options):
        made.append(1)
        if len(made) == calls:
            raise SHORT[where]
        return stock(*args, **options)

    trainer._scorer.trl = short
    trainer.train()
    assert trainer.state.global_step == 5
    said = [record.message for record in caplog.records if "too little memory" in record.message]
    assert len(said) == 1
    assert said[0].startswith("the reference is not" if calls <= 4 else "scores are not")


# A save is rehearsed.


def sampling_without_do_sample(model):
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = False


def unserialisable(model):
    model.config.note = object()


def no_room(model):
    pass


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (sampling_without_do_sample, "model.generation_config: it cannot be written"),
        (unserialisable, "model.config: it cannot be written"),
        (no_room, r"output_dir=.*0.00 GB free, and the weights of one save take 0.0"),
    ],
)
def test_what_the_first_save_would_meet_is_said_before_the_first_step(spoil, words, tmp_path, monkeypatch):
    trainer = build(tiny.model(), tmp_path, **(FIVE | {"beta": 0.0}))
    spoil(trainer.model)
    if spoil is no_room:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=words):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not [*tmp_path.iterdir()]


def test_an_adapter_on_a_base_that_was_changed_in_memory_is_refused(tmp_path):
    base = tiny.load(tiny.save(tmp_path / "base"))
    with torch.no_grad():
        base.lm_head.weight.mul_(1.5)
    trainer = build(base, tmp_path / "out", peft_config=tuners.TUNERS["lora"](), **FIVE)
    with pytest.raises(ConfigError, match=r"what it saves is another policy when it is loaded on .*base, by"):
        trainer.train()


# Several evaluation sets.

SETS = {"easy": tiny.prompts(4), "hard": tiny.prompts(8)}
BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}


@pytest.mark.cases(1)
@pytest.mark.parametrize("defaults", ["paper", "trl"])
def test_each_evaluation_set_has_figures_of_its_own(defaults, tmp_path):
    settings = BEST | {"metric_for_best_model": "eval_hard_reward", "loss_defaults": defaults, "loss_type": "grpo"}
    trainer = build(tiny.model(), tmp_path, evaluated=SETS, per_device_eval_batch_size=8, **settings)
    trainer.train()
    rows = [row for row in trainer.state.log_history if any(name.startswith("eval_") for name in row)]
    for row in rows:
        own = {name.split("_")[1] for name in row if name.startswith("eval_")}
        assert own in ({"easy"}, {"hard"})
    assert {"eval_hard_reward", "eval_hard_rewards/count_a/mean", "eval_hard_completions/mean_length"} <= set(rows[1])
    assert trainer.state.best_metric == max(row["eval_hard_reward"] for row in rows if "eval_hard_reward" in row)


@pytest.mark.parametrize(
    ("metric", "cure"),
    [
        ("eval_reward", "eval_easy_reward"),
        ("eval_hard_rewardd", "eval_hard_reward"),
        ("eval_hard_count_a", "eval_hard_rewards/count_a/mean"),
        ("eval_hard_accuracy", "eval_hard_reward"),
    ],
)
def test_a_metric_that_no_set_has_is_refused(metric, cure, tmp_path):
    with pytest.raises(ConfigError, match=f"no evaluation has this metric. Set metric_for_best_model: {cure}"):
        build(tiny.model(), tmp_path, evaluated=SETS, **(BEST | {"metric_for_best_model": metric}))


# Half precision.


@pytest.mark.parametrize(
    ("dtype", "rate", "warned"),
    [(torch.bfloat16, 1e-6, True), (torch.bfloat16, 1e-1, False), (torch.float32, 1e-6, False)],
)
def test_steps_that_bfloat16_rounds_away_are_said_once(dtype, rate, warned, tmp_path, caplog):
    settings = {"learning_rate": rate, "max_steps": 3, "lr_scheduler_type": "constant"}
    build(tiny.model(dtype=dtype), tmp_path, **settings).train()
    assert caplog.text.count("rounds smaller updates away") == warned
