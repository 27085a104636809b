"""Correctness on a device, for `make bench-gpu`: `gpu_checks.py CHECK DEVICE` prints the outcome as a line of JSON."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:1] = [str(Path(__file__).parents[1] / "tests"), *sys.path[:1]]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate.utils.operations import recursively_apply
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.commands.memory import estimate
from grpo_ext.commands.peaks import Shape
from grpo_ext.objective.losses import losses
from grpo_ext.objective.objective import Objective
from grpo_ext.packing.flash import EXAMPLE, TOLERANCE, FlashAttention
from grpo_ext.packing.kernels import by_sdpa
from grpo_ext.packing.merged import MergedAttention, calls_of
from grpo_ext.rollout import transformers_engine
from step_overhead import CHARACTERS, tokenizer
from support import seeing

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
    """Differ between completions of a prompt; from 0 to 1, as some losses want."""
    return [min(1.0, sum(c in "aeiou" for c in text) / 50 + len(text) / 1000) for text in completions]


def trainer(device: str, model: Any, **settings: Any) -> GRPOExtTrainer:
    """A trainer of a few steps."""
    settings = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": device == "cpu", "bf16": device == "cuda", "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "per_device_train_batch_size": 8,
        "num_generations": 4, "max_completion_length": 32 if device == "cuda" else 8, "max_steps": 3,
    } | settings  # fmt: skip
    adapter, rewards = settings.pop("peft_config", None), settings.pop("rewards", [vowels])
    rows = Dataset.from_list([{"prompt": f"a question about {letter}: " * 4} for letter in "abcdefgh"])
    rows, words = settings.pop("rows", rows), settings.pop("processing_class", None) or tokenizer()
    return GRPOExtTrainer(model, rewards, GRPOExtConfig(**settings), rows, processing_class=words, peft_config=adapter)


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
    ids, mask, active = ids.to(device), mask.to(device), mask[:, prompt:].bool().to(device)
    logits = network(device).float().to(device)(input_ids=ids, attention_mask=mask).logits[:, prompt - 1 : -1]
    exact = logits.log_softmax(-1).gather(-1, ids[:, prompt:, None])[..., 0].detach()
    off, gradients = {}, {}
    for shared in ("true", "false"):
        made = trainer(device, network(device), shared_prefix=shared)
        model = made.model.to(device)
        logps = made._get_per_token_logps_and_entropies(model, ids, mask, length)[0]
        assert made.sharing.possible == (shared == "true"), made.sharing.describe()
        off[shared] = (logps.float() - exact)[active].abs().mean().item()
        (logps * active).sum().backward()
        gradients[shared] = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    apart = ((gradients["true"] - gradients["false"]).norm() / gradients["false"].norm()).item()
    bound = 0.05 if device == "cuda" else 1e-4
    said = f"{off['true']:.1e} nats off float32, plain {off['false']:.1e}; gradients {apart:.1e} apart"
    assert off["true"] < 1.5 * off["false"] + 1e-6, said
    assert apart < bound, said
    return said


def every_loss(device: str) -> str:
    """Compare the gradient of each loss in float32, with and without shared prompts, with float64 on a CPU."""
    apart = {}
    for name, shared in product(sorted(losses), ("true", "false")):
        settings = {"bf16": False, "max_steps": 1, "shared_prefix": shared, "loss_type": name, "beta": 0.1}
        made = trainer(device, network(device).float(), learning_rate=0.0, max_grad_norm=0.0, **settings)
        with patch.object(made, "_compute_loss", wraps=made._compute_loss) as called:
            made.train()
        inputs = called.call_args_list[0].args[1]
        found = gradient(made, inputs)
        for model in filter(None, [made.model, made.ref_model]):
            model.cpu().double()
        made.accelerator.state.device = torch.device("cpu")
        exact = gradient(
            made, recursively_apply(lambda x: x.cpu().double() if x.is_floating_point() else x.cpu(), inputs)
        )
        apart[f"{name}, {shared}"] = ((found - exact).norm() / exact.norm()).item()
    worst = max(apart, key=lambda name: apart[name])
    assert apart[worst] < 1e-3, f"{worst}: gradients {apart[worst]:.1e} apart"
    return f"{len(losses)} losses, gradients at most {apart[worst]:.1e} from float64's, relative ({worst})"


def gradient(made: GRPOExtTrainer, inputs: Any) -> torch.Tensor:
    """The gradient of a micro-batch, in float64 on the CPU."""
    made.model.zero_grad()
    made._compute_loss(made.model, inputs).backward()
    return torch.cat([p.grad.cpu().double().flatten() for p in made.model.parameters()])


def resume(device: str) -> str:
    """See that a run that resumes in the middle has the weights of one that was never stopped, to the bit."""
    wanted = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "full_determinism": True}

    def weights(**settings: Any) -> tuple[torch.Tensor, str]:
        settings = {"output_dir": tempfile.mkdtemp()} | wanted | settings
        made = trainer(device, network(device).float(), **settings)
        made.train(resume_from_checkpoint=made.args.resume_from_checkpoint)
        return torch.cat([p.detach().cpu().flatten() for p in made.model.parameters()]), settings["output_dir"]

    whole, folder = weights()
    resumed, _ = weights(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert torch.equal(whole, resumed), f"the weights are {(whole - resumed).abs().max():.1e} apart"
    torch.use_deterministic_algorithms(False)
    free = [weights(full_determinism=False)[0] for _ in range(2)]
    same = "the same bits" if torch.equal(*free) else f"{(free[0] - free[1]).abs().max():.1e} apart"
    return f"the same bits under full_determinism; two runs without it: {same}"


def rollouts(device: str) -> str:
    """Compare greedy completions with `generate`'s, and samples by one cast of the weights with a cast a token."""
    chosen = {}
    for engine in ("grouped", "generate"):
        kept: list[list[int]] = []

        def keep(completions: Any, completion_ids: Any, into: list = kept, **_: Any) -> list[float]:
            into += completion_ids
            return [0.0] * len(completions)

        greedy = {"temperature": 1e-4, "rollout_engine": engine, "bf16": False, "skip_zero_advantages": False}
        trainer(device, network(device).float(), rewards=[keep], learning_rate=0.0, **greedy).train()
        chosen[engine] = kept
    assert chosen["grouped"] == chosen["generate"], "greedy completions differ from generate's"
    made = trainer(device, network(device).float(), bf16=True)
    made.train()
    contexts, seeds = [[5, 6, 7] * 20] * 4 + [[8, 9] * 15] * 4, range(10)

    def sampled(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return [(row.ids, row.logps) for row in made.collector.policy.sample(contexts, [32] * 8)]

    once = [sampled(seed) for seed in seeds]
    with patch.object(transformers_engine, "samples_mixed", lambda *_: False):
        assert once == [sampled(seed) for seed in seeds], "the samples differ from those of a cast for each token"
    rows = len(chosen["grouped"])
    return f"{rows} greedy rows as by generate; one cast gives the samples of a cast a token, {len(seeds)} seeds"


def adapters(device: str) -> str:
    """Train an adapter in fp16, and one on a base in 4 bits, sampled by transformers."""
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    halves = {"fp16": True, "bf16": False} if device == "cuda" else {}
    told = []
    for kind in ("fp16", *["4 bits"] * (device == "cuda")):
        model = network(device).to(torch.float16 if halves else torch.float32) if kind == "fp16" else in_four_bits()
        made = trainer(device, model, peft_config=adapter, learning_rate=1e-3, **halves if kind == "fp16" else {})
        trained = {name: p.detach().clone() for name, p in made.model.named_parameters() if p.requires_grad}
        made.train()
        parameters = dict(made.model.named_parameters())
        assert any((parameters[name].cpu() != old.cpu()).any() for name, old in trained.items()), "it has not moved"
        assert all(parameters[name].isfinite().all() for name in trained), "not finite"
        assert {p.dtype for p in trained.values()} == {torch.float32}, "adapters are not in float32"
        norms = [log["grad_norm"] for log in made.state.log_history if "grad_norm" in log]
        told.append(f"{kind}: gradient norms {', '.join(f'{norm:.2g}' for norm in norms)}")
    return "; ".join(told)


def in_four_bits() -> Any:
    """The saved model with its linear layers in 4 bits."""
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(
        saved(), quantization_config=quantized, dtype=torch.bfloat16, device_map={"": 0}
    )


MEMORY = {
    "full": {}, "full, checkpointed": {"gradient_checkpointing": True}, "full, bfloat16": {"dtype": "bfloat16"},
    "LoRA": {"r": 16}, "LoRA, checkpointed": {"r": 16, "gradient_checkpointing": True},
    "LoRA, bfloat16, checkpointed": {"r": 16, "dtype": "bfloat16", "gradient_checkpointing": True},
}  # fmt: skip
OFF = 0.15
"""Share by which `check`'s estimate may miss the peak."""


def memory(device: str) -> str:
    """Compare the estimate with torch's peak in two steps of a 0.5 B model, 16 completions of 256 tokens."""
    ratios = {}
    for name, given in MEMORY.items():
        settings = dict(given)
        dtype, rank = settings.pop("dtype", "float32"), settings.pop("r", None)
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**HALF_A_BILLION)).to(getattr(torch, dtype))
        adapter = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None
        sizes = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 256, "max_steps": 2}
        full = {"generation_kwargs": {"suppress_tokens": [1]}, "skip_zero_advantages": False}
        full["gradient_checkpointing"] = False
        made = trainer(device, model, peft_config=adapter, **sizes | full | settings)
        parameters = list(made.model.parameters())
        number, trained = (sum(p.numel() for p in parameters if p.requires_grad or n) for n in (True, False))
        prompt = len(made.processing_class(made.train_dataset[0]["prompt"])["input_ids"])
        parts = estimate(made.args, dtype, number, trained, Shape.of(model.config).with_adapter(model), prompt)
        torch.cuda.reset_peak_memory_stats()
        made.train()
        ratios[name] = sum(parts.values()) / torch.cuda.max_memory_allocated()
        del made, model, parameters
        gc.collect()
        torch.cuda.empty_cache()
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    assert all(abs(ratio - 1) < OFF for ratio in ratios.values()), f"estimate / peak: {said}"
    return f"estimate / peak: {said}"


HALF_A_BILLION = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def recipe(device: str) -> str:
    """Train the quickstart by its launcher on the device, and compare its held-out accuracy before and after."""
    folder = tempfile.mkdtemp()
    line = [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "-m", "grpo_ext.train",
        "--config", "quickstart/grpo", "--output_dir", folder,
    ]  # fmt: skip
    steps = 60 if device == "cuda" else 2
    line += ["--use_cpu", str(device == "cpu").lower(), "--max_steps", str(steps)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert not done.returncode, (done.stderr.strip().splitlines() or ["no error"])[-1]
    files = [Path(folder, "evaluation", "held_out", f"step_{step}.json") for step in (0, steps)]
    before, after = (json.loads(path.read_text())["figures"]["avg@1"]["mean"] for path in files)
    assert device == "cpu" or after > before + 0.2, f"accuracy {before:.2f}, then {after:.2f}"
    return f"held-out accuracy {before:.2f}, then {after:.2f} after {steps} steps"


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


def adapter_alone(_: str) -> str:
    """Train an adapter that vLLM holds beside its base."""
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = {"vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_push": "adapter"}
    return drift(saved(), **settings, peft_config=adapter)


def images(_: str) -> str:
    """Train a tiny Idefics3 on prompts with images."""
    folder = Path(tempfile.mkdtemp())
    model = seeing.save(folder, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    data = {"rows": seeing.coloured(8), "processing_class": seeing.processor("idefics3"), "rewards": [seeing.named]}
    return drift(model, vllm_mode="colocate", bf16=False, trust_remote_code=True, **data)


def routes(_: str) -> str:
    """Train a mixture of experts by the routes that vLLM returns."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(CHARACTERS), hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    folder = tempfile.mkdtemp()
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return drift(folder, vllm_mode="colocate", vllm_max_model_length=512, replay_routes=True)


def qlora(_: str) -> str:
    """Train an adapter on a base in 4 bits, whose sums are pushed to vLLM."""
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return drift(in_four_bits(), vllm_mode="colocate", vllm_max_model_length=512, peft_config=adapter)


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


CHECKS = {f.__name__: f for f in (
    attention, on_policy, sharing, every_loss, resume, rollouts, adapters, memory, recipe, server, colocate, qlora,
    adapter_alone, images, routes,
)}  # fmt: skip


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
