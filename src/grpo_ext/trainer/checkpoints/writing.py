"""Write checkpoints that are complete or absent: written aside, synced, sealed, renamed; then delete old ones."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import ParamSpec

from safetensors import SafetensorError
from transformers import TrainerState

from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ABSENT, ConfigError, Problem, SaveError, first_line
from grpo_ext.trainer.checkpoints.choice import numbered
from grpo_ext.trainer.checkpoints.finish import holds_weights, publish, write_finished
from grpo_ext.trainer.checkpoints.manifest import STATE, damage, seal, step_of, sync
from grpo_ext.trainer.checkpoints.processes import everywhere

SAVING = "_saving"
"""Folder in output_dir where checkpoints are written; transformers pushes no name with a leading `_` to the hub."""
_DISK = (OSError, RuntimeError, SafetensorError)
"""Errors that Python, torch and safetensors raise for a full disk, a quota or a missing permission."""
P = ParamSpec("P")


class Writer:
    """Writes files on several processes, and raises a failure of one of them on all.

    No process raises while others wait for it in a collective: a failure is kept, later writes are skipped, and
    after the last collective all processes raise it.

    Args:
        saves: True on the process that writes what all processes share.
    """

    def __init__(self, *, saves: bool) -> None:
        self.saves = saves
        self.is_aside = False
        """True while checkpoints are written in `SAVING`."""
        self.go_back: Callable[[], None] = lambda: None
        """Brings the run back to its last whole step, for the checkpoint of one that ends within the next."""
        self.published: list[str] = []
        """Names of the final model's files."""
        self._keeps = False
        self._error: Exception | None = None

    def attempt(self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `write`; inside `reporting`, keep its error, and skip it after an earlier one."""
        if not self._keeps:
            write(*args, **kwargs)
        elif self._error is None:
            try:
                write(*args, **kwargs)
            except (*_DISK, SaveError) as error:
                self._error = error

    def attempt_shared(self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `write` like `attempt`, on the process that writes what all share."""
        if self.saves:
            self.attempt(write, *args, **kwargs)

    def failed_anywhere(self) -> bool:
        """Return on all processes whether a write has failed on one."""
        return any(everywhere(self._error is not None))

    def aside(self) -> AbstractContextManager[None]:
        """Have checkpoints written in `SAVING`."""
        return temporarily(self, is_aside=True)

    @contextmanager
    def reporting(self, final: Path, output_dir: Path) -> Iterator[None]:
        """Keep errors of `attempt`, and raise them at the end on all processes.

        Raises:
            SaveError: `final` could not be written; what was written aside in `output_dir` is deleted.
        """
        self._error = None
        with temporarily(self, _keeps=True):
            yield
        error = self._error
        text = None if error is None else str(error) if isinstance(error, SaveError) else unwritten(error, final)
        texts = [text for text in everywhere(text) if text is not None]
        if texts:
            if self.saves:
                discard(output_dir / SAVING)
            raise SaveError(texts[0]) from error

    def publish(self, folder: Path, final: Path) -> None:
        """Move the final model from `folder` into place. Raises SaveError: there are no weights in it."""
        if not holds_weights(folder):
            last = next((str(path) for path in numbered(final)), "the last checkpoint")
            raise SaveError(
                f"no model was saved in {final}: the engine wrote no weights that from_pretrained could load. {last} "
                "holds them in shards: resume with another engine, such as ddp, fsdp2 or zero3, and the model is "
                "saved at the end."
            )
        self.published = publish(folder, final)
        discard(folder.parent)

    def finish(self, output_dir: Path, record: Mapping[str, object], facts: Mapping[str, int]) -> None:
        """Record the end of a run whose model has been published."""
        write_finished(output_dir, self.published, record, **facts)


def settle(folder: Path, final: Path, state: TrainerState, facts: Mapping[str, object], limit: int | None) -> None:
    """Seal a checkpoint that was written in `folder`, move it into place, and delete checkpoints beyond `limit`."""
    state.save_to_json(str(folder / STATE))  # which names the best checkpoint
    seal(folder, **facts)
    put_in_place(folder, final)
    rotate(final, limit, state.best_model_checkpoint)
    remove_if_empty(folder.parent)


def unwritten(error: Exception, final: Path) -> str:
    """Return a message: what could not be written and why, the free space, what is left and what to do."""
    place = next(parent for parent in final.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free / 1e9
    earlier = [path.name for path in numbered(final.parent if step_of(final) is not None else final)]
    kept = f"Untouched: {', '.join(earlier)}." if earlier else "No checkpoint was there before."
    reason = f"{type(error).__name__}: {first_line(error)}"
    return (
        f"{final} could not be written (process on {socket.gethostname()}): {reason}. The "
        f"disk has {free:,.2f} GB free; it may be full, over a quota, or not yours to write to. {kept} Make room "
        "(save_total_limit keeps fewer), or correct output_dir, and run the same command again to resume from the "
        "newest checkpoint."
    )


def put_in_place(folder: Path, final: Path) -> None:
    """Atomically move a sealed checkpoint into place, replacing a damaged one or one of an earlier run."""
    replaced = unused(folder.with_name(f"replaced-{final.name}"))
    if os.path.lexists(final):
        final.rename(replaced)
    folder.rename(final)
    sync(final.parent)
    discard(replaced)


def discard(path: Path) -> None:
    """Delete a folder, file or link as far as possible: NFS keeps `.nfs` files until their last reader has ended."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def unused(path: Path) -> Path:
    """Return the path, or a similar one that does not exist: `discard` may have left files under this name."""
    names = (path.with_name(f"{path.name}{f'-{i}' if i else ''}") for i in range(10**6))
    return next(name for name in names if not os.path.lexists(name))


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete checkpoints beyond `limit`: first what looks damaged, then the oldest.

    Never the newest, which has just been sealed, nor the best one, nor what is not called `checkpoint-N`.
    """
    if not limit or limit <= 0:
        return
    kept = {newest.absolute()} | ({Path(best).absolute()} if best else set())
    present = [path for path in numbered(newest.parent) if path.is_dir() and not path.is_symlink()]
    oldest_first = [path for path in reversed(present) if path.absolute() not in kept]
    spare = sorted(oldest_first, key=lambda path: not damage(path, hashes=False))
    for path in spare[: max(0, len(present) - max(limit, len(kept)))]:
        doomed = unused(newest.parent / SAVING / f"deleted-{path.name}")
        doomed.parent.mkdir(exist_ok=True)
        path.rename(doomed)  # at once: half a checkpoint is never seen under its name
        discard(doomed)


def remove_if_empty(folder: Path) -> None:
    """Delete a folder if it is empty."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def recover(output_dir: Path) -> None:
    """After a kill, move sealed checkpoints into place and delete incomplete ones.

    Raises:
        ConfigError: no checkpoint could be written, because `_saving` is a link or a file.
    """
    aside = output_dir / SAVING
    if aside.is_symlink() or (aside.exists() and not aside.is_dir()):
        reason = f"it is {'a link' if aside.is_symlink() else 'a file'}, and checkpoints are written in a folder there"
        raise ConfigError([Problem(str(aside), ABSENT, reason, "Remove it.")])
    if not aside.is_dir():
        return
    for folder in numbered(aside):
        if not damage(folder) and not (output_dir / folder.name).exists():
            put_in_place(folder, output_dir / folder.name)
    discard(aside)
