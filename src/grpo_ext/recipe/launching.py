"""How a recipe wants to be launched: TRL's keys `accelerate_config`, `num_processes`, and `accelerate launch`'s."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpo_ext.config.launch import ASKED, EXIT_CODE_FILE, world_size
from grpo_ext.config.paths import PATHS, expand, unknown
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.files import find_recipe, read_yaml, recipes_folder, split_config
from grpo_ext.registry import did_you_mean

VALUES = (
    *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf"),
    *("max_restarts", "mixed_precision", "gpu_ids", "num_cpu_threads_per_process", "dynamo_backend"),
    *("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device"),
    *("zero3_init_flag", "zero3_save_16bit_model"),
)
FLAGS = ("multi_gpu", "use_deepspeed", "use_fsdp", "same_network")
"""Options of `accelerate launch` that a recipe may hold, as TRL's may; those of FLAGS have no value there."""
_ENGINES = {"DEEPSPEED": "ACCELERATE_USE_DEEPSPEED", "FSDP": "ACCELERATE_USE_FSDP"}


@dataclass(frozen=True)
class Launch:
    """What a recipe says of its launch; all unset where it says nothing."""

    config: Path | None = None
    processes: int | None = None
    options: tuple[str, ...] = field(default=())
    """Further words for `accelerate launch`."""

    def __bool__(self) -> bool:
        """Whether it asks for anything."""
        return self != Launch()

    @property
    def planned(self) -> int | None:
        """Processes of the whole launch, from the recipe or from its launch configuration."""
        asked = self.processes or (read_yaml(self.config).get("num_processes") if self.config else None)
        return None if asked is None else int(asked)


def launch_of(argv: Sequence[str]) -> Launch:
    """What the recipe of a command line says of its launch.

    Raises:
        ConfigError: the recipe cannot be read, or what it says is wrong.
    """
    name, _ = split_config(argv)
    problems: list[str] = []
    launch = take_launch(read_yaml(find_recipe(name)), problems) if name else Launch()
    if problems:
        raise ConfigError(problems)
    return launch


def take_launch(values: dict[str, Any], problems: list[str]) -> Launch:
    """The launch of a recipe, whose keys are removed from `values`; what is wrong is added to `problems`."""
    name, processes = values.pop("accelerate_config", None), values.pop("num_processes", None)
    config = None
    if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
        problems.append(f"num_processes={processes!r}: not a number of processes. Give 1 or more.")
        processes = None
    if name is not None:
        try:
            config = accelerate_config(name)
        except ConfigError as error:
            problems += map(str, error.problems)
    return Launch(config, processes, tuple(_options(values, problems)))


def _options(values: dict[str, Any], problems: list[str]) -> Iterator[str]:
    for key in [key for key in values if key in (*VALUES, *FLAGS)]:
        value = values.pop(key)
        if key in PATHS:
            problems += map(str, unknown(key, value))
            value = expand(key, value)
        if key in FLAGS and isinstance(value, bool):
            yield from [f"--{key}"] if value else []
        elif key in FLAGS:
            problems.append(f"{key}={value!r}: true or false is expected. Write one.")
        elif isinstance(value, (str, int)):
            yield from (f"--{key}", str(value).lower() if isinstance(value, bool) else str(value))
        elif value is not None:
            problems.append(f"{key}={value!r}: text or a number is expected. Write one.")


def accelerate_config(name: Any) -> Path:
    """A file, or the packaged (else TRL's) launch configuration of that name.

    Raises:
        ConfigError: neither; the message names the closest ones.
    """
    if problems := list(unknown("accelerate_config", name)):
        raise ConfigError(problems)
    name = expand("accelerate_config", name)
    if isinstance(name, (str, Path)) and Path(name).is_file():
        return Path(name)
    folders = [recipes_folder() / "accelerate_configs", Path(str(files("trl"))) / "accelerate_configs"]
    shipped = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if name not in shipped:
        hint = did_you_mean(str(name), shipped)
        raise ConfigError([f"accelerate_config={str(name)!r}: neither a file nor a shipped configuration. {hint}"])
    return shipped[name]


def check_launched(launch: Launch) -> None:
    """Refuse a launch other than the recipe's: by `accelerate launch`, torchrun or plain `python -m grpo_ext.train`.

    Raises:
        ConfigError: another number of processes, another engine, or options that nobody has handed on.
    """
    if EXIT_CODE_FILE in os.environ:  # `grpo-ext train` has launched, by the recipe and the command line
        return
    problems = []
    if launch.planned not in (None, world_size()) and ASKED not in os.environ:
        problems.append(
            f"num_processes={launch.planned} in the recipe: this launch has {world_size()}, and would train another "
            f"batch. Launch it by `grpo-ext train`, which reads the recipe, start {launch.planned}, or remove the key."
        )
    engine = read_yaml(launch.config).get("distributed_type") if launch.config else None
    if engine in _ENGINES and os.environ.get(_ENGINES[engine]) != "true":
        problems.append(
            f"accelerate_config={launch.config} in the recipe: this launch has no {engine}. Launch it by `grpo-ext "
            "train`, "
            "or by accelerate launch --config_file with that file, or remove the key."
        )
    if launch.options:
        problems.append(
            f"{' '.join(launch.options)} in the recipe: options of accelerate launch, which this launch has not been "
            "asked for. Launch it by `grpo-ext train`, or give them to accelerate launch and remove the keys."
        )
    if problems:
        raise ConfigError(problems)
