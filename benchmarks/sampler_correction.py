"""What corrections of the sampler cost and keep: bias by enumeration, and gradient by length.

What a model learns with them: sampler_training.py. The bias needs the tests' enumerable model: run it in a checkout.
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch

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
DISTANCES = (0.03, 0.1, 0.3)
DEVIATIONS, LENGTHS = (0.01, 0.02, 0.05), (512, 1024, 2048, 4096, 8192, 16384)


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


def main() -> None:
    """Run both parts and write the results."""
    result = {"distances": DISTANCES, "bias": biases(), "kept": kept()}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
