"""Scores of a reward model: its own dtype, device, revision and chat template, in micro-batches that change no score.

A model is loaded for its first chat, once per process, and shared by all rewards with the same loading options.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args

from grpo_ext.registry import did_you_mean
from grpo_ext.rewards.models.loaded_model import LoadedModel, ModelSource, shared
from grpo_ext.rewards.models.scoring import Chat, blended_scores, clipped_score
from grpo_ext.rewards.protocol import OptionError, rewards
from grpo_ext.rewards.text import Completion, completion_text
from grpo_ext.safe_reading import finite

logger = logging.getLogger(__name__)

Kind = Literal["auto", "sequence_classification", "get_score"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@rewards.register("reward_model", independent=True)
def reward_model(
    prompts: list[Completion],
    completions: list[Completion],
    *,
    model: str,
    kind: Kind = "auto",
    dtype: Dtype = "auto",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    micro_batch_size: int = 8,
    max_length: int | None = None,
    score_clip: float | None = None,
    answer_weight: float = 0.0,
    **_: object,
) -> list[float | None]:
    """Score of prompt + completion by a reward model; None for a chat that it cannot score.

    All options but the last two are those of `RewardModelScorer`. `score_clip` c clips each score to [-c, c]. A
    completion with `<answer>...</answer>` gets (1 - answer_weight) of its score and answer_weight of the score of its
    content: 0.6, with score_clip 3, is MiniMind's (github.com/jingyaogong/minimind).

    Raises:
        ValueError: an option is out of range, or the model is not a reward model of that kind.
    """
    options = (kind, dtype, device, revision, trust_remote_code, micro_batch_size, max_length)
    scorer = RewardModelScorer(model, *options)
    if score_clip is not None and not score_clip > 0:
        cure = "Set score_clip > 0, or leave it out."
        raise OptionError("score_clip", score_clip, "the score would vanish or flip", cure)
    if not 0 <= answer_weight <= 1:
        raise OptionError("answer_weight", answer_weight, "it is a share of the score", "Set it in [0, 1].")
    clip = math.inf if score_clip is None else score_clip
    return blended_scores(
        lambda chats: [clipped_score(score, clip) for score in scorer(chats)], prompts, completions, answer_weight
    )


reward_model.in_process = True  # type: ignore[attr-defined]  # one copy of the model, on this process's device


@dataclass(frozen=True)
class RewardModelScorer:
    """Callable from chats to one score per chat, None for a chat that cannot be scored; picklable, loads at first use.

    `model` is a hub id or a folder. `kind`: "sequence_classification" (one label), "get_score" (a model class with
    `get_score(tokenizer, chat)`, as InternLM2-reward, or also `get_scores(tokenizer, chats)`), or "auto", by the
    model's config. `dtype`: "auto" is the checkpoint's. `device`: by default this process's accelerator, else the CPU.
    `max_length`, in tokens: by default what model and tokenizer take. A longer chat is None: cutting it would
    change it. Padding is on the tokenizer's side. A micro-batch that runs out of CUDA memory is halved for good.

    Raises:
        ValueError: an option is out of range; when called, if the model is not a reward model of that kind.
    """

    model: str
    kind: Kind = "auto"
    dtype: Dtype = "auto"
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    micro_batch_size: int = 8
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("kind", get_args(Kind)), ("dtype", get_args(Dtype))):
            if (value := getattr(self, name)) not in choices:
                raise OptionError(name, value, "unknown", did_you_mean(str(value), choices))
        for name in ("micro_batch_size", "max_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise OptionError(name, value, "must be 1 or more", f"Set {name} >= 1.")

    def __call__(self, chats: Sequence[Chat]) -> list[float | None]:
        """Return the scores of the chats, in order."""
        if not chats:
            return []
        how = (self.kind, self.dtype, self.device, self.revision, self.trust_remote_code)
        loaded = shared(ModelSource(self.model, *how))
        with loaded.lock:
            loaded.load()
            return self._scores(loaded, chats)

    def _scores(self, loaded: LoadedModel, chats: Sequence[Chat]) -> list[float | None]:
        plain = [_plain(chat) for chat in chats]
        tokens = [loaded.encode(chat) if chat else [] for chat in plain]
        limit = self._limit(loaded)
        if max(map(len, tokens)) > limit:
            _warn_once(self.model, f"chats of more than {limit} tokens are unscorable (None). See max_length.")
        order = sorted((i for i, ids in enumerate(tokens) if 0 < len(ids) <= limit), key=lambda i: -len(tokens[i]))
        scores: list[float | None] = [None] * len(chats)
        while order:
            batch = order[: min(self.micro_batch_size, loaded.micro_batch_limit)]
            values = loaded.try_to_score([tokens[i] for i in batch], [plain[i] or [] for i in batch])
            if values is None:
                continue  # with a smaller batch
            for i, value in zip(batch, values, strict=True):
                scores[i] = finite(value)
            order = order[len(batch) :]
        return scores

    def _limit(self, loaded: LoadedModel) -> float:
        if self.max_length is not None and self.max_length > loaded.max_length:
            reason = f"{self.model!r} takes at most {loaded.max_length} tokens"
            raise OptionError("max_length", self.max_length, reason, "Lower it.")
        return self.max_length or loaded.max_length


def scorer_from(options: Mapping[str, Any]) -> RewardModelScorer:
    """Return a scorer with a recipe's options, the fields of `RewardModelScorer`.

    Raises:
        ValueError: an option is unknown or out of range, or `model` is missing.
    """
    names = [option.name for option in fields(RewardModelScorer)]
    for name in options:
        if name not in names:
            raise OptionError(f"reward_model.{name}", options[name], "no such option", did_you_mean(str(name), names))
    if not isinstance(options.get("model"), str):
        raise OptionError("reward_model", dict(options), "it has no model", "Add model: a hub id or a folder.")
    return RewardModelScorer(**options)


def _plain(chat: Chat) -> Chat | None:
    """Return the chat with contents as text, or None if it holds an image or the like, unfit for a text model."""
    for message in chat:
        content = message.get("content")
        blocks = content if isinstance(content, Sequence) and not isinstance(content, str) else []
        if any(isinstance(block, Mapping) and block.get("type", "text") != "text" for block in blocks):
            return None
    return [{**m, "content": completion_text([{"content": m.get("content")}])} for m in chat]


@cache
def _warn_once(model: str, what: str) -> None:
    logger.warning("reward model %r: %s", model, what)
