"""Reference answers that a reward cannot read: counted before anything is trained, with the place of the first."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.signatures import needs

SAMPLE = 256
"""Most rows that are looked at: reading one takes milliseconds."""
_ANY = [{"role": "assistant", "content": "0"}]


def unreadable(specs: list[RewardSpec], dataset: Any) -> Iterator[tuple[str, bool]]:
    """For each reward of ours that compares with `solution`: how many it cannot read, and whether those are all."""
    if not isinstance(dataset, Dataset) or "solution" not in dataset.column_names:
        return
    step = -(-len(dataset) // SAMPLE)
    rows = list(range(0, len(dataset), step))
    given = dataset.select(rows)["solution"]
    for spec in specs:
        if spec.weight == 0 or spec.is_model or not spec.is_registered or needs(spec.callable) != ["solution"]:
            continue
        try:
            values = spec.callable(
                completions=[_ANY] * len(rows), solution=list(given), completion_ids=[[0]] * len(rows), **spec.kwargs
            )
        except Exception:  # TRL's own raise for what they cannot read; each is told of where it is scored
            continue
        bad = [i for i, value in enumerate(values) if value is None]
        if bad:
            among = (
                f"{len(rows)} solutions" if step == 1 else f"{len(rows)} solutions (one row in {step} was looked at)"
            )
            yield (
                f"reward {spec.name!r} cannot read {len(bad)} of {among}: no score for those rows. The first is row "
                f"{rows[bad[0]]} (from 0): {given[bad[0]]!r:.80}. Correct them; answer_format and answer_column say "
                "where answers stand.",
                len(bad) == len(rows),
            )
