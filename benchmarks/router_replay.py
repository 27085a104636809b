"""What router replay takes away of the mismatch of a bfloat16 sampler: `python benchmarks/router_replay.py`.

Tiny mixtures of experts with random weights; 32 completions of 64 tokens, sampled by the weights rounded to bfloat16
and scored by the float32 weights, which choose their own experts or get the sampler's. Writes
results/router_replay.json.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from grpo_ext.packing.routes import Recorded, Replayed, padded, routed, split
from grpo_ext.rollout.transformers_engine import GroupedEngine

RESULT = Path(__file__).parent / "results" / "router_replay.json"
ROWS, PROMPT, TOKENS, SEEDS = 32, 16, 64, 3
SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts_per_tok": 4, "initializer_range": 0.08, "max_position_embeddings": 256, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 32, "sliding_window": None},
    "olmoe": {"num_experts": 32},
    "gpt_oss": {"num_local_experts": 32},
    "glm4_moe": {"n_routed_experts": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


def network(family: str, seed: int) -> Any:
    """Return a model of float32 weights in training, without dropout."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def sampled(model: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Sample completions in bfloat16: rows, log-probabilities of the completions' tokens, routes."""
    sampler = copy.deepcopy(model).to(torch.bfloat16)
    torch.manual_seed(seed)
    prompts = torch.randint(3, 512, (ROWS // 8, PROMPT)).repeat_interleave(8, dim=0)
    config = GenerationConfig(
        max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=1
    )
    engine = GroupedEngine(required=False, routes=True)
    with engine.generating(sampler) as drawn, torch.no_grad():
        mask = torch.ones_like(prompts)
        rows = sampler.generate(input_ids=prompts, attention_mask=mask, generation_config=config)
    assert drawn.routes is not None
    routes = drawn.routes.routes(rows[:, PROMPT:].tolist())
    with torch.no_grad():  # of the same weights in the same format; the engine that fell back does not return them
        own = logps(sampler, rows, Replayed(flat(routes, rows)))
    return rows, drawn.logps[0] if drawn.logps else own, routes


def flat(routes: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return routes as the tokens of a padded forward take them."""
    return padded(routes, torch.ones_like(rows), TOKENS).flatten(0, 1)


def logps(model: Any, rows: torch.Tensor, use: Any) -> torch.Tensor:
    """Return the log-probabilities of the completions' tokens, without token 1, which could not be sampled."""
    with routed(model, use):
        logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits[:, PROMPT - 1 : -1].float()
    logits[..., 1] = -torch.inf
    return logits.log_softmax(-1).gather(-1, rows[:, PROMPT:, None])[..., 0]


def figures(policy: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    """Return the mismatch of two scores of the same tokens, as `sampling/mismatch` and `sampling/mismatch_kl` do."""
    ratio = policy - sampler
    return {"mismatch": ratio.abs().mean().item(), "mismatch_kl": (ratio.exp() - 1 - ratio).mean().item()}


@torch.no_grad()
def measured(family: str, seed: int) -> dict[str, Any]:
    """Return the figures of one model with and without replay, and the routes on which both agree."""
    model = network(family, seed)
    rows, drawn, routes = sampled(model, seed)
    natural, replayed = Recorded(), Replayed(flat(routes, rows))
    own = logps(model, rows, natural)
    same = [
        (given.sort(dim=-1).values == found.sort(dim=-1).values).all(dim=-1).float().mean().item()
        for given, found in zip(routes, split(natural.taken(len(rows)), torch.ones_like(rows)), strict=True)
    ]
    return {
        "route_agreement": sum(same) / len(same),
        "off": figures(own, drawn),
        "rollout": figures(logps(model, rows, replayed), drawn),
    }


def main() -> None:
    """Measure each family with some seeds, and write the means."""
    torch.set_num_threads(1)
    found = {}
    for family in FAMILIES:
        runs = [measured(family, seed) for seed in range(SEEDS)]
        found[family] = {"route_agreement": sum(r["route_agreement"] for r in runs) / SEEDS}
        for name in ("off", "rollout"):
            found[family][name] = {key: sum(r[name][key] for r in runs) / SEEDS for key in runs[0][name]}
        print(family, json.dumps(found[family]), flush=True)
    about = {"torch": torch.__version__, "threads": 1, "seeds": SEEDS, "rows": ROWS, "tokens": TOKENS}
    RESULT.write_text(json.dumps({"about": about, "families": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
