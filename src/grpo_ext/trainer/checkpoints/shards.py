"""Parameters that an engine has split over processes: one process's part, and all parts together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from transformers import Trainer

from grpo_ext.config.temporary import temporarily


@contextmanager
def gathered(trainer: Trainer) -> Iterator[None]:
    """Have FSDP and ZeRO-3 gather the weights for one save, whatever their settings for checkpoints are.

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
