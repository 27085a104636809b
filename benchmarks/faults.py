"""Faults planted in real runs, and whether `grpo-ext diagnose` names them: `make bench-faults`.

Each run trains the quickstart's warm model by a recipe of `quickstart/`, on one thread, with 32 completions a step. A
fault begins after `PLANTED` sound steps and lasts for `AFTER` more; it is planted from here, by patches around the
trainer's methods. A fault of `FROM_THE_FIRST` is a setting, and begins with the first step. Sound runs use different
losses, seeds, features and two tasks. The rules were made from runs of seeds below `REPORTED`; the reported runs were
made afterwards. Logs are kept in build/faults.jsonl, so that an interrupted benchmark resumes; results/faults.json is
judged from them.
"""

import argparse
import json
import logging
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "faults.json"
LOGS = FOLDER.parent / "build" / "faults.jsonl"
PLANTED, AFTER, WITHIN = 8, 10, 10
"""Sound steps, steps with the fault, and those of them in which it is to be named."""
HEALTHY_STEPS = 18
REPORTED = HELD_OUT = 200
"""First seed of the reported runs, whose models differ from those that the rules were made on."""
DIES = "GRPO_EXT_BENCH_REWARD_DIES"

Trainer = Any


def mortal(completions, solution, **_):
    """Return the accuracy, in a process that dies once a file exists."""
    if Path(os.environ[DIES]).exists():
        os._exit(1)
    texts = [completion[0]["content"] for completion in completions]
    return [float(f"<answer>\n{s}\n</answer>" in text) for text, s in zip(texts, solution, strict=True)]


def signed(completions, **_):
    """Return 1 for a completion in the quickstart's format, else -1."""
    form = re.compile(r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>", re.DOTALL)
    return [1.0 if form.fullmatch(completion[0]["content"]) else -1.0 for completion in completions]


# How faults are planted: `active` is true once the fault has begun.


def active(trainer: Trainer) -> bool:
    return trainer.model.training and trainer.state.global_step >= PLANTED


def wrapped(trainer: Trainer, name: str, around: Callable[..., Any]) -> None:
    """`trainer.name(...)` becomes `around(stock, ...)` once the fault has begun."""
    stock = getattr(trainer, name)
    setattr(trainer, name, lambda *a, **k: around(stock, *a, **k) if active(trainer) else stock(*a, **k))


@contextmanager
def weights(model: Any, other: dict[str, Any]) -> Iterator[None]:
    """The model with other weights, for a while."""
    mine = {name: p.data for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = other[name]
    try:
        yield
    finally:
        for name, p in model.named_parameters():
            p.data = mine[name]


def snapshot(model: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stale_weights(trainer: Trainer) -> None:
    kept: dict[str, Any] = {}

    def generate(stock, *args, **kwargs):
        kept.update({} if kept else snapshot(trainer.model))
        with weights(trainer.model, kept):
            return stock(*args, **kwargs)

    wrapped(trainer, "_generate_single_turn", generate)


def decoded_by(trainer: Trainer, kind: type) -> None:
    """The rollout's batch is a `kind` once the fault has begun."""
    from grpo_ext.rollout import decoding

    def generate(stock, *args, **kwargs):
        sound, decoding._Batch = decoding._Batch, kind
        try:
            return stock(*args, **kwargs)
        finally:
            decoding._Batch = sound

    wrapped(trainer, "_generate", generate)


def stale_prefix_cache(trainer: Trainer) -> None:
    from grpo_ext.rollout.decoding import _Batch

    kept: dict[str, Any] = {}

    class Stale(_Batch):
        def prefill(self, marks):
            kept.update({} if kept else snapshot(trainer.model))
            with weights(trainer.model, kept):
                return super().prefill(marks)

    decoded_by(trainer, Stale)


def positions_end(trainer: Trainer) -> None:
    """The sampler counts no positions beyond the 128th token of a completion."""
    from grpo_ext.rollout.decoding import _Batch

    class Short(_Batch):
        def forward(self):
            self.positions = self.positions - int(self.length - self.prompt > 128)
            return super().forward()

    decoded_by(trainer, Short)


def ends_unread(trainer: Trainer) -> None:
    """The sampler does not read the end tokens of earlier turns, as if its template left them out."""
    from grpo_ext.rollout.decoding import _Batch

    class Without(_Batch):
        def prefill(self, marks):
            ends = sum(self.ids[:, : self.length] == i for i in trainer.eos_token_ids)
            self.mask = self.mask * (ends == 0)
            return super().prefill(marks)

    decoded_by(trainer, Without)


def wrong_template(trainer: Trainer) -> None:
    """The sampler's template has no generation prompt."""
    wrapped(
        trainer,
        "_generate_single_turn",
        lambda stock, prompt_ids, *args, **kwargs: stock([ids[:-1] for ids in prompt_ids], *args, **kwargs),
    )


def merged_in_bf16(trainer: Trainer) -> None:
    """The sampler is given the adapter merged into its base, rounded to bfloat16."""
    import torch

    def generate(stock, *args, **kwargs):
        model = trainer.accelerator.unwrap_model(trainer.model)
        base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
        model.merge_adapter()
        for name, p in model.named_parameters():
            if name in base:
                p.data = p.data.to(torch.bfloat16).to(p.dtype)
        try:
            return stock(*args, **kwargs)
        finally:
            model.unmerge_adapter()
            for name, p in model.named_parameters():
                if name in base:
                    p.data = base[name]

    wrapped(trainer, "_generate_single_turn", generate)


def truncated_sampling(trainer: Trainer) -> None:
    def generate(stock, *args, **kwargs):
        trainer.generation_config.top_p = 0.8
        return stock(*args, **kwargs)

    wrapped(trainer, "_generate_single_turn", generate)


def eos_lost(trainer: Trainer) -> None:
    """Remove the end token from the sampler's output."""

    def generate(stock, *args, **kwargs):
        completions, logps = stock(*args, **kwargs)
        ends = [ids[-1] in trainer.eos_token_ids and len(ids) > 1 for ids in completions]
        completions = [ids[:-1] if end else ids for ids, end in zip(completions, ends, strict=True)]
        return completions, logps and [row[: len(ids)] for row, ids in zip(logps, completions, strict=True)]

    wrapped(trainer, "_generate_single_turn", generate)


def on_output(change: Callable[[dict[str, Any]], None]) -> Callable[[Trainer], None]:
    """Plant a fault in the generated and scored batch."""

    def plant(trainer: Trainer) -> None:
        def generate(stock, *args, **kwargs):
            output = stock(*args, **kwargs)
            change(output)
            return output

        wrapped(trainer, "_generate_and_score_completions", generate)

    return plant


def shuffled(output: dict[str, Any]) -> None:
    import torch

    output["advantages"] = output["advantages"][torch.randperm(len(output["advantages"]))]


def mask_off_by_one(output: dict[str, Any]) -> None:
    import torch

    output["completion_mask"] = torch.nn.functional.pad(output["completion_mask"][:, 1:], (0, 1))


def learning_rate(trainer: Trainer) -> None:
    """Each step is 100 times as large; the log does not show it."""
    create = trainer.create_optimizer

    def created(*args, **kwargs):
        optimizer = create(*args, **kwargs)
        step = optimizer.step

        def larger(*args, **kwargs):
            factor = 100.0 if active(trainer) else 1.0
            for group in optimizer.param_groups:
                group["lr"] *= factor
            try:
                return step(*args, **kwargs)
            finally:
                for group in optimizer.param_groups:
                    group["lr"] /= factor

        optimizer.step = larger
        return optimizer

    trainer.create_optimizer = created


def on_reward(place: int, change: Callable[[list, dict[str, Any]], list]) -> Callable[[Trainer], None]:
    """Plant a fault in one reward: its values become `change(values, columns)`."""

    def plant(trainer: Trainer) -> None:
        stock = trainer.reward_funcs[place]

        def reward(**columns):
            values = stock(**columns)
            return change(values, columns) if active(trainer) else values

        reward.__name__ = trainer.reward_func_names[place]
        trainer.reward_funcs[place] = reward

    return plant


def dying(trainer: Trainer) -> None:
    def rewards(stock, *args, **kwargs):
        Path(os.environ[DIES]).touch()
        return stock(*args, **kwargs)

    wrapped(trainer, "_calculate_rewards", rewards)


SIGNED = [{"name": "accuracy"}, {"func": f"{FOLDER / 'faults.py'}:signed", "name": "signed"}]
MORTAL = [{"func": f"{FOLDER / 'faults.py'}:mortal", "name": "accuracy"}, {"name": "format", "weight": 0.5}]
GAME = {"recipe": "quickstart/guess"}
"""Another task and model: a game of several turns."""
LONG = {"max_completion_length": 192, "generation_kwargs": {"suppress_tokens": [1]}}
"""Completions that go on behind their end, to 192 tokens."""
FAULTS: dict[str, tuple[Callable[[Trainer], None], str, dict[str, Any]]] = {
    "stale weights": (stale_weights, "stale sampler", {}),
    "stale prefix cache": (stale_prefix_cache, "stale sampler", {}),
    "wrong template": (wrong_template, "another prompt", {}),
    "truncated sampling": (truncated_sampling, "truncated sampling", {}),
    "LoRA merged in bf16": (merged_in_bf16, "sampler's precision", {"use_peft": True, "lora_r": 8}),
    "groups shuffled": (on_output(shuffled), "advantages of other rows", {}),
    "mask off by one": (on_output(mask_off_by_one), "misplaced mask", {}),
    "EOS lost": (eos_lost, "end token lost", {}),
    "learning rate x 100": (learning_rate, "steps too large", {}),
    "sign of a reward": (on_reward(0, lambda values, _: [-v for v in values]), "sign of a reward", {}),
    "constant reward": (on_reward(0, lambda values, _: [0.25] * len(values)), "constant reward", {}),
    "positions end at 128": (positions_end, "drift by depth", LONG),
    "ends of turns unread": (ends_unread, "drift by turn", GAME),
    "groups shuffled in a game": (on_output(shuffled), "advantages of other rows", GAME),
    "mask off by one in a game": (on_output(mask_off_by_one), "misplaced mask", GAME),
    "learning rate x 100 in a game": (learning_rate, "steps too large", GAME),
    "dead reward worker": (dying, "reward fails", {"reward_workers": 1, "reward_funcs": MORTAL}),
}
"""Name: how it is planted, the rule that is to name it, settings beside those of all runs."""
CRASHES = """
import json, os, sys, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))
print(answer["choices"][0]["mesage"]["content"])
"""
"""An agent that asks once, and then crashes by a mistake of its own."""
AGENT = {
    "environments": [{"name": "command", "kwargs": {"run": ["python3", "-c", CRASHES, "{prompt}"]}, "max_turns": 2}],
    **{"per_device_train_batch_size": 8, "num_generations": 4},
}
FROM_THE_FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "all cut off and masked": (
        "all masked",
        {**LONG, "mask_truncated_completions": True, "max_completion_length": 64},
    ),
    "learning rate 0": ("no weight moves", {"learning_rate": 0.0}),
    "gradients clipped to 1e-12": ("no weight moves", {"max_grad_norm": 1e-12}),
    "destroyed by the first step": ("policy collapsed", {"optim": "sgd", "learning_rate": 1e4}),
    "destroyed by the first steps": ("steps too large", {"learning_rate": 0.02}),
    "an agent that crashes": ("agent fails", GAME | AGENT),
}
"""Faults that are a setting: the rule that is to name each, the settings."""

HEALTHY: list[tuple[str, dict[str, Any]]] = [
    ("quickstart/grpo", {}),
    ("quickstart/dr_grpo", {}),
    ("quickstart/dapo", {}),
    ("quickstart/gspo", {}),
    ("quickstart/bnpo", {}),
    ("quickstart/beta_bnpo", {}),
    ("quickstart/deepseek_v3", {}),
    ("quickstart/minimind", {}),
    ("quickstart/grpo", {"loss_type": "cispo", "beta": 0.0}),
    ("quickstart/grpo", {"loss_type": "rloo", "beta": 0.0}),
    ("quickstart/grpo", {"loss_type": "reinforce_pp", "beta": 0.0}),
    ("quickstart/grpo", {"loss_type": "sapo", "beta": 0.0}),
    ("quickstart/grpo", {"loss_type": "maxrl", "beta": 0.0, "reward_funcs": ["accuracy"]}),  # in [0, 1]
    ("quickstart/grpo", {"use_peft": True, "lora_r": 8, "learning_rate": 1e-3}),
    ("quickstart/grpo", {"num_iterations": 2}),
    ("quickstart/grpo", {"steps_per_generation": 2, "per_device_train_batch_size": 16}),
    ("quickstart/grpo", {"dynamic_sampling": "accuracy", "dynamic_sampling_max_rounds": 1}),
    ("quickstart/grpo", {"mask_truncated_completions": True, "max_completion_length": 40}),
    ("quickstart/grpo", {"loss_defaults": "trl", "beta": 0.0}),
    ("quickstart/grpo", {"temperature": 1.2, "learning_rate": 3e-4}),
    ("quickstart/grpo", {"reward_funcs": SIGNED, "learning_rate": 5e-4}),
    ("quickstart/grpo", {"reward_funcs": SIGNED, "learning_rate": 5e-4, "logging_steps": 3}),
    ("quickstart/guess", {}),
    ("quickstart/guess", {"advantage_estimator": "turn_return", "advantage_kwargs": {"gamma": 0.0}}),
    ("quickstart/guess", {"environments": [{"name": "guess", "kwargs": {"high": 15, "guesses": 5}, "max_turns": 2}]}),
    ("quickstart/guess", {"learning_rate": 3e-3, "loss_type": "dr_grpo"}),
    ("quickstart/grpo", {"use_peft": True, "lora_r": 8, "learning_rate": 1e-6, "warmup_steps": 6}),
    ("quickstart/grpo", {"learning_rate": 1e-9, "beta": 0.04, "lr_scheduler_type": "cosine"}),
]
"""Recipe and settings beside those of all runs."""


def trained(recipe: str, settings: dict[str, Any], seed: int, steps: int, plant: Callable[[Trainer], None] | None):
    """Return the log of one run."""
    import torch
    import yaml
    from datasets.utils.logging import disable_progress_bar

    from grpo_ext.quickstart.model import ensure_model
    from grpo_ext.recipe.files import packaged_recipes, read_yaml
    from grpo_ext.recipe.parsing import load_recipe
    from grpo_ext.train import build_trainer

    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink, redirect_stdout(sink):
        os.environ[DIES] = str(Path(folder) / "dies")
        given = {
            "output_dir": folder, "seed": seed, "max_steps": steps, "logging_steps": 1, "warmup_steps": 0,
            "save_strategy": "no", "eval_strategy": "no", "eval_on_start": False, "disable_tqdm": True,
            "reward_workers": 0,
        }  # fmt: skip
        if recipe not in GAME.values():
            model = ensure_model(seed % 2 if seed < HELD_OUT else 2 + seed % 2)
            given |= {"model_name_or_path": str(model), "per_device_train_batch_size": 32, "num_generations": 4}
        given |= settings
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(read_yaml(packaged_recipes()[recipe]) | given))
        trainer = build_trainer(load_recipe(["--config", str(file)]))
        if plant is not None:
            plant(trainer)
        trainer.train()
        return trainer.state.log_history


def jobs(seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Return the runs: each fault with each seed, and each sound run once, with its own seed."""
    for name, settings in {name: fault[-1] for name, fault in (FAULTS | FROM_THE_FIRST).items()}.items():
        own = {key: value for key, value in settings.items() if key != "recipe"}
        recipe = settings.get("recipe", "quickstart/grpo")
        yield from ({"fault": name, "recipe": recipe, "settings": own, "seed": s} for s in seeds)
    for i, (recipe, settings) in enumerate(HEALTHY):
        yield {"fault": None, "recipe": recipe, "settings": settings, "seed": seeds[0] + i}


def name_of(job: dict[str, Any]) -> str:
    return job["fault"] or f"sound: {job['recipe']} {job['settings'] or ''}".rstrip()


def kept() -> list[dict[str, Any]]:
    """Logs of earlier runs."""
    return [json.loads(line) for line in LOGS.read_text().splitlines()] if LOGS.exists() else []


def judged(run: dict[str, Any]) -> dict[str, Any]:
    """Return the findings of the rules for a run."""
    from grpo_ext.trainer.diagnosis.rules import diagnose

    named = [{"step": found.step, "fault": found.rule.name} for found in diagnose(run["log"])]
    told = {key: run[key] for key in ("fault", "recipe", "settings", "seed", "seconds")} | {"named": named}
    told["settings"] = json.loads(
        json.dumps(run["settings"]).replace(f"{FOLDER.parent}/", "")
    )  # no folder of a machine
    if run["fault"] is None:
        return told | {"steps": HEALTHY_STEPS}
    expected = (FAULTS | FROM_THE_FIRST)[run["fault"]][-2]
    planted = 0 if run["fault"] in FROM_THE_FIRST else PLANTED
    after = [found for found in named if found["step"] > planted]
    right = bool(after) and after[0]["fault"] == expected and after[0]["step"] <= planted + WITHIN
    return told | {"expected": expected, "planted": planted + 1, "right": right and len(after) == len(named)}


def ranges(log: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return minimum, median and maximum of each metric of a run, for the page about healthy runs."""
    rows = [row for row in log if "reward" in row]
    columns = {name: sorted(row[name] for row in rows if isinstance(row.get(name), int | float)) for name in rows[0]}
    return {name: [v[0], v[len(v) // 2], v[-1]] for name, v in columns.items() if v}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[REPORTED])
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of the runs")
    parser.add_argument("--judge", action="store_true", help="only judge the logs that are kept")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    LOGS.parent.mkdir(exist_ok=True)
    wanted = [job for job in jobs(options.seeds) if not options.only or any(w in name_of(job) for w in options.only)]
    done = {(name_of(run), run["seed"]) for run in kept()}
    for job in wanted:
        if options.judge or (name_of(job), job["seed"]) in done:
            continue
        plant = FAULTS[job["fault"]][0] if job["fault"] in FAULTS else None
        steps = PLANTED + AFTER if plant else WITHIN if job["fault"] else HEALTHY_STEPS
        start = time.process_time()
        log = trained(job["recipe"], job["settings"], job["seed"], steps, plant)
        run = job | {"seconds": round(time.process_time() - start, 1), "log": log}
        with LOGS.open("a") as file:
            file.write(json.dumps(run) + "\n")
        print(f"{name_of(job)}, seed {job['seed']}: {judged(run)['named']}", flush=True)
    names = {(name_of(job), job["seed"]) for job in wanted}
    results = [judged(run) for run in kept() if (name_of(run), run["seed"]) in names]
    faults, sound = ([r for r in results if (r["fault"] is None) == healthy] for healthy in (False, True))
    alarms = sum(bool(r["named"]) for r in sound)
    right = f"{sum(r['right'] for r in faults)} of {len(faults)}"
    print(f"named right: {right}; sound runs alarmed: {alarms} of {len(sound)}")
    if min(options.seeds) >= REPORTED and not options.only:
        wanted_faults = (len(FAULTS) + len(FROM_THE_FIRST)) * len(options.seeds)
        counts = {"within": WITHIN, "wanted": {"faults": wanted_faults, "sound": len(HEALTHY)}}
        first = next(job for job in wanted if job["fault"] is None)
        log = next(r["log"] for r in kept() if (name_of(r), r["seed"]) == (name_of(first), first["seed"]))
        found = {"machine": platform.machine(), **counts, "faults": faults, "sound": sound, "healthy": ranges(log)}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
