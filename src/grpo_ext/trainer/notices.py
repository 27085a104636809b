"""Notices of libraries about what other libraries call: the user need not act."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGED = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
}
"""By logger, how its notice begins."""


def _asks_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_LOGGED[record.name])


@contextmanager
def without_notices() -> Iterator[None]:
    """Hide them while TRL and transformers run; afterwards all filters are what they were."""
    loggers = [logging.getLogger(name) for name in _LOGGED]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*gradient_checkpointing\w*` is deprecated", FutureWarning)
        for logger in loggers:
            logger.addFilter(_asks_something)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_asks_something)
