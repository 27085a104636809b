"""The launch that a recipe asks for by TRL's keys and `accelerate launch`'s, and the variables that its `env` sets."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_ext.config.launch import ASKED, EXIT_CODE_FILE, world_size
from grpo_ext.config.paths import PATHS, expand, unknown
from grpo_ext.config.spec import kind
from grpo_ext.errors import ABSENT, ConfigError, Problem
from grpo_ext.recipe.files import find_recipe, read_yaml, recipes_folder, split_config
from grpo_ext.registry import did_you_mean
from grpo_ext.safe_reading import read_json

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
    """The launch that a recipe asks for; all fields are unset if it asks for none.

    Args:
        config: file of `accelerate launch --config_file`.
        processes: their number.
        options: further words for `accelerate launch`.
    """

    config: Path | None = None
    processes: int | None = None
    options: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether any field is set."""
        return self != Launch()

    @property
    def planned(self) -> int | None:
        """Processes of the whole launch, from the recipe or from its launch configuration."""
        processes = self.processes or (read_yaml(self.config).get("num_processes") if self.config else None)
        return None if processes is None else int(processes)


def launch_of(argv: Sequence[str]) -> Launch:
    """Return the launch that the recipe of a command line asks for.

    Raises:
        ConfigError: the recipe cannot be read, or its keys of the launch are wrong.
    """
    name, _ = split_config(argv)
    problems: list[Problem] = []
    values = read_yaml(find_recipe(name)) if name else {}
    os.environ.update(take_env(values, []))  # `load_recipe` reports what is wrong with it
    launch = take_launch(values, problems)
    if problems:
        raise ConfigError(problems)
    return launch


def take_launch(values: dict[str, Any], problems: list[Problem]) -> Launch:
    """Remove the keys of the launch from `values` and return it; add what is wrong to `problems`."""
    name, processes = values.pop("accelerate_config", None), values.pop("num_processes", None)
    config = None
    if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
        problems.append(Problem("num_processes", processes, "not a number of processes", "Give 1 or more."))
        processes = None
    if name is not None:
        try:
            config = accelerate_config(name)
        except ConfigError as error:
            problems += error.problems
    return Launch(config, processes, tuple(_options(values, problems)))


def _options(values: dict[str, Any], problems: list[Problem]) -> Iterator[str]:
    for key in [key for key in values if key in (*VALUES, *FLAGS)]:
        value = values.pop(key)
        if key in PATHS:
            problems += unknown(key, value)
            value = expand(key, value)
        if key in FLAGS and isinstance(value, bool):
            yield from [f"--{key}"] if value else []
        elif key not in FLAGS and isinstance(value, str | int):
            yield from (f"--{key}", str(value).lower() if isinstance(value, bool) else str(value))
        elif key in FLAGS or value is not None:
            kinds = "true or false" if key in FLAGS else "text or a number"
            problems.append(Problem(key, value, f"{kinds} is expected", "Write one."))


def accelerate_config(name: object) -> Path:
    """Return a file, or the packaged (else TRL's) launch configuration of that name.

    Raises:
        ConfigError: neither exists; the message names the closest ones.
    """
    if problems := list(unknown("accelerate_config", name)):
        raise ConfigError(problems)
    name = str(expand("accelerate_config", name))
    if Path(name).is_file():
        return Path(name)
    folders = [recipes_folder() / "accelerate_configs", Path(str(files("trl"))) / "accelerate_configs"]
    shipped = {path.stem: path for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if name not in shipped:
        reason = "neither a file nor a shipped configuration"
        raise ConfigError([Problem("accelerate_config", name, reason, did_you_mean(name, shipped))])
    return shipped[name]


# What the launch spreads over its processes.

_SPLIT: dict[int, tuple[str, ...]] = {
    1: ("Adam",),
    2: ("gradients", "Adam"),
    3: ("weights", "gradients", "Adam", "reference", "teachers"),
}
"""By stage of ZeRO, the parts of memory that are shared out among processes."""


@dataclass(frozen=True)
class Engine:
    """The engine of a launch.

    Args:
        name: empty for plain data parallelism, or one process.
        split: parts of memory that are shared out among processes.
        hosted: those of them that are kept in main memory.
    """

    name: str = ""
    split: tuple[str, ...] = ()
    hosted: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return its name and what it splits."""
        hosted = f"; in main memory: {', '.join(self.hosted)}" if self.hosted else ""
        return f"{self.name}: each process has its share of {', '.join(self.split) or 'nothing'}{hosted}"


ONE_COPY = Engine()
"""Each process has a whole copy of the model."""


def engine_of(launch: Launch) -> Engine:
    """Return the engine that shards a model, by the launch's configuration and its options, which win."""
    config, options = read_yaml(launch.config) if launch.config else {}, launch.options
    kind = config.get("distributed_type")
    if kind == "FSDP" or "--use_fsdp" in options:
        fsdp = config.get("fsdp_config") or {}
        split = _SPLIT[2 if fsdp.get("fsdp_reshard_after_forward") is False else 3]
        return Engine("FSDP2", split, split if fsdp.get("fsdp_offload_params") else ())
    if kind != "DEEPSPEED" and "--use_deepspeed" not in options:
        return ONE_COPY
    of_options = {name.removeprefix("--"): value for name, value in pairwise(options)}
    zero = (config.get("deepspeed_config") or {}) | of_options
    if file := zero.get("deepspeed_config_file"):
        zero = _of_deepspeed_file(Path(str(expand("deepspeed_config_file", file)))) | of_options
    stage = int(zero.get("zero_stage", 2))  # accelerate's default
    places = {"Adam": "offload_optimizer_device", "weights": "offload_param_device"}
    hosted = (part for part, key in places.items() if zero.get(key) not in (None, "none"))
    split = _SPLIT.get(stage, ())
    return Engine(f"DeepSpeed ZeRO-{stage}", split, tuple(part for part in hosted if part in split))


def _of_deepspeed_file(path: Path) -> dict[str, Any]:
    """Return the keys of accelerate for a configuration of DeepSpeed; none if it cannot be read."""
    try:
        zero = read_json(path)["zero_optimization"]
        hosts = {part: (zero.get(f"offload_{part}") or {}).get("device") for part in ("optimizer", "param")}
        return {"zero_stage": zero["stage"]} | {f"offload_{part}_device": host for part, host in hosts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the launch reports it
        return {"zero_stage": 0}


def check_launched(launch: Launch) -> None:
    """Refuse a launch other than the recipe's: by `accelerate launch`, torchrun or plain `python -m grpo_ext.train`.

    Raises:
        ConfigError: another number of processes, another engine, or options that this launch does not have.
    """
    if EXIT_CODE_FILE in os.environ:  # `grpo-ext train` has launched, by the recipe and the command line
        return
    problems = []
    cure = "Launch it by `grpo-ext train`, which reads the recipe, or"
    if launch.planned not in (None, world_size()) and ASKED not in os.environ:
        reason = f"the recipe asks for these, and this launch has {world_size()}: it would train another batch"
        start = f"{cure} start {launch.planned}, or remove the key."
        problems.append(Problem("num_processes", launch.planned, reason, start))
    engine = read_yaml(launch.config).get("distributed_type") if launch.config else None
    if engine in _ENGINES and os.environ.get(_ENGINES[engine]) != "true":
        reason = f"the recipe asks for {engine}, which this launch does not have"
        start = f"{cure} by accelerate launch --config_file with that file, or remove the key."
        problems.append(Problem("accelerate_config", str(launch.config), reason, start))
    if launch.options:
        reason = "the recipe has these options of accelerate launch, which this launch does not have"
        start = f"{cure} give them to accelerate launch and remove the keys."
        problems.append(Problem(" ".join(launch.options), ABSENT, reason, start))
    if problems:
        raise ConfigError(problems)


# Environment variables that a recipe can still set when it is read.

_READ_AT_START = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "PYTHON", "LD_", "OMP_", "MKL_", "XDG_CACHE_HOME")
"""Python, the loader, OpenMP and the Hugging Face libraries read these before any recipe is read."""
_READ_LATER = ("HF_TOKEN",)
_PATHS = ("_DIR", "_HOME", "_PATH", "_FILE", "_CACHE", "_ROOT")
"""Endings of variables that hold a path."""


def take_env(values: dict[str, Any], problems: list[Problem]) -> dict[str, str]:
    """Remove `env` from `values` and return its variables; add what is wrong with it to `problems`."""
    env = values.pop("env", None) or {}
    if not isinstance(env, Mapping):
        problems.append(Problem("env", env, "not a mapping", "Write env: {NAME: value}."))
        return {}
    env_problems = [problem for name, value in env.items() for problem in _problems(name, value)]
    problems += env_problems
    return {} if env_problems else {name: str(_expanded(name, value)) for name, value in env.items()}


def _expanded(name: str, value: object) -> object:
    """Return the value of a variable that is a path by its name, such as TENSORBOARD_LOGGING_DIR, expanded."""
    return expand(name, value) if name.endswith(_PATHS) else value


def _problems(name: object, value: object) -> Iterator[Problem]:
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        yield Problem(f"env.{name!r}", value, "not the name of a variable", "Write env: {NAME: value}.")
    elif not isinstance(value, str | int | float) or "\0" in str(value):
        reason = f"{kind(value)} where text or a number is expected"
        cure = "Write it in quotes; to unset a variable, do so before the start."
        yield Problem(f"env.{name}", value, reason, cure)
    elif name.endswith(_PATHS) and (missing := list(unknown(name, value, f"env.{name}"))):
        yield from missing
    elif os.environ.get(name) != str(_expanded(name, value)) and _is_too_late(name):
        reason = f"{name} has been read before the recipe is, so that this would be ignored"
        cure = f"Export it before the start: {name}={value} grpo-ext train ..."
        yield Problem(f"env.{name}", value, reason, cure)


def _is_too_late(name: str) -> bool:
    if name == "CUDA_VISIBLE_DEVICES":
        import torch  # here, because commands that launch import this module

        return torch.cuda.is_initialized()
    return name.startswith(_READ_AT_START) and name not in _READ_LATER
