"""The table of faults: which logged metrics show each, what it is, and how to fix it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

<<<<<<< HEAD
from grpo_ext.trainer.diagnosis.history import History, span

ROWS = 3
"""Consecutive logged rows that a rule needs, where it names no other number."""
TREND = 5
"""Rows that separate a trend from a level."""
LEAP = 5.0
"""Factor over all earlier mismatches that counts as a leap."""
ROUNDING = 2e-5
"""Nats per token below which a mismatch is rounding."""
ALONE, ALONE_ONE_SIDED = 0.1, 1e-3
"""Nats per token above which a mismatch counts without earlier rows to compare with: rounding to bfloat16 stays below
the first, and is never one-sided."""
KEPT = 0.75
"""Weight of long completions, as a share of that of short ones, below which the correction punishes length."""
CUT = "completions/clipped_ratio"
ANOTHER_TEXT = 0.2
"""Nats per token that appear at once where two models read different prompts."""

Evidence = Callable[[History], str]
=======
from grpo_ext.trainer.diagnosis.evidence import EVIDENCE, History
>>>>>>> main


@dataclass(frozen=True)
class Rule:
    """How a fault shows, what it is, how to fix it.

    Attributes:
        figures: metrics that the rule reads; NAME is any reward's or environment's. Without one of them in the log
            the rule finds no evidence.
    """

    name: str
    figures: tuple[str, ...]
    seen: str
    meaning: str
    cure: str

    def missing(self, logged: Iterable[str]) -> list[str]:
        """Metrics of this rule that a log does not have."""
        known = {_generic(name) for name in logged}
        return [figure for figure in self.figures if figure not in known]


def _generic(name: str) -> str:
    """Return a metric's name with NAME in place of the reward or environment."""
    head, _, rest = name.partition("/")
    return f"{head}/NAME/{rest.rpartition('/')[2]}" if head in ("rewards", "environments") and "/" in rest else name


@dataclass(frozen=True)
class Finding:
    """A fault, with the first step at which the log shows it."""

    rule: Rule
    step: int
    evidence: str

    def __str__(self) -> str:
        """Return one paragraph."""
        return f"step {self.step}: {self.rule.name}. {self.evidence}. {_sentence(self.rule.meaning)} {self.rule.cure}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


class Doctor:
    """Read a log row by row and name each fault once."""

    def __init__(self) -> None:
        """Start with an empty history."""
        self.history = History()
        self.named: set[str] = set()

    def read(self, row: Mapping[str, Any]) -> list[Finding]:
        """Return the faults that this row is the first to show."""
        if not self.history.add(row):
            return []
        found = []
        for rule in RULES:
            if rule.name not in self.named and (evidence := EVIDENCE[rule.name](self.history)):
                self.named.add(rule.name)
                found.append(Finding(rule, int(row["step"]), evidence))
        return found


def diagnose(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return the faults that a log shows, in order of their steps."""
    doctor = Doctor()
    return [finding for row in rows for finding in doctor.read(row)]


<<<<<<< HEAD
# The sampler differs from the policy.

MISMATCH = "sampling/mismatch"


def _leap(history: History, rows: int, without_earlier: float = ALONE) -> list[float]:
    """Return the last mismatches if all are far beyond the earlier ones, or beyond `without_earlier` without any."""
    values = history.last(MISMATCH, rows)
    if not values or min(values) <= ROUNDING:
        return []
    before = history.before(MISMATCH, rows)
    limit = LEAP * max(before) if before else without_earlier
    return values if min(values) > limit else []


def _mismatch(history: History, values: list[float]) -> str:
    before = history.before(MISMATCH, len(values))
    earlier = f", {span(before)} before" if before else ""
    return f"{MISMATCH} {span(values)} nats per token in {len(values)} logs{earlier}"


def _one_sided(history: History, values: list[float]) -> bool:
    bias = history.last("sampling/bias", len(values))
    return bool(bias) and all(b > 0.9 * value for b, value in zip(bias, values, strict=True))


def _another_prompt(history: History) -> str:
    values = _leap(history, ROWS)
    return _mismatch(history, values) if values and min(values) >= ANOTHER_TEXT else ""


def _truncated(history: History) -> str:
    values = _leap(history, ROWS, ALONE_ONE_SIDED)
    if not values or min(values) > ANOTHER_TEXT or not _one_sided(history, values):
        return ""
    return f"{_mismatch(history, values)}, all of it one-sided (sampling/bias): the sampler is surer of what it draws"


def _two_sided(history: History) -> list[float]:
    values = _leap(history, TREND)
    return values if values and min(values) <= ANOTHER_TEXT and not _one_sided(history, values) else []


def _grows(values: list[float]) -> bool:
    return mean(values[-2:]) > 1.5 * mean(values[:2])


def _stale(history: History) -> str:
    values = _two_sided(history)
    if not values or not _grows(values):
        return ""
    thirds = (history.last(f"{MISMATCH}_{third}", TREND) for third in ("first", "middle", "last"))
    placed = ", ".join(f"{median(third):.3g}" for third in thirds if third)
    return f"{_mismatch(history, values)}, growing; by thirds of a completion {placed}"


def _precision(history: History) -> str:
    values = _two_sided(history)
    if not values or _grows(values):
        return ""
    return f"{_mismatch(history, values)}, neither growing nor one-sided"


def _loses_long(history: History) -> str:
    """Completions differ in noise too, so a third has to lose a quarter of its weight in each log."""
    short, long = (history.last(f"sampling/kept_{third}", ROWS) for third in ("short", "long"))
    if not (short and long) or any(kept >= KEPT * usual for kept, usual in zip(long, short, strict=True)):
        return ""
    return f"sampling/kept_long {span(long)} in {ROWS} logs, sampling/kept_short {span(short)}"


# Combinators.


def _seen(history: History, name: str, values: list[float]) -> str:
    before = history.before(name, len(values))
    return f"{name} {span(values)} in {len(values)} logs{f', {span(before)} before' if before else ''}"


def _stays_above(name: str, limit: float, rows: int = ROWS) -> Evidence:
    """Evidence: the last values are above a limit."""

    def evidence(history: History) -> str:
        values = history.last(name, rows)
        return f"{name} {span(values)} in {rows} logs" if values and min(values) > limit else ""

    return evidence


def _any_reward(rule: Callable[[History, str], str]) -> Evidence:
    """Evidence of the first reward for which a rule finds some."""
    return lambda history: next((found for name in history.rewards if (found := rule(history, name))), "")


# Rows train with the advantages, rewards or masks of others.


def _other_rows(history: History) -> str:
    values = history.known("advantages/of_reward", ROWS)
    if not values or max(values) > 0.3:
        return ""
    parts = [history.known(f"rewards/{name}/of_advantage", ROWS) for name in history.rewards]
    if any(part and max(part) > 0.5 for part in parts):
        return ""
    return f"advantages/of_reward {span(values)} in {ROWS} logs; 1 is expected"


def _rewards_of_other_rows(history: History) -> str:
    name = "rewards/same_text_differs"
    values, before = history.known(name, ROWS), history.before(name, ROWS)
    return _seen(history, name, values) if values and before and min(values) >= 0.2 and max(before) <= 0.01 else ""


def _end_lost(history: History) -> str:
    """Attempts of environments and tools may be ended from outside, at any length, so they are left out."""
    cut = history.last(CUT, ROWS)
    if not cut or min(cut) < 0.99 or history.several_turns:
        return ""
    least, most = (history.last(f"completions/{name}_length", ROWS) for name in ("min", "max"))
    if not (least and most) or any(low > 0.9 * high for low, high in zip(least, most, strict=True)):
        return ""
    return (
        f"{CUT} {span(cut)} in {ROWS} logs, although lengths of {min(least):g} to {max(most):g} tokens show that no "
        "common limit cut them"
    )


def _no_end(history: History) -> str:
    values, before = history.last(CUT, ROWS), history.before(CUT, ROWS)
    leaps = values and before and min(values) >= 0.8 and median(before) <= 0.3
    return _seen(history, CUT, values) if leaps and not history.several_turns and not _end_lost(history) else ""


# Steps.


def _steps_too_large(history: History) -> str:
    name = "weights/change"
    values, before = history.last(name, ROWS), history.before(name, ROWS)
    beyond = bool(values) and (min(values) > 0.05 or (bool(before) and min(values) > 10 * max(before)))
    harm = _harm(history) if beyond else ""
    return f"{_seen(history, name, values)}; {harm}" if harm else ""


def _harm(history: History) -> str:
    """Return what the last steps have done to the reward or the entropy."""
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


# Rewards and environments.


def _fails(history: History, name: str) -> str:
    errors, unscored = (history.last(f"rewards/{name}/{figure}", 2) for figure in ("errors", "none_frac"))
    if not errors or not unscored or min(errors) < 1:
        return ""
    values = (history.columns.get(f"rewards/{name}/{figure}", [])[-2:] for figure in ("mean", "std"))
    if min(unscored) < 0.5 and any(map(any, values)):
        return ""
    return f"rewards/{name}/errors {span(errors)} completions a step, none_frac {span(unscored)}"


def _environment_fails(history: History) -> str:
    names = [name for name in history.columns if name.startswith("environments/") and name.endswith("/failed")]
    return next((found for name in names if (found := _stays_above(name, 0.5)(history))), "")


def _sign(history: History, name: str) -> str:
    """A reward of 0 or 1 is now 0 or -1, which cannot be learned."""
    figure, spread = f"rewards/{name}/mean", f"rewards/{name}/std"
    values, before = history.last(figure, ROWS), history.before(figure, ROWS)
    if not values or not before or max(values) > 0 or min(values) == 0:
        return ""
    negated = [-value for value in values]
    if not (_binary(before, history.before(spread, ROWS)) and _binary(negated, history.last(spread, ROWS))):
        return ""
    return f"{_seen(history, figure, values)}, of a reward of 0 or 1"


def _constant(history: History, name: str) -> str:
    """A learned reward ends at its highest value, and is left out."""
    means, spread = (history.last(f"rewards/{name}/{figure}", ROWS) for figure in ("mean", "std"))
    before, wide = (history.before(f"rewards/{name}/{figure}", ROWS) for figure in ("mean", "std"))
    if not (means and spread and before and wide) or max(spread) > 0 or min(wide) <= 0:
        return ""
    if max(means) - min(means) > 1e-6 or means[0] >= max(before) or (means[0] == 0 and _binary(before, wide)):
        return ""
    return f"rewards/{name}/mean {means[0]:.3g} with std 0 in {ROWS} logs; {span(before)} with std {span(wide)} before"


def _binary(means: list[float], spread: list[float]) -> bool:
    """Return whether a reward is 0 or 1, so that its variance is m (1 - m)."""
    both = zip(means, spread, strict=False)
    return len(means) == len(spread) and all(0 <= m <= 1 and abs(s * s - m * (1 - m)) < 0.05 for m, s in both)


=======
>>>>>>> main
RULES: tuple[Rule, ...] = (
    Rule(
        "reward fails",
        ("rewards/NAME/errors", "rewards/NAME/none_frac"),
        "`rewards/NAME/errors` above 0, and no value or one value for most completions",
        "a reward, or the process or server that computes it, no longer answers",
        "The rows and the reason are in output_dir/reward_failures; `grpo-ext score` calls only this reward. Raise "
        "its `timeout` or `reward_memory_gib`, or set `on_error: raise` to stop at once.",
    ),
    Rule(
        "environment fails",
        ("environments/NAME/failed",),
        "`environments/NAME/failed` above half, log after log",
        "attempts end because their environment raises, hangs or dies",
        "`environments/NAME/failed/KIND` and the warning have the reason; raise its `turn_timeout` or "
        "`reward_memory_gib`, or play it by hand.",
    ),
    Rule(
        "skipped steps",
        ("nonfinite/skipped_steps",),
        "`nonfinite/skipped_steps` above 0, log after log",
        "steps are left out for NaN or inf",
        "Look at the batches in output_dir/failures; a lower `learning_rate`, `bf16` in place of `fp16`.",
    ),
    Rule(
        "misplaced mask",
        ("completions/mask_misplaced",),
        "`completions/mask_misplaced` above 0",
        "completion_mask does not cover exactly the tokens that were drawn: tokens that were not drawn train, or the "
        "first or the last never does",
        "It is made in `_generate_and_score_completions`, by a subclass, or by a `rollout_func`'s ids: one entry of "
        "the mask for each id, the end token's included.",
    ),
    Rule(
        "end token lost",
        ("completions/clipped_ratio", "completions/min_length", "completions/max_length"),
        "`completions/clipped_ratio` is 1, although completions have different lengths (one turn only)",
        "completions end, but their ids lack the end token, so that the model never learns to end",
        "Let a server or a `rollout_func` return it, set eos_token_id in the tokenizer to what the model ends by, and "
        "leave stop strings out of `generation_kwargs`.",
    ),
    Rule(
        "advantages of other rows",
        ("advantages/of_reward",),
        "`advantages/of_reward` near 0",
        "rows train with the advantages of other rows",
        "Look at what reorders rows between the rewards and the loss: a subclass, an `advantage_estimator` of your "
        "own, a `rollout_func` that returns groups in another order.",
    ),
    Rule(
        "rewards of other rows",
        ("rewards/same_text_differs",),
        "`rewards/same_text_differs` leaps from 0",
        "equal completions of a prompt get different rewards: those of other rows, or random ones",
        "A reward returns one value for each completion, in their order; look at what it computes in parallel.",
    ),
    Rule(
        "steps too large",
        ("weights/change", "reward", "entropy"),
        "`weights/change` leaps, and with it the reward falls or the entropy moves",
        "an optimizer step destroys what the model could do",
        "A lower `learning_rate`, a warm-up (`warmup_steps`), a lower `max_grad_norm`; resume from an earlier "
        "checkpoint.",
    ),
    Rule(
        "another prompt",
        ("sampling/mismatch",),
        "`sampling/mismatch` leaps beyond 0.2 nats per token",
        "sampler and trainer do not read the same prompt (template, tokenizer), or are not the same model",
        "Give both sides one `chat_template` and one model; `grpo-ext check` looks at them.",
    ),
    Rule(
        "truncated sampling",
        ("sampling/mismatch", "sampling/bias"),
        "`sampling/mismatch` leaps, and `sampling/bias` is as large",
        "completions are drawn from a truncated distribution, and trained as if they were the policy's own",
        "Leave `top_p`, `top_k`, `min_p` and `repetition_penalty` unset, also in `generation_kwargs` and in the "
        "model's generation_config.json.",
    ),
    Rule(
        "stale sampler",
        ("sampling/mismatch", "sampling/bias"),
        "`sampling/mismatch` leaps and grows",
        "weights that were pushed did not reach the sampler, or it keeps what earlier ones have made of the prompts",
        "Look at `sampling/weight_sync_seconds` and the server's log, and start the server again. Reset the prefix "
        "cache after each push, or start the server with --no-enable-prefix-caching.",
    ),
    Rule(
        "sampler's precision",
        ("sampling/mismatch", "sampling/bias"),
        "`sampling/mismatch` leaps to a level, and is not one-sided",
        "the sampler has the weights in another precision, or computes by other kernels",
        "Give both sides one dtype (`vllm_dtype`, or merge an adapter in float32), or correct for it "
<<<<<<< HEAD
        "(`sampler_correction`).",
        _precision,
=======
        "(`vllm_importance_sampling_correction`).",
>>>>>>> main
    ),
    Rule(
        "long completions dropped",
        ("sampling/kept_short", "sampling/kept_long"),
        "`sampling/kept_long` stays below three quarters of `sampling/kept_short`",
        "the correction of the sampler takes the gradient of long completions: it bounds a product over their tokens, "
        "which leaves the bounds by rounding alone",
        "Leave `sampler_correction` unset, or set a `level` of token or geometric in place of sequence.",
        _loses_long,
    ),
    Rule(
        "sign of a reward",
        ("rewards/NAME/mean", "rewards/NAME/std"),
        "`rewards/NAME/mean` of a reward of 0 or 1 becomes negative",
        "a reward has changed its sign, and now punishes what it rewarded before",
        "Look at what the reward returns, and at its `weight` and `weight_schedule`.",
    ),
    Rule(
        "constant reward",
        ("rewards/NAME/mean", "rewards/NAME/std"),
        "`rewards/NAME/std` falls to exactly 0, at a value between the extremes",
        "a reward gives all completions the same value, so its advantages are zero",
        "`grpo-ext score --explain N` shows what it reads of a completion; look for a judge without an answer, or a "
        "default that replaces every failure.",
    ),
    Rule(
        "completions no longer end",
        ("completions/clipped_ratio",),
        "`completions/clipped_ratio` leaps above 0.8",
        "completions run into `max_completion_length`",
        "Raise it if they are sound; `soft_overlong` penalises what comes near it; look for what else was named.",
    ),
)
"""In the order in which they are asked: the more special before the more general."""
