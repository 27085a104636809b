"""Log-probabilities, entropies and auxiliary loss of micro-batches, by a packed forward where that pays."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from grpo_ext.packing.collective import entered_alike
from grpo_ext.packing.forward import log_probs
from grpo_ext.packing.forward_mode import ForwardMode, exact_mode
from grpo_ext.packing.images import IMAGES, RowImages, forward_arguments
from grpo_ext.packing.layout import Layout
from grpo_ext.packing.lm_head import labelled_positions_only
from grpo_ext.packing.micro_batches import PARENTS, MicroBatch, of_active_rows
from grpo_ext.packing.obstacles import causal_lm
from grpo_ext.packing.policy import PrefixSharing, Scores
from grpo_ext.packing.routes import ROUTES, Replayed, routed
from grpo_ext.packing.sampling_support import SUPPORTS, SamplingSupport
from grpo_ext.packing.token_budget import Part, TokenBudget, within_budget

logger = logging.getLogger(__name__)

LONGEST = {"cpu": 8}
"""Tokens of prompts and of completions, at most, that are compared with the model's own forward."""
LONGEST_ELSEWHERE = 64


class Scorer:
    """Scores tokens of completions.

    Args:
        stock: TRL's forward, `_get_per_token_logps_and_entropies`.
        sharing: decides which micro-batches are packed.
        accelerator: unwraps models; its autocast applies to packed forwards.
        forward_only: context without gradients, for the check of the packed forward.
        limit: cuts batches into pieces, in place of a number of rows.
        temperature: of TRL's LM head.

    Attributes:
        way: how rows are scored; as by TRL until `choose_forward_mode` has compared it.
        rerouted: replayed routes that were not the router's own choice, and all, since they were last read.
    """

    def __init__(
        self,
        stock: Callable[..., Scores],
        sharing: PrefixSharing,
        accelerator: Accelerator,
        forward_only: Callable[[], AbstractContextManager[None]],
        limit: TokenBudget | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.trl, self.sharing, self.accelerator, self.forward_only = stock, sharing, accelerator, forward_only
        self.limit, self.temperature = limit, temperature
        self.way, self.compared, self.rerouted = ForwardMode(), False, torch.zeros(2)
        names = list(inspect.signature(stock).parameters)
        self.multimodal = names[names.index("compute_aux_loss") + 1 :]
        """Arguments of TRL's forward beside tokens: images and what they need."""

    def choose_forward_mode(
        self,
        model: nn.Module,
        prompts: Sequence[list[int]],
        completions: Sequence[list[int]],
        images: Sequence[RowImages],
        pad: int,
        moved: AbstractContextManager[None] | None = None,
    ) -> None:
        """Choose, once, how rows are scored, so that the scores of a generation equal the model's own forward.

        The first and the last row are compared: their last tokens of the prompt and first ones of the completion. A
        comparison for which memory is too little is left out. `moved` is entered meanwhile.

        Raises:
            ConfigError: no way is known that is exact.
        """
        if self.compared:
            return
        base, device, ends = self._base(model), self.accelerator.device, (0, -1)
        most = LONGEST.get(device.type, LONGEST_ELSEWHERE)
        rows = [prompts[i] if images else (prompts[i] or [pad])[-3 * i - most :] for i in ends]
        answers = [(completions[i] or [pad])[: None if images else most] for i in ends]
        batch = _padded(rows, answers, pad, device)

        def score(way: ForwardMode, row: int | None) -> Tensor:
            ids, mask = batch if row is None else (x[row, batch[1][row].bool()][None] for x in batch)
            of_rows = ends if row is None else ends[row : row + 1]
            completion = max(len(answers[i]) for i in of_rows)
            seen = forward_arguments([images[i] for i in of_rows], mask, completion) if images else {}
            with way.of(base, completion, self.temperature):
                return self.trl(model, ids, mask, completion, **seen)[0][mask[:, -completion:].bool()]

        # on some CPUs bitsandbytes packs its weights once more in evaluation, and cannot pack all
        still = nullcontext() if getattr(base, "is_quantized", False) else in_evaluation(model)
        try:
            with self.forward_only(), still, entered_alike(moved or nullcontext()):
                self.way = exact_mode(score, base)
        except torch.OutOfMemoryError as error:
            logger.warning(f"scores are not compared with the model's own forward: too little memory ({error})")
        self.compared = True

    def stock(self, model: nn.Module, *rows: Any, support: Any = None, **options: Any) -> Scores:
        """Score rows by TRL's forward, whose arguments it takes, in the way that was chosen."""
        if not any(self.way):
            return self.trl(model, *rows, **options)
        with self.way.of(self._base(model), rows[2], self.temperature, support):
            return self.trl(model, *rows, **options)

    def micro_batch(
        self,
        score: Callable[..., Scores],
        model: nn.Module,
        inputs: MicroBatch,
        active: Tensor | None = None,
        *,
        entropy: bool = True,
        aux_loss: bool = False,
        batch_size: int | None = None,
    ) -> Scores:
        """Score a micro-batch, `batch_size` rows at a time; with `active` only those rows, and no auxiliary loss.

        `score` is the trainer's `_get_per_token_logps_and_entropies`, which a subclass may override.
        """

        def forward(batch: MicroBatch) -> Scores:
            further: dict[str, Any] = {
                name: value
                for name, value in batch.items()
                if name in (PARENTS, SUPPORTS, ROUTES, IMAGES, *self.multimodal)
            }
            return score(
                model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].size(1),
                batch_size=batch_size,
                compute_entropy=entropy,
                compute_aux_loss=aux_loss and active is None,
                **further,
            )

        return forward(inputs) if active is None else (*of_active_rows(forward, inputs, active), None)

    def routes_changed(self) -> tuple[Tensor, Tensor]:
        """Return the share of replayed routes since the last call that routers did not choose, and their number."""
        (changed, count), self.rerouted = self.rerouted, torch.zeros(2)
        return changed / count.clamp(min=1), count

    def parts(self, model: nn.Module, inputs: MicroBatch, active: Tensor | None = None) -> list[Part]:
        """Return the parts of a micro-batch whose losses have a forward and backward each, one after another.

        Rows that are not `active` are in the last one. Where processes need as many forwards as each other, the first
        ones may have no rows.
        """
        if self.limit is None or not torch.is_grad_enabled():
            return [Part(inputs, active)]
        self.check(model, inputs["completion_ids"].device)
        return self.limit.parts(inputs, active)

    def tokens(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        *,
        parents: Tensor | None = None,
        sampling_supports: Sequence[Tensor] | None = None,
        routes: Sequence[Tensor] | None = None,
        images: Sequence[RowImages] | None = None,
        **multimodal: Any,
    ) -> Scores:
        """Score the last `logits_to_keep` tokens of rows [rows, width]; arguments as TRL's.

        `parents` [rows, logits_to_keep], as in `tree`, of trajectories whose contexts were rewritten;
        `sampling_supports` the sets that each row's tokens were drawn from, as in `sampling_support`, over which all
        scores are then normalised; `routes` the experts of each row's tokens, as in `routes`; `images` those of each
        row, likewise.

        Raises:
            ValueError: rows with any of these or with a limit hold images, or TRL's LM head computes other positions
                than theirs.
        """
        options: dict[str, Any] = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        sharing, has_images = self.sharing, bool(images) or any(x is not None for x in multimodal.values())
        if parents is not None and has_images and not images:
            raise ValueError("a trajectory whose context was rewritten cannot hold images yet. Leave one of them out.")
        if sampling_supports is not None and has_images and not images:
            raise ValueError(
                "arguments of images are not cut to rows, as top_p, top_k and min_p need it. Unset these."
            )
        if self.limit is not None and has_images:
            raise ValueError("rows with images are not cut by tokens yet. Unset micro_batch_tokens.")
        if routes is not None and (has_images or parents is not None):
            raise ValueError("routes are not replayed with images or rewritten contexts. Remove replay_routes.")
        plainly = all(x is None for x in (self.limit, parents, sampling_supports, routes))
        if not images and (has_images or (plainly and not sharing.possible and sharing.agreed is None)):
            return self.stock(model, input_ids, attention_mask, logits_to_keep, batch_size, **options, **multimodal)

        if not images:
            self.check(model, input_ids.device)
        plain, packed = partial(self._plain, model, options), partial(self._packed, model)
        score: Callable[..., Scores] = partial(sharing.scores, plain, packed, **options)
        rows = input_ids, attention_mask, logits_to_keep
        if self.limit is not None:
            return within_budget(self.limit, score, *rows, parents, sampling_supports, routes)
        further = {"parents": parents, "support": sampling_supports, "routes": routes, "images": images}
        return score(*rows, batch_size or len(input_ids), **further)

    def check(self, model: nn.Module, device: torch.device) -> None:
        """Compare the packed forward with the plain one, once, and share no prompts if they differ."""
        if self.sharing.possible and not self.sharing.checked:
            base = self._base(model)
            with self.forward_only():
                self.sharing.check(partial(self._plain, model, {}), partial(self._packed, model), base, device)

    def _plain(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        ids: Tensor,
        mask: Tensor,
        completion: int,
        support: SamplingSupport | None = None,
        experts: Tensor | None = None,
        images: Sequence[RowImages] | None = None,
    ) -> Scores:
        options = {**options, **(forward_arguments(images, mask, completion) if images else {})}
        sets = None if support is None else partial(support.of_positions, mask, completion)
        replayed = None if experts is None else Replayed(experts)
        with (
            nullcontext() if sets is None else labelled_positions_only(ids.device, sets),
            nullcontext() if replayed is None else routed(self._base(model), replayed),
        ):
            scores = self.stock(model, ids, mask, completion, **options, support=sets)
        if replayed is not None:
            self.rerouted = self.rerouted.to(ids.device) + replayed.tally
        return scores

    def _packed(self, model: nn.Module, ids: Tensor, layout: Layout, completion: int, **extra: Any) -> Scores:
        with self.accelerator.autocast():
            return log_probs(model, self._base(model), ids, layout, completion, **extra)

    def _base(self, model: nn.Module) -> PreTrainedModel:
        return causal_lm(self.accelerator.unwrap_model(model))


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Switch off for a `with` block what is random in training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _padded(
    prompts: Sequence[list[int]], completions: Sequence[list[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return tokens and mask of rows with at least two columns of padding before each prompt."""
    sides = [([torch.tensor(row) for row in part], side) for part, side in ((prompts, "left"), (completions, "right"))]
    ids = torch.cat([pad_sequence(part, True, pad, side) for part, side in sides], dim=1)
    mask = torch.cat([pad_sequence([torch.ones_like(x) for x in part], True, 0, side) for part, side in sides], dim=1)
    return nn.functional.pad(ids, (2, 0), value=pad).to(device), nn.functional.pad(mask, (2, 0)).to(device)
