"""DPPO, CISPO: the gradient that each clip takes from rare tokens, where the policy has moved by one total variation.

Exact: a policy of one step over 64 tokens. Each token is a completion of one token, weighed by its probability. The
gradient of a loss is that of the package's surrogate.
"""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from claim import FAILS, HOLDS, ONLY_IF, Claim, Exact, Verdict, markdown
from torch import Tensor

from grpo_ext.objective.objective import Objective, resolve

TOKENS, DRAWS, BATCH = 64, 32, 64
RARE, COMMON = 0.01, 0.1
"""A token is rare below the first probability, common from the second on."""
DISTANCES = (0.02, 0.05, 0.1, 0.15)
SHOWN = 0.1
ROUNDING = 1e-12
FARTHEST = 10.0
"""Nats that a logit moves at most."""
LOSSES: dict[str, dict[str, Any]] = {
    "clip .2": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "clip .2/.28": {"loss_type": "dapo"},
    "dppo .2": {"loss_type": "dppo"},
    "cispo 5": {"loss_type": "cispo"},
}
MOVES = ("one token", "signs", "gradient", "batch", "noise")
WORDS = {
    "one token": "one token rises, the others fall in proportion",
    "signs": "each logit moves by the sign of its gradient (Adam's first step)",
    "gradient": "logits move by the exact gradient",
    "batch": f"logits move by the gradient of {BATCH} drawn completions, and these train again",
    "noise": "normal noise on the logits, as of another precision",
}
FIELDS = (
    "epsilon,epsilon_high,delta,sapo_temperature_pos,sapo_temperature_neg,vespo_k_pos,vespo_lambda_pos,vespo_k_neg,"
    "vespo_lambda_neg,loss_kwargs,scale_rewards,advantage_estimator,advantage_kwargs,use_bias_correction_kl,"
    "kl_estimator,kl_placement,importance_sampling_level,multi_objective_aggregation,missing_rewards,"
    "loss_aggregation,loss_aggregation_kwargs"
)
UNSET = dict.fromkeys(FIELDS.split(",")) | {"loss_defaults": "paper", "beta": 0.0, "max_completion_length": 1}


def objective_of(**settings: Any) -> Objective:
    """Return the package's objective for settings of a recipe."""
    return resolve(SimpleNamespace(**UNSET | settings))


def policies() -> dict[str, Tensor]:
    """Return two policies: p ~ 1/k, and one token of .8 before a tail ~ 1/k."""
    tail = 1 / torch.arange(1, TOKENS, dtype=torch.float64)
    whole = 1 / torch.arange(1, TOKENS + 1, dtype=torch.float64)
    return {"flat": whole / whole.sum(), "peaked": torch.cat([tail.new_tensor([0.8]), 0.2 * tail / tail.sum()])}


def coefficients(objective: Objective, old: Tensor, new: Tensor, advantages: Tensor) -> Tensor:
    """Return -d loss / d log-probability of each token."""
    logps = new.log()[:, None].requires_grad_()
    inputs = {"advantages": advantages, "old_per_token_logps": old.log()[:, None]}
    tensors = objective.tensors(logps, inputs, torch.ones_like(logps))
    objective.surrogate_loss(tensors).sum().backward()
    assert logps.grad is not None
    return -logps.grad[:, 0]


def raised(old: Tensor, token: int, distance: float) -> Tensor:
    """Return the policy in which a token has gained `distance`, taken from the others in proportion."""
    new = old * (1 - distance / (1 - old[token]))
    new[token] = old[token] + distance
    return new


def moved(old: Tensor, direction: Tensor, distance: float) -> Tensor | None:
    """Return the policy at a total variation of `distance` along a direction of logits, or None beyond its reach."""
    low, high = 0.0, FARTHEST / direction.abs().max().item()
    if total_variation(old, shifted(old, direction, high)) < distance:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        nearer = total_variation(old, shifted(old, direction, middle)) < distance
        low, high = (middle, high) if nearer else (low, middle)
    return shifted(old, direction, high)


def shifted(old: Tensor, direction: Tensor, scale: float) -> Tensor:
    return (old.log() + scale * direction).softmax(0)


def total_variation(p: Tensor, q: Tensor) -> float:
    return ((p - q).abs().sum() / 2).item()


def cases(move: str, old: Tensor, distance: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield policies at one total variation: the new one, the advantages, and the weight of each token."""
    if move == "one token":
        for token in range(TOKENS):
            if old[token] + distance < 1:
                only = torch.zeros_like(old)
                only[token] = old[token]
                yield raised(old, token, distance), torch.ones_like(old), only
        return
    draw = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        advantages = torch.randint(2, (TOKENS,), generator=draw).double() * 2 - 1
        weights = old
        centred = advantages - (old * advantages).sum()
        direction = {"signs": centred.sign(), "gradient": old * centred}.get(move)
        if move == "noise":
            direction = torch.randn(TOKENS, generator=draw, dtype=torch.float64)
        if move == "batch":
            drawn = torch.multinomial(old, BATCH, replacement=True, generator=draw)
            weights = torch.bincount(drawn, minlength=TOKENS).double() / BATCH
            direction = weights * advantages - old * (weights * advantages).sum()
        assert direction is not None
        if (new := moved(old, direction, distance)) is not None:
            yield new, advantages, weights


def masses(objective: Objective, move: str, old: Tensor, distance: float) -> tuple[Tensor, Tensor]:
    """Return the gradient mass of each token, under a loss and without any clip: weight |coefficient|."""
    kept, whole = torch.zeros_like(old), torch.zeros_like(old)
    for new, advantages, weights in cases(move, old, distance):
        kept += weights * coefficients(objective, old, new, advantages).abs()
        whole += weights * (new / old * advantages).abs()
    return kept, whole


def taken(objective: Objective, move: str, old: Tensor, distance: float) -> dict[str, float]:
    """Return the shares of the gradient mass of rare, of common and of all tokens that a loss takes."""
    kept, whole = masses(objective, move, old, distance)
    of = {"rare": old < RARE, "common": old >= COMMON, "all": old > 0}
    return {name: (1 - kept[where].sum() / whole[where].sum()).item() for name, where in of.items()}


def matched(move: str, old: Tensor, distance: float, share: float) -> dict[str, float]:
    """Return what DPPO takes with the bound at which it takes at least `share` of the whole mass."""
    low, high = 0.0, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        objective = objective_of(loss_type="dppo", epsilon=middle, epsilon_high=middle)
        enough = taken(objective, move, old, distance)["all"] >= share
        low, high = (middle, high) if enough else (low, middle)
    found = taken(objective_of(loss_type="dppo", epsilon=low, epsilon_high=low), move, old, distance)
    return found | {"epsilon": low}


def exact() -> Exact:
    """Shares taken by policy, move, total variation and loss; and the least coefficient that CISPO leaves."""
    rows, least = [], 1.0
    for (name, old), move, distance in itertools.product(policies().items(), MOVES, DISTANCES):
        row: dict[str, Any] = {"policy": name, "move": move, "distance": distance}
        for loss, settings in LOSSES.items():
            row[loss] = taken(objective_of(**settings), move, old, distance)
        if distance == SHOWN:
            row["dppo matched"] = matched(move, old, distance, row["clip .2"]["all"])
        rows.append(row)
        cispo = objective_of(**LOSSES["cispo 5"])
        for new, advantages, _ in cases(move, old, distance):
            least = min(least, coefficients(cispo, old, new, advantages).abs().min().item())
    return {"rows": rows, "least cispo coefficient": least}


def shown_rows(exact: Exact) -> list[dict[str, Any]]:
    return [row for row in exact["rows"] if row["distance"] == SHOWN]


def judge(exact: Exact, runs: list[Any]) -> Verdict:
    """Compare what the clip takes of rare and of common tokens, and what the cures leave."""
    cures = all(abs(row["dppo .2"]["all"]) < ROUNDING for row in exact["rows"])
    cures = cures and exact["least cispo coefficient"] > 0
    more = [row for row in shown_rows(exact) if row["clip .2"]["rare"] > row["clip .2"]["common"] + 0.05]
    less = [row for row in shown_rows(exact) if row not in more]

    def named(rows: list[dict[str, Any]]) -> str:
        of = {row["policy"]: [r["move"] for r in rows if r["policy"] == row["policy"]] for row in rows}
        return "; ".join(f"{policy}: {', '.join(moves)}" for policy, moves in of.items())

    cured = "DPPO takes nothing below its bound, and CISPO leaves every token a gradient."
    if not cures:
        return Verdict(FAILS, "DPPO takes gradient below its bound, or CISPO leaves a token without one.")
    if not more:
        return Verdict(
            FAILS, f"The clip of ratios never takes a larger share from rare tokens than from common. {cured}"
        )
    why = f"The clip of ratios takes a larger share from rare tokens than from common ones ({named(more)})"
    if not less:
        return Verdict(HOLDS, f"{why}. {cured}")
    return Verdict(
        ONLY_IF,
        "It holds where one token dominates, or rare logits move as far as common ones. "
        f"{why}, not so for {named(less)}. {cured}",
    )


def table(exact: Exact, runs: list[Any]) -> str:
    """Return shares at one total variation."""

    def of(row: dict[str, Any], loss: str) -> str:
        return f"{abs(row[loss]['rare']):.0%} / {abs(row[loss]['common']):.0%}"

    header = ["policy", "move", *LOSSES, "dppo, bound that takes at least as much as clip .2"]
    rows = [
        [
            row["policy"],
            WORDS[row["move"]],
            *(of(row, loss) for loss in LOSSES),
            f"{of(row, 'dppo matched')} (bound {row['dppo matched']['epsilon']:.2g})",
        ]
        for row in shown_rows(exact)
    ]
    head = (
        f"Share of the gradient mass taken from rare (p < {RARE:g}) / common (p >= {COMMON:g}) tokens, TV {SHOWN:g}:"
    )
    return f"{head}\n\n{markdown(header, rows)}"


def draw(figure: Any, exact: Exact, runs: list[Any]) -> None:
    """Draw the shares over the total variation: a row of panels for each policy."""
    panels = figure.subplots(2, len(MOVES), sharex=True, sharey=True)
    for (place, policy), (column, move) in itertools.product(enumerate(policies()), enumerate(MOVES)):
        axis = panels[place][column]
        rows = [row for row in exact["rows"] if row["move"] == move and row["policy"] == policy]
        x = [row["distance"] for row in rows]
        for loss, colour in (("clip .2", "C3"), ("dppo .2", "C0"), ("cispo 5", "C2")):
            for tokens, line in (("rare", "o-"), ("common", "x:")):
                y = [abs(row[loss][tokens]) for row in rows]
                axis.plot(x, y, line, color=colour, markersize=4, label=f"{loss}, {tokens}")
        axis.set_title(f"{policy}, {move}", fontsize=9)
        axis.grid(alpha=0.25)
    figure.supxlabel("total variation that the policy has moved", fontsize=9)
    figure.supylabel("share of gradient mass taken", fontsize=9)
    panels[0][-1].legend(fontsize=6, frameon=False)


CLAIM = Claim(
    name="rare_tokens",
    title="A clip of ratios takes the gradient of rare tokens; DPPO and CISPO keep it",
    paper="DPPO, arXiv:2602.04879; MiniMax-M1 (CISPO), arXiv:2506.13585",
    statement=(
        "DPPO (abstract and first figure, and the authors' code): a bound on the ratio of a sampled token punishes "
        "tokens of low probability too much and those of high probability too little; a bound on the change of the "
        "probability does not. MiniMax-M1: words such as 'However' or 'Wait' are rare under the base model, get "
        "large ratios, and are clipped after the first update of a batch; a cap on the weight keeps their gradient."
    ),
    experiment=(
        f"Exact, in float64, through the package's surrogates: a policy over {TOKENS} tokens moves by one total "
        "variation in five ways; the gradient mass of a token is its weight times |d loss / d log-probability|. "
        "Two policies: p ~ 1/k (flat), and one token of .8 before such a tail (peaked). Losses: `grpo` with .2, "
        "`dapo` with .2/.28, `dppo` with .2, `cispo` with a cap of 5; and `dppo` with the bound that takes as much of "
        f"the whole mass as clip .2 does. Advantages are +-1 at random, {DRAWS} draws (those that cannot reach the "
        f"distance by {FARTHEST:g} nats are left out); one token: +1."
    ),
    failure=(
        f"At a total variation of {SHOWN:g} the clip takes no larger share (by 5 points) from rare than from common "
        "tokens, in any of the ten cases; or DPPO takes anything at a total variation below its bound; or CISPO "
        "leaves a token without gradient. Where only some cases show the larger share, the claim holds only there."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
)
