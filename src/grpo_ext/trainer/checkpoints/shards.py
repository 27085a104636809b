"""Models that an engine has taken apart: one process's part of a tensor, and all parts together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor


@contextmanager
def gathered(trainer: Any) -> Iterator[None]:
    """For one save, have FSDP and ZeRO-3 put the weights together that their settings leave in shards.

    transformers would write no weights at all there: its settings of checkpoints decide about the model as well.
    """
    with ExitStack() as changed:
        if trainer.is_fsdp_enabled:
            plugin = trainer.accelerator.state.fsdp_plugin
            changed.enter_context(patch.object(plugin, "state_dict_type", StateDictType.FULL_STATE_DICT))
        engine = getattr(trainer, "deepspeed", None)
        if engine is not None:
            changed.enter_context(patch.object(engine, "zero_gather_16bit_weights_on_model_save", lambda: True))
        yield


def is_sharded(tensor: Any) -> bool:
    """Whether a parameter or gradient is spread over processes, by FSDP2 (DTensor) or ZeRO-3."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def local(tensor: Any) -> Tensor:
    """This process's part of a parameter or gradient."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor.data
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data
