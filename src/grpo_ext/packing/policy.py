"""Decides which micro-batches share prompts: where the model allows it and the packed forward saves time."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedModel

from grpo_ext.errors import ConfigError, Problem
from grpo_ext.packing.attention import ForeignAttention
from grpo_ext.packing.forward import positions_moved, rounded_differently
from grpo_ext.packing.images import RowImages
from grpo_ext.packing.layout import Layout, pack
from grpo_ext.packing.obstacles import Policy, causal_lm, most_tokens, obstacles, text_model
from grpo_ext.packing.recurrent import is_recurrent
from grpo_ext.packing.routes import padded
from grpo_ext.packing.sampling_support import SamplingSupport
from grpo_ext.packing.tree import is_plain, pack_tree, plain_rows
from grpo_ext.packing.windows import narrowed

logger = logging.getLogger(__name__)


# Cost model, right to a factor of two: enough to skip packing where it saves no time.

SPEED = {"cpu": 5e10}
"""Floating-point operations per second of a thread that multiplies matrices."""
SPEED_ELSEWHERE = 2e14
CALL_SECONDS = 3e-5
"""Seconds of one attention call with its views and copies."""
RECURRENT_CALL_SECONDS = 5e-4
"""Seconds of a recurrent layer's call on few tokens."""
PACK_SECONDS = 1e-3
"""Seconds to lay out a micro-batch."""
PASSES = 3
"""A forward, and a backward of twice its cost; also without a backward, so that a micro-batch has one layout."""
MARGIN = 2.0
"""A packed forward must save this many times its extra cost."""


@dataclass(frozen=True)
class Size:
    """Size of a model, for its cost."""

    body: int
    """Parameters that each token is multiplied with."""
    head: int
    """Parameters of the LM head."""
    layers: int
    recurrent: int = 0
    """Those of the layers with a recurrent state."""

    @classmethod
    def of(cls, base: PreTrainedModel) -> "Size":
        """Count the text of a model; of a mixture of experts, the active ones."""
        text, config = text_model(base), base.config.get_text_config(decoder=True)
        weights: list[Any] = [m.weight for m in (base.get_input_embeddings(), base.get_output_embeddings())]
        embeddings = {id(weight) for weight in weights}
        experts = sum(p.numel() for n, p in text.named_parameters() if ".experts." in n)
        active = getattr(config, "num_experts_per_tok", 1) / max(1, getattr(config, "num_experts", None) or 1)
        body = sum(getattr(p, "ds_numel", p.numel()) for p in text.parameters() if id(p) not in embeddings)
        body = int(body - experts * (1 - min(1.0, active)))
        recurrent = sum(map(is_recurrent, base.modules()))
        return cls(body, head=weights[1].numel(), layers=config.num_hidden_layers, recurrent=recurrent)

    def gain(self, layout: Layout, device: str) -> float:
        """Return seconds saved divided by seconds spent, for a packed forward and its backward."""
        rows, width = layout.shape
        calls = len(layout.segments.runs) + len({run.prefix for run in layout.segments.runs})
        tokens, scores = rows * width - layout.tokens, rows * (width - 1) - len(layout.scored)
        return self._gain(tokens, scores, calls, device)

    def most(self, shape: tuple[int, ...], device: str) -> float:
        """Return an upper bound of the gain for any batch of this shape."""
        return self._gain(math.prod(shape), math.prod(shape), 2, device)

    def most_of(self, active: Bool[np.ndarray, "rows width"], completion: int, device: str) -> float:
        """Return an upper bound of the gain for a batch with this mask: one prompt for all rows, or none shared."""
        lengths = active[:, -completion:].sum(axis=1)
        labels, prompts = int(lengths.sum()), active[:, :-completion].sum(axis=1)[lengths > 0] - 1
        if not labels:
            return 0.0
        scores = active.size - len(active) - labels
        shared = self._gain(active.size - labels - int(prompts.min()), scores, 4, device)
        return max(shared, self._gain(active.size - labels - int(prompts.sum()), scores, 2, device))

    def _gain(self, tokens: int, scores: int, calls: int, device: str) -> float:
        """Return the gain from `tokens` and `scores` saved; on a CPU stock TRL scores every position."""
        saved = 2 * self.body * tokens + (2 * self.head * scores if device == "cpu" else 0)
        seconds = self.layers * CALL_SECONDS + self.recurrent * RECURRENT_CALL_SECONDS
        spent = PACK_SECONDS + calls * seconds * PASSES
        return saved * PASSES / SPEED.get(device, SPEED_ELSEWHERE) / spent


NOISES = 6.0
"""Allowed error in multiples of the plain forward's rounding. Seen: exact forwards up to 5, wrong ones from 9."""
FLOOR = 1e-5
"""Error in nats per token that always counts as rounding."""


def _probe(vocabulary: int) -> Tensor:
    """Make four prompts with two completions each, all of 6 tokens."""
    prompts, completions = torch.randint(vocabulary, (2, 8, 6), generator=torch.Generator().manual_seed(0))
    return torch.cat([prompts[:4].repeat_interleave(2, dim=0), completions], dim=1)


def _distance(found: Tensor, expected: Tensor) -> float:
    return (found.float() - expected.float()).abs().mean().item()


CURE = "Set shared_prefix to auto or false."
Scores = tuple[Tensor, Tensor | None, Tensor | None]
Plain = Callable[..., Scores]
"""TRL's forward. Arguments: tokens and mask [rows, width], columns of completions; `support`, their sets; `experts`,
the routes of their tokens, [tokens, layers, experts]; `images` of each row."""
Packed = Callable[..., Scores]
"""`forward.log_probs` of a model. Arguments: tokens, layout, columns of completions; `support` likewise."""


class PrefixSharing:
    """Decides which micro-batches are packed, and runs their forward.

    Args:
        setting: `shared_prefix`: "auto", "true" or "false".
        model: the policy.
        further: an obstacle beside the model's own.

    Attributes:
        reason: why prompts cannot be shared, or None.
        agreed: returns the largest number of forwards of any process; None: each micro-batch has one.
    """

    def __init__(self, setting: str, model: Policy, *, further: str | None = None) -> None:
        self.setting, self.checked = setting, False
        self.agreed: Callable[[int], int] | None = None
        self.reason = next((o for o in (further, *obstacles(model)) if o is not None), None)
        base = causal_lm(model)
        self.vocabulary = base.config.get_text_config().vocab_size
        self.sees = self.reason is None and text_model(base) is not base
        self.most_tokens = most_tokens(base) if self.reason is None else math.inf
        self.size = Size.of(base) if setting != "false" and self.reason is None else None

    @property
    def possible(self) -> bool:
        """Whether any micro-batch may be packed."""
        return self.size is not None

    def describe(self) -> str:
        """Return one line for the log."""
        if self.setting == "false":
            return "shared_prefix: off"
        if self.reason is not None:
            return f"shared_prefix: off, {self.reason}"
        pays = "" if self.setting == "true" else ", where that pays"
        images = "; rows with images are computed each by itself" if self.sees else ""
        return f"shared_prefix: each prompt is computed once per micro-batch{pays}{images}"

    def problem(self) -> Problem:
        """Return why prompts cannot be shared, although `shared_prefix` is true."""
        return Problem("shared_prefix", self.setting, f"it is not exact here: {self.reason}", CURE)

    def check(self, plain: Plain, packed: Packed, base: PreTrainedModel, device: torch.device) -> None:
        """Compare the two forwards once on a few tokens; if they differ, share no prompts.

        They may differ by rounding: by `NOISES` times the change of the plain forward of `base` when all positions are
        shifted, which only changes the rounding of a model with relative positions. Where that does not matter, as
        without positions, the embeddings are rounded differently. Windows are narrowed for both, so that the few
        tokens exceed them.

        Raises:
            ConfigError: they differ, and `shared_prefix` is true.
        """
        self.checked = True
        ids = _probe(self.vocabulary).to(device)
        mask, completion = torch.ones_like(ids), ids.shape[1] // 2
        layout = pack(ids.cpu().numpy(), mask.cpu().numpy(), completion)
        assert layout is not None
        with torch.no_grad(), narrowed(base):
            expected = plain(ids, mask, completion)[0]
            noise = 0.0
            for change in (positions_moved, rounded_differently):
                for by in (1, 3, 5):
                    with change(base, by):
                        noise = max(noise, _distance(plain(ids, mask, completion)[0], expected))
                if noise > 0:
                    break
            try:
                error = _distance(packed(ids, layout, completion)[0], expected)
                reason = f"it is {error:.2g} nats per token off the plain forward, whose rounding is {noise:.2g}"
            except ForeignAttention as foreign:
                error, reason = math.inf, str(foreign)
        if error <= max(FLOOR, NOISES * noise):
            return
        self.size, self.reason = None, reason
        if self.setting == "true":
            raise ConfigError([self.problem()])
        logger.warning(self.describe())

    def layout(self, input_ids: Tensor, mask: Tensor, completion: int, whole: bool) -> Layout | None:
        """Return the packed layout of a micro-batch, or None for the plain forward."""
        if self.size is None:
            return None
        shape, device, auto = tuple(input_ids.shape), input_ids.device.type, self.setting != "true"
        if auto and self.size.most(shape, device) <= MARGIN:
            return None
        active = mask.bool().cpu().numpy()
        if auto and self.size.most_of(active, completion, device) <= MARGIN:
            return None
        layout = self._fitting(pack(input_ids.cpu().numpy(), active, completion, whole=whole))
        if layout is None or not auto:
            return layout
        return layout if self.size.gain(layout, device) > MARGIN else None

    def arranged(
        self, input_ids: Tensor, mask: Tensor, completion: int, parents: Tensor | None = None, *, whole: bool = False
    ) -> tuple[Layout | None, np.ndarray | None]:
        """Return the packed layout of rows, None for the plain forward; and their `parents` if they are trees."""
        tree = None if parents is None else parents.cpu().numpy()
        if tree is None or is_plain(tree, mask[:, -completion:].cpu().numpy()):
            return self.layout(input_ids, mask, completion, whole), None
        if self.size is None:
            return None, tree
        return self._fitting(pack_tree(input_ids.cpu().numpy(), mask.cpu().numpy(), tree, whole=whole)), tree

    def _fitting(self, layout: Layout | None) -> Layout | None:
        return None if layout is None or layout.tokens > self.most_tokens else layout

    def scores(
        self,
        plain: Plain,
        packed: Packed,
        input_ids: Tensor,
        mask: Tensor,
        completion: int,
        batch_size: int,
        compute_entropy: bool,
        compute_aux_loss: bool,
        parents: Tensor | None = None,
        support: Sequence[Tensor] | None = None,
        routes: Sequence[Tensor] | None = None,
        images: Sequence[RowImages] | None = None,
    ) -> Scores:
        """Log-probabilities, entropies, auxiliary loss of a batch, `batch_size` rows at a time.

        `parents` [rows, completion], as in `tree`, of trajectories whose contexts were rewritten; `support` the sets
        that each row's tokens were drawn from, as in `packing.sampling_support`; `routes` as in `packing.routes`, of a
        policy that shares no prompts; `images` of each row, which is then not packed.
        """
        parts: list[Scores] = []
        extra = {"output_router_logits": True} if compute_aux_loss else {}
        for begin in range(0, len(input_ids), batch_size):
            rows = slice(begin, begin + batch_size)
            ids, active = input_ids[rows], mask[rows]
            sets = None if support is None else SamplingSupport.of(support[rows], completion, ids.device)
            given: dict[str, Any] = {} if sets is None else {"support": sets}
            of_rows = None if parents is None else parents[rows]
            layout, tree = self.arranged(ids, active, completion, of_rows, whole=compute_aux_loss)
            if layout is not None and not images:
                logps, entropies, aux_loss = packed(ids, layout, completion, **extra, **given)
                parts.append((logps, entropies if compute_entropy else None, aux_loss))
            else:
                experts = None if routes is None else padded(routes[rows], active, completion).flatten(0, 1)
                forward = plain if experts is None else partial(plain, experts=experts)
                seen = images[rows] if images else None
                parts.append(self._by_rows(forward, ids, active, completion, tree, sets, seen))
        return concatenated(parts)

    def _by_rows(
        self,
        plain: Plain,
        input_ids: Tensor,
        mask: Tensor,
        completion: int,
        tree: np.ndarray | None,
        support: SamplingSupport | None,
        images: Sequence[RowImages] | None,
    ) -> Scores:
        """Score by the plain forward; trees in several forwards, each of at most the micro-batch's positions.

        Every forward and backward may hold collectives, so all processes need the same number: a process with fewer
        contexts repeats a row, with a weight of zero.
        """
        batches, places, supports, seen = [(input_ids, mask, completion)], None, [support], [images]
        if tree is not None:
            rows, found = plain_rows(
                input_ids.cpu().numpy(), mask.cpu().numpy(), tree, None if self.possible else len(input_ids)
            )
            batches = [(_tensor(r.input_ids, mask), _tensor(r.mask, mask), r.completion) for r in rows]
            places = _tensor(found, mask)
            seen = [images and [images[i] for i in r.sources] for r in rows]
            sizes = [len(ids) * columns for ids, _, columns in batches]
            supports = [None] * len(batches) if support is None else [*support.moved(places, sizes)]
        count = len(batches) if self.agreed is None or self.possible else self.agreed(len(batches))
        given = [
            ({} if sets is None else {"support": sets}) | ({"images": of_rows} if of_rows else {})
            for sets, of_rows in zip(supports, seen, strict=True)
        ]
        scores = [plain(*batch, **more) for batch, more in zip(batches, given, strict=True)]
        ids, active, columns = batches[-1]
        first = {"images": seen[-1][:1]} if seen[-1] else {}
        for _ in range(count - len(batches)):
            spare = plain(ids[:1], active[:1], columns, **first)[0].sum() * 0.0
            scores[0] = (scores[0][0] + spare, *scores[0][1:])
        return scores[0] if places is None else _gathered(scores, [active.sum() for _, active, _ in batches], places)


def _tensor(array: np.ndarray, beside: Tensor) -> Tensor:
    return torch.from_numpy(array).to(beside.device)


def concatenated(parts: Sequence[Scores]) -> Scores:
    """Join the scores of consecutive rows; the auxiliary loss is the mean of theirs."""
    logps, entropies, losses = ([x for x in column if x is not None] for column in zip(*parts, strict=True))
    aux = torch.stack(losses).mean() if losses else None
    return torch.cat(logps), torch.cat(entropies) if entropies else None, aux


def _gathered(scores: list[Scores], tokens: list[Tensor], places: Tensor) -> Scores:
    """Collect the scores of trees from their `places` in several forwards; weight the auxiliary losses by `tokens`."""

    def gathered(values: list[Tensor]) -> Tensor:
        flat = torch.cat([value.reshape(-1) for value in values])
        return torch.where(places >= 0, flat[places.clamp(min=0)], 0.0)

    logps, entropies, losses = ([x for x in column if x is not None] for column in zip(*scores, strict=True))
    shares = torch.stack(tokens) / sum(tokens)
    aux = (torch.stack(losses) * shares).sum() if losses else None
    return gathered(logps), gathered(entropies) if entropies else None, aux
