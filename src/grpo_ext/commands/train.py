"""`grpo-ext train`: train a recipe, in this process or by accelerate, which starts the processes of `eval` too."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from grpo_ext.errors import ConfigError, Problem
from grpo_ext.recipe.files import find_recipe, read_yaml, split_config
from grpo_ext.recipe.launching import Launch, accelerate_config, launch_of
from grpo_ext.trainer.signals import SIGNALS, signals


def run(options: argparse.Namespace) -> int:
    """Train by accelerate if the command line or the recipe asks for a launch, else in this process."""
    if options.help_all:
        from grpo_ext.recipe.parts import print_help

        print_help()
        return 0
    wanted = wanted_launch(options)
    if wanted is not None:
        return launch(wanted, options.keys)
    watching = signals.watch()  # before imports that take seconds
    try:
        from grpo_ext.train import main as train_main

        train_main(options.keys)
    finally:
        if watching:
            signals.stop_watching()
    return 0


def wanted_launch(options: argparse.Namespace) -> Launch | None:
    """Return the launch that a command asks for; None for this process. The command line overrides the recipe."""
    name, num_processes = options.accelerate_config, options.num_processes
    try:
        recipe = launch_of(options.keys)
        config = None if name == "null" else accelerate_config(name) if name else recipe.config
    except ConfigError as error:
        raise ConfigError(_with_the_recipes(error.problems, options.keys)) from None
    if name is None and num_processes is None and not recipe:
        return None
    processes = recipe.processes if num_processes is None else num_processes or None
    return Launch(config or _default_config(processes or 1, options.keys), processes, recipe.options)


_OF_A_SIZE = ("num_generations", "generation_batch_size", "steps_per_generation", "per_device_eval_batch_size")


def _with_the_recipes(problems: list[Problem], keys: Sequence[str]) -> list[Problem]:
    """Return the problems of a launch with those of its recipe, but for sizes that depend on its processes."""
    from grpo_ext.config.launch import planned_processes
    from grpo_ext.recipe.parsing import load_recipe

    try:
        with planned_processes(None):
            load_recipe(keys)
    except ConfigError as error:
        problems = [*problems, *(problem for problem in error.problems if problem.field not in _OF_A_SIZE)]
    return list({str(problem): problem for problem in problems}.values())


def _default_config(processes: int, keys: Sequence[str]) -> Path | None:
    """Return `cpu_ddp` for several processes on a CPU, where accelerate would start only one; None: accelerate's."""
    from accelerate.commands.config.config_args import default_config_file

    if processes == 1 or Path(default_config_file).is_file():
        return None
    return accelerate_config("cpu_ddp") if _on_cpu(keys) else None


def _on_cpu(keys: Sequence[str]) -> bool:
    import torch

    recipe, _ = split_config(keys)
    use_cpu = recipe is not None and read_yaml(find_recipe(recipe)).get("use_cpu")
    return bool(use_cpu) or not torch.accelerator.is_available()


def launch(wanted: Launch, arguments: Sequence[str], module: str = "grpo_ext.train") -> int:
    """Run a module by accelerate and return its exit code; each process checks that the launch is complete.

    Raises:
        ConfigError: FSDP on a CPU, which each process would refuse.
    """
    from grpo_ext.config.engines import fsdp_on_cpu
    from grpo_ext.config.launch import ASKED

    if wanted.config and is_fsdp(wanted.config) and _on_cpu(arguments):
        raise ConfigError([fsdp_on_cpu(f"accelerate_config={wanted.config.stem}")])
    environment = os.environ if wanted.planned is None else os.environ | {ASKED: str(wanted.planned)}
    return call([*accelerate_command(wanted), "-m", module, *arguments], environment)


def is_fsdp(config: Path) -> bool:
    """Return whether a launch configuration of accelerate shards by FSDP."""
    return bool(read_yaml(config).get("distributed_type") == "FSDP")


def accelerate_command(wanted: Launch) -> list[str]:
    """Return the `accelerate launch` command of a launch; what it leaves unset is accelerate's default."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += [] if wanted.config is None else ["--config_file", str(wanted.config)]
    command += [] if wanted.processes is None else ["--num_processes", str(wanted.processes)]
    return [*command, *wanted.options]


def call(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a launcher in its own session, and forward signals to the processes that train.

    The launcher itself would give them only 30 seconds, and exits with 1 for any of their exit codes.

    Returns:
        The exit code that the training processes wrote down, else the launcher's.
    """
    from grpo_ext.child_processes import remove_stale_folders
    from grpo_ext.config.launch import COMMAND, EXIT_CODE_FILE

    with tempfile.TemporaryDirectory(prefix="grpo_ext_launch_") as folder:
        exit_code = Path(folder) / "exit_code"
        environment = {**environment, EXIT_CODE_FILE: str(exit_code), COMMAND: str(os.getpid())}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        forwarded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        earlier = {number: signal.signal(number, partial(_forward, process)) for number in forwarded}
        try:
            code = process.wait()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
            remove_stale_folders()  # files of processes that were killed
        return int(exit_code.read_text()) if code and exit_code.exists() else code


def _forward(launcher: "subprocess.Popen[bytes]", number: int, _: object) -> None:
    import psutil

    training = []
    with suppress(psutil.Error):
        children = psutil.Process(launcher.pid).children()
        training = [child for child in children if {"grpo_ext.train", "grpo_ext.commands.eval"} & {*child.cmdline()}]
    for process in training or [launcher]:
        with suppress(psutil.Error, ProcessLookupError):
            process.send_signal(number)
