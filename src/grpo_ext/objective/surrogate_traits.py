"""The registry of surrogates, and what may be registered with one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from grpo_ext.registry import Registry


@dataclass(frozen=True)
class SurrogateTraits:
    """Functions registered with a surrogate; a row of `Loss`, which explains the fields, may replace them."""

    conflict: Callable[..., str | None] | None = None
    clip_regions: Callable[..., tuple[Tensor, Tensor]] | None = None
    metrics: Callable[..., Mapping[str, Tensor]] | None = None
    marks: Callable[..., Tensor] | None = None


surrogates: Registry = Registry("surrogate", SurrogateTraits)

Regions = tuple[Bool[Tensor, " batch #time"], Bool[Tensor, " batch #time"]]
"""Tokens whose gradient clipping has changed: (cut from below, cut from above)."""
