"""Rotary embeddings that change with the length of a batch, fixed for a run where lengths can cross the change.

transformers takes their frequencies from the largest position of a batch. Without a fix, a completion that crosses the
change is scored by other frequencies than it was drawn by, and by others again beside a longer row.
"""

import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

GROWING = ("dynamic", "longrope")
"""Types whose frequencies depend on the length."""


def growing(config: PreTrainedConfig) -> str | None:
    """Return the type of a model's rotary embeddings if it grows; None too for longrope with two equal factors."""
    fixed = [p for p in _parts(config) if p["rope_type"] == "longrope" and [*p["short_factor"]] == [*p["long_factor"]]]
    parts = (part for part in _parts(config) if part["rope_type"] in GROWING and part not in fixed)
    return next((str(part["rope_type"]) for part in parts), None)


def unchanged_until(config: PreTrainedConfig) -> int:
    """Return the most tokens of a row that growing embeddings treat as a short one."""
    text: Any = config.get_text_config(decoder=True)
    changes = (part.get("original_max_position_embeddings") for part in _parts(config))
    return int(next(filter(None, changes), text.max_position_embeddings))


def longest_possible(config: PreTrainedConfig) -> int:
    """Return the most tokens of a row for which a model's embeddings are made."""
    factors = [part["factor"] for part in _parts(config) if part["rope_type"] == "dynamic"]
    return int(config.get_text_config(decoder=True).max_position_embeddings * max(factors, default=1))


def fix_rotary(model: PreTrainedModel, longest: int) -> bool:
    """Give all lengths the frequencies of a row of `longest` tokens; return whether the model's classes allow it.

    So does its config, which is saved with it. longrope keeps its long factors, dynamic becomes a plain embedding with
    the base of that length. vLLM does the same, for the longest row that it is started for.
    """
    config: Any = model.config.get_text_config(decoder=True)
    for part in _parts(config):
        if part.get("rope_type") == "longrope":
            part["short_factor"] = list(part["long_factor"])
        elif part.get("rope_type") == "dynamic":
            grown = part["factor"] * max(longest / config.max_position_embeddings, 1.0) - (part["factor"] - 1)
            whole = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            size = int(whole * part.get("partial_rotary_factor", 1.0))
            part["rope_theta"] *= grown ** (size / (size - 2))
            part["rope_type"] = "default"
            del part["factor"]
            config.max_position_embeddings = max(longest, config.max_position_embeddings)
    modules = list(model.modules())
    embeddings = [(m, *named) for m in modules for named in m.named_children() if hasattr(named[1], "rope_type")]
    for module, name, rotary in embeddings:
        kind: Any = type(rotary)
        setattr(module, name, kind(rotary.config).to(next(rotary.buffers()).device))
    return bool(embeddings)


def forgets_beyond(config: PreTrainedConfig) -> float:
    """Return the most tokens of a row that transformers' own `generate` decodes right.

    Models with longrope drop their cache there, and `generate` goes on with the last token only.
    """
    longrope = any(part["rope_type"] == "longrope" for part in _parts(config))
    return unchanged_until(config) if longrope else math.inf


def _parts(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the settings of the rotary embeddings, one for each type of layers that has its own."""
    text: Any = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    yield from (part for part in (parameters, *parameters.values()) if isinstance(part, dict) and "rope_type" in part)
