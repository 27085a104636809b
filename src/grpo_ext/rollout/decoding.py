"""Decoding that runs each distinct prompt once and drops finished rows from the batch.

`decode` is a decoding method of `model.generate`, so inputs, logits processors and stopping criteria are those of
transformers. Samples have the distribution of `generate`, and greedy completions are identical to its own.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria

from grpo_ext.objective.ratios import widest
from grpo_ext.packing.images import OF_TOKENS
from grpo_ext.rollout.blocked_weights import blocked
from grpo_ext.rollout.grouped_queries import selected
from grpo_ext.rollout.prompt_cache import RowCache, Unsupported, check_layers
from grpo_ext.rollout.support_log import SamplerRecord, SupportLog

LEAVE = 1 / 8
"""Share of finished rows at which they leave the batch: copying the others costs about one step."""

BLOCK = 512
"""Tokens of the vocabulary whose probabilities are summed at a time."""

_PROCESSORS = {
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper",
}  # fmt: skip
"""Processors that treat each row independently."""
_INPUTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}


# Where decoding is exact.


def check_call(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig, inputs: dict[str, Any]
) -> None:
    """Raise `Unsupported` if the arguments that `generate` has prepared rule out exact decoding."""
    if config.get_generation_mode() not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise Unsupported(f"the generation mode is {config.get_generation_mode().value}")
    if config.return_dict_in_generate or config.prefill_chunk_size is not None or not config.use_cache:
        raise Unsupported("return_dict_in_generate, prefill_chunk_size or use_cache is set")
    for processor in processors:
        if type(processor).__name__ not in _PROCESSORS:
            raise Unsupported(f"{type(processor).__name__} may depend on other rows")
    for criterion in criteria:
        if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria):
            raise Unsupported(f"{type(criterion).__name__} may depend on other rows")
    if unknown := {name for name, value in inputs.items() if value is not None} - _INPUTS:
        raise Unsupported(f"the model takes {', '.join(sorted(unknown))}")
    if inputs.get("position_ids") is None or inputs["position_ids"].dim() != 2:
        raise Unsupported("the model does not take position_ids of shape [batch, time]")
    cache = inputs.get("cache", inputs.get("past_key_values"))
    if type(cache) is not DynamicCache:
        raise Unsupported(f"its cache is a {type(cache).__name__}")
    check_layers(cache)


def text_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return arguments for a model that also takes images as those of a language model, and its marks of text.

    Only if they hold text: positions are then equal on all axes. Others are returned as they are.
    """
    if model.config.get_text_config(decoder=True) is model.config:
        return inputs, {}
    marks = {name: inputs[name] for name in OF_TOKENS if inputs.get(name) is not None and not inputs[name].any()}
    text = {name: value for name, value in inputs.items() if name not in marks}
    if not text.get("mm_encoder_outputs", True):  # of no images, since transformers 5.20
        del text["mm_encoder_outputs"]
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3 and bool((positions == positions[:1]).all()):
        text["position_ids"] = positions[0]
    return text, marks


# Decoding.


class Prompts(NamedTuple):
    """The distinct prompts of a batch."""

    rows: Int[Tensor, " distinct"]
    """First row that has each prompt."""
    of_row: Int[Tensor, " batch"]
    """Index of each row's prompt."""


def distinct(input_ids: Int[Tensor, "batch time"], mask: Int[Tensor, "batch time"] | None) -> Prompts:
    """Return the distinct prompts of a batch in order of appearance."""
    table = input_ids if mask is None else input_ids.masked_fill(mask == 0, -1)
    seen: dict[tuple[int, ...], int] = {}
    of_row = [seen.setdefault(tuple(row), len(seen)) for row in table.tolist()]
    rows = [of_row.index(i) for i in range(len(seen))]
    return Prompts(torch.tensor(rows, device=input_ids.device), torch.tensor(of_row, device=input_ids.device))


def decode(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch prompt"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    record: SamplerRecord | None = None,
    uniforms: Float[Tensor, "batch tokens"] | None = None,
    limits: Int[Tensor, " batch"] | None = None,
    **inputs: Any,
) -> Int[Tensor, "batch time"]:
    """Complete every row of `input_ids`: a decoding method for `generate(custom_generate=...)`.

    Args:
        record: gets the log-probabilities [batch, time] of sampled tokens, undefined after a row's end, and the sets.
        uniforms: numbers in [0, 1) by which tokens are sampled. A row's tokens then depend on its own numbers and
            logits only, not on the other rows.
        limits: most tokens of each row, besides the limit of `generation_config`; padding follows them.

    Raises:
        Unsupported: decoding would not be exact; another method has to generate the rows.
    """
    inputs, marks = text_inputs(model, inputs)
    check_call(logits_processor, stopping_criteria, generation_config, inputs)
    batch = _Batch(model, input_ids, logits_processor, stopping_criteria, generation_config, inputs, uniforms, limits)
    log = None if record is None else record.log
    with blocked(model, len(input_ids), generation_config.max_length - batch.prompt):
        logits = batch.prefill(marks)
        with selected(model):
            while batch.append(batch.choose(logits, log)):
                logits = batch.forward()
    if record is not None and generation_config.do_sample:
        record.logps.append(batch.drawn[:, input_ids.shape[1] : batch.length].log())
    return batch.completed()


class _Batch:
    """Unfinished rows, and the state for their next token."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        inputs: dict[str, Any],
        uniforms: Tensor | None,
        limits: Tensor | None,
    ) -> None:
        device = input_ids.device
        self.uniforms = None if uniforms is None else uniforms.to(widest(device)).to(device)
        self.limits = None if limits is None else limits.to(input_ids.device)
        self.prompt = input_ids.shape[1]
        self.model, self.processors, self.criteria, self.config = model, processors, criteria, config
        self.argument = "cache" if "cache" in inputs else "past_key_values"  # until transformers 5.23
        self.cache: DynamicCache = inputs[self.argument]
        self.rows_kept: RowCache | None = None
        self.options = {name: inputs[name] for name in ("logits_to_keep",) if name in inputs}
        self.mask: Tensor | None = inputs.get("attention_mask")
        self.positions: Tensor = inputs["position_ids"]
        batch, self.length = input_ids.shape
        self.pad = padding(config)
        self.output = input_ids.new_full((batch, max(self.length + 1, config.max_length)), self.pad)
        self.output[:, : self.length] = input_ids
        self.drawn = torch.ones(self.output.shape, dtype=torch.float32, device=input_ids.device)  # as the logits
        self.rows = torch.arange(batch, device=input_ids.device)
        self.ids = self.output.clone()
        self.finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)

    def prefill(self, marks: dict[str, Tensor]) -> Tensor:
        """Return the logits of the first token, from one forward over the distinct prompts.

        `marks` are arguments of this forward only, equal for equal prompts.

        Raises:
            Unsupported: completions of one prompt cannot share the cache or the forward.
        """
        prompts = distinct(self.ids[:, : self.length], self.mask)
        mask = None if self.mask is None else self.mask[prompts.rows]
        before = random_state(self.ids.device)
        logits = self._logits(
            input_ids=self.ids[prompts.rows, : self.length],
            attention_mask=mask,
            position_ids=self.positions[prompts.rows],
            **{name: mark[prompts.rows] for name, mark in marks.items()},
        )
        if not torch.equal(before, random_state(self.ids.device)):
            raise Unsupported("its forward draws random numbers, which completions of one prompt would share")
        check_layers(self.cache)
        self.rows_kept = RowCache(self.cache, prompts.of_row, mask)
        self.positions = self.positions[:, -1:]
        return logits[prompts.of_row]

    def forward(self) -> Tensor:
        """Return the logits of the next token."""
        assert self.rows_kept is not None
        self.positions = self.positions + (~self.finished[:, None]).long()  # a row that has ended may be at its last
        return self._logits(
            input_ids=self.ids[:, self.length - 1 : self.length],
            attention_mask=self.rows_kept.next_mask(),
            position_ids=self.positions,
        )

    def _logits(self, **inputs: Tensor | None) -> Tensor:
        cache = {self.argument: self.cache}
        output = self.model(**inputs, **self.options, **cache, use_cache=True, return_dict=True)
        return output.logits[:, -1].to(copy=True, dtype=torch.float32)

    def choose(self, logits: Tensor, log: SupportLog | None) -> Int[Tensor, " rows"]:
        """Return the next token of each row, as transformers would; record in `log` what it was drawn from."""
        scores: Tensor = self.processors(self.ids[:, : self.length], logits)  # type: ignore[arg-type]
        if log is not None:
            log.add(scores, self.rows)
        if not self.config.do_sample:
            return scores.argmax(dim=-1)
        probabilities = scores.softmax(dim=-1)
        if self.uniforms is None:
            tokens = torch.multinomial(probabilities, num_samples=1)
        else:
            tokens = picked(probabilities, self.uniforms[self.rows, self.length - self.prompt])
        self.drawn[self.rows, self.length] = probabilities.gather(-1, tokens)[:, 0]
        return tokens[:, 0]

    def append(self, tokens: Int[Tensor, " rows"]) -> bool:
        """Add a token to each row; drop finished rows once they are more than `LEAVE` of the batch.

        Returns:
            Whether rows are left.
        """
        tokens = tokens.masked_fill(self.finished, self.pad)
        self.ids[:, self.length] = self.output[self.rows, self.length] = tokens
        self.length += 1
        self.finished = self.finished | self.criteria(self.ids[:, : self.length], None)
        if self.limits is not None:
            self.finished = self.finished | (self.length - self.prompt >= self.limits[self.rows])
        done = int(self.finished.sum())
        if done > LEAVE * len(self.rows) or done == len(self.rows):
            self._keep(~self.finished)
        return len(self.rows) > 0

    def _keep(self, active: Bool[Tensor, " rows"]) -> None:
        """Drop all other rows."""
        rows = active.nonzero()[:, 0]
        self.rows, self.ids, self.finished = self.rows[rows], self.ids[rows], self.finished[rows]
        self.positions = self.positions[rows]
        for processor in self.processors:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if isinstance(ignored, Tensor):
                processor.prompt_ignore_length = ignored.to(rows.device)[rows]
        if len(rows) and self.rows_kept is not None:
            self.rows_kept.take(rows)

    def completed(self) -> Int[Tensor, "batch time"]:
        """Return all rows in their order, padded on the right."""
        return self.output[:, : self.length]


def picked(
    probabilities: Float[Tensor, "rows tokens"], uniforms: Float[Tensor, " rows"]
) -> Int[Tensor, "rows 1"]:  # fmt: skip
    """Return the token of each row whose share of [0, 1) contains the row's number.

    The block that contains it is found first: one sum over the vocabulary, where `torch.multinomial` draws as many
    random numbers.

    Raises:
        RuntimeError: a probability is NaN; same message as `torch.multinomial`.
    """
    whole = probabilities.shape[1] // BLOCK * BLOCK
    parts = (probabilities[:, :whole].unflatten(1, (-1, BLOCK)), probabilities[:, None, whole:])
    wide = widest(probabilities.device)
    up_to = torch.cat([part.sum(dim=-1) for part in parts], dim=1).to(wide).cumsum(dim=1)
    total = up_to[:, -1:]
    if total.isnan().any():
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    number = uniforms[:, None] * total
    block = _containing(up_to, number)
    before = torch.nn.functional.pad(up_to, (1, 0)).gather(1, block)
    tokens = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probabilities.gather(1, tokens.clamp(max=probabilities.shape[1] - 1))
    inside = inside.masked_fill(tokens >= probabilities.shape[1], 0.0).to(wide).cumsum(dim=1)
    return block * BLOCK + _containing(inside, number - before)


def _containing(up_to: Float[Tensor, "rows parts"], number: Float[Tensor, "rows 1"]) -> Int[Tensor, "rows 1"]:
    """Return the part whose share contains a number, at most the last that has a share."""
    part = torch.searchsorted(up_to, number, right=True)
    return torch.minimum(part, torch.searchsorted(up_to, up_to[:, -1:].contiguous()))


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's random numbers on a device."""
    return (torch if device.type == "cpu" else torch.get_device_module(device)).get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set it."""
    (torch if device.type == "cpu" else torch.get_device_module(device)).set_rng_state(state)


def padding(config: GenerationConfig) -> int:
    """Return the padding token; without one the end-of-sequence token, as in transformers."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    eos = config.eos_token_id
    return eos[0] if isinstance(eos, list) else eos or 0


def padded(
    contexts: Sequence[Sequence[int]], pad: int, multiple: int | None
) -> tuple[Int[Tensor, "rows time"], Int[Tensor, "rows time"]]:
    """Return contexts padded on the left, as TRL pads them, and their mask."""
    longest = max(map(len, contexts))
    width = longest if multiple is None else -(-longest // multiple) * multiple
    ids = [[pad] * (width - len(context)) + list(context) for context in contexts]
    mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
    return torch.tensor(ids), torch.tensor(mask)


def ended(ids: list[int], ends: Collection[int]) -> list[int]:
    """Return a completion up to the token that ends it."""
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids)) + 1]
