"""The memory estimate of `grpo-ext check` beside the measured peak of a step: `python benchmarks/memory_estimate.py`.

Random Llamas on a CPU, two steps of full-length completions in groups of eight. Measured are the tensors that torch
allocates, by its profiler: between the first step's rollout and its optimizer (gradients, copies of autocast,
activations), and at any time from the trainer's construction on, with the weights (the whole). With vLLM in the
process, its weights and cache are among them. Writes results/memory_estimate.json.
Words on the command line choose the rows whose names have them.
"""

import gc
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.commands.memory import estimate
from grpo_ext.commands.peaks import Shape
from grpo_ext.quickstart.model import build_tokenizer

RESULT = Path(__file__).parent / "results" / "memory_estimate.json"
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
LARGE |= {"vocab_size": 16_384}
QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4, "num_attention_heads": 14}
QWEN |= {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
MIXED = {"bf16": True}
CHECKPOINTED = {"gradient_checkpointing": True}
LORA = {"peft_config": LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")}
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
FULL_LENGTH = ({"suppress_tokens": [1]}, {"ignore_eos": True})
"""Keywords of generation by which no completion ends early: of transformers, of vLLM."""
ROWS: dict[str, tuple[dict[str, int], int, int, str, dict[str, Any]]] = {
    # name: sizes, completions of a micro-batch, tokens of each, dtype, settings
    "small": (SMALL, 32, 192, "float32", {}),
    "small, checkpointed": (SMALL, 32, 192, "float32", CHECKPOINTED),
    "small, prompts not shared": (SMALL, 32, 192, "float32", {"shared_prefix": "false"}),
    "large": (LARGE, 16, 160, "float32", {}),
    "large, checkpointed": (LARGE, 16, 160, "float32", CHECKPOINTED),
    "large, checkpointed, two micro-batches": (
        LARGE, 16, 160, "float32", CHECKPOINTED | {"gradient_accumulation_steps": 2},
    ),
    "large, checkpointed, entropy bonus": (LARGE, 16, 160, "float32", CHECKPOINTED | {"entropy_coef": 0.01}),
    "large, bfloat16": (LARGE, 16, 160, "bfloat16", {}),
    "large, bfloat16, checkpointed": (LARGE, 16, 160, "bfloat16", CHECKPOINTED),
    "large, LoRA": (LARGE, 16, 160, "float32", LORA),
    "large, LoRA, checkpointed": (LARGE, 16, 160, "float32", LORA | CHECKPOINTED),
    "large, LoRA, bfloat16": (LARGE, 16, 160, "bfloat16", LORA),
    "large, LoRA, bfloat16, checkpointed": (LARGE, 16, 160, "bfloat16", LORA | CHECKPOINTED),
    "Qwen2.5's proportions, autocast": (QWEN, 16, 96, "float32", MIXED),
    "Qwen2.5's proportions, autocast, checkpointed": (QWEN, 16, 96, "float32", MIXED | CHECKPOINTED),
    "Qwen2.5's proportions, autocast, LoRA": (QWEN, 16, 96, "float32", MIXED | LORA),
    "Qwen2.5's proportions, autocast, LoRA, checkpointed": (QWEN, 16, 96, "float32", MIXED | LORA | CHECKPOINTED),
    "Qwen2.5's proportions, autocast, LoRA, bfloat16": (QWEN, 16, 96, "bfloat16", MIXED | LORA),
    "large, vLLM colocated": (LARGE, 16, 160, "float32", VLLM),
    "Qwen2.5's proportions, autocast, vLLM colocated": (QWEN, 16, 96, "float32", MIXED | VLLM),
    "small, LoRA, checkpointed, 512 tokens in 8 micro-batches": (
        SMALL, 8, 512, "float32", LORA | CHECKPOINTED | {"gradient_accumulation_steps": 8},
    ),
}  # fmt: skip
PROMPT = "a" * 34


class Measured(GRPOExtTrainer):
    """Notes when the first step's rollout ends."""

    began = 0

    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        self.began = self.began or time.time_ns()
        return prepared


class Until(TrainerCallback):
    """Notes when the first step has its gradients, before Adam's moments are made."""

    ended = 0

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.ended = self.ended or time.time_ns()


def peaks(profiled: profile, began: int, ended: int) -> tuple[int, int]:
    """Return the most bytes over those at `began` until `ended`, and the most over those at the start at any time."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    levels = [(event.start_ns(), level) for event, level in zip(events, sizes(events), strict=True)]
    at_beginning = [level for time, level in levels if time <= began][-1]
    step = max(level for time, level in levels if began <= time <= ended) - at_beginning
    return step, max(level for _, level in levels)


def sizes(events) -> Iterator[int]:
    """Yield the bytes that are allocated after each event."""
    return accumulate(event.nbytes() for event in events)


def built(sizes: dict[str, int], dtype: str) -> tuple[LlamaForCausalLM, Any]:
    """Return a random model of some sizes, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    heads = {"num_key_value_heads": sizes["num_attention_heads"] // 2, "bos_token_id": None, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**({"vocab_size": len(tokenizer)} | heads | sizes)))
    return model.to(getattr(torch, dtype)), tokenizer


def from_folder(model: LlamaForCausalLM, tokenizer: Any) -> LlamaForCausalLM:
    """Return a model as it is read from a folder, where vLLM finds it too."""
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=model.dtype)


def run(
    sizes: dict[str, int], completions: int, tokens: int, dtype: str, settings: dict[str, Any]
) -> dict[str, float]:
    """Train two steps and return their peaks and the estimates, in MiB."""
    gc.collect()  # what an earlier row leaves would be freed in this one's profile
    settings = dict(settings)
    adapter = settings.pop("peft_config", None)
    model, tokenizer = built(sizes, dtype)
    if "use_vllm" in settings:
        model = from_folder(model, tokenizer)
    given = {
        "loss_type": "grpo", "use_cpu": True, "bf16": False, "max_steps": 2, "num_generations": 8,
        "per_device_train_batch_size": completions, "max_completion_length": tokens, "skip_zero_advantages": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
        "generation_kwargs": FULL_LENGTH["use_vllm" in settings],
    }  # fmt: skip
    args = GRPOExtConfig(tempfile.mkdtemp(), **given | settings)
    weights, until = sum(p.nbytes for p in model.parameters()), Until()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer = Measured(
            model, [lambda completions, **_: [float(i % 3) for i in range(len(completions))]], args,
            Dataset.from_list([{"prompt": PROMPT}] * 64), processing_class=tokenizer,
            peft_config=adapter, callbacks=[until],
        )  # fmt: skip
        trainer.train()
    number, trained = (
        sum(p.numel() for p in trainer.model.parameters() if p.requires_grad or n) for n in (True, False)
    )
    step, whole = peaks(profiled, trainer.began, until.ended)
    parts = estimate(args, dtype, number, trained, Shape.of(model.config).with_adapter(model), len(PROMPT))
    expected = parts["gradients"] + parts["autocast"] + parts["activations"]
    found = {"parameters": number, **compared("", step, expected)}
    return found | compared("whole_", whole + weights, sum(parts.values()))


def compared(name: str, measured: int, expected: int) -> dict[str, float]:
    """Return what was measured and estimated, in MiB, and their ratio."""
    mib = {f"{name}measured": round(measured / 2**20), f"{name}estimate": round(expected / 2**20)}
    return mib | {f"{name}ratio": round(expected / measured, 2)}


def main() -> None:
    """Measure the rows, and write the results after each."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    about = {"torch": version("torch"), "threads": 1}
    for name, row in ROWS.items():
        if all(word in name for word in sys.argv[1:]):
            known[name] = run(*row)
            print(name, known[name], flush=True)
            rows = {name: known[name] for name in ROWS if name in known}
            RESULT.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
