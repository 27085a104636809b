"""What `import unsloth` (2026.10.9) and its `FastLanguageModel` replace, under the same names, and nothing of its own.

The names are those of its wheel: `unsloth/models/rl.py` binds generated classes in three places of TRL,
`unsloth/models/_utils.py` and `llama.py` replace methods of transformers' trainer and forwards of models.
"""

import sys
from types import ModuleType

import transformers
import trl
from trl.trainer import grpo_config, grpo_trainer

METHODS = ("training_step", "compute_loss", "_inner_training_loop", "get_batch_samples", "__init__")


def of_unsloth(function, name, module):
    """A function that calls another, defined as unsloth's is."""

    def replaced(*args, **kwargs):
        return function(*args, **kwargs)

    replaced.__name__, replaced.__module__ = name, module
    return replaced


def replace_classes(put=setattr) -> None:
    """Bind UnslothGRPOTrainer and UnslothGRPOConfig, each a subclass of TRL's, where TRL has its own."""
    for name in ("GRPOTrainer", "GRPOConfig"):
        base = getattr(trl, name)
        made = type(f"Unsloth{name}", (base,), {"__module__": "UnslothGRPOTrainer"})
        for place in (trl, trl.trainer, grpo_trainer):
            put(place, name, made)
    put(grpo_config, "GRPOConfig", grpo_trainer.GRPOConfig)


def replace_methods(put=setattr) -> None:
    """Replace methods of transformers' trainer."""
    for name in METHODS:
        method = getattr(transformers.Trainer, name)
        put(transformers.Trainer, name, of_unsloth(method, f"_unsloth_{name}", "unsloth.models._utils"))


def replace_forward(kind, put=setattr) -> None:
    """Replace a model's forward for all of its class."""
    put(kind, "forward", of_unsloth(kind.forward, "_CausalLM_fast_forward", "unsloth.models.llama"))


def install() -> None:
    """Do what the import does."""
    sys.modules["unsloth"] = ModuleType("unsloth")
    replace_methods()
    replace_classes()
