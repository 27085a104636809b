"""The table of faults: which logged metrics show each, what it is, and how to fix it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_ext.trainer.diagnosis import evidence, no_learning, sampler
from grpo_ext.trainer.diagnosis.positions import DEPTHS, FIRST_TURN, LATER_TURNS


@dataclass(frozen=True)
class Rule:
    """How a fault shows, what it is, how to fix it.

    Attributes:
        shown_by: finds its evidence in the last rows of a log.
        figures: metrics that the rule reads; NAME is any reward's or environment's. Without one of them in the log
            the rule finds no evidence.
    """

    name: str
    shown_by: evidence.Evidence
    figures: tuple[str, ...]
    seen: str
    meaning: str
    cure: str

    def missing(self, logged: Iterable[str]) -> list[str]:
        """Metrics of this rule that a log does not have."""
        logged_names = {_generic(name) for name in logged}
        return [figure for figure in self.figures if figure not in logged_names]


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
        name, meaning, cure = self.rule.name, self.rule.meaning, self.rule.cure
        return f"step {self.step}: {name}. {self.evidence}. {meaning[0].upper()}{meaning[1:]}. {cure}"


class Doctor:
    """Read a log row by row and name each fault once."""

    def __init__(self) -> None:
        """Start with an empty history."""
        self.history = evidence.History()
        self.named: set[str] = set()

    def read(self, row: Mapping[str, Any]) -> list[Finding]:
        """Return the faults that this row is the first to show."""
        return self._ask(int(row["step"])) if self.history.add(row) else []

    def end(self, step: int) -> list[Finding]:
        """Return the faults that show only in a log without further rows; `step` is its last one."""
        self.history.complete = True
        return self._ask(step)

    def _ask(self, step: int) -> list[Finding]:
        findings = []
        for rule in RULES:
            if rule.name not in self.named and (text := rule.shown_by(self.history)):
                self.named.add(rule.name)
                findings.append(Finding(rule, step, text))
        return findings


def diagnose(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return the faults that a log shows, in order of their steps."""
    doctor, step, findings = Doctor(), 0, list[Finding]()
    for row in rows:
        findings += doctor.read(row)
        step = int(row.get("step", step))
    return findings + doctor.end(step)


RULES: tuple[Rule, ...] = (
    Rule(
        "reward fails",
        evidence.any_reward(evidence.fails),
        ("rewards/NAME/errors", "rewards/NAME/none_frac"),
        "`rewards/NAME/errors` above 0, and no value or one value for most completions",
        "a reward, or the process or server that computes it, no longer answers",
        "The rows and the reason are in output_dir/reward_failures; `grpo-ext score` calls only this reward. Raise "
        "its `timeout` or `reward_memory_gib`, or set `on_error: raise` to stop at once.",
    ),
    Rule(
        "environment fails",
        evidence.environment_fails,
        ("environments/NAME/failed",),
        "`environments/NAME/failed` above half, log after log",
        "episodes end because their environment raises, hangs or dies",
        "`environments/NAME/failed/KIND` and the warning have the reason; raise its `turn_timeout` or "
        "`reward_memory_gib`, or play it by hand.",
    ),
    Rule(
        "agent fails",
        no_learning.agent_fails,
        ("environments/NAME/nonzero_exit", "advantages/zero_variance_groups"),
        "`environments/NAME/nonzero_exit` and `advantages/zero_variance_groups` are 1 in every log",
        "every episode's program or test has ended with another status than 0: it crashes, or has never succeeded",
        "The warning has the first output, `log_completions: true` the end of each (column `output`). If it crashes, "
        "repair it or its arguments; if it works, prompts are too hard, or `max_completion_length` and `max_turns` "
        "too low.",
    ),
    Rule(
        "skipped steps",
        evidence.stays_above("nonfinite/skipped_steps", 0.0),
        ("nonfinite/skipped_steps",),
        "`nonfinite/skipped_steps` above 0, log after log",
        "steps are left out for NaN or inf",
        "Look at the batches in output_dir/failures; a lower `learning_rate`, `bf16` in place of `fp16`.",
    ),
    Rule(
        "misplaced mask",
        evidence.stays_above("completions/mask_misplaced", 0.0, rows=2),
        ("completions/mask_misplaced",),
        "`completions/mask_misplaced` above 0",
        "completion_mask does not cover exactly the tokens that were drawn: tokens that were not drawn train, or the "
        "first or the last never does",
        "It is made in `_generate_and_score_completions`, by a subclass, or by a `rollout_func`'s ids: one entry of "
        "the mask for each id, the end token's included.",
    ),
    Rule(
        "all masked",
        no_learning.all_masked,
        ("completions/skipped",),
        "`completions/skipped` is 1, log after log",
        "every completion is masked out of the loss, so that nothing is learned",
        "Raise `max_completion_length` until completions end (`completions/clipped_ratio` below 1), or leave "
        "`mask_truncated_completions` unset.",
    ),
    Rule(
        "no weight moves",
        no_learning.no_weight_moves,
        ("weights/change", "grad_norm"),
        "`weights/change` is at most 1e-8 in every log, although `grad_norm` is not 0",
        "optimizer steps change no weight, or too little to learn",
        "Raise `learning_rate`, or `max_grad_norm` if it is far below `grad_norm`; shorten `warmup_steps`; set "
        "`dtype: float32` if weights are in bfloat16 or float16, which round small updates away.",
    ),
    Rule(
        "end token lost",
        evidence.end_lost,
        ("completions/clipped_ratio", "completions/min_length", "completions/max_length"),
        "`completions/clipped_ratio` is 1, although completions have different lengths (one turn only)",
        "completions end, but their ids lack the end token, so that the model never learns to end",
        "Let a server or a `rollout_func` return it, set eos_token_id in the tokenizer to what the model ends by, and "
        "leave stop strings out of `generation_kwargs`.",
    ),
    Rule(
        "advantages of other rows",
        evidence.other_rows,
        ("advantages/of_reward",),
        "`advantages/of_reward` near 0",
        "rows train with the advantages of other rows",
        "Look at what reorders rows between the rewards and the loss: a subclass, an `advantage_estimator` of your "
        "own, a `rollout_func` that returns groups in another order.",
    ),
    Rule(
        "rewards of other rows",
        evidence.rewards_of_other_rows,
        ("rewards/same_text_differs",),
        "`rewards/same_text_differs` leaps from 0",
        "equal completions of a prompt get different rewards: those of other rows, or random ones",
        "A reward returns one value for each completion, in their order; look at what it computes in parallel.",
    ),
    Rule(
        "steps too large",
        evidence.steps_too_large,
        ("weights/change", "reward", "entropy"),
        "`weights/change` leaps and the reward falls or the entropy moves, or it stays above 0.01 and both do",
        "an optimizer step destroys what the model could do",
        "A lower `learning_rate`, a warm-up (`warmup_steps`), a lower `max_grad_norm`; resume from an earlier "
        "checkpoint.",
    ),
    Rule(
        "policy collapsed",
        no_learning.collapsed,
        ("reward", "groups/distinct"),
        "`reward` is below the first log's, and `entropy` is 0, or `advantages/zero_variance_groups` 1 ever since",
        "a step has destroyed the policy: rewards tell none of its completions from others, so that it cannot recover",
        "Start again with a lower `learning_rate`, a warm-up (`warmup_steps`) or a lower `max_grad_norm`.",
    ),
    Rule(
        "drift by turn",
        sampler.by_turn,
        (FIRST_TURN, LATER_TURNS),
        f"`{LATER_TURNS}` leaps beyond 4 times `{FIRST_TURN}`",
        "after the first answer of a tool or an environment, sampler and policy read different tokens, or the "
        "sampler keeps a cache of other ones",
        "Compare the ids that the sampler read in the second turn with those of the row: a template that renders "
        "earlier turns again (thinking removed, other white space) changes them, and a `rollout_func` must return "
        "what was read. If they are equal, start the server with --no-enable-prefix-caching. With `rollout_ahead` the "
        "policy may also have moved far in later turns: lower `learning_rate`.",
    ),
    Rule(
        "drift by depth",
        sampler.by_depth,
        tuple(DEPTHS)[:2],
        "the mismatch of the deepest tokens (`sampling/mismatch_from_128`, `_1k`, `_8k` or `_64k`) leaps beyond 4 "
        "times `sampling/mismatch_from_0`",
        "far into a completion, sampler and policy compute differently: positions, an attention window, a cache",
        "Compare the rope scaling, the sliding window and the longest context of both sides. If they are equal, start "
        "the server without a quantized cache (--kv-cache-dtype auto), with --no-enable-chunked-prefill, or with "
        "--enforce-eager, one after another. Until it is found, keep `max_completion_length` below that depth. With "
        "`rollout_ahead` the policy may also have moved far in long completions: lower `learning_rate`.",
    ),
    Rule(
        "another prompt",
        sampler.another_prompt,
        ("sampling/mismatch",),
        "`sampling/mismatch` leaps beyond 0.2 nats per token",
        "sampler and trainer do not read the same prompt (template, tokenizer), or are not the same model",
        "Give both sides one `chat_template` and one model; `grpo-ext check` looks at them. With `rollout_ahead` the "
        "policy may also have moved far within as many generations: lower `learning_rate`.",
    ),
    Rule(
        "truncated sampling",
        sampler.truncated,
        ("sampling/mismatch", "sampling/bias"),
        "`sampling/mismatch` leaps, and `sampling/bias` is as large",
        "completions are drawn from a truncated distribution, and trained as if they were the policy's own",
        "Set `loss_defaults: paper`, which scores over the tokens that were kept; or leave `top_p`, `top_k`, `min_p` "
        "and `repetition_penalty` unset, also in `generation_kwargs` and in the model's generation_config.json.",
    ),
    Rule(
        "stale sampler",
        sampler.stale,
        ("sampling/mismatch", "sampling/bias"),
        "`sampling/mismatch` leaps and grows",
        "weights that were pushed did not reach the sampler, or it keeps what earlier ones have made of the prompts",
        "Look at `sampling/weight_sync_seconds` and the server's log, and start the server again. Reset the prefix "
        "cache after each push, or start the server with --no-enable-prefix-caching. With `rollout_ahead` the policy "
        "may also move further within as many generations than before: lower `learning_rate`.",
    ),
    Rule(
        "sampler's precision",
        sampler.precision,
        ("sampling/mismatch", "sampling/bias"),
        "`sampling/mismatch` leaps to a level, and is not one-sided",
        "the sampler has the weights in another precision, or computes by other kernels",
        "Give both sides one dtype (`vllm_dtype`, or merge an adapter in float32), or correct for it "
        "(`sampler_correction`).",
    ),
    Rule(
        "nearly all dropped",
        sampler.dropped,
        ("sampling/kept",),
        "`sampling/kept` stays below 0.1",
        "the correction of the sampler takes nearly the whole gradient, of completions of any length",
        "If `sampling/mismatch` is rounding, the bounds of `sampler_correction` are too close: leave it unset, or set "
        "a `level` of token or wider bounds. If not, sampler and policy differ, and no correction replaces a repair: "
        "look for that first.",
    ),
    Rule(
        "long completions dropped",
        sampler.loses("long", "short"),
        ("sampling/kept_short", "sampling/kept_long"),
        "`sampling/kept_long` stays below three quarters of `sampling/kept_short`",
        "the correction of the sampler takes the gradient of long completions: it bounds a product over their tokens, "
        "which leaves the bounds by rounding alone",
        "Leave `sampler_correction` unset, or set a `level` of token in place of sequence.",
    ),
    Rule(
        "short completions dropped",
        sampler.loses("short", "long"),
        ("sampling/kept_short", "sampling/kept_long"),
        "`sampling/kept_short` stays below three quarters of `sampling/kept_long`",
        "the correction of the sampler takes the gradient of short completions: it bounds a mean over their tokens, "
        "which few tokens make noisy",
        "Leave `sampler_correction` unset, or set wider bounds.",
    ),
    Rule(
        "stale batches",
        evidence.few_carry,
        ("ratio/ess_completions", "clip_ratio/region_mean"),
        "`ratio/ess_completions` stays below 0.3, and `clip_ratio/region_mean` above 0.1",
        "the policy is far from the one that sampled its completions, so that few of them carry the update",
        "Lower `learning_rate`, or train on younger completions: lower `num_iterations`, `steps_per_generation` or "
        "`rollout_ahead`.",
    ),
    Rule(
        "sign of a reward",
        evidence.any_reward(evidence.sign),
        ("rewards/NAME/mean", "rewards/NAME/std"),
        "`rewards/NAME/mean` of a reward of 0 or 1 becomes negative",
        "a reward has changed its sign, and now punishes what it rewarded before",
        "Look at what the reward returns, and at its `weight` and `weight_schedule`.",
    ),
    Rule(
        "constant reward",
        evidence.any_reward(evidence.constant),
        ("rewards/NAME/mean", "rewards/NAME/std"),
        "`rewards/NAME/std` falls to exactly 0, at a value between the extremes",
        "a reward gives all completions the same value, so its advantages are zero",
        "`grpo-ext score --explain N` shows what it reads of a completion; look for a judge without an answer, or a "
        "default that replaces every failure.",
    ),
    Rule(
        "reward without gain",
        no_learning.not_held_out,
        ("reward", "reward_std"),
        "`reward` climbs, and no `eval_NAME/avg@n` by a third as much, each in its deviation at the start",
        "the reward is paid for something else than what the evaluation measures: layout, length, a leak",
        "Read completions of high reward (`log_completions: true`, the report); evaluate with a strict and a lenient "
        "`judge` and room for long answers; weigh rewards of layout less.",
    ),
    Rule(
        "completions no longer end",
        evidence.no_end,
        ("completions/clipped_ratio",),
        "`completions/clipped_ratio` leaps above 0.8",
        "completions run into `max_completion_length`",
        "Raise it if they are sound; `soft_overlong` penalises what comes near it; look for what else was named.",
    ),
    Rule(
        "no signal",
        no_learning.no_signal,
        ("advantages/zero_variance_groups",),
        "`advantages/zero_variance_groups` is 1 in every log",
        "all completions of a prompt get the same reward, so that no advantage and no gradient is left",
        "Completions that are cut off (`completions/clipped_ratio`) need a higher `max_completion_length`; "
        "`grpo-ext score --explain N` shows what a reward reads of them. If it reads them rightly, prompts are too "
        "hard or too easy: other data, more `num_generations`, a reward with steps between 0 and 1.",
    ),
)
"""In the order in which they are asked: the more special before the more general."""
