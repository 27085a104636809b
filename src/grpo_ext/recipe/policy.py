"""A policy and its tokenizer, loaded: a model, or an adapter on its base."""

from typing import Any

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from grpo_ext.config.adapters import Base, base_of


def load_tokenizer_of(model: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model's folder; of an adapter without one, its base's."""
    base = base_of(model, revision)
    if base is not None and not _has_tokenizer(model, revision):
        model, revision = base
    return AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)


def _has_tokenizer(model: str, revision: str | None) -> bool:
    quiet = ("gated_repo", "missing_entries", "connection_errors")
    options: Any = {f"_raise_exceptions_for_{what}": False for what in quiet}
    return cached_file(model, "tokenizer_config.json", revision=revision, **options) is not None


def with_adapter(base: Any, adapter: str, tokenizer: Any, *, trained: bool = False, **options: Any) -> PeftModel:
    """A model with an adapter on it; its embeddings grow first where the tokenizer has grown, as PEFT does it."""
    if len(tokenizer) > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(len(tokenizer))
    adapted = PeftModel.from_pretrained(base, adapter, is_trainable=trained, **options)
    adapted.peft_config["default"].base_model_name_or_path = base.name_or_path  # where it was found
    return adapted


def load_policy(
    model: str, tokenizer: Any, *, revision: str | None = None, base: Base | None = None, **loading: Any
) -> Any:
    """A causal language model to look at, not to train; an adapter comes on its base (by default the one it names)."""
    base = base or base_of(model, revision)
    name, of_name = base or (model, revision)
    loaded = AutoModelForCausalLM.from_pretrained(name, revision=of_name, **loading).eval()
    return loaded if base is None else with_adapter(loaded, model, tokenizer, revision=revision).eval()
