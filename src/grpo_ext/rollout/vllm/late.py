"""TRL's trainer, which imports vLLM (seconds, and 180 MB for each process) when an engine is made and no sooner."""

import functools
import importlib
import sys
from typing import Any
from unittest.mock import patch

from trl import import_utils

_TRLS = ("trl.generation.vllm_client", "trl.generation.vllm_generation")
_waiting = not sys.modules.keys() & set(_TRLS) and import_utils.is_vllm_available()
if _waiting:  # as where vLLM is not installed
    with patch.object(import_utils, "is_vllm_available", lambda min_version=None: False):
        importlib.import_module(_TRLS[-1])

from trl.generation import vllm_generation  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

__all__ = ["GRPOTrainer", "VLLMClient", "VLLMGeneration", "grpo_trainer", "import_vllm", "vllm_generation"]


def import_vllm() -> None:
    """Give TRL's modules the names that they lack; their classes made before find them there."""
    global _waiting
    if _waiting:
        _waiting = False
        for name in _TRLS:
            importlib.reload(sys.modules[name])


def _importing(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        import_vllm()
        init(self, *args, **kwargs)

    return __init__


if _waiting:  # whoever else in this process makes engines finds them as ever
    sys.modules["trl.generation"].VLLMGeneration = VLLMGeneration  # type: ignore[attr-defined]
    for _trls in (VLLMClient, VLLMGeneration):
        _trls.__init__ = _importing(_trls.__init__)  # type: ignore[method-assign]
