"""THE table of faults: what of a run's log names each, what it is, and the cure.

A rule looks at the last rows of a log and answers with its evidence, or with nothing. It asks for several rows in a
row, for a value that cannot be, or for a leap from what was before: a figure that is merely bad is no fault.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean as mean
from statistics import median
from typing import Any

from grpo_ext.trainer.diagnosis.history import History, deviation, span

ROWS = 3
"""Logged rows in a row that a rule asks for, where it names no other number."""
TREND = 5
"""Those by which a trend is told from a level."""
LEAP = 5.0
"""How many times what was before a mismatch is."""
ROUNDING = 2e-5
"""Nats per token below which a mismatch is rounding, whatever it was before."""
ALONE, ALONE_ONE_SIDED = 0.1, 1e-3
"""Nats per token beyond which a mismatch is told also where nothing is known of before: rounding to bfloat16 stays
below the first, and is never one-sided."""
ANOTHER_TEXT = 0.2
"""Nats per token that come at once where two models do not read the same prompt."""

Evidence = Callable[[History], str]


@dataclass(frozen=True)
class Rule:
    """How a fault shows, what it is, what to do."""

    name: str
    seen: str
    meaning: str
    cure: str
    evidence: Evidence


@dataclass(frozen=True)
class Finding:
    """A fault, at the first step at which the log tells of it."""

    rule: Rule
    step: int
    evidence: str

    def __str__(self) -> str:
        """One paragraph."""
        return f"step {self.step}: {self.rule.name}. {self.evidence}. {_sentence(self.rule.meaning)} {self.rule.cure}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


class Doctor:
    """Reads a log row by row, and names each fault once."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.history = History()
        self.named: set[str] = set()

    def read(self, row: Mapping[str, Any]) -> list[Finding]:
        """What this row tells for the first time."""
        if not self.history.add(row):
            return []
        found = []
        for rule in RULES:
            if rule.name not in self.named and (evidence := rule.evidence(self.history)):
                self.named.add(rule.name)
                found.append(Finding(rule, int(row["step"]), evidence))
        return found


def diagnose(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Faults that a log tells of, in the order in which it does."""
    doctor = Doctor()
    return [finding for row in rows for finding in doctor.read(row)]


# The sampler is not the policy.

MISMATCH = "sampling/mismatch"


def _leapt(history: History, rows: int, alone: float = ALONE) -> list[float]:
    """The last mismatches, where all of them are far beyond those before, or beyond `alone` if none are known."""
    values = history.last(MISMATCH, rows)
    if not values or min(values) <= ROUNDING:
        return []
    before = history.before(MISMATCH, rows)
    limit = LEAP * max(before) if before else alone
    return values if min(values) > limit else []


def _mismatch(history: History, values: list[float]) -> str:
    before = history.before(MISMATCH, len(values))
    earlier = f", {span(before)} before" if before else ""
    return f"{MISMATCH} {span(values)} nats per token in {len(values)} logs{earlier}"


def _one_sided(history: History, values: list[float]) -> bool:
    bias = history.last("sampling/bias", len(values))
    return bool(bias) and all(b > 0.9 * value for b, value in zip(bias, values, strict=True))


def _another_prompt(history: History) -> str:
    values = _leapt(history, ROWS)
    if not values or min(values) < ANOTHER_TEXT:
        return ""
    return _mismatch(history, values)


def _truncated(history: History) -> str:
    values = _leapt(history, ROWS, ALONE_ONE_SIDED)
    if not values or min(values) > ANOTHER_TEXT or not _one_sided(history, values):
        return ""
    return f"{_mismatch(history, values)}, all of it one-sided (sampling/bias): the sampler is surer of what it draws"


def _grows(values: list[float]) -> bool:
    return mean(values[-2:]) > 1.5 * mean(values[:2])


def _stale(history: History) -> str:
    values = _leapt(history, TREND)
    if not values or min(values) > ANOTHER_TEXT or _one_sided(history, values) or not _grows(values):
        return ""
    thirds = (history.last(f"{MISMATCH}_{third}", TREND) for third in ("first", "middle", "last"))
    placed = ", ".join(f"{median(third):.3g}" for third in thirds if third)
    return f"{_mismatch(history, values)}, growing; by thirds of a completion {placed}"


def _precision(history: History) -> str:
    values = _leapt(history, TREND)
    if not values or min(values) > ANOTHER_TEXT or _one_sided(history, values) or _grows(values):
        return ""
    return f"{_mismatch(history, values)}, neither growing nor one-sided"


# Rows that train as what they are not.


def _other_rows(history: History) -> str:
    values = history.known("advantages/of_reward", ROWS)
    if not values or max(values) > 0.3:
        return ""
    parts = [history.known(f"rewards/{name}/of_advantage", ROWS) for name in history.rewards]
    if any(part and max(part) > 0.5 for part in parts):
        return ""
    return f"advantages/of_reward {span(values)} in {ROWS} logs, where 1 is expected"


def _rewards_of_other_rows(history: History) -> str:
    name = "rewards/same_text_differs"
    values = history.known(name, ROWS)
    if not values or min(values) < 0.2 or not (before := history.before(name, ROWS)) or max(before) > 0.01:
        return ""
    return f"{name} {span(values)} in {ROWS} logs, {span(before)} before"


def _misplaced_mask(history: History) -> str:
    values = history.last("completions/mask_misplaced", 2)
    return f"completions/mask_misplaced {span(values)}, where only 0 is possible" if values and min(values) > 0 else ""


def _end_lost(history: History) -> str:
    cut = history.last("completions/clipped_ratio", ROWS)
    if not cut or min(cut) < 0.99 or history.last("tools/call_frequency", 1):
        return ""
    least, most = (history.last(f"completions/{name}_length", ROWS) for name in ("min", "max"))
    if not (least and most) or any(low > 0.9 * high for low, high in zip(least, most, strict=True)):
        return ""
    lengths = f"lengths of {min(least):g} to {max(most):g} tokens are no common limit"
    return f"completions/clipped_ratio {span(cut)} in {ROWS} logs, yet {lengths}"


# Steps.


def _steps_too_large(history: History) -> str:
    name = "weights/change"
    values, before = history.last(name, ROWS), history.before(name, ROWS)
    beyond = bool(values) and (min(values) > 0.05 or (bool(before) and min(values) > 10 * max(before)))
    harm = _harm(history) if beyond else ""
    if not harm:
        return ""
    earlier = f", {span(before)} before" if before else ""
    return f"{name} {span(values)} a step in {ROWS} logs{earlier}; {harm}"


def _harm(history: History) -> str:
    """What the last steps have done to the reward or the entropy."""
    for name in ("reward", "entropy"):
        values = history.columns.get(name, [])
        after, earlier = history.last(name, 2), [v for v in values[:-ROWS] or values[:1] if v is not None]
        if not after or not earlier:
            continue
        now, usual = median(after), median(earlier)
        worse = now < min(min(earlier), usual - 0.1 * abs(usual))
        if worse if name == "reward" else not usual / 3 <= now <= usual * 3:
            return f"{name} {now:.3g}, {usual:.3g} before"
    return ""


def _entropy_collapse(history: History) -> str:
    alike, good = (history.last(name, ROWS) for name in ("advantages/zero_variance_groups", "groups/all_right"))
    if not alike or mean(alike) < 0.8 or (good and mean(good) > 0.8):
        return ""
    values, first = history.last("entropy", ROWS), history.first("entropy")
    if not values or first is None or max(values) > 0.2 * first:
        return ""
    return f"entropy {span(values)} nats in {ROWS} logs, {first:.3g} at first; {mean(alike):.0%} of groups are alike"


def _no_end(history: History) -> str:
    name = "completions/clipped_ratio"
    values = history.last(name, ROWS)
    if not values or min(values) < 0.8 or not (before := history.before(name, ROWS)):
        return ""
    if median(before) > 0.3 or _end_lost(history):
        return ""
    return f"{name} {span(values)} in {ROWS} logs, {span(before)} before"


def _skipped_steps(history: History) -> str:
    values = history.last("nonfinite/skipped_steps", ROWS)
    return f"nonfinite/skipped_steps {span(values)} in {ROWS} logs" if values and min(values) > 0 else ""


# Rewards.


def _of_some_reward(rule: Callable[[History, str], str]) -> Evidence:
    return lambda history: next((found for name in history.rewards if (found := rule(history, name))), "")


def _fails(history: History, name: str) -> str:
    errors, unscored = (history.last(f"rewards/{name}/{figure}", 2) for figure in ("errors", "none_frac"))
    if not errors or not unscored or min(errors) < 1:
        return ""
    values = (history.columns.get(f"rewards/{name}/{figure}", [])[-2:] for figure in ("mean", "std"))
    if min(unscored) < 0.5 and any(map(any, values)):
        return ""
    return f"rewards/{name}/errors {span(errors)} completions a step, none_frac {span(unscored)}"


def _environment_fails(history: History) -> str:
    for figure in (name for name in history.columns if name.startswith("environments/") and name.endswith("/failed")):
        values = history.last(figure, ROWS)
        if values and min(values) > 0.5:
            return f"{figure} {span(values)} in {ROWS} logs"
    return ""


def _sign(history: History, name: str) -> str:
    figure = f"rewards/{name}/mean"
    values, before = history.last(figure, ROWS), history.before(figure, ROWS)
    if not values or not before:
        return ""
    usual, far = median(before), 4 * deviation(before)
    if max(v * usual for v in values) >= 0 or min(v * usual for v in before) < 0:
        return ""
    now, then = (read(f"rewards/{name}/std", ROWS) for read in (history.last, history.before))
    impossible = _binary(before, then) and _binary([-v for v in values], now)
    if min(abs(v - usual) for v in values) < far and not impossible:
        return ""
    if abs(mean(values) + usual) > 0.5 * abs(mean(values) - usual):
        return ""
    return f"{figure} {span(values)} in {ROWS} logs, {span(before)} before: as much, of the other sign"


def _constant(history: History, name: str) -> str:
    """Not one that has been learned: that ends at the highest value it has had."""
    means, spread = (history.last(f"rewards/{name}/{figure}", ROWS) for figure in ("mean", "std"))
    if not means or not spread or max(spread) > 0:
        return ""
    before, wide = (history.before(f"rewards/{name}/{figure}", ROWS) for figure in ("mean", "std"))
    if not before or not wide or min(wide) <= 0:
        return ""
    if max(means) - min(means) > 1e-6 or means[0] >= max(before) or (means[0] == 0 and _binary(before, wide)):
        return ""
    return f"rewards/{name}/mean {means[0]:.3g} with std 0 in {ROWS} logs; {span(before)} with std {span(wide)} before"


def _binary(means: list[float], spread: list[float]) -> bool:
    """Whether a reward was 0 or 1: a variance of m (1 - m)."""
    both = zip(means, spread, strict=False)
    return len(means) == len(spread) and all(0 <= m <= 1 and abs(s * s - m * (1 - m)) < 0.05 for m, s in both)


def _extreme(history: History, name: str, *, best: bool) -> str:
    """A reward of 0 or 1 that is all at once the same for everything."""
    means = history.last(f"rewards/{name}/mean", ROWS)
    if not means or (min(means) < 0.93 if best else max(map(abs, means)) > 0.02):
        return ""
    before = history.before(f"rewards/{name}/mean", ROWS)
    if not before or not _binary(before, history.before(f"rewards/{name}/std", ROWS)):
        return ""
    if best:  # a reward that has been learned ends there too: nothing else must be left to learn
        silent = history.last("advantages/zero_variance_groups", ROWS)
        fault = max(before) <= 0.9 and bool(silent) and mean(silent) >= 0.75
    else:
        fault = median(before) >= 0.2 and sorted(before)[1] > 0.02
    return f"rewards/{name}/mean {span(means)} in {ROWS} logs, {span(before)} before" if fault else ""


def _all_groups(history: History, *, best: bool) -> str:
    """Also all alike: of a reward whose best value is not 1, `groups/*` say no more."""
    names = f"groups/all_{'right' if best else 'wrong'}", "advantages/zero_variance_groups"
    values, alike = (history.last(name, TREND) for name in names)
    return f"{names[0]} {span(values)} in {TREND} logs" if values and alike and min(*values, *alike) > 0.95 else ""


def _too_easy(history: History) -> str:
    return _of_some_reward(lambda h, name: _extreme(h, name, best=True))(history) or _all_groups(history, best=True)


def _too_hard(history: History) -> str:
    return _of_some_reward(lambda h, name: _extreme(h, name, best=False))(history) or _all_groups(history, best=False)


def _hacked(history: History, name: str, *, by_length: bool) -> str:
    """The reward `name` makes the advantages, what it pays for rises, and another falls or has no say any more."""
    of_length, of_advantage = (history.known(f"rewards/{name}/{figure}", TREND) for figure in _OF)
    if not of_advantage or median(of_advantage) < 0.7 or (bool(of_length) and median(of_length) > 0.9) != by_length:
        return ""
    figure = "completions/mean_length" if by_length else f"rewards/{name}/mean"
    values, before = history.last(figure, TREND), history.before(figure, TREND)
    if not values or not before or mean(values[-2:]) < max(before):
        return ""
    leapt = by_length or mean(values[-2:]) > max(before) + 0.25 * abs(max(before))
    others = [other for other in history.rewards if other != name]
    harm = next(
        (found for o in others if (found := (leapt and _displaced(history, o, name)) or _falls(history, o))), ""
    )
    told = f"{figure} {mean(values[-2:]):.3g}, at most {max(before):.3g} before"
    told += f"; rewards/{name}/of_length {median(of_length):.2g}" if by_length else ""
    return f"{told}; {harm}" if harm else ""


_OF = ("of_length", "of_advantage")


def _displaced(history: History, name: str, by: str) -> str:
    """A reward that made the advantages more than another did, and makes them less now."""
    figures = [f"rewards/{reward}/of_advantage" for reward in (name, by)]
    now, then = ([read(figure, TREND) for figure in figures] for read in (history.known, history.before))
    if not all((*now, *then)) or median(then[0]) < median(then[1]) or median(now[0]) > 0.9 * median(now[1]):
        return ""
    return f"{figures[0]} {median(now[0]):.2g}, {median(then[0]):.2g} before"


def _falls(history: History, name: str) -> str:
    """A reward that is far below what it was."""
    figure = f"rewards/{name}/mean"
    values, before = history.last(figure, TREND), history.before(figure, TREND)
    if not values or not before:
        return ""
    least = max(2 * deviation(before), 0.1 * abs(mean(before)))
    return f"{figure} {mean(values):.3g}, {mean(before):.3g} before" if mean(before) - mean(values) > least else ""


RULES: tuple[Rule, ...] = (
    Rule(
        "reward fails",
        "`rewards/NAME/errors` above 0, and no value or one value for most completions",
        "a reward, or the process or server that computes it, answers no more",
        "The rows and the reason are in output_dir/reward_failures; `grpo-ext score` calls it alone. Raise its "
        "`timeout` or `reward_memory_gib`, or set `on_error: raise` to stop at once.",
        _of_some_reward(_fails),
    ),
    Rule(
        "environment fails",
        "`environments/NAME/failed` above half, log after log",
        "attempts end because their environment raises, hangs or dies",
        "`environments/NAME/failed/KIND` and the warning say how; raise its `turn_timeout` or `reward_memory_gib`, or "
        "play it by hand.",
        _environment_fails,
    ),
    Rule(
        "skipped steps",
        "`nonfinite/skipped_steps` above 0, log after log",
        "steps are left out for NaN or inf",
        "Look at the batches in output_dir/failures; a lower `learning_rate`, `bf16` in place of `fp16`.",
        _skipped_steps,
    ),
    Rule(
        "misplaced mask",
        "`completions/mask_misplaced` above 0",
        "completion_mask does not cover exactly the tokens that were drawn: tokens train that nobody wrote, or the "
        "first or the last never does",
        "It is made in `_generate_and_score_completions`, by a subclass, or by a `rollout_func`'s ids: one entry of "
        "the mask for each id, the end token's included.",
        _misplaced_mask,
    ),
    Rule(
        "end token lost",
        "`completions/clipped_ratio` is 1, yet completions have different lengths",
        "completions end, but their ids lack the end token, so that the model is never taught to end",
        "Let a server or a `rollout_func` return it, set eos_token_id in the tokenizer to what the model ends by, and "
        "leave stop strings out of `generation_kwargs`.",
        _end_lost,
    ),
    Rule(
        "advantages of other rows",
        "`advantages/of_reward` near 0",
        "rows train by advantages that are not theirs",
        "Look at what reorders rows between the rewards and the loss: a subclass, an `advantage_estimator` of your "
        "own, a `rollout_func` that returns groups in another order.",
        _other_rows,
    ),
    Rule(
        "rewards of other rows",
        "`rewards/same_text_differs` leaps from 0",
        "equal completions of a prompt get different rewards: they are another row's, or drawn",
        "A reward returns one value for each completion, in their order; look at what it computes in parallel.",
        _rewards_of_other_rows,
    ),
    Rule(
        "steps too large",
        "`weights/change` leaps, and with it the reward falls or the entropy moves",
        "an optimizer step destroys what the model could do",
        "A lower `learning_rate`, a warm-up (`warmup_steps`), a lower `max_grad_norm`; go on from a checkpoint of "
        "before.",
        _steps_too_large,
    ),
    Rule(
        "another prompt",
        "`sampling/mismatch` leaps beyond 0.2 nats per token",
        "sampler and trainer do not read the same prompt (template, tokenizer), or are not the same model",
        "Give both sides one `chat_template` and one model; `grpo-ext check` looks at them.",
        _another_prompt,
    ),
    Rule(
        "truncated sampling",
        "`sampling/mismatch` leaps, and `sampling/bias` is as large",
        "completions are drawn from a truncated distribution, and trained as if they were the policy's own",
        "Leave `top_p`, `top_k`, `min_p` and `repetition_penalty` unset, also in `generation_kwargs` and in the "
        "model's generation_config.json.",
        _truncated,
    ),
    Rule(
        "stale sampler",
        "`sampling/mismatch` leaps and grows",
        "weights that were pushed did not reach the sampler, or it keeps what earlier ones have made of the prompts",
        "Look at `sampling/weight_sync_seconds` and the server's log, and start the server again. Reset the prefix "
        "cache after each push, or start the server with --no-enable-prefix-caching.",
        _stale,
    ),
    Rule(
        "sampler's precision",
        "`sampling/mismatch` leaps to a level, and is not one-sided",
        "the sampler has the weights in another precision, or computes by other kernels",
        "Give both sides one dtype (`vllm_dtype`, or merge an adapter in float32), or correct for it "
        "(`vllm_importance_sampling_correction`).",
        _precision,
    ),
    Rule(
        "sign of a reward",
        "`rewards/NAME/mean` leaps to its opposite",
        "a reward has changed its sign, and now pays for what it punished",
        "Look at what the reward returns, and at its `weight` and `weight_schedule`.",
        _of_some_reward(_sign),
    ),
    Rule(
        "constant reward",
        "`rewards/NAME/std` falls to exactly 0, at a value between the extremes",
        "a reward gives all completions one value: nothing is learned from it",
        "`grpo-ext score --explain N` shows what it reads of a completion; a judge that answers nothing, a default "
        "that stands for every failure.",
        _of_some_reward(_constant),
    ),
    Rule(
        "data too easy",
        "a reward of 0 or 1 leaps to nearly 1 and most groups are alike, or `groups/all_right` stays near 1",
        "all completions are right: there is nothing to learn from",
        "Harder prompts, by pass rates (`max_pass_rate`) or `dynamic_sampling`; or the run is done. A reward that "
        "says 1 to everything looks alike: read some completions.",
        _too_easy,
    ),
    Rule(
        "data too hard",
        "a reward of 0 or 1 leaps to 0, or `groups/all_wrong` stays near 1",
        "all completions are wrong: there is nothing to learn from",
        "Easier prompts (`min_pass_rate`), more `num_generations`, an SFT model to start from. A reward that looks "
        "for what the model never writes is alike: `grpo-ext score --explain N`.",
        _too_hard,
    ),
    Rule(
        "entropy collapse",
        "`entropy` falls below a fifth of what it was, and groups are alike without being right",
        "the policy has become certain, and explores no more",
        "A lower `learning_rate`, a higher `epsilon_high`, `entropy_coef`, `beta` above 0; go on from a checkpoint of "
        "before.",
        _entropy_collapse,
    ),
    Rule(
        "hacked by length",
        "a reward that goes with the length alone makes completions longer, and another reward falls",
        "the model is paid for words",
        "A lower weight for that reward, a bound on it (`clip`), `soft_overlong`; read the longest completions.",
        _of_some_reward(partial(_hacked, by_length=True)),
    ),
    Rule(
        "hacked by another reward",
        "one reward makes the advantages and rises, and another falls",
        "the model is paid for something else than the reward that falls",
        "Read completions that have the one and not the other; lower its `weight`, or let it count only where the "
        "other is met.",
        _of_some_reward(partial(_hacked, by_length=False)),
    ),
    Rule(
        "completions no longer end",
        "`completions/clipped_ratio` leaps above 0.8",
        "completions run into `max_completion_length`",
        "Raise it if they are sound; `soft_overlong` penalises what comes near it; look for what else was named.",
        _no_end,
    ),
)
"""In the order in which they are asked; the more special before the more general."""
