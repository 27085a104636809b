"""Check a model by its files only: its tokenizer, its configuration, and the class that TRL takes."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import errors as hub
from transformers import PreTrainedConfig

from grpo_ext.errors import Problem

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "processor_config.json"),
)


def lacks_tokenizer(name: str) -> bool:
    """Return True for a folder without a tokenizer's file, from which transformers would make an empty one."""
    folder = Path(name)
    return folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES)


_OF_THE_HUB = (hub.GatedRepoError, hub.RevisionNotFoundError, hub.RepositoryNotFoundError, hub.HFValidationError)
_UNKNOWN = ("trust_remote_code", "does not recognize this architecture", "is not a local folder")


def config_problems(name: str, error: Exception) -> Iterator[Problem]:
    """Yield transformers' error about the configuration of a model; an unreachable hub is not a problem."""
    causes = tuple(_causes(error))
    local = Path(name).expanduser().exists() and not _is_due_to(causes, hub.LocalEntryNotFoundError)
    told = any(words in str(error) for words in _UNKNOWN) or isinstance(error, KeyError)
    if local or told or _is_due_to(causes, *_OF_THE_HUB):
        yield Problem("model_name_or_path", name, first_line(error), "")


def _is_due_to(causes: tuple[BaseException, ...], *kinds: type[BaseException]) -> bool:
    return any(isinstance(cause, kinds) for cause in causes)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def class_problems(name: str, config: PreTrainedConfig) -> Iterator[Problem]:
    """Yield why a model cannot be trained: GRPO in TRL would cut the text of a decoder beside an encoder."""
    if config.is_encoder_decoder:
        reason = f"a {(config.architectures or ['model'])[0]}, encoder and decoder; GRPO in TRL is for decoders only"
        cure = "Name a model that generates text, such as Qwen/Qwen2.5-0.5B-Instruct."
        yield Problem("model_name_or_path", name, reason, cure)
