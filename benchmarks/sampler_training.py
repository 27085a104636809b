"""What a model learns from a sampler with rounded weights, by correction: `make bench-sampler`.

The trainer's own path of vLLM (`use_vllm`, colocate), with an engine in vLLM's place that rounds each weight matrix
that is pushed to it, row by row, and draws from what it has then. The task: short answers are 4 digits, each
the one before plus 3, long ones 128, each the sum of the two before, modulo 10; a reward is the share of right digits.
The model has learned both from demonstrations with errors. Writes results/sampler_training.json; runs that it has are
not made again.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import itertools
import json
import logging
import random
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from trl.generation import vllm_generation

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.config.temporary import temporarily
from grpo_ext.quickstart.model import build_tokenizer

RESULTS = Path(__file__).parent / "results" / "sampler_training.json"
SHORT, LONG, SHIFT, GROUP, PROMPTS = 4, 128, 3, 8, 8
TRAINING = {
    **{"loss_type": "grpo", "per_device_train_batch_size": GROUP * PROMPTS, "num_generations": GROUP},
    **{"lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "gradient_checkpointing": False},
    **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
}
"""Settings of all runs."""
STEPS, LEARNING_RATE, ERRORS, WARM_STEPS = 32, 1e-3, 0.4, 400
RULES = {
    "no correction": {"vllm_importance_sampling_correction": False},
    "plain clip around the sampler": {"old_logps": "sampler"},
    "product, 0 above 3 (TRL)": {"vllm_importance_sampling_mode": "sequence_mask"},
    "token, cut at 2 (default)": {},
    "geometric mean, 0 outside of .99 to 1.01": {
        "sampler_correction": {"level": "geometric", "lower": 0.99, "upper": 1.01, "action": "mask"}
    },
    "completions with a mean k3 up to .01": {
        "sampler_correction": {"level": "geometric", "statistic": "k3", "upper": 0.01, "action": "mask"}
    },
}
HIDDEN, HEADS, LAYERS, EPS = 64, 2, 2, 1e-6
MATRICES = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
TOKENIZER = build_tokenizer([])


# The task.


def following(kind: str, before: str, last: str) -> str:
    """Return the digit that belongs behind two others."""
    return str((int(last) + (SHIFT if kind == "s" else int(before))) % 10)


def right(prompt: str, completion: str) -> float:
    """Return the share of right digits of an answer; one of another length has wrong ones."""
    kind, digits, asked = prompt[0], prompt[1:] + completion, SHORT if prompt[0] == "s" else LONG
    places = range(2, min(len(digits), asked + 2))
    known = [digits[i] == following(kind, *digits[i - 2 : i]) for i in places if digits[i - 2 : i].isdigit()]
    return sum(known) / max(asked, len(completion))


def demonstration(draw: random.Random) -> tuple[str, bool]:
    """Return prompt and answer, with errors, and whether the answer ends before the limit."""
    kind = draw.choice("sl")
    digits = draw.choices("0123456789", k=2)
    for _ in range(SHORT if kind == "s" else LONG):
        wrong = draw.random() < ERRORS
        digits.append(draw.choice("0123456789") if wrong else following(kind, *digits[-2:]))
    return kind + "".join(digits), kind == "s"


@cache
def warm(seed: int) -> str:
    """Return the folder of a model that was trained on demonstrations."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        rms_norm_eps=EPS,
        max_position_embeddings=256,
        pad_token_id=TOKENIZER.pad_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    model, draw = LlamaForCausalLM(config), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(WARM_STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 10) * (1 - step / WARM_STEPS)
        rows = [demonstration(draw) for _ in range(16)]
        ids = [TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] * ends for text, ends in rows]
        labels = torch.tensor([row + [-100] * (LONG + 3 - len(row)) for row in ids])
        seen = labels.clamp(min=0)
        labels[:, :3] = -100
        model(input_ids=seen, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


# The sampler.


def rounded(weight: Tensor, bits: int | None) -> Tensor:
    """Round a weight to integers of `bits`, with a scale for each row; vectors stay."""
    if bits is None or weight.dim() < 2:
        return weight
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


@dataclass
class Scored:
    """A log-probability, as vLLM returns it."""

    logprob: float
    rank: int = 1


class Engine:
    """In place of vLLM's `LLM` in this process: a model of transformers whose weights are rounded."""

    def __init__(self, model: str, bits: int | None, draws: int, **_: object) -> None:
        self.model, self.bits = LlamaForCausalLM.from_pretrained(model).eval(), bits
        self.weights = dict(self.model.named_parameters())
        self.random = torch.Generator().manual_seed(draws)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32), model_executor=worker)

    @torch.no_grad()
    def load_weights(self, pushed: list[tuple[str, Tensor]]) -> None:
        """Take weights."""
        for name, weight in pushed:
            self.weights[name].copy_(rounded(weight, self.bits))

    def reset_prefix_cache(self) -> None:
        """There is no cache."""

    def generate(self, prompts: list[dict], sampling_params: object, use_tqdm: bool) -> list[SimpleNamespace]:
        """Return completions with the log-probabilities of their tokens, in vLLM's form."""
        given = [prompt["prompt_token_ids"] for prompt in prompts]
        drawn, logps = self.draw(torch.tensor(given), sampling_params.max_tokens)
        answers = []
        for prompt, ids, values in zip(given, drawn.tolist(), logps.tolist(), strict=True):
            n = ids.index(TOKENIZER.eos_token_id) + 1 if TOKENIZER.eos_token_id in ids else len(ids)
            scored = [{i: Scored(value)} for i, value in zip(ids[:n], values, strict=False)]
            answer = SimpleNamespace(token_ids=ids[:n], logprobs=scored)
            answers.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[answer]))
        return answers

    @torch.no_grad()
    def draw(self, prompts: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Return ids [rows, limit] and their log-probabilities, at temperature 1."""
        tokens, drawn, logps, width = prompts, [], [], prompts.shape[1] + limit
        self.keys = [prompts.new_zeros(len(prompts), HEADS, width, HIDDEN // HEADS).float() for _ in range(LAYERS)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.rotation = self.model.model.rotary_emb(self.keys[0], torch.arange(width)[None])
        for step in range(limit):
            known = self.read(tokens, prompts.shape[1] + step)
            tokens = torch.multinomial(known.exp(), 1, generator=self.random)
            drawn.append(tokens)
            logps.append(known.gather(1, tokens))
        return torch.cat(drawn, dim=1), torch.cat(logps, dim=1)

    def read(self, tokens: Tensor, end: int) -> Tensor:
        """Read the tokens before `end`; return the log-probabilities of the next one. Faster than transformers."""
        w, begin = self.weights, end - tokens.shape[1]
        x, rotation = w["model.embed_tokens.weight"][tokens], [part[:, begin:end] for part in self.rotation]
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            of = {name: w[f"model.layers.{i}.{name}.weight"] for name in MATRICES}
            y = functional.rms_norm(x, (HIDDEN,), w[f"model.layers.{i}.input_layernorm.weight"], EPS)
            q, k, v = (
                functional.linear(y, of[f"self_attn.{name}_proj"]).unflatten(2, (HEADS, -1)).transpose(1, 2)
                for name in "qkv"
            )
            q, keys[:, :, begin:end] = apply_rotary_pos_emb(q, k, *rotation)
            values[:, :, begin:end] = v
            seen = functional.scaled_dot_product_attention(
                q, keys[:, :, :end], values[:, :, :end], is_causal=begin == 0
            )
            x = x + functional.linear(seen.transpose(1, 2).flatten(2), of["self_attn.o_proj"])
            y = functional.rms_norm(x, (HIDDEN,), w[f"model.layers.{i}.post_attention_layernorm.weight"], EPS)
            gate = functional.silu(functional.linear(y, of["mlp.gate_proj"]))
            x = x + functional.linear(gate * functional.linear(y, of["mlp.up_proj"]), of["mlp.down_proj"])
        x = functional.rms_norm(x[:, -1], (HIDDEN,), w["model.norm.weight"], EPS)
        return functional.linear(x, w["lm_head.weight"]).log_softmax(dim=-1)


# A run.


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Reward right digits."""
    return [right(*row) for row in zip(prompts, completions, strict=True)]


def score(model: LlamaForCausalLM, folder: str) -> dict[str, float]:
    """Return the shares of right digits of a model's own answers, short and long."""
    engine = Engine(folder, None, draws=1)
    engine.load_weights(list(model.named_parameters()))
    found = {}
    for kind, name in (("s", "short"), ("l", "long")):
        prompts = [f"{kind}{a}{b}" for a in range(10) for b in range(10)]
        params = SimpleNamespace(max_tokens=LONG if name == "long" else SHORT + 2)
        asked = [{"prompt_token_ids": TOKENIZER(prompt)["input_ids"]} for prompt in prompts]
        texts = [
            TOKENIZER.decode(answer.outputs[0].token_ids, skip_special_tokens=True)
            for answer in engine.generate(asked, params, use_tqdm=False)
        ]
        found[name] = statistics.mean(map(right, prompts, texts))
    return found


def trained(
    settings: dict, bits: int | None, seed: int, updates: int, steps: int, engine: type[Engine] = Engine
) -> GRPOExtTrainer:
    """Train once from the warm model of a seed, with a rule's settings."""
    model = LlamaForCausalLM.from_pretrained(warm(seed))
    with tempfile.TemporaryDirectory() as output, open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        args = GRPOExtConfig(
            output_dir=output,
            max_steps=steps,
            num_iterations=updates,
            max_completion_length=LONG,
            learning_rate=LEARNING_RATE,
            seed=seed,
            use_vllm=True,
            vllm_mode="colocate",
            rollout_drift=0.0,
            **TRAINING,
            **settings,
        )
        rows = Dataset.from_list([{"prompt": f"{k}{a}{b}"} for k in "sl" for a in range(10) for b in range(10)])
        with temporarily(vllm_generation, LLM=partial(engine, bits=bits, draws=seed)):
            trainer = GRPOExtTrainer(model, [reward], args, rows, processing_class=TOKENIZER)
        trainer.train()
    return trainer


def run(rule: str, bits: int | None, seed: int, updates: int, steps: int) -> dict:
    """Train once; return what was learned, and the sampler's figures over the run."""
    folder = warm(seed)
    start = time.process_time()
    trainer = trained(RULES[rule], bits, seed, updates, steps)
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    names = [name for name in logs[-1] if name.startswith("sampling/") and "sampling_logp" not in name]
    figures = {name: statistics.mean(entry[name] for entry in logs if name in entry) for name in names}
    return {
        "before": score(LlamaForCausalLM.from_pretrained(folder), folder),
        "after": score(trainer.model, folder),
        "rewards": [round(entry["reward"], 4) for entry in logs],
        "figures": {name: float(f"{value:.4g}") for name, value in figures.items()},
        "seconds": round(time.process_time() - start, 1),
    }


def main() -> None:
    """Train with each rule, precision and seed, and write the results after each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 5, 4, 3])
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=1, help="of the policy for each generation")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    runs = json.loads(options.output.read_text()) if options.output.exists() else []
    for seed, bits, rule in itertools.product(options.seeds, options.bits, options.rules):
        known = {"rule": rule, "bits": bits, "seed": seed, "updates": options.updates, "steps": options.steps}
        if any(known.items() <= made.items() for made in runs):
            continue
        runs.append(known | run(rule, bits or None, seed, options.updates, options.steps))
        options.output.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
        last = {key: value for key, value in runs[-1].items() if key != "rewards"}
        print(last, flush=True)


if __name__ == "__main__":
    main()
