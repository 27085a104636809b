"""Rollouts by transformers: `model.generate` with the decoding of `rollout.decoding`, where that is exact."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, Trainer
from transformers.generation import GenerationMode
from trl.distributed import DistributedBackend
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.temporary import temporarily
from grpo_ext.config.truncation import OF_THE_MODEL, reshaping, scores_over_support
from grpo_ext.errors import ConfigError, Problem
from grpo_ext.objective.ratios import widest
from grpo_ext.packing.obstacles import Forward, causal_lm, forward_obstacle, obstacles
from grpo_ext.packing.rotary import forgets_beyond
from grpo_ext.rollout.decoding import decode, ended, padded, picked, random_state, set_random_state
from grpo_ext.rollout.prompt_cache import Unsupported
from grpo_ext.rollout.samplers import Sampled
from grpo_ext.rollout.seeds import uniform_numbers
from grpo_ext.rollout.support_log import DrawLog, SamplerRecord, SupportLog
from grpo_ext.rollout.vllm.lazy_import import GRPOTrainer

logger = logging.getLogger(__name__)


class GroupedEngine:
    """Decodes for one trainer: `engine.generate(model, input_ids=..., ...)` in place of `model.generate(...)`.

    Args:
        required: raise where the decoding is not exact, instead of falling back to `model.generate`.
        with_support: record, in training, the tokens that a truncated sampler kept, whatever decodes.
        records: record, in training, the log-probability of each token that `model.generate` draws.

    Attributes:
        refusal: why the engine falls back to `model.generate`; empty while it does not.
    """

    def __init__(
        self, *, required: bool = False, with_support: bool = False, records: bool = True, refusal: str = ""
    ) -> None:
        self.required, self.with_support, self.records, self.refusal = required, with_support, records, refusal
        self._looked, self._told = False, set[str]()

    def refuse(self, reason: str) -> None:
        """Fall back to `model.generate` from now on.

        Raises:
            Unsupported: the engine is required.
        """
        self._leave(reason)
        self.refusal = reason

    def _leave(self, reason: str) -> None:
        if self.required:
            raise Unsupported(f"rollout_engine='grouped': {reason}. Set rollout_engine: auto.")
        if reason not in self._told:
            self._told.add(reason)
            logger.warning(f"rollouts by transformers' own generate: {reason}.")

    def generate(self, model: Any, uniforms: Tensor | None = None, **inputs: Any) -> tuple[Tensor, SamplerRecord]:
        """Return what `model.generate` returns for its `inputs`, and the record of the draws.

        Args:
            model: the policy.
            uniforms: numbers in [0, 1), [rows, tokens], by which each row is drawn; None: torch's random state.
            inputs: of `model.generate`; rows with images are left to it.

        Raises:
            Unsupported: decoding would not be exact, and the engine is required.
        """
        log = SupportLog(len(inputs["input_ids"])) if self.with_support and model.training else None
        found, device = SamplerRecord(log=log), inputs["input_ids"].device
        images = [name for name in inputs if name.startswith(("image", "pixel"))]
        before = random_state(device)
        if images and not self.refusal:
            self._leave(f"rows have {', '.join(sorted(images))}")
        try:
            if not images and not self.refusal:
                self._look(model)
                numbers = uniforms
                if numbers is None and model.training:  # an evaluation draws as `generate` does, whatever the launch
                    size = len(inputs["input_ids"]), inputs["generation_config"].max_new_tokens
                    numbers = torch.rand(*size, dtype=widest(device), device=device)
                ours = partial(decode, record=found, uniforms=numbers)
                return model.generate(**inputs, custom_generate=ours), found
        except Unsupported as error:
            self.refuse(str(error))
            set_random_state(device, before)  # as in a resumed run, and in the next generation
        self._check_length(model, inputs["input_ids"].shape[1] + inputs["generation_config"].max_new_tokens)
        samples = inputs["generation_config"].get_generation_mode() is GenerationMode.SAMPLE
        own = None if uniforms is None else uniforms.to(device)
        draw = None if own is None else lambda shares, step: picked(shares, own[:, step])
        draws = DrawLog(log, draw) if samples and (draw or (self.records and model.training)) else None
        if draws is None and log is None:
            return model.generate(**inputs), found
        output = model.generate(**inputs, custom_generate=_recorded(draws or DrawLog(log)))
        found.logps += [] if draws is None else [draws.logps(output)]
        return output, found

    def _look(self, model: Any) -> None:
        """Look once at what of the model stands in the way of the decoding."""
        if not self._looked:
            self._looked = True
            for reason in obstacles(model, Forward.ROLLOUT):
                raise Unsupported(reason)

    def _check_length(self, model: Any, tokens: int) -> None:
        """Refuse rows that `model.generate` would not decode right."""
        if tokens > (most := forgets_beyond(causal_lm(model).config)):
            reason = (
                f"rows may have {tokens} tokens, and transformers' own generate forgets a row of longrope at {most}"
            )
            ours = "rollout_engine: auto" if self.refusal.startswith("rollout_engine") else "use_vllm: true"
            cure = f"Set {ours}, or keep prompt and completion within {most} tokens together."
            raise ConfigError([Problem("rollout_engine", "generate", f"{reason} ({self.refusal})", cure)])


class TransformersSampler:
    """The policy of a trainer as its own sampler, by transformers, in the training process.

    Args:
        trainer: with its model, and settings of sampling, which an evaluation may change.
        engine: decodes.
    """

    def __init__(self, trainer: GRPOTrainer, engine: GroupedEngine) -> None:
        self.trainer, self.engine = trainer, engine
        self.collective = bool(_sharded(trainer) and trainer.accelerator.num_processes > 1)
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.positions = positions_of(model, cast(GRPOExtConfig, trainer.args)) or math.inf

    @property
    def takes_streams(self) -> bool:
        """Whether a row depends on its own stream of random numbers only."""
        return not self.engine.refusal

    @property
    def limit(self) -> int:
        """Most tokens of a completion."""
        return int(self.trainer.generation_config.max_new_tokens or 1)

    def sample(
        self,
        contexts: list[list[int]],
        limits: Sequence[int],
        streams: Sequence[np.random.Generator] | None = None,
        *,
        fields: Mapping[str, Any] = MappingProxyType({}),
        images: Sequence[Any] | None = None,
        group: int = 1,
    ) -> list[Sampled]:
        """Sample a completion after each context, as `PolicySampler` does."""
        longest, rows = max(limits, default=1), len(contexts)
        beyond = [len(ids) + longest > self.positions for ids in contexts]
        if any(beyond) and not all(beyond) and not self.collective and not fields:
            return self._in_two(contexts, limits, streams, beyond)  # the others must not run out of positions
        if self.collective:  # the same number of rows and tokens on every process
            sizes = gather_object([(rows, longest)])
            rows, longest = max(size[0] for size in sizes), max(size[1] for size in sizes)
        if not rows:
            return []
        uniforms = None if streams is None else torch.from_numpy(uniform_numbers(streams, limits, rows, longest))
        filled = contexts + [[self.trainer.eos_token_ids[0]]] * (rows - len(contexts))
        try:
            made = self._generated(filled, longest, uniforms, fields)
        except IndexError as error:
            if not any(beyond):
                raise
            end, most = self.positions, max(map(len, contexts))
            reason = f"the model's table ends at position {end}, and a prompt has {most} tokens"
            raise ConfigError([Problem("max_completion_length", longest, reason, "Set it lower.")]) from error
        return [
            Sampled(one.ids[:limit], None if one.logps is None else one.logps[:limit], one.support)
            for one, limit in zip(made, limits, strict=False)
        ]

    def _in_two(
        self,
        contexts: list[list[int]],
        limits: Sequence[int],
        streams: Sequence[np.random.Generator] | None,
        beyond: list[bool],
    ) -> list[Sampled]:
        found: dict[int, Sampled] = {}
        for part in (False, True):
            places = [i for i, late in enumerate(beyond) if late is part]
            chosen = None if streams is None else [streams[i] for i in places]
            made = self.sample([contexts[i] for i in places], [limits[i] for i in places], chosen)
            found |= dict(zip(places, made, strict=True))
        return [found[i] for i in range(len(contexts))]

    def _generated(
        self, contexts: list[list[int]], longest: int, uniforms: Tensor | None, fields: Mapping[str, Any]
    ) -> list[Sampled]:
        trainer = self.trainer
        config = copy.copy(trainer.generation_config)
        config.max_new_tokens = longest
        inputs = Trainer._prepare_inputs(trainer, self._tensors(contexts, fields))
        width = inputs["input_ids"].shape[1]
        with profiling_context(trainer, "transformers.generate"), self._unwrapped() as model:
            output, record = self.engine.generate(model, uniforms, **inputs, generation_config=config)
        ends = frozenset(trainer.eos_token_ids)
        ids = [ended(row, ends) for row in output[:, width:].tolist()]
        unknown = [None] * len(ids)
        logps, supports = record.logps[-1].tolist() if record.logps else unknown, record.supports(ids) or unknown
        rows = zip(ids, logps, supports, strict=True)
        return [Sampled(its, known and known[: len(its)], support) for its, known, support in rows]

    def _tensors(self, contexts: list[list[int]], fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the inputs of `generate`, padded on the left."""
        multiple: Any = self.trainer.pad_to_multiple_of
        ids, mask = padded(contexts, cast(int, self.trainer.generation_config.pad_token_id), multiple)
        found = {"input_ids": ids, "attention_mask": mask}
        for name, value in fields.items():
            if isinstance(value, list) and value and isinstance(value[0], list):  # of each token
                found[name] = padded(value, 0, multiple)[0]
            else:
                found[name] = value if isinstance(value, Tensor) else torch.tensor(np.array(value))
        return found

    @contextmanager
    def _unwrapped(self) -> Iterator[Any]:
        """Return the model to generate with; sharded weights are gathered, where the settings say so."""
        trainer = self.trainer
        args = cast(GRPOExtConfig, trainer.args)
        kwargs, gathers = cast(Any, args.gradient_checkpointing_kwargs), args.ds3_gather_for_generation
        with (
            disable_gradient_checkpointing(cast(Any, trainer.model), kwargs),
            unwrap_model_for_generation(
                trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gathers
            ) as model,
            torch.no_grad(),
            DistributedBackend(trainer.accelerator).summon_full_params(trainer.model_wrapped, recurse=False),
            only_settings(model, args),
            _computing(trainer, model),
        ):
            yield model


class ContinuousBatchingSampler(TransformersSampler):
    """The same by transformers' continuous batching, as TRL calls it."""

    takes_streams = False

    def _generated(
        self, contexts: list[list[int]], longest: int, uniforms: Tensor | None, fields: Mapping[str, Any]
    ) -> list[Sampled]:
        config = copy.copy(self.trainer.generation_config)
        config.max_new_tokens = longest
        with temporarily(self.trainer, generation_config=config):
            found, _ = GRPOTrainer._generate_single_turn(self.trainer, contexts, None, {}, 1)
        return [Sampled(ids, None, None) for ids in found]


def transformers_sampler(trainer: GRPOTrainer, args: GRPOExtConfig) -> TransformersSampler:
    """Return the sampler of a trainer that samples by transformers."""
    if args.use_transformers_continuous_batching:
        return ContinuousBatchingSampler(trainer, GroupedEngine(refusal="continuous batching decodes"))
    return TransformersSampler(trainer, grouped_engine(args, sharded=trainer.is_fsdp_enabled))


def positions_of(model: PreTrainedModel, args: GRPOExtConfig) -> int | None:
    """Return the positions that model and engine have, if that is known."""
    known = [getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    known += [args.vllm_max_model_length] if args.use_vllm else []
    return min((int(positions) for positions in known if positions), default=None)


def samples_mixed(model: Any, trainer: GRPOTrainer) -> bool:
    """Return whether the policy samples in the mixed precision in which it is scored.

    In an autocast around a whole generation each weight is cast once; accelerate's, around each forward, casts it at
    each token, to the same bits. With adapters accelerate wraps PEFT's forward, which `generate` does not call: stock
    TRL samples in the precision of the weights there, and so do `loss_defaults: trl` and sharded weights.
    """
    stock = _sharded(trainer) or cast(GRPOExtConfig, trainer.args).loss_defaults == "trl"
    return (isinstance(model, PeftModel) and not stock) or "_original_forward" in vars(causal_lm(model))


def _sharded(trainer: GRPOTrainer) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


@contextmanager
def _computing(trainer: GRPOTrainer, model: Any) -> Iterator[None]:
    """Compute in mixed precision, where the policy samples so, and by weights that all want a gradient.

    torch keeps the casts of such weights only. With a frozen LM head a CPU multiplies the last states of each row by
    themselves, with a copy of the head for each row. Sharded weights are left alone, because FSDP remembers which ones
    want a gradient, and so is what samples as stock TRL does.
    """
    mixed = samples_mixed(model, trainer)
    stock = _sharded(trainer) or (not mixed and cast(GRPOExtConfig, trainer.args).loss_defaults == "trl")
    weights = () if stock else model.parameters()
    frozen = [p for p in weights if type(p) is nn.Parameter and p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with trainer.accelerator.autocast() if mixed else nullcontext():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def only_settings(model: Any, args: GRPOExtConfig) -> AbstractContextManager[None]:
    """Let transformers draw by the trainer's settings only, as vLLM does, not by generation_config.json too."""
    own = getattr(model, "generation_config", None)
    if own is None or args.use_vllm or args.loss_defaults == "trl":
        return nullcontext()
    return temporarily(own, **{name: None for name in OF_THE_MODEL if getattr(own, name, None) is not None})


def grouped_engine(args: GRPOExtConfig, *, sharded: bool) -> GroupedEngine:
    """Return the engine that `rollout_engine` selects.

    Args:
        args: the trainer's settings.
        sharded: whether FSDP spreads the weights over processes.
    """
    with_support, asked = scores_over_support(args), args.rollout_engine_resolved
    if asked == "generate":
        asks = "sampling_per_token_logps" in args.objective.generation_inputs or reshaping(args)
        records = bool(asks or args.loss_defaults != "trl")  # stock TRL does not, and each token costs a softmax
        return GroupedEngine(with_support=with_support, records=records, refusal="rollout_engine is 'generate'")
    engine = GroupedEngine(required=asked == "grouped", with_support=with_support)
    if sharded:
        engine.refuse("the weights are sharded over processes")
    elif reason := forward_obstacle(args):
        engine.refuse(reason)
    return engine


def _recorded(draws: DrawLog) -> Callable[..., Any]:
    """Return the sampling of `generate` with a last logits processor that records what it may draw, and draws."""

    def sample(model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, **given: Any) -> Any:
        return model._sample(input_ids, LogitsProcessorList([*logits_processor, draws]), **given)

    return sample
