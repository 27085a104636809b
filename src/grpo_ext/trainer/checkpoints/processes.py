"""Several processes: decisions that they share, and parameters that an engine has split over them."""

import hashlib
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from transformers import Trainer

from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.trainer.checkpoints.manifest import MANIFEST, STATE

T = TypeVar("T")


def agreed(decide: Callable[[], T]) -> T:
    """Call `decide` on the main process, and return its result on all.

    Raises:
        ConfigError: `decide` raised it, or could not read a file; on all processes.
    """
    outcome: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = decide()
        except ConfigError as error:
            outcome[1] = error.problems
        except OSError as error:
            cure = "Give this user access to output_dir, or set another one."
            outcome[1] = [Problem("output_dir", ABSENT, str(error), cure)]
    broadcast_object_list(outcome, from_process=0)
    if outcome[1]:
        raise ConfigError(outcome[1])
    return outcome[0]


def everywhere(local: T) -> list[T]:
    """Return each process's value, in the order of their ranks."""
    return gather_object([local])


def check_seen_by_all(checkpoint: Path, *, same: bool) -> None:
    """Check that each process sees the chosen checkpoint, and with `same` the same manifest.

    Raises:
        ConfigError: naming the processes that do not.
    """
    seen = everywhere((socket.gethostname(), _digest(checkpoint)))
    host, wanted = seen[0]
    blind = [
        f"{rank} on {name} ({'another checkpoint of that name' if digest else 'missing'})"
        for rank, (name, digest) in enumerate(seen)
        if digest is None or (same and digest != wanted)
    ]
    if blind:
        reason = f"process 0 on {host} resumes from it, and these processes do not see it: {', '.join(blind)}"
        cure = "Set output_dir to a folder that all machines share, or copy it to each."
        raise ConfigError([Problem(str(checkpoint), ABSENT, reason, cure)])


def _digest(checkpoint: Path) -> str | None:
    for name in (MANIFEST, STATE):  # plain TRL's checkpoints have no manifest
        try:
            return hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        except OSError:
            continue
    return None


# Parameters that FSDP or ZeRO-3 splits.


@contextmanager
def gathered(trainer: Trainer) -> Iterator[None]:
    """Have FSDP and ZeRO-3 gather the weights for one save, independent of their settings for checkpoints.

    transformers would otherwise apply those settings to the final model, and write no weights at all.
    """
    with ExitStack() as changed:
        if trainer.is_fsdp_enabled:
            plugin = trainer.accelerator.state.fsdp_plugin
            changed.enter_context(temporarily(plugin, state_dict_type=StateDictType.FULL_STATE_DICT))
        engine = getattr(trainer, "deepspeed", None)
        if engine is not None:
            changed.enter_context(temporarily(engine, zero_gather_16bit_weights_on_model_save=lambda: True))
        yield


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a parameter or gradient is split over processes, by FSDP2 (DTensor) or ZeRO-3."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a parameter or gradient."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor.data
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def writable(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context in which parameters that ZeRO-3 has split are whole; what the main process writes is kept."""
    split = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not split:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(split, modifier_rank=0)


def whole(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, gathered if an engine has split it; call it on every process."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().clone()
    with writable([parameter]):
        return parameter.detach().clone()
