"""The model's own forward: what scores have to equal, and the ways of scoring where TRL's do not."""

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import compress, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from grpo_ext.config.temporary import temporarily
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.packing.collective import failing_alike, is_out_of_memory, largest
from grpo_ext.packing.forward import rounded_differently
from grpo_ext.packing.lm_head import LEFT_OUT
from grpo_ext.packing.obstacles import takes_positions, text_model
from grpo_ext.packing.policy import NOISES
from grpo_ext.packing.sampling_support import SamplingSupport

logger = logging.getLogger(__name__)

EXACT = 1e-4
"""Error in nats per token that counts as rounding: some parts round to float32 in any precision."""


class ForwardMode(NamedTuple):
    """How TRL's forward scores rows."""

    logits: bool = False
    """Whether logits are the model's own; else TRL's LM head computes them from the output of the model's body."""
    positions: bool = False
    """Whether positions are counted by the attention mask; else the model counts them."""

    @contextmanager
    def of(
        self,
        base: PreTrainedModel,
        completion: int,
        temperature: float,
        support: Callable[[int], SamplingSupport] | None = None,
    ) -> Iterator[None]:
        """Let TRL's forward of `base` score `completion` columns so; `support` as in `labelled_positions_only`."""
        with ExitStack() as stack:
            if self.positions:
                stack.enter_context(count_positions(base))
            if self.logits:
                forward = _by_own_logits(base, completion, temperature, support)
                stack.enter_context(temporarily(base, forward=forward))
            yield


def count_positions(base: PreTrainedModel) -> Any:
    """Give the body of `base` positions that leave out padding; return the handle of the hook."""

    def counted(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        mask, inputs = kwargs.get("attention_mask"), (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        if mask is None or mask.dim() != 2:
            return None
        width = next(tokens.shape[1] for tokens in inputs if tokens is not None)
        return args, kwargs | {"position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -width:]}

    return base.base_model.register_forward_pre_hook(counted, with_kwargs=True)


def _by_own_logits(
    base: PreTrainedModel, completion: int, temperature: float, support: Callable[[int], SamplingSupport] | None
) -> Callable[..., Any]:
    """Return a forward with TRL's arguments and outputs."""
    own, takes = base.forward, inspect.signature(type(base).forward).parameters
    narrow = {"logits_to_keep": completion + 1} if "logits_to_keep" in takes else {}

    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return own(*args, **kwargs)
        labels = kwargs.pop("labels")[:, -completion:]
        output, active = own(*args, use_cache=False, **kwargs, **narrow), labels != -100
        logits = output.logits[:, -completion - 1 : -1][active]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        if support is not None:
            logits = logits.masked_fill(support(len(logits)).left_out(slice(None), logits.shape[1]), LEFT_OUT)
        log_p = logits.log_softmax(dim=-1)
        values = log_p.gather(1, labels[active][:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)
        log_probs, entropy = (value.new_zeros(labels.shape).masked_scatter(active, value) for value in values)
        aux_loss = getattr(output, "aux_loss", None)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, aux_loss=aux_loss)

    return forward


def exact_mode(score: Callable[[ForwardMode, int | None], Tensor], base: PreTrainedModel) -> ForwardMode:
    """Return the first way to score two padded rows that equals the model's own forward of each without padding.

    That is with the positions of `generate`, which counts those of text from 0. They may differ by `NOISES` times the
    change when the embeddings are rounded differently. All processes return the same way, and raise the same error.

    Args:
        score: returns log-probabilities [tokens] of both rows, padded, or of the row of a number, unpadded.
        base: the causal language model.

    Raises:
        ConfigError: none does, or the model's own forward fails.
        torch.OutOfMemoryError: a process has too little memory.
    """
    name, counted, text = type(base).__name__, takes_positions(base), text_model(base) is base

    def scored(way: ForwardMode, row: int | None = None) -> Tensor | None:
        with failing_alike():
            try:
                return score(way, row)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                if row is None:  # not with this model
                    return None
                reason = f"its own forward cannot score a row by itself ({type(error).__name__}: {error})"
                raise ConfigError([Problem("model", name, reason, "Train another architecture.")]) from error

    def own() -> Tensor:
        rows = [scored(ForwardMode(logits=True, positions=counted and text), row) for row in range(2)]
        return torch.cat([row for row in rows if row is not None]).cpu().double()

    def error(logps: Tensor | None) -> float:
        apart = math.nan if logps is None else (logps.cpu() - expected).abs().mean().item()
        return math.inf if math.isnan(apart) else apart

    # before others: ZeRO-3 learns from the first forward which parameters a module reads
    stock = scored(ForwardMode())
    expected = own()
    with rounded_differently(base, seed=0):
        noise = largest((own() - expected).abs().mean().item())
    allowed, errors = max(EXACT, NOISES * noise), dict[ForwardMode, float]()
    for positions, logits in product((False, True)[: 1 + counted], (False, True)):
        way = ForwardMode(logits, positions)
        errors[way] = largest(error(scored(way) if any(way) else stock))
        if errors[way] <= allowed:
            break
    off = f"{errors[ForwardMode()]:.2g} nats per token off the model's own forward"
    if errors[way] > allowed:
        reason = f"scores of its first completions, beside padding, are {off} (rounding: {noise:.2g})"
        cure = "Train another architecture: its padding, or its head, changes log-probabilities."
        raise ConfigError([Problem("model", name, reason, cure)])
    if any(way):
        used = " and ".join(compress(("its own logits", "positions by the attention mask"), way))
        logger.warning(f"{name}: TRL's scores are {off}; scoring by {used}, which are exact.")
    return way
