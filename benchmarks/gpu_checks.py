"""Correctness on a device, for `make bench-gpu`: `gpu_checks.py CHECK DEVICE` prints the outcome as a line of JSON."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.flash import EXAMPLE, TOLERANCE, FlashAttention
from grpo_ext.packing.kernels import by_sdpa
from grpo_ext.packing.merged import MergedAttention, calls_of
from step_overhead import CHARACTERS, tokenizer

DRIFT = 0.1
"""Nats between the sampler's log-probabilities and the policy's: what `rollout_drift` allows in bfloat16."""
SERVER_SECONDS = 80


def attention(device: str) -> str:
    """Compare the packed attention with dense attention in float32, values and gradients."""

    def packed(query: Any, key: Any, value: Any, segments: Any, scale: float) -> Any:
        if device == "cuda":
            return FlashAttention.apply(query, key, value, segments, scale)
        return MergedAttention.apply(query, key, value, calls_of(segments, None), scale, None)

    name, dtype = ("flash kernel", torch.bfloat16) if device == "cuda" else ("merged attention", torch.float32)
    bound, worst, g = TOLERANCE if device == "cuda" else 1e-5, 0.0, torch.Generator().manual_seed(0)
    for size in (64, 128):
        drawn = [torch.randn(1, heads, 509, size, generator=g).to(device, dtype) for heads in (4, 2, 2)]
        results = []
        for function, exact in ((packed, dtype), (by_sdpa, torch.float32)):
            leaves = [x.detach().to(exact).requires_grad_() for x in drawn]
            out = function(*leaves, EXAMPLE, size**-0.5)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            results.append([out, *torch.autograd.grad(out, leaves, grad.to(exact))])
        worst = max(worst, *(((f.float() - e).norm() / e.norm()).item() for f, e in zip(*results, strict=True)))
    assert worst < bound, f"off by {worst:.2g}, where {bound:.2g} is allowed"
    return f"{name} in {dtype}: off by {worst:.1e} of the norm at most (allowed: {bound:.0e})"


# Training.


def network(device: str) -> LlamaForCausalLM:
    """Heads of 64 dimensions on a GPU, as kernels want them."""
    torch.manual_seed(0)
    width, layers = (512, 8) if device == "cuda" else (64, 2)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Differ between completions of a prompt."""
    return [sum(c in "aeiou" for c in text) + len(text) / 100 for text in completions]


def trainer(device: str, model: Any, **settings: Any) -> GRPOExtTrainer:
    """A trainer of a few steps."""
    settings = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": device == "cpu", "bf16": device == "cuda", "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "per_device_train_batch_size": 8,
        "num_generations": 4, "max_completion_length": 32 if device == "cuda" else 8, "max_steps": 3,
    } | settings  # fmt: skip
    adapter = settings.pop("peft_config", None)
    rows = Dataset.from_list([{"prompt": f"a question about {letter}: " * 4} for letter in "abcdefgh"])
    return GRPOExtTrainer(
        model, [vowels], GRPOExtConfig(**settings), rows, processing_class=tokenizer(), peft_config=adapter
    )


def on_policy(device: str) -> str:
    """See that at learning rate 0 the log-ratio is exactly 0, with shared prompts and terms of the loss."""
    found: list[float] = []
    tensors = Objective.tensors

    def spy(self: Objective, *args: Any) -> Any:
        result = tensors(self, *args)
        found.append(result["log_ratio"].detach().abs().max().item())
        return result

    features = {"beta": 0.05, "kl_placement": "loss", "entropy_coef": 0.01, "shared_prefix": "true"}
    windows = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "gradient_checkpointing": True}
    with patch.object(Objective, "tensors", spy):
        trainer(device, network(device), learning_rate=0.0, **features, **windows).train()
    assert found, "no loss was computed"
    assert max(found) == 0.0, f"the log-ratio is {max(found):.2g} at learning rate 0"
    return f"exactly 0 in {len(found)} micro-batches"


def sharing(device: str) -> str:
    """Compare log-probabilities with and without shared prompts with those in float32, and both gradients."""
    g = torch.Generator().manual_seed(0)
    prompt, length = (512, 64) if device == "cuda" else (24, 8)
    ids = torch.randint(3, len(CHARACTERS), (8, prompt + length), generator=g)
    ids[:, :prompt] = ids[:1, :prompt]
    mask = (torch.arange(prompt + length) < prompt + torch.randint(2, length + 1, (8, 1), generator=g)).long()
    ids, mask, live = ids.to(device), mask.to(device), mask[:, prompt:].bool().to(device)
    logits = network(device).float().to(device)(input_ids=ids, attention_mask=mask).logits[:, prompt - 1 : -1]
    exact = logits.log_softmax(-1).gather(-1, ids[:, prompt:, None])[..., 0].detach()
    off, gradients = {}, {}
    for shared in ("true", "false"):
        made = trainer(device, network(device), shared_prefix=shared)
        model = made.model.to(device)
        logps = made._get_per_token_logps_and_entropies(model, ids, mask, length)[0]
        assert made.sharing.possible == (shared == "true"), made.sharing.describe()
        off[shared] = (logps.float() - exact)[live].abs().mean().item()
        (logps * live).sum().backward()
        gradients[shared] = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    apart = ((gradients["true"] - gradients["false"]).norm() / gradients["false"].norm()).item()
    bound = 0.05 if device == "cuda" else 1e-4
    said = f"{off['true']:.1e} nats off float32, plain {off['false']:.1e}; gradients {apart:.1e} apart"
    assert off["true"] < 1.5 * off["false"] + 1e-6, said
    assert apart < bound, said
    return said


# vLLM.


def saved() -> str:
    """Save the model to a folder, from which vLLM reads it."""
    folder = tempfile.mkdtemp()
    network("cuda").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def drift(model: Any, **settings: Any) -> str:
    """Train three steps that change the weights; the sampler's log-probabilities must remain the policy's."""
    made = trainer("cuda", model, use_vllm=True, learning_rate=1e-3, vllm_gpu_memory_utilization=0.2, **settings)
    made.train()
    found = [log["sampling/drift_mean"] for log in made.state.log_history if "sampling/drift_mean" in log]
    assert found, "no drift was measured"
    assert max(found) < DRIFT, f"sampler and policy differ by {max(found):.2g} nats a token"
    return f"sampler and policy differ by at most {max(found):.1e} nats a token, after {len(found)} pushes"


def colocate(_: str) -> str:
    """Train with vLLM in this process, asleep while the policy trains."""
    return drift(saved(), vllm_mode="colocate", vllm_enable_sleep_mode=True, vllm_max_model_length=512)


def qlora(_: str) -> str:
    """Train an adapter on a base in 4 bits, whose sums are pushed to vLLM."""
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        saved(), quantization_config=quantized, dtype=torch.bfloat16, device_map={"": 0}
    )
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return drift(model, vllm_mode="colocate", vllm_max_model_length=512, peft_config=adapter)


@contextmanager
def served(model: str, port: int) -> Any:
    """`grpo-ext serve` on the second GPU."""
    folder = Path(tempfile.mkdtemp())
    (folder / "train.jsonl").write_text('{"prompt": "a1:", "answer": "1"}\n' * 8)
    recipe = {
        "model_name_or_path": model, "dataset_name": str(folder / "train.jsonl"), "reward_funcs": ["accuracy"],
        "output_dir": str(folder), "loss_type": "grpo", "use_vllm": True, "vllm_mode": "server",
        "vllm_server_port": port, "vllm_weight_transfer": "nccl", "vllm_gpu_memory_utilization": 0.2,
        "max_completion_length": 512,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    line = [sys.executable, "-m", "grpo_ext.commands.cli", "serve", "--config", str(folder / "recipe.yaml")]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(line, env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + SERVER_SECONDS
        while not _healthy(port):
            assert server.poll() is None, "the server ended: " + (folder / "log").read_text()[-300:]
            assert time.monotonic() < deadline, f"the server was not up after {SERVER_SECONDS} s"
            time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait(20)


def _healthy(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False


def server(_: str) -> str:
    """Train on the first GPU with a server on the second, which gets the weights by NCCL."""
    model, port = saved(), 8765
    with served(model, port):
        return drift(model, vllm_mode="server", vllm_server_port=port, vllm_weight_transfer="nccl")


CHECKS = {f.__name__: f for f in (attention, on_policy, sharing, server, colocate, qlora)}


def main() -> None:
    """Print the outcome; any error is one."""
    check, device = sys.argv[1:]
    torch.set_num_threads(1)
    try:
        outcome, detail = "passed", CHECKS[check](device)
    except Exception as error:
        outcome, detail = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]
    print(json.dumps({"outcome": outcome, "detail": detail}), flush=True)


if __name__ == "__main__":
    main()
