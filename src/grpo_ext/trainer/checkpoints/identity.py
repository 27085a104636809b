"""Record what defines a run in each of its checkpoints, and compare the record with that of a run that resumes."""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
from trl.data_utils import is_conversational
from trl.scripts.grpo import GRPOScriptArguments

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.launch import world_size
from grpo_ext.config.resuming import FRESH_START
from grpo_ext.config.rules import columns_of_images
from grpo_ext.config.setting import Change
from grpo_ext.config.settings import change_of
from grpo_ext.data.config import DataConfig
from grpo_ext.errors import ABSENT, ConfigError, Problem, is_secret, redacted
from grpo_ext.registry import portable
from grpo_ext.safe_reading import read_json
from grpo_ext.trainer.checkpoints.manifest import write_synced

RECIPE_FILE = "recipe.json"
SECRET = {"hub_token"}
"""Settings that are never written."""
_EDGE = 2**20
"""Bytes at each end of a file of weights, or of an image, that are hashed."""

Record = Mapping[str, Any]

HONOURED = {
    Change.NOTHING: "Changed since: {}.",
    Change.ROUNDING: "Changed since, so that numbers differ by rounding: {}.",
    Change.LENGTH: "Changed since: {}. The learning-rate schedule runs to the new end, as if that had been so "
    "from the beginning; earlier steps keep theirs.",
    Change.SPLIT: "Changed since: {}. An optimizer step has the same rows as before, but they are drawn from other "
    "random streams, and unused rollouts are sampled again.",
}
"""Sentences about changes with which a run can resume."""


@dataclass
class Changes:
    """The differences between a run and the one that wrote a checkpoint, by their effect; entries "key old -> new"."""

    by_effect: dict[Change, list[str]] = field(default_factory=lambda: {effect: [] for effect in Change})

    @property
    def refused(self) -> list[str]:
        """Differences with which the run cannot resume."""
        return self.by_effect[Change.ANOTHER_RUN]

    def sentences(self) -> Iterator[str]:
        """Yield what a user should know of the other changes."""
        for effect, sentence in HONOURED.items():
            if self.by_effect[effect]:
                yield sentence.format(", ".join(self.by_effect[effect]))

    def refusal(self, checkpoint: str | Path) -> ConfigError:
        """Return an error with all differences that prevent a resume."""
        cure = (
            f"Restore these values; or set another output_dir (with model_name_or_path: {checkpoint} there, training "
            f"begins from its weights); or --resume_from_checkpoint {FRESH_START} moves the old run aside and starts "
            "from the beginning."
        )
        return ConfigError(
            [Problem(str(checkpoint), ABSENT, f"it is of another run: {'; '.join(self.refused)}", cure)]
        )


def settings(*parts: Any) -> dict[str, Any]:
    """Return all fields of some dataclasses, as values of JSON."""
    return {
        f.name: plain(getattr(part, f.name)) for part in parts for f in fields(part) if f.init and f.name not in SECRET
    }


def plain(value: object) -> Any:
    """Return a value as it comes back from JSON, without secrets."""
    return redacted(json.loads(json.dumps(value, sort_keys=True, default=_as_text)))


def _as_text(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return sorted(value, key=str)
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def record_of(
    args: GRPOExtConfig, *others: object, rewards: Iterable[Any] | None = None, model: str | None = None
) -> dict[str, Any]:
    """Return what defines a run before anything is loaded.

    Args:
        args: the trainer's arguments.
        others: further parts of a recipe.
        rewards: specs of a recipe's rewards.
        model: name or folder.
    """
    record = settings(args, *others)
    record["world_size"] = world_size()
    accumulated = args.per_device_train_batch_size * args.gradient_accumulation_steps
    record["rows_per_step"] = accumulated * record["world_size"]
    record["engine"] = _engine(args)
    # as versions with TRL's default wrote it, which had no effect without vLLM
    mode = args.trl_sampler_mode or (None if args.use_vllm else GRPOConfig.vllm_importance_sampling_mode)
    record["vllm_importance_sampling_mode"] = mode
    record["model"] = None if model is None else model_digest(model, record.get("model_revision"))
    record |= {f"objective.{axis}": value for axis, value in plain(args.objective.to_dict()).items()}
    record |= {f"version.{name}": version for name, version in _versions()}
    if rewards is not None:
        for key in ("reward_funcs", "reward_weights"):
            record.pop(key, None)
        for spec in rewards:
            record |= {f"rewards.{spec.name}.{key}": value for key, value in plain(spec).items() if key != "name"}
    record["of_recipe"] = rewards is not None
    return _portable(record)


def of_run(args: GRPOExtConfig, model: PreTrainedModel, data: object, recipe: Record | None) -> dict[str, Any]:
    """Return what defines a run, including its data; `recipe` is the record of its recipe, if it has one."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    record = recipe or record_of(args, model=name)
    chat = is_conversational(data[0]) if isinstance(data, Dataset) and len(data) else None
    return {**record, "data": data_digest(data), "conversational": chat}


def _portable(value: Any) -> Any:
    """Remove the folders of a user's functions, which do not define a run."""
    if isinstance(value, dict):
        return {key: _portable(part) for key, part in value.items()}
    return portable(value) if isinstance(value, str) else value


def _engine(args: GRPOExtConfig) -> str:
    """Return the engine that shards the model, which determines the format of checkpoints."""
    engines = {name for name in ("fsdp", "deepspeed") if os.environ.get(f"ACCELERATE_USE_{name.upper()}") == "true"}
    engines |= {name for name in ("fsdp", "deepspeed") if getattr(args, name)}
    return " and ".join(sorted(engines)) or "none"


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in ("grpo-ext", "trl", "transformers", "accelerate", "torch", "peft", "vllm"):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def model_digest(model: str, revision: str | None = None) -> str | None:
    """Return the hub's commit, or a hash of a folder's config and of its files of weights; None if unknown."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        digest = hashlib.sha256()
        for pattern in ("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.index.json"):
            for path in sorted(folder.glob(pattern)):
                if path.name != "training_args.bin":
                    digest.update(f"{path.name} {path.stat().st_size} ".encode() + _edges(path))
        return f"folder {digest.hexdigest()[:16]}"
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not a valid name of the hub
        return None
    return f"commit {Path(config).parent.name}" if isinstance(config, str) else None


def _edges(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(_EDGE)
        file.seek(max(_EDGE, path.stat().st_size - _EDGE))
        return first + file.read(_EDGE)


def data_digest(dataset: object) -> str | None:
    """Return the number of rows and a hash of evenly spaced ones; None for a stream."""
    if not isinstance(dataset, Dataset):
        return None
    count, rows = len(dataset), 256
    chosen = list(range(count)) if count <= rows else [i * (count - 1) // (rows - 1) for i in range(rows)]
    content = dataset.with_format(None).select(chosen).to_list()
    for name in columns_of_images(dataset.column_names):
        content = [{**row, name: _content(row[name])} for row in content]
    text = json.dumps([sorted(dataset.column_names), content], sort_keys=True, default=_cell_text)
    return f"{count} rows, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _content(image: Any) -> Any:
    """Return what an image's file holds in place of its path, which is another in another folder."""
    if isinstance(image, list):
        return [_content(one) for one in image]
    path = image["path"] if isinstance(image, dict) and image.get("bytes") is None else None
    return _edges(Path(path)) if path is not None and Path(path).is_file() else image


def _cell_text(value: object) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else _as_text(value)


def changes(there: Record, here: Record) -> Changes:
    """Compare the record in a checkpoint with that of this run.

    A key that only one record has counts as its default; if only one of them is a recipe's, only common keys count.
    Secrets are neither recorded nor compared.
    """
    there, here, compared = redacted(there), redacted(here), Changes()
    both = there.get("of_recipe") == here.get("of_recipe")
    keys = (there.keys() | here.keys()) if both else (there.keys() & here.keys())
    differing = sorted(key for key in keys - {"of_recipe"} if not _equal(key, there, here))
    allowed = {Change.NOTHING, Change.ROUNDING, Change.LENGTH}
    if not {"rows_per_step", "generation_batch_size"} & set(differing):
        allowed.add(Change.SPLIT)
    if there.get("model") == here.get("model") is not None:
        allowed.add(Change.MODEL)
    derived = [key for key in differing if key.startswith("objective.")]
    for key in (key for key in differing if key not in derived):
        effect = change_of(key)
        if effect not in allowed:
            compared.refused.append(_refused(key, there, here))
        else:
            text = f"{key} {_value(key, there)!r} -> {_value(key, here)!r}"
            compared.by_effect[Change.NOTHING if effect is Change.MODEL else effect].append(text)
    if derived and not compared.refused:  # the same settings mean another loss in another version
        compared.refused.extend(_refused(key, there, here) for key in derived)
    return compared


def _refused(key: str, there: Record, here: Record) -> str:
    return f"{key}: {_value(key, there)!r} there, {_value(key, here)!r} here"


def _equal(key: str, there: Record, here: Record) -> bool:
    old, new = _value(key, there), _value(key, here)
    unknown = key in ("model", "data", "conversational") and None in (old, new)
    unset = key not in there.keys() & here.keys() and not old and not new  # of another version: None or False
    return _without_secrets(old) == _without_secrets(new) or unknown or unset


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(part) for key, part in value.items() if not is_secret(str(key))} or None
    return [_without_secrets(part) for part in value] if isinstance(value, list) else value


def _value(key: str, record: Record) -> Any:
    return record.get(key, _DEFAULTS.get(key))


_DEFAULTS = {
    f.name: plain(f.default if f.default_factory is MISSING else f.default_factory())
    for part in (GRPOScriptArguments, DataConfig, GRPOExtConfig, ModelConfig, DatasetMixtureConfig)
    for f in fields(part)
    if f.init and (f.default, f.default_factory) != (MISSING, MISSING)
}


def write_record(folder: Path, record: Record) -> None:
    """Write the record into a checkpoint."""
    write_synced(folder / RECIPE_FILE, json.dumps(record, indent=1, sort_keys=True))


def changes_since(checkpoint: str | Path, here: Record) -> Changes | None:
    """Return the changes since a checkpoint was written; None if it has no record.

    Raises:
        ConfigError: the run cannot resume with them.
    """
    try:
        since = changes(read_json(Path(checkpoint) / RECIPE_FILE), here)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        problem = Problem(str(checkpoint), ABSENT, f"its {RECIPE_FILE} cannot be read ({error})", "Name another one.")
        raise ConfigError([problem]) from error
    if since.refused:
        raise since.refusal(checkpoint)
    return since
