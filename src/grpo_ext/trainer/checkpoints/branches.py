"""The history of checkpoints: which start of a run wrote each, and which earlier ones it continues."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.trainer.checkpoints.manifest import MANIFEST, read, step_of


@dataclass(frozen=True)
class Branch:
    """One start of a run, as the manifest of each checkpoint that it writes records it."""

    id: str = ""
    """Random; empty for a checkpoint without a record of its branch."""
    order: int = 0
    """Larger than that of all starts before it in the same folder. No clock decides which checkpoint is newer."""
    lineage: tuple[tuple[str, int], ...] = ()
    """The branches that it continues, oldest first, each with the last step that it has in common with this one."""

    def facts(self) -> dict[str, Any]:
        """What a manifest records."""
        return {"branch": self.id, "order": self.order, "lineage": [list(part) for part in self.lineage]}


def branch_of(checkpoint: Path) -> Branch | None:
    """The branch that wrote a checkpoint; None where no manifest can be read, or it has no sound record of it."""
    content = read(checkpoint / MANIFEST)
    if isinstance(content, str):
        return None
    id, order, lineage = content.get("branch", ""), content.get("order", 0), content.get("lineage", [])
    if not (isinstance(id, str) and type(order) is int and isinstance(lineage, list)):
        return None
    parts = [tuple(part) for part in lineage if isinstance(part, list)]
    known = [(str(name), step) for name, step in (part for part in parts if len(part) == 2) if type(step) is int]
    return Branch(id, order, tuple(known))


def newest_first(checkpoints: Iterable[Path], since: int = 0) -> list[Path]:
    """Sort by the order of the branches, then by step, leaving out what was written before the order `since`.

    A checkpoint without a readable manifest counts as one of the last branch.
    """
    branches = {path: branch_of(path) for path in checkpoints}
    last = max([since, *(branch.order for branch in branches.values() if branch)])
    places = {path: (last if b is None else b.order, step_of(path) or 0) for path, b in branches.items()}
    return sorted((path for path in places if places[path][0] >= since), key=places.__getitem__, reverse=True)


def last_order(checkpoints: Iterable[Path]) -> int:
    """The largest order of some checkpoints; 0 where none has one."""
    return max((branch.order for path in checkpoints if (branch := branch_of(path))), default=0)


def new_branch(order: int, checkpoint: Path | None = None, step: int | None = None) -> Branch:
    """The branch of a start, from the `step` of a checkpoint or (None) from the beginning."""
    if checkpoint is None:
        return Branch(secrets.token_hex(4), order)
    parent = branch_of(checkpoint) or Branch()
    return Branch(secrets.token_hex(4), order, (*parent.lineage, (parent.id, step or 0)))


def continued_by(older: Path, checkpoint: Path, step: int) -> bool:
    """Whether a `checkpoint-N` lies on the way to the `step` of another checkpoint."""
    branch, old = branch_of(checkpoint) or Branch(), branch_of(older) or Branch()
    common = {**dict(branch.lineage), branch.id: step}
    return (step_of(older) or 0) <= common.get(old.id, -1)
