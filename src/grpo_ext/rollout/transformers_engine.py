"""Rollouts by transformers: `model.generate` with the decoding of `rollout.decoding`, where that is exact."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import OF_THE_MODEL, scores_kept_sets
from grpo_ext.packing.obstacles import Forward, forward_obstacle, obstacles
from grpo_ext.rollout.decoding import decode
from grpo_ext.rollout.kept_log import Drawn, KeptLog
from grpo_ext.rollout.prompt_cache import Unsupported

logger = logging.getLogger(__name__)


class GroupedEngine:
    """Decodes for one trainer: `with engine.generating(model): ... model.generate(...)`.

    Args:
        required: raise where the engine cannot be used, instead of falling back to `generate`.
        keeps: record, in training, the tokens that a truncated sampler kept, also where `generate` decodes.

    Attributes:
        refusal: why the engine falls back to `generate`; empty while it does not.
        uniforms: numbers in [0, 1), [rows, tokens], by which the next call samples; None: torch's random state.
    """

    def __init__(self, *, required: bool = False, keeps: bool = False) -> None:
        self.required, self.keeps = required, keeps
        self.refusal = ""
        self.uniforms: Tensor | None = None

    def refuse(self, reason: str) -> None:
        """Fall back to `generate` from now on.

        Raises:
            Unsupported: the engine is required.
        """
        if self.required:
            raise Unsupported(f"rollout_engine='grouped': {reason}. Set rollout_engine: auto.")
        self.refusal = reason
        logger.warning(f"rollouts by transformers' own generate: {reason}.")

    @contextmanager
    def generating(self, model: Any) -> Iterator[Drawn]:
        """Let `model.generate` decode by `decode` where that is exact.

        Yields what each such call then fills with the log-probabilities and kept sets of its samples.

        Raises:
            Unsupported: it is not exact, and the engine is required.
        """
        stock, drawn = model.generate, Drawn()

        def generate(**kwargs: Any) -> Tensor:
            drawn.log = KeptLog(len(kwargs["input_ids"])) if self.keeps and model.training else None
            try:
                if not self.refusal:
                    for reason in obstacles(model, Forward.ROLLOUT):
                        raise Unsupported(reason)
                    return stock(**kwargs, custom_generate=partial(decode, drawn=drawn, uniforms=self.uniforms))
            except Unsupported as error:
                self.refuse(str(error))
            return stock(**kwargs) if drawn.log is None else stock(**kwargs, custom_generate=_recorded(drawn.log))

        with temporarily(model, generate=generate):
            yield drawn


def only_settings(model: Any, args: GRPOExtConfig) -> AbstractContextManager[None]:
    """Let transformers draw by the trainer's settings only, as vLLM does, not by generation_config.json too."""
    own = getattr(model, "generation_config", None)
    if own is None or args.use_vllm or args.loss_defaults == "trl":
        return nullcontext()
    return temporarily(own, **{name: None for name in OF_THE_MODEL if getattr(own, name, None) is not None})


def grouped_engine(args: GRPOExtConfig, *, sharded: bool) -> GroupedEngine | None:
    """Return the engine that `rollout_engine` selects, or None where TRL generates by itself.

    Args:
        args: the trainer's settings.
        sharded: whether FSDP spreads the weights over processes.
    """
    keeps, asked = scores_kept_sets(args), args.rollout_engine_resolved
    plain = asked == "generate" and not keeps
    if args.use_vllm or args.use_transformers_continuous_batching or plain:
        return None
    engine = GroupedEngine(required=asked == "grouped", keeps=keeps)
    if asked == "generate":
        engine.refusal = "rollout_engine is 'generate'"
    elif sharded:
        engine.refuse("the weights are sharded over processes")
    elif reason := forward_obstacle(args):
        engine.refuse(reason)
    return engine


def _recorded(log: KeptLog) -> Callable[..., Any]:
    """Return the sampling of `generate` with a last logits processor that records what it may draw."""

    def record(_: Tensor, scores: Tensor) -> Tensor:
        log.add(scores)
        return scores

    def sample(model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, **given: Any) -> Any:
        return model._sample(input_ids, LogitsProcessorList([*logits_processor, record]), **given)

    return sample
