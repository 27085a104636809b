"""Break the mathematics on purpose, place by place, and see the tests notice: `python tests/mutations.py [words]`.

Each mutation is applied to a copy of src; the named test file must then fail. Exit status 1 if a mutation survives.
The tests run in forks of one process that has torch loaded already. With words, only mutations that hold one of them.
"""

import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
JOBS = min(os.cpu_count() or 1, 4)
NOT_HERE = (
    "not config_does and not importing and not pure_modules"  # they start or load what has nothing to do with it
)


class Mutation(NamedTuple):
    module: str
    old: str
    new: str
    tests: str


def table() -> list[Mutation]:
    """All mutations, by module."""
    return [Mutation(module, old, new, tests) for module, tests, pairs in MUTATIONS for old, new in pairs]


MUTATIONS = [
    (
        "objective/ratios",
        "objective/test_ratios",
        [
            ("LOG_RATIO_BOUND = 20.0", "LOG_RATIO_BOUND = 80.0"),
            ("torch.where(mask.bool(), values, torch.zeros_like(values))", "values * mask"),
            ("torch.where(mask.bool(), values, torch.zeros_like(values))", "values"),
            ("values if values.dtype == torch.float64 else values.float()", "values"),
            ("values if values.dtype == torch.float64 else values.float()", "values.float()"),
            ("    return bounded(masked(log_ratio, mask))\n", "    return masked(log_ratio, mask)\n"),
            ("log_ratio.sum(dim=-1, keepdim=True) / live_tokens(mask, log_ratio.dtype)", "log_ratio.mean(-1, True)"),
            (
                "bounded(masked(log_ratio, mask).sum(dim=-1, keepdim=True))",
                "masked(log_ratio, mask).sum(dim=-1, keepdim=True)",
            ),
            (
                "bounded(masked(log_ratio, mask).sum(dim=-1, keepdim=True))",
                "bounded(masked(log_ratio, mask)).sum(dim=-1, keepdim=True)",
            ),
            (".clamp(min=1).to(dtype)", ".to(dtype)"),
        ],
    ),
    (
        "objective/surrogates",
        "objective/test_surrogates",
        [
            ("clamp(1 - epsilon_low, 1 + epsilon_high)", "clamp(1 - epsilon_high, 1 + epsilon_low)"),
            ("clamp(1 - epsilon_low, 1 + epsilon_high)", "clamp(1 - epsilon_low - 1e-9, 1 + epsilon_high + 1e-9)"),
            ("-torch.minimum(ratio * advantages", "-torch.maximum(ratio * advantages"),
            ("-torch.minimum(ratio * advantages, clipped", "-torch.minimum(ratio.detach() * advantages, clipped"),
            (
                "-torch.minimum(ratio * advantages, clipped * advantages)",
                "-torch.where(ratio * advantages < clipped * advantages, ratio, clipped.detach()) * advantages",
            ),  # a ratio on a border would be dead
            ("ratio = ratio.clamp(max=delta)", "ratio = ratio.clamp(max=1 + delta)"),
            ("    if delta is not None:\n        ratio", "    if delta is not None and False:\n        ratio"),
            (
                "return -(per_token_logps - per_token_logps.detach())",
                "return (per_token_logps - per_token_logps.detach())",
            ),
            ("(per_token_logps - per_token_logps.detach()).exp()", "per_token_logps.exp()"),
            ("clamp(max=epsilon_high).detach() * advantages", "clamp(max=1 + epsilon_high).detach() * advantages"),
            ("clamp(max=epsilon_high).detach() * advantages", "clamp(max=epsilon_high) * advantages"),
            ("epsilon_high: RatioCap = 5.0,\n) -> Float[Tensor", "epsilon_high: RatioCap = 0.2,\n) -> Float[Tensor"),
            ("delta is None or delta >= 1 + epsilon_high", "delta is None or delta >= epsilon_high"),
            (
                "advantages, mask, importance_sampling_ratio, **options)}",
                "advantages, mask, importance_sampling_ratio)}",
            ),
            ("temperature_neg: float = 1.05", "temperature_neg: float = 1.0"),
            (
                "_by_sign(advantages > 0, log_ratio, temperature_pos",
                "_by_sign(advantages < 0, log_ratio, temperature_pos",
            ),
            ("return -4 / tau *", "return -4 *"),
            ("log_ratio.exp() - 1)) * advantages", "log_ratio.exp())) * advantages"),
            ("torch.full_like(like, high), torch.full_like(like, low)", "high, low"),
            ("return -phi * advantages", "return phi * advantages"),
            ("log_s = torch.where(mask.bool(), log_ratio, 0.0).sum", "log_s = log_ratio.sum"),
            ("log_s + importance_sampling_ratio.log()", "log_s - importance_sampling_ratio.log()"),
            ("k = _by_sign(advantages >= 0", "k = _by_sign(advantages > 0"),
            ("lam + k * log_s - lam * log_s.exp()", "k * log_s - lam * log_s.exp()"),
            ("    log_s = log_s.clamp(floor, LOG_RATIO_BOUND)\n", ""),
            (
                "torch.where(advantages > 0, log_ratio.clamp(max=epsilon_high)",
                "torch.where(advantages < 0, log_ratio.clamp(max=epsilon_high)",
            ),
            ("log_ratio.clamp(min=-epsilon_low)", "log_ratio.clamp(min=-epsilon_high)"),
            ("clipped = torch.where(mask.bool(), clipped, 0.0)\n", "clipped = clipped + 0.0\n"),
            ("/ live_tokens(mask, clipped.dtype)", ""),
            ("clamp(max=1.0).detach()", "detach()"),
            ("torch.where(advantages >= 0, torch.ones_like(taper), taper)", "taper"),
            (
                "shift = per_token_logps.exp() - old_per_token_logps.exp()",
                "shift = (per_token_logps - old_per_token_logps).exp() - 1",
            ),
            ("(shift < -epsilon_low), (advantages > 0)", "(shift < -epsilon_high), (advantages > 0)"),
            ("(advantages > 0) & (shift > epsilon_high)", "(shift > epsilon_high)"),
            ("torch.where(low | high, 0.0, -log_ratio.exp()", "torch.where(low, 0.0, -log_ratio.exp()"),
            (
                "return (ratio < 1 - epsilon_low) & (advantages < 0)",
                "return (ratio < 1 - epsilon_low) & (advantages > 0)",
            ),
            ("((log_ratio.exp() > epsilon_high) & (advantages > 0))", "(log_ratio.exp() > epsilon_high)"),
            (
                "return (log_ratio < -epsilon_low) & (advantages < 0)",
                "return (log_ratio < epsilon_low) & (advantages < 0)",
            ),
        ],
    ),
    (
        "objective/kl",
        "objective/test_kl",
        [
            ("return -log_ref_ratio\n", "return log_ref_ratio\n"),
            ("log_ref_ratio.square() / 2", "log_ref_ratio.square()"),
            ("torch.expm1(d) - d", "d.exp() - d - 1"),
            ("torch.expm1(d) - d", "torch.expm1(-d) + d"),
            ("log_ref_ratio.clamp(max=LOG_RATIO_BOUND)", "log_ref_ratio"),
            ("log_ref_ratio.clamp(max=LOG_RATIO_BOUND)", "log_ref_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)"),
            ("k3(log_ref_ratio).detach() +", "k3(log_ref_ratio) +"),
            ("return k3(log_ref_ratio).detach() + (surrogate - surrogate.detach())", "return surrogate"),
            ("log_ratio.exp() * k3(", "log_ratio.exp().detach() * k3("),
            ("log_ref_ratio.abs()", "log_ref_ratio.abs() / 2"),
            ("k3(log_ref_ratio.sum(dim=-1, keepdim=True))", "k3(log_ref_ratio).sum(dim=-1, keepdim=True)"),
            ("k3(log_ref_ratio.sum(dim=-1, keepdim=True))", "k3(log_ref_ratio.mean(dim=-1, keepdim=True))"),
        ],
    ),
    (
        "objective/advantages",
        "objective/test_advantages",
        [
            ("degrees.to(values.dtype), math.inf).sqrt()", "degrees.to(values.dtype), math.inf)"),
            (
                "torch.where(degrees > 0, squares / degrees.to(values.dtype), math.inf)",
                "(squares / degrees.to(values.dtype))",
            ),
            ("(~values.isnan()).sum(dim=dim) - ddof", "values.isnan().logical_not().sum(dim=dim)"),
            ("((~rewards.isnan()).sum(dim=-1) < 2) | (highest == lowest)", "(highest == lowest)"),
            (
                "def group(rewards: Rewards, *, ddof: Ddof = 1, eps: NotNegative = 1e-4)",
                "def group(rewards: Rewards, *, ddof: Ddof = 0, eps: NotNegative = 1e-4)",
            ),
            (
                "def group(rewards: Rewards, *, ddof: Ddof = 1, eps: NotNegative = 1e-4)",
                "def group(rewards: Rewards, *, ddof: Ddof = 1, eps: NotNegative = 1e-6)",
            ),
            ("_std(rewards, ddof, dim=-1)[:, None] + eps", "(_std(rewards, ddof, dim=-1)[:, None] ** 2 + eps).sqrt()"),
            (
                'return _centred(rewards)\n\n\n@estimators.register("batch"',
                'return rewards\n\n\n@estimators.register("batch"',
            ),
            ("(_std(rewards, ddof) + eps)", "(_std(_centred(rewards), ddof) + eps)"),
            ("def batch(rewards: Rewards, *, ddof: Ddof = 1", "def batch(rewards: Rewards, *, ddof: Ddof = 0"),
            ("_centred(rewards) * (g / (g - 1))", "_centred(rewards) * ((g + 1) / g)"),
            ("_whitened(_centred(rewards), mask, ddof, floor)", "_whitened(rewards, mask, ddof, floor)"),
            ("_whitened(_centred(rewards), mask, ddof, floor)", "_whitened(_centred(rewards), None, ddof, floor)"),
            ("_whitened(_centred(rewards), mask, ddof, floor)", "_whitened(_centred(rewards), mask, 0, floor)"),
            ("return _whitened(rewards, mask, ddof, floor)", "return _whitened(_centred(rewards), mask, ddof, floor)"),
            ("return _whitened(rewards, mask, ddof, floor)", "return _whitened(rewards, None, ddof, floor)"),
            ("kl_rewards.flip(-1).cumsum(dim=-1).flip(-1)", "kl_rewards.cumsum(dim=-1)"),
            ("kl_rewards.flip(-1).cumsum(dim=-1).flip(-1)", "kl_rewards.sum(dim=-1, keepdim=True) + 0 * kl_rewards"),
            ("rewards[..., None] + to_go", "rewards[..., None] - to_go"),
            ("torch.where(mask.bool(), returns if", "torch.where(mask >= 0, returns if"),
            ("(returns - counted.mean()) / _std", "returns / _std"),
            ("_std(counted, ddof).clamp(min=floor)", "_std(counted, ddof)"),
            (" or counted.min() == counted.max():", ":"),
            ("torch.where(zero_variance(rewards)[:, None], 0 * rewards, rewards - ", "(rewards - "),
            ("(group_means(rewards)[:, None] + eps)\n", "(_std(rewards, 1, dim=-1)[:, None] + eps)\n"),
            ('_in_unit_interval(rewards, "maxrl", "Rescale the reward.")', "rewards"),
            ("return rewards.clamp(0, 1)", "return rewards"),
            ("(rewards > 1 + ROUNDING)", "(rewards > 1)"),
            ("group(rewards, eps=eps).clamp(-clamp, clamp)", "group(rewards, eps=eps)"),
            ("_std(per_group, ddof=1) + batch_eps", "_std(per_group, ddof=0) + batch_eps"),
            ("per_group - per_group.nanmean()) / (", "per_group) / ("),
            (".clamp(-clamp, clamp)\n", ".clamp(-clamp, clamp).nan_to_num()\n"),
            (
                "p.mean().item(), p.var(correction=1).item()\n    c =",
                "p.mean().item(), p.var(correction=0).item()\n    c =",
            ),
            ("flatten: float = 3.0", "flatten: float = 1.0"),
            ("BetaFit(max(1 + c * m / flatten, 1.0)", "BetaFit(max(1 + c * (1 - m) / flatten, 1.0)"),
            ("max(1 + c * (1 - m) / flatten, 1.0)", "1 + c * (1 - m) / flatten"),
            ("BetaFit(1.0, 1.0, degenerate=True)", "BetaFit(1.0, 1.0, degenerate=False)"),
            ("BetaFit(1.0, 1.0, degenerate=True)", "BetaFit(1.5, 1.5, degenerate=True)"),
            ("torch.xlogy(fit.beta - 1, 1 - p)", "(fit.beta - 1) * (1 - p).log()"),
            (
                "torch.xlogy(fit.alpha - 1, p) + torch.xlogy(fit.beta - 1, 1 - p)",
                "torch.xlogy(fit.beta - 1, p) + torch.xlogy(fit.alpha - 1, 1 - p)",
            ),
            (" - _log_beta(fit.alpha, fit.beta)\n", "\n"),
            ("(-log_pdf).exp().clamp(max=cap)", "log_pdf.exp().clamp(max=cap)"),
            (".exp().clamp(max=cap)", ".exp()"),
            ("cap: Cap = 1e6", "cap: Cap = 1e5"),
            ("math.lgamma(beta) - math.lgamma(alpha + beta)", "math.lgamma(beta) + math.lgamma(alpha + beta)"),
            ("torch.cat([(history - low) / (high - low), means])", "torch.cat([history, means])"),
            ("    if history is not None:\n", "    if False:\n"),
            ("_in_unit_interval((rewards - low) / (high - low)", "_in_unit_interval(rewards / (high - low)"),
            ("rewards[(rewards < -ROUNDING) | (rewards > 1 + ROUNDING)]", "rewards[rewards > 1 + ROUNDING]"),
            ("a + unit.nansum(dim=-1, keepdim=True)) / (a + b + g)", "unit.nansum(dim=-1, keepdim=True)) / g"),
            ("(mu * (1 - mu) + eps).sqrt()", "((mu * (1 - mu)).sqrt() + eps)"),
            ("(c * m, c * (1 - m)) if c > 0", "(c * (1 - m), c * m) if c > 0"),
            ("p.var(correction=1).item() if len(p) > 1", "p.var(correction=0).item() if len(p) > 1"),
            ("k: Count = 2", "k: Count = 1"),
            ("credit = n * (", "credit = ("),
            ("_pass_rate(n - 1, c - binary.nan_to_num(), k)", "_pass_rate(n - 1, c, k)"),
            ("((n - c)[..., None] - i).clamp(min=0)", "((n - c + 1)[..., None] - i).clamp(min=0)"),
            ("return 1 - factors.prod(dim=-1)", "return factors.prod(dim=-1)"),
        ],
    ),
    (
        "objective/trajectory",
        "objective/test_trajectory",
        [
            ("key=lambda way: way[0]", "key=lambda way: -way[0]"),
            ("path[-1] if path else -len(prompt) - 1", "path[-1] if path else -1"),
            ("            path.append(len(tree.ids))\n", "            path = [*path, len(tree.ids)]\n"),
            ("ways.append((turn.context + turn.sampled, path))", "ways.append((turn.context, path))"),
            ("tuple(news if number else prompt)", "tuple(news)"),
            ("(low, middle)", "(low, middle - 1)"),
            ("found.append((prompt + 1 + place", "found.append((prompt"),
            ("if ids and (ids[-1] in ends)", "if (ids[-1] in ends)"),
            ("for turn in sampled) if sampled else None", "for turn in sampled)"),
            ("known(trajectories) if logprobs is None else logprobs", "known(trajectories)"),
        ],
    ),
    (
        "objective/turn_credit",
        "objective/test_turn_credit",
        [
            ("exists & (number < last)", "exists"),
            ("rewards - earlier.sum(dim=-1)", "rewards"),
            ("pays[..., t] + gamma * following", "pays[..., t] + following"),
            ("torch.minimum(number.expand_as(returns), last)", "number.expand_as(returns)"),
            ("torch.where(turns >= 0, values.gather", "torch.where(turns >= -1, values.gather"),
            ("only_signal(group(returns, ddof=ddof, eps=eps), returns)", "group(returns, ddof=ddof, eps=eps)"),
            ("if scale else none(values)", "if not scale else none(values)"),
            ("torch.stack([of_group[known], states[known]])", "torch.stack([states[known], states[known]])"),
            ("step_weight * step, turns)", "step, turns)"),
        ],
    ),
    (
        "packing/tree",
        "packing/test_trees",
        [
            ("(parent + 1) * vocabulary + token", "token"),
            ("weight[found] += 1", "weight[found] = 1"),
            ("own[parent] if parent >= 0 else prompt[parent]", "own[parent] if parent >= 0 else prompt[-1]"),
            ("            if previous != ROOT:\n", "            if True:\n"),
            ("followers[before[token]] > 1", "False"),
            ("segments[prefix].position + len(segments[prefix].tokens)", "segments[prefix].position"),
            ("first = max(1, kept)", "first = kept"),
            ("number * right + np.arange", "number + np.arange"),
            ("- 1) | (live == 0)).all()", "- 1)).all()"),
        ],
    ),
    (
        "environments/loop",
        "environments/test_environment_loop",
        [
            ("attempt.truncated = not step.done", "attempt.truncated = False"),
            ("len(attempt.context.ids) - common(seen, attempt.context.ids)", "0"),
            ("[replace(turn, reward=None) for turn in attempt.turns]", "attempt.turns"),
            ("None if isinstance(chosen, str) else float(chosen)", "None"),
            ("idle = self.engine.waits or not self._ready", "idle = not self._ready"),
            ("sorted(self._ready, key=lambda attempt: attempt.number)", "self._ready"),
            ("if sample.ids and sample.ids[-1] in self.limits.ends:", "if sample.ids:"),
            ("except Exception as error:  # no descriptors, no threads left", "except OSError as error:"),
        ],
    ),
    (
        "environments/rendering",
        "environments/test_sampled_is_trained",
        [
            ("return ids[1:] if ids[:1] == [last] else self._encoded(suffix)", "return ids"),
            ("*before.ids, *sampled, *self._after", "*before.ids, *self._after"),
            ("if text.startswith(before.text + said):", "if True:"),
            ('value.encode("utf-8", "replace").decode()', "value"),
            ('f"{special[0]} {special[1:]}"', "special"),
        ],
    ),
    (
        "environments/hosts",
        "environments/test_hosts",
        [
            ("max(self.stream.sent_at + self.seconds,", "max(self.asked + self.seconds,"),
            ("if self.stream.received and not self.extended_until:", "if False:"),
            ('if isinstance(failed := answer.get("failed"), list):', 'if failed := answer.get("failed"):'),
        ],
    ),
    (
        "environments/session",
        "environments/test_seat",
        [
            ("except BaseException as error:", "except Exception as error:"),
            ("default=float", "default=str"),
            ("refused = sum(not well", "refused = sum(well"),
        ],
    ),
    (
        "environments/observations",
        "environments/test_seat",
        [
            ("not abs(value) <= LARGEST", "False"),
            ("isinstance(count, int) and abs(count) <= LONGEST", "isinstance(count, int)"),
            ('value.get("done") is True', "True"),
            ("[*before, {", "[{"),
        ],
    ),
    (
        "objective/advantages",
        "objective/test_laws",
        [
            ("silent = rewards.isnan() | zero_variance(rewards)[:, None]", "silent = rewards.isnan()"),
            (
                "silent = rewards.isnan() | zero_variance(rewards)[:, None]",
                "silent = zero_variance(rewards)[:, None].expand_as(rewards)",
            ),
            ("(highest == lowest)", "(rewards.std(dim=-1) < 0)"),
            ("torch.where(scorable, rewards, -math.inf)", "torch.where(scorable, rewards, 0.0)"),
            ("return rewards.nanmean(dim=-1)", "return rewards.nan_to_num().mean(dim=-1)"),
            ("len(p) < 2 or (p.max()", "(p.max()"),
        ],
    ),
    (
        "objective/estimate",
        "objective/test_estimate",
        [
            ("    silent = rewards.isnan()\n", "    silent = rewards.isnan() & False\n"),
            ("silent | zero_variance(rewards)[:, None]", "silent"),
            ("    if estimators.traits(name).group_baseline:\n", "    if True:\n"),
            ("silent[..., None] | (mask == 0)", "silent[..., None]"),
            ("(tuple(rewards.shape), per_token)", "(tuple(rewards.shape), per_token, tuple(found.shape))"),
            ("not isinstance(found, Tensor) or ", ""),
            ("found = found.to(rewards.dtype)\n", "pass\n"),
            ("wrong = ~advantages.isfinite()", "wrong = advantages.isnan()"),
            ("wrong = ~advantages.isfinite()", "wrong = advantages.isinf()"),
            ("    _refuse_infinite(name, found, rewards)\n", ""),
        ],
    ),
    (
        "objective/aggregation",
        "objective/test_aggregation",
        [
            ("torch.where(mask.bool(), per_token_loss, torch.zeros_like(per_token_loss))", "(per_token_loss * mask)"),
            ("(token_sums(per_token_loss, mask) / n).sum()", "per_token_loss.mean(dim=-1).sum()"),
            ("(token_sums(per_token_loss, mask) / n).sum()", "token_sums(per_token_loss, mask).sum()"),
            ("/ totals.tokens.clamp(min=1)", "/ mask.sum()"),
            (
                'sum() / totals.sequences.clamp(min=1)\n\n\n@aggregations.register("seq-mean-token-sum-norm"',
                'sum() / len(mask)\n\n\n@aggregations.register("seq-mean-token-sum-norm"',
            ),
            ("/ max_completion_length", "/ mask.shape[1]"),
            ("/ tokens / totals.micro_batches.clamp(min=1)", "/ tokens"),
            ("m.any(dim=-1).sum()", "m.any(dim=-1).numel()"),
            ("totals.tokens.clamp(min=1)", "totals.tokens"),
            ("mask.bool().sum().clamp(min=1)", "mask.bool().sum()"),
        ],
    ),
    (
        "objective/losses",
        "objective/test_losses",
        [
            (
                'aggregation="seq-mean-token-mean",\n    trl=True,\n)\n_row(\n    "deepseek_v3"',
                'aggregation="token-mean",\n    trl=True,\n)\n_row(\n    "deepseek_v3"',
            ),
            ('ratio="product",\n    kl="sequence_k3"', 'ratio="sequence",\n    kl="sequence_k3"'),
            ('kl="sequence_k3"', 'kl="k3"'),
            ('"epsilon_low": 10.0, "epsilon_high": 10.0', '"epsilon_low": 10.0, "epsilon_high": 100.0'),
            (
                'advantage="none",\n    aggregation="seq-mean-token-sum-norm"',
                'advantage="group",\n    aggregation="seq-mean-token-sum-norm"',
            ),
            ('aggregation="seq-mean-token-sum-norm"', 'aggregation="seq-mean-token-sum"'),
            ('aggregation="micro-batch-token-mean"', 'aggregation="seq-mean-token-mean"'),
            ('"delta": 10.0', '"delta": None'),
            ('combination="average_advantages"', 'combination="sum_then_normalize"'),
            ('options={"epsilon_low": 0.2, "epsilon_high": 0.28},', ""),
            ('"epsilon_low": 3e-4, "epsilon_high": 4e-4', '"epsilon_low": 4e-4, "epsilon_high": 3e-4'),
            ('options={"epsilon_high": 5.0},\n    trl=True,', 'options={"epsilon_high": 6.0},\n    trl=True,'),
            (
                '(4/tau) sigmoid(tau (r - 1)) A",\n    aggregation="seq-mean-token-mean"',
                '(4/tau) sigmoid(tau (r - 1)) A",\n    aggregation="token-mean"',
            ),
            ('"epsilon_low": 2e-3, "epsilon_high": 2.5e-3', '"epsilon_low": 2.5e-3, "epsilon_high": 2e-3'),
            ('surrogate="vespo",', 'surrogate="vespo",\n    aggregation="seq-mean-token-mean",'),
            ('advantage="minimind",', 'advantage="group",'),
            ('advantage_kwargs={"ddof": 0},', ""),
            ('advantage="loo",', 'advantage="none",'),
            ('kl_placement="reward",\n    advantage="loo"', 'kl_placement="loss",\n    advantage="loo"'),
            (
                'kl="k1",\n    kl_placement="reward",\n    advantage="reinforce_pp"',
                'kl="k3",\n    kl_placement="reward",\n    advantage="reinforce_pp"',
            ),
            ('kl="k2",', 'kl="k3",'),
            ('kl="k2",', 'kl="k2", kl_placement="reward",'),
            ('advantage="reinforce_pp_baseline"', 'advantage="reinforce_pp"'),
            ("per_completion=True", "per_completion=False"),
            ('surrogate="gmpo",', 'surrogate="gmpo",\n    options={"epsilon_low": 0.2},'),
            ('ratio="product",\n    levels=("product",)', 'ratio="sequence",\n    levels=("sequence",)'),
            ('surrogate="dppo",', 'surrogate="clip",'),
            ("self.fields.get(option) or OPTION_FIELDS.get(option)", "OPTION_FIELDS.get(option)"),
            ('advantage="maxrl",', 'advantage="none",'),
        ],
    ),
    (
        "objective/losses",
        "test_registry",
        [
            ("        if row.surrogate is entry:\n", "        if False:\n"),
            (
                "losses.register(*names)(Loss(surrogate=surrogate, **row))",
                "losses.register(*names)(Loss(surrogate=surrogate))",
            ),
            ("    if not callable(entry):\n", "    if False:\n"),
        ],
    ),
    (
        "objective/objective",
        "objective/test_losses",
        [
            ('options["epsilon_high"] = config.epsilon', "pass"),
            ("per_token_logps.detach()))\n        advantages", "per_token_logps))\n        advantages"),
            ("dict(row.options if paper else row.trl_options)", "dict(row.trl_options)"),
            ("**self.aggregation_kwargs)", "**dict.fromkeys(self.aggregation_kwargs, 1))"),
            ("self.row.per_completion or self.ratio", "self.ratio"),
            ("if not paper and row.trl_float32:", "if False:"),
            ("dict(row.options if paper else row.trl_options)", "dict(row.options if paper else {})"),
            ("aggregations.traits(self.aggregation).additive", "True"),
            ('return self.kl_in_reward or "mask" in', 'return "mask" in'),
            ("total - self.beta * kl.sum(dim=-1)", "total - kl.sum(dim=-1)"),
            ("total - self.beta * kl.sum(dim=-1)", "total + self.beta * kl.sum(dim=-1)"),
            ("torch.where(mask.any(dim=-1), total, math.nan)", "total"),
            ('if "kl_rewards" not in asked_for(', 'if "" not in asked_for('),
            ("else -self.beta * kl}", "else -kl}"),
            ('offered | {"history": past}', "offered"),
            ("history[:, column]", "history[:, 0 * column - 1]"),
            ('{"log_metric": log_metric, "mask": mask,', '{"mask": mask,'),
            ('self.kl_placement == "loss"', 'self.kl_placement != ""'),
            ('{"missing": self.missing_rewards} if', "{} if"),
            (
                "advantages.unsqueeze(1) if advantages.dim() == 1",
                "advantages.abs().unsqueeze(1) if advantages.dim() == 1",
            ),
        ],
    ),
    (
        "objective/objective",
        "objective/test_laws",
        [
            ('"per_token_logps": masked(per_token_logps, mask)', '"per_token_logps": per_token_logps'),
            ('"old_per_token_logps": masked(old, mask)', '"old_per_token_logps": old'),
            (
                'masked(full_precision(fixed["ref_per_token_logps"]) - per_token_logps, mask)',
                'fixed["ref_per_token_logps"] - per_token_logps',
            ),
            ("else masked(advantages, mask)", "else advantages"),
            ("sampler = torch.where(live, sampler, 1.0)", "pass"),
            ("{name: value.detach() for", "{name: value for"),
        ],
    ),
    (
        "registry",
        "test_registry",
        [
            ("n=3, cutoff=0.6", "n=1, cutoff=0.6"),
            ("n=3, cutoff=0.6", "n=3, cutoff=0.99"),
            ("if _is_another(self._entries.get(name), entry):", "if False:"),
            ("code is None or code != _code(new)", "True"),
            ('getattr(entry, "surrogate", entry)', "entry"),
            ("        sys.path.append(os.getcwd())\n", "        pass\n"),
            ("if not module_name or not attribute:", "if False:"),
            ("except Exception as error:", "except ImportError as error:"),
            ('(":" in name or "." in name)', '":" in name'),
            ('path.partition(":") if ":" in path else path.rpartition(".")', 'path.partition(":")'),
        ],
    ),
    (
        "objective/combinations",
        "objective/test_advantages",
        [
            ("rounded & ~total.isnan()", "total.isnan() & ~total.isnan()"),
            ("(rewards * weights).nansum(dim=-1)\n", "rewards.nansum(dim=-1)\n"),
            ("        scored = scored & (weights != 0)\n", ""),
            ('missing == "renormalize"', 'missing != "renormalize"'),
            ("total * weights.abs().sum()", "total * weights.sum()"),
            ("torch.where(scored.any(dim=-1), total, math.nan)", "total"),
            (
                "estimator(weighted_total(rewards, weights, missing=missing), -1)",
                "estimator(weighted_total(rewards, weights, missing=missing), 0)",
            ),
            ("_std(total, ddof=1) + eps", "_std(total, ddof=0) + eps"),
            ("centred = total - total.nanmean()", "centred = total"),
            ("(spread & (weights != 0)).any()", "spread.any()"),
            ("torch.where((spread & (weights != 0)).any(), whitened, centred)", "whitened"),
            ("torch.where((spread & (weights != 0)).any(), whitened, centred)", "centred"),
            ("(columns * weights[:, None, None]).sum(dim=0)", "columns.sum(dim=0)"),
            ("torch.stack(columns).sum(dim=0) / weights.abs().sum()", "torch.stack(columns).sum(dim=0)"),
            ("torch.stack(columns).sum(dim=0) / weights.abs().sum()", "torch.stack(columns).mean(dim=0)"),
        ],
    ),
]


def run(mutation: Mutation | None, tests: list[str], folder: Path) -> int:
    """In a fork: exit status of pytest against a copy of src with the mutation applied."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation:
            path = folder / "grpo_ext" / f"{mutation.module}.py"
            path.write_text(path.read_text().replace(mutation.old, mutation.new))
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        sys.dont_write_bytecode = True
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-k", NOT_HERE]
        status = int(pytest.main([*arguments, *(str(ROOT / "tests" / f"{name}.py") for name in tests)]))
        if not sys.modules["grpo_ext"].__file__.startswith(str(folder)):
            status = 98
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(running: dict[int, tuple]) -> tuple[tuple, int]:
    pid, status = os.wait()
    return running.pop(pid), os.waitstatus_to_exitcode(status)


def verdict(status: int) -> str:
    return {0: "SURVIVED", 1: "killed"}.get(status, f"BROKEN ({status})")


def main(words: list[str]) -> int:
    chosen = [m for m in table() if not words or any(w in " ".join(m) for w in words)]
    for m in chosen:
        count = (ROOT / "src" / "grpo_ext" / f"{m.module}.py").read_text().count(m.old)
        assert count == 1, f"{m.module}.py holds {count} times: {m.old!r}"
    started, running, results = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory() as folder:
        unbroken = run(None, sorted({m.tests for m in chosen}), Path(folder, "unbroken"))
        running[unbroken] = ()
        _, status = wait(running)
        if status:
            print(Path(folder, "unbroken.log").read_text())
            print(f"the tests fail without any mutation ({status})")
            return 1
        queue = list(enumerate(chosen))
        while queue or running:
            while queue and len(running) < JOBS:
                i, m = queue.pop(0)
                running[run(m, [m.tests], Path(folder, str(i)))] = (m, i, time.monotonic())
            (m, i, since), status = wait(running)
            results.append(verdict(status))
            shown = [" ".join(text.split())[:60] for text in (m.old, m.new)]
            print(
                f"{results[-1]:12} {time.monotonic() - since:4.1f} s  {m.module:22} {shown[0]}  ->  {shown[1]}",
                flush=True,
            )
            if results[-1].startswith("BROKEN"):
                print(Path(folder, f"{i}.log").read_text()[-2000:])
            shutil.rmtree(Path(folder, str(i)), ignore_errors=True)
    killed = results.count("killed")
    print(f"{killed} of {len(results)} mutations killed in {time.monotonic() - started:.0f} s")
    return 0 if killed == len(results) else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["JAXTYPING_DISABLE"] = "1"  # quicker, and a wrong number is to be caught as a number
    import beartype.claw  # noqa: F401 (all that is slow to load, before the forks)
    import hypothesis  # noqa: F401
    import jaxtyping  # noqa: F401
    import pytest
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # loads sympy
    raise SystemExit(main(sys.argv[1:]))
