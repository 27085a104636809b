"""What corrections of the sampler cost and keep: bias by enumeration, gradient by length, and training with int8.

The model that trains is a network of two layers over the token before; its sampler has the same weights in int8.
Answers are 8 or 1,024 tokens long, and a reward is the share of tokens that are the right ones behind the one before.
Advantages are GRPO's over groups of 16, the loss is a token mean, one Adam step for each generation. The bias needs
the tests' enumerable model: run it in a checkout.
"""

import argparse
import itertools
import json
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch
from torch import Tensor, nn

from grpo_ext.objective.sampler_correction import DEFAULT, SamplerRule, corrected, trl_rule

RESULTS = Path(__file__).parent / "results" / "sampler_correction.json"
STOCK = (trl_rule("sequence_mask", None, 3.0),)
SELECT = {"statistic": "k1", "lower": -0.01, "upper": 0.01, "action": "mask"}
RULES: dict[str, tuple[SamplerRule, ...]] = {
    "no correction": (),
    "product": (SamplerRule(level="sequence"),),
    "product, 0 above 3 (TRL)": STOCK,
    "product, cut at 3": (trl_rule("sequence_truncate", None, 3.0),),
    "token": (SamplerRule(),),
    "token, cut at 2 (default)": DEFAULT,
    "token, 0 outside of .5 to 2": (SamplerRule(lower=0.5, upper=2.0, action="mask"),),
    "geometric mean": (SamplerRule(level="geometric"),),
    "token cut at 2, geometric k1 within .01": (*DEFAULT, SamplerRule(level="geometric", **SELECT)),
    "completions with a mean k3 up to .001": (
        SamplerRule(level="geometric", statistic="k3", upper=1e-3, action="mask"),
    ),
    "tokens with a binary KL up to .001": (SamplerRule(statistic="binary_kl", upper=1e-3, action="mask"),),
    "M2PO, .04": (SamplerRule(statistic="m2", upper=0.04, action="mask"),),
}
TRAINED = ("no correction", "product, 0 above 3 (TRL)", "token, cut at 2 (default)")
DISTANCES = (0.03, 0.1, 0.3)
DEVIATIONS, LENGTHS = (0.01, 0.02, 0.05), (512, 1024, 2048, 4096, 8192, 16384)


# Bias, by enumeration, and the gradient that is left, by length.


def biases() -> list[dict]:
    """Relative error of the expected gradient, by rule and by the deviation of the sampler's logits."""
    from objective.test_sampler_correction import bias_of

    return [{"rule": name, "bias": [bias_of(rules, noise) for noise in DISTANCES]} for name, rules in RULES.items()]


def kept() -> list[dict]:
    """Share of the gradient that is left: of the default by drawing, of TRL's rule by its closed form."""
    rows = []
    for deviation in DEVIATIONS:
        g = torch.Generator().manual_seed(0)
        for n in LENGTHS:
            spread = deviation * math.sqrt(n)
            stock = torch.special.ndtr(torch.tensor((math.log(3) - spread**2 / 2) / spread)).item()
            d = deviation * torch.randn(16, n, generator=g) + deviation**2 / 2
            weights = corrected(DEFAULT, d, torch.zeros_like(d), torch.ones_like(d)).weights
            rows.append(
                {"deviation": deviation, "tokens": n, "stock": stock, "ours": (weights / d.exp()).mean().item()}
            )
    return rows


# Training.

VOCABULARY, WIDTH, GROUP, PROMPTS = 12, 32, 16, 2
KINDS = (8, 1024)
OUTLIER = 20.0
"""Times by which a tensor's outlier exceeds its other weights; LLM.int8(), arXiv:2208.07339, found 20 and more."""


class Policy(nn.Module):
    """Logits of the next token from the one before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inputs = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self) -> Tensor:
        """Log-probabilities [token before, next token]."""
        return self.head(torch.tanh(self.hidden(self.inputs.weight))).log_softmax(dim=-1)


@torch.no_grad()
def int8(policy: Policy) -> Tensor:
    """Log-probabilities with weights rounded to int8, at the scale that a tensor's outlier would set."""
    kept = {name: value.clone() for name, value in policy.state_dict().items()}
    for value in policy.parameters():
        scale = OUTLIER * value.abs().max() / 127
        value.copy_((value / scale).round() * scale)
    table = policy()
    policy.load_state_dict(kept)
    return table


def answers(table: Tensor, length: int, count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of the table that were read, and tokens that were drawn from them, each [count, length]."""
    probabilities = table.exp()
    token = torch.randint(VOCABULARY, (count,), generator=g)
    read, drawn = [], []
    for _ in range(length):
        read.append(token)
        token = torch.multinomial(probabilities[token], 1, generator=g)[:, 0]
        drawn.append(token)
    return torch.stack(read, dim=1), torch.stack(drawn, dim=1)


def train(rules: tuple[SamplerRule, ...], length: int, seed: int, steps: int) -> dict:
    """Train; return the probability of the right token, and mean weight and deviation of the ratio over the run."""
    policy, g = Policy(seed), torch.Generator().manual_seed(seed)
    right = torch.randperm(VOCABULARY, generator=g)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    weight, noise = [], []
    for _ in range(steps):
        sampler, table = int8(policy), policy()
        read, drawn = answers(sampler, length, GROUP * PROMPTS, g)
        rewards = (right[read] == drawn).double().mean(dim=1).view(PROMPTS, GROUP)
        centred = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)
        logps, sampled = table[read, drawn], sampler[read, drawn]
        weights = corrected(rules, logps.detach(), sampled, torch.ones_like(read)).weights
        optimizer.zero_grad()
        (-(weights * advantages * logps).mean()).backward()
        optimizer.step()
        weight.append(weights.mean().item())
        noise.append((logps.detach() - sampled).std().item())
    found = policy().exp().detach().gather(1, right[:, None]).mean().item()
    return {"right": found, "weight": sum(weight) / steps, "noise": sum(noise) / steps}


def main() -> None:
    """Run all parts and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs = []
    for length, name, seed in itertools.product(KINDS, TRAINED, range(options.seeds)):
        known = {"tokens": length, "rule": name, "seed": seed, "steps": options.steps}
        runs.append(known | train(RULES[name], length, seed, options.steps))
        print(runs[-1], flush=True)
    result = {"distances": DISTANCES, "bias": biases(), "kept": kept(), "runs": runs}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
