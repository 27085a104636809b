"""The memory estimate of `grpo-ext check` beside the measured peak of a step: `python benchmarks/memory_estimate.py`.

Random Llamas on a CPU, one step of full-length completions in groups of eight; each row is a process of its own. The
peak is that of resident memory over the state before the first forward, so gradients and activations only: the first
step makes Adam's moments when its activations are gone. Needs Linux. Writes results/memory_estimate.json.
"""

import ctypes
import gc
import json
import logging
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

RESULT = Path(__file__).parent / "results" / "memory_estimate.json"
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
ROWS = {  # name: sizes, completions, tokens of each, dtype, gradient checkpointing
    "small, float32": (SMALL, 32, 192, "float32", False),
    "small, float32, checkpointed": (SMALL, 32, 192, "float32", True),
    "large, float32": (LARGE | {"vocab_size": 16_384}, 16, 160, "float32", False),
    "large, float32, checkpointed": (LARGE | {"vocab_size": 16_384}, 16, 160, "float32", True),
}


def resident_peak() -> int:
    """Return the largest resident memory of this process since it was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run(sizes: dict[str, int], completions: int, tokens: int, dtype: str, checkpointed: bool) -> dict[str, float]:
    """Train one step and return its peak and the estimate, in MiB."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from grpo_ext.commands.memory import Shape, estimate
    from grpo_ext.quickstart.model import build_tokenizer

    class Measured(GRPOExtTrainer):
        """Resets the peak after the rollout."""

        def _prepare_inputs(self, inputs):
            prepared = super()._prepare_inputs(inputs)
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            self.before = psutil.Process().memory_info().rss
            Path("/proc/self/clear_refs").write_text("5")
            return prepared

    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    tokenizer = build_tokenizer()
    heads = {"num_key_value_heads": sizes["num_attention_heads"] // 2, "bos_token_id": None, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**({"vocab_size": len(tokenizer)} | sizes | heads)))
    model.to(getattr(torch, dtype)).generation_config.suppress_tokens = [1]  # no completion ends early
    prompt = "a" * 34
    args = GRPOExtConfig(
        tempfile.mkdtemp(), loss_type="grpo", use_cpu=True, bf16=False, max_steps=1, num_generations=8,
        per_device_train_batch_size=completions, max_completion_length=tokens, gradient_checkpointing=checkpointed,
        skip_zero_advantages=False, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Measured(
        model, [lambda completions, **_: [float(i % 3) for i in range(len(completions))]], args,
        Dataset.from_list([{"prompt": prompt}] * 32), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    measured, number = resident_peak() - trainer.before, sum(p.numel() for p in model.parameters())
    parts = estimate(args, dtype, number, number, Shape.of(model.config), len(prompt))
    expected = parts["gradients"] + parts["activations"]
    mib = {"measured": round(measured / 2**20), "estimate": round(expected / 2**20)}
    return {"parameters": number, **mib, "ratio": round(expected / measured, 2)}


def main() -> None:
    """Measure each row in a process of its own, and write the results."""
    if len(sys.argv) > 1:
        print(json.dumps(run(*ROWS[sys.argv[1]])))
        return
    found = {}
    for name in ROWS:
        line = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True).stdout
        found[name] = json.loads(line.splitlines()[-1])
        print(name, found[name], flush=True)
    about = {"torch": version("torch"), "threads": 1}
    RESULT.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
