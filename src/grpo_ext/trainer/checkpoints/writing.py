"""Checkpoints that are whole or not there: written aside, synced, sealed, renamed; and which elder ones go."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.errors import ConfigError, SaveError
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer
from grpo_ext.trainer import hub
from grpo_ext.trainer.checkpoints.agreement import everywhere
from grpo_ext.trainer.checkpoints.branches import Branch
from grpo_ext.trainer.checkpoints.choice import numbered
from grpo_ext.trainer.checkpoints.finish import FINISHED_FILE, holds_weights, publish, write_finished
from grpo_ext.trainer.checkpoints.manifest import STATE, damage, seal, step_of, sync
from grpo_ext.trainer.checkpoints.shards import gathered

SAVING = "_saving"
"""Folder in output_dir where checkpoints are written; what begins with `_` transformers never pushes to the hub."""
_DISK = (OSError, RuntimeError, SafetensorError)
"""What a full disk, a quota or a missing right is raised as, by Python, torch and safetensors."""


class WritingTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` whose checkpoints appear under their names once all of them is on the disk.

    No process raises while others wait for it: a failure is remembered, nothing more is written, and after the last
    collective all processes hear of it.

    Raises:
        SaveError: from `_save_checkpoint` and `save_final`, on all processes.
    """

    args: GRPOExtConfig
    _aside = False
    _containing = False
    _unwritten: Exception | None = None
    _published: Sequence[str] = ()
    _record: Mapping[str, Any]
    """What defines the run."""
    _branch = Branch()
    """This start, in the history of its folder."""

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, SAVING) if self._aside else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        final = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        folder = final.parent / SAVING / final.name
        with self._told_to_all(final, folder.parent), self._written_aside():
            self._contained(super()._save_checkpoint, model, trial)
            self._contained(self._save_own, folder)
        if str(self.state.best_model_checkpoint) == str(folder):
            self.state.best_model_checkpoint = str(final)
        with self._told_to_all(final, folder.parent):
            if self.args.should_save:
                self._contained(self._settle, folder, final)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(final))
        if self.args.push_to_hub_revision and self.is_world_process_zero():
            hub.push_revision(self, final)

    def _settle(self, folder: Path, final: Path) -> None:
        self.state.save_to_json(str(folder / STATE))  # which names the best checkpoint
        facts = {"step": self.state.global_step, "weights_alone": bool(self.args.save_only_model)}
        seal(folder, **facts, **self._branch.facts())
        put_in_place(folder, final)
        rotate(final, self.args.save_total_limit, self.state.best_model_checkpoint)
        remove_if_empty(folder.parent)

    def _save_own(self, folder: Path) -> None:
        """What a checkpoint holds beside TRL's files; called on all processes."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._aside:  # else when it is in its place, from which it is read in the background
            super()._push_from_checkpoint(checkpoint_folder)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._written_aside():  # transformers would delete the last checkpoint before the model is saved
            return super()._finalize_training(*args, **kwargs)

    def save_final(self, output_dir: str | Path) -> None:
        """Save the model, whole or not at all."""
        final = Path(output_dir)
        folder = final / SAVING / "model"
        with self._told_to_all(final, folder.parent), self._written_aside(), gathered(self):
            self._contained(self.save_model, str(folder), _internal_call=True)  # which pushes nothing yet
            self._contained(self._save_beside_model, folder)
        with self._told_to_all(final, folder.parent):
            if self.args.should_save and not holds_weights(folder):
                self._unwritten = SaveError(self._no_weights(final))
            elif self.args.should_save:
                self._contained(self._publish, folder, final)

    def _publish(self, folder: Path, final: Path) -> None:
        self._published = publish(folder, final)
        discard(folder.parent)

    def finish(self, output_dir: str | Path) -> None:
        """After `save_final`: say, last of all, that the run is over."""
        final = Path(output_dir)
        with self._told_to_all(final / FINISHED_FILE, final / SAVING):
            if self.args.should_save:
                facts = {
                    "step": self.state.global_step,
                    "max_steps": self.state.max_steps,
                    "order": self._branch.order,
                }
                self._contained(write_finished, final, self._published, self._record, **facts)

    def _save_beside_model(self, folder: Path) -> None:
        """What lies beside the finished model; called on all processes."""

    def _no_weights(self, final: Path) -> str:
        last = next((str(path) for path in numbered(final)), "the last checkpoint")
        return (
            f"no model was saved in {final}: the engine wrote no weights that from_pretrained could load. {last} "
            "holds them in shards: resume by a launch of another engine configuration, such as ddp, fsdp2, zero3, and "
            "the model is saved at its end."
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As TRL's; a model that is not part of a checkpoint is whole, whatever engine has taken it apart."""
        with nullcontext() if _internal_call else gathered(self):
            super().save_model(output_dir, _internal_call)

    # Hooks of transformers and TRL that write, none of which may raise on one process alone.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self._contained(super()._save, output_dir, state_dict)
        folder = Path(output_dir or str(self.args.output_dir))
        if "ref" in getattr(self.model, "peft_config", {}) and step_of(folder) is None:
            shutil.rmtree(folder / "ref", ignore_errors=True)  # the adapter it began with: for a resume alone

    def init_hf_repo(self, token: str | None = None) -> None:
        """As transformers', with the branch that is pushed to.

        Raises:
            ConfigError: the hub cannot be reached, or refuses.
        """
        if self.is_world_process_zero():
            hub.make_repository(self.args)
        super().init_hf_repo(token)
        if self.is_world_process_zero():
            hub.make_branch(self, self.args.hub_revision)

    def _save_scaler(self, output_dir: str) -> None:
        self._contained(super()._save_scaler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._contained(super()._save_rng_state, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        together = self._aside and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if together and any(everywhere(self._unwritten is not None)):
            return
        self._contained(super()._save_optimizer_and_scheduler, output_dir)

    def _contained(self, write: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Write, unless something could not be written before; remember if this cannot."""
        if not self._containing:
            write(*args, **kwargs)
        elif self._unwritten is None:
            try:
                write(*args, **kwargs)
            except _DISK as error:
                self._unwritten = error

    @contextmanager
    def _written_aside(self) -> Iterator[None]:
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    @contextmanager
    def _told_to_all(self, final: Path, aside: Path) -> Iterator[None]:
        """Remember what cannot be written, and tell all processes at the end."""
        self._containing, self._unwritten = True, None
        try:
            yield
        finally:
            self._containing = False
        error = self._unwritten
        told = None if error is None else str(error) if isinstance(error, SaveError) else unwritten(error, final)
        all_told = [text for text in everywhere(told) if text is not None]
        if all_told:
            if self.args.should_save:
                discard(aside)
            raise SaveError(all_told[0]) from error


def unwritten(error: Exception, final: Path) -> str:
    """What could not be written and why, how much room there is, what is left and what to do."""
    place = next(parent for parent in final.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free / 1e9
    elder = [path.name for path in numbered(final.parent if step_of(final) is not None else final)]
    kept = f"Untouched: {', '.join(elder)}." if elder else "No checkpoint was there before."
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"{final} could not be written (process on {socket.gethostname()}): {type(error).__name__}: {reason}. The "
        f"disk has {free:,.2f} GB free; it may be full, over a quota, or not yours to write to. {kept} Make room "
        "(save_total_limit keeps fewer), or correct output_dir, and start the same command again: it goes on from the "
        "newest checkpoint."
    )


def put_in_place(folder: Path, final: Path) -> None:
    """Atomically move a sealed checkpoint into place, replacing a damaged one or one of an earlier run."""
    replaced = _unused(folder.with_name(f"replaced-{final.name}"))
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


def _unused(path: Path) -> Path:
    """The path, or one like it: `discard` may have left something under this name."""
    names = (path.with_name(f"{path.name}{f'-{i}' if i else ''}") for i in range(10**6))
    return next(name for name in names if not os.path.lexists(name))


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete checkpoints beyond `limit`: first what looks damaged, then the oldest by branch and step.

    Never the newest, which has just been sealed, nor the best one, nor what is not called `checkpoint-N`.
    """
    if not limit or limit <= 0:
        return
    kept = {newest.absolute()} | ({Path(best).absolute()} if best else set())
    present = [path for path in numbered(newest.parent) if path.is_dir() and not path.is_symlink()]
    oldest_first = [path for path in reversed(present) if path.absolute() not in kept]
    spare = sorted(oldest_first, key=lambda path: not damage(path, hashes=False))
    for path in spare[: max(0, len(present) - max(limit, len(kept)))]:
        doomed = _unused(newest.parent / SAVING / f"deleted-{path.name}")
        doomed.parent.mkdir(exist_ok=True)
        path.rename(doomed)  # at once: half a checkpoint is never seen under its name
        discard(doomed)


def remove_if_empty(folder: Path) -> None:
    """Leave no trace of having saved."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def recover(output_dir: Path) -> None:
    """After a kill: a checkpoint that was sealed and not yet renamed gets its name; what was half written goes.

    Raises:
        ConfigError: no checkpoint could be written, because `_saving` is a link or a file.
    """
    aside = output_dir / SAVING
    if aside.is_symlink() or (aside.exists() and not aside.is_dir()):
        kind = "a link" if aside.is_symlink() else "a file"
        raise ConfigError(
            [f"{aside} is {kind}: checkpoints are written in a folder of this name, on output_dir's disk. Remove it."]
        )
    if not aside.is_dir():
        return
    for folder in numbered(aside):
        if not damage(folder) and not (output_dir / folder.name).exists():
            put_in_place(folder, output_dir / folder.name)
    discard(aside)
