"""The reference model, a copy of the very policy that is handed in."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.rollout.vllm.lazy_import import grpo_trainer


@contextmanager
def reference_copied_from(model: Any, args: GRPOExtConfig, peft_config: Any) -> Iterator[None]:
    """Make the reference a copy of a policy handed in as an instance; stock TRL reloads it by name from disk."""
    if not isinstance(model, PreTrainedModel) or args.beta == 0.0 or peft_config is not None:
        yield
        return

    def copy_policy(_: str, **kwargs: Any) -> PreTrainedModel:
        reference = deepcopy(model).eval().requires_grad_(False)
        vars(reference).pop("forward", None)  # an earlier trainer's, which would go on running the policy's weights
        return reference

    with patch.object(grpo_trainer, "create_model_from_path", copy_policy):
        yield
