"""Adapters named as the model: their base model, and the settings that do not go with them."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils import ADAPTER_CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.safe_reading import read_json
from grpo_ext.versions import release

if TYPE_CHECKING:  # trl and peft take seconds to import
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import ModelConfig

    from grpo_ext.config.arguments import GRPOExtArguments


class Base(NamedTuple):
    """The model that an adapter adapts."""

    model: str
    revision: str | None


def base_of(model: str, revision: str | None = None) -> Base | None:
    """Return the base model of an adapter, a folder or a repository of the hub; None for another model.

    Raises:
        ConfigError: the adapter names no base, or a folder that does not exist.
    """
    file = find_adapter_config_file(model, revision=revision)
    if file is None:
        return None
    try:
        content = read_json(Path(file))
        base = content.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        reason = f"its {ADAPTER_CONFIG_NAME} cannot be read ({error})"
        raise ConfigError([Problem(model, ABSENT, reason, "Copy it again.")]) from error
    if content.get("megatron_config") is not None:  # PEFT would import the module that megatron_core names
        reason = f"its {ADAPTER_CONFIG_NAME} has a megatron_config, which loads modules by name"
        raise ConfigError([Problem(model, ABSENT, reason, "Remove it.")])
    if not isinstance(base, str) or not base:
        reason = f"an adapter whose {ADAPTER_CONFIG_NAME} names no base model"
        raise ConfigError([Problem(model, ABSENT, reason, "Write it there.")])
    path = located(base, Path(model))
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        cure = f"Correct base_model_name_or_path in {Path(model) / ADAPTER_CONFIG_NAME}."
        raise ConfigError([Problem(model, ABSENT, f"an adapter of {base!r}, which is not a folder here", cure)])
    return Base(path, content.get("revision"))


def is_adapter(model: object) -> bool:
    """Return whether a folder holds an adapter; a repository of the hub is not looked at."""
    return isinstance(model, str) and (Path(model).expanduser() / ADAPTER_CONFIG_NAME).is_file()


def located(model: str, beside: Path) -> str:
    """Return a model's absolute folder; a relative path may count from one of the folders above `beside`.

    An id of the hub, or a mistake, is returned as it is.
    """
    path = Path(model).expanduser()
    places = [path] if path.is_absolute() else [path, *(parent / path for parent in beside.absolute().parents)]
    return next((str(place.resolve()) for place in places if (place / "config.json").is_file()), model)


def make_portable(model: object) -> None:
    """Write the absolute path of a base in a folder into a model's adapters, so that they load from any directory."""
    for config in getattr(model, "peft_config", {}).values():
        base = config.base_model_name_or_path
        if base and Path(base).is_dir():
            config.base_model_name_or_path = str(Path(base).resolve())


def peft_problems(config: Any) -> Iterator[Problem]:
    """Yield what PEFT computes wrongly: an initialisation that each load draws again, tokens that generation loses."""
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, str) and init.startswith("pissa_niter_"):
        reason = "PEFT draws its singular values again when it loads what was saved, and gets another policy"
        yield Problem("init_lora_weights", init, reason, "Set pissa, which computes them exactly.")
    if getattr(config, "is_prompt_learning", False) and release("transformers") >= (5, 24):
        versions = f"PEFT {version('peft')} under transformers {version('transformers')}"
        reason = f"{versions} generates without its virtual tokens, as transformers renamed the cache"
        cure = "Install 'transformers<5.24', or train a LoRA."
        yield Problem("peft_type", getattr(config.peft_type, "value", config.peft_type), reason, cure)


def checkpointing_problems(config: "GRPOExtArguments", model: "PreTrainedModel") -> Iterator[Problem]:
    """Yield the problem of an adapter whose tokens gradient checkpointing would drop."""
    kinds = [getattr(adapter, "peft_type", None) for adapter in getattr(model, "peft_config", {}).values()]
    kind = next((getattr(kind, "value", kind) for kind in kinds if kind in ("PREFIX_TUNING", "CARTRIDGE")), None)
    if config.gradient_checkpointing and kind is not None:
        reason = f"{kind} hands its tokens to the model as a cache, which checkpointing drops"
        yield Problem("gradient_checkpointing", True, reason, "Set gradient_checkpointing: false.")


def adapter_problems(model: "ModelConfig") -> Iterator[Problem]:
    """Yield settings that do not go with an adapter as `model_name_or_path`."""
    name = model.model_name_or_path
    if not is_adapter(name):
        return
    try:
        base_of(str(Path(str(name)).expanduser()))
    except ConfigError as error:
        yield from error.problems
    if model.use_peft:
        yield Problem(
            "use_peft",
            True,
            "the model is an adapter: is it to be trained, or a new one on top",
            "Remove use_peft and the lora_ settings to train it further, in its own shape; for a new one, "
            f"`grpo-ext merge {name} --output MERGED` and set model_name_or_path: MERGED.",
            {"model_name_or_path": name},
        )


def with_adapter(
    base: "PreTrainedModel",
    adapter: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    trained: bool = False,
    **options: Any,
) -> "PeftModel":
    """Return a model with an adapter on it; its embeddings grow first if the tokenizer has grown, as in PEFT.

    Raises:
        ConfigError: PEFT computes this adapter wrongly.
    """
    from peft import PeftModel

    embeddings: Any = base.get_input_embeddings()
    if len(tokenizer) > embeddings.weight.shape[0]:
        base.resize_token_embeddings(len(tokenizer))
    adapted = PeftModel.from_pretrained(base, adapter, is_trainable=trained, **options)
    if problems := [*peft_problems(adapted.peft_config["default"])]:
        raise ConfigError(problems)
    adapted.peft_config["default"].base_model_name_or_path = base.name_or_path  # the folder where it was found
    return adapted
