"""Datasets: the hub, local files and procedural tasks, prepared into `prompt` and `solution` columns for GRPO."""

from .config import DataConfig, problems
from .loading import load_datasets
from .mixture import check_mixture, load_mixture
from .prepare import prepare
from .rows import DataError, check_columns

__all__ = [
    "DataConfig",
    "DataError",
    "check_columns",
    "check_mixture",
    "load_datasets",
    "load_mixture",
    "prepare",
    "problems",
]
