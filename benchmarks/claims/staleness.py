"""One pool of recorded batches, replayed late under each loss: which loss bears it, and does the ESS warn in time?

A run with `dapo` records its batches and keeps its weights at one step. Each replay begins with these weights and
trains on batches that the run recorded a given number of updates earlier, with their recorded advantages.
"""

import itertools
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from claim import FAILS, HOLDS, ONLY_IF, Claim, Exact, Run, Verdict, interval, markdown, shown
from mismatch import two_points

from grpo_ext.objective.ratios import ratios

LOSSES = "dapo grpo dr_grpo deepseek_v3 gspo luspo cispo sapo vespo minimind gmpo topr dppo".split()  # noqa: SIM905
"""Those that differ when advantages are given; the other rows differ from these in their advantages."""
DELAYS = (0, 4, 16, 64)
START, STEPS, DIGITS, ERRORS, SHIFT, RATE = 64, 16, 6, 0.4, 3, 5e-4
WARM_UP = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
"""Of replays: in a pilot the first step of a cold Adam halved the pass rate even on-policy."""
LOW_ESS, FALL = 0.5, 0.05
"""The ESS of whole completions that warns, and the loss of pass rate that counts as harm."""


def answer(prompt: str) -> str:
    """Return the digits that follow: each is the one before plus SHIFT, modulo 10."""
    return "".join(str((int(prompt[-1]) + SHIFT * k) % 10) for k in range(1, DIGITS + 1))


LENGTHS, NOISES = (8, 64, 512), (0.02, 0.05, 0.1)


def effective_sizes(n: int, s: float, level: str = "product") -> tuple[float, float]:
    """Return the ESS of tokens and of completions of n tokens, by enumeration of two-point noise of log-ratios."""
    log_ratio, probability = two_points(n, s)
    mask = torch.ones_like(log_ratio)
    tokens, whole = (ratios[name](log_ratio, mask).exp() for name in ("token", level))
    of_tokens, of_completions = (
        ((probability @ w).mean().square() / (probability @ w.square()).mean()).item() for w in (tokens, whole)
    )
    return of_tokens, of_completions


def exact() -> Exact:
    """The ESS of tokens, which `sampling/ess` logs, beside that of completions."""
    rows = [{"s": s, "n": n, "sizes": effective_sizes(n, s)} for s, n in itertools.product(NOISES, LENGTHS)]
    return {"rows": rows}


PROMPTS = [f"{a}{b}" for a in range(10) for b in range(10)]


def demonstrate(draw: Any) -> tuple[str, str]:
    """Return a prompt and an answer with errors."""
    digits = [draw.randrange(10), draw.randrange(10)]
    for _ in range(DIGITS):
        wrong = draw.random() < ERRORS
        digits.append(draw.randrange(10) if wrong else (digits[-1] + SHIFT) % 10)
    text = "".join(map(str, digits))
    return text[:2], text[2:]


def right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Reward the share of digits that follow from the one before."""
    rewards = []
    for prompt, text in zip(prompts, completions, strict=True):
        digits = prompt[-1] + text if text.isdigit() else prompt[-1]
        found = [int(b) == (int(a) + SHIFT) % 10 for a, b in itertools.pairwise(digits)]
        rewards.append(sum(found[:DIGITS]) / max(DIGITS, len(text)))
    return rewards


def pass_rate(model: Any) -> float:
    """Return the exact probability of the right answer, its end included, mean over all prompts."""
    import toy

    batch = toy._batch([(prompt, answer(prompt)) for prompt in PROMPTS])
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    lost = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return (-lost.sum(1)).exp().mean().item()


def effective_size(model: Any, file: Path) -> float:
    """Return (sum w)^2 / (N sum w^2) of a recorded batch, w the ratios of whole completions."""
    [batch] = torch.load(file, weights_only=True)["micro_batches"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1).long()
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).long()
    live = batch["completion_mask"].bool()
    with torch.no_grad():
        logps = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    logps = logps.gather(-1, ids[:, 1:, None])[..., 0][:, -live.shape[1] :]
    w = torch.where(live, logps - batch["old_per_token_logps"], 0.0).sum(1).double().exp()
    return (w.sum().square() / w.square().sum() / len(w)).item()


def train(seed: int) -> Run:
    """Record once, and replay the pool under each loss and delay."""
    import toy
    from transformers import TrainerCallback

    class Keep(TrainerCallback):
        """Keeps the weights of one step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == START:
                given["model"].save_pretrained(folder / "start")
                toy.TOKENIZER.save_pretrained(folder / "start")

    class Watch(TrainerCallback):
        """Notes the ESS of the batch before each step, and the pass rate after it."""

        def __init__(self, pool: Path) -> None:
            self.pool = pool
            self.ess: list[float] = []
            self.passed: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.ess.append(effective_size(given["model"], self.pool / f"step_{state.global_step + 1}" / "rank_0.pt"))

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.passed.append(pass_rate(given["model"]))

    rows = [{"prompt": prompt} for prompt in PROMPTS]
    usual = {"max_completion_length": DIGITS + 2, "seed": seed, "learning_rate": RATE}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm = toy.warm("staleness", seed, demonstrate, steps=300)
        recording = {"loss_type": "dapo", "max_steps": START + STEPS, "record_batches": 1, "output_dir": name}
        first = toy.train(warm, rows, [right], usual | recording, [Keep()])
        begun = pass_rate(toy.LlamaForCausalLM.from_pretrained(folder / "start"))
        found: dict[str, Any] = {"start": begun, "end of the recorded run": pass_rate(first.model), "replays": []}
        for delay in DELAYS:
            pool = pool_of(folder, delay)
            for loss in LOSSES:
                watch = Watch(pool)
                replay = {"loss_type": loss, "max_steps": STEPS, "replay_batches": str(pool)} | WARM_UP
                trainer = toy.train(str(folder / "start"), rows, [right], usual | replay, [watch])
                found["replays"].append(summary(loss, delay, watch, trainer))
    return found


def pool_of(folder: Path, delay: int) -> Path:
    """Return a folder whose step k is the batch that the run recorded `delay` updates before it."""
    pool = folder / f"pool_{delay}"
    pool.mkdir()
    for k in range(1, STEPS + 1):
        os.symlink(folder / "batches" / f"step_{START - delay + k}", pool / f"step_{k}")
    return pool


def summary(loss: str, delay: int, watch: Any, trainer: Any) -> dict[str, Any]:
    from grpo_ext.trainer.diagnosis.rules import diagnose

    chi2 = [entry["ratio/chi2"] for entry in trainer.state.log_history if "ratio/chi2" in entry]
    findings = diagnose(trainer.state.log_history)
    return {
        "loss": loss,
        "delay": delay,
        "passed": [round(value, 4) for value in watch.passed],
        "ess": [round(value, 4) for value in watch.ess],
        "chi2": [float(f"{value:.3g}") for value in chi2],
        "diagnosis": [[finding.step, finding.rule.name] for finding in findings],
    }


def replays(runs: list[Run], loss: str, delay: int) -> list[dict[str, Any]]:
    return [
        replay | {"start": run["start"]}
        for run in runs
        for replay in run["replays"]
        if replay["loss"] == loss and replay["delay"] == delay
    ]


def gains(runs: list[Run], loss: str, delay: int) -> list[float]:
    """Return the change of the pass rate by a replay, by seed."""
    return [replay["passed"][-1] - replay["start"] for replay in replays(runs, loss, delay)]


def first(values: list[float], below: float) -> int | None:
    """Return the first step whose value is below a bound."""
    return next((step for step, value in enumerate(values, 1) if value < below), None)


def warnings_of(runs: list[Run]) -> dict[str, int]:
    """Count replays by whether the pass rate fell, and whether ESS and `diagnose` warned before it did."""
    found = dict.fromkeys(
        ("fell", "ess before", "diagnosed before", "sound", "ess though sound", "diagnosed though sound"), 0
    )
    for loss in LOSSES:
        for delay in DELAYS:
            for replay in replays(runs, loss, delay):
                harm = first(replay["passed"], replay["start"] - FALL)
                low = first(replay["ess"], LOW_ESS)
                named = min((step for step, _ in replay["diagnosis"]), default=None)
                found["fell" if harm else "sound"] += 1
                if harm:  # the ESS is known before its step trains
                    found["ess before"] += low is not None and low <= harm
                    found["diagnosed before"] += named is not None and named <= harm
                else:
                    found["ess though sound"] += low is not None
                    found["diagnosed though sound"] += named is not None
    return found


def judge(exact: Exact, runs: list[Run]) -> Verdict:
    """Ask whether a low ESS precedes falls of the pass rate, and only those."""
    n = warnings_of(runs)
    if not n["fell"]:
        return Verdict(FAILS, f"The pass rate fell in none of {n['sound']} replays, so there is nothing to predict.")
    caught, false = n["ess before"] / n["fell"], n["ess though sound"] / max(1, n["sound"])
    why = (
        f"The pass rate fell by more than {FALL:g} in {n['fell']} of {n['fell'] + n['sound']} replays; an ESS below "
        f"{LOW_ESS:g} came before it in {n['ess before']}, a finding of `diagnose` in {n['diagnosed before']}. Of "
        f"{n['sound']} replays without a fall, {n['ess though sound']} had such an ESS too, and "
        f"{n['diagnosed though sound']} a finding."
    )
    if caught >= 0.8 and false <= 0.2:
        return Verdict(HOLDS, why)
    if caught >= 0.8:
        return Verdict(ONLY_IF, f"A low ESS comes before most falls, but often without one. {why}")
    return Verdict(FAILS, why)


def table(exact: Exact, runs: list[Run]) -> str:
    """Return the matrix of loss and delay."""
    header = ["loss", *(f"{delay} late" for delay in DELAYS)]
    rows = [[f"`{loss}`", *(shown(gains(runs, loss, delay), 2) for delay in DELAYS)] for loss in LOSSES]
    start, end = (shown([run[name] for run in runs], 2) for name in ("start", "end of the recorded run"))
    size = [
        f"{delay} late {statistics.mean(r['ess'][0] for r in replays(runs, LOSSES[0], delay)):.2f}" for delay in DELAYS
    ]
    sizes = [[row["s"], row["n"], *(f"{size:.3g}" for size in row["sizes"])] for row in exact["rows"]]
    return (
        f"Change of the pass rate by {STEPS} updates, from {start}; the recorded run itself went on to {end}. ESS of "
        f"the first batch: {', '.join(size)}.\n\n{markdown(header, rows)}\n\n"
        "Exact: the ESS of tokens (`sampling/ess`) does not see the length, that of completions "
        "(`sampling/ess_completions`, `ratio/ess_completions`) does.\n\n"
        + markdown(["noise of a token", "tokens", "ESS of tokens", "ESS of completions"], sizes)
    )


def draw(figure: Any, exact: Exact, runs: list[Run]) -> None:
    """Draw the matrix, and the pass rate over the ESS."""
    left, right = figure.subplots(1, 2)
    for i, loss in enumerate(LOSSES):
        means = [interval(gains(runs, loss, delay))[0] for delay in DELAYS]
        left.plot(range(len(DELAYS)), means, marker="o", markersize=4, color=f"C{i % 10}", label=loss,
                  linestyle="-" if i < 10 else "--")  # fmt: skip
    left.set_xticks(range(len(DELAYS)), map(str, DELAYS))
    left.set_xlabel("updates late")
    left.set_ylabel(f"change of the pass rate by {STEPS} updates")
    left.legend(fontsize=7, frameon=False, ncols=2)
    for i, delay in enumerate(DELAYS):
        found = [replay for loss in LOSSES for replay in replays(runs, loss, delay)]
        lowest, change = [min(r["ess"]) for r in found], [r["passed"][-1] - r["start"] for r in found]
        right.plot(lowest, change, ".", color=f"C{i}", label=f"{delay} late")
    right.axvline(LOW_ESS, color="k", linestyle=":")
    right.set_xlabel("lowest ESS of whole completions in the replay")
    right.set_ylabel("change of the pass rate")
    right.legend(fontsize=8, frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25)


CLAIM = Claim(
    name="staleness",
    title="A fall of the effective sample size announces collapse on stale batches",
    paper="VCPO, arXiv:2602.17616",
    statement=(
        "VCPO (abstract read): with stale rollouts the ratios of whole completions get heavy tails, a few completions "
        "dominate an update, and a collapse is reliably predicted by the effective sample size and by unstable norms "
        "of the gradient."
    ),
    experiment=(
        f"A run with `dapo` records its batches (64 completions, a right digit is the one before plus {SHIFT}, "
        f"{DIGITS} digits) and keeps its weights at step {START}. From these {len(LOSSES)} losses train for {STEPS} "
        f"updates on the batches that were recorded {', '.join(map(str, DELAYS))} updates earlier than on-policy ones "
        f"(`replay_batches`), with recorded advantages and old log-probabilities; learning rate {RATE:g}, in replays "
        f"with a warm-up of {WARM_UP['warmup_steps']} updates. The pass "
        "rate is the exact probability of the right answer over all 100 prompts, after each update; the ESS is that "
        "of whole completions, (sum w)^2 / (N sum w^2), before each update. `diagnose` reads each replay's log: "
        "its rule of stale batches was chosen on the first seed, when the rest of this page was known."
    ),
    failure=(
        f"Of the replays whose pass rate falls by more than {FALL:g}, less than four fifths had an ESS below "
        f"{LOW_ESS:g} at or before that update; or the pass rate falls in none. If more than a fifth of the other "
        "replays have such an ESS too, it precedes a fall without announcing one, and the claim holds only so far."
    ),
    judge=judge,
    table=table,
    draw=draw,
    exact=exact,
    keys=[(seed,) for seed in range(5)],
    train=train,
)
