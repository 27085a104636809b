"""Weights of linear layers in the blocks in which a CPU multiplies bfloat16, made once for all tokens of a generation.

oneDNN brings a weight into blocks before each product. At a decoded token, with few rows, that costs as much as the
product. The products are the same to the bit.
"""

from contextlib import AbstractContextManager

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from grpo_ext.config.temporary import each_temporarily

WORTH = 32
"""Tokens of a completion from which blocks are made: on one core, making them costs as much time as about 13 save."""

LARGE = 16**3
"""Numbers of a weight above which torch multiplies by oneDNN whatever the rows: other products round otherwise."""


def blocked(model: nn.Module, rows: int, tokens: int) -> AbstractContextManager[None]:
    """Multiply by weights in blocks for a `with` statement, in the layers where that is the same product.

    Args:
        model: decodes, without gradients.
        rows: number of completions, for which the blocks are chosen.
        tokens: most tokens of a completion.
    """
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    layers = list(filter(_multiplies, linear)) if tokens >= WORTH and can_block() and not _compiled(model) else []
    return each_temporarily((layer, "forward", _Blocked(layer, rows)) for layer in layers)


def can_block() -> bool:
    """Return whether this CPU and this build of torch multiply bfloat16 in blocks, to the same bits.

    Where the CPU has no instructions for bfloat16, plain weights and blocks round differently.
    """
    native = torch.cpu._is_avx512_bf16_supported()
    return native and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _compiled(model: nn.Module) -> bool:
    """Return whether a part of a model is compiled, which another forward inside would make compile again."""
    return any(isinstance(part, OptimizedModule) or part._compiled_call_impl is not None for part in model.modules())


def _multiplies(layer: nn.Linear) -> bool:
    """Return whether a layer multiplies on the CPU in bfloat16, and its forward is torch's own."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    weight = layer.weight
    if type(weight) is not nn.Parameter:  # packed by a quantisation, whatever its dtype says
        return False
    mixed = torch.is_autocast_enabled("cpu") and weight.dtype == torch.float32
    computes = torch.get_autocast_dtype("cpu") if mixed else weight.dtype
    return weight.device.type == "cpu" and weight.numel() > LARGE and computes == torch.bfloat16


class _Blocked:
    """The forward of a linear layer; its blocks are made at the first call, as not all layers are called."""

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        self.layer, self.rows = layer, rows
        self.weight: Tensor | None = None
        self.bias = None if layer.bias is None else layer.bias.to(torch.bfloat16)

    def __call__(self, states: Shaped[Tensor, "*rows features"]) -> Shaped[Tensor, "*rows outputs"]:
        rounds_again = self.bias is not None and not states.is_contiguous()  # torch does, before such a bias
        mixes = self.layer.weight.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        if rounds_again or not mixes:
            return type(self.layer).forward(self.layer, states)
        if self.weight is None:
            weight = self.layer.weight.to(torch.bfloat16)
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.rows)
        return torch.ops.mkldnn._linear_pointwise(states.to(torch.bfloat16), self.weight, self.bias, "none", [], "")
