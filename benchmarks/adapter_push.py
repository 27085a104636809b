"""How far vLLM samples from a LoRA policy in bfloat16 after a push: three ways of giving it the adapter.

`python benchmarks/adapter_push.py` (needs vLLM's CPU build; two minutes) writes benchmarks/results/adapter_push.json.
For adapters of several sizes: the mean |log p(vLLM) - log p(policy)| in nats per token, the policy in float32 with the
same weights, for base and adapter summed in float32 and rounded once, merged in bfloat16, and the adapter alone by
vLLM's LoRARequest. The base's own residue after the bfloat16 merge has been undone is beside it.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_ext.rollout.vllm.plugin import keep_weights_in_place
from grpo_ext.rollout.vllm.weights import Rounding, effective_weights

RESULT = Path(__file__).parent / "results" / "adapter_push.json"
SIZES = (1e-4, 1e-3, 1e-2)
"""Standard deviations of the elements of B; a step of Adam at a learning rate of 1e-4 moves each by as much."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LENGTH, ROWS, PUSHES = 64, 16, 200


def build() -> LlamaForCausalLM:
    """Return a base in bfloat16 with weights of the size that trained models have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.06,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().eval()


def adapted(size: float) -> Any:
    """Return the base with an adapter of that size."""
    policy = get_peft_model(build(), LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = size * torch.randn_like(parameter)
    return policy.eval()


def scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of each token but the first, [batch, time]."""
    with torch.no_grad():
        logps = model(ids).logits[:, :-1].double().log_softmax(-1)
    return logps.gather(-1, ids[:, 1:, None])[..., 0]


def engine_scores(llm: Any, ids: torch.Tensor, **request: Any) -> torch.Tensor:
    """Return the same of vLLM."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
    answers = llm.generate(prompts, params, use_tqdm=False, **request)
    rows = [
        [entry[token].logprob for entry, token in zip(a.prompt_logprobs[1:], a.prompt_token_ids[1:], strict=True)]
        for a in answers
    ]
    return torch.tensor(rows, dtype=torch.float64)


def sampled_distance(llm: Any, model: Any, ids: torch.Tensor, **request: Any) -> float:
    """Return the mean distance over tokens that vLLM samples: its CPU build cannot score prompts with a LoRA."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=LENGTH - ids.shape[1], temperature=1.0, logprobs=0, seed=3, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": row.tolist()} for row in ids], params, use_tqdm=False, **request)
    found = [a.outputs[0] for a in answers]
    logps = torch.tensor([[e[t].logprob for e, t in zip(o.logprobs, o.token_ids, strict=True)] for o in found])
    whole = torch.cat([ids, torch.tensor([list(o.token_ids) for o in found])], dim=1)
    return (scores(model, whole)[:, ids.shape[1] - 1 :] - logps).abs().mean().item()


def push(llm: Any, weights: Any) -> None:
    """Load weights into the engine."""
    llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(weights)
    llm.reset_prefix_cache()


def merged_in_place(policy: Any, llm: Any) -> float:
    """Push as stock TRL does; return the largest residue in the base weights."""
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.merge_adapter()
    named = [(n.removeprefix("base_model.model.").replace(".base_layer", ""), p) for n, p in policy.named_parameters()]
    push(llm, [(name, p.data) for name, p in named if "lora_" not in name])
    policy.unmerge_adapter()
    return max((p - before[name]).abs().max().item() for name, p in policy.named_parameters())


def engine(folder: str, **options: Any) -> Any:
    """Return a vLLM that keeps its weights in place."""
    from vllm import LLM

    keep_weights_in_place()
    return LLM(
        folder, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128, seed=0,
        enable_prefix_caching=False, **options,
    )  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    torch.manual_seed(2)
    ids = torch.randint(256, (ROWS, LENGTH))
    results: dict[str, dict[str, float]] = {str(size): {} for size in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        base = f"{folder}/base"
        build().save_pretrained(base)
        llm = engine(base)
        for size in SIZES:
            policy, row = adapted(size), results[str(size)]
            exact = scores(adapted(size).float(), ids)
            row["policy in bfloat16"] = (scores(policy, ids) - exact).abs().mean().item()
            push(llm, build().named_parameters())
            row["no adapter"] = (engine_scores(llm, ids) - exact).abs().mean().item()
            rounding = Rounding()
            push(llm, effective_weights(policy, torch.bfloat16, rounding))
            row["float32 sum"] = (engine_scores(llm, ids) - exact).abs().mean().item()
            row["push_rounding"] = rounding.share
            policy.save_pretrained(f"{folder}/{size}")
            row["float32 sum, sampled"] = sampled_distance(llm, adapted(size).float(), ids[:, :8])
            row["base residue"] = merged_in_place(policy, llm)
            row["bfloat16 merge"] = (engine_scores(llm, ids) - exact).abs().mean().item()
            for _ in range(PUSHES):
                policy.merge_adapter()
                policy.unmerge_adapter()
            merged_in_place(policy, llm)
            row[f"bfloat16 merge, push {PUSHES}"] = (engine_scores(llm, ids) - exact).abs().mean().item()
            print(size, row, flush=True)
        RESULT.write_text(json.dumps(results, indent=2) + "\n")
        if "--adapter" in sys.argv:
            adapter_alone(base, folder, ids, results)
            RESULT.write_text(json.dumps(results, indent=2) + "\n")


def adapter_alone(base: str, folder: str, ids: torch.Tensor, results: dict[str, dict[str, float]]) -> None:
    """Measure vLLM's own LoRA."""
    from vllm.lora.request import LoRARequest

    llm = engine(base, enable_lora=True, max_lora_rank=16)
    for number, size in enumerate(SIZES, 1):
        request = LoRARequest(str(size), number, f"{folder}/{size}")
        distance = sampled_distance(llm, adapted(size).float(), ids[:, :8], lora_request=request)
        results[str(size)]["adapter alone"] = distance
        print(size, "adapter alone", distance, flush=True)


if __name__ == "__main__":
    main()
