"""grpo-ext: every GRPO-style objective as the papers have it, on top of TRL's GRPOTrainer."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ConfigError as ConfigError
    from .config import GRPOExtConfig as GRPOExtConfig
    from .trainer import GRPOExtTrainer as GRPOExtTrainer

__version__ = "0.1.0"

_HOMES = {"GRPOExtConfig": "config", "ConfigError": "config", "GRPOExtTrainer": "trainer"}
__all__ = ["ConfigError", "GRPOExtConfig", "GRPOExtTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public classes on first use, so that `import grpo_ext` itself is instant."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
