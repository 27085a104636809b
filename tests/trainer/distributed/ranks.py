"""What a process does under a launcher: `ranks.py CASE ARGUMENT...`, by the function of that name."""

import json
import math
import os
import resource
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback

from grpo_ext import ConfigError, GRPOExtConfig, GRPOExtTrainer
from grpo_ext.data.eval_sets import EvalSet
from grpo_ext.errors import NonFiniteError, SaveError
from grpo_ext.evaluation.evaluate import evaluate
from grpo_ext.packing.token_budget import TokenBudget
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.runtime import Runtime
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.train import leave_process_group
from grpo_ext.trainer.scoring import SHARDED
from support import interrupted, painters, poisoned, seeing, tiny, trainers, tuners, worlds
from support.dealt import AT_A_TIME, LIMITS, SAMPLES, dealing
from support.dealt import rows as dealt_rows
from support.estimators import everything
from support.figures import evaluated
from support.figures import trainer as trainer_of_figures
from support.float64 import FLOAT64, float64_throughout
from support.fsdp_on_cpu import is_sharded, make_fsdp_real
from support.mismatched import RULES, trained
from support.trainers import build, number, record, scripted_rollout, scripted_trajectories, unit_interval, weights
from support.watched import trained_weights

# One step.


@float64_throughout()
def one_step(model: str, output: str, rows: str, *names: str) -> None:
    """Two SGD steps from scripted completions, by each loss."""
    for name in names:
        trainer = build(
            model,
            Path(output) / name,
            [unit_interval, tiny.length] if name == "grpo" else [unit_interval],
            rollout=scripted_rollout,
            loss_type=name,
            beta=0.05,
            entropy_coef=0.01,
            mask_truncated_completions=True,
            per_device_train_batch_size=int(rows),
            num_generations=8,
            optim="sgd",
            learning_rate=0.02,
            max_grad_norm=0.0,
            max_steps=2,
            **FLOAT64,
        )
        trainer.train()
        if trainer.accelerator.is_main_process:
            log = [entry for entry in trainer.state.log_history if "reward" in entry]
            torch.save({"weights": weights(trainer.model), "log": log}, Path(output) / f"{name}.pt")


@float64_throughout()
def added_losses(model: str, output: str, rows: str, teacher: str) -> None:
    """A step with each loss beside the policy's, and with an estimator that sees all there is to see."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        make_fsdp_real()
    losses = [
        {"type": "reverse_kl", "teacher": teacher},
        {"type": "jsd", "teacher_prompt": "{prompt}{solution}=", "where": {"solution": ["0", "1"]}},
        {"type": "cross_entropy", "column": "solution"},
    ]
    settings = {"losses": losses, "advantage_estimator": f"{everything.__module__}:everything", "beta": 0.1}
    settings |= {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 0.0, "max_steps": 1, **FLOAT64}
    trainer = build(model, Path(output), [unit_interval], per_device_train_batch_size=int(rows), **settings)
    trainer.collector.policy = _ByPlace(trainer)
    trainer.train()
    found = {"weights": trained_weights(trainer.model), "seen": everything.seen[-1]}
    if trainer.accelerator.is_main_process:
        torch.save(found, Path(output) / "step.pt")


class _ByPlace:
    """A sampler whose completions depend on the row's place in the global batch only."""

    collective, takes_streams = False, False

    def __init__(self, trainer: GRPOExtTrainer) -> None:
        self.trainer, self.limit = trainer, trainer.max_completion_length

    def sample(self, contexts: list[list[int]], limits: list[int], streams: object = None, **options: object) -> list:
        completions = scripted_rollout([""] * len(contexts), self.trainer)["completion_ids"]
        return [Sampled(ids[:limit], None, None) for ids, limit in zip(completions, limits, strict=True)]


PICTURES = {
    "on one process, then on both": {},
    "checkpointing": {"gradient_checkpointing": True},
    "groups over two micro-batches": {"gradient_accumulation_steps": 2, "beta": 0.05},
    "fresh prompts": {"dynamic_sampling": "reward"},
}


def of_images(completions, images, **_):
    """0 for all completions of a prompt without images."""
    return [score * bool(seen) for score, seen in zip(tiny.spread(completions), images, strict=True)]


@seeing.float64_throughout()
def pictures(family: str, folder: str, rows: str) -> None:
    """Two steps from scripted completions of prompts, of which some have images."""
    for name, settings in PICTURES.items():
        parts = settings.get("gradient_accumulation_steps", 1)
        fixed = {"per_device_train_batch_size": int(rows) // parts, "num_generations": 8, "shuffle_dataset": False}
        fixed |= {"optim": "sgd", "learning_rate": 0.02, "max_grad_norm": 0.0, "loss_type": "grpo"}
        trainer = GRPOExtTrainer(
            seeing.model(family),
            [of_images],
            GRPOExtConfig(f"{folder}/{name}", **(tiny.TRAINING | fixed | settings)),
            seeing.rows((1, 0, 2, 1)),
            processing_class=seeing.processor(family),
        )
        trainer.collector.policy = _ByPlace(trainer)
        trainer.train()
        if trainer.accelerator.is_main_process:
            log = [entry for entry in trainer.state.log_history if "reward" in entry]
            shown = [len(one or ()) for one in trainer._logs["images"]]
            facts = {"weights": weights(trainer.model), "log": log, "images": shown}
            torch.save(facts, f"{folder}/{name}.pt")


@float64_throughout()
def sampler_correction(model: str, output: str, rows: str) -> None:
    """A step by each rule about a sampler that is not the policy."""
    for name, rule in RULES.items():
        settings = {"sampler_correction": rule, "skip_zero_advantages": False, **FLOAT64}
        trainer = trained(Path(output) / name, model=model, per_device_train_batch_size=int(rows), **settings)
        (made,) = trainer.outputs
        each = made["importance_sampling_ratio"].expand(-1, made["completion_mask"].shape[1])
        ratios = gather_object([row[active] for row, active in zip(each, made["completion_mask"].bool(), strict=True)])
        log = {k: v for k, v in trainer.state.log_history[0].items() if k.startswith("sampling/")}
        if trainer.accelerator.is_main_process:
            facts = {"weights": weights(trainer.model), "ratios": torch.cat(ratios), "log": log}
            torch.save(facts, Path(output) / f"{name}.pt")


# Shared prompts.


SHARED = {
    "whole groups": {"beta": 0.05, "entropy_coef": 0.01},
    "silent groups": {"beta": 0.0},
    "groups over two micro-batches": {"beta": 0.05, "gradient_accumulation_steps": 2},
    "trajectories": {"beta": 0.05, "advantage_estimator": "gigpo", "mask_truncated_completions": True},
    "trajectories as rows": {"beta": 0.05, "shared_prefix": "false", "gradient_accumulation_steps": 4},
    "pieces": {"micro_batch_tokens": 12},
    "trajectories in pieces": {"beta": 0.05, "shared_prefix": "false", "micro_batch_tokens": 60},
}


def half_silent(prompts, completions, **_):
    """No signal for every other prompt."""
    scores = unit_interval(completions)
    return [score * (int(prompt.rstrip(":")[1:]) % 2) for prompt, score in zip(prompts, scores, strict=True)]


def by_turn(trajectory, **_):
    return [[turn.reward for turn in made.turns] for made in trajectory]


def counted(sharing):
    """Numbers of forwards for a micro-batch: this process's own, and the largest of all."""
    forwards, agreed = [], sharing.agreed
    if agreed is not None:
        sharing.agreed = lambda count: forwards.append((count, agreed(count))) or forwards[-1][1]
    return forwards


def of_own_number(trainer):
    """Numbers of parts of this process's micro-batches, and of spare ones; only sharded weights need equal numbers."""
    found, cut = [], TokenBudget.parts

    def parts(limit, *args):
        made = cut(limit, *args)
        found.append((len(made), sum(part.is_spare for part in made)))
        return made

    if trainer._scorer.limit is not None:
        if trainer.accelerator.distributed_type not in SHARDED and trainer.sharing.possible:
            trainer.sharing.agreed = None
            trainer._scorer.limit = replace(trainer._scorer.limit, agreed=None)
        TokenBudget.parts = parts
    return found


@float64_throughout()
def shared(model: str, output: str, rows: str, shared: str) -> None:
    """Steps with shared prompts."""
    make_fsdp_real()
    for name, settings in SHARED.items():
        parts = settings.get("gradient_accumulation_steps", 1)
        fixed = {
            "per_device_train_batch_size": int(rows) // parts,
            "num_generations": 8,
            "loss_type": "grpo",
            "shared_prefix": shared,
            "optim": "sgd",
            "learning_rate": 0.02,
            "max_grad_norm": 0.0,
            "max_steps": 2,
            **FLOAT64,
        }
        rollout, rewards = scripted_rollout, [half_silent]
        if name.startswith("trajectories"):
            rollout, rewards = scripted_trajectories, [half_silent, by_turn]
        whole = {"micro_batch_tokens": None} if shared == "false" else {}
        trainer = build(model, Path(output) / name, rewards, rollout=rollout, **(fixed | settings | whole))
        forwards, parts = counted(trainer.sharing), of_own_number(trainer)
        trainer.train()
        weights, parts = trainer.accelerator.get_state_dict(trainer.model_wrapped), gather_object(parts)
        if trainer.accelerator.is_main_process:
            log = [entry for entry in trainer.state.log_history if "reward" in entry]
            facts = {"shared": trainer.sharing.possible, "sharded": is_sharded(trainer.model), "forwards": forwards}
            facts["parts"] = parts
            torch.save({"weights": weights, "log": log, **facts}, f"{output}/{name}.pt")


# Engines.


def engine(model: str, output: str) -> None:
    """Train, save, resume and save again by the engine of the launch."""
    make_fsdp_real()
    folder, facts = Path(output), {}
    for name, checkpoint in {"whole": None, "resumed": str(folder / "run" / "checkpoint-1")}.items():
        trainer = build(
            model,
            folder / "run",
            [unit_interval],
            rows=64,
            rollout=scripted_rollout,
            loss_type="grpo",
            beta=0.05,
            num_generations=8,
            max_steps=3,
            save_strategy="steps",
            save_steps=1,
            lr_scheduler_type="constant",
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(folder / name))
        plain = trainer.accelerator.unwrap_model(trainer.model)
        facts[name] = {
            "engine": str(trainer.accelerator.distributed_type),
            "sharded": is_sharded(plain) or all(hasattr(p, "ds_id") for p in plain.parameters()),
            "weights": trained_weights(plain),
            "log": [entry for entry in trainer.state.log_history if "reward" in entry],
        }
    if trainer.accelerator.is_main_process:
        torch.save(facts, folder / "facts.pt")


# References of adapters.


def references(model: str, output: str, *names: str) -> None:
    """Five steps of adapters; each rank writes their gradients and KL, and how far policy and reference have moved."""
    make_fsdp_real()
    found = {}
    for name in names:
        torch.manual_seed(2)
        settings = {"loss_type": "grpo", "beta": 0.1, "max_steps": 5, "learning_rate": 0.02, "num_generations": 8}
        settings |= {"save_strategy": "steps", "save_steps": 5, "rollout": scripted_rollout, "rows": 64}
        one = build(model, Path(output) / name, [unit_interval], peft_config=tuners.TUNERS[name](), **settings)
        one.train()
        with one._initial.replacing(one._unwrapped):
            reference = one._reference_check.score(one.model)
        far = [
            (logps - one._reference_check.first).abs().max().item()
            for logps in (reference, one._reference_check.score(one.model))
        ]
        log = [row for row in one.state.log_history if "kl" in row]
        found[name] = [row["grad_norm"] for row in log], [row["kl"] for row in log], *far
    (Path(output) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


# A fault of one process.


class Moves(TrainerCallback):
    """Moves the reference of a trainer."""

    trainer = None

    def on_step_end(self, *_, **__):
        self.trainer.ref_model.lm_head.weight.data.mul_(1.1)


def spoil(trainer, case: str) -> None:
    """Let this process alone see what a check refuses, or have too little memory for it."""
    stock, calls = trainer._scorer.trl, []
    if case == "reference":
        trainer.ref_model.lm_head.weight.data.mul_(1.1)
    elif case == "reference that moves":
        trainer.add_callback(moves := Moves())
        moves.trainer = trainer

    def off(model, ids, *args, **options):
        calls.append(1)
        if case.endswith("that fails"):
            raise IndexError("a position that the model does not have")
        if case.endswith("without memory") and len(calls) == 2:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        logps, *others = stock(model, ids, *args, **options)
        wrong = len(calls) * (case == "reference with noise") + (len(ids) == 2) * (case == "own forward")
        return logps + 0.1 * wrong, *others

    if case not in ("reference", "reference that moves"):
        trainer._scorer.trl = off


def alone(model: str, output: str, *cases: str) -> None:
    """Runs of which one process only sees what is to be refused; each rank writes what it raised or warned of."""
    for case in cases:
        settings = {
            "beta": 0.1,
            "rows": 16,
            "per_device_train_batch_size": 4,
            "save_strategy": "steps",
            "max_steps": 2,
        }
        one = build(model, Path(output) / case, save_steps=1, **settings)
        if one.accelerator.process_index == 1:
            spoil(one, case)
        if case.startswith("own"):
            one.check_reference = lambda: None
        try:
            one.train()
            said = f"trained {one.state.global_step} steps"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        (Path(output) / f"{case}-{one.accelerator.process_index}.txt").write_text(said)


# Stopped and resumed.


def resume(folder: str, *cases: str) -> None:
    """Runs that are stopped and resumed."""
    for case in cases:
        interrupted.check(case, Path(folder) / case.replace(" ", "-"), (3, 5))
        print(f"{case}: equal on process {PartialState().process_index} of {PartialState().num_processes}", flush=True)


# Dynamic sampling.


def one_in_three(prompts, completions, **_):
    """Two of three prompts have no signal; the others score by what the completion says."""
    return [
        sum(map(ord, c)) % 31 / 31 if number(p) % 3 == 1 else 0.5 for p, c in zip(prompts, completions, strict=True)
    ]


def dynamic(model: str, output: str) -> None:
    """Two steps with dynamic sampling; each rank saves what it saw."""
    trainer = record(
        model,
        Path(output) / "run",
        [one_in_three],
        rows=96,
        loss_type="grpo",
        dynamic_sampling="one_in_three",
        dynamic_sampling_max_rounds=12,
        per_device_train_batch_size=12,
        num_generations=8,
    )
    trainer.train()
    rows = []
    for batch in trainer.outputs:
        prompts, completions = (
            trainer.processing_class.batch_decode(batch[name], skip_special_tokens=True)
            for name in ("prompt_ids", "completion_ids")
        )
        scores = one_in_three(prompts, completions)
        rows.append(list(zip(prompts, completions, scores, batch["advantages"].tolist(), strict=True)))
    names = [name for name in trainer.state.log_history[0] if name.startswith("dynamic_sampling")]
    saved = {
        "rows": rows,
        "drawn": trainer.collector.dynamic.prompts.drawn,
        "metrics": [[entry[name] for name in names] for entry in trainer.state.log_history if names[0] in entry],
        "weights": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]),
    }
    torch.save(saved, Path(output) / f"rank{trainer.accelerator.process_index}.pt")


# Environments.


FAULTS = ["raises in reset", "is killed", "hangs", "exits"]


class Failures(GRPOExtTrainer):
    def _calculate_rewards(self, inputs, *completed):
        self.failed = [*getattr(self, "failed", []), [row["trajectory"].failure for row in inputs]]
        return super()._calculate_rewards(inputs, *completed)


def environment(model: str, output: str) -> None:
    """Two steps with environments; those of the second rank fail."""
    settings = tiny.TRAINING | {"per_device_train_batch_size": 4, "max_completion_length": 40}
    args = GRPOExtConfig(str(Path(output) / "run"), **settings)
    rows = [{"prompt": [{"role": "user", "content": f"go {i}"}], "fault": FAULTS[i % 4]} for i in range(16)]
    faulty = {"path": f"{worlds.__file__}:FaultyOnTheSecond", "turn_timeout": 5.0}
    trainer = Failures(model, None, args, rows, processing_class=tiny.tokenizer(), environments=[faulty])
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen = {"failed": trainer.failed, "weights": weights, "log": log}
    torch.save(seen, Path(output) / f"rank{args.process_index}.pt")


def shown_pictures(model: str, output: str) -> None:
    """Steps whose rows have images on one rank, and contexts that were rewritten on the other."""
    settings = tiny.TRAINING | {"per_device_train_batch_size": 2, "num_generations": 2, "max_steps": 3}
    settings |= {"max_completion_length": 60, "completion_length_counts": "policy", "shared_prefix": "false"}
    args = GRPOExtConfig(str(Path(output) / "run"), **settings)
    rows = [{"prompt": [{"role": "user", "content": letter}]} for letter in "abcdefgh"]
    words = seeing.processor("idefics3")
    trainer = GRPOExtTrainer(model, None, args, rows, processing_class=words, environments=[painters.Mixed])
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    torch.save(weights, Path(output) / f"rank{args.process_index}.pt")


# Figures.


def figures(folder: str, size: str) -> None:
    """Log the figures of steps of `size` rows a process and of an evaluation."""
    output, rows = Path(folder), int(size)
    settings = {"loss_type": "dapo", "beta": 0.1}
    one = trainer_of_figures(
        output,
        scripted_rollout,
        **settings | {"num_iterations": 2, "learning_rate": 0.3, "optim": "sgd", "entropy_coef": 0.01},
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
    )
    one.train()
    found = {"steps": [row for row in one.state.log_history if "loss" in row]}
    found["evaluation"] = evaluated(output, rows, **settings)
    if PartialState().is_main_process:
        (output / "figures.json").write_text(json.dumps(found))


# Games.


SET = EvalSet("held_out", rewards=(RewardSpec("length", "support.tiny:length"),), samples=SAMPLES, threshold=0.4)
PLAYED = replace(SET, name="played", rewards=(), plays=True)


def games(model: str, output: str) -> None:
    """Deal games in training and evaluation, and sample evaluation sets."""
    world, rank, folder = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0"), Path(output)
    settings = {"per_device_train_batch_size": 16 // world, "per_device_eval_batch_size": 8 // world}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "max_completion_length": 24}
    settings |= {"dynamic_sampling": "environment", "dynamic_sampling_max_rounds": 2}
    one = dealing(folder / "run", 7, 64, tiny.load(model, torch.float64), **settings)
    one.train()
    torch.save(one.dealt, folder / f"dealt_{rank}.pt")

    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": SAMPLES * AT_A_TIME}
    plain = trainers.build(tiny.load(model, torch.float64), folder / "plain", **sizes)
    plays = dealing(folder / "plays", model=tiny.load(model, torch.float64), **sizes)
    for limit in LIMITS:
        for trainer, chosen, data in ((plain, SET, list(tiny.prompts(limit))), (plays, PLAYED, dealt_rows(limit))):
            kept = folder / f"{chosen.name}_{limit}.jsonl"
            evaluate(trainer, chosen, data, kept=kept, identity={}, workers=0)
    plays.close_rewards()


# NaN or inf on rank 1 alone.


POISONED = {"stop": 2, "skip": 4}
"""The step, of four, in which a run stops or that it skips."""


def poison(model: str, folder: Path, place: str, action: str, step: int) -> dict:
    value = math.nan if action == "stop" and place != "rewards" else math.inf  # a reward of NaN is not scored
    at = step - 1  # a generation is made every second step: for 1 and for 3
    rewards = [poisoned.bad_reward(value, rank=1, at=at)] if place == "rewards" else [tiny.count_a]
    trainer = poisoned.build(model, folder, rewards, on_nonfinite=action)
    if place != "rewards":
        trainer.arm(place, value=value, rank=1, step=step, micro_batch=2)
    error = ""
    try:
        trainer.train()
    except NonFiniteError as stopped:
        error = str(stopped)
    final = weights(trainer.model).double()
    return {
        "error": error,
        "step": trainer.state.global_step,
        "finite": bool(final.isfinite().all()),
        "weights": final.sum().item(),
        "log": [entry.get("nonfinite/skipped_steps") for entry in trainer.state.log_history if "loss" in entry],
    }


def poisoned_ranks(model: str, folder: str) -> None:
    """Write the outcome of each case as JSON by rank."""
    output, outcomes = Path(folder), {}
    for place in poisoned.PLACES:
        for action, step in POISONED.items():
            name = f"{place}-{action}"
            outcomes[name] = poison(model, output / name, place, action, step)
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(outcomes))


# A reward that fails on rank 1.


def one_bad(prompts, trainer):
    """Ordinary completions, and at the second step one "bad" one on each rank."""
    tokenizer = trainer.processing_class
    texts = ["a7 " * (1 + i % 4) for i in range(len(prompts))]
    if trainer.state.global_step == 1:
        texts[1] = "bad"
        (Path(trainer.args.output_dir) / "fault_began").write_text(str(time.time()))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    return {"prompt_ids": tokenizer(list(prompts))["input_ids"], "completion_ids": ids, "logprobs": None}


def fail(model: str, output: Path, on_error: str, fault: str) -> None:
    timeout = 4.0 if fault in ("loop", "sleep", "hang") else 60.0
    specs = [
        RewardSpec("letters", "support.faulty:letters"),
        RewardSpec(fault, f"support.faulty:{fault}", on_error=on_error, timeout=timeout, independent=True),
    ]
    runtime = Runtime(specs, workers=1, failures=output / "failures")
    args = GRPOExtConfig(str(output), **(tiny.TRAINING | {"max_steps": 3, "num_generations": 8, "loss_type": "grpo"}))
    trainer = GRPOExtTrainer(
        model, runtime.functions, args, tiny.prompts(), processing_class=tiny.tokenizer(), rollout_func=one_bad
    )
    try:
        trainer.train()
    finally:
        (output / f"ended_{trainer.accelerator.process_index}").write_text(str(time.time()))
    runtime.close()
    if trainer.accelerator.is_main_process:
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        (output / f"{fault}.json").write_text(json.dumps(log))


def faults(model: str, folder: str, *pairs: str) -> None:
    """Train with a fault injected on rank 1 of two, in mid run, for each ON_ERROR:FAULT."""
    os.environ["FAULT_RANK"] = "1"
    for pair in pairs:
        fail(model, Path(folder), *pair.split(":"))


# Checkpoints.


class FullDisk(TrainerCallback):
    """From the second step on, no file of one process may grow beyond some bytes."""

    def __init__(self, rank: int, limit: int) -> None:
        self.rank, self.limit = rank, limit

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == self.rank and state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def checkpoint(model: str, folder: str, *cases: str) -> None:
    """Write one line for each rank and case, in FOLDER/CASE-N.txt: what it sees of checkpoints."""
    for case in cases:
        _checkpoint(model, folder, case)


def _checkpoint(model: str, folder: str, case: str) -> None:
    out, rank = Path(folder) / "out", PartialState(cpu=True).process_index
    if case == "own folders":  # one path that is two places, as on machines that share no disk
        here = Path(folder) if rank == 0 else Path(folder) / "elsewhere"
        here.mkdir(exist_ok=True)
        os.chdir(here)
        out = Path("out")
    resumes = case in ("one random state lost", "own folders", "go on")
    trainer = build(
        model, out, max_steps=3, per_device_train_batch_size=4, save_strategy="steps", save_steps=1, rows=16
    )
    if case == "one random state lost" and rank == 0:
        (out / "checkpoint-3" / "rng_state_1.pth").unlink()
    if case.startswith("full disk"):
        trainer.add_callback(FullDisk(int(case[-1]), 20_000 if case.endswith("0") else 4_000))
    PartialState().wait_for_everyone()
    try:
        trainer.train(resume_from_checkpoint=True if resumes else None)
        said = f"step {trainer.state.global_step}"
    except (ConfigError, SaveError) as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    (Path(folder) / f"{case}-{rank}.txt").write_text(said)


if __name__ == "__main__":
    vars()[sys.argv[1]](*sys.argv[2:])
    leave_process_group()
