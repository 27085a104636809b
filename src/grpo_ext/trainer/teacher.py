"""Teachers of losses beside the policy's: the policy before training, or another model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from grpo_ext.config.added_losses import INITIAL, TEACHER, other_vocabulary
from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.mappings import as_mapping
from grpo_ext.errors import ConfigError, Problem, first_line
from grpo_ext.packing.obstacles import causal_lm, name_body
from grpo_ext.trainer.reference import InitialWeights, frozen_copy


@dataclass(frozen=True)
class Teacher:
    """A model that is not trained; or the policy with the weights that its adapter began with."""

    model: nn.Module
    initial: InitialWeights | None = None

    def weights(self, policy: nn.Module) -> AbstractContextManager[None]:
        """Enter the teacher's weights: another model's are always its own."""
        return nullcontext() if self.initial is None else self.initial.replacing(policy)


def teacher_of(
    name: str,
    policy: nn.Module,
    reference: nn.Module | None,
    initial: InitialWeights | None,
    tokenizer: Any,
    args: GRPOExtConfig,
    accelerator: Accelerator,
) -> Teacher:
    """Return a teacher, ready to score; a second model is loaded only where no other holds its weights.

    Args:
        name: `initial`, or the name or folder of a model.
        policy: before training.
        reference: of the KL term, if it is a model of its own that stays as it is.
        initial: the weights that the policy's adapter begins with.
        tokenizer: the policy's.
        args: of the run.
        accelerator: of the run.

    Raises:
        ConfigError: the teacher has another vocabulary than the policy.
    """
    if name == INITIAL:
        if isinstance(policy, PeftModel):
            return Teacher(policy, initial)
        if reference is None and is_deepspeed_zero3_enabled():
            reason = "ZeRO-3 has split the policy's weights, which cannot be copied"
            raise ConfigError([Problem(TEACHER, name, reason, "Set beta > 0, or name the model's folder.")])
        return Teacher(reference if reference is not None else _prepared(frozen_copy(policy), args, accelerator))
    _check_vocabulary(name, tokenizer, args.trust_remote_code)
    options: dict[str, Any] = {**as_mapping(args.model_init_kwargs)}
    options.setdefault("trust_remote_code", args.trust_remote_code)
    options.setdefault("dtype", getattr(policy, "dtype", torch.float32))
    if accelerator.num_processes > 1:
        options["device_map"] = None
    return Teacher(_prepared(create_model_from_path(name, **options), args, accelerator))


def _prepared(model: nn.Module, args: GRPOExtConfig, accelerator: Accelerator) -> nn.Module:
    """Return a frozen model with TRL's fused LM head, prepared as TRL prepares a reference."""
    base: PreTrainedModel = causal_lm(model.eval().requires_grad_(False))  # type: ignore[arg-type]
    name_body(base)
    add_fused_lm_head(base, temperature=args.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    engines: dict[str, Callable[..., Any]] = {"DEEPSPEED": prepare_deepspeed, "FSDP": prepare_fsdp}
    if (prepare := engines.get(accelerator.distributed_type.value)) is not None:
        return prepare(model, accelerator)
    return accelerator.prepare_model(model, evaluation_mode=True)


def _check_vocabulary(name: str, tokenizer: Any, trusted: bool) -> None:
    try:
        vocabulary = AutoTokenizer.from_pretrained(name, trust_remote_code=trusted).get_vocab()
    except (OSError, ValueError) as error:
        reason, cure = f"its tokenizer cannot be loaded ({first_line(error)})", "Save one beside the model."
        raise ConfigError([Problem(TEACHER, name, reason, cure)]) from error
    if problems := [*other_vocabulary(name, tokenizer.get_vocab(), vocabulary)]:
        raise ConfigError(problems)
