"""Dropout, which would make rollouts, old log-probabilities and the loss see different networks."""

import torch
from trl.trainer.utils import disable_dropout_in_model


def _functional_dropout(module: torch.nn.Module) -> list[str]:
    """Attributes that a module hands to `torch.nn.functional.dropout`, or to its attention."""
    return [n for n, value in vars(module).items() if "dropout" in n and isinstance(value, float) and value > 0]


def active_dropout(model: torch.nn.Module) -> list[str]:
    """Names of the modules that drop something in training."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Dropout) and module.p > 0) or _functional_dropout(module)
    ]


def switch_dropout_off(model: torch.nn.Module) -> None:
    """No dropout in modules nor in attention, so that rollouts, old log-probabilities and loss see one network."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name in _functional_dropout(module):
            setattr(module, name, 0.0)
