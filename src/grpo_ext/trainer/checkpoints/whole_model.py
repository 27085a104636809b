"""A model that loads, whatever engine has taken it apart."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER
from torch.distributed.fsdp import StateDictType
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from grpo_ext.errors import NotSaved

WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, ADAPTER)


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


def check_saved(folder: Path) -> None:
    """Refuse to call a model saved of which there are no weights.

    Raises:
        NotSaved: `folder` holds none that `from_pretrained` would load.
    """
    if not any((folder / name).is_file() for name in WEIGHTS):
        raise NotSaved(
            f"{folder}: the engine wrote no weights that from_pretrained could load ({', '.join(WEIGHTS)}). The last "
            "checkpoint holds them in shards: resume by a launch of another engine configuration, such as "
            "ddp, fsdp2 or zero3, and it is saved at the end."
        )
