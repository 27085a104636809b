"""Forward of a packed row, with its scores scattered back to the padded batch."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from grpo_ext.packing.attention import INSTEAD, LAYOUT, selected
from grpo_ext.packing.layout import Layout
from grpo_ext.packing.lm_head import labelled_positions_only
from grpo_ext.packing.recurrent import carried
from grpo_ext.packing.sampling_support import SamplingSupport


def log_probs(
    model: nn.Module,
    base: PreTrainedModel,
    input_ids: Int[Tensor, "rows width"],
    layout: Layout,
    completion: int,
    *,
    support: SamplingSupport | None = None,
    **inputs: Any,
) -> tuple[Float[Tensor, "rows completion"], Float[Tensor, "rows completion"] | None, Tensor | None]:
    """Log-probabilities and entropies of the completions' tokens (0 for padding), and the auxiliary loss.

    `base` is the causal language model with TRL's fused LM head inside `model`, which may be wrapped.
    `support` are the sets of the completions' tokens that they are normalised over.
    """
    device = input_ids.device
    parts = layout.source, layout.position, layout.scored, layout.labels
    source, position, scored, labels = (torch.from_numpy(x).to(device) for x in parts)
    rows, width = layout.shape
    if inputs.get("output_router_logits"):  # the load-balancing loss reads its mask as weights
        inputs["attention_mask"] = torch.from_numpy(layout.weight).to(device)[None]
    flat = input_ids.reshape(-1)
    target = labels // width * completion + labels % width - (width - completion)
    sets = None if support is None else support.at(target)
    own = base.config.get_text_config()._attn_implementation

    def narrow(module: nn.Module, args: object, outputs: Any) -> Any:
        outputs.last_hidden_state = outputs.last_hidden_state.index_select(1, scored)
        return outputs

    head = labelled_positions_only(device, None if sets is None else lambda _: sets)
    with selected(base), carried(base), head, base.base_model.register_forward_hook(narrow):
        outputs = model(
            input_ids=flat[source][None],
            position_ids=position[None],
            shift_labels=flat[labels][None],
            fused_lm_head=True,
            **{LAYOUT: layout.segments, INSTEAD: own},
            **inputs,
        )

    def scattered(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return values.new_zeros(rows * completion).index_copy(0, target, values[0]).view(rows, completion)

    logps = scattered(outputs.log_probs)
    assert logps is not None
    return logps, scattered(outputs.entropy), outputs.aux_loss


def positions_moved(base: PreTrainedModel, by: int) -> RemovableHandle:
    """Shift the positions of plain forwards by `by`: only rounding changes where positions are relative."""

    def moved(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = args[0] if args else kwargs["input_ids"]
        return args, kwargs | {"position_ids": torch.arange(by, by + ids.shape[1], device=ids.device)[None]}

    return base.base_model.register_forward_pre_hook(moved, with_kwargs=True)


def rounded_differently(base: PreTrainedModel, seed: int) -> RemovableHandle:
    """Change the embeddings of tokens by at most their last digit, at random."""

    def changed(module: nn.Module, args: object, embeddings: Tensor) -> Tensor:
        device = embeddings.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embeddings.dtype
        share = torch.rand(embeddings.shape, generator=torch.Generator().manual_seed(seed)).to(embeddings.device)
        return (embeddings * (1 + torch.finfo(dtype).eps * (2 * share - 1))).to(embeddings.dtype)

    return base.get_input_embeddings().register_forward_hook(changed)
