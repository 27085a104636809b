"""A reward model in memory, once per process: loading, tokens by its own template, scores of one micro-batch."""

import inspect
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_ext.config.launch import local_rank
from grpo_ext.rewards.models.scoring import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class ModelSource(NamedTuple):
    """Identifies a model and how it is loaded; see `RewardModelScorer`."""

    model: str
    kind: str
    dtype: str
    device: str | None
    revision: str | None
    trust_remote_code: bool


_models: dict[ModelSource, "LoadedModel"] = {}
_models_lock = threading.Lock()


def shared(source: ModelSource) -> "LoadedModel":
    """Return this process's one model of a source, not yet loaded."""
    with _models_lock:
        return _models.setdefault(source, LoadedModel(source))


class LoadedModel:
    """A model and its tokenizer, read by `load`; hold `lock` while calling any method."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.name = source.model
        self.lock = threading.RLock()
        self.micro_batch_limit = sys.maxsize
        self.model: Any = None

    def load(self) -> None:
        """Read the model and its tokenizer, unless they are in memory.

        Raises:
            ValueError: it is not a trained reward model of that kind, or needs `trust_remote_code`.
        """
        if self.model is not None:
            return
        with own_weights():
            try:
                self.kind, model, missing, self.tokenizer = _from_pretrained(self.source)
            except ValueError as error:
                if self.source.trust_remote_code or "trust_remote_code" not in str(error):
                    raise
                raise ValueError(
                    f"model={self.name!r} has code of its own. If you trust it, set trust_remote_code: true."
                ) from error
        self._require_reward_model(model, missing)
        config = model.config.get_text_config()
        self.pad_token_id = getattr(config, "pad_token_id", None)
        lengths = (getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length)
        self.max_length = min((n for n in lengths if n and n < 1e9), default=math.inf)  # a huge one means unset
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.device = self.source.device or _default_device()
        self.model = model.to(self.device).eval().requires_grad_(False)

    def _require_reward_model(self, model: "PreTrainedModel", missing: list[str]) -> None:
        if missing:  # transformers would draw them at random
            raise ValueError(
                f"model={self.name!r} has no weights for {', '.join(missing[:3])}, so it is untrained. Name another."
            )
        if self.kind == "get_score" and not callable(getattr(model, "get_score", None)):
            raise ValueError(
                f"model={self.name!r}: {type(model).__name__} has no get_score(tokenizer, chat). Name a reward model "
                f"that has it, or, if you trust the model's own code, set trust_remote_code: true."
            )

    def encode(self, chat: Chat) -> list[int]:
        """Return the chat's tokens by the tokenizer's own template; for a `get_score` model without one, an estimate.

        Raises:
            ValueError: a sequence-classification model's tokenizer has no template.
        """
        if self.tokenizer.chat_template:
            return list(self.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))
        if self.kind == "get_score":
            return list(self.tokenizer("\n".join(message["content"] for message in chat))["input_ids"])
        raise ValueError(f"model={self.name!r} has no chat template. Put a chat_template.jinja beside its tokenizer.")

    def try_to_score(self, rows: list[list[int]], chats: list[Chat]) -> list[float] | None:
        """Return the scores of a micro-batch, or None if memory ran out; `micro_batch_limit` is then halved."""
        import torch

        try:
            with torch.inference_mode():
                return self._classify(rows) if self.kind == "sequence_classification" else self._get_score(chats)
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                error.add_note(f"reward model {self.name!r}, one chat of {len(rows[0])} tokens: lower max_length.")
                raise
        torch.cuda.empty_cache()  # out here, where the traceback no longer holds the tensors
        self.micro_batch_limit = len(rows) // 2
        logger.warning("reward model %r: out of memory, micro-batches of %d now", self.name, self.micro_batch_limit)
        return None

    def _classify(self, rows: list[list[int]]) -> list[float]:
        import torch

        pad, width = self._pad_for(rows), max(map(len, rows))
        left = self.tokenizer.padding_side == "left"
        gaps = [[pad] * (width - len(row)) for row in rows]
        ids = torch.tensor([gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)])
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        mask = (torch.arange(width) >= width - lengths if left else torch.arange(width) < lengths).long()
        inputs = {"input_ids": ids, "attention_mask": mask}
        if left and self.takes_positions:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self.model(**{name: tensor.to(self.device) for name, tensor in inputs.items()}).logits
        if logits.shape != (len(rows), 1):
            raise ValueError(
                f"model={self.name!r} has {logits.shape[-1]} labels per chat: a reward model has one. Name another."
            )
        return list(logits[:, 0].float().tolist())

    def _pad_for(self, rows: list[list[int]]) -> int:
        """Return the id to pad with: transformers pools the last token that is not `config.pad_token_id`.

        A model without a padding token pools the very last token. Padding with its end-of-sequence token, the usual
        remedy, would pool the token before it. So it gets an id that does not end any of these rows.
        """
        if self.pad_token_id is not None:
            return int(self.pad_token_id)
        config = self.model.config.get_text_config()
        config.pad_token_id = min(set(range(len(rows) + 1)) - {row[-1] for row in rows})
        return int(config.pad_token_id)

    def _get_score(self, chats: list[Chat]) -> list[float]:
        several = getattr(self.model, "get_scores", None)
        if several is None:
            return [float(self.model.get_score(self.tokenizer, chat)) for chat in chats]
        scores = several(self.tokenizer, chats)
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        return [float(s) for s in scores] if isinstance(scores, Sequence) else [float(scores)]  # InternLM2: one score


def _from_pretrained(source: ModelSource) -> tuple[str, Any, list[str], Any]:
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    where: dict[str, Any] = {"revision": source.revision or "main", "trust_remote_code": source.trust_remote_code}
    kind = _kind_of(source) if source.kind == "auto" else source.kind
    loader = AutoModelForSequenceClassification if kind == "sequence_classification" else AutoModel
    model, report = loader.from_pretrained(source.model, dtype=source.dtype, output_loading_info=True, **where)
    tokenizer = AutoTokenizer.from_pretrained(source.model, **where)
    return kind, model, sorted(report["missing_keys"]), tokenizer


def _kind_of(source: ModelSource) -> str:
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(source.model, revision=source.revision or "main")
    auto_map, architectures = config.get("auto_map") or {}, config.get("architectures") or []
    if "AutoModelForSequenceClassification" in auto_map or any(
        name.endswith("ForSequenceClassification") for name in architectures
    ):
        return "sequence_classification"
    if "AutoModel" in auto_map:
        return "get_score"
    raise ValueError(
        f"model={source.model!r}: {' or '.join(architectures) or 'its config'} is not a known reward model. "
        f"Name a sequence-classification model, or set kind."
    )


def _default_device() -> str:
    """Return the process's accelerator by its local rank: unlike the current device, the same in every thread."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    rank = local_rank()
    rank = torch.accelerator.current_device_index() if rank is None else rank
    return f"{kind.type if kind else 'cuda'}:{rank % torch.accelerator.device_count()}"


@contextmanager
def own_weights() -> Iterator[None]:
    """Let this process build or load all weights, even if the policy is sharded.

    Under ZeRO-3 `from_pretrained` would partition them; under FSDP with RAM-efficient loading only rank 0 gets any.
    """
    from transformers.integrations import deepspeed

    held, deepspeed._hf_deepspeed_config_weak_ref = deepspeed._hf_deepspeed_config_weak_ref, None
    fsdp = os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = held
        if fsdp is not None:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = fsdp
