"""`grpo-ext train`: a recipe, in this process or by accelerate."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from grpo_ext.commands.console import take_option, take_processes
from grpo_ext.errors import ConfigError
from grpo_ext.recipe.files import find_recipe, read_yaml, split_config
from grpo_ext.recipe.launching import accelerate_config, launch_of
from grpo_ext.trainer.signals import SIGNALS, signals


def run(argv: list[str]) -> int:
    """In this process, or by accelerate where the command line or the recipe says how; the command line wins."""
    if "--help-all" in argv:
        from grpo_ext.recipe.help import print_help

        print_help()
        return 0
    try:
        name, processes = take_option(argv, "--accelerate_config"), take_processes(argv)
        said = launch_of(argv)
        if name is None and processes is None and not said:
            _here(argv)
            return 0
        processes = processes or said.processes
        config = accelerate_config(name) if name else said.config or default_config(processes or 1, argv)
        return launch(config, processes, argv, said.options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _here(argv: list[str]) -> None:
    watching = signals.watch()  # before what takes seconds to import
    try:
        from grpo_ext.train import main as train_main

        train_main(argv)
    finally:
        if watching:
            signals.stop_watching()


def launch(
    config: Path | None,
    processes: int | None,
    argv: list[str],
    options: Sequence[str] = (),
    module: str = "grpo_ext.train",
) -> int:
    """Run a module, that which trains, by accelerate; each process checks that as many came as were asked for.

    Raises:
        ConfigError: FSDP on a CPU, which each of the processes would refuse.
    """
    from grpo_ext.config.engines import fsdp_on_cpu
    from grpo_ext.config.launch import ASKED

    if config is not None and read_yaml(config).get("distributed_type") == "FSDP" and _on_cpu(argv):
        raise ConfigError([fsdp_on_cpu(f"accelerate_config={config.stem}")])
    command = [*accelerate_command(config, processes), *options]
    asked = processes or (read_yaml(config).get("num_processes") if config else None)
    environment = os.environ if asked is None else os.environ | {ASKED: str(asked)}
    return call([*command, "-m", module, *argv], environment)


def call(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a launcher to its end, in a session of its own; what ends us is handed on to the processes that train.

    The launcher itself gives those 30 seconds and not more, and answers 1 for whatever they end by.

    Returns:
        The exit code by which the processes say that they end, else the launcher's.
    """
    from grpo_ext.config.launch import COMMAND, EXIT_CODE_FILE
    from grpo_ext.rewards.workers.child import remove_stale_folders

    with tempfile.TemporaryDirectory(prefix="grpo_ext_launch_") as folder:
        said = Path(folder) / "exit_code"
        environment = {**environment, EXIT_CODE_FILE: str(said), COMMAND: str(os.getpid())}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # ignored: by nohup
        earlier = {number: signal.signal(number, partial(_hand_on, process)) for number in heeded}
        try:
            code = process.wait()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
            remove_stale_folders()  # by a process that was killed
        return int(said.read_text()) if code and said.exists() else code


def _hand_on(launcher: "subprocess.Popen[bytes]", number: int, _: object) -> None:
    import psutil

    training = []
    with suppress(psutil.Error):
        children = psutil.Process(launcher.pid).children()
        training = [child for child in children if "grpo_ext.train" in child.cmdline()]
    for process in training or [launcher]:
        with suppress(psutil.Error, ProcessLookupError):
            process.send_signal(number)


def accelerate_command(config: Path | None, processes: int | None) -> list[str]:
    """`accelerate launch` with a launch configuration, or accelerate's own, and a number of processes, or its own."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += [] if config is None else ["--config_file", str(config)]
    return command + ([] if processes is None else ["--num_processes", str(processes)])


def default_config(processes: int, argv: list[str]) -> Path | None:
    """`cpu_ddp` for several processes on a CPU, where accelerate would start one; else None: accelerate's own."""
    from accelerate.commands.config.config_args import default_config_file

    if processes == 1 or Path(default_config_file).is_file():
        return None
    return accelerate_config("cpu_ddp") if _on_cpu(argv) else None


def _on_cpu(argv: Sequence[str]) -> bool:
    import torch

    recipe, _ = split_config(argv)
    asked = recipe is not None and read_yaml(find_recipe(recipe)).get("use_cpu")
    return bool(asked) or not torch.accelerator.is_available()
