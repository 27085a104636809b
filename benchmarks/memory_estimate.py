"""The memory estimate of `grpo-ext check` beside the measured peak of a step: `python benchmarks/memory_estimate.py`.

Random Llamas on a CPU, one step of full-length completions in groups of eight. The peak is that of the tensors that
torch allocates between the rollout and the optimizer's step, by its profiler: gradients and activations. Writes
results/memory_estimate.json.
"""

import json
import logging
import tempfile
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
from grpo_ext.commands.memory import Shape, estimate
from grpo_ext.quickstart.model import build_tokenizer

RESULT = Path(__file__).parent / "results" / "memory_estimate.json"
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
LARGE |= {"vocab_size": 16_384}
CHECKPOINTED = {"gradient_checkpointing": True}
LORA = {"peft_config": LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")}
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
}  # fmt: skip
PROMPT = "a" * 34


class Measured(GRPOExtTrainer):
    """Profiles the memory of a step, from the end of its rollout on."""

    profiled: profile | None = None

    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        if self.profiled is None:
            self.profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiled.start()
        return prepared


class Until(TrainerCallback):
    """Ends the profile before Adam's moments are made."""

    def __init__(self, trainer: Measured) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.profiled.stop()


def peak(profiled: profile) -> int:
    """Return the most bytes that were allocated at a time, over those at the start."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def run(
    sizes: dict[str, int], completions: int, tokens: int, dtype: str, settings: dict[str, Any]
) -> dict[str, float]:
    """Train one step and return its peak and the estimate, in MiB."""
    torch.manual_seed(0)
    tokenizer, settings = build_tokenizer(), dict(settings)
    adapter = settings.pop("peft_config", None)
    heads = {"num_key_value_heads": sizes["num_attention_heads"] // 2, "bos_token_id": None, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**({"vocab_size": len(tokenizer)} | sizes | heads)))
    model.to(getattr(torch, dtype))
    args = GRPOExtConfig(
        tempfile.mkdtemp(), loss_type="grpo", use_cpu=True, bf16=False, max_steps=1, num_generations=8,
        per_device_train_batch_size=completions, max_completion_length=tokens, skip_zero_advantages=False,
        save_strategy="no", report_to="none", disable_tqdm=True, generation_kwargs={"suppress_tokens": [1]},
        **{"gradient_checkpointing": False} | settings,  # no completion ends early
    )  # fmt: skip
    trainer = Measured(
        model, [lambda completions, **_: [float(i % 3) for i in range(len(completions))]], args,
        Dataset.from_list([{"prompt": PROMPT}] * 64), processing_class=tokenizer,
        peft_config=adapter,
    )  # fmt: skip
    number, trained = (
        sum(p.numel() for p in trainer.model.parameters() if p.requires_grad or n) for n in (True, False)
    )
    trainer.add_callback(Until(trainer))
    trainer.train()
    measured = peak(trainer.profiled)
    parts = estimate(args, dtype, number, trained, Shape.of(model.config).with_adapter(model), len(PROMPT))
    expected = parts["gradients"] + parts["activations"]
    mib = {"measured": round(measured / 2**20), "estimate": round(expected / 2**20)}
    return {"parameters": number, **mib, "ratio": round(expected / measured, 2)}


def main() -> None:
    """Measure each row, and write the results."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found = {}
    for name, row in ROWS.items():
        found[name] = run(*row)
        print(name, found[name], flush=True)
    about = {"torch": version("torch"), "threads": 1}
    RESULT.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
