r"""The table of losses: the meaning of each `loss_type`, axis by axis.

A recipe's `loss_type` names a row. The row fills the axes that the recipe leaves unset; the recipe's own settings win.
A user's own loss is a surrogate decorated with `register` and named by path (`loss_type: my_module:my_loss`).

The table holds only words and numbers, so that `grpo-ext losses` prints it without loading torch; `find` joins a row
to its surrogate.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from grpo_ext.errors import UnknownNameError
from grpo_ext.registry import Registry

ANY_LEVEL = ("token", "sequence", "product")


OPTION_FIELDS = {"epsilon_low": "epsilon", "epsilon_high": "epsilon_high", "delta": "delta"}
"""Options of any surrogate -> the config field that sets them."""


@dataclass(frozen=True)
class Loss:
    """One row: a surrogate, its paper's choice on every other axis, and its special properties.

    No other module refers to a loss by its name, so that a user's own loss can have every property of these.
    """

    surrogate: str | Callable[..., Any]
    paper: str = ""
    formula: str = ""
    ratio: str = "token"
    levels: tuple[str, ...] = ANY_LEVEL
    """The ratio levels the surrogate is defined for."""
    kl: str = "k3"
    """Estimator used where the recipe has a KL term (beta > 0)."""
    beta: float = 0.0
    """The weight of the KL term that the paper trains with; a recipe sets its own, 0 by default."""
    kl_placement: str = "loss"
    advantage: str = "group"
    advantage_kwargs: Mapping[str, Any] = field(default_factory=dict)
    combination: str = "sum_then_normalize"
    aggregation: str = "token-mean"
    options: Mapping[str, Any] = field(default_factory=dict)
    """The surrogate's options where the paper departs from the surrogate's own defaults."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Options that config fields of another name set, beside `OPTION_FIELDS`: {"k_pos": "vespo_k_pos"}."""
    conflict: Callable[..., str | None] | None = None
    """Takes the options as keywords, returns the reason and cure if they contradict each other."""
    clip_regions: Callable[..., Any] | None = None
    """Takes tensors and options as a surrogate does, returns the tokens (cut from below, cut from above)."""
    metrics: Callable[..., Mapping[str, Any]] | None = None
    """Takes the same, returns further metrics by name, each [batch, time] or [batch, 1].

    Where this, `clip_regions`, `marks` or `conflict` is None, a registered surrogate's own is taken.
    """
    marks: Callable[..., Any] | None = None
    """Takes the `advantages` of a whole generation, what else an estimator may request of its tokens, and the options;
    returns the tokens [groups, completions, time] that the surrogate sees as `marks`."""
    per_completion: bool = False
    """True if it has one term for a whole completion at every level, so that no token can be left out."""
    off_policy: bool = True
    """True if it corrects for a policy that has moved since it sampled."""
    zero_without_advantage: bool = False
    """True if a completion with an advantage of 0 has no gradient, and need not be computed."""
    sampler_levels: tuple[str, ...] = ("token", "sequence")
    """The levels at which it can take the sampler's correction."""
    trl: bool = False
    """True if stock TRL has this loss, so that `loss_defaults: trl` is allowed."""
    trl_options: Mapping[str, Any] = field(default_factory=dict)
    """Stock TRL's defaults of options where they depart from the surrogate's own."""
    trl_float32: bool = False
    """True if stock TRL holds the options in float32."""
    trl_name: str = ""
    """Settings by which stock TRL, which lacks this loss, computes its formula."""

    @property
    def function(self) -> Callable[..., Any]:
        """The surrogate itself."""
        if callable(self.surrogate):
            return self.surrogate
        from grpo_ext.objective.surrogates import surrogates

        return surrogates[self.surrogate]

    def whole(self) -> "Loss":
        """Return the row with the traits of its surrogate, where the row leaves them unset."""
        if callable(self.surrogate):
            return self
        from grpo_ext.objective.surrogates import surrogates

        brought = surrogates.traits(self.surrogate)
        own = {f.name: getattr(self, f.name) or getattr(brought, f.name) for f in fields(brought)}
        return replace(self, **own)

    def field_of(self, option: str) -> str | None:
        """Return the config field that sets an option, or None."""
        return self.fields.get(option) or OPTION_FIELDS.get(option)


losses: Registry = Registry("loss_type")


def register(*names: str, **row: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a surrogate to make it a loss of its own; `row` are fields of `Loss`."""

    def add(surrogate: Callable[..., Any]) -> Callable[..., Any]:
        losses.register(*names)(Loss(surrogate=surrogate, **row))
        return surrogate

    return add


def find(loss_type: str) -> Loss:
    """Return the row of that name, or of the surrogate (registered or plain) at that import path.

    Raises:
        UnknownNameError: no such loss; the message names the closest ones.
    """
    entry = losses[loss_type]
    if isinstance(entry, Loss):
        return entry.whole()
    if not callable(entry):
        kind = type(entry).__name__
        raise UnknownNameError(f"loss_type {loss_type!r} is a {kind}, not a surrogate function", "Name a function.")
    for row in losses.values():
        if row.surrogate is entry:
            return row
    return Loss(surrogate=entry, formula=inspect.getdoc(entry) or "")


def _row(*names: str, **row: Any) -> None:
    losses.register(*names)(Loss(**{"zero_without_advantage": True} | row))


_REINFORCE: Mapping[str, Any] = {"surrogate": "reinforce", "levels": ("token",), "off_policy": False}


_row(
    "grpo",
    "deepseek_math",
    surrogate="clip",
    paper="DeepSeekMath, arXiv:2402.03300",
    formula="-(1/G) sum_i (1/n_i) sum_t min(r A, clip(r, 1-eps, 1+eps) A)",
    aggregation="seq-mean-token-mean",
    beta=0.04,
    trl=True,
)
_row(
    "deepseek_v3",
    surrogate="clip",
    paper="DeepSeek-V2/V3/R1, arXiv:2405.04434, 2412.19437, 2501.12948",
    formula="-(1/G) sum_i min(S A, clip(S, 1-eps, 1+eps) A), S = prod_t r_t",
    ratio="product",
    kl="sequence_k3",
    beta=0.001,
    aggregation="seq-mean-token-mean",  # of a loss that is the same on every token: the loss itself, no 1/n
    options={"epsilon_low": 10.0, "epsilon_high": 10.0},
)
_row(
    "dr_grpo",
    surrogate="clip",
    paper="Dr. GRPO, arXiv:2503.20783",
    formula="-(1/B) sum_i sum_t min(r A, clip(r, 1-eps, 1+eps) A) / L_max",
    advantage="none",
    aggregation="seq-mean-token-sum-norm",
    trl=True,
)
_row(
    "bnpo",
    surrogate="clip",
    paper="TRL's name; unrelated to the BNPO paper, which is `beta_bnpo`",
    formula="-(1/N_micro) sum_it min(r A, clip(r, 1-eps, 1+eps) A), a mean over each micro-batch",
    aggregation="micro-batch-token-mean",
    trl=True,
)
_row(
    "beta_bnpo",
    surrogate="clip",
    paper="BNPO, arXiv:2506.02864",
    formula="-(1/G) sum_i sum_t min(min(r, delta) A, clip(r, 1-eps_low, 1+eps_high) A), A = (R - p) / BetaPDF(p)",
    advantage="beta",
    combination="average_advantages",
    aggregation="seq-mean-token-sum",
    options={"epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 10.0},
)
_row(
    "dapo",
    surrogate="clip",
    paper="DAPO, arXiv:2503.14476",
    formula="-(1/N) sum_it min(r A, clip(r, 1-eps_low, 1+eps_high) A), N the tokens of the step",
    aggregation="token-mean",
    options={"epsilon_low": 0.2, "epsilon_high": 0.28},
    trl=True,
)
_row(
    "gspo",
    surrogate="clip",
    paper="GSPO, arXiv:2507.18071",
    formula="-(1/G) sum_i min(s A, clip(s, 1-eps_low, 1+eps_high) A), s = (prod_t r_t)^(1/n)",
    ratio="sequence",
    aggregation="seq-mean-token-mean",
    options={"epsilon_low": 3e-4, "epsilon_high": 4e-4},
    trl_name="loss_type: grpo with importance_sampling_level: sequence",
)
_row(
    "cispo",
    surrogate="cispo",
    paper="MiniMax-M1, arXiv:2506.13585; cap of 5: ScaleRL, arXiv:2510.13786",
    formula="-(1/N) sum_it stopgrad(min(r, cap)) A l",
    options={"epsilon_high": 5.0},
    trl=True,
    trl_options={"epsilon_high": 0.2},
)
_row(
    "sapo",
    surrogate="sapo",
    paper="SAPO, arXiv:2511.20347",
    formula="-(1/B) sum_i (1/n_i) sum_t (4/tau) sigmoid(tau (r - 1)) A",
    aggregation="seq-mean-token-mean",
    fields={"temperature_pos": "sapo_temperature_pos", "temperature_neg": "sapo_temperature_neg"},
    trl=True,
    trl_float32=True,
)
_row(
    "luspo",
    surrogate="clip",
    paper="LUSPO, arXiv:2602.05261",
    formula="-(1/B) sum_i n_i min(s A, clip(s, 1-eps_low, 1+eps_high) A)",
    ratio="sequence",
    levels=("sequence",),
    aggregation="seq-mean-token-sum",
    options={"epsilon_low": 2e-3, "epsilon_high": 2.5e-3},
    trl=True,
)
_row(
    "vespo",
    surrogate="vespo",
    paper="VESPO, arXiv:2602.10693",
    formula="-(1/N) sum_it stopgrad(phi(S)) A l, phi(S) = e^lam S^k e^(-lam S)",
    levels=("token",),
    fields={name: f"vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    sampler_levels=("token",),
    trl=True,
    trl_float32=True,
)
_row(
    "minimind",
    **_REINFORCE,
    paper="MiniMind, the widely read version",
    formula="-(1/B) sum_i (1/n_i) sum_t exp(l - stopgrad(l)) A",
    advantage="minimind",
    aggregation="seq-mean-token-mean",
    beta=0.02,
)
_row(
    "minimind_cispo",
    surrogate="cispo",
    paper="MiniMind, the current version",
    formula="-(1/B) sum_i (1/n_i) sum_t stopgrad(min(r, cap)) A l",
    advantage_kwargs={"ddof": 0},
    aggregation="seq-mean-token-mean",
    beta=0.1,
    options={"epsilon_high": 5.0},
)
_row(
    "rloo",
    **_REINFORCE,
    paper="RLOO, arXiv:2402.14740",
    formula="-(1/B) sum_i A log pi(o_i), A = R - mean of the others, KL in the reward",
    kl="k1",
    kl_placement="reward",
    advantage="loo",
    aggregation="seq-mean-token-sum",
)
_row(
    "reinforce_pp",
    surrogate="clip",
    paper="REINFORCE++, arXiv:2501.03262",
    formula="-(1/N) sum_it min(r A, clip(r, 1-eps, 1+eps) A), A_t = R - beta sum_{s>=t} KL_s, whitened over N tokens",
    kl="k1",
    kl_placement="reward",
    advantage="reinforce_pp",
)
_row(
    "reinforce_pp_baseline",
    surrogate="clip",
    paper="REINFORCE++ with baseline, arXiv:2501.03262",
    formula="-(1/N) sum_it min(r A, clip(r, 1-eps, 1+eps) A), A = R - group mean, whitened over N tokens",
    kl="k2",
    advantage="reinforce_pp_baseline",
)
_row(
    "gmpo",
    surrogate="gmpo",
    paper="GMPO, arXiv:2507.20673",
    formula="-(1/G) sum_i A exp(mean_t c), c = min(log r, eps_high) if A > 0 else max(log r, -eps_low)",
    levels=("token",),
    aggregation="seq-mean-token-mean",
    per_completion=True,
)
_row(
    "topr",
    surrogate="topr",
    paper="TOPR, arXiv:2503.14286",
    formula="-(1/B) sum_i c A log pi(o_i), c = 1 if A >= 0 else stopgrad(min(S, 1))",
    ratio="product",
    levels=("product",),
    advantage="none",
    aggregation="seq-mean-token-sum",
)
_row(
    "dppo",
    surrogate="dppo",
    paper="DPPO-TV, arXiv:2602.04879",
    formula="-(1/N) sum_it r A, without tokens with A (pi - pi_old) > 0 and |pi - pi_old| > eps",
    levels=("token",),
)
_row(
    "dppo_kl",
    surrogate="dppo",
    paper="DPPO-Binary-KL, arXiv:2602.04879",
    formula="-(1/N) sum_it r A, without tokens with A (pi - pi_old) > 0 and KL > eps, "
    "KL = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))",
    levels=("token",),
    options={"divergence": "kl", "epsilon_low": 0.05, "epsilon_high": 0.05},
)
_row(
    "maxrl",
    surrogate="clip",
    paper="MaxRL, arXiv:2602.02710",
    formula="-(1/N) sum_it min(r A, clip(r, 1-eps, 1+eps) A), A = (R - mean) / mean",
    advantage="maxrl",
)
_row(
    "dro",
    surrogate="dro",
    paper="DRO, arXiv:2405.19107, with the group's mean for its value and the sampling policy for its reference, "
    "as Kimi k1.5, arXiv:2501.12599",
    formula="(1/B) sum_i (tau / 2) (log S)^2 - A log pi(o_i), A = R - mean",
    ratio="product",
    levels=("product",),
    advantage="none",
    aggregation="seq-mean-token-sum",
    zero_without_advantage=False,
)
_row(
    "p3o",
    surrogate="p3o",
    paper="P3O, arXiv:2605.12380, with the effective sample size of each completion in place of the batch's",
    formula="(1/N) sum_it (1 - e) (1/r + log r - 1) - stopgrad(min(r, e)) A l, e = (sum_t r)^2 / (n sum_t r^2)",
    levels=("token",),
    zero_without_advantage=False,
)
_row(
    "kl_cov",
    surrogate="kl_cov",
    paper="KL-Cov, arXiv:2505.22617",
    formula="(1/N) sum_it m |log r| - r A, m = 1 for the highest (A - mean A) (l - mean l) of the generation, else 0",
    levels=("token",),
    zero_without_advantage=False,
)
_row(
    "clip_cov",
    surrogate="clip_cov",
    paper="Clip-Cov, arXiv:2505.22617",
    formula="-(1/N) sum_it min(r A, clip(r, 1-eps_low, 1+eps_high) A), without some tokens of the generation with "
    "(A - mean A) (l - mean l) from 1 to 5",
    levels=("token",),
)
_row(
    "gtpo",
    **_REINFORCE,
    paper="GTPO, arXiv:2508.03772",
    formula="-(1/G) sum_i (1/n_i) sum_t exp(l - stopgrad(l)) A lam, A = R - mean - 0.1 H, lam = 2 or 0 for tokens "
    "that right and wrong completions begin or end with",
    advantage="gtpo",
    aggregation="seq-mean-token-mean",
)
_row(
    "tpo",
    **_REINFORCE,
    paper="Target Policy Optimization, arXiv:2604.06159",
    formula="-(1/B) sum_i A log pi(o_i), A = G (q - p), p = softmax of log pi(o) in the group, "
    "q = p exp(u) / sum_j p_j exp(u_j)",
    advantage="tpo",
    aggregation="seq-mean-token-sum",
)
