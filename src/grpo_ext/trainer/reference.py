"""The reference of the KL term: the policy before training, by one mechanism for every adapter, and its checks.

TRL switches a new adapter off, and copies a trained one. Neither is the policy as it was where the base's weights were
rewritten, where more than the adapter's layers is trained, or where an adapter does not start at zero.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig

from grpo_ext.errors import ConfigError, Problem
from grpo_ext.packing.collective import entered_alike, failing_alike, is_out_of_memory
from grpo_ext.packing.dropout import active_dropout
from grpo_ext.packing.scorer import Scorer, in_evaluation
from grpo_ext.trainer.checkpoints.processes import local, whole, writable

logger = logging.getLogger(__name__)

FILE = "reference.pt"


class InitialWeights:
    """The trained weights of a policy with an adapter before its first step.

    Args:
        model: the policy, before an engine splits it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: whole(parameter) for name, parameter in _trained(model).items()}

    def replacing(self, model: nn.Module) -> AbstractContextManager[None]:
        """Give `model` these weights for the time of a forward."""
        return _replaced(model, self.weights)

    def write(self, folder: Path) -> None:
        """Write them into a checkpoint: an adapter may be drawn at random when it is made once more."""
        torch.save(self.weights, folder / FILE)

    def read(self, folder: Path) -> None:
        """Take those of a checkpoint, if it has any."""
        if (folder / FILE).exists():
            self.weights = torch.load(folder / FILE, map_location="cpu", weights_only=True)


@contextmanager
def moved(model: nn.Module) -> Iterator[None]:
    """Move the trained weights a little for some forwards: a new adapter, mostly of zeros, does not act yet."""
    weights = {name: _kept(parameter) for name, parameter in _trained(model).items()}
    for weight in map(local, weights.values()):
        generator = torch.Generator(weight.device).manual_seed(0)
        weight.add_(0.01 * torch.randn(weight.shape, generator=generator, device=weight.device, dtype=weight.dtype))
    with _replaced(model, weights):
        yield


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters, by names without those of wrappers: `_orig_mod`, `_checkpoint_wrapped_module`.

    FSDP2 splits them first: what its last forward has gathered it would throw away.
    """
    _reshard(model)
    named = [(name.split("."), parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {".".join(part for part in parts if part[0] != "_"): parameter for parts, parameter in named}


@contextmanager
def _replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give `model` other trained weights, and afterwards its own."""
    trained = _trained(model)
    before = {name: _kept(parameter) for name, parameter in trained.items()}
    try:
        _fill(model, trained, weights)
        yield
    finally:
        _fill(model, trained, before)


def _kept(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter: of FSDP2's this process's part, of ZeRO-3's the whole."""
    return parameter.detach().clone() if isinstance(parameter, DTensor) else whole(parameter)


@torch.no_grad()
def _fill(model: nn.Module, parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Set parameters, whole or split; engines gather them again for the next forward."""
    with writable(parameters.values()):
        for name, parameter in parameters.items():
            weight = weights[name].to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor) and not isinstance(weight, DTensor):
                weight = distribute_tensor(weight, parameter.device_mesh, parameter.placements)
            target, source = (x.to_local() if isinstance(x, DTensor) else x for x in (parameter, weight))
            target.copy_(source)
    _reshard(model)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a policy that is not trained."""
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    vars(copied).pop("forward", None)  # TRL's, which would run the policy's weights
    return copied


# Checks.

TOLERANCE, HALF = 1e-3, 0.1
"""Largest difference of log-probabilities that rounding explains, in float32 and in half precision."""


class ReferenceCheck:
    """Compares the reference with the policy before training, later with itself at the start.

    All processes make the same forwards and raise the same error.

    Args:
        score: returns log-probabilities of made-up rows by a model.
        initial: the weights that an adapter begins with, which are its reference.
        half: whether scores are of half precision.
        follows: whether the reference follows the policy.

    Attributes:
        first: log-probabilities of the reference at the start, once known.
    """

    def __init__(
        self, score: Callable[[nn.Module], Tensor], initial: InitialWeights | None, *, half: bool, follows: bool
    ) -> None:
        self.score, self.initial, self.half, self.follows = score, initial, half, follows
        self.first: Tensor | None = None
        self.possible = True

    def __call__(self, policy: nn.Module, model: nn.Module, reference: nn.Module, *, begins: bool) -> None:
        """Compare; a check for which memory is too little is left out from then on.

        Raises:
            ConfigError: they differ, or made-up rows cannot be scored.
        """
        if not self.possible or (self.first is not None and self.follows):
            return
        try:
            self._compare(policy, model, reference, begins=begins)
        except torch.OutOfMemoryError as error:
            self.possible = False
            logger.warning(f"the reference is not compared with the policy at the start: too little memory ({error})")

    def _compare(self, policy: nn.Module, model: nn.Module, reference: nn.Module, *, begins: bool) -> None:
        first, initial = self.first, self.initial
        starts = first is None and begins
        with entered_alike(moved(policy) if starts and initial is not None else nullcontext()):
            with entered_alike(nullcontext() if initial is None else initial.replacing(policy)):
                self.first = reference_logps = self.score(reference)
            scores = [self.score(model) for _ in range(2 * starts)]
        check = partial(compare, model=policy, half=self.half)
        with failing_alike():
            if first is not None:
                check(reference_logps, first, "the reference has moved since the start")
        if starts:
            logps = self.score(model)
            with failing_alike():
                check(scores[0], scores[1], "each forward draws its own noise, also without dropout")
                check(reference_logps, logps, "the reference is not the policy before the first step")


def compare(logps: Tensor, expected: Tensor, fault: str, *, model: Any, half: bool) -> None:
    """Compare log-probabilities with what they should be; `fault` names the fault where they differ.

    Raises:
        ConfigError: they differ by more than rounding explains, in half precision if `half`.
    """
    distance = (logps.float() - expected.float()).abs().max().item()
    if distance > (HALF if half else TOLERANCE):  # NaN is named by the check of the batch
        reason = f"{fault}: log-probabilities differ by up to {distance:.2g} nats"
        raise ConfigError([Problem("model", kind(model), reason, _CURE)])


def scored(score: Callable[..., tuple[Tensor, Any, Any]], model: Any, ids: Tensor) -> Tensor:
    """Return the log-probabilities of rows of tokens.

    Raises:
        ConfigError: `score` cannot compute them for this model.
    """
    try:
        return score(model, ids, torch.ones_like(ids), ids.shape[1] - 1)[0]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"TRL cannot score completions with it ({type(error).__name__}: {error})"
        raise ConfigError([Problem("model", kind(model), reason, _CURE)]) from error


_CURE = "Set beta: 0, or train another kind of adapter, such as a plain LoRA."


def kind(model: Any) -> str:
    """Return PEFT's name for the adapter of a model, or the model's class."""
    adapters = getattr(model, "peft_config", {}).values()
    return next((adapter.peft_type.value for adapter in adapters), type(model).__name__)


def made_up_logps(scorer: Scorer, rows_for: tuple[Any, PreTrainedConfig, torch.device], model: nn.Module) -> Tensor:
    """Return log-probabilities of rows made up for a tokenizer, by TRL's forward without dropout; collective.

    The way in which rows are scored may be chosen between two calls, and TRL's own is the same in both.
    """
    (tokenizer, config, device), dropout = rows_for, active_dropout(model)
    ids = made_up(tokenizer, config.get_text_config().vocab_size, device)
    with scorer.forward_only(), in_evaluation(model) if dropout else nullcontext(), failing_alike():
        return scored(scorer.trl, model, ids)


def made_up(tokenizer: Any, vocabulary: int, device: torch.device) -> Tensor:
    """Return two rows of 16 ordinary tokens, spread over the vocabulary."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    plain = [token for token in range(min(len(tokenizer), vocabulary)) if token not in special]
    return torch.tensor([plain[i * len(plain) // 32] for i in range(32)], device=device).view(2, 16)
