"""Load a policy and its tokenizer: a model, or an adapter on its base."""

from typing import Any

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from grpo_ext.config.adapters import Base, base_of, with_adapter


def load_tokenizer_of(
    model: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a model's folder; for an adapter without one, that of its base."""
    base = base_of(model, revision)
    if base is not None and not _has_tokenizer(model, revision):
        model, revision = base
    return AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)


def _has_tokenizer(model: str, revision: str | None) -> bool:
    quiet = ("gated_repo", "missing_entries", "connection_errors")
    options: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in quiet}
    return cached_file(model, "tokenizer_config.json", revision=revision, **options) is not None


def load_policy(
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    revision: str | None = None,
    base: Base | None = None,
    **loading: object,
) -> PreTrainedModel | PeftModel:
    """Load a causal language model for evaluation; an adapter on its base (by default the one that it names)."""
    base = base or base_of(model, revision)
    name, base_revision = base or (model, revision)
    loaded = AutoModelForCausalLM.from_pretrained(name, revision=base_revision, **loading).eval()
    return loaded if base is None else with_adapter(loaded, model, tokenizer, revision=revision).eval()
