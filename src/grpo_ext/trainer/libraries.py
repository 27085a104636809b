"""Unsloth, which replaces parts of what is trained with."""

from collections.abc import Iterator

from torch import nn
from transformers import Trainer

from grpo_ext.errors import Problem
from grpo_ext.rollout.vllm.lazy_import import grpo_trainer

LIBRARY = "unsloth"
HOOKS = ("__init__", "train", "_inner_training_loop", "training_step", "compute_loss", "get_batch_samples")
"""Methods of transformers' trainer that unsloth 2026.10 replaces when it is imported."""
_CURE = (
    "Do not import unsloth in this process: give the model's name or folder, which may be one that unsloth has saved; "
    "or train with unsloth's own GRPOTrainer."
)


def replacements(trainer: type, model: object) -> Iterator[str]:
    """Yield the names that unsloth has replaced: the classes of TRL, methods of its trainer, forwards of the model.

    Args:
        trainer: the class that is about to be constructed.
        model: the policy, or its name.
    """
    for kind in dict.fromkeys((grpo_trainer.GRPOTrainer, grpo_trainer.GRPOConfig, *trainer.__mro__)):
        if _is_foreign(kind):
            yield f"trl.{kind.__name__.removeprefix('Unsloth')}"
    yield from (f"Trainer.{name}" for name in HOOKS if _is_foreign(getattr(Trainer, name)))
    if isinstance(model, nn.Module):
        kinds = dict.fromkeys(type(module) for module in model.modules())
        yield from (f"{kind.__name__}.forward" for kind in kinds if _is_foreign(kind) or _is_foreign(kind.forward))


def replacement_problems(trainer: type, model: object) -> Iterator[Problem]:
    """Refuse to train where unsloth has replaced what this trainer is built on."""
    if found := list(dict.fromkeys(replacements(trainer, model))):
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        reason = f"it has replaced {shown}, so losses and log-probabilities would not be those of the settings"
        yield Problem(LIBRARY, "imported", reason, _CURE)


def _is_foreign(part: object) -> bool:
    """Return whether a class or function comes from unsloth's modules or from those that it generates."""
    module = str(getattr(part, "__module__", ""))
    return module.partition(".")[0].lower().startswith(LIBRARY)
