"""Golden lines of training: weights and log of many tiny seeded runs, to compare the code before and after a change.

A developer's tool, not a test. Each configuration trains a few steps on a CPU and becomes a line of JSON. Run one copy
of this file with the sources of both trees, then compare; equal lines mean that every weight has the same bits:

    PYTHONPATH=OLD/src python benchmarks/golden.py --out old.jsonl
    PYTHONPATH=NEW/src python benchmarks/golden.py --out new.jsonl
    python benchmarks/golden.py --compare old.jsonl new.jsonl

`--only WORD` runs the configurations with WORD in their names; `--list` prints all names; `--vllm` runs those that
sample by vLLM's CPU build.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

sys.path[:1] = [str(Path(__file__).parents[1] / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
from peft import LoraConfig
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.config.launch import world_size
from support import forks, interrupted, processes, seeing, speakers, tiny, trainers, vllm_runs, worlds

torch.set_num_threads(1)
LOSSES = "grpo deepseek_v3 dr_grpo bnpo beta_bnpo dapo gspo cispo sapo luspo vespo minimind minimind_cispo rloo"
LOSSES += " reinforce_pp reinforce_pp_baseline gmpo topr dppo maxrl"
ESTIMATORS = ("batch", "bernoulli", "pass_at_k", "turn_return", "gigpo")
UNIT = {key: {"rewards": ["binary"]} for key in ("beta_bnpo", "maxrl", "bernoulli", "pass_at_k")}
OFF_POLICY = {"steps_per_generation": 2}
WINDOWS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
PROCESS = {"rollout_engine": "process"}
AHEAD = PROCESS | {"rollout_ahead": 1}
GUESS = [{"name": "guess", "kwargs": {"high": 9, "guesses": 3, "cost": 0.1}, "max_turns": 4}]
PLAYS = {"environments": GUESS, "rewards": [], "max_completion_length": 24}
ISOLATED = PLAYS | {"environments": [GUESS[0] | {"isolate": True}], "environment_waves": "turn"}
DYNAMIC = {"dynamic_sampling": "reward", "rewards": ["often_silent"]}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "eval_on_start": True}
SAVED = {"resume_at": 2, "save_strategy": "steps", "save_steps": 1}
RULE = {"level": "geometric", "statistic": "k1", "upper": 0.05, "lower": -0.05, "action": "reject"}
MASK = {"level": "token", "lower": 0.8, "upper": 1.1, "action": "mask"}
MOVING = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
ADAPTIVE = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 3.0}
SCHEDULED = {"name": "spread", "weight": 1.0, "weight_schedule": {"kind": "linear", "to": 0.2}}
SEES = {"rewards": ["of_images"]}
TOOLS = {"speaks": True, "rewards": ["of_messages"], "max_completion_length": 400, "rollout_engine": "generate"}
CASES: dict[str, dict] = {
    **{f"loss {name}": {"loss_type": name} | OFF_POLICY | UNIT.get(name, {}) for name in LOSSES.split()},
    **{f"advantage {name}": {"advantage_estimator": name} | OFF_POLICY | UNIT.get(name, {}) for name in ESTIMATORS},
    "trl": {"loss_defaults": "trl"} | WINDOWS,
    "trl beta": {"loss_defaults": "trl", "beta": 0.1, "num_iterations": 2},
    "trl evaluation": {"loss_defaults": "trl"} | EVALUATED,
    "generate": {"rollout_engine": "generate"} | WINDOWS,
    "windows": WINDOWS,
    "two iterations": WINDOWS | {"num_iterations": 2, "max_steps": 6},
    "beta": WINDOWS | {"beta": 0.1},
    "beta iterations": {"beta": 0.1, "num_iterations": 2},
    "beta moving reference": MOVING,
    "kl in reward": WINDOWS | {"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
    "kl in reward rloo": {"beta": 0.1, "loss_type": "rloo"},
    "kl bias correction": OFF_POLICY | {"beta": 0.1, "use_bias_correction_kl": True},
    "lora": WINDOWS | {"peft": {}},
    "lora beta": OFF_POLICY | {"peft": {}, "beta": 0.1},
    "lora random beta": OFF_POLICY | {"peft": {"init_lora_weights": False}, "beta": 0.1},
    "lora process ahead": AHEAD | {"peft": {"init_lora_weights": False}, "beta": 0.1},
    "process": PROCESS | WINDOWS,
    "process ahead 1": AHEAD,
    "process ahead 2": AHEAD | {"rollout_ahead": 2, "max_steps": 6} | {**WINDOWS, "steps_per_generation": 2},
    "ahead iterations": AHEAD | {"num_iterations": 2, "max_steps": 6},
    "ahead beta": AHEAD | MOVING,
    "ahead sampler": AHEAD | {"old_logps": "sampler"},
    "ahead corrections": AHEAD | {"sampler_correction": [MASK, RULE]},
    "ahead trl correction": AHEAD | {"vllm_importance_sampling_mode": "sequence_mask"},
    "ahead evaluation": AHEAD | EVALUATED,
    "ahead off-policy mask": AHEAD | {"off_policy_mask_threshold": 0.05},
    "rollout function": {"rollout_func": "scripted_rollout"} | WINDOWS,
    "rollout sampler": {"rollout_func": "with_logprobs", "old_logps": "sampler"} | OFF_POLICY,
    "trajectories": {"rollout_func": "scripted_trajectories", "max_completion_length": 40} | OFF_POLICY,
    "trajectories as rows": {"rollout_func": "scripted_trajectories", "shared_prefix": "false", "beta": 0.1},
    "per-turn rewards": {"rollout_func": "scripted_trajectories", "rewards": ["by_turn", "some_none"]},
    "environments": PLAYS | WINDOWS,
    "environments and rewards": PLAYS | {"rewards": ["by_turn"], "beta": 0.1, "completion_length_counts": "policy"},
    "environments gigpo": PLAYS | {"advantage_estimator": "gigpo"},
    "environments process": PLAYS | PROCESS,
    "environments ahead": PLAYS | AHEAD | {"environment_waves": "turn"},
    "environments dynamic": PLAYS | {"dynamic_sampling": "environment", "dynamic_sampling_max_rounds": 2},
    "environments evaluation": PLAYS | EVALUATED,
    "environments isolated": ISOLATED,
    "environments isolated ahead": ISOLATED | AHEAD,
    "tools": TOOLS | {"tools": ["add"]},
    "tools trl": TOOLS | {"tools": ["add"], "loss_defaults": "trl"},
    "environment factory": TOOLS | {"environment_factory": "Counter"},
    "dynamic": DYNAMIC | WINDOWS,
    "dynamic process": DYNAMIC | PROCESS,
    "dynamic ahead": DYNAMIC | AHEAD,
    "top_p": {"top_p": 0.7, "beta": 0.1} | WINDOWS,
    "top_k": {"top_k": 5} | OFF_POLICY,
    "top_k trl": {"top_k": 5, "loss_defaults": "trl"},
    "top_p process": {"top_p": 0.7} | PROCESS,
    "top_p ahead": {"top_p": 0.7, "top_k": 20} | AHEAD,
    "top_p dynamic": {"top_p": 0.7} | DYNAMIC,
    "top_k environments trl": {"top_k": 10, "loss_defaults": "trl"} | PLAYS,
    "top_p evaluation": {"top_p": 0.7} | EVALUATED,
    **{f"images {family}": {"images": family} | SEES for family in ("llava", "qwen2_5_vl", "gemma3")},
    "images beta": {"images": "idefics3", **SEES, "beta": 0.1, "loss_defaults": "trl"},
    "images dynamic": {"images": "llava", **DYNAMIC, **SEES},
    "mask truncated": {"mask_truncated_completions": True} | WINDOWS,
    "mask truncated trl": {"mask_truncated_completions": True, "loss_defaults": "trl"},
    "top entropy": {"top_entropy_quantile": 0.5} | OFF_POLICY,
    "entropy bonus": {"entropy_coef": 0.01} | OFF_POLICY,
    "adaptive entropy": ADAPTIVE,
    "off-policy mask": {"off_policy_mask_threshold": 0.001} | OFF_POLICY,
    "old logps sampler": {"old_logps": "sampler"} | OFF_POLICY,
    "evaluation": EVALUATED | WINDOWS,
    "none and weights": {"rewards": ["count_a", "some_none"], "reward_weights": [1.0, 0.5]} | OFF_POLICY,
    "missing rewards zero": {"rewards": ["count_a", "some_none"], "missing_rewards": "zero"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum", "rewards": ["count_a", "some_none", "length"]},
    "named rewards": {"rewards": [SCHEDULED, "length"], "reward_workers": 0},
    "zero advantages": {"rewards": ["often_silent"]} | WINDOWS,
    "zero advantages computed": {"rewards": ["often_silent"], "skip_zero_advantages": False} | WINDOWS,
    "sharing off": {"shared_prefix": "false"} | WINDOWS,
    "pieces": {"micro_batch_tokens": 40, "beta": 0.1},
    "pieces off": {"micro_batch_tokens": 40, "shared_prefix": "false"},
    "resume": SAVED | WINDOWS | {"beta": 0.1},
    "resume dynamic": SAVED | DYNAMIC | OFF_POLICY | {"resume_at": 3},
    "resume ahead": SAVED | AHEAD | {"rollout_ahead": 2, "max_steps": 5},
    "resume ahead dynamic": SAVED | AHEAD | DYNAMIC,
    "resume environments": SAVED | PLAYS | OFF_POLICY | {"resume_at": 3},
    "resume evaluation": SAVED | EVALUATED | OFF_POLICY,
}
DISTRIBUTED = [
    "windows",
    "beta",
    "loss reinforce_pp",
    "trajectories",
    "environments",
    "dynamic",
    "top_p",
    "ahead beta",
]
DISTRIBUTED += ["dynamic ahead", "named rewards", "evaluation", "mask truncated", "resume", "lora beta", "trl"]
ON_VLLM = {"use_vllm": True, "vllm_server_timeout": 90.0, "vllm_gpu_memory_utilization": 0.1}
COLOCATE, SERVER = ON_VLLM | {"vllm_mode": "colocate"}, ON_VLLM | {"vllm_mode": "server"}
VLLM = {
    "vllm colocate windows": COLOCATE | WINDOWS,
    "vllm colocate top_p": COLOCATE | {"top_p": 0.7, "top_k": 20, "beta": 0.1},
    "vllm colocate dynamic": COLOCATE | DYNAMIC,
    "vllm colocate environments": COLOCATE | PLAYS,
    "vllm server windows": SERVER | WINDOWS,
    "vllm server ahead": SERVER | {"rollout_ahead": 1},
    "vllm server top_p dynamic": SERVER | DYNAMIC | {"top_p": 0.7, "top_k": 20},
    "vllm server environments ahead": SERVER | PLAYS | {"rollout_ahead": 1, "environment_waves": "turn"},
    "vllm server sampler": SERVER | OFF_POLICY | {"old_logps": "sampler"},
    "vllm server evaluation": SERVER | EVALUATED,
}


# Rewards and rollouts; those of `support.tiny` and `support.trainers` are found by name too.


def some_none(completions, **_):
    return [None if len(text) % 3 == 0 else sum(map(ord, text)) % 97 / 97 for text in completions]


def often_silent(completions, log_extra, log_metric, **_):
    log_extra("letters", [len(completion) for completion in completions])
    log_metric("longest", float(max(map(len, completions))))
    return [float("e" in completion) for completion in completions]


def of_images(completions, images, **_):
    return [len(completion[0]["content"]) * bool(seen) for completion, seen in zip(completions, images, strict=True)]


def of_messages(completions, **_):
    return [sum(len(message["content"]) for message in completion) / 50 for completion in completions]


def by_turn(trajectory, **_):
    return [[turn.reward for turn in made.turns] for made in trajectory]


def with_logprobs(prompts, trainer):
    made = trainers.scripted_rollout(prompts, trainer)
    return made | {"logprobs": [[-2.0 - token % 7 / 4 for token in ids] for ids in made["completion_ids"]]}


def named(name):
    """Return the function of that name, or an entry of rewards with its function."""
    if isinstance(name, dict):
        return name | {"func": named(name["name"])}
    return next(vars(place)[name] for place in (sys.modules[__name__], tiny, trainers, worlds) if name in vars(place))


# Runs.


class Forked(subprocess.Popen):
    """A process that samples as a fork, which need not import anything."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, *rest):
        if not isinstance(args, list) or "process.child" not in "".join(args):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)
        self.pid = os.fork()
        self._child_created = True
        if not self.pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *pass_fds}:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            sys.argv = args[2:]
            try:
                exec(args[2], {})
            finally:
                os._exit(0)


class Script(LogitsProcessor):
    """Leaves one token to draw: a call of a tool in the first turn, and an end in the second."""

    def __init__(self, prompts, tokenizer):
        self.width, start = prompts.shape[1], tokenizer.convert_tokens_to_ids("<|im_start|>")
        calls = [speakers.called("add", number=place + 1) for place in range(len(prompts))]
        ends = ["done<|im_end|>" if place % 2 else "<|im_end|>" for place in range(len(prompts))]
        is_first = [ids.count(start) <= 2 for ids in prompts.tolist()]
        texts = [call if first else end for call, end, first in zip(calls, ends, is_first, strict=True)]
        self.said = [[*ids, tokenizer.pad_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def __call__(self, ids, scores):
        """Return scores of which one is finite in each row."""
        place, forced = ids.shape[1] - self.width, torch.full_like(scores, -torch.inf)
        for row, said in zip(forced, self.said, strict=True):
            row[said[min(place, len(said) - 1)]] = 0.0
        return forced


def speak(model, tokenizer):
    """Let a model say what `Script` leaves it."""
    own = model.generate

    def generate(input_ids, **options):
        return own(
            input_ids=input_ids, logits_processor=LogitsProcessorList([Script(input_ids, tokenizer)]), **options
        )

    model.generate = generate


def build(folder, *, rewards=("unit_interval", "length"), images=None, speaks=False, peft=None, **given):
    """Return the trainer of a configuration."""
    settings = tiny.TRAINING | {"max_steps": 4, "learning_rate": 0.01, "log_completions": True} | given
    settings["per_device_train_batch_size"] //= world_size()
    passed = ("rollout_func", "environments", "tools", "environment_factory", "reward_workers")
    more = {name: settings.pop(name) for name in passed if name in settings}
    more |= {name: named(more[name]) for name in ("rollout_func", "environment_factory") if name in more}
    more |= {"tools": [named(name) for name in more["tools"]]} if "tools" in more else {}
    rows, words = tiny.prompts(), tiny.tokenizer()
    model = settings.pop("model", None) or tiny.model()
    if images:
        rows, words = seeing.rows((1, 2, 0, 1) * 2), seeing.processor(images)
        model = seeing.model(images, dtype=torch.float32)
    elif speaks:
        words = speakers.tokenizer()
        rows, model = speakers.rows(start=list(range(8))), speakers.model(words)
        speak(model, words)
    held = tiny.prompts(4)
    if "environments" in more:
        rows, held = interrupted.conversations(rows), interrupted.conversations(held)
    return GRPOExtTrainer(
        model,
        [named(name) for name in rewards] or None,
        GRPOExtConfig(output_dir=str(folder), num_completions_to_print=0, **settings),
        rows,
        eval_dataset=held if "eval_strategy" in settings else None,
        processing_class=words,
        peft_config=None if peft is None else LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **peft),
        **more,
    )


class Tables(TrainerCallback):
    """Keeps the table of completions after each step."""

    def __init__(self, trainer):
        self.trainer, self.kept = trainer, []

    def on_step_end(self, *args, **kwargs):
        table = {name: rows for name, rows in self.trainer._logs.items() if name != "images"}
        self.kept.append(
            json.loads(json.dumps(table, default=lambda rows: [*rows] if hasattr(rows, "__iter__") else str(rows)))
        )


def trained(folder, resume=None, **settings):
    """Return what is compared of a run."""
    trainer = build(folder, **settings)
    tables = Tables(trainer)
    trainer.add_callback(tables)
    trainer.train(resume_from_checkpoint=resume)
    trainer.close_rewards()
    found = hashlib.sha256()
    for name, parameter in trainer.model.named_parameters():
        found.update(name.encode() + parameter.detach().contiguous().numpy().tobytes())
    log = [json.loads(row) for row in interrupted.without_clocks(trainer.state.log_history)]
    return {"weights": found.hexdigest(), "log": log, "tables": tables.kept}


def line_of(name, folder):
    """Return the line of a configuration; an error is a figure too."""
    settings = dict(CASES[name])
    resumed = settings.pop("resume_at", None)
    try:
        line = trained(folder / "whole", **settings)
        if resumed is not None:
            line["resumed"] = trained(folder / "resumed", str(folder / "whole" / f"checkpoint-{resumed}"), **settings)
    except Exception as error:
        traceback.print_exc()
        line = {"error": f"{type(error).__name__}: {error}"}
    return {"name": name, **line}


def flat(value, path=""):
    """Yield each figure of a line, with its place."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value)


def compare(*files, most=6):
    """Print which figures of which configurations differ; return their number."""
    lines = [
        {line["name"]: dict(flat(line)) for line in map(json.loads, Path(file).read_text().splitlines())}
        for file in files
    ]
    different = 0
    for name in dict.fromkeys([*lines[0], *lines[1]]):
        old, new = (one.get(name, {}) for one in lines)
        paths = [path for path in dict.fromkeys([*old, *new]) if old.get(path) != new.get(path)]
        different += bool(paths)
        if "error" in old and "error" in new:
            print(f"{name}: compares nothing, both end with {new['error']}"[:300])
        for path in paths[:most]:
            print(f"{name}: {path}: {old.get(path)} -> {new.get(path)}"[:300])
        if len(paths) > most:
            print(f"{name}: {len(paths)} figures differ in all")
    print(f"{different} of {len({*lines[0], *lines[1]})} configurations differ")
    return different


def run(names, out, folder):
    """Train configurations and append their lines; of several processes, the first."""
    prefix = "two processes: " if world_size() > 1 else ""
    for number, name in enumerate(names):
        begun = time.monotonic()
        line = line_of(name, folder / str(number)) | {"name": f"{prefix}{name}"}
        if os.environ.get("RANK", "0") == "0":
            with out.open("a") as file:
                print(json.dumps(line), file=file)
            print(f"{line['name']}: {time.monotonic() - begun:.1f} s, {line.get('error', 'trained')}", file=sys.stderr)


def run_vllm(names, out, folder):
    """Train each configuration with vLLM in a process of its own, beside one server for all."""
    model = tiny.save(folder / "model", **vllm_runs.HEADS)
    server = vllm_runs.Server(folder, model)
    server.start()
    server.wait()
    given = json.dumps({"model": model, "vllm_server_port": server.port})
    for name in names:
        modules = {"modules": forks.WITH_VLLM} if "colocate" in name else {}
        line = (__file__, "--out", out, "--only", name, "--vllm", given)
        print(processes.forked(*line, **modules, PYTHONWARNINGS="ignore").stdout[-3000:])
    server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--vllm", nargs="?", const="")
    parser.add_argument("--compare", nargs=2)
    asked = parser.parse_args()
    if asked.compare:
        sys.exit(bool(compare(*asked.compare)))
    cases = VLLM if asked.vllm is not None else DISTRIBUTED if world_size() > 1 else CASES
    names = [name for name in cases if asked.only in name]
    if asked.list:
        sys.exit("\n".join(names))
    subprocess.Popen = Forked
    with tempfile.TemporaryDirectory() as folder:
        own = Path(os.environ.get("GOLDEN_FOLDER", folder))
        if asked.vllm == "":
            run_vllm(names, asked.out.absolute(), own)
            return
        if asked.vllm:
            CASES.update({name: settings | json.loads(asked.vllm) for name, settings in VLLM.items()})
        run(names, asked.out, own)
        if asked.vllm is None and world_size() == 1:
            line = (__file__, "--out", asked.out.absolute(), "--only", asked.only)
            print(processes.run_forked(*line, config=processes.CONFIG, GOLDEN_FOLDER=f"{folder}/two"))


if __name__ == "__main__":
    main()
