"""What a model learns from vLLM and from transformers, the rest of the recipe the same: `make bench-sampler`.

The short answers of sampler_training.py, each digit the one before plus 3, by a model that has seen demonstrations
with errors; vLLM, its CPU build, is in the training process. Runs differ in the seed, which has its own model, in the
settings (a LoRA whose adapter alone is pushed; `top_p` without `top_k`) and in the engine; each is a process of its
own. With images, a tiny Idefics3 names the picture that an environment shows after its first answer. Writes
results/sampler_engines.json; runs that it has are not made again.
"""

import itertools
import json
import logging
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import LlamaForCausalLM

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from sampler_training import SHORT, TOKENIZER, TRAINING, Engine, reward, right, warm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import painters, seeing, tiny
from support.vllm_runs import HEADS

RESULT = Path(__file__).parent / "results" / "sampler_engines.json"
STEPS, LIMIT = 40, SHORT + 2
SETTINGS = {"vllm_push: adapter": {"learning_rate": 3e-3}, "top_p: 0.9": {"learning_rate": 1e-3, "top_p": 0.9}}
IMAGES = "images of an environment"
ENGINES = {"transformers": {}, "vLLM": {"use_vllm": True, "vllm_mode": "colocate"}}
FIGURES = ("sampling/drift_max", "sampling/kept", "sampling/weight_sync_mib")
QUESTIONS = [f"s{a}{b}" for a in range(10) for b in range(10)]


def score(model: LlamaForCausalLM, folder: str) -> float:
    """Return the share of right digits of a model's own answers, ten to each question."""
    engine = Engine(folder, None, draws=1)
    engine.load_weights(list(model.named_parameters()))
    asked = [{"prompt_token_ids": TOKENIZER(question)["input_ids"]} for question in QUESTIONS] * 10
    answers = engine.generate(asked, SimpleNamespace(max_tokens=LIMIT), use_tqdm=False)
    texts = [TOKENIZER.decode(answer.outputs[0].token_ids, skip_special_tokens=True) for answer in answers]
    return statistics.mean(map(right, QUESTIONS * 10, texts))


def show(engine: str, seed: int) -> dict:
    """Train by pictures once; return the shares of right answers in the first step and in the last ten."""
    sizes = {"max_completion_length": 60, "completion_length_counts": "policy", "num_generations": 8}
    rates = {"max_steps": STEPS, "learning_rate": 2e-3, "per_device_train_batch_size": 32, "seed": seed}
    args = GRPOExtConfig(tempfile.mkdtemp(), **tiny.TRAINING | sizes | rates | ENGINES[engine], trust_remote_code=True)
    folder = seeing.save(Path(tempfile.mkdtemp()), ends=16.0, **HEADS, head_dim=32)
    rows, words = seeing.coloured(16).remove_columns("image"), seeing.processor("idefics3")
    trainer = GRPOExtTrainer(folder, None, args, rows, processing_class=words, environments=[painters.Shown])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [round(entry["reward"], 3) for entry in logs]
    return {
        "settings": IMAGES,
        "engine": engine,
        "seed": seed,
        "before": rewards[0],
        "after": statistics.mean(rewards[-10:]),
        "figures": _figures(logs),
        "rewards": rewards,
    }


def _figures(logs: list[dict]) -> dict[str, float]:
    largest = {name: max(entry[name] for entry in logs if name in entry) for name in FIGURES if name in logs[-1]}
    return {name: float(f"{value:.3g}") for name, value in largest.items()}


def run(settings: str, engine: str, seed: int, folder: str) -> dict:
    """Train once; return the shares before and after, the rewards, and by what sampler and policy differed."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    if settings == IMAGES:
        return show(engine, seed)
    adapter = settings == "vllm_push: adapter"
    args = GRPOExtConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        max_completion_length=LIMIT,
        seed=seed,
        **TRAINING,
        **SETTINGS[settings] | ENGINES[engine] | ({"vllm_push": "adapter"} if adapter and engine == "vLLM" else {}),
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if adapter else None
    rows = Dataset.from_list([{"prompt": question} for question in QUESTIONS])
    trainer = GRPOExtTrainer(folder, [reward], args, rows, processing_class=TOKENIZER, peft_config=lora)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "settings": settings,
        "engine": engine,
        "seed": seed,
        "before": score(LlamaForCausalLM.from_pretrained(folder), folder),
        "after": score(trainer.model.merge_and_unload() if adapter else trainer.model, folder),
        "figures": _figures(logs),
        "rewards": [round(entry["reward"], 3) for entry in logs],
    }


def main() -> None:
    """Make the runs that are missing, and write the results after each."""
    torch.set_num_threads(1)
    runs = json.loads(RESULT.read_text()) if RESULT.exists() else []
    made = {(its["settings"], its["engine"], its["seed"]) for its in runs}
    fresh = multiprocessing.get_context("spawn")
    for job in itertools.product([*SETTINGS, IMAGES], ENGINES, range(3)):
        if job not in made:
            with ProcessPoolExecutor(1, fresh) as pool:
                runs.append(pool.submit(run, *job, warm(job[2])).result())
            RESULT.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
            print({key: value for key, value in runs[-1].items() if key != "rewards"}, flush=True)


if __name__ == "__main__":
    main()
