"""Check a model by its files only: its folder, its configuration, and the class that TRL takes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import transformers
from huggingface_hub import errors as hub
from transformers import PreTrainedConfig

from grpo_ext.bounded import read_json
from grpo_ext.config.adapters import is_adapter
from grpo_ext.errors import Problem
from grpo_ext.quickstart.model import LESSONS


def folder_problems(name: str) -> Iterator[Problem]:
    """Yield the first thing that is missing in a local folder."""
    path, problem = Path(name).expanduser(), partial(Problem, "model_name_or_path", name)
    if path.is_file():
        yield problem("this is a file", "Name the folder that holds config.json and the weights.")
    if name in LESSONS or not path.is_dir():
        return
    files = [file.name for file in path.iterdir()]
    if is_adapter(name):
        if not any(file.startswith("adapter_model.") for file in files):
            cure = "Name a folder that has both, or its base model and use_peft: true for a new adapter."
            yield problem("adapter_config.json, but no adapter_model.safetensors", cure)
        return
    if "config.json" not in files:
        yield problem("no config.json in it", _alternative(path, files))
        return
    try:
        read_json(path / "config.json")
    except (OSError, ValueError) as error:
        yield problem(f"config.json is not JSON ({error})", "Copy it again from the source of the model.")
        return
    indexes = [file for file in files if file.endswith((".safetensors.index.json", ".bin.index.json"))]
    for index in indexes:
        shards = set(read_json(path / index).get("weight_map", {}).values())
        if missing := sorted(shards - set(files)):
            reason = f"{index} names {missing[0]}, which is not there"
            yield problem(reason, f"Copy all {len(shards)} files of weights.")
            return
    if not indexes and not any(file.endswith((".safetensors", ".bin")) for file in files):
        yield problem("config.json, but no weights in it (model.safetensors)", "Name a folder that has both.")


def _alternative(path: Path, files: list[str]) -> str:
    """Return what to name in place of a folder without a model."""
    inside = sorted(str(folder.parent) for folder in path.glob("*/config.json"))
    if inside:
        return f"Set model_name_or_path: {inside[-1]}."
    if any(file.endswith(".gguf") for file in files):
        return "GGUF files are for inference. Name the model from which they were converted."
    return "Name a folder that save_pretrained has written, or a hub id."


_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "processor_config.json"),
)


def lacks_tokenizer(name: str) -> bool:
    """Return True for a folder without a tokenizer's file, from which transformers would make an empty one."""
    folder = Path(name)
    return folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES)


# Its configuration and class.


def config_problems(name: str, error: Exception) -> Iterator[Problem]:
    """Yield why the configuration of a model cannot be loaded; an unreachable hub is not a problem."""
    text, problem = str(error), partial(Problem, "model_name_or_path", name)
    causes = tuple(_causes(error))

    def is_due_to(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if "trust_remote_code" in text:
        cure = "Read that, and set trust_remote_code: true if you trust it."
        yield problem("it brings code of its own", cure)
    elif "does not recognize this architecture" in text or isinstance(error, KeyError):
        reason = f"its model_type is unknown to transformers {transformers.__version__}"
        yield problem(reason, "Name another model, or install a newer transformers.")
    elif is_due_to(hub.GatedRepoError):
        yield problem("gated", f"Ask for access at https://huggingface.co/{name}, then log in: hf auth login.")
    elif is_due_to(hub.RevisionNotFoundError):
        yield problem("it has no such model_revision", "Set model_revision: main.")
    elif is_due_to(hub.RepositoryNotFoundError, hub.HFValidationError):
        yield problem("neither a folder (from the working directory) nor a model on the hub", "Correct it.")
    elif Path(name).expanduser().is_dir() and not is_due_to(hub.LocalEntryNotFoundError):
        yield problem(f"config.json cannot be used ({first_line(error)})", "Correct it.")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def class_problems(name: str, config: PreTrainedConfig) -> Iterator[Problem]:
    """Yield why the class that TRL takes, the first of `architectures`, cannot be trained."""
    problem, architectures = partial(Problem, "model_name_or_path", name), config.architectures or []
    cure = "Name a model that generates text, such as Qwen/Qwen2.5-0.5B-Instruct."
    if not architectures:
        write = 'Write "architectures": ["..."] into it, such as "LlamaForCausalLM".'
        yield problem("its config.json names no architectures, by which TRL finds the class", write)
        return
    known = getattr(transformers, architectures[0], None)
    if known is None and not getattr(config, "auto_map", None):
        yield problem(f"transformers {transformers.__version__} has no class {architectures[0]}", cure)
    elif config.is_encoder_decoder:
        yield problem(f"a {architectures[0]}, encoder and decoder; GRPO in TRL is for decoders only", cure)
    elif known is not None and not known.can_generate():
        yield problem(f"a {architectures[0]} (an encoder, embedding model or classifier) has no text", cure)
