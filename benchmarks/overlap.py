"""Steps in turn and with `rollout_ahead`, side by side: `make bench-overlap`.

A Llama with random weights and ragged completions (each token ends its completion with the probability that the model
gives it), at learning rate 0. Each run has a process of its own and one thread; the sampler has another process and
another core. Runs alternate. A step is the time from the end of one to the end of the next, median over a run behind
its warm-up; ratios are those of runs of the same repeat, reported by median and range.

Parts:
    process: the transformers engine (`rollout_engine: process`), a load in which sampling takes as long as training.
    judge: the same with a reward that takes 2 s. With K = 1 it must fit into the training beside the sampling, with
        K = 2 it only has to be shorter than the training.
    server: a vLLM server on a CPU, server and trainer pinned to a core each.

`least` is the least time of a step: in turn the sum of sampling and training, as measured in turn; with
`rollout_ahead` the longer of both (and of the judge). Writes results/overlap.json, where parts that are not measured
stay as they are.
"""

import argparse
import json
import os
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RESULT = Path(__file__).parent / "results" / "overlap.json"
GENERATIONS, WARM_UP, JUDGE = 8, 2, 2.0
STARTED = 300
"""Seconds that a server may take to start."""

PROCESS = {"groups": 6, "prompt": 64, "completion": 128, "hidden": 192, "layers": 3}
HEAVY = {"groups": 12, "prompt": 192, "completion": 64, "hidden": 256, "layers": 4}
SERVER = {"groups": 6, "prompt": 64, "completion": 128, "hidden": 192, "layers": 3}
IN_TURN: dict[str, Any] = {}
AHEAD, FURTHER = {"rollout_ahead": 1}, {"rollout_ahead": 2}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "process": {
        "in turn": {"load": PROCESS, "settings": IN_TURN},
        "rollout_ahead: 1": {"load": PROCESS, "settings": AHEAD},
    },
    "judge": {
        "in turn": {"load": HEAVY, "settings": IN_TURN},
        "in turn, judge": {"load": HEAVY, "settings": IN_TURN, "judge": JUDGE},
        "rollout_ahead: 1, judge": {"load": HEAVY, "settings": AHEAD, "judge": JUDGE},
        "rollout_ahead: 2, judge": {"load": HEAVY, "settings": FURTHER, "judge": JUDGE},
    },
    "server": {
        "in turn": {"load": SERVER, "settings": IN_TURN},
        "rollout_ahead: 1": {"load": SERVER, "settings": AHEAD},
    },
}
"""Runs of each part, by name; the first is the one that others are compared with."""


# One run, in a process of its own.


def saved_model(folder: str, load: dict[str, int]) -> str:
    """Write model and tokenizer to a folder; the model ends a completion with a probability of about 1 in 50."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_ext.quickstart.model import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=load["hidden"], intermediate_size=3 * load["hidden"],
        num_hidden_layers=load["layers"], num_attention_heads=load["hidden"] // 32, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def vowels(completions, **_):
    return [sum(c in "aeiou" for c in text) / 10 for text in completions]


def judge_of(seconds: float) -> Callable[..., list[float]]:
    """Return a reward that takes its time."""

    def judge(completions, **_):
        time.sleep(seconds)
        return [len(text) / 100 for text in completions]

    return judge


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Train; return for each step behind the warm-up its seconds and its logged times."""
    import torch
    from transformers import TrainerCallback

    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from grpo_ext.quickstart.model import build_tokenizer

    torch.set_num_threads(1)
    load, draw = asked["load"], random.Random(0)
    rows = [{"prompt": "".join(draw.choices(string.ascii_lowercase, k=load["prompt"]))} for _ in range(400)]
    ended = list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as output:
        args = GRPOExtConfig(
            output, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
            disable_tqdm=True, per_device_train_batch_size=GENERATIONS, gradient_accumulation_steps=load["groups"],
            num_generations=GENERATIONS, max_completion_length=load["completion"], learning_rate=0.0,
            logging_steps=1, max_steps=WARM_UP + asked["steps"], seed=asked["seed"], **asked["settings"],
        )  # fmt: skip
        rewards = [vowels, *([judge_of(asked["judge"])] if "judge" in asked else [])]
        tokenizer = build_tokenizer()
        trainer = GRPOExtTrainer(asked["model"], rewards, args, rows, processing_class=tokenizer, callbacks=[Clock()])
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry][WARM_UP:]
    seconds = [end - begin for begin, end in zip(ended[WARM_UP - 1 :], ended[WARM_UP:], strict=False)]
    return {
        "seconds": seconds,
        "rollout": [entry["time/rollout"] for entry in logged],
        "rewards": [entry["time/rewards"] for entry in logged],
        "push": [entry.get("time/weight_push", 0.0) for entry in logged],
        "waited": [entry.get("overlap/waited", 0.0) for entry in logged],
    }


# The measurement.


@contextmanager
def server(model: str, port: int, load: dict[str, int], core: int | None) -> Iterator[None]:
    """Run `grpo-ext serve` on a core."""
    import requests

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n' * 8)
        recipe = {
            "model_name_or_path": model, "dataset_name": str(folder / "train.jsonl"), "reward_funcs": ["accuracy"],
            "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "use_vllm": True,
            "vllm_mode": "server", "vllm_server_port": port, "max_completion_length": load["completion"],
            "max_prompt_length": load["prompt"],
            # vLLM 0.31 on a CPU dies of a request with a seed whose prompt is cut over two steps
            "vllm_engine_kwargs": {"max_num_batched_tokens": 16384},
        }  # fmt: skip
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        line = [sys.executable, "-m", "grpo_ext.commands.cli", "serve", "--config", str(folder / "recipe.yaml")]
        with (folder / "log").open("wb") as log, on_core(core):
            process = subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + STARTED
            while not answers(requests, f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "log").read_text()[-5000:])
                time.sleep(0.5)
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{error}\nThe server: {(folder / 'log').read_text()[-5000:]}") from None
        finally:
            process.terminate()
            process.wait(60)


def answers(requests: Any, url: str) -> bool:
    """Return whether a server is up."""
    try:
        return bool(requests.get(url, timeout=2).ok)
    except requests.RequestException:
        return False


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Start processes on one core only; None: on any."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def in_process(asked: dict[str, Any], core: int | None) -> dict[str, Any]:
    """Run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, on_core(core):
        written = Path(folder) / "run.json"
        line = [sys.executable, __file__, "--run", json.dumps(asked), str(written)]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-5000:])
        found: dict[str, Any] = json.loads(written.read_text())
        return found


def least(settings: dict[str, Any], base: dict[str, Any], judge: float) -> float:
    """Return the least time of a step with these settings, by the times of sampling and training in turn."""
    rollout, training = parts_of(base)
    if ahead := settings.get("rollout_ahead", 0):
        return max(training, rollout + judge) if ahead == 1 else max(training, rollout, judge)
    return rollout + training + judge


def parts_of(run: dict[str, Any]) -> tuple[float, float]:
    """Return the median seconds of sampling, and of all that is neither sampling, scoring nor a push."""
    names = ("seconds", "rollout", "rewards", "push")
    training = [step - sum(rest) for step, *rest in zip(*(run[name] for name in names), strict=True)]
    return statistics.median(run["rollout"]), statistics.median(training)


def spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)]}


def measured(part: str, repeats: int, steps: int) -> dict[str, Any]:
    """Run each variant of a part `repeats` times, alternately."""
    variants, found = PARTS[part], dict[str, list[dict[str, Any]]]()
    first = next(iter(variants))
    load, cores = variants[first]["load"], sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model, port = saved_model(folder, load), free_port()
        pins = cores[:2] if part == "server" and len(cores) > 1 else [None, None]
        engine: dict[str, Any] = {"rollout_engine": "process"}
        if part == "server":
            engine = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": port}
        with server(model, port, load, pins[1]) if part == "server" else on_core(None):
            for repeat in range(repeats):
                for name in list(variants) if repeat % 2 == 0 else list(variants)[::-1]:
                    group = {"vllm_group_port": free_port()} if part == "server" else {}
                    asked = {**variants[name], "settings": {**engine, **group, **variants[name]["settings"]}}
                    asked |= {"model": model, "seed": repeat, "steps": steps}
                    one = in_process(asked, pins[0])
                    found.setdefault(name, []).append(one)
                    print(f"{part:8} {name:24} {statistics.median(one['seconds']):6.2f} s", flush=True)
    return summary(part, found) | {"repeats": repeats, "steps": steps}


def summary(part: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians of each variant, and its ratios to the first one and to the least time, paired by repeat."""
    variants = PARTS[part]
    first = next(iter(variants))
    rows = {}
    for name in variants:
        settings, judge = variants[name]["settings"], variants[name].get("judge", 0.0)
        pairs = [
            (base, its, statistics.median(its["seconds"])) for base, its in zip(found[first], found[name], strict=True)
        ]
        bounds = [least(settings, base, judge) for base, *_ in pairs]
        rows[name] = {
            "step_seconds": statistics.median(step for *_, step in pairs),
            "waited_seconds": statistics.median(x for _, its, _ in pairs for x in its["waited"]),
            "least_seconds": statistics.median(bounds),
            "step_over_least": spread([step / bound for (*_, step), bound in zip(pairs, bounds, strict=True)]),
            "first_over_step": spread([statistics.median(base["seconds"]) / step for base, _, step in pairs]),
        }
    sides = [parts_of(run) for run in found[first]]
    rollout, training = (statistics.median(side[i] for side in sides) for i in (0, 1))
    push = statistics.median(x for run in found[first] for x in run["push"])
    times = {"rollout_seconds": rollout, "training_seconds": training, "push_seconds": push}
    return {"load": variants[first]["load"], **times, "variants": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--run", nargs=2, metavar=("SETTINGS", "FILE"), help="one run; what this script calls itself by"
    )
    given = parser.parse_args()
    if given.run:
        Path(given.run[1]).write_text(json.dumps(run(json.loads(given.run[0]))))
        return
    written = json.loads(RESULT.read_text()) if RESULT.exists() else {"parts": {}}
    written |= {"machine": platform.machine(), **{name: version(name) for name in ("trl", "torch", "transformers")}}
    for part in given.parts:
        written["parts"][part] = measured(part, given.repeats, given.steps)
        RESULT.write_text(json.dumps(written, indent=2) + "\n")
    for part in given.parts:
        its = written["parts"][part]
        print(f"{part}: sampling {its['rollout_seconds']:.2f} s, training {its['training_seconds']:.2f} s")
        for name, row in its["variants"].items():
            ratios = f"{row['first_over_step']['median']:6.2f} x{row['step_over_least']['median']:6.2f} of the least"
            print(f"  {name:26}{row['step_seconds']:6.2f} s{ratios}")


if __name__ == "__main__":
    main()
