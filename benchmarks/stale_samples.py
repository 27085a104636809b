"""Which lengths train where rollouts run ahead of training: all, beside a rule that drops stale completions.

A simulation in units of the shortest completion. Durations are log-uniform from 1 to 20, and do not depend on how many
completions are sampled at once. The sampler has 64 places, as many as a batch has completions, and an optimizer step
takes the mean duration: sampler and trainer have equal loads.

- `rollout_ahead: K`: the package's own schedule. A window is sampled as a whole and trained as a whole.
- A queue with a limit L: a free place begins the next completion of the trace with the newest weights. The trainer
  takes what has ended, in that order, and drops what more than L optimizer steps have passed since.

The first fifth of the steps is a warm-up and left out. `python benchmarks/stale_samples.py` writes
results/stale_samples.json.
"""

import heapq
import json
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_ext.rollout.schedule import Schedule

RESULT = Path(__file__).parent / "results" / "stale_samples.json"
BATCH, STEPS, LONGEST = 64, 1000, 20.0
AHEAD, LIMITS = (1, 2, 4), (1, 2, 4, 8)


class Outcome(NamedTuple):
    """Durations that trained and durations that were dropped, after the warm-up, and the mean time of a step."""

    trained: list[float]
    dropped: list[float]
    step: float


def in_turn(durations: np.ndarray, training: float) -> Outcome:
    """Return what a trainer trains that samples, then trains."""
    windows = durations[: STEPS * BATCH].reshape(STEPS, BATCH)[STEPS // 5 :]
    return Outcome(windows.flatten().tolist(), [], float(windows.max(axis=1).mean()) + training)


def by_schedule(durations: np.ndarray, training: float, k: int) -> Outcome:
    """Return what K windows ahead train: the sampler takes one window at a time, in order."""
    windows = durations[: STEPS * BATCH].reshape(STEPS, BATCH)
    schedule, ends, trained, sampler_free, now = Schedule(k, STEPS), dict[int, float](), list[float](), 0.0, 0.0
    warm, began = STEPS // 5, 0.0

    def submit(numbers) -> None:
        nonlocal sampler_free
        for number in numbers:
            sampler_free = max(sampler_free, now) + windows[number].max()
            ends[number] = sampler_free

    for s in range(STEPS):
        if s == warm:
            began = now
        submit(schedule.before(s).submit)
        version = schedule.version(s)
        assert version == max(0, s - k), "the lag is constant"
        now = max(now, ends.pop(s))
        submit(schedule.after(s).submit)
        now += training
        trained += windows[s].tolist() if s >= warm else []
    assert not ends, "every window is trained"
    return Outcome(trained, [], (now - began) / (STEPS - warm))


def by_queue(durations: np.ndarray, training: float, limit: int) -> Outcome:
    """Return what an asynchronous trainer trains that drops completions older than `limit` optimizer steps."""
    trace, places, ended = iter(durations), list[tuple[float, float, int]](), deque[tuple[float, int]]()
    trained, dropped, version, now, began, warm = list[float](), list[float](), 0, 0.0, 0.0, STEPS // 5

    def begin(at: float, steps: int) -> None:
        duration = float(next(trace))
        heapq.heappush(places, (at + duration, duration, steps))

    def until(time: float) -> None:
        """Let the sampler work until `time`, while the version stays the same."""
        while places[0][0] <= time:
            at, duration, sampled_by = heapq.heappop(places)
            ended.append((duration, sampled_by))
            begin(at, version)

    for _ in range(BATCH):
        begin(0.0, 0)
    for step in range(STEPS):
        if step == warm:
            began = now
        batch = list[float]()
        while len(batch) < BATCH:
            if not ended:
                now = max(now, places[0][0])
                until(now)
            duration, sampled_by = ended.popleft()
            if version - sampled_by <= limit:
                batch.append(duration)
            elif step >= warm:
                dropped.append(duration)
        now += training
        until(now)
        version += 1
        trained += batch if step >= warm else []
    return Outcome(trained, dropped, (now - began) / (STEPS - warm))


def row(rule: str, outcome: Outcome, durations: np.ndarray, training: float) -> dict:
    """Return the shares that trained of all, of the shortest and of the longest tenth, and the time of a step."""
    trained, dropped = np.array(outcome.trained), np.array(outcome.dropped)
    low, high = np.quantile(durations, (0.1, 0.9))

    def share(within) -> float:
        kept, lost = within(trained).sum(), within(dropped).sum()
        return float(kept / (kept + lost))

    return {
        "rule": rule,
        "trained": share(lambda x: x > 0),
        "shortest_tenth": share(lambda x: x <= low),
        "longest_tenth": share(lambda x: x >= high),
        "mean_length_trained_over_generated": float(trained.mean() / np.concatenate([trained, dropped]).mean()),
        "step_over_training": outcome.step / training,
    }


def main() -> None:
    durations = np.exp(np.random.default_rng(0).uniform(0, np.log(LONGEST), 100 * STEPS * BATCH))
    training = float(durations.mean())
    rows = [row("in turn", in_turn(durations, training), durations, training)]
    rows += [row(f"rollout_ahead: {k}", by_schedule(durations, training, k), durations, training) for k in AHEAD]
    for limit in LIMITS:
        rows.append(row(f"older than {limit} dropped", by_queue(durations, training, limit), durations, training))
    found = {"batch": BATCH, "steps": STEPS, "longest_over_shortest": LONGEST, "rows": rows}
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    for one in rows:
        figures = "".join(f"{value:>10.2f}" for key, value in one.items() if key != "rule")
        print(f"{one['rule']:24}{figures}")


if __name__ == "__main__":
    main()
