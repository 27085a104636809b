"""What defines a run, as a flat record in each of its checkpoints, and what may differ when it goes on."""

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
from trl import DatasetMixtureConfig, ModelConfig
from trl.data_utils import is_conversational
from trl.scripts.grpo import GRPOScriptArguments

from grpo_ext.config.grpo_config import GRPOExtConfig
from grpo_ext.config.launch import world_size
from grpo_ext.config.resuming import FRESH_START
from grpo_ext.data.config import DataConfig
from grpo_ext.errors import ConfigError, is_secret, redacted
from grpo_ext.registry import portable
from grpo_ext.trainer.checkpoints.manifest import write_synced

RECIPE_FILE = "recipe.json"
SECRET = {"hub_token"}
"""Never written down."""

HARMLESS = {
    # where and how often it is logged
    *("disable_tqdm", "include_num_input_tokens_seen", "log_completions", "log_completions_hub_repo", "log_level"),
    *("log_level_replica", "log_multimodal", "log_on_each_node", "log_unique_prompts", "logging_first_step"),
    *("logging_nan_inf_filter", "logging_steps", "logging_strategy", "num_completions_to_print", "project"),
    *("record_batches", "report_to", "run_name", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
    # evaluated
    *("batch_eval_metrics", "dataset_test_split", "do_eval", "do_predict", "do_train", "eval_accumulation_steps"),
    *("eval_delay", "eval_do_concat_batches", "eval_on_start", "eval_steps", "eval_strategy", "bf16_full_eval"),
    *("eval_sets", "eval_use_gather_object", "fp16_full_eval", "include_for_metrics", "num_generations_eval"),
    *("per_device_eval_batch_size", "prediction_loss_only", "load_best_model_at_end", "metric_for_best_model"),
    "greater_is_better",
    # saved and pushed
    *("enable_jit_checkpoint", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision"),
    *(
        "hub_strategy",
        "output_dir",
        "push_to_hub",
        "push_to_hub_revision",
        "resume_from_checkpoint",
        "save_on_each_node",
    ),
    *("save_only_model", "save_steps", "save_strategy", "save_total_limit"),
    # worked on, waited for, found
    *("dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_timeout", "debug", "local_rank"),
    *("on_nonfinite", "reward_memory_gib", "reward_workers", "rollout_drift", "rollout_drift_action"),
    "skip_memory_metrics",
    *("torch_empty_cache_steps", "trust_remote_code", "vllm_gpu_memory_utilization", "vllm_group_port"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
    *("vllm_enable_sleep_mode", "vllm_weight_transfer"),
}
"""Settings that change no trained number; with stock's `loss_defaults: trl` an evaluation draws random numbers."""

ROUNDING = {
    "environment_waves",
    *("attn_implementation", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb"),
    *("ddp_find_unused_parameters", "ddp_static_graph", "full_determinism", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "shared_prefix", "torch_compile", "torch_compile_backend"),
    *("torch_compile_mode", "use_cpu", "vllm_tensor_parallel_size"),
}
"""Settings that change how the same numbers are computed."""

LENGTH = {"max_steps", "num_train_epochs"}
SPLIT = {"world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}
"""May differ together, as long as `rows_per_step` and `generation_batch_size` stay."""

NAMES = {"model_name_or_path", "model_revision"}
"""Free to differ where `model` says that the weights are the same."""

_REWARD_HARMLESS = (".timeout", ".retries", ".isolate", ".independent")
_EDGE = 2**20


@dataclass
class Changes:
    """How a run differs from the one that wrote a checkpoint; each entry reads `key there -> here`."""

    harmless: list[str] = field(default_factory=list)
    rounding: list[str] = field(default_factory=list)
    length: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    harmful: list[str] = field(default_factory=list)

    def sentences(self) -> Iterator[str]:
        """What a user should know of changes that are honoured."""
        if self.harmless:
            yield f"Changed since: {', '.join(self.harmless)}."
        if self.rounding:
            yield f"Changed since, so that numbers differ by rounding: {', '.join(self.rounding)}."
        if self.length:
            yield (
                f"Changed since: {', '.join(self.length)}. The learning-rate schedule runs to the new end, as if that "
                "had been so from the beginning; steps already made keep theirs."
            )
        if self.split:
            yield (
                f"Changed since: {', '.join(self.split)}. An optimizer step has the same rows as before, but they are "
                "drawn by other random streams, and rollouts that were not used up are drawn anew."
            )

    def refusal(self, checkpoint: str | Path) -> ConfigError:
        """What cannot be honoured half way, all at once, and the ways on."""
        return ConfigError(
            [
                f"{checkpoint} is of another run: {'; '.join(self.harmful)}. Give it its own values again; or set "
                f"another output_dir (with model_name_or_path: {checkpoint} there, training begins from its weights); "
                f"or --resume_from_checkpoint {FRESH_START} moves the old run aside and starts afresh."
            ]
        )


def settings(*parts: Any) -> dict[str, Any]:
    """All fields of some dataclasses, as JSON has them."""
    return {
        f.name: plain(getattr(part, f.name)) for part in parts for f in fields(part) if f.init and f.name not in SECRET
    }


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON, without secrets."""
    return redacted(json.loads(json.dumps(value, sort_keys=True, default=_as_text)))


def _as_text(value: Any) -> Any:
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
    args: GRPOExtConfig, *others: Any, rewards: Iterable[Any] | None = None, model: Any = None
) -> dict[str, Any]:
    """What defines a run before anything is loaded; `others` are further parts of a recipe, `rewards` their specs."""
    record = settings(args, *others)
    record["world_size"] = world_size()
    accumulated = args.per_device_train_batch_size * args.gradient_accumulation_steps
    record["rows_per_step"] = accumulated * record["world_size"]
    record["engine"] = _engine(args)
    record["model"] = None if model is None else model_digest(str(model), record.get("model_revision"))
    record |= {f"objective.{axis}": value for axis, value in plain(args.objective.to_dict()).items()}
    record |= {f"version.{name}": version for name, version in _versions()}
    if rewards is not None:
        for key in ("reward_funcs", "reward_weights"):
            record.pop(key, None)
        for spec in rewards:
            record |= {f"rewards.{spec.name}.{key}": value for key, value in plain(spec).items() if key != "name"}
    record["of_recipe"] = rewards is not None
    return _portable(record)


def of_run(args: GRPOExtConfig, model: Any, data: Any, recipe: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what defines a run, its data included; `recipe` is the record of its recipe, if it has one."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    record = recipe or record_of(args, model=name)
    chat = is_conversational(data[0]) if isinstance(data, Dataset) and len(data) else None
    return {**record, "data": data_digest(data), "conversational": chat}


def _portable(value: Any) -> Any:
    """Without the folders of a user's functions: where they lie does not define a run."""
    if isinstance(value, dict):
        return {key: _portable(part) for key, part in value.items()}
    return portable(value) if isinstance(value, str) else value


def _engine(args: GRPOExtConfig) -> str:
    """Who shards the model, and so says how its checkpoints look."""
    said = {name for name in ("fsdp", "deepspeed") if os.environ.get(f"ACCELERATE_USE_{name.upper()}") == "true"}
    said |= {name for name in ("fsdp", "deepspeed") if getattr(args, name)}
    return " and ".join(sorted(said)) or "none"


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in ("grpo-ext", "trl", "transformers", "accelerate", "torch", "peft", "vllm"):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def model_digest(model: str, revision: str | None = None) -> str | None:
    """The hub's commit, or a hash of a folder's config, sizes and edges of weight files; None where nobody can say."""
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
    except ValueError:  # no name that the hub could have
        return None
    return f"commit {Path(config).parent.name}" if isinstance(config, str) else None


def _edges(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(_EDGE)
        file.seek(max(_EDGE, path.stat().st_size - _EDGE))
        return first + file.read(_EDGE)


def data_digest(dataset: Any, rows: int = 256) -> str | None:
    """Number of rows and a hash of some that are spread evenly; None for a stream, which nobody can look through."""
    if not isinstance(dataset, Dataset):
        return None
    count = len(dataset)
    chosen = list(range(count)) if count <= rows else [i * (count - 1) // (rows - 1) for i in range(rows)]
    content = dataset.with_format(None).select(chosen).to_list()
    text = json.dumps([sorted(dataset.column_names), content], sort_keys=True, default=_of_a_cell)
    return f"{count} rows, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _of_a_cell(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else _as_text(value)


def changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> Changes:
    """What differs between the record in a checkpoint and that of this run, by what it means.

    A key of which only one side knows counts as its default; where one side was no recipe, only what both know counts.
    Secrets do not count: they are neither recorded nor compared.
    """
    there, here, found = redacted(there), redacted(here), Changes()
    both = there.get("of_recipe") == here.get("of_recipe")
    keys = (there.keys() | here.keys()) if both else (there.keys() & here.keys())
    differing = sorted(key for key in keys - {"of_recipe"} if not _equal(key, there, here))
    same_rows = not {"rows_per_step", "generation_batch_size"} & set(differing)
    same_model = there.get("model") == here.get("model") is not None
    derived = [key for key in differing if key.startswith("objective.")]
    for key in differing:
        if key in derived:
            continue
        text = f"{key} {_of(key, there)!r} -> {_of(key, here)!r}"
        if (
            key in HARMLESS
            or key.startswith("version.")
            or key.endswith(_REWARD_HARMLESS)
            or (key in NAMES and same_model)
        ):
            found.harmless.append(text)
        elif key in ROUNDING:
            found.rounding.append(text)
        elif key in LENGTH:
            found.length.append(text)
        elif key in SPLIT and same_rows:
            found.split.append(text)
        else:
            found.harmful.append(f"{key}: {_of(key, there)!r} there, {_of(key, here)!r} here")
    if derived and not found.harmful:  # the same settings mean another loss: another version's table
        found.harmful += [f"{key}: {_of(key, there)!r} there, {_of(key, here)!r} here" for key in derived]
    return found


def _equal(key: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    old, new = _of(key, there), _of(key, here)
    unknown = key in ("model", "data", "conversational") and None in (old, new)
    return _without_secrets(old) == _without_secrets(new) or unknown


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(part) for key, part in value.items() if not is_secret(str(key))} or None
    return [_without_secrets(part) for part in value] if isinstance(value, list) else value


def _of(key: str, record: Mapping[str, Any]) -> Any:
    return record.get(key, _DEFAULTS.get(key))


_DEFAULTS = {
    f.name: plain(f.default if f.default_factory is MISSING else f.default_factory())
    for part in (GRPOScriptArguments, DataConfig, GRPOExtConfig, ModelConfig, DatasetMixtureConfig)
    for f in fields(part)
    if f.init and (f.default, f.default_factory) != (MISSING, MISSING)
}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Beside a checkpoint's other files."""
    write_synced(folder / RECIPE_FILE, json.dumps(record, indent=1, sort_keys=True))


def changes_since(checkpoint: str | Path, here: Mapping[str, Any]) -> Changes | None:
    """What has changed since a checkpoint was written; None if it does not say what it is of.

    Raises:
        ConfigError: something that cannot be honoured half way.
    """
    try:
        found = changes(json.loads((Path(checkpoint) / RECIPE_FILE).read_text()), here)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError([f"{checkpoint}: its {RECIPE_FILE} cannot be read ({error}). Name another one."]) from error
    if found.harmful:
        raise found.refusal(checkpoint)
    return found
