"""Report and save the completions that a reward failed on."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_ext.config.launch import rank
from grpo_ext.errors import without_secrets
from grpo_ext.rewards.columns import PLURALS, Columns, take
from grpo_ext.rewards.composition import RewardSpec
from grpo_ext.rewards.text import completion_text
from grpo_ext.rewards.workers.worker import safe_repr
from grpo_ext.safe_reading import appending
from grpo_ext.waiting import Interrupted


def from_outside(error: BaseException) -> bool:
    """Return whether an exception in a user's function comes from outside: Ctrl-C, a signal, the end of its task.

    A training run has its own handler of SIGINT, which does not raise.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if isinstance(error, asyncio.CancelledError):
        with contextlib.suppress(RuntimeError):  # without a running event loop
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit | Interrupted)


def report(spec: RewardSpec, columns: Columns, failed: Sequence[tuple[int, str]], folder: Path | None) -> str:
    """Save the failed rows (row, reason) in `folder` and return one line about them."""
    process, step = rank(), getattr(columns.get("trainer_state"), "global_step", 0)
    row, reason = failed[0]
    saved = ""
    if folder is not None:
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in spec.name)
        path = folder / f"step{step:06d}-rank{process}-{name}.jsonl"
        try:
            _save(spec, columns, failed, path)
            saved = f" | saved to {path}"
        except Exception as error:  # such as a full disk: a failed reward does not end a run, so this must not either
            saved = f" | not saved to {path}: {error}"
    return (
        f"reward {spec.name!r} ({spec.function}) failed on {len(failed)} of {len(columns['completions'])} "
        f"completions (rank {process}, step {step}): {reason.strip()} | "
        f"row {row}, the first: {completion_text(columns['completions'][row])[:200]!r}{saved}"
    )


def _save(spec: RewardSpec, columns: Columns, failed: Sequence[tuple[int, str]], path: Path) -> None:
    """Write the failed rows so that `grpo-ext score` reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appending(path) as file:
        for row, reason in failed:
            own = {k: v for k, v in take(columns, [row]).items() if isinstance(v, list) and v}
            record = {PLURALS.get(name, name): _plain(values[0]) for name, values in own.items()}
            failed_row = without_secrets({**record, "failed_reward": spec.name, "reason": reason})
            file.write(json.dumps(failed_row) + "\n")


def _plain(value: object) -> Any:
    """Return a value that JSON can hold, or its text."""
    try:
        return json.loads(json.dumps(value, default=str))
    except Exception:  # keys that are tuples, a list that holds itself, a `__str__` that raises
        return safe_repr(value)
