"""Reference answers that a reward cannot read: counted before training, with the place of the first."""

from collections.abc import Iterator

from datasets import Dataset

from grpo_ext.errors import Problem
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.signatures import needs

SAMPLE = 256
"""Most rows that are read: one takes milliseconds."""
_COMPLETION = [{"role": "assistant", "content": "0"}]


def unreadable(specs: list[RewardSpec], dataset: object) -> Iterator[tuple[Problem, bool]]:
    """Yield, for each of our rewards that compares with `solution`, those it cannot read, and whether it is all."""
    if not isinstance(dataset, Dataset) or "solution" not in dataset.column_names:
        return
    step = -(-len(dataset) // SAMPLE)
    rows = list(range(0, len(dataset), step))
    solutions = list(dataset.select(rows)["solution"])
    for spec in specs:
        if spec.weight == 0 or spec.is_model or not spec.is_registered or needs(spec.callable) != ["solution"]:
            continue
        columns = {"completions": [_COMPLETION] * len(rows), "completion_ids": [[0]] * len(rows)}
        try:
            values = spec.callable(solution=solutions, **columns, **spec.kwargs)
        except Exception:  # TRL's own raise for what they cannot read; that is reported when they score
            continue
        bad = [i for i, value in enumerate(values) if value is None]
        if bad:
            among = f"{len(rows)} solutions" + ("" if step == 1 else f" (one row in {step} was read)")
            reason = (
                f"it cannot read {len(bad)} of {among}: no score for those rows. The first is row {rows[bad[0]]} "
                f"(from 0): {solutions[bad[0]]!r:.80}"
            )
            cure = "Correct them; answer_format and answer_column set how and where answers are given."
            yield Problem("reward", spec.name, reason, cure), len(bad) == len(rows)
